#!/usr/bin/env python3
"""Weakens each instruction that orders memory, in the PTX of the kernels, and demands a failure.

    mutants_memory.py TESTS PTX... [--seeds NUM] [--whole NUM] [--kernels PATTERN] [--only PATTERN]
                       [--jobs NUM] [--list] [--table FILE]

TESTS is the program of the C++ tests (tests/ptx/Makefile). Every executed access with an order,
fence and barrier of the kernels below gets each weaker form, one at a time, or two of which either
is enough: the memory is told which lines of the kernel's PTX to weaken (weak_memory.h), so
nothing is compiled. A mutant is found in a seed if a test fails, or does not end. Those of
REDUNDANT are known not to matter, with the reason; every other one must be found in one seed at
least.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import parse

IN_PLACE = ["memory: in place", "memory: move in place"]
MESSAGES = ["memory: exchange", "memory: shards"]
TESTS = {
    "ringcomm_one_shot_bfloat16": ["memory: one_shot"],
    "ringcomm_two_rounds_bfloat16": ["memory: two_rounds"],
    "ringcomm_reduce_packets_bfloat16": ["memory: reduce_packets"],
    "ringcomm_move_packets": ["memory: move_packets"],
    "ringcomm_open": IN_PLACE,
    "ringcomm_close": IN_PLACE,
    "ringcomm_reduce_bfloat16": IN_PLACE[:1],
    "ringcomm_move": IN_PLACE[1:],
    "ringcomm_ring_bfloat16": ["memory: ring"],
    "ringcomm_open_messages": MESSAGES,
    "ringcomm_copy_messages": MESSAGES,
    "ringcomm_close_messages": MESSAGES,
    "ringcomm_loss_rows_bfloat16": ["memory: loss_rows"],
}
TIMEOUT_S = {True: 60, False: 200}  # of a run with a mutant; a kernel's own is KERNEL_TIMEOUT_S
KERNEL_TIMEOUT_S = 4
NOT_VALID = 77  # the exit status of a run that showed nothing
TRIES_PER_SEED = 8

# What an instruction may become.
CHANGES = [
    (r"ld\.acquire\.sys\.global", ["relaxed", "gpu"]),
    (r"st\.release\.sys\.global", ["relaxed", "gpu"]),
    (r"(ld|st)\.volatile\.global", ["weak", "gpu"]),
    (r"(ld|st)\.relaxed\.sys\.global\.u64", ["weak"]),
    (r"bar\.sync|barrier\.sync", ["skip"]),
    (r"bar\.red|barrier\.red|bar\.warp\.sync", ["none"]),
    (r"fence\.", ["none"]),
    (r"barrier\.cluster\.(arrive\.release|wait\.acquire)", ["relaxed"]),
    (r"mbarrier\.try_wait\.parity\.acquire\.cluster", ["relaxed", "cta"]),
    (r"mbarrier\.(try_wait|arrive)", ["relaxed"]),
    (r"cp\.async\.bulk\.wait_group", ["none"]),
]

# Of "KERNEL OPCODE PLACE CHANGE", a regular expression: why no test can find it, or need not. These
# may be found all the same.
OWN = "this rank stored it, and the stream of its kernels or a barrier orders that"
STREAM = "the stream orders kernels; a claim detects programs in which it does not"
EARLIER = "only earlier kernels have stored what it publishes"
ENDED = "the loads of a kernel that has ended have had their values"
REDUNDANT = [
    (r"ld\.acquire\S* load_acquire < (Board|SendLink|RecvLink) ", OWN),
    (r"(open\w*|close|ring_\w+) \S+ sync < GpuBlock ", "more barriers come before others wait"),
    (r"m_(move|copy\w+|reduce_b?float\d+) \S+ sync < GpuBlock ", "it waits for nobody"),
    (r"unclaim |sync < end_claims? ", STREAM),
    (r"sync < agree ", "any word but zero says the same; a failed call has no result"),
    (
        r"bar\.red\S* agree < (run|compare|claim_all|rendezvous|open <|each < close <)",
        "the value is the barrier's; others order",
    ),
    (r"bar\.red\S* agree < (reduce|take)_all ", "it orders stores after loads that have ended"),
    (r"end_of_loads ", "it is for the assembler's order of loads"),
    (r"bar\.red\S* agree < each < .* < rejoin ", "the kernel ends, which joins what threads know"),
    (r"sync < store_seq_cst.* (publish < rejoin|advance < close) < close_\w+ ", EARLIER),
    (r"st\.release\S* .* < close_messages relaxed", ENDED),
    (r"ld\.acquire\S* .* < close_messages (relaxed|gpu)", ENDED),
    (
        r"ld\.acquire\S* load_acquire < (deal < look_at_channels .* relaxed|try_(acquire|wait) )",
        "look_at_channels() acquires for one thread, and the others by themselves, the same",
    ),
    (r"fence\.mbarrier_init", "barrier.cluster.arrive.release orders the same"),
    (r"barrier\.cluster\.arrive", "fence.mbarrier_init orders the same"),
    (r"mbarrier\.arrive", "who waits reads nothing that the arriving thread has stored"),
]
# Of these opcodes either orders enough: both are weakened at once, too.
EITHER = (r"fence\.mbarrier_init", r"barrier\.cluster\.arrive\.release")

# These order nothing (docs/design/gpu.md): what the host sees of a wait, and claims.
NO_ORDER = re.compile("record_wait|claim")
# Operations of links, and of packets in loops that nvcc unrolls. One change of such a function is a
# change wherever it was inlined.
LINK = r"advance < publish|advance < release|wait_at_least < wait(?:_drained)?"
AT_ONCE = re.compile(rf".*?(?:{LINK}|load_packet < await_all|put_packet < for_peers < keep)\b")


@dataclass(frozen=True)
class Site:
    kernel: str
    line: int
    opcode: str
    place: str  # the functions that it is in, the innermost first


@dataclass(frozen=True)
class Mutant:
    """A change of all `sites`: one instruction of the source, where it was inlined.

    Also that of `and_`, if that is not None.
    """

    sites: list[Site]
    change: str
    and_: Mutant | None = None

    @property
    def kernel(self) -> str:
        return self.sites[0].kernel

    @property
    def changes(self) -> str:
        """Each line of the kernel's PTX, and what it becomes."""
        own = ",".join(f"{site.line}={self.change}" for site in self.sites)
        return own if self.and_ is None else f"{own},{self.and_.changes}"

    @property
    def place(self) -> str:
        return function_of(self.sites[0]) if len(self.sites) > 1 else self.sites[0].place

    @property
    def name(self) -> str:
        kernel = self.kernel.removeprefix("ringcomm_")
        name = f"{kernel}: {self.sites[0].opcode} in {self.place}: {self.change}"
        return name if self.and_ is None else f"{name}, and {self.and_.name}"


