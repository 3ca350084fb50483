"""Every scheduler of torch over each optimizer of the library: learning rates, betas, weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import between_check
import between_runs
import pytest
import torch.distributed as dist
from pair_table import Case
from program_model import SCHEDULERS, schedulers_of_torch
from ranks import end_groups, run_ranks

pytest.importorskip("transformers")

# Those that set more than the learning rate, or need more than the optimizer.
FEW = ["OneCycleLR", "ReduceLROnPlateau", "SequentialLR"]
ALL = sorted(schedulers_of_torch() & SCHEDULERS.keys())
SYSTEMS = ("zero 1", "zero 2", "zero 3", "infinity", "Lomo", "AdaLomo")


def trained(rank: int, cases: list[Case], folder: Path) -> list[between_runs.Outcome]:
    """One case after the other in a group of two ranks."""
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group(
        "ringcomm", store=store, rank=rank, world_size=2, timeout=between_runs.TIMEOUT
    )
    try:
        return [between_runs.train(rank, case, folder) for case in cases]
    finally:
        end_groups()


def test_all_schedulers_are_here() -> None:
    assert schedulers_of_torch() <= SCHEDULERS.keys()


@pytest.mark.parametrize(
    ("system", "scheduler", "kinds"),
    [
        ("zero 1", "after", FEW),
        *(
            pytest.param(system, scheduler, ALL, marks=pytest.mark.slow)
            for system in SYSTEMS
            for scheduler in ("after", "before")
            if scheduler == "after" or "Lomo" not in system
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} kinds",
)
def test_makes_the_steps_of_one_process(
    system: str, scheduler: str, kinds: list[str], tmp_path: Path
) -> None:
    """Before the third step it resumes from a checkpoint."""
    fixed = {"system": system, "scheduler": scheduler, "between steps": "save and load"}
    cases = [{**fixed, "kind of scheduler": kind} for kind in kinds]
    found: list[Any] = run_ranks(2, trained, cases, tmp_path, backend=None)
    problems = []
    for case, results in zip(cases, zip(*found, strict=True), strict=True):
        raised = [f"{each.kind}: {each.text}" for each in results if each.kind]
        problem = raised or between_check.differences(case, list(results))
        problems += [f"{case['kind of scheduler']}: {each}" for each in problem]
    assert problems == []
