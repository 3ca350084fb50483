"""The loops of a kernel that move vectors, in a disassembly by nvdisasm.

A loop is a natural one: a branch back to an instruction that every way to the branch passes, and
all that lies between them. Only loops with accesses of 16 bytes are told; what stands in a loop
inside that has some of its own is counted there alone.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?(\S.*?)\s*;")
TARGET = re.compile(r"`\((\.L_x_\d+)\)")


@dataclasses.dataclass(frozen=True, order=True)
class Loop:
    """What one turn of a loop has at most, all its ways taken.

    `at_once` are the 16-byte loads from global memory that are issued before one of them is used,
    `loads` and `stores` all of these; `shared` the accesses of shared memory, `to_uniform` moves
    into uniform registers, `barriers` of the block and of warps, `fences` of memory.
    """

    at_once: int = 0
    loads: int = 0
    stores: int = 0
    instructions: int = 0
    shared: int = 0
    to_uniform: int = 0
    barriers: int = 0
    fences: int = 0

    def text(self) -> str:
        """A row of the table."""
        return " ".join(f"{number:>{len(n) + 1}}" for n, number in self.named())

    @staticmethod
    def parse(text: str) -> Loop:
        """The other way."""
        return Loop(*(int(number) for number in text.split()))

    def named(self) -> list[tuple[str, int]]:
        """The numbers by their names."""
        return [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]

    def worse_than(self, before: Loop) -> list[str]:
        """Which numbers have grown, or shrunk of the loads at once."""
        return [
            f"{name} {was} -> {now}"
            for (name, now), (_, was) in zip(self.named(), before.named(), strict=True)
            if (now < was if name == "at_once" else now > was)
        ]


@dataclasses.dataclass
class Block:
    """Instructions that are run one after the other, and the blocks that may follow."""

    code: list[str] = dataclasses.field(default_factory=list)
    next: list[int] = dataclasses.field(default_factory=list)


def blocks_of(sass: str) -> list[Block]:
    """Of one function. The ways that BRA.DIV takes for parts of a warp are left out."""
    blocks = [Block()]
    label_of: dict[str, int] = {}
    ends: dict[
        int, tuple[str | None, bool]
    ] = {}  # where a block branches to; whether it also goes on
    for line in sass.splitlines():
        if match := re.match(r"(\.L_x_\d+):", line):
            if blocks[-1].code:
                blocks.append(Block())
            label_of[match.group(1)] = len(blocks) - 1
        if not (match := INSTRUCTION.search(line)):
            continue
        predicate, instruction = match.groups()
        blocks[-1].code.append(instruction)
        if re.match(r"(BRA(?!\.DIV)|BRX|EXIT|RET|BPT\.TRAP)", instruction):
            found = TARGET.search(instruction)
            goes_on = predicate is not None or re.match(r"BRA\S* !?U?P\d", instruction) is not None
            ends[len(blocks) - 1] = (found.group(1) if found else None, goes_on)
            blocks.append(Block())
    for i, block in enumerate(blocks):
        target, goes_on = ends.get(i, (None, True))
        if target is not None and target in label_of:
            block.next.append(label_of[target])
        if goes_on and i + 1 < len(blocks):
            block.next.append(i + 1)
    return blocks


def dominators(blocks: list[Block]) -> list[int]:
    """Of each block that is reached, the set of those on every way to it, as bits; else 0."""
    reached = [0]
    for i in reached:
        reached += [n for n in dict.fromkeys(blocks[i].next) if n not in reached]
    before: dict[int, list[int]] = {i: [] for i in reached}
    for i in reached:
        for n in blocks[i].next:
            before[n].append(i)
    every = (1 << len(blocks)) - 1
    found = [0] * len(blocks)
    for i in reached:
        found[i] = 1 if i == 0 else every
    changed = True
    while changed:
        changed = False
        for i in reached[1:]:
            common = every
            for earlier in before[i]:
                common &= found[earlier]
            changed |= found[i] != common | 1 << i
            found[i] = common | 1 << i
    return found


def natural_loops(blocks: list[Block]) -> list[set[int]]:
    """The blocks of every loop; those with one head are one."""
    dominated_by = dominators(blocks)
    before: dict[int, list[int]] = {i: [] for i in range(len(blocks))}
    for i, block in enumerate(blocks):
        for n in block.next if dominated_by[i] else ():
            before[n].append(i)
    loops: dict[int, set[int]] = {}
    for tail, block in enumerate(blocks):
        for head in block.next:
            if not dominated_by[tail] >> head & 1:
                continue
            body = loops.setdefault(head, {head})
            coming = [tail]
            while coming:
                if (i := coming.pop()) not in body:
                    body.add(i)
                    coming += before[i]
    return list(loops.values())


def is_vector(instruction: str) -> bool:
    """Whether it loads or stores 16 bytes."""
    return re.match(r"(LD|ST)[GS]?\.\S*128", instruction) is not None


def most_at_once(code: Iterable[str]) -> int:
    """The most 16-byte loads that are issued before one of them is used."""
    most = 0
    loaded: set[int] = set()
    under_way = 0
    for instruction in code:
        operation, _, operands = instruction.partition(" ")
        first, _, rest = operands.partition(",")
        read = operands if operation.startswith(("ST", "RED")) else rest
        if loaded & {int(number) for number in re.findall(r"\bR(\d+)", read)}:
            loaded, under_way = set(), 0
        is_load = operation.startswith("LDG") and ".128" in operation and "STRONG" not in operation
        if is_load and (match := re.match(r"R(\d+)", first)):
            loaded |= {int(match.group(1)) + word for word in range(4)}
            under_way += 1
            most = max(most, under_way)
    return most


def loop_of(code: list[str]) -> Loop:
    """The numbers of a loop's instructions."""

    def count(pattern: str) -> int:
        return sum(re.match(pattern, instruction) is not None for instruction in code)

    return Loop(
        at_once=most_at_once(code),
        loads=count(r"LDG?\.\S*128"),
        stores=count(r"STG?\.\S*128"),
        instructions=len(code),
        shared=count(r"(LDS|STS|ATOMS)\b"),
        to_uniform=count(r"R2UR"),
        barriers=count(r"BAR\.|WARPSYNC|BRA\.DIV"),
        fences=count(r"MEMBAR"),
    )


def loops_of(sass: str) -> tuple[Loop, ...]:
    """Of one function, those with most loads at once first."""
    blocks = blocks_of(sass)
    hot = [
        body
        for body in natural_loops(blocks)
        if any(is_vector(instruction) for i in body for instruction in blocks[i].code)
    ]
    found = []
    for body in hot:
        inner = set().union(*(other for other in hot if other < body))
        own = [instruction for i in sorted(body - inner) for instruction in blocks[i].code]
        if any(map(is_vector, own)):
            found.append(loop_of(own))
    return tuple(sorted(found, reverse=True))