def function_of(site: Site) -> str:
    """What is weakened at once: an operation, or else the site's own place."""
    operation = AT_ONCE.match(site.place)
    return operation[0] if operation else f"{site.place} {site.line}"


def mutants_of(sites: list[Site]) -> list[Mutant]:
    groups: dict[tuple[str, str, str], list[Site]] = {}
    for site in sites:
        groups.setdefault((site.kernel, site.opcode, function_of(site)), []).append(site)
    mutants = [
        Mutant(group, change) for group in groups.values() for change in changes_of(group[0].opcode)
    ]
    return mutants + [
        dataclasses.replace(first, and_=second)
        for first, second in itertools.product(mutants, repeat=2)
        if first.kernel == second.kernel
        and re.match(EITHER[0], first.sites[0].opcode)
        and re.match(EITHER[1], second.sites[0].opcode)
    ]


# ---- the instructions of a PTX file

# By place: the function that was inlined there, its label, and where.
Inlined = dict[tuple[str, ...], tuple[tuple[str, str], tuple[str, ...]]]


def demangled(names: list[str]) -> list[str]:
    done = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    )
    return [short_name(name) for name in done.stdout.splitlines()]


def short_name(name: str) -> str:
    """The name of a function without namespaces, template arguments and parameters."""
    depth, text = 0, ""
    for char in name.replace("operator()", "operator"):
        depth += char in "<({"
        if depth == 0:
            text += char
        depth -= char in ">)}"
    words = re.findall(r"[\w~]+", text.split(" const")[0])
    return words[-1] if words else name


