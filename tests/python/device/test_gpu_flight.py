"""Calls on tensors of GPUs in the flight recorder, its dumps, and the doctor's report."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_ranks import Gpus, module, on_all_gpus, on_gpu, on_some_gpus

import ringcomm
from ringcomm.measure import job
from ringcomm.trace import layout
from ringcomm.trace.merge import merge

LIMIT_S = 30.0


def call_and_dump(rank: int, folder: str) -> None:
    x = on_gpu(torch.ones(1000))
    dist.all_reduce(x)
    work = dist.broadcast(x, 1, async_op=True)
    work.wait()
    module().synchronize()
    assert work.is_completed()  # the library asks the device here
    dist.all_reduce(torch.ones(10))
    dist.all_reduce(x)
    ringcomm.flight_dump(f"{folder}/")


def calls_in(path: Path) -> list[dict[str, Any]]:
    own: dict[str, Any] = pickle.loads(path.read_bytes())["processes"][0]
    calls: list[dict[str, Any]] = own["calls"]
    return calls


@on_all_gpus
def test_calls_are_enqueued_and_end_when_that_is_seen(gpus: Gpus, tmp_path: Path) -> None:
    gpus.run(call_and_dump, str(tmp_path))
    for rank in range(gpus.world_size):
        calls = [call for call in calls_in(tmp_path / f"{rank}") if call["num_bytes"] > 40]
        on_device = [call for call in calls if call["on_device"]][-3:]
        found = [(call["op"], call["num_bytes"], call["state"]) for call in on_device]
        assert [each[:2] for each in found] == [
            ("all_reduce", 4000),
            ("broadcast", 4000),
            ("all_reduce", 4000),
        ]
        assert found[1][2] == "ended"
        assert found[2][2] == "enqueued"
        numbers = [call["seq"] for call in on_device]
        assert numbers == sorted(set(numbers))
    merge([tmp_path], tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text(encoding="utf-8")
    assert '"all_reduce enqueued"' in text
    assert '"group 0 on a device"' in text


def look_at_this_job() -> tuple[str, int | None, job.Rank]:
    """The doctor's verdict, and rank 0; ranks of other tests have the same parent process."""
    own, _ = layout.mapped_records()
    assert own is not None
    (group,) = [group for group in own.groups.values() if group.state == "alive"]
    records = [job._record(pid) for pid in group.pids]
    ranks = job._sample([
        job.Rank(pid, record)
        for pid, record in zip(group.pids, records, strict=True)
        if record is not None
    ])  # fmt: skip
    return *job.verdict(ranks, 0), ranks[0]


def late_on_a_device(rank: int, folder: str) -> tuple[str, int | None, str]:
    """The others do not enqueue the second call until rank 0 has asked the doctor."""
    x = on_gpu(torch.ones(1000))
    dist.all_reduce(x)
    module().synchronize()
    dist.barrier()
    done = Path(folder, "done")
    found: tuple[str, int | None, str] = ("", None, "")
    deadline = time.monotonic() + LIMIT_S
    if rank == 0:
        dist.all_reduce(x)
        verdict, cause, own = look_at_this_job()
        assert own.last is not None
        found = verdict, cause, own.last.state
        done.touch()
    while not done.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    if rank != 0:
        dist.all_reduce(x)
    module().synchronize()
    return found


@on_some_gpus
def test_the_doctor_names_a_rank_that_has_not_enqueued_a_call(gpus: Gpus, tmp_path: Path) -> None:
    verdict, cause, state = gpus.run(late_on_a_device, str(tmp_path), fresh=True)[0]
    assert cause in range(1, gpus.world_size), verdict
    assert state == "enqueued"
    if gpus.kernels:  # else the hosts compare the calls, and rank 0 waits there
        assert f"rank {cause} is the cause: it has not enqueued all_reduce #" in verdict
