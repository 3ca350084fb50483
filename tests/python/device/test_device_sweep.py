"""Sweeps on devices, on one that is the host with a clock of its own.

No test here asserts a time.
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import emulated_gpu
import pytest
import torch
import torch.distributed as dist
from operations import OPERATIONS
from placement import Placement, Speeds
from point import make_buffers

import ringcomm
from ringcomm import cli
from ringcomm.screen import EXIT_OK, EXIT_WRONG_RESULTS

KIND = "hostgpu"


class HostEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: HostEvent) -> float:
        return (end.at - self.at) * 1e3


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices whose tensors are the CPU's."""
    module = SimpleNamespace(
        Event=HostEvent,
        synchronize=lambda device=None: None,
        set_device=lambda device: None,
        device_count=lambda: 2,
    )
    monkeypatch.setattr(torch, KIND, module, raising=False)
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: module)
    monkeypatch.setattr(Placement, "device_of", lambda self, rank: torch.device("cpu"))


def run(path: Path, *argv: str) -> tuple[int, list[dict[str, Any]]]:
    quick = ["--seconds", "0.02", "--repeats", "0", "--json", str(path), "--device", KIND]
    code = cli.run(["bench", "all_reduce", *quick, *argv])
    return code, [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("clock", ["events", "host"])
def test_records(tmp_path: Path, clock: str, capfd: pytest.CaptureFixture[str]) -> None:
    code, records = run(
        tmp_path / "records.jsonl",
        *("--peers", "gloo,mpi4py,nccl", "--sizes", "1k", "--layout", "one", "--clock", clock),
    )
    assert code == EXIT_OK
    said = capfd.readouterr().out
    assert "not available: mpi4py: its calls take arrays in the host's memory" in said
    assert "not available: nccl" in said
    assert f"2 ranks on 1 {KIND}" in said
    assert [record["backend"] for record in records] == ["ringcomm", "gloo"]
    for record in records:
        assert (record["kind"], record["device"]) == ("collective_on_device", KIND)
        assert (record["layout"], record["num_devices"], record["mps"]) == ("one", 2, False)
        assert (record["mode"], record["clock"]) == ("eager", clock)
        assert record["verified"]
        assert record["link_gb_per_s"] is None
        # The floor by hand: 2 N S bytes at the copy's speed, and the share of the median call.
        floor_us = 4 * record["bytes"] / record["copy_gb_per_s"] / 1e3
        assert record["floor_us"] == pytest.approx(floor_us, rel=1e-3)
        assert record["share_of_floor"] == pytest.approx(floor_us / record["p50_us"], rel=1e-3)


@pytest.mark.usefixtures("devices")
def test_one_wrong_element_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operation = OPERATIONS["all_reduce"]

    def spoil(buffers: Any, group: Any) -> None:
        operation.call(buffers, group)
        if buffers.place.rank == 1:
            buffers.output[7] += 1

    broken = dataclasses.replace(operation, call=spoil)
    monkeypatch.setitem(OPERATIONS, "all_reduce", broken)
    code, records = run(tmp_path / "records.jsonl", "--peers", "none", "--sizes", "1k")
    assert code == EXIT_WRONG_RESULTS
    assert records[0]["wrong_elems"] == 2


SHARED = ("all_reduce_shared", "reduce_scatter_shared", "all_gather_shared")


def check_shared_buffers(rank: int) -> None:
    """The default group of a benchmark is Gloo's."""
    group = dist.new_group(backend="cpu:ringcomm,emugpu:ringcomm")
    team = SimpleNamespace(rank=rank, world_size=2)
    device = torch.device("emugpu", 0)
    bench: Any = SimpleNamespace(team=team, groups={"ringcomm": group}, device=device)
    sizes: list[int] = []
    empty_shared = ringcomm.empty_shared

    def counted(num_elems: int, **where: Any) -> torch.Tensor:
        sizes.append(num_elems)
        return empty_shared(num_elems, **where)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ringcomm, "empty_shared", counted)
        made = {n: make_buffers(bench, OPERATIONS[n], 1 << 20, torch.float32) for n in SHARED}
    assert sizes == [1 << 18, 1 << 18, 1 << 17]  # what peers read
    found = []
    for name, buffers in made.items():
        first, second = buffers.input.chunk(2)
        first.fill_(rank + 1)
        second.fill_(rank + 5)
        OPERATIONS[name].bound(buffers, group)()
        found.append(buffers.output.cpu().unique().tolist())
    assert found == [[3.0, 11.0], [[3.0], [11.0]][rank], [1.0, 2.0, 5.0, 6.0]]


@emulated_gpu.needs_emulated_gpu
def test_shared_buffers_are_of_ringcomms_group() -> None:
    env = emulated_gpu.with_kernels()
    emulated_gpu.run_on_gpus(2, check_shared_buffers, backend="gloo", env=env)


def test_the_floor_of_an_all_reduce() -> None:
    four_on_two = Placement("cuda", 2)
    # Two ranks of each device read and write a MB each: 4 MB; half as much crosses each link.
    assert OPERATIONS["all_reduce"].memory_factor(4) * four_on_two.share(4) == 4
    assert Speeds(1e12, None).floor_us(4e6, 1.5e6) == 4.0
    assert Speeds(1e12, 1e11).floor_us(4e6, 1.5e6) == 15.0