def function_names(text: str) -> dict[str, str]:
    found = {}
    for label, data in re.findall(r"(\$L__info_string\d+):\s*((?:\.b8[^\n]*\n|\s*\n)+)", text):
        codes = [int(code) for code in re.findall(r"\d+", data.replace(".b8", ""))]
        found[label] = bytes(codes).split(b"\0")[0].decode()
    return dict(zip(found, demangled(list(found.values())), strict=True)) if found else {}


def sites_of(text: str) -> list[Site]:
    names = function_names(text)
    sites: list[Site] = []
    kernel = ""
    # As the translator counts lines.
    lines = {
        each.name: [s.line for s in each.statements if s.kind == "instruction" and ordered(s.text)]
        for each in parse.parse(text).kernels
    }
    # Where a place of the source was inlined, by file, line and column.
    inlined: Inlined = {}
    now: tuple[str, ...] = ()
    for line in text.split("\n"):
        if entry := re.search(r"\.entry\s+([\w$]+)", line):
            kernel = entry[1]
        if loc := re.match(
            r"\s*\.loc\s+(\d+)\s+(\d+)\s+(\d+)"
            r"(?:,\s*function_name\s+([$\w]+)(?:\s*\+\s*\d+)?,\s*inlined_at\s+(\d+)\s+(\d+)\s+(\d+))?",
            line,
        ):
            now = loc.groups()[:3]
            if loc[4]:
                inlined[now] = ((names.get(loc[4], ""), loc[4]), loc.groups()[4:])
            else:
                inlined.pop(now, None)
        for part in re.sub(r"//.*", "", line).split(";"):
            if opcode := ordered(part):
                sites.append(Site(kernel, lines[kernel].pop(0), opcode, chain(now, inlined)))
    return sites


def ordered(instruction: str) -> str:
    """The opcode, if it is one that CHANGES has."""
    opcode = re.match(r"\s*\{?\s*(?:@!?[%\w$]+\s+)?([\w.:]+)", instruction)
    if opcode and any(re.match(pattern, opcode[1]) for pattern, _ in CHANGES):
        return opcode[1]
    return ""


def chain(at: tuple[str, ...], inlined: Inlined) -> str:
    names: list[str] = []
    before = ""
    while at in inlined and len(names) < 20:
        (name, label), at = inlined[at]
        if name not in ("operator", "") and label != before:
            names.append(name)
            before = label
    return " < ".join(names)


def changes_of(opcode: str) -> list[str]:
    return next(changes for pattern, changes in CHANGES if re.match(pattern, opcode))


# ---- runs


def run(tests: str, case: str, seed: int, mutant: Mutant | None, **more: str) -> str:
    """What was seen: "" if the test passes."""
    environment = os.environ | more
    environment |= {"RINGCOMM_TEST_PTX_MEMORY": str(seed), "RINGCOMM_TEST_PTX_SEED": str(seed)}
    if mutant is not None:
        environment["RINGCOMM_TEST_PTX_MUTANT"] = f"{mutant.kernel}:{mutant.changes}"
        environment["RINGCOMM_TEST_PTX_TIMEOUT_S"] = str(KERNEL_TIMEOUT_S)
    try:
        done = subprocess.run(
            [tests, f"-tc={case}"], env=environment, capture_output=True, text=True,
            errors="replace", timeout=TIMEOUT_S[mutant is not None], check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "does not end"
    if done.returncode == NOT_VALID:
        return "not valid"
    return f"status {done.returncode}" if done.returncode != 0 else ""


def executed_lines(tests: str, kernel: str) -> set[int]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "lines")
        for case in TESTS[kernel]:
            if seen := run(tests, case, 1, None, RINGCOMM_TEST_PTX_LINES=str(file)):
                raise SystemExit(f"{case} without a mutant: {seen}")
        lines = [line.split() for line in file.read_text().splitlines()]
    return {int(line) for name, line in lines if name == kernel}


