"""Tuning files: what is written is read back, what is wrong is named; and the fit behind them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import init_group, run_ranks

import ringcomm
from ringcomm import tuning
from ringcomm.measure.algorithms import NEVER_BYTES, cross_over_bytes, fit_cost, terms

KIB, MIB = 1 << 10, 1 << 20
SIZES = [KIB << k for k in range(0, 13, 2)]  # 1 KiB to 4 MiB: several pieces of 1 MiB at the end


def make_world(world_size: int, one_shot_max_bytes: int = 256 * KIB) -> tuning.World:
    names = ("one_shot", "two_shot")
    points = tuple(tuning.Point(1024, name, 1.0, 2.0, 3.5, 100) for name in names)
    return tuning.World(world_size, 0.1, 90.0, 2.7, 1.2, True, one_shot_max_bytes, points)


def make_tuning() -> tuning.Tuning:
    machine = {"cpu": "a CPU", "cores": 2, "kernel": "6.18"}
    worlds = (make_world(2), make_world(4, 48 * KIB))
    return tuning.Tuning("2026-11-20T10:00:00+00:00", machine, "2.13.0", "0.1.0", worlds)


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
        (("schema",), 2, "schema must be 1 for this version of ringcomm, got 2"),
        (("schema",), None, "field schema is missing"),
        (("machine",), 5, "not written by `ringcomm tune`"),
        (("worlds",), [], "worlds must have one entry for each"),
        (("worlds", 1), 7, "not written by `ringcomm tune`"),
        (("worlds", 1, "world_size"), 2, r"worlds must have one entry .* got \[2, 2\]"),
        (("worlds", 0, "world_size"), True, "world_size must be a whole .* from 2 to 64, got True"),
        (("worlds", 0, "one_shot_max_bytes"), 0, "one_shot_max_bytes must be a whole .* from 1"),
        (("worlds", 0, "one_shot_max_bytes"), None, "field one_shot_max_bytes is missing"),
        (("worlds", 0, "alpha_us"), -1, "alpha_us must be a number from 0 to .* got -1"),
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


def model_points(world_size: int, alpha: float, beta: float, overhead: float) -> list[tuning.Point]:
    times = []
    for name in ("one_shot", "two_shot"):
        for size in SIZES:
            hand_overs, mib = terms(name, size, world_size)
            times.append(point(name, size, overhead + alpha * hand_overs + beta * mib))
    return times


def test_terms_are_those_of_the_design() -> None:
    """docs/design/collectives.md: hand-overs per MiB; (N-1) S and 2 (N-1) / N S."""
    assert terms("one_shot", 64 * KIB, 4) == (1, 3 / 16)
    assert terms("two_shot", 2 * MIB + 4, 2) == (6, 2 + 4 / MIB)


@settings(deadline=None)
@given(
    world_size=st.integers(2, 64),
    alpha=st.floats(0.05, 50),
    beta=st.floats(5, 500),
    overhead=st.floats(0, 10),
)
def test_the_fit_of_times(world_size: int, alpha: float, beta: float, overhead: float) -> None:
    cost = fit_cost(model_points(world_size, alpha, beta, overhead), world_size)
    found = (cost["alpha_us"], cost["beta_us_per_mib"], cost["overhead_us"])
    assert found == pytest.approx((alpha, beta, overhead), rel=1e-3, abs=1e-3)
    assert cost["worst_fit"] == pytest.approx(1, abs=1e-3)


def test_no_coefficient_is_negative() -> None:
    """As measured beside other programs: two_shot was the faster one at every size."""
    points = [
        point(p.algorithm, p.bytes, p.p50_us * (0.7 if p.algorithm == "two_shot" else 1))
        for p in model_points(2, 1.0, 80.0, 12.0)
    ]
    cost = fit_cost(points, 2)
    assert cost["alpha_us"] == 0
    assert min(cost["beta_us_per_mib"], cost["overhead_us"]) > 0
    assert 1.1 < cost["worst_fit"] < 1.6
    with pytest.raises(ValueError, match="three measurements"):
        fit_cost(points[:2], 2)


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
    tuning.save(tuning.Tuning("", {}, "", "", (world,)), path)
    how: dict[str, Any] = {"pg_options": ringcomm.Options(tuning=path)}
    if limit_bytes == 4000:
        how = {"env": {"RINGCOMM_TUNING": path}}
    assert run_ranks(2, algorithm_used, fresh=True, **how) == [[algorithm]] * 2


def make_group(rank: int, folder: str, name: str) -> str:
    path = f"{folder}/{name}{rank}.json"
    if name == "own":
        tuning.save(tuning.Tuning("", {}, "", "", (make_world(2, 1000 + rank),)), path)
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
