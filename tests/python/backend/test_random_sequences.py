"""Random sequences of calls on overlapping groups of four ranks, against numpy.

CI runs the same sequences each time; `.ci/run stress` runs 10,000 others and prints their seed,
which RINGCOMM_SEQUENCE_SEED sets. What fails is printed with the command that runs it again.
"""

from __future__ import annotations

import itertools
import os
import shlex
from dataclasses import replace
from typing import Any

import pytest
from cases import slow
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from ranks import RankFailure, run_ranks
from sequence_calls import COLLECTIVES, KINDS, REDUCTIONS
from sequence_side import COMPLEX, REDUCED, Call, Side
from sequences import (
    FAMILY,
    KINDS_DRAWN,
    POOLS,
    SUBSETS,
    WAIT_S,
    WORLD,
    Case,
    draw_call,
    make_marks,
    run_case,
)

# Of sequences in all; those of a run are divided among the pools.
NUM_SEQUENCES = int(os.environ.get("RINGCOMM_SEQUENCES", "0"))
SEED = int(os.environ.get("RINGCOMM_SEQUENCE_SEED", "0")) or int.from_bytes(os.urandom(4), "big")
IS_STRESS = NUM_SEQUENCES > 0
# One draw of hypothesis's, which gets slower with the number of its examples.
PIECE = 250

# Forms of one collective, which ranks may mix.
OPERATION = {
    kind: kind.removesuffix("_into_tensor").removesuffix("_tensor").removesuffix("_single")
    for kind in COLLECTIVES
}


class Drawn:
    """Hypothesis's draws, as `random.Random` offers them."""

    def __init__(self, draw: Any) -> None:
        self._draw = draw

    def choice(self, values: Any) -> Any:
        return self._draw(st.sampled_from(values))

    def randint(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))


@st.composite
def cases(draw: Any, pool: str) -> Case:
    fresh: tuple[int, ...] = ()
    if draw(st.integers(0, 9)) == 9:
        fresh = draw(st.sampled_from(SUBSETS))
    groups = [*range(len(FAMILY)), *([-1] * 5 if fresh else [])]
    num_calls = draw(st.integers(1, 12))
    drawn, numbers = Drawn(draw), [len(members) for members, _ in FAMILY]
    calls = []
    for _ in range(num_calls):
        group = draw(st.sampled_from(groups))
        num_ranks = len(fresh) if group < 0 else numbers[group]
        calls.append(draw_call(drawn, KINDS_DRAWN, group, num_ranks))
    return Case(tuple(calls), fresh, pool)


@st.composite
def deviations(draw: Any, pool: str) -> Case:
    """A call at which one rank of a group has something else."""
    fresh = draw(st.sampled_from(SUBSETS))
    drawn, kinds = Drawn(draw), list(COLLECTIVES)
    calls = [draw_call(drawn, kinds, -1, len(fresh)) for _ in range(draw(st.integers(1, 4)))]
    # A monitored barrier is messages, which a collective elsewhere leaves to their time-out.
    calls = [replace(c, wait=0, uneven=0 if c.kind == "barrier" else c.uneven) for c in calls]
    at = draw(st.integers(0, len(calls) - 1))
    calls[at] = call = replace(calls[at], uneven=0)
    changes: list[dict[str, Any]] = []
    for kind in COLLECTIVES:
        if OPERATION[kind] != OPERATION[call.kind]:
            is_possible = kind not in REDUCTIONS or call.dtype in REDUCED
            changes.append({"kind": kind} if is_possible else {"kind": kind, "dtype": "float32"})
    if call.kind != "barrier":
        changes += [{"size": call.size + 1}] * 4
        other = "int32" if call.dtype != "int32" else "uint32"  # which every operation has
        changes += [{"dtype": other}] * 4
    if call.kind in ("broadcast", "reduce", "gather", "scatter"):
        changes += [{"root": (call.root + 1) % len(fresh)}] * 4
    if call.kind in REDUCTIONS:
        others = ("avg", "sum") if call.dtype in COMPLEX else ("max", "min")
        changes += [{"op": others[call.op == others[0]]}] * 4
    deviant = draw(st.integers(0, len(fresh) - 1))
    return Case(tuple(calls), fresh, pool, (at, deviant, draw(st.sampled_from(changes))))


# ---- running


serials = itertools.count(1)
failures: list[str] = []


