"""The doctor's verdicts on records that are made here: those that a staged job has only sometimes.

Of jobs that hang: test_job_doctor.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ringcomm.measure.verdict import Rank, verdict
from ringcomm.trace.layout import ANY_RANK, NOBODY, Call, Group, Record

PIDS, RANKS = [100, 101, 102, 103], [0, 1, 2, 3]
GROUP = Group("0", 1, "alive", 0, 4, "shm", "", -1, None, PIDS, RANKS)
KIND = {"num_bytes": 8, "dtype": "float32", "reduction": "sum", "algorithm": "one_shot"}


def call(
    op: str = "all_reduce",
    seq: int = 5,
    waits_for: int = NOBODY,
    began_s: float = 9.0,
    ended_s: float | None = None,
    **more: Any,
) -> Call:
    fields: dict[str, Any] = {"number": 1, "group": 0, "peer": -1, "on_device": False, **KIND}
    fields |= {"op": op, "seq": seq, "waits_for": waits_for, "begin_ns": -round(began_s * 1e9)}
    fields["end_ns"] = None if ended_s is None else -round(ended_s * 1e9)
    return Call(**fields | {"state": "running" if ended_s is None else "ended"} | more)


def rank(number: int, *calls: Call, **changes: Any) -> Rank:
    group = replace(GROUP, rank=number, **changes)
    record = Record(100 + number, "0.1.0", 9, 0, 0, {0: group}, list(calls))
    return Rank(100 + number, record, state="S")


OVER = call(seq=4, began_s=11, ended_s=10)


def say(*ranks: Rank) -> tuple[str, int | None]:
    return verdict(list(ranks), 0)


def test_a_receive_from_any_rank_does_not_hide_a_wait() -> None:
    """As a server's thread, which waits for ever."""
    server = rank(0, call("recv", 0, ANY_RANK, 99.0))
    text, cause = say(server, rank(1, call(waits_for=2)), rank(2, OVER))
    assert cause == 2, text
    failed = rank(1, state="failed", failure="no memory", culprit=1)
    assert say(server, failed, rank(2), rank(3))[1] == 1
    text, cause = say(server, rank(1), rank(2), rank(3))
    assert (text, cause) == ("rank 0 is in recv with tag 0 of group 0 and waits for any rank", 0)


def test_ranks_in_the_same_call_exchange_data() -> None:
    text, cause = say(rank(0, call(waits_for=1)), rank(1, call(waits_for=0)))
    assert cause is None
    assert text.startswith("ranks 0 and 1 exchange data in all_reduce #5 of group 0"), text


def test_who_is_behind_in_a_call() -> None:
    """In no later slice and no later step than the others; two slices may be under way."""

    def in_ring(*places: tuple[int, int]) -> str:
        ranks = [
            rank(n, call(waits_for=(n - 1) % 3, slice=s, num_slices=4, step=t, num_steps=4))
            for n, (s, t) in enumerate(places)
        ]
        text, cause = say(*ranks)
        assert cause is None
        return text

    assert "it takes long, and rank 1 is behind, in slice 1/4, step 2/4. Ask" in in_ring(
        (1, 3), (1, 2), (2, 2)
    )
    assert "and ranks 0 and 2 are behind, in slice 1/4, step 1/4" in in_ring((1, 1), (1, 3), (1, 1))
    for unclear in ([(1, 3), (2, 2), (2, 2)], [(1, 1)] * 3, [(0, 0), (1, 2), (1, 3)]):
        assert "behind" not in in_ring(*unclear)


def test_the_step_of_a_wait_is_in_the_verdict() -> None:
    text, _ = say(rank(0, call(waits_for=1, step=2, num_steps=6, slice=1, num_slices=1)), rank(1))
    assert text.endswith("Rank 0 waits for it in all_reduce #5 of group 0, step 2/6"), text
    text, _ = say(rank(0, call(waits_for=1, step=1, num_steps=1, slice=1, num_slices=1)), rank(1))
    assert text.endswith("of group 0"), text


def test_two_sends_that_wait_for_each_other() -> None:
    text, cause = say(
        rank(0, call("send", 3, 1, peer=1)), rank(1, call("send", 4, 0, peer=0)), rank(2), rank(3)
    )
    assert cause is None
    assert "rank 0 waits for 1 in send with tag 3 of group 0, for which rank 1 has no recv" in text
    assert "Start receives before sends" in text


