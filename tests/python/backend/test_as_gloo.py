"""RINGCOMM_AS_GLOO=1: programs that name Gloo, or no backend, run over ringcomm, unchanged."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
IS_INSTALLED = "ringcomm" in [
    e.name for e in importlib.metadata.entry_points(group="torch.backends")
]
PROGRAM = """
import datetime, os, sys, torch, torch.distributed as dist
{register}
assert "ringcomm" not in sys.modules
rank = 0 if os.fork() else 1
os.environ["RINGCOMM_HOST_ID"] = ("here", {other_host!r})[rank]
store = dist.FileStore({store!r}, 2)
dist.init_process_group({backend!r}, store=store, rank=rank, world_size=2)
for group in (dist.group.WORLD, dist.new_group(), dist.new_group([0, 1], backend="gloo")):
    tensor = torch.ones(5)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [2] * 5
    objects = [None, None]
    dist.all_gather_object(objects, f"of {{rank}}", group=group)
    assert objects == ["of 0", "of 1"]
    if dist.get_backend(group) == "gloo":
        dist.monitored_barrier(group, datetime.timedelta(seconds=30))
    assert dist.get_backend(group) in {names!r}, dist.get_backend(group)
    assert group._get_backend(torch.device("cpu")).name() == {real!r}
assert ("ringcomm" in sys.modules) == ({real!r} == "ringcomm")
dist.destroy_process_group()
if rank == 1:
    os._exit(0)
assert os.wait()[1] == 0
print("fine")
"""


def run(
    folder: Path, backend: str | None, as_gloo: str, real: str, other_host: str = "here"
) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(
        register="" if IS_INSTALLED else "import _ringcomm_autoload as a; a.register()",
        store=str(folder / "store"),
        backend=backend,
        names=("gloo", backend, "undefined"),
        real=real,
        other_host=other_host,
    )
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder if IS_INSTALLED else ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "RINGCOMM_AS_GLOO": as_gloo},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo", None])
def test_programs_that_ask_for_gloo(backend: str | None, tmp_path: Path) -> None:
    done = run(tmp_path, backend, "1", "ringcomm")
    assert done.stdout == "fine\n", done.stderr


def test_messages_between_hosts_stay_gloos(tmp_path: Path) -> None:
    done = run(tmp_path, "gloo", "1", "ringcomm", other_host="there")
    assert done.stdout == "fine\n", done.stderr


def test_without_it_gloo_is_gloo(tmp_path: Path) -> None:
    done = run(tmp_path, "gloo", "0", "gloo")
    assert done.stdout == "fine\n", done.stderr


def test_another_value_is_told(tmp_path: Path) -> None:
    done = run(tmp_path, "gloo", "yes", "gloo")
    assert "RINGCOMM_AS_GLOO wants 0 or 1, got 'yes'" in done.stderr
    assert done.stdout == "fine\n", done.stderr