@pytest.fixture(scope="module")
def marks(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_marks(tmp_path_factory.mktemp("sequences") / "marks")


def check(case: Case, marks: str) -> None:
    __tracebackhide__ = True
    try:
        results = run_all(case, marks)
        wrong = [f"rank {rank}: {text}" for rank, texts in enumerate(results) for text in texts]
    except RankFailure as failure:
        wrong = [str(failure)]
    if wrong:
        again = f"RINGCOMM_SEQUENCE={shlex.quote(repr(case))} pytest -s"
        command = f"{again} tests/python/backend/test_random_sequences.py"
        text = "\n".join([*wrong, f"\nRun this sequence again:\n{command}"])
        if IS_STRESS and not failures:  # to make it simpler may take minutes
            print(f"\n{text}", flush=True)
        failures.append(text)
        raise AssertionError(text)


def run_all(case: Case, marks: str, mutation: str = "") -> list[list[str]]:
    args = (case, next(serials), marks, mutation)
    return run_ranks(
        WORLD, run_case, *args, env=POOLS[case.pool], group_timeout_s=WAIT_S, timeout_s=WAIT_S + 10
    )


def explore(strategy: st.SearchStrategy[Case], num_cases: int, piece: int, marks: str) -> None:
    """Runs drawn cases: always the same in CI, of a seed that is printed under `.ci/run stress`."""

    @settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        derandomize=not IS_STRESS,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def run(case: Case) -> None:
        check(case, marks)

    if IS_STRESS:
        print(f"RINGCOMM_SEQUENCE_SEED={SEED}, piece {piece}")
        seed(SEED + piece)(run)
    run()


def pieces(of_ci: dict[str, int], share: float) -> list[Any]:
    """Pool, cases, and number of each piece; none where one sequence is to be run again.

    In `make test` the first half of the sequences of CI.
    """
    if "RINGCOMM_SEQUENCE" in os.environ:
        return []
    if not IS_STRESS:
        halves = [(pool, num_cases // 2, 0) for pool, num_cases in of_ci.items()]
        return [*halves, *(slow(pool, num_cases, 0) for pool, num_cases in of_ci.items())]
    found = []
    for pool, part in {"shm": 0.7, "messages": 0.15, "hosts": 0.15}.items():
        num_cases = round(share * part * NUM_SEQUENCES)
        sizes = [PIECE] * (num_cases // PIECE) + [num_cases % PIECE] * (num_cases % PIECE > 0)
        found += [(pool, size, piece) for piece, size in enumerate(sizes)]
    return found


@pytest.mark.parametrize(
    ("pool", "num_cases", "piece"), pieces({"shm": 220, "messages": 40, "hosts": 40}, 1.0)
)
def test_sequences(pool: str, num_cases: int, piece: int, marks: str) -> None:
    explore(cases(pool), num_cases, piece, marks)


@pytest.mark.parametrize(
    ("pool", "num_cases", "piece"), pieces({"shm": 20, "messages": 6, "hosts": 6}, 0.1)
)
def test_calls_that_differ(pool: str, num_cases: int, piece: int, marks: str) -> None:
    """A rank that makes another call: MismatchError on all ranks, and no wrong result before."""
    explore(deviations(pool), num_cases, piece, marks)


@pytest.mark.skipif("RINGCOMM_SEQUENCE" not in os.environ, reason="no sequence to run again")
def test_again(marks: str) -> None:
    check(eval(os.environ["RINGCOMM_SEQUENCE"], {"Case": Case, "Call": Call}), marks)


# ---- the model notices


# With this variety all that can be is in place.
IN_PLACE = 22


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "barrier"])
@pytest.mark.parametrize("variety", [0, IN_PLACE])
def test_errors_are_found(kind: str, variety: int, marks: str) -> None:
    """One element changed, or two ranks taken for each other."""
    # With factors that differ, so that the order of the ranks matters to reductions as well; of
    # messages one, from rank 0; of operators all_gather.
    op = "premul_sum" if kind in REDUCTIONS else "sum"
    uneven = {"messages": 2, "operators": 3}.get(kind, 0)
    case = Case((Call(kind, size=50, op=op, uneven=uneven, variety=variety),))
    side = Side(case.calls[0], 0, 0, range(WORLD), None, None)
    assert side.is_in_place == (variety == IN_PLACE) or uneven
    check(case, marks)
    assert eval(repr(case), {"Case": Case, "Call": Call}) == case  # as a failure prints it
    if kind != "objects":
        assert any(run_all(case, marks, "off_by_one"))
    assert any(run_all(case, marks, "swapped"))
