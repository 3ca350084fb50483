"""Features in pairs, and whole loops: a case equals one process, or is refused before it writes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pair_runs
import pytest
import torch
from pair_loops import LOOPS as LOOPS_OF_OTHERS
from pair_optimizers import SCHEDULERS, schedulers_of_torch
from pair_oracle import TOLERANCES
from pair_runs import Outcome
from pair_table import Case, Refused
from pair_tables import (
    BETWEEN,
    BY_HAND,
    LOMO,
    LOOPS,
    PROGRAM,
    TABLES,
    TOLERANCE,
    ZERO,
    section,
)
from ranks import run_ranks

# Schedulers that set more than the learning rate, or need more than the optimizer.
FEW = ["OneCycleLR", "ReduceLROnPlateau", "SequentialLR"]
SIXTEEN = {**LOMO.plain, "dtype": "bfloat16 weights"}
ALL = sorted(schedulers_of_torch() & SCHEDULERS.keys())


def cases_of(name: str) -> list[Any]:
    """Of a table; slow where earlier cases have each of the case's values or reasons to refuse."""
    table, found, seen = TABLES[name], [], set[tuple[str, str]]()
    refused = set[str]()
    for case in [*table.covering, *table.refusals]:
        others = {axis: value for axis, value in case.items() if value != table.plain[axis]}
        is_new = not seen >= case.items()
        if case in table.refusals:  # slow in whole loops if it has more than what is refused
            reasons = {str(reason) for reason in table.refusals_of(case)}
            is_plain = len(others) <= 2 and table is not PROGRAM
            is_new = is_new or ((is_plain or name not in LOOPS) and not refused >= reasons)
            refused |= reasons
        marks = [pytest.mark.slow] if not is_new or name == "Meshes of three axes" else []
        words = ", ".join(f"{axis}={value}" for axis, value in others.items())
        found.append(pytest.param(name, case, marks=marks, id=f"{name}: {words}"))
        seen |= case.items()
    return found


FEATURES = [case for name in TABLES if name not in LOOPS for case in cases_of(name)]
EQUAL = [each for each in FEATURES if TABLES[each.values[0]].allows(each.values[1])]
REFUSED = [each for each in FEATURES if each not in EQUAL]
WHOLE_LOOPS = [case for name in LOOPS for case in cases_of(name)]


def check(table: str, case: Case, folder: Path) -> None:
    if table in LOOPS or case.get("around") in LOOPS_OF_OTHERS:
        pytest.importorskip("transformers")
    if case.get("around") in LOOPS_OF_OTHERS:
        pytest.importorskip("accelerate")
    if case.get("wrapper") == "adapters":
        pytest.importorskip("peft")
    tables = [BETWEEN, TABLES[table]] if table in LOOPS else [TABLES[table]]
    if problem := pair_runs.problem_of(tables, case, folder):
        pytest.fail(problem, pytrace=False)


@pytest.mark.parametrize(("table", "case"), EQUAL)
def test_equals_one_process(table: str, case: Case, tmp_path: Path) -> None:
    check(table, case, tmp_path)


@pytest.mark.parametrize(("table", "case"), REFUSED)
def test_refuses(table: str, case: Case, tmp_path: Path) -> None:
    check(table, case, tmp_path)


@pytest.mark.parametrize(("table", "case"), WHOLE_LOOPS)
def test_whole_loops(table: str, case: Case, tmp_path: Path) -> None:
    check(table, case, tmp_path)


@pytest.mark.parametrize(
    "case",
    [
        *({**ZERO.plain, "dtype": dtype} for dtype in ZERO.axes["dtype"]),
        *({**SIXTEEN, "rounding": rounding} for rounding in LOMO.axes["rounding"]),
        {**SIXTEEN, "rounding": "stochastic", "optimizer": "AdaLomo"},
        {**BY_HAND.plain, "dtype": "bfloat16 weights"},
    ],
    ids=lambda case: ", ".join(case.get(a, "torch") for a in ("optimizer", "dtype", "rounding")),
)
def test_lost_rows_are_found(case: Case, tmp_path: Path) -> None:
    """In each precision: half of the rows of one rank."""
    num_ranks, lossy = pair_runs.world_size(case), {**case, "loses": "rows"}
    results = run_ranks(num_ranks, pair_runs.outcome, lossy, tmp_path, backend=None)
    found = pair_runs.differences(case, results)
    assert len(found) == num_ranks
    assert all("weights are off" in problem for problem in found)


