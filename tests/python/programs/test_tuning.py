"""Tuning files: what is written is read back, what is wrong is named; and the fit behind them."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import init_group, run_ranks

import ringcomm
from _ringcomm.status import RankError
from ringcomm import tuning
from ringcomm.cost_model import NOT_FITTED, Costs, Machine
from ringcomm.measure import algorithms
from ringcomm.measure import ranks as measuring
from ringcomm.measure.algorithms import CACHES, NEVER_BYTES, cross_over_bytes, fit_costs

KIB, MIB = 1 << 10, 1 << 20
SIZES = [KIB << k for k in range(0, 17, 2)]  # 1 KiB to 64 MiB: several pieces of 1 MiB


def make_world(world_size: int, one_shot_max_bytes: int = 256 * KIB) -> tuning.World:
    names = ("one_shot", "two_shot")
    points = tuple(tuning.Point(1024, name, 1.0, 2.0, 3.5, 100) for name in names)
    return tuning.World(world_size, True, one_shot_max_bytes, points)


def make_tuning() -> tuning.Tuning:
    machine = {"cpu": "a CPU", "cores": 2, "kernel": "6.18"}
    worlds = (make_world(2), make_world(4, 48 * KIB))
    date = "2026-11-20T10:00:00+00:00"
    return tuning.Tuning(date, machine, "2.13.0", "0.1.0", 1, Costs(), 1.2, worlds)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    tuning.save(make_tuning(), path)
    assert tuning.load(path) == make_tuning()
    assert tuning.load(str(path)).one_shot_max_bytes(2) == 256 * KIB
    assert [make_tuning().one_shot_max_bytes(n) for n in (4, 3)] == [48 * KIB, None]
    assert [entry.name for entry in tmp_path.iterdir()] == ["tuning.json"]


def test_a_wrong_file_is_named(tmp_path: Path) -> None:
    """With the file and what was expected. None removes a field."""
    file = tmp_path / "tuning.json"
    cases: list[tuple[tuple[Any, ...], Any, str]] = [
        (
            ("schema",),
            1,
            "schema must be 3 for this .*, got 1: write the file again",
        ),
        (("schema",), None, "field schema is missing"),
        (("machine",), 5, "not written by `ringcomm tune`"),
        (("worlds",), [], "worlds must have one entry for each"),
        (("worlds", 1), 7, "not written by `ringcomm tune`"),
        (("worlds", 1, "world_size"), 2, r"worlds must have one entry .* got \[2, 2\]"),
        (("worlds", 0, "world_size"), True, "world_size must be a whole .* from 2 to 64, got True"),
        (("worlds", 0, "one_shot_max_bytes"), 0, "one_shot_max_bytes must be a whole .* from 1"),
        (("worlds", 0, "one_shot_max_bytes"), None, "field one_shot_max_bytes is missing"),
        (("costs", "call_us"), -1, "call_us must be a number from 0 to .* got -1"),
        (("costs", "copy_us"), None, "field copy_us is missing"),
        (("costs", "node_gb_per_s"), 0, "node_gb_per_s must be a number from 0.001"),
        (("machine", "cores"), 0, "cores must be a whole number from 1"),
        (("worlds", 0, "points", 1, "algorithm"), None, "missing .* 'algorithm'"),
    ]
    texts = [(b'{"schema": 1', "not JSON"), (b"\xff\xfe", "not JSON"), (b"[1]", "not written")]
    for path, value, message in cases:
        tuning.save(make_tuning(), file)
        content = json.loads(file.read_text())
        place = content
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value
        if value is None:
            del place[path[-1]]
        texts.append((json.dumps(content).encode(), message))
    for text, message in texts:
        file.write_bytes(text)
        with pytest.raises(ValueError, match=rf"tuning file '{file}': .*{message}"):
            tuning.load(file)


def point(name: str, size: int, us: float) -> tuning.Point:
    return tuning.Point(size, name, us, us, us, 1)


def measured(world_size: int, machine: Machine, factors: dict[str, float]) -> tuning.World:
    """A world whose times are the model's, times a factor by algorithm."""
    points = tuple(
        point(name, size, machine.microseconds(name, size, world_size) * factor)
        for name, factor in factors.items()
        for size in SIZES
    )
    return tuning.World(world_size, True, 64 * KIB, points)