def num_found(tests: str, mutant: Mutant, num_seeds: int) -> tuple[int, int]:
    """In how many seeds a test failed, and in how many it showed anything.

    More seeds than `num_seeds` are tried if that one must be found, and has not been.
    """
    found = valid = 0
    for seed in range(1, TRIES_PER_SEED * num_seeds + 1):
        if valid >= num_seeds and (found or reason_of(mutant)):
            break
        seen = [run(tests, case, seed, mutant) for case in TESTS[mutant.kernel]]
        if all(each == "not valid" for each in seen):
            continue
        valid += 1
        found += any(each not in ("", "not valid") for each in seen)
    return found, valid


def fails(tests: str, case: str, num_seeds: int) -> bool:
    """Whether a test without a mutant fails in any seed; it must not."""
    failed = [seed for seed in range(1, num_seeds + 1) if run(tests, case, seed, None)]
    print(f"{case}: {num_seeds - len(failed)} of {num_seeds} seeds pass", flush=True)
    for seed in failed:
        print(f"  failed: RINGCOMM_TEST_PTX_MEMORY={seed} RINGCOMM_TEST_PTX_SEED={seed}")
    return bool(failed)


def reason_of(mutant: Mutant) -> str:
    if mutant.and_ is not None:
        return ""
    name = f"{mutant.kernel} {mutant.sites[0].opcode} {mutant.place} {mutant.change}"
    return next((why for pattern, why in REDUNDANT if re.search(pattern, name)), "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("tests")
    parser.add_argument("ptx", nargs="+", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--kernels", default="", help="a regular expression of their names")
    parser.add_argument("--only", default="", help="the same of the mutants' names")
    parser.add_argument("--whole", type=int, default=1, help="seeds without a mutant")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--table", type=Path, help="where to write what was found, as Markdown")
    options = parser.parse_args()
    sites = [site for path in options.ptx for site in sites_of(path.read_text())]
    wanted = [kernel for kernel in TESTS if re.search(options.kernels, kernel)]
    sites = [site for site in sites if site.kernel in wanted]
    executed = {
        kernel: executed_lines(options.tests, kernel) for kernel in {s.kernel for s in sites}
    }
    mutants = mutants_of(
        [s for s in sites if s.line in executed[s.kernel] and not NO_ORDER.match(s.place)]
    )
    mutants = [mutant for mutant in mutants if re.search(options.only, mutant.name)]
    if not mutants:
        parser.error("no mutant is selected")
    if options.list:
        for mutant in mutants:
            print(f"{mutant.changes}: {mutant.name}")
        return 0
    rows = []
    with ThreadPoolExecutor(options.jobs) as pool:
        cases = dict.fromkeys(case for kernel in wanted for case in TESTS[kernel])
        wrong = sum(pool.map(lambda case: fails(options.tests, case, options.whole), cases))
        results = pool.map(lambda each: num_found(options.tests, each, options.seeds), mutants)
        for mutant, (found, valid) in zip(mutants, results, strict=True):
            reason = reason_of(mutant)
            is_expected = found > 0 or bool(reason)
            wrong += not is_expected
            verdict = "" if is_expected else "  NOT EXPECTED"
            print(f"{mutant.changes}: {mutant.name}: {found} of {valid}{verdict}", flush=True)
            rows.append((mutant, found, valid, reason))
    if options.table:
        write_table(options.table, rows)
    print(f"{len(mutants)} mutants, {wrong} not as expected")
    return 1 if wrong else 0


def write_table(path: Path, rows: list[tuple[Mutant, int, int, str]]) -> None:
    lines = ["| kernel | instruction, in the function | becomes | found |", "|---|---|---|---|"]
    for mutant, found, valid, reason in rows:
        kernel = mutant.kernel.removeprefix("ringcomm_")
        place = " < ".join(mutant.place.split(" < ")[:5])
        opcode, change = mutant.sites[0].opcode, mutant.change
        if mutant.and_ is not None:
            opcode += f"` and `{mutant.and_.sites[0].opcode}"
            change += f" and {mutant.and_.change}"
        result = f"{found} of {valid}" if found else f"no: {reason or 'not found'}"
        lines.append(f"| {kernel} | `{opcode}`, {place} | {change} | {result} |")
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
