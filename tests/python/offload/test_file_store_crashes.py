"""FileStore after kills and power cuts at every operation, twice, and with a disk that fails."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import slow
from crashing_disk import Disk, Op, State, crashes

from ringcomm.parallel.offload import FileStore

INDICES = {"index.0.json", "index.1.json"}
NUM_ELEMS = 700  # of 8 bytes: more than a page


class Run:
    """Steps of a job. No two tensors that it ever puts are equal; `info` says which are current."""

    def __init__(self, folder: Path, disk: Disk | None, values: Iterator[int]) -> None:
        self.store = FileStore(folder, direct=False)
        self._disk, self._values = disk, values
        self._info: dict[str, Any] | None = None  # of a commit that has not returned

    @property
    def number(self) -> int:
        """Of the last step."""
        number: int = self.store.info.get("step", 0)
        return number

    def step(self) -> None:
        info = self.store.info
        step = info.get("step", 0) + 1
        tensors = dict(info.get("tensors", {}))
        self._mark("begun", step)
        for key in ("a", "b", *([f"new{step}"] if step % 2 else [])):
            tensors[key] = next(self._values)
            self.store.put(key, torch.full([NUM_ELEMS], tensors[key]))
        self._info = {"step": step, "tensors": tensors}
        self.commit()

    def commit(self) -> None:
        """Ends a step; also once more, where that has failed."""
        if self._info is not None and self._info != self.store.info:
            self.store.commit(self._info)
            self._mark("done", self._info["step"])

    def roll_back(self) -> None:
        self._mark("leaving", self.number - 1)
        self.store.roll_back()
        self._mark("left", self.number)

    def _mark(self, what: str, step: int) -> None:
        if self._disk is not None:
            self._disk.mark((what, step))


def begin(folder: Path, num_steps: int, values: Iterator[int]) -> None:
    folder.mkdir()
    run = Run(folder, None, values)
    for _ in range(num_steps):
        run.step()
    run.store.close()


def check_values(store: FileStore) -> None:
    expected = store.info.get("tensors", {})
    assert sorted(store.keys()) == sorted(expected)
    for key, value in expected.items():
        assert (store.get(key, torch.empty(NUM_ELEMS, dtype=torch.int64)).wait() == value).all()


def allowed(first: int, done: list[Op]) -> tuple[set[int], bool]:
    """The steps that may be found after some operations, and whether one back has to be there."""
    steps, is_between = {first}, False
    for op in done:
        is_between = op.kind == "mark" and op.mark[0] == "done" and op.mark[1] > 1
        if op.kind == "mark":
            what, step = op.mark
            steps = {step} if what in ("done", "left") else {*steps, step}
    return steps, is_between


def check(state: State, folder: Path, steps: set[int], has_previous: bool) -> None:
    """That a folder has one of the commits, whole, and nothing that was left over."""
    state.write(folder)
    store = FileStore(folder, direct=False)
    assert store.info.get("step", 0) in steps
    check_values(store)
    names = {path.name for path in folder.iterdir()}
    assert names <= {"data", *INDICES}
    if store.generation:
        assert (folder / "data").stat().st_size == len(store.keys()) * 2 * 8192
    step = store.info.get("step", 0)
    try:
        store.roll_back()
    except ValueError:
        assert not has_previous
    else:
        assert store.info["step"] == step - 1
        check_values(store)
    store.close()


def what_matters(state: State) -> str:
    """What decides how a store goes on from a state: not the data that no index names."""
    contents = state.contents()
    indices = {
        name: data.partition(b"\n")[0].decode() for name, data in contents.items() if name != "data"
    }
    of_data = r'"tensors": {.*?}|"checksums": \[.*?\]'
    indices = {name: re.sub(of_data, "", text) for name, text in indices.items()}
    return json.dumps([indices, len(contents.get("data", b""))], sort_keys=True)


def run_and_check(
    folder: Path, names: Iterator[Path], values: Iterator[int], kind: str
) -> list[tuple[State, set[int]]]:
    """Runs a job in a folder and checks every crash; returns those that differ in what matters."""
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(folder, patch)
        first = json_info(disk.before)
        run = Run(folder, disk, values)
        if kind == "roll_back":
            run.roll_back()
        for _ in range(2):
            run.step()
        run.store.close()
    disk.check_is_complete()
    found: dict[str, tuple[State, set[int]]] = {}
    seen = set()
    for count, state in crashes(disk.before, disk.ops):
        steps, has_previous = allowed(first, disk.ops[:count])
        mark = (repr(sorted(state.contents().items())), str(steps), has_previous)
        if mark not in seen:
            seen.add(mark)
            check(state, next(names), steps, has_previous)
            found.setdefault(what_matters(state), (state, steps))
    assert len(seen) > 50
    return list(found.values())


def json_info(state: State) -> int:
    """The last step in a state, read without a FileStore."""
    contents = state.contents()
    indices = [json.loads(contents[name].partition(b"\n")[0]) for name in INDICES & contents.keys()]
    last: dict[str, Any] = max(indices, key=lambda found: found["generation"], default={"info": {}})
    step: int = last["info"].get("step", 0)
    return step


@pytest.mark.parametrize(
    ("num_steps", "kind"), [(0, "steps"), slow(3, "steps"), slow(3, "roll_back")]
)
def test_two_crashes_at_every_operation(num_steps: int, kind: str, tmp_path: Path) -> None:
    values = itertools.count(1)
    names = (tmp_path / f"{i}" for i in itertools.count())
    begin(tmp_path / "first", num_steps, values)
    again = run_and_check(tmp_path / "first", names, values, kind)
    assert len(again) > 5
    for state, _ in again:
        folder = next(names)
        state.write(folder)
        run_and_check(folder, names, values, "steps")


@pytest.mark.parametrize("code", [errno.ENOSPC, slow(errno.EIO)])
def test_every_operation_fails_once(code: int, tmp_path: Path) -> None:
    """The error names the folder, the step succeeds when done again, and no crash loses more."""
    values = itertools.count(1)
    names = (tmp_path / f"{i}" for i in itertools.count())
    for fails_at in itertools.count():
        folder = next(names)
        begin(folder, 3, values)
        run = None
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(folder, patch, fails_at, code)
            for _ in range(2):
                try:
                    run = run or Run(folder, disk, values)
                    while run.number < 5:
                        run.step()
                    break
                except OSError as error:
                    failure = error
                assert str(folder) in str(failure)
                assert failure.errno == code
                if run is not None and code == errno.ENOSPC:
                    with contextlib.suppress(OSError):  # some tensors are to be put again
                        run.commit()
            assert run is not None
            assert run.number == 5
            check_values(run.store)
            run.store.close()
        disk.check_is_complete()
        seen = set()
        for count, state in crashes(disk.before, disk.ops, every_loss=False):
            if (mark := repr(sorted(state.contents().items()))) not in seen:
                seen.add(mark)
                steps, _ = allowed(3, disk.ops[:count])
                check(state, next(names), steps, has_previous=False)
        if not disk.has_failed:
            break
    assert fails_at > 20