@pytest.mark.parametrize("system", ["zero 1", "pipeline"])
def test_a_rank_that_reports_too_little_is_found(system: str) -> None:
    """Stages have all names together, other ranks each."""
    pytest.importorskip("transformers")
    case = {**BETWEEN.plain, "system": system, "between steps": "state_dict"}
    of_rank = [each for each in pair_runs.expected(case) for _ in range(2)][:2]
    halves = []
    for part, (seen, weights) in enumerate(of_rank):
        names = dict([*seen["state_dict()"].items()][part::2])
        data_rank = part if system == "zero 1" else 0
        some = seen | {"state_dict()": names}
        halves.append(Outcome(seen=some, weights=weights, data_rank=data_rank))
    found = pair_runs.differences(case, halves)
    assert ["lacks" in problem for problem in found] == [True] * (2 if system == "zero 1" else 0)
    halves[1].seen["state_dict()"].clear()
    assert any("lacks" in problem for problem in pair_runs.differences(case, halves))


def test_a_wrong_system_is_found(tmp_path: Path) -> None:
    """Replicas that differ by a bit, a rank that lacks a weight, and a refusal that is late."""
    case = ZERO.plain
    results = run_ranks(2, pair_runs.outcome, case, tmp_path, backend=None)
    assert pair_runs.differences(case, results) == []
    weight = results[1].local[0]
    weight.copy_(torch.nextafter(weight, torch.tensor(torch.inf)))
    assert pair_runs.differences(case, results) == [
        "rank 1: its weights are not those of its replicas"
    ]
    del results[0].weights["norm.bias"]
    assert pair_runs.differences(case, results)[0] == "rank 0 lacks ['norm.bias']"
    refused = Refused("stage: 1", "ValueError|TypeError: of rows", "stage 2")
    assert refused.explains("TypeError", "a case of rows", True)
    for error in [
        ("OSError", "of rows", True),
        ("ValueError", "", True),
        ("ValueError", "of rows", False),
    ]:
        assert not refused.explains(*error)


def test_no_pair_is_left_out() -> None:
    """What is neither in a case that equals one process nor refused makes no sense."""
    for table in TABLES.values():
        left = table.pairs_beside([*table.covering, *table.refusals])
        assert [pair for pair in left if table.makes_sense(pair)] == []


# ---- docs/reference/pairs.md, to which tools/site_pages.py adds the tables

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "pairs.md"


def test_the_page_has_each_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert sorted(re.findall(r"(?m)^<!-- pairs: (.+) -->$", text)) == sorted(TABLES)
    for name, table in TABLES.items():
        made = section(name)
        rows = [line for line in made.splitlines() if line.startswith("| ")]
        assert len(rows) == 2 + len(table.axes) + len(table.refused), name
    assert "| stage | 1 · 2 · 3 · infinity |" in section("zero.shard")
    for dtype, tolerance in TOLERANCES.items():
        assert f"{tolerance:g} ({str(dtype).removeprefix('torch.')})" in text
    assert f"float64, within {TOLERANCE:.4f}." in " ".join(text.split())


def test_all_schedulers_are_here() -> None:
    assert schedulers_of_torch() <= SCHEDULERS.keys()


@pytest.mark.parametrize(
    ("system", "scheduler", "kinds"),
    [
        ("zero 1", "after", FEW),
        ("Lomo", "after", ["CosineAnnealingLR"]),
        *(
            pytest.param(system, scheduler, ALL, marks=pytest.mark.slow)
            for system in BETWEEN.axes["system"][:6]
            for scheduler in ("after", "before")
            if BETWEEN.makes_sense({"system": system, "scheduler": scheduler})
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} kinds",
)
def test_schedulers(system: str, scheduler: str, kinds: list[str], tmp_path: Path) -> None:
    """Learning rates, betas and weights; before the third step it resumes from a checkpoint.

    https://github.com/microsoft/rat-sql/issues/45, https://github.com/pytorch/pytorch/issues/60265
    """
    pytest.importorskip("transformers")
    fixed = {"system": system, "scheduler": scheduler, "between steps": "save and load"}
    problems = {}
    for kind in kinds:
        case = {**fixed, "kind of scheduler": kind}
        if problem := pair_runs.problem_of([BETWEEN], case, tmp_path / kind):
            problems[kind] = problem
    assert problems == {}
