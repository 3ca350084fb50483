"""Dumps of the flight recorder: on errors and request, from outside, and what reads them.

Calls on devices: tests/python/device/test_gpu_flight.py.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import pickle
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import slow
from rank_programs import run_command
from ranks import in_ranks, run_ranks
from staged_hangs import LIMIT_S, Launcher

import ringcomm
from ringcomm import MismatchError, PeerDiedError
from ringcomm.trace import layout
from ringcomm.trace.merge import merge

needs_analyser = pytest.mark.skipif(
    importlib.util.find_spec("torch.distributed.flight_recorder") is None,
    reason="this torch has no analyser of flight recorders",
)


def dump_of(path: str | Path) -> dict[str, Any]:
    return dict(pickle.loads(Path(path).read_bytes()))


def events_of(trace: Path) -> list[dict[str, Any]]:
    return list(json.loads(trace.read_text(encoding="utf-8"))["traceEvents"])


def trace_of(folder: Path, path: Path) -> tuple[Any, list[dict[str, Any]], list[str]]:
    """Merges dumps into a trace: the summary, events, and names of ranks."""
    summary = merge([folder], path)
    events = events_of(path)
    return summary, events, [e["args"]["name"] for e in events if e["name"] == "process_name"]


def calls_of(process: dict[str, Any]) -> list[tuple[str, int, str]]:
    return [(call["op"], call["seq"], call["state"]) for call in process["calls"]]


def said_by_analyser(rank: int, folder: Path) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        from torch.distributed.flight_recorder import fr_trace  # its logger takes sys.stderr

        fr_trace.main([str(folder), "--allow-incomplete-ranks"])
    return said.getvalue()


def torch_says(folder: Path) -> str:
    """What torch's analyser says of a folder of dumps."""
    return str(run_ranks(1, said_by_analyser, folder, backend=None, fresh=True)[0])


# ---- errors


def lose_a_rank(rank: int) -> str:
    x = torch.ones(1024)
    dist.all_reduce(x)
    dist.broadcast(x, 1)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerDiedError) as caught:
        dist.all_reduce(x)
    with pytest.raises(PeerDiedError):  # the same error again is not dumped again
        dist.all_reduce(x)
    return str(caught.value)


def run_dumping(
    folder: Path, body: Callable[..., Any], hosts: str = "aaa", **options: Any
) -> list[Any]:
    prefix = f"{folder}/job-"
    env = [{"RINGCOMM_FLIGHT_DUMP": prefix, "RINGCOMM_HOST_ID": host} for host in hosts]
    return run_ranks(3, body, fresh=True, env=env, **options)


