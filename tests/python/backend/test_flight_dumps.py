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
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
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
from _ringcomm import start as cli
from ringcomm import MismatchError, PeerDiedError
from ringcomm.trace import dumps, layout, torch_dumps
from ringcomm.trace.merge import merge

needs_analyser = pytest.mark.skipif(
    importlib.util.find_spec("torch.distributed.flight_recorder") is None,
    reason="this torch has no analyser of flight recorders",
)


def dump_of(path: str | Path) -> dict[str, Any]:
    return dict(pickle.loads(Path(path).read_bytes()))


def events_of(trace: Path) -> list[dict[str, Any]]:
    return list(json.loads(trace.read_text(encoding="utf-8"))["traceEvents"])


def trace_of(folder: Path, path: Path) -> tuple[list[str], list[dict[str, Any]], list[str]]:
    """Merges dumps into a trace: its notes, events, and names of ranks."""
    notes, totals = merge([folder], path)
    events = events_of(path)
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert totals[-1] == f"{len(names)} ranks, {len(events)} events"
    return notes, events, names


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

    notes, events, names = trace_of(folder, tmp_path / "trace.json")
    (note,) = [note for note in notes if note.startswith("rank 2 (dump): ")]
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
    merge([tmp_path], tmp_path / "trace.json")
    assert events_of(tmp_path / "trace.json")


def reduce_and_dump(rank: int) -> None:
    dist.all_reduce(torch.ones(8))
    ringcomm.flight_dump()


def test_of_a_process_with_both_the_recording_is_in_the_trace(tmp_path: Path) -> None:
    recorded = tmp_path / "recorded"
    env = [{"RINGCOMM_FLIGHT_DUMP": f"{recorded}/"}] * 2
    env[1] = {**env[1], "RINGCOMM_TRACE": str(recorded)}
    run_ranks(2, reduce_and_dump, fresh=True, env=env)
    notes, events, names = trace_of(recorded, tmp_path / "trace.json")
    assert [note.partition(":")[0] for note in notes] == ["rank 0 (dump)"]
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


@pytest.mark.slow
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


# ---- dumps that a program asks for, and files that cannot be read


def ask(rank: int, folder: Path) -> None:
    x = torch.ones(16)
    for _ in range(1100):
        dist.all_reduce(x)
    path = folder / f"asked-{rank}"
    assert ringcomm.flight_dump(f"{folder}/asked-") == path
    assert dump_of(path)["reason"] == "request"
    assert os.environ.get("RINGCOMM_FLIGHT_DUMP") is None
    with pytest.raises(ValueError, match="give a prefix, or set the environment variable"):
        ringcomm.flight_dump()
    dist.distributed_c10d._get_default_group().abort()
    with pytest.raises(ringcomm.RingcommError):  # which is not dumped, without the variable
        dist.all_reduce(x)


@pytest.fixture(scope="module")
def a_job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    run_ranks(2, ask, folder, fresh=True)
    return folder


def test_a_program_asks_for_a_dump(a_job: Path) -> None:
    assert sorted(path.name for path in a_job.iterdir()) == ["asked-0", "asked-1"]
    own, peer = dump_of(a_job / "asked-0")["processes"]
    assert [call["number"] for call in own["calls"]] == list(range(77, 1101))
    assert len(peer["calls"]) == dumps.NUM_CALLS_OF_PEER


def test_a_prefix_is_merged_as_a_folder_is(a_job: Path, tmp_path: Path) -> None:
    """RINGCOMM_FLIGHT_DUMP=dumps writes dumps0, and `--merge dumps` found no folder."""
    for path in a_job.iterdir():
        shutil.copy(path, tmp_path / path.name)
    (tmp_path / "other-0").write_text("of another program")
    traces: list[list[dict[str, Any]]] = []
    for source in (a_job, tmp_path / "asked"):
        output = tmp_path / f"trace-{len(traces)}"
        assert cli.run(["trace", "--merge", str(source), "-o", str(output)]) == 0
        traces.append(events_of(output))
    assert traces[0] == traces[1]
    assert len(traces[0]) > 1000


@in_ranks(2, fresh=True)
def test_a_forked_child_does_not_dump_its_parent(rank: int, tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            ringcomm.flight_dump(f"{tmp_path}/child-")
        except ValueError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert list(tmp_path.iterdir()) == []


def test_a_process_without_a_group_has_nothing_to_dump(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no group of ringcomm of several ranks"):
        ringcomm.flight_dump(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


@needs_analyser
def test_only_calls_that_all_ranks_still_have_are_compared(a_job: Path) -> None:
    """Of 1,100 calls the recorders have the last 1,024."""
    assert "Not all ranks" not in torch_says(a_job)
    for rank in range(2):
        entries = dump_of(a_job / f"asked-{rank}")["entries"]
        assert [entry["collective_seq_id"] for entry in entries] == list(range(76, 1100))
        assert [entry["record_id"] for entry in entries] == list(range(1024))
    own, peer = (known.record for known in dumps.read([a_job]))
    later = replace(peer, calls=peer.calls[100:])
    entries = torch_dumps.entries_of(own, [later], 0, [])["entries"]
    assert [entry["collective_seq_id"] for entry in entries] == list(range(176, 1100))


# ---- bad input


def edit(folder: Path, change: Callable[[Any], Any]) -> None:
    path = folder / "asked-0"
    dump = dump_of(path)
    change(dump)
    path.write_bytes(pickle.dumps(dump))


def cut(folder: Path) -> None:
    path = folder / "asked-0"
    path.write_bytes(path.read_bytes()[:-1000])


def without_its_calls(dump: Any) -> None:
    del dump["processes"][0]["calls"][3]["op"]
    del dump["processes"][0]["calls"][4]["begin_ns"]


def of_another_job(dump: Any) -> None:
    dump["processes"][0]["started_ns"] += 1


def emptied(folder: Path) -> None:
    for path in folder.iterdir():
        path.write_text('{"traceEvents": []}')


SPOILS: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut": (cut, "asked-0 is truncated or damaged"),
    "of another version": (
        partial(edit, change=lambda dump: dump.update(format_version=1)),
        "asked-0 is a dump of format 1, which ringcomm",
    ),
    "without its calls": (partial(edit, change=without_its_calls), "asked-0 is damaged"),
    "with a function": (
        partial(edit, change=lambda dump: dump.update(reason=os.getpid)),
        "posix.getpid is no part of a dump",
    ),
    "of another job": (
        partial(edit, change=of_another_job),
        "are dumps of different jobs: rank 0 is process",
    ),
    "emptied": (emptied, "no"),
}


@pytest.mark.parametrize("spoil", SPOILS)
def test_what_cannot_be_read_is_refused_in_one_line(
    tmp_path: Path, a_job: Path, capfd: pytest.CaptureFixture[str], spoil: str
) -> None:
    folder, output = tmp_path / "job", tmp_path / "output"
    shutil.copytree(a_job, folder)
    spoiled, words = SPOILS[spoil]
    spoiled(folder)
    command = ["trace", "--merge", str(folder), "-o", str(output)]
    with pytest.raises(SystemExit) as ended:
        cli.run(command)
    assert ended.value.code == 2
    said = capfd.readouterr().err
    assert words in said
    assert said.startswith("ringcomm trace: ")
    assert said.count("\n") == 1
    assert not output.exists()
