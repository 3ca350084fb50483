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
TARGET = re.compile(r"(?:`\(|BRANCH_TARGETS |,)(\.L_x_\d+)")


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

    @property
    def kind(self) -> tuple[int, int, int]:
        """What does not depend on the architecture, of most loops."""
        return self.at_once, self.loads, self.stores

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
    # Where a block branches to, and whether it also goes on.
    ends: dict[int, tuple[list[str], bool]] = {}
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
            goes_on = predicate is not None or re.match(r"BRA\S* !?U?P\d", instruction) is not None
            ends[len(blocks) - 1] = (TARGET.findall(instruction), goes_on)
            blocks.append(Block())
    for i, block in enumerate(blocks):
        targets, goes_on = ends.get(i, ([], True))
        block.next += [label_of[target] for target in targets if target in label_of]
        if goes_on and i + 1 < len(blocks):
            block.next.append(i + 1)
    return blocks


def reached(start: int, following: list[list[int]], without: int = -1) -> set[int]:
    """The blocks on all ways from `start` that do not pass `without`."""
    found: set[int] = set()
    coming = [start]
    while coming:
        if (i := coming.pop()) not in found and i != without:
            found.add(i)
            coming += following[i]
    return found


def natural_loops(blocks: list[Block]) -> list[set[int]]:
    """The blocks of every loop; those with one head are one."""
    following = [block.next for block in blocks]
    before: list[list[int]] = [[] for _ in blocks]
    for i in reached(0, following):
        for n in following[i]:
            before[n].append(i)
    loops = []
    for head in range(len(blocks)):
        elsewhere = reached(0, following, without=head)
        tails = [i for i in before[head] if i not in elsewhere]  # every way to them passes the head
        if tails:
            loops.append({head}.union(*(reached(i, before, without=head) for i in tails)))
    return loops


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
