"""Dumps of the flight recorder that a program asks for, and files that cannot be read.

On errors and from outside: test_flight_dumps.py.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks, run_ranks
from test_flight_dumps import dump_of, events_of, needs_analyser, torch_says

import ringcomm
from _ringcomm import start as cli
from ringcomm.trace import dumps, torch_dumps


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
