"""Schedules without ranks: bubbles as exact fractions, live micro-batches, where models are cut."""

from __future__ import annotations

import itertools
import re
from contextlib import nullcontext
from fractions import Fraction
from typing import Any

import pytest
from schedule_simulation import simulate
from torch import nn

from ringcomm.parallel import pipeline
from ringcomm.parallel.pipeline.blocks import default_costs
from ringcomm.parallel.pipeline.schedules import make_plan
from ringcomm.planner.job import Mesh
from ringcomm.planner.models import find_model

RANKS = (1, 2, 3, 4, 8)
TIMES = ((1, 2), (0.5, 1.25))


@pytest.mark.parametrize("num_ranks", RANKS)
def test_bubbles_and_live_micro_batches(num_ranks: int) -> None:
    """(p-1) / (v m+p-1) with v stages a rank, whatever a backward takes."""
    p = num_ranks
    for forward, backward in TIMES:
        times: dict[str, Any] = {"forward_us": forward, "backward_us": backward}
        for schedule, num in itertools.product(("gpipe", "1f1b"), {p, p + 1, 4 * p + 3}):
            found = simulate(schedule, p, num, **times)
            assert found.bubble() == Fraction(p - 1, num + p - 1)
            assert found.span_us == (num + p - 1) * (Fraction(forward) + Fraction(backward))
            live = {i: num if schedule == "gpipe" else min(num, p - i) for i in range(p)}
            assert found.max_live() == live
        for num, v in ((p, 1), (2 * p, 3), (4 * p, 2)):
            interleaved = simulate("interleaved", p, num, num_stages_per_rank=v, **times)
            assert interleaved.bubble() == Fraction(p - 1, v * num + p - 1)
    # A third of 1F1B's idle time where F, I and W take one each: ZB-H1 (Qi et al. 2023).
    for num, v in itertools.product((p, 2 * p, 4 * p), (1, 2)):
        halved = simulate("zero-bubble", p, num, num_stages_per_rank=v)
        assert halved.bubble() == Fraction(p - 1, 3 * v * num + p - 1)
        if num >= 2 * p:  # fewer do not fill the V
            assert simulate("zbv", p, num).bubble() == Fraction(p - 1, 6 * num + p - 1)


def test_stages_that_are_not_alike() -> None:
    """The slowest sets the pace."""
    found = simulate("gpipe", 2, 10, forward_us=[1, 3], backward_us=[2, 6])
    assert found.span_us == 1 + 10 * 9 + 2
    assert found.busy_us(0) == 30
    with pytest.raises(ValueError, match="one time per stage, got 3 for 2 stages"):
        simulate("gpipe", 2, 10, forward_us=[1, 2, 3])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1", 2, 4, None), "schedule must be one of gpipe, 1f1b, .*got '1f1'"),
        (("1f1b", 4, 2, None), 'at least as many micro-batches as ranks, 4; .*schedule="gpipe"'),
        (("gpipe", 2, 0, None), "num_microbatches must be a whole number, 1 or more; got 0"),
        (("gpipe", 2, 2.0, None), "num_microbatches must be a whole number"),
        (("gpipe", 2, 4, 2), 'needs num_stages_per_rank=1, got 2: .* schedule="interleaved"'),
        (("zbv", 2, 4, 3), "zbv needs num_stages_per_rank=2, got 3"),
        (("zero-bubble", 4, 17, None), "17 micro-batches in 4 equal rounds: use 16 or 20"),
        (("interleaved", 4, 9, None), "9 micro-batches in 2 equal rounds: use 8 or 10"),
    ],
)
def test_numbers_that_do_not_go_together(
    arguments: tuple[str, int, int, int | None], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(*arguments)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zbv"])
def test_the_planner_has_the_same_rule(schedule: str) -> None:
    """Of torch's schedules: the number is a multiple of the number of rounds."""
    shape = find_model("llama-3-8b")
    for p, num in itertools.product((2, 3, 4, 8), range(8, 33)):
        fault = Mesh(pp=p).schedule_fault(shape, schedule, num)
        if schedule != "zbv":  # whose few micro-batches the planner leaves out
            assert (fault is None) == (schedule != "interleaved" or num % (num // p) == 0)
        with (
            nullcontext()
            if fault is None or schedule == "zbv"
            else pytest.raises(ValueError, match=re.escape(fault))
        ):
            make_plan(schedule, p, num)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_cut_is_the_best(num_stages: int) -> None:
    """Beside all cuts there are."""
    for costs in ([1, 1, 1, 1, 1, 1], [7, 1, 1, 1, 1, 9], [0, 0, 5, 1, 0, 2], [3, 1, 4, 1, 5, 9]):
        found = pipeline.cut(costs, num_stages)
        assert [i for stage in found for i in stage] == list(range(6))
        assert all(len(stage) for stage in found)
        every = []
        for inner in itertools.combinations(range(1, 6), num_stages - 1):
            edges = (0, *inner, 6)
            every.append(sorted((sum(costs[a:b]) for a, b in itertools.pairwise(edges)))[::-1])
        assert sorted(sum(costs[i] for i in stage) for stage in found)[::-1] == min(every)


def test_cuts_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="3 stages need 3 blocks or more, and the model has 2"):
        pipeline.cut([1, 1], 3)
    with pytest.raises(ValueError, match=r"got -1.* for block 1"):
        pipeline.cut([1, -1], 1)
    with pytest.raises(ValueError, match="got nan for block 0"):
        pipeline.cut([float("nan")], 1)
    with pytest.raises(ValueError, match="num_stages must be 1 or more, got 0"):
        pipeline.cut([1], 0)


def test_a_table_costs_nothing_and_a_head_that_shares_it_does() -> None:
    table = nn.Embedding(100, 8)
    head = nn.Linear(8, 100, bias=False)
    head.weight = table.weight
    assert default_costs([table, nn.Linear(8, 8), nn.Tanh(), head]) == [1, 73, 1, 801]
