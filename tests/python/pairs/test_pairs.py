"""Features in pairs: each equals one process, or is refused before a weight is written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pair_document
import pair_model
import pair_runs
import pytest
import torch
from cases import slow
from pair_loops import LOOPS
from pair_runs import TABLES
from pair_table import Case
from ranks import run_ranks

TIMEOUT_S = 120.0  # the first case of a rank may import transformers


def cases_to_equal() -> list[Any]:
    """By name of a table; slow where earlier cases have each of the case's values."""
    found = []
    for name, (table, _, _) in TABLES.items():
        seen = set[tuple[str, str]]()
        for case in table.covering:
            found.append(slow(name, case) if seen >= case.items() else (name, case))
            seen |= case.items()
    return found


def cases_to_refuse() -> list[Any]:
    """By name of a table; slow where earlier cases have each of the case's reasons."""
    found = []
    for name, (table, _, _) in TABLES.items():
        seen = set[str]()
        for case in table.refusals:
            reasons = {str(reason) for reason in table.refusals_of(case)}
            found.append(slow(name, case) if seen >= reasons else (name, case))
            seen |= reasons
    return found


def needs(case: Case) -> None:
    """Skips the test where a loop's library is not there."""
    if case.get("around") in LOOPS:
        pytest.importorskip("transformers")
        pytest.importorskip("accelerate")


def id_of(value: Any) -> str | None:
    """A name of what is not plain in a case."""
    if not isinstance(value, dict):
        return None
    (table,) = (t for t, _, _ in TABLES.values() if list(t.axes) == list(value))
    return ",".join(f"{axis}={value[axis]}" for axis in value if value[axis] != table.plain[axis])


@pytest.mark.parametrize(("table", "case"), cases_to_equal(), ids=id_of)
def test_equals_one_process(table: str, case: Case, tmp_path: Path) -> None:
    needs(case)
    results = run_ranks(
        pair_runs.world_size(table),
        pair_runs.train,
        *(table, case, tmp_path),
        backend=None,
        timeout_s=TIMEOUT_S,
    )
    oracle = TABLES[table][2]
    expected = pair_model.train_alone(
        case, lambda groups: oracle(case, groups), pair_runs.num_data_ranks(case)
    )
    start = pair_model.initial(case)
    for found in results:
        # Weights of 16 bits are masters rounded.
        rounded = {name: value.to(found[name].dtype).float() for name, value in expected.items()}
        error = min(pair_model.error_of(found, aim, start) for aim in (expected, rounded))
        assert error < pair_model.tolerance(case)
        if case["resume"] != "one rank":
            assert all(torch.equal(found[name], results[0][name]) for name in found)


@pytest.mark.parametrize(("table", "case"), cases_to_refuse(), ids=id_of)
def test_refuses(table: str, case: Case, tmp_path: Path) -> None:
    needs(case)
    results = run_ranks(
        pair_runs.world_size(table),
        pair_runs.raised,
        *(table, case, tmp_path),
        backend=None,
        timeout_s=TIMEOUT_S,
    )
    reasons = TABLES[table][0].refusals_of(case)
    for error in results:
        assert any(why.explains(*error) for why in reasons), error


def test_no_pair_is_left_out() -> None:
    """What is neither in a case that equals one process nor refused makes no sense."""
    for table, _, _ in TABLES.values():
        tried = [*table.covering, *table.refusals]
        left = [p for p in table.pairs() if not any(p.items() <= case.items() for case in tried)]
        assert [pair for pair in left if table.makes_sense(pair)] == []


def test_the_page_has_these_tables() -> None:
    if os.environ.get("RINGCOMM_WRITE_PAIRS"):
        pair_document.PAGE.write_text(pair_document.page())
    assert pair_document.PAGE.read_text() == pair_document.page()
