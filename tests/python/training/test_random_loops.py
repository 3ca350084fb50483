"""Random combinations of all axes of the tables of whole loops, on every system and mesh.

`.ci/run stress` draws for 10 minutes from a seed that it prints: RINGCOMM_LOOPS_SECONDS and
RINGCOMM_LOOPS_SEED set these. What fails is printed with the command that runs it again.
"""

from __future__ import annotations

import os
import random
import shlex
import time
import traceback
from pathlib import Path

import pytest
from pair_runs import problem_of
from pair_table import Case, Table, conditions
from pair_tables import BETWEEN, CUBES, LOOPS, MESHES, PROGRAM, TABLES, views_of

pytest.importorskip("transformers")

SECONDS = float(os.environ.get("RINGCOMM_LOOPS_SECONDS", "0"))
SEED = os.environ.get("RINGCOMM_LOOPS_SEED", "") or str(random.SystemRandom().randrange(10**6))
ONE = os.environ.get("RINGCOMM_LOOP", "")
MAX_FAILURES = 20
TABLES_OF_LOOPS = [TABLES[name] for name in LOOPS]
# Axes of one table that cases of another one have here besides.
COMMON = {"between steps": BETWEEN.axes["between steps"], "backend": ("ringcomm", "gloo")}
OF_SYSTEMS = {
    **BETWEEN.axes,
    **PROGRAM.axes,
    **COMMON,
    "tied": ("no", "yes"),
    "used": MESHES.axes["used"],
}
OF_MESHES = {**BETWEEN.axes, **MESHES.axes, **COMMON}
del OF_MESHES["system"]
SPLIT = " or ".join(
    mesh for table in (MESHES, CUBES) for mesh in table.axes["mesh"] if "tp" in mesh
)
TWICE = " or ".join(
    mesh
    for table in (MESHES, CUBES)
    for mesh in table.axes["mesh"]
    if {"fsdp", "tp"} <= {*mesh.split(" x ")}
)
NEVER = conditions(f"""
    # Refused (docs/reference/pairs.md), or ranks have no rows of their own.
    used: others on each rank or one rank alone; system: infinity or tensor or pipeline or mesh
    # Refused by name: no DTensor describes such heads, or what fully_shard splits once more.
    sizes: uneven; mesh: {SPLIT}; between steps: state_dict
    mesh: {TWICE}; between steps: state_dict
    # Such a loss may be the right mean then.
    loss: shifts labels or ignore_index=-1 or class weights; labels: full
    # Refused with the model's loss; a user's takes blocks, which are those of the model in it.
    wrapper: adapters; system: pipeline; loss: mean or shifts labels or ignore_index=-1
    wrapper: adapters; system: pipeline; loss: class weights or sum / num_items
    # A module around the model has neither the method nor the model's config.
    wrapper: a user's module; between steps: generate or input gradient
    # Refused by name: a new model is frozen again, and has no place for those states.
    trained: thawed; between steps: save and load
    # Both change the same layer.
    trained: thawed or never; between steps: freeze
    # Gloo's groups cannot be aborted.
    backend: gloo; between steps: exception in forward or exception in backward
    backend: gloo; leaving: one by one
    backend: gloo; system: infinity
    # torch's checkpoint updates statistics twice; its DDP sends rank 0's.
    buffers: BatchNorm; recompute: yes
    buffers: BatchNorm; wrapper: checkpoint_wrapper
    buffers: BatchNorm; zero: 0
    buffers: BatchNorm; system: data
""")


def drawn(draw: random.Random) -> Case:
    while True:
        axes = OF_SYSTEMS if draw.random() < 0.4 else OF_MESHES
        case = {axis: draw.choice(values) for axis, values in axes.items()}
        if "mesh" in case and draw.random() < 0.2:
            case["mesh"] = draw.choice(CUBES.axes["mesh"])
        # Half of the axes are plain: a case of many refusals tells little.
        for axis in draw.sample(sorted(set(axes) - {"system", "mesh", "zero"}), len(axes) // 2):
            case[axis] = axes[axis][0]
        tables = [BETWEEN, PROGRAM, *([MESHES, CUBES] if "mesh" in case else [])]
        is_right = all(table.makes_sense(view) for table in tables for view in views_of(case))
        if is_right and Table(axes, (), NEVER).makes_sense(case):
            return case


def command_of(case: Case) -> str:
    words = "; ".join(f"{axis}: {value}" for axis, value in case.items())
    return (
        f"RINGCOMM_LOOP={shlex.quote(words)} pytest -s tests/python/training/test_random_loops.py"
    )


@pytest.mark.skipif(not (SECONDS or ONE), reason=".ci/run stress")
def test_random_loops(tmp_path: Path) -> None:
    if ONE:
        case = dict(part.split(": ") for part in ONE.split("; "))
        assert problem_of(TABLES_OF_LOOPS, case, tmp_path / "one") == ""
        return
    print(f"\nRINGCOMM_LOOPS_SEED={SEED} for {SECONDS:g} s")
    draw, end, num, failures = random.Random(SEED), time.monotonic() + SECONDS, 0, 0
    while time.monotonic() < end and failures < MAX_FAILURES:
        case = drawn(draw)
        try:
            problem = problem_of(TABLES_OF_LOOPS, case, tmp_path / str(num))
        except Exception:
            problem = traceback.format_exc()
        num += 1
        if problem:
            failures += 1
            print(f"{command_of(case)}\n{problem[:1500]}\n", flush=True)
    print(f"{num} combinations, {failures} failed")
    assert failures == 0
