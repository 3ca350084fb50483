"""Whether a case of the tables of whole loops went as it should."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import between_engines
import between_runs
import torch
from between_table import TOLERANCE, views_of
from pair_model import error_of
from pair_table import Case, Table
from ranks import RankFailure, run_ranks
from torch import Tensor

TIMEOUT_S = 120.0


def problem_of(tables: Iterable[Table], case: Case, folder: Path) -> str:
    """Runs a case; what is wrong with it by the tables, or nothing."""
    try:
        found = results_of(case, folder)
    except RankFailure as failure:
        return str(failure)
    reasons = [
        why for table in tables for view in views_of(case) for why in table.refusals_of(view)
    ]
    if reasons:
        unknown = [
            f"rank {rank}: {each.kind}: {each.text} (weights unchanged: {each.is_unchanged})"
            for rank, each in enumerate(found)
            if not any(why.explains(*each[:3]) for why in reasons)
        ]
        return "\n".join(unknown)
    raised = [f"rank {r}: {each.kind}: {each.text}" for r, each in enumerate(found) if each.kind]
    return "\n".join(raised or differences(case, found))


def results_of(case: Case, folder: Path) -> list[between_runs.Outcome]:
    """Of all ranks."""
    num_ranks = between_engines.world_size(case)
    leaves = case.get("leaving") == "one by one"
    results = run_ranks(
        num_ranks,
        between_runs.outcome,
        *(case, folder),
        backend=None,
        timeout_s=TIMEOUT_S,
        fresh=leaves,
        may_die=range(1, num_ranks) if leaves else (),
    )
    return [
        pickle.loads((folder / f"rank{rank}").read_bytes()) if found is None else found
        for rank, found in enumerate(results)
    ]


def differences(case: Case, results: list[between_runs.Outcome]) -> list[str]:
    oracle = between_runs.expected(case)
    start = between_runs.initial(case)
    found = []
    first: dict[tuple[int, ...], list[Tensor]] = {}
    for rank, mine in enumerate(results):
        seen, weights = oracle[mine.data_rank]
        if set(mine.weights) < set(weights):
            found.append(f"rank {rank} lacks {sorted(set(weights) - set(mine.weights))}")
            continue
        error = error_of(mine.weights, weights, start)
        if not error < TOLERANCE:
            found.append(f"rank {rank}: weights are off by {error:.2g} of their change")
        for name in seen:
            found += [f"rank {rank}: {name}: {what}" for what in _off(mine.seen[name], seen[name])]
        same = first.setdefault(mine.replica, mine.local)
        if not all(map(torch.equal, same, mine.local)):
            found.append(f"rank {rank}: its weights are not those of its replicas")
    return found


def _off(found: Any, expected: Any, name: str = "") -> list[str]:
    """What is not as expected, in a value of tensors."""
    if isinstance(expected, dict):  # a stage of a pipeline has some of the names
        return [w for key in found for w in _off(found[key], expected[key], key)]
    if isinstance(expected, list):
        return [w for pair in zip(found, expected, strict=True) for w in _off(*pair, name)]
    one, other = torch.as_tensor(found), torch.as_tensor(expected)
    if one.shape != other.shape:
        return [f"{name} has shape {tuple(one.shape)} instead of {tuple(other.shape)}"]
    if one.dtype == torch.int64:
        return [] if torch.equal(one, other) else [f"{one.tolist()} instead of {other.tolist()}"]
    error = float((one.double() - other.double()).norm() / other.double().norm().clamp(min=1e-6))
    return [] if error < TOLERANCE else [f"{name} is off by {error:.2g}"]
