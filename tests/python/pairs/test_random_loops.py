"""Random combinations of all axes of the tables of whole loops, on every system and mesh.

`make stress` draws for 10 minutes from a seed that it prints: RINGCOMM_LOOPS_SECONDS and
RINGCOMM_LOOPS_SEED set these. What fails is printed with the command that runs it again.
"""

from __future__ import annotations

import os
import random
import shlex
import time
from pathlib import Path

import between_check
import pytest
from between_table import ACTIONS, BETWEEN, CUBES, MESHES, PROGRAM, TABLES, pending_of, views_of
from pair_table import Case

pytest.importorskip("transformers")

SECONDS = float(os.environ.get("RINGCOMM_LOOPS_SECONDS", "0"))
SEED = os.environ.get("RINGCOMM_LOOPS_SEED", "") or str(random.SystemRandom().randrange(10**6))
ONE = os.environ.get("RINGCOMM_LOOP", "")
MAX_FAILURES = 20
# Axes of one table that cases of another one have here besides.
COMMON = {"between steps": ACTIONS, "backend": ("ringcomm", "gloo")}
OF_SYSTEMS = {
    **BETWEEN.axes,
    **PROGRAM.axes,
    **COMMON,
    "tied": ("no", "yes"),
    "used": MESHES.axes["used"],
}
OF_MESHES = {**BETWEEN.axes, **MESHES.axes, **COMMON}
del OF_MESHES["system"]


def drawn(draw: random.Random) -> Case:
    """A case that is not known to be wrong."""
    while True:
        axes = OF_SYSTEMS if draw.random() < 0.4 else OF_MESHES
        case = {axis: draw.choice(values) for axis, values in axes.items()}
        if "mesh" in case and draw.random() < 0.2:
            case["mesh"] = draw.choice(CUBES.axes["mesh"])
        # Half of the axes are plain: a case of many refusals tells little.
        for axis in draw.sample(sorted(set(axes) - {"system", "mesh", "zero"}), len(axes) // 2):
            case[axis] = axes[axis][0]
        if makes_sense(case) and not pending_of(case):
            return case


def makes_sense(case: Case) -> bool:
    """Whether a case says something."""
    is_alone = case.get("used") in ("others on each rank", "one rank alone")
    if is_alone and case.get("system") in ("infinity", "tensor", "pipeline", "mesh"):
        return False  # refused (docs/pairs.md), or ranks have no rows of their own
    has_uneven_heads = case.get("sizes") == "uneven" and "tp" in case["mesh"]
    if has_uneven_heads and case["between steps"] == "state_dict":
        return False  # refused by name: no DTensor describes them
    is_refused = case.get("loss") in ("shifts labels", "ignore_index=-1", "class weights")
    if is_refused and case["labels"] == "full":
        return False  # such a loss may be the right mean then
    if case.get("trained", "always") != "always" and case["between steps"] == "freeze":
        return False  # both change the same layer
    if case["backend"] == "gloo" and (
        case["leaving"] != "together"
        or case.get("system") == "infinity"
        or case["between steps"].startswith("exception")  # Gloo's groups cannot be aborted
    ):
        return False
    if case["buffers"] == "BatchNorm" and (
        case.get("recompute") == "yes" or case.get("zero") == "0"
    ):
        return False  # torch's checkpoint updates statistics twice; its DDP sends rank 0's
    tables = (BETWEEN,) if "system" in case else (MESHES, CUBES, BETWEEN)
    return all(table.makes_sense(view) for table in tables for view in views_of(case))


def problem_of(case: Case, folder: Path) -> str:
    folder.mkdir()
    return between_check.problem_of(list(TABLES.values()), case, folder)


def command_of(case: Case) -> str:
    """One line that runs a case again."""
    words = "; ".join(f"{axis}: {value}" for axis, value in case.items())
    return f"RINGCOMM_LOOP={shlex.quote(words)} pytest -s tests/python/pairs/test_random_loops.py"


@pytest.mark.skipif(not (SECONDS or ONE), reason="make stress")
def test_random_loops(tmp_path: Path) -> None:
    if ONE:
        case = dict(part.split(": ") for part in ONE.split("; "))
        assert problem_of(case, tmp_path / "one") == ""
        return
    print(f"\nRINGCOMM_LOOPS_SEED={SEED} for {SECONDS:g} s")
    draw, end, num, failures = random.Random(SEED), time.monotonic() + SECONDS, 0, 0
    while time.monotonic() < end and failures < MAX_FAILURES:
        case = drawn(draw)
        problem = problem_of(case, tmp_path / str(num))
        num += 1
        if problem:
            failures += 1
            print(f"{command_of(case)}\n{problem[:1500]}\n", flush=True)
    print(f"{num} combinations, {failures} failed")
    assert failures == 0