EVEN = {"one_shot": 1.0, "two_shot": 1.0}


@settings(deadline=None, max_examples=20)
@given(
    call=st.floats(1, 10),
    round_us=st.floats(0.1, 20),
    switch=st.floats(1, 50),
    copy=st.floats(20, 300),
    total=st.floats(5, 100),
    cache_bytes=st.sampled_from(CACHES),
)
def test_the_fit_of_times(
    call: float, round_us: float, switch: float, copy: float, total: float, cache_bytes: int
) -> None:
    """Of a machine whose costs are known, with numbers of ranks that were not measured too."""
    costs = Costs(
        call_us=call,
        round_us=round_us,
        switch_us=switch,
        copy_us=copy,
        sum_us=total,
        memory_us=60.0,
        cache_bytes=cache_bytes,
    )
    machine = Machine(2, 1, costs)
    found, worst = fit_costs([measured(n, machine, EVEN) for n in (2, 4, 16)], 2)
    assert worst == pytest.approx(1, abs=0.02)
    fitted = Machine(2, 1, found)
    for op in ("all_reduce", "all_gather", "all_to_all"):
        for size in SIZES:
            expected = machine.microseconds(op, size, 32)
            assert fitted.microseconds(op, size, 32) == pytest.approx(expected, rel=0.1)
    assert found.defaults == NOT_FITTED


def test_what_cannot_be_measured_keeps_its_default() -> None:
    """No core is shared by two ranks on four, so nothing says what a switch costs."""
    machine = Machine(4, 1, Costs(switch_us=77.0))
    found, _ = fit_costs([measured(2, machine, EVEN)], 4)
    assert "switch_us" in found.defaults
    assert found.switch_us == Costs().switch_us
    with pytest.raises(ValueError, match="the time of an algorithm that runs"):
        fit_costs([tuning.World(2, True, 1, (point("one_shot", 1024, 3.0),) * 2)], 2)


def test_costs_that_two_ranks_cannot_tell_apart_keep_the_ratio_of_their_defaults() -> None:
    """Of one algorithm at sizes without bytes, a call and its rounds are one number."""
    points = (point("one_shot", 4, 6.0),) * 3
    found, worst = fit_costs([tuning.World(2, True, 64 * KIB, points)], 2)
    assert worst == pytest.approx(1, abs=0.01)
    assert 0 < found.round_us < found.call_us < 6


def test_no_cost_is_negative() -> None:
    """As measured beside other programs: two_shot was the faster one at every size."""
    world = measured(2, Machine(2), {"one_shot": 1.0, "two_shot": 0.6})
    found, worst = fit_costs([world], 2)
    assert min(found.call_us, found.round_us, found.copy_us, found.sum_us) >= 0
    assert 1.05 < worst < 1.7


def test_cross_over() -> None:
    """In the middle of the logarithms, or nearer to the size where it won by little."""
    for gains, expected in (([2.0, 2.0, 0.5], 8 * KIB), ([2.0, 1.25, 0.5], 5 * KIB)):
        ratios = dict(zip((KIB, 4 * KIB, 16 * KIB), gains, strict=True))
        assert cross_over_bytes(ratios) == pytest.approx(expected, rel=0.1)


@settings(deadline=None)
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=12))
def test_no_other_measured_size_would_choose_better(gains: list[float]) -> None:
    """The oracle tries every threshold, and counts the time lost by each as a factor."""
    ratios = {KIB << index: gain for index, gain in enumerate(gains)}

    def lost(threshold: int) -> float:
        product = 1.0
        for size, ratio in ratios.items():
            product *= max(1.0, 1 / ratio) if size <= threshold else max(1.0, ratio)
        return product

    best = min(map(lost, [NEVER_BYTES, *ratios]))
    found = cross_over_bytes(ratios)
    assert lost(found) == pytest.approx(best)
    assert found <= max(ratios)  # nobody knows about more


def algorithm_used(rank: int) -> list[str]:
    dist.all_reduce(torch.ones(1000))
    return [name for op, name in ringcomm.stats(dist.group.WORLD) if op == "all_reduce"]