@needs_analyser
def test_survivors_dump_the_calls_of_a_rank_that_died(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "by it"
    errors = run_dumping(folder, lose_a_rank, may_die=[2])
    assert sorted(path.name for path in folder.iterdir()) == ["job-0", "job-1"]
    for rank in range(2):
        dump = dump_of(folder / f"job-{rank}")
        assert dump["reason"] == f"error: {errors[rank]}"
        assert dump["rank"] == rank
        assert any("lose_a_rank" in line for line in dump["stacks"]["MainThread"])
        own, *peers = dump["processes"]
        done = [("all_reduce", 0, "ended"), ("broadcast", 1, "ended")]
        assert calls_of(own) == [*done, ("all_reduce", 2, "failed")]
        assert [(p["rank"], p["has_ended"]) for p in peers] == [(1 - rank, False), (2, True)]
        assert calls_of(peers[1]) == done
        (group,) = own["groups"].values()
        assert errors[rank] in group["failure"]
        assert group["transport"].startswith("shm: 1 host")
        assert own["calls"][-1]["begin_ns"] < group["failed_ns"] <= own["calls"][-1]["end_ns"]

    said = torch_says(folder)
    assert "missed FR dumps from ranks ({2})" in said

    summary, events, names = trace_of(folder, tmp_path / "trace.json")
    assert summary.num_ranks == 3
    (note,) = [note for note in summary.notes if note.startswith("rank 2 (dump): ")]
    assert "the last 2 of 2 calls, from the dump of another rank, job-" in note
    assert names == ["rank 0 (failed)", "rank 1 (failed)", "rank 2 (dump)"]
    reduces = [(e["pid"], e["args"]["seq"]) for e in events if e["name"] == "all_reduce"]
    assert sorted(reduces) == [(0, 0), (0, 2), (1, 0), (1, 2), (2, 0)]
    assert {e["args"]["bytes"] for e in events if e["name"] == "broadcast"} == {4096}


def differ(rank: int) -> None:
    dist.all_reduce(torch.ones(64))
    with pytest.raises(MismatchError):
        dist.all_reduce(torch.ones(512 if rank == 1 else 256))


@needs_analyser
def test_torch_names_the_rank_with_another_size(tmp_path: Path) -> None:
    run_dumping(tmp_path, differ)
    said = torch_says(tmp_path)
    for words in ("Collective sequence number: 1 has errors", "[[256]]", "[[512]]"):
        assert words in said
    # It compares all with the rank whose file the system lists first.
    culprits = set(re.findall(r"Culprit rank (\d); Error type: SIZE_OR_SYNTAX_MISMATCH", said))
    assert culprits in ({"1"}, {"0", "2"}), said


def exchange(rank: int) -> None:
    """Messages in several directions, of several tags, and groups of two ranks."""
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    x = torch.ones(1024)
    for tag in (1, 2, 1):
        if rank == 0:
            dist.send(x, 2, tag=tag)
        if rank == 2:
            dist.recv(x, 0, tag=tag)
    dist.all_reduce(x)
    if rank != 2:
        dist.all_gather_into_tensor(torch.empty(2048), x, group=pairs[0])
    if rank != 0:
        dist.reduce_scatter_tensor(torch.empty(512), x, group=pairs[1])
    dist.all_to_all_single(torch.empty(6), torch.ones(6))
    dist.barrier()
    ringcomm.flight_dump()


@needs_analyser
@pytest.mark.parametrize("hosts", ["aaa", "aab"])
def test_torch_finds_nothing_wrong_where_nothing_is(tmp_path: Path, hosts: str) -> None:
    run_dumping(tmp_path, exchange, hosts)
    said = torch_says(tmp_path)
    for word in ("Not all ranks", "has errors", "mismatch", "cannot decide"):
        assert word not in said, said
    assert merge([tmp_path], tmp_path / "trace.json").num_events > 0


def reduce_and_dump(rank: int) -> None:
    dist.all_reduce(torch.ones(8))
    ringcomm.flight_dump()


def test_of_a_process_with_both_the_recording_is_in_the_trace(tmp_path: Path) -> None:
    recorded = tmp_path / "recorded"
    env = [{"RINGCOMM_FLIGHT_DUMP": f"{recorded}/"}] * 2
    env[1] = {**env[1], "RINGCOMM_TRACE": str(recorded)}
    run_ranks(2, reduce_and_dump, fresh=True, env=env)
    summary, events, names = trace_of(recorded, tmp_path / "trace.json")
    assert summary.num_ranks == 2
    assert [note.partition(":")[0] for note in summary.notes] == ["rank 0 (dump)"]
    assert [name.partition(" (")[0] for name in names] == ["rank 0", "rank 1"]
    arrows = [e["ph"] for e in events if e.get("cat") == "arrow" and e["name"] == "same call"]
    assert sorted(arrows) == ["f", "s"]  # both ranks' clocks agree


# ---- hangs


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with contextlib.closing(Launcher()) as found:
        yield found


@needs_analyser
@pytest.mark.parametrize("case", [slow("stopped"), "holds the GIL"])
def test_the_doctor_dumps_ranks_that_cannot(launcher: Launcher, tmp_path: Path, case: str) -> None:
    folder = tmp_path / "dumps"
    with launcher.job(case, tmp_path, 3) as pids:
        command = (sys.executable, "-m", "ringcomm", "doctor", "--job", pids[0], "--dump", folder)
        done = run_command(*command, timeout_s=LIMIT_S)
        assert done.returncode == 0, done.stderr
        assert "rank 2 is the cause" in done.stdout
    assert {path.name for path in folder.iterdir()} == {f"rank{rank}" for rank in range(3)}
    said = torch_says(folder)
    assert "Not all ranks joining collective, sequence number: 1" in said
    assert "missing ranks: {2}" in said
    assert "hang_cases.py:" in said  # of the call that does not end
    merge([folder], tmp_path / "trace.json")
    assert '"wait for rank 2"' in (tmp_path / "trace.json").read_text(encoding="utf-8")


# ---- what users of other recorders have met


@in_ranks(2, fresh=True)
def test_messages_of_a_batch_end(rank: int, tmp_path: Path) -> None:
    """pytorch/pytorch#137969: they were never seen to end."""
    x, y = torch.ones(8), torch.empty(8)
    ops = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, y, 1 - rank)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    open_one: Any = dist.irecv(torch.empty(8), 1 - rank, tag=3)
    path = ringcomm.flight_dump(f"{tmp_path}/batch-")
    dist.barrier()  # the other rank's dump is there too
    dist.send(x, 1 - rank, tag=3)
    open_one.wait()
    states = [call["state"] for call in dump_of(path)["processes"][0]["calls"]]
    assert states == ["ended", "ended", "running"]


@in_ranks(2, fresh=True)
def test_a_dump_while_calls_run_has_whole_events(rank: int, tmp_path: Path) -> None:
    """A thread writes dumps while others are made."""
    found, is_over = [], threading.Event()

    def keep_dumping() -> None:
        while not is_over.is_set():
            found.append(dump_of(ringcomm.flight_dump(f"{tmp_path}/live-")))

    x = torch.ones(8)
    dist.all_reduce(x)
    thread = threading.Thread(target=keep_dumping)
    thread.start()
    for _ in range(1200):
        dist.all_reduce(x)
    is_over.set()
    thread.join()
    for calls in (dump["processes"][0]["calls"] for dump in found):
        assert len({call["number"] for call in calls}) == len(calls) <= 1024
        begins = [call["begin_ns"] for call in calls]
        assert begins == sorted(begins)


def test_an_event_that_is_being_replaced_is_left_out() -> None:
    def ring(*numbers: int) -> bytes:
        return b"".join(n.to_bytes(8, "little") + bytes(layout.EVENT_BYTES - 8) for n in numbers)

    found = layout.events(ring(4, 5, 0), ring(4, 0, 6), {}, lambda ticks: ticks)
    assert [event["number"] for event in found] == [4]


@in_ranks(2, fresh=True)
def test_a_group_in_the_place_of_another_has_none_of_its_calls(rank: int, tmp_path: Path) -> None:
    """The last group has the place of the first, which has ended."""
    for number in range(129):
        group = dist.new_group([0, 1])
        if number == 0:
            dist.all_reduce(torch.ones(8), group=group)
        dist.destroy_process_group(group)
    dist.barrier()
    process = dump_of(ringcomm.flight_dump(f"{tmp_path}/groups-"))["processes"][0]
    (last,) = {call["group"] for call in process["calls"] if call["op"] == "barrier"}
    assert process["groups"][str(last)]["name"] == "0"
    assert [call["op"] for call in process["calls"] if call["group"] != last] == []
