"""Whole loops, between steps and on meshes whose ranks differ: one process's, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import between_check
import pytest
from between_table import BETWEEN, CUBES, PENDING, PROGRAM, TABLES, pending_of
from pair_table import Case, Table

pytest.importorskip("transformers")


def cases_of(name: str) -> list[Any]:
    """Of a table; slow where earlier cases have each of the case's values."""
    table, found, seen = TABLES[name], [], set[tuple[str, str]]()
    for case in [*table.covering, *table.refusals]:
        is_refusal = case in table.refusals and is_plain(table, case) and table is not PROGRAM
        is_new = not seen >= case.items() or is_refusal
        marks = [] if is_new and table is not CUBES else [pytest.mark.slow]
        found.append(pytest.param(name, case, marks=marks, id=f"{name}: {name_of(table, case)}"))
        seen |= case.items()
    return found


def is_plain(table: Table, case: Case) -> bool:
    """Whether a case has the values that are refused, and no more."""
    return sum(case[axis] != table.plain[axis] for axis in case) <= 2


def name_of(table: Table, case: Case) -> str:
    """What is not plain in a case."""
    return ", ".join(f"{axis}={case[axis]}" for axis in case if case[axis] != table.plain[axis])


@pytest.mark.parametrize(("table", "case"), [case for name in TABLES for case in cases_of(name)])
def test_equals_one_process_or_is_refused(table: str, case: Case, tmp_path: Path) -> None:
    problem = between_check.problem_of([BETWEEN, TABLES[table]], case, tmp_path)
    pending = pending_of(case)
    if problem and pending:
        pytest.xfail("; ".join(PENDING[words] for words in pending))
    if pending:
        problem = f"is right now: delete from between_table.PENDING what was mended of {pending}"
    if problem:
        pytest.fail(problem, pytrace=False)


def test_no_pair_is_left_out() -> None:
    """What is neither in a case that equals one process nor refused makes no sense."""
    for table in TABLES.values():
        tried = {
            pair for case in [*table.covering, *table.refusals] for pair in table.pairs_of(case)
        }
        left = [pair for pair in table.pairs() if frozenset(pair.items()) not in tried]
        assert [pair for pair in left if table.makes_sense(pair)] == []
