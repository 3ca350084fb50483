"""ringcomm as a backend of torch.distributed: registration, groups, counters, resources."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import ringcomm
from ringcomm import Options

ROOT = Path(__file__).parents[3]


# ---- registration

# Two ranks in a program that never imports ringcomm; forked after the import of torch.
PROGRAM = """
import os, sys, torch, torch.distributed as dist
{register}
assert "ringcomm" not in sys.modules
assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
assert dist.Backend.default_device_backend_map["cuda"] == "nccl"
rank = 0 if os.fork() else 1
store = dist.FileStore({store!r}, 2)
dist.init_process_group({backend!r}, store=store, rank=rank, world_size=2)
tensor = torch.ones(5)
dist.all_reduce(tensor)
assert tensor.tolist() == [2] * 5
assert "ringcomm" in sys.modules
assert dist.get_backend() == {backend!r}, dist.get_backend()
dist.destroy_process_group()
if rank == 1:
    os._exit(0)
assert os.wait()[1] == 0
print("fine")
"""


def run_program(tmp_path: Path, backend: str, register: str, folder: Path) -> None:
    program = PROGRAM.format(register=register, store=str(tmp_path / "store"), backend=backend)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "fine\n", done.stderr


def entry_points() -> list[str]:
    return [e.name for e in importlib.metadata.entry_points(group="torch.backends")]


@pytest.mark.skipif(
    "ringcomm" not in entry_points(),
    reason="ringcomm is not installed here, so that torch does not know it by itself",
)
def test_program_that_never_imports_ringcomm(tmp_path: Path) -> None:
    run_program(tmp_path, "ringcomm", "", tmp_path)


def test_registered_by_hand(tmp_path: Path) -> None:
    register = "import _ringcomm_autoload as a; a.register(); a.register()"
    run_program(tmp_path, "cpu:ringcomm", register, ROOT)


def test_defaults_stay() -> None:
    assert ringcomm.__version__
    defaults = dist.Backend.default_device_backend_map
    assert (defaults["cpu"], defaults["cuda"]) == ("gloo", "nccl")
    assert dist.Backend.backend_capability["ringcomm"] == ["cpu", "cuda"]


def check_names(rank: int) -> None:
    assert dist.get_backend() == "ringcomm"
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    assert backend.name() == "ringcomm"
    assert backend.size() == dist.get_world_size()
    assert backend.rank() == rank


def test_names() -> None:
    run_ranks(2, check_names)


# ---- memory


def check_memory(rank: int) -> None:
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    pairs = dist.get_world_size() * (dist.get_world_size() - 1) // 2
    assert 0 < ringcomm._C.mapped_bytes(backend) <= pairs * (8 << 20)


@pytest.mark.parametrize("world_size", [2, 4])
def test_memory_per_pair(world_size: int) -> None:
    run_ranks(world_size, check_memory)


# ---- environment


def algorithm_used(rank: int) -> list[str]:
    dist.all_reduce(torch.ones(10))
    return [name for op, name in ringcomm.stats(dist.group.WORLD) if op == "all_reduce"]


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "ring"])
def test_algorithm_from_the_environment(algorithm: str) -> None:
    env = {
        "RINGCOMM_ALGORITHM": algorithm,
        "RINGCOMM_SLOT_BYTES": "4096",
        "RINGCOMM_NUM_SLOTS": "3",
    }
    assert run_ranks(2, algorithm_used, fresh=True, env=env) == [[algorithm]] * 2


def test_options_before_environment() -> None:
    env = {"RINGCOMM_ALGORITHM": "ring"}
    options = Options(algorithm="two_shot")
    results = run_ranks(2, algorithm_used, fresh=True, env=env, pg_options=options)
    assert results == [["two_shot"]] * 2


def reduce_all_types(rank: int) -> str:
    import oracle

    for dtype in oracle.FLOATS + oracle.INTS:
        for op in ("sum", "product", "max", "avg"):
            inputs = [oracle.integers(r, 1003, dtype) for r in range(2)]
            tensor = inputs[rank].clone()
            dist.all_reduce(tensor, getattr(dist.ReduceOp, op.upper()))
            oracle.assert_equal(tensor, oracle.reduced(inputs, op))
    return str(ringcomm._C.simd_level())


@pytest.mark.parametrize("level", ["baseline", "avx2", "avx512"])
def test_instruction_sets(level: str) -> None:
    flag = {"baseline": "", "avx2": " avx2 ", "avx512": " avx512bw "}[level]
    if flag not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"this processor has no {level}")
    assert run_ranks(2, reduce_all_types, fresh=True, env={"RINGCOMM_SIMD": level}) == [level] * 2


def other_hosts(rank: int, folder: str) -> str:
    os.environ["RINGCOMM_HOST_ID"] = f"machine{rank}"
    store = dist.FileStore(folder + "/store", 2)
    with pytest.raises(ringcomm.RingcommError, match="share no memory") as caught:
        dist.init_process_group(
            "ringcomm",
            store=store,
            rank=rank,
            world_size=2,
            pg_options=ringcomm.Options(transport="shm"),
        )
    return str(caught.value)


def test_ranks_on_different_hosts_that_must_share_memory(tmp_path: Path) -> None:
    for text in run_ranks(2, other_hosts, str(tmp_path), backend=None, fresh=True):
        assert "machine0" in text
        assert "machine1" in text


# ---- counters


def count(group: Any, op: str, algorithm: str) -> tuple[int, int]:
    entry = ringcomm.stats(group).get((op, algorithm), {"num_calls": 0, "sent_bytes": 0})
    return entry["num_calls"], entry["sent_bytes"]


def check_stats(rank: int) -> None:
    world_size = dist.get_world_size()
    num_elems = 120_000  # a multiple of 2, 3 and 4: the formulas are exact
    num_bytes = 4 * num_elems
    expected = {
        "one_shot": (world_size - 1) * num_bytes,
        "two_shot": 2 * (world_size - 1) * num_bytes // world_size,
        "ring": 2 * (world_size - 1) * num_bytes // world_size,
    }
    for algorithm, sent_bytes in expected.items():
        group = dist.new_group(backend="ringcomm", pg_options=Options(algorithm=algorithm))  # type: ignore[arg-type]
        assert ringcomm.stats(group) == {}
        before = count(None, "all_reduce", algorithm)
        for turn in range(1, 3):
            dist.all_reduce(torch.ones(num_elems), group=group)
            assert count(group, "all_reduce", algorithm) == (turn, turn * sent_bytes)
        after = count(None, "all_reduce", algorithm)
        assert after == (before[0] + 2, before[1] + 2 * sent_bytes)
        assert list(ringcomm.stats(group)) == [("all_reduce", algorithm)]
        dist.destroy_process_group(group)
    group = dist.new_group(backend="ringcomm")
    share = torch.ones(1000)
    dist.all_gather_into_tensor(torch.empty(1000 * world_size), share, group=group)
    assert count(group, "all_gather", "direct") == (1, 4000 * (world_size - 1))
    dist.reduce_scatter_tensor(share, torch.ones(1000 * world_size), group=group)
    assert count(group, "reduce_scatter", "direct") == (1, 4000 * (world_size - 1))
    dist.broadcast(share, 1, group=group)
    assert count(group, "broadcast", "direct") == (1, 4000 * (world_size - 1) * (rank == 1))
    shares = [torch.empty(1000) for _ in range(world_size)]
    dist.gather(share, shares if rank == 1 else None, 1, group=group)
    assert count(group, "gather", "direct") == (1, 4000 * (rank != 1))
    dist.scatter(share, shares if rank == 1 else None, 1, group=group)
    assert count(group, "scatter", "direct") == (1, 4000 * (world_size - 1) * (rank == 1))
    dist.all_to_all(shares, [share] * world_size, group=group)
    assert count(group, "all_to_all", "direct") == (1, 4000 * (world_size - 1))
    copied = ringcomm.stats(group)["all_to_all", "direct"]["copied_bytes"]
    assert copied == 4000 * (2 * world_size - 1)
    dist.barrier(group=group)
    assert count(group, "barrier", "direct") == (1, 0)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_stats(world_size: int) -> None:
    run_ranks(world_size, check_stats)


def check_stats_of_gloo(rank: int) -> None:
    with pytest.raises(ValueError, match="gloo"):
        ringcomm.stats(dist.group.WORLD)


def test_stats_of_another_backend() -> None:
    run_ranks(1, check_stats_of_gloo, backend="gloo", fresh=True)
