"""A checker of small programs against the memory model of PTX.

Programs are litmus tests in the notation of herd and Dartagnan, without branches and atomics:

    PTX message passing
    { x=0; y=0; }
     P0@cta 0,gpu 0      | P1@cta 1,gpu 0        ;
     st.weak x, 1        | ld.acquire.sys r0, y  ;
     st.release.sys y, 1 | ld.weak r1, x         ;
    ~exists (P1:r0 == 1 /\\ P1:r1 == 0)

Every execution is tried: each load takes the value of any store to its location. What the axioms
of the PTX ISA ("Memory Consistency Model", generic addresses) do not forbid is allowed. A barrier
is `bar.cta.sync N` with another N each time; all threads of a block that have the N take part.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Pairs = set[tuple[int, int]]
Registers = dict[str, int]
STRONG = ("relaxed", "acquire", "release", "acq_rel")
INIT = -1  # the thread of the stores that make the locations' first values


@dataclass(frozen=True)
class Event:
    """One instruction of a thread: kind is "R", "W", "F" (fence) or "B" (barrier)."""

    idx: int
    thread: int
    kind: str
    place: str = ""  # a location, or the number of a barrier
    order: str = "weak"
    scope: str = ""
    operand: str = ""  # the register that a load fills; a store's register or number


@dataclass(frozen=True)
class Program:
    """Events in program order, where each thread is, and the outcome that is asked about."""

    events: tuple[Event, ...]
    blocks: tuple[tuple[int, int], ...]  # (block, GPU) of each thread
    is_forbidden: bool  # "~exists"
    outcome: tuple[tuple[str, int], ...]


def parse(text: str) -> Program:
    """Reads a litmus test. Raises ValueError for what this checker does not know."""
    found = re.search(r"\{(.*?)\}(.*?)(~?exists)\s*\((.*)\)\s*$", text, re.S)
    if found is None:
        raise ValueError("no { values }, threads and (~)exists ( outcome )")
    values, code, quantifier, outcome = found.groups()
    events: list[Event] = []
    for place, value in re.findall(r"(?<![:\w])(\w+)\s*=\s*(\d+)", values):
        events.append(Event(len(events), INIT, "W", place, operand=value))
    rows = [[cell.strip() for cell in row.split("|")] for row in code.split(";") if row.strip()]
    blocks = tuple(_block(cell) for cell in rows[0])
    for thread in range(len(blocks)):
        for cell in (row[thread] for row in rows[1:] if thread < len(row)):
            if cell:
                events.append(_event(len(events), thread, cell))
    terms = [
        re.fullmatch(r"\s*(P\d+:r\d+)\s*==?\s*(\d+)\s*", term) for term in outcome.split("/\\")
    ]
    if not all(terms):
        raise ValueError(f"an outcome is P0:r0 == 1 /\\ ..., got {outcome}")
    wanted = tuple((term[1], int(term[2])) for term in terms if term)
    return Program(tuple(events), blocks, quantifier == "~exists", wanted)


def _block(cell: str) -> tuple[int, int]:
    found = re.fullmatch(r"P\d+\s*@\s*cta (\d+)\s*,\s*gpu (\d+)", cell)
    if found is None:
        raise ValueError(f"a thread is P0@cta 0,gpu 0, got {cell}")
    return int(found[1]), int(found[2])


def _event(idx: int, thread: int, cell: str) -> Event:
    order = r"(weak|relaxed|acquire|release|acq_rel)(?:\.(cta|gpu|sys))?"
    if found := re.fullmatch(rf"ld\.{order} (r\d+), (\w+)", cell):
        return Event(idx, thread, "R", found[4], found[1], found[2] or "", found[3])
    if found := re.fullmatch(rf"st\.{order} (\w+), (\w+)", cell):
        return Event(idx, thread, "W", found[3], found[1], found[2] or "", found[4])
    if found := re.fullmatch(r"fence\.(acq_rel)\.(cta|gpu|sys)", cell):
        return Event(idx, thread, "F", "", found[1], found[2])
    if found := re.fullmatch(r"bar\.cta\.sync (\d+)", cell):
        return Event(idx, thread, "B", found[1])
    raise ValueError(f"this checker does not know {cell}")


# ---- relations


def _join(first: Pairs, second: Pairs) -> Pairs:
    after: dict[int, list[int]] = {}
    for a, b in second:
        after.setdefault(a, []).append(b)
    return {(a, c) for a, b in first for c in after.get(b, ())}


def _closure(pairs: Pairs) -> Pairs:
    closed = set(pairs)
    while more := _join(closed, closed) - closed:
        closed |= more
    return closed


def _is_acyclic(pairs: Pairs) -> bool:
    return all(a != b for a, b in _closure(pairs))


class Model:
    """What is the same in all executions of a program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        events = self.events = program.events
        pairs = [(a, b) for a in events for b in events if a.idx != b.idx]
        self.reads = [e for e in events if e.kind == "R"]
        self.writes = [e for e in events if e.kind == "W"]
        own = [(a, b) for a, b in pairs if a.thread == b.thread != INIT and a.idx < b.idx]
        self.program_order = {(a.idx, b.idx) for a, b in own}
        self.same_place = {
            (a.idx, b.idx)
            for a, b in pairs
            if a.place == b.place and {a.kind, b.kind} <= {"R", "W"}
        }
        self.own_place = self.program_order & self.same_place
        self.strong = {(a.idx, b.idx) for a, b in pairs if self._is_morally_strong(a, b)}
        self.barriers = {
            (a.idx, b.idx)
            for a, b in pairs
            if a.kind == b.kind == "B" and a.place == b.place and self._block(a) == self._block(b)
        }
        # A strong load is the condition of a loop that waits, so later stores depend on it.
        self.dependencies = {
            (a.idx, b.idx)
            for a, b in own
            if a.kind == "R" and b.kind == "W" and (a.order in STRONG or a.operand == b.operand)
        }
        self.releases = [
            (a.idx, b.idx)
            for a, b in [*own, *((w, w) for w in self.writes)]
            if b.kind == "W" and b.order in STRONG
            if a.order in ("release", "acq_rel") and (a is b or a.kind == "F" or a.place == b.place)
        ]
        self.acquires = [
            (a.idx, b.idx)
            for a, b in [*own, *((r, r) for r in self.reads)]
            if a.kind == "R" and a.order in STRONG
            if b.order in ("acquire", "acq_rel") and (a is b or b.kind == "F" or a.place == b.place)
        ]

    def _block(self, event: Event) -> tuple[int, int]:
        return self.program.blocks[event.thread]

    def _includes(self, a: Event, b: Event) -> bool:
        """Whether the scope of `a` has the thread of `b`."""
        if a.scope == "sys":
            return True
        (block, gpu), (other_block, other_gpu) = self._block(a), self._block(b)
        return gpu == other_gpu and (a.scope == "gpu" or block == other_block)

    def _is_morally_strong(self, a: Event, b: Event) -> bool:
        if INIT in (a.thread, b.thread) or "B" in (a.kind, b.kind):
            return False
        if "F" not in (a.kind, b.kind) and a.place != b.place:
            return False
        if a.thread == b.thread:
            return True
        is_strong = a.order in STRONG and b.order in STRONG
        return is_strong and self._includes(a, b) and self._includes(b, a)

    # ---- executions

    def outcomes(self) -> Iterator[Registers]:
        """The registers at the end of every execution that is allowed."""
        sources = [[w.idx for w in self.writes if w.place == r.place] for r in self.reads]
        for chosen in itertools.product(*sources):
            reads_from = {(w, r.idx) for w, r in zip(chosen, self.reads, strict=True)}
            if not _is_acyclic(reads_from | self.dependencies):
                continue  # no thin air
            if self._is_consistent(reads_from):
                yield self._registers({r: w for w, r in reads_from})

    def _registers(self, source_of: dict[int, int]) -> Registers:
        def value_of(write: int) -> int:
            event = self.events[write]
            if event.operand.isdigit():
                return int(event.operand)
            filled = [
                r for r in self.reads
                if (r.idx, write) in self.program_order and r.operand == event.operand
            ]  # fmt: skip
            return value_of(source_of[filled[-1].idx]) if filled else 0

        return {f"P{r.thread}:{r.operand}": value_of(source_of[r.idx]) for r in self.reads}

    def _is_consistent(self, reads_from: Pairs) -> bool:
        observed = reads_from & self.strong
        synchronizes = {
            (first, last)
            for first, store in self.releases
            for load, last in self.acquires
            if (store, load) in observed and (first, last) in self.strong
        }
        step = synchronizes | self.barriers
        step |= _join(self.program_order, step)
        step |= _join(step, self.program_order)
        base = _closure(step)
        cause = base | _join(observed, base | self.own_place)
        return any(
            self._fits(reads_from, cause, coherence) for coherence in self._coherences(cause)
        )

    def _coherences(self, cause: Pairs) -> Iterable[Pairs]:
        """Orders of the stores to each location: no more than the axiom of coherence asks for."""
        writes = [w.idx for w in self.writes]
        must = {(a, b) for a in writes for b in writes if (a, b) in cause & self.same_place}
        must |= {
            (w.idx, b) for w in self.writes if w.thread == INIT for b in writes
            if (w.idx, b) in self.same_place
        }  # fmt: skip
        free = [(a, b) for a in writes for b in writes if a < b and (a, b) in self.strong]
        for turned in itertools.product((False, True), repeat=len(free)):
            chosen = {(b, a) if turn else (a, b) for (a, b), turn in zip(free, turned, strict=True)}
            yield _closure(must | chosen)

    def _fits(self, reads_from: Pairs, cause: Pairs, coherence: Pairs) -> bool:
        if any(a == b for a, b in coherence):
            return False
        from_reads = _join({(r, w) for w, r in reads_from}, coherence)
        told = reads_from | from_reads
        if any((b, a) in cause for a, b in told):
            return False  # causality
        return _is_acyclic(((told | coherence) & self.strong) | self.own_place)


def is_allowed(text: str) -> bool:
    """Whether the outcome that a litmus test asks about can come of it."""
    program = parse(text)
    return any(
        all(registers[name] == value for name, value in program.outcome)
        for registers in Model(program).outcomes()
    )