def test_a_message_with_its_counterpart_is_not_called_unmatched() -> None:
    posted = call("recv", 3, peer=0)
    text, cause = say(rank(0, call("send", 3, 1, peer=1)), rank(1, OVER, posted))
    assert cause == 1
    assert "has no recv" not in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"state": "left"}, "it has left group 0, and sleeps outside any collective"),
        ({"state": "failed", "failure": "no memory"}, "its group 0 has failed, and it sleeps o"),
    ],
)
def test_a_rank_whose_side_of_the_group_has_ended(changes: dict[str, str], words: str) -> None:
    text, cause = say(rank(0, call(waits_for=1)), rank(1, OVER, **changes))
    assert (cause, words in text) == (1, True), text


STACK = ["/lib/python3.11/selectors.py:415 select", "my job/train.py:12 load_batch"]
LOADER = ["/torch/utils/data/dataloader.py:9 get", "train.py:7 <module>"]


@pytest.mark.parametrize(
    ("stack", "cpu_percent", "words"),
    [
        (STACK, 0, "has slept outside any collective for 10 s, since all_reduce #4, at my job/tr"),
        ([], 0, "has slept outside any collective for 10 s, since all_reduce #4. Rank 0 waits"),
        (STACK, 99, "has computed (99 % of a core) for 10 s, since all_reduce #4, at my job/train"),
        (LOADER, 99, "has been in the data loader for 10 s, since all_reduce #4, at train.py:7 (<"),
    ],
)
def test_what_a_rank_outside_calls_does_and_for_how_long(
    stack: list[str], cpu_percent: float, words: str
) -> None:
    idle = replace(rank(1, OVER), stack=stack, cpu_percent=cpu_percent)
    text, cause = say(rank(0, call(waits_for=1)), idle)
    assert (cause, text.startswith(f"rank 1 is the cause: it {words}")) == (1, True), text
    fresh = replace(idle, record=rank(1).record)  # it has made no call
    now = {"has slept": "sleeps", "has computed": "computes", "has been": "is"}
    begin = next(now[key] for key in now if words.startswith(key))
    text, _ = say(rank(0, call(waits_for=1)), fresh)
    assert text.startswith(f"rank 1 is the cause: it {begin} "), text
    assert " s, since " not in text
    if stack == STACK:
        assert ", at my job/train.py:12 (load_batch). Rank 0 waits for it" in text


def test_a_rank_without_a_record() -> None:
    waits = call(waits_for=2)
    text, cause = say(rank(0, waits), rank(1, waits))
    assert text.startswith("rank 2 is the cause: its process 102 has ended, or has no record")
    assert cause == 2
    pids = [100, 101, -1, -1]
    text, cause = say(rank(0, waits, pids=pids), rank(1, call(waits_for=3), pids=pids))
    assert text.startswith("ranks 2 and 3 are the cause: they do not answer, on another host")
    assert cause == 2


def test_which_rank_a_failed_group_blames() -> None:
    """Most ranks' call is right; without a majority none is named."""
    ours, theirs = call(ended_s=8.0), call("barrier", ended_s=8.0)
    long = {"state": "failed", "failure": "rank 1 failed: rank 2 called barrier", "culprit": 1}
    short = {"state": "failed", "failure": "rank 2 called barrier", "culprit": 2}
    text, cause = say(rank(0, ours, **long), rank(1, ours, **short), rank(2, theirs, **long))
    assert (text, cause) == ("rank 2 is the cause: group 0 has failed: rank 2 called barrier", 2)
    assert say(rank(0, ours, **short), rank(1, theirs, **short))[1] is None
    # A death: one rank was a call further.
    text, cause = say(rank(0, ours, **short), rank(1, call(seq=6, ended_s=8.0), **short))
    assert cause == 2


def test_a_slow_rank_is_told_from_one_that_hangs() -> None:
    steps = [call(seq=n, began_s=22 - 5 * n, ended_s=21.9 - 5 * n) for n in range(4)]
    posted = call("recv", 0)  # it does not wait for it
    text, cause = say(rank(0, call(waits_for=1)), rank(1, *steps, posted))
    said = "it has slept outside any collective for 6.9 s, since its last call, as 3 times before"
    assert (text.split(". ")[0], cause) == (f"no hang so far: rank 1 is slow: {said}", 1), text
    late = [call(seq=n, began_s=40 - n, ended_s=39.9 - n) for n in range(4)]
    text, cause = say(rank(0, call(waits_for=1)), rank(1, *late, posted))
    assert text.startswith("rank 1 is the cause"), text


def test_a_job_between_its_calls() -> None:
    assert say(rank(0, OVER), rank(1, OVER), rank(2, OVER), rank(3, OVER))[0].startswith(
        "no rank is in a call of ringcomm"
    )