@pytest.mark.parametrize(
    ("tuned_world_size", "limit_bytes", "algorithm"),
    [(2, 3999, "two_shot"), (2, 4000, "one_shot"), (3, 1, "one_shot")],
)
def test_a_group_takes_the_cross_over_for_its_size(
    tmp_path: Path, tuned_world_size: int, limit_bytes: int, algorithm: str
) -> None:
    path = str(tmp_path / "tuning.json")
    world = make_world(tuned_world_size, limit_bytes)
    tuning.save(dataclasses.replace(make_tuning(), worlds=(world,)), path)
    how: dict[str, Any] = {"pg_options": ringcomm.Options(tuning=path)}
    if limit_bytes == 4000:
        how = {"env": {"RINGCOMM_TUNING": path}}
    assert run_ranks(2, algorithm_used, fresh=True, **how) == [[algorithm]] * 2


def make_group(rank: int, folder: str, name: str) -> str:
    path = f"{folder}/{name}{rank}.json"
    if name == "own":
        tuning.save(
            dataclasses.replace(make_tuning(), worlds=(make_world(2, 1000 + rank),)),
            path,
        )
    options = ringcomm.Options(tuning=path)
    with pytest.raises((ringcomm.MismatchError, FileNotFoundError)) as error:
        init_group(rank, 2, f"{folder}/{name}-store", pg_options=options)
    return f"{type(error.value).__name__}: {error.value}"


def test_files_that_differ_or_are_missing_make_no_group(tmp_path: Path) -> None:
    for text in run_ranks(2, make_group, str(tmp_path), "own", backend=None, fresh=True):
        assert text.startswith("MismatchError")
        assert "one_shot_max_bytes=1000" in text
        assert "one_shot_max_bytes=1001" in text
    for text in run_ranks(2, make_group, str(tmp_path), "no", backend=None, fresh=True):
        said = r"FileNotFoundError: .*tuning file .*no[01]\.json.*not exist.*`ringcomm tune"
        assert re.match(said, text)


# ---- a measurement that takes long, and one that fails


class Clock:
    """Hours pass with each report, or with each look at the clock."""

    def __init__(self, of_look_s: float) -> None:
        self.now_s, self._of_look_s = 0.0, of_look_s

    def monotonic(self) -> float:
        self.now_s += self._of_look_s
        return self.now_s


def test_reports_may_take_hours_in_all_but_not_each(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(0.0)
    monkeypatch.setattr(measuring, "time", clock)
    answers, told = multiprocessing.Pipe(duplex=False)

    def report(team: measuring.Team) -> None:
        for number in range(3):
            team.report(number)
            assert answers.poll(60)
            answers.recv()

    found: list[int] = []

    def keep(number: int) -> None:
        found.append(number)
        clock.now_s += 0.7 * measuring.RUN_TIMEOUT_S
        told.send(None)

    measuring.run_ranks(1, report, keep)
    assert found == [0, 1, 2]
    monkeypatch.setattr(measuring, "time", Clock(measuring.RUN_TIMEOUT_S / 3))
    with pytest.raises(RankError, match="ranks reported nothing for 7200 s"):
        measuring.run_ranks(1, lambda team: signal.pause(), found.append)


@pytest.mark.parametrize("error", [RankError, KeyboardInterrupt])
def test_what_was_measured_before_an_error_is_kept(
    error: type[BaseException],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def measure(world_size: int, *_: Any) -> list[algorithms.SizeTimes]:
        if world_size == 4:
            raise error("rank 3: a traceback")
        points = tuple(tuning.Point(1024, name, 1.0, 2.0, 3.5, 100) for name in algorithms.TUNED)
        return [algorithms.SizeTimes(points, 1.5, 0.0)]

    monkeypatch.setattr(algorithms, "measure_algorithms", measure)
    path = tmp_path / "tuning.json"
    path.write_text("of an earlier run")
    with pytest.raises(error, match="a traceback"):
        algorithms.tune([2, 4], [1024], 0.1, 0, path)
    assert path.read_text() == "of an earlier run"
    partial = Path(f"{path}.interrupted")
    assert f"interrupted: {partial} has only the numbers of ranks above" in capsys.readouterr().out
    assert [world.world_size for world in tuning.load(partial).worlds] == [2]
