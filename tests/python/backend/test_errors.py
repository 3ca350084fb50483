"""Wrong arguments, and calls that differ between ranks: what is raised, by whom, in which words."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import ringcomm
from ringcomm import CollectiveTimeoutError, MismatchError, Options, RingcommError


def caught(fn: Callable[[], Any]) -> dict[str, Any]:
    """The error of a call, in a form that travels; {} if there was none."""
    try:
        fn()
    except Exception as error:
        names = ("rank", "pid", "op", "seq", "host")
        return {
            "type": type(error).__name__,
            "text": str(error),
            **{name: getattr(error, name, None) for name in names},
        }
    return {}


# ---- calls that differ

f32, f64 = torch.float32, torch.float64


def all_reduce(num_elems: int, dtype: torch.dtype = f32, op: Any = dist.ReduceOp.SUM) -> Any:
    return lambda: dist.all_reduce(torch.zeros(num_elems, dtype=dtype), op)


def broadcast(num_elems: int, root: int = 0, dtype: torch.dtype = f32) -> Any:
    return lambda: dist.broadcast(torch.zeros(num_elems, dtype=dtype), root)


def all_gather(num_elems: int, dtype: torch.dtype = f32) -> Any:
    def call() -> None:
        own = torch.zeros(num_elems, dtype=dtype)
        dist.all_gather([torch.empty_like(own) for _ in range(dist.get_world_size())], own)

    return call


def reduce_scatter(num_elems: int) -> Any:
    world_size = dist.get_world_size
    return lambda: dist.reduce_scatter_tensor(
        torch.zeros(num_elems), torch.zeros(num_elems * world_size())
    )


def all_to_all(num_elems: int, dtype: torch.dtype = f32) -> Any:
    def call() -> None:
        own = torch.zeros(num_elems * dist.get_world_size(), dtype=dtype)
        dist.all_to_all_single(torch.empty_like(own), own)

    return call


# What rank 0 calls, what all others call, and a word of each in the message.
DIFFERENT: dict[str, tuple[Any, Any, str, str]] = {
    "size": (all_reduce(4), all_reduce(5), "16 bytes", "20 bytes"),
    "size_large": (all_reduce(300_000), all_reduce(300_001), "1200000 bytes", "1200004 bytes"),
    "size_other_algorithm": (all_reduce(4), all_reduce(300_000), "one_shot", "two_shot"),
    "zero_elements": (all_reduce(0), all_reduce(1), "0 bytes", "4 bytes"),
    "dtype": (all_reduce(4, f32), all_reduce(2, f64), "float32", "float64"),
    "dtype_same_width": (all_reduce(4, f32), all_reduce(4, torch.int32), "float32", "int32"),
    "reduction": (all_reduce(4), all_reduce(4, op=dist.ReduceOp.MAX), "sum", "max"),
    "collective": (all_reduce(4), broadcast(4), "all_reduce", "broadcast"),
    "barrier": (dist.barrier, all_reduce(4), "barrier", "all_reduce"),
    "root": (broadcast(4, 0), broadcast(4, 1), "root 0", "root 1"),
    "broadcast_size": (broadcast(4), broadcast(300_000), "16 bytes", "1200000 bytes"),
    "broadcast_dtype": (broadcast(4, 0, f32), broadcast(4, 0, torch.int32), "Float", "Int"),
    "gather_dtype": (all_gather(4, f32), all_gather(4, torch.int32), "Float", "Int"),
    "gather_size": (all_gather(4), all_gather(3), "16 bytes", "12 bytes"),
    "scatter_size": (reduce_scatter(4), reduce_scatter(3), "16 bytes", "12 bytes"),
    "all_to_all_size": (all_to_all(4), all_to_all(3), "16 bytes", "12 bytes"),
    "all_to_all_dtype": (all_to_all(4), all_to_all(4, torch.int32), "Float", "Int"),
    "shares": (all_to_all(4), all_gather(4), "all_to_all", "all_gather"),
}


def differ(rank: int, name: str, is_async: bool) -> list[dict[str, Any]]:
    ours, theirs, _, _ = DIFFERENT[name]
    call = ours if rank == 0 else theirs
    dist.barrier()
    later = all_reduce(1)
    return [caught(call), caught(later), caught(later)]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", sorted(DIFFERENT))
def test_different_calls(world_size: int, name: str) -> None:
    """Every rank raises, the message names both calls, and the group stays as it is."""
    for rank, errors in enumerate(run_ranks(world_size, differ, name, False, fresh=True)):
        for error in errors:
            assert error["type"] == "MismatchError", (rank, error)
            assert DIFFERENT[name][2] in error["text"]
            assert DIFFERENT[name][3] in error["text"]
            assert f"ringcomm rank {rank}/{world_size}" in error["text"]
            own_call = error["text"].split(": ")[1]
            assert "gave up" in error["text"] or error["text"].count(own_call) == 1, error
            is_hinted = "did the ranks run different numbers of batches?" in error["text"]
            assert is_hinted == (name in ("barrier", "collective")), error
            assert error["rank"] in range(world_size)
            assert error["pid"] > 0


def differ_in_p2p(rank: int) -> dict[str, Any]:
    if rank == 0:
        return caught(lambda: dist.send(torch.zeros(4), 1))
    return caught(lambda: dist.recv(torch.zeros(5), 0))


def test_receive_of_another_size() -> None:
    _, error = run_ranks(2, differ_in_p2p, fresh=True)
    assert error["type"] == "MismatchError"
    assert "16 bytes" in error["text"]
    assert "20" in error["text"]


def differ_async(rank: int) -> dict[str, Any]:
    work: Any = dist.all_reduce(torch.zeros(4 + rank), async_op=True)
    future = work.get_future()
    from_work, from_future = caught(work.wait), caught(future.wait)
    assert not work.is_success()
    assert work.is_completed()
    assert from_future["text"].splitlines()[0] in from_work["text"]
    return from_work


def test_different_async_calls() -> None:
    for error in run_ranks(2, differ_async, fresh=True):
        assert error["type"] == "MismatchError"


def differ_often(rank: int) -> None:
    """An error that another thread finds while the caller is still submitting is not lost."""
    for _ in range(40):
        group = dist.new_group(backend="ringcomm")
        work: Any = dist.all_reduce(torch.zeros(4 + rank), group=group, async_op=True)
        with pytest.raises(MismatchError):
            work.wait()
        dist.barrier()
        dist.destroy_process_group(group)


def test_no_async_error_is_lost() -> None:
    run_ranks(2, differ_often)


# ---- groups that differ, and bad options


def make_group(rank: int, options: list[Any], env: dict[str, str], folder: str) -> dict[str, Any]:
    import os

    os.environ.update(env)
    store = dist.FileStore(folder + "/store", len(options))
    return caught(
        lambda: dist.init_process_group(
            "ringcomm",
            store=store,
            rank=rank,
            world_size=len(options),
            pg_options=options[rank],
            timeout=datetime.timedelta(seconds=10),
        )
    )


def test_different_options(tmp_path: Any) -> None:
    options = [Options(algorithm="ring"), Options(num_slots=4)]
    for error in run_ranks(2, make_group, options, {}, str(tmp_path), backend=None, fresh=True):
        assert error["type"] == "MismatchError"
        assert "algorithm=ring" in error["text"]
        assert "num_slots=4" in error["text"]


BAD_OPTIONS: list[tuple[Any, str, str]] = [
    (Options(algorithm="tree"), "ValueError", "one_shot"),  # type: ignore[arg-type]
    (Options(num_slots=1), "ValueError", "2 to 64"),
    (Options(num_slots=65), "ValueError", "2 to 64"),
    (Options(num_slots=-3), "ValueError", "num_slots of ringcomm.Options is out of range"),
    (Options(num_slots=2.5), "TypeError", "num_slots"),  # type: ignore[arg-type]
    (Options(slot_bytes=100), "ValueError", "multiple of 64"),
    (Options(slot_bytes=0), "ValueError", "multiple of 64"),
    (Options(slot_bytes=-64), "ValueError", "slot_bytes of ringcomm.Options is out of range"),
    (Options(slot_bytes=1 << 30), "ValueError", "multiple of 64"),
    ({"algorithm": "ring"}, "TypeError", "ringcomm.Options"),
]


@pytest.mark.parametrize(("options", "kind", "words"), BAD_OPTIONS)
def test_bad_options(tmp_path: Any, options: Any, kind: str, words: str) -> None:
    (error,) = run_ranks(1, make_group, [options], {}, str(tmp_path), backend=None, fresh=True)
    assert (error["type"], words in error["text"]) == (kind, True), error


BAD_ENV = [
    ("RINGCOMM_ALGORITHM", "tree", "one_shot"),
    ("RINGCOMM_NUM_SLOTS", "many", "RINGCOMM_NUM_SLOTS"),
    ("RINGCOMM_NUM_SLOTS", "0", "2 to 64"),
    ("RINGCOMM_SLOT_BYTES", "1e6", "RINGCOMM_SLOT_BYTES"),
    ("RINGCOMM_SLOT_BYTES", "0", "multiple of 64"),
]


@pytest.mark.parametrize(("name", "value", "words"), BAD_ENV)
def test_bad_environment(tmp_path: Any, name: str, value: str, words: str) -> None:
    (error,) = run_ranks(
        1, make_group, [None], {name: value}, str(tmp_path), backend=None, fresh=True
    )
    assert (error["type"], words in error["text"]) == ("ValueError", True), error


def bad_simd(rank: int) -> dict[str, Any]:
    return caught(lambda: dist.all_reduce(torch.ones(3)))


def test_bad_instruction_set() -> None:
    (error,) = run_ranks(1, bad_simd, fresh=True, env={"RINGCOMM_SIMD": "mmx"})
    assert (error["type"], "RINGCOMM_SIMD" in error["text"]) == ("ValueError", True), error


# ---- wrong arguments: an error here and now, and nothing happened to the group

t = torch.ones


def backend() -> Any:
    return dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]


def gather_to_me() -> Any:
    options = dist.GatherOptions()
    options.rootRank = dist.get_rank()
    return options


def scatter_from_me() -> Any:
    options = dist.ScatterOptions()
    options.rootRank = dist.get_rank()
    return options


def overlapping() -> None:
    both = t(6)
    dist.all_gather([both[:4], both[2:]], t(4))


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "float_band": (lambda: dist.all_reduce(t(2), dist.ReduceOp.BAND), ValueError, "band"),
    "bool_avg": (
        lambda: dist.all_reduce(t(2, dtype=torch.bool), dist.ReduceOp.AVG),
        ValueError,
        "avg",
    ),
    "float8_sum": (
        lambda: dist.all_reduce(torch.zeros(2, dtype=torch.float8_e5m2)),
        TypeError,
        "Float8",
    ),
    "complex_max": (
        lambda: dist.all_reduce(torch.zeros(2, dtype=torch.complex64), dist.ReduceOp.MAX),
        ValueError,
        "complex|all_reduce does not support",
    ),
    # Not by dist.all_reduce: torch's own kernel for meta tensors accepts them and does nothing.
    "other_device": (
        lambda: backend().allreduce([t(2, device="meta")], dist.AllreduceOptions()),
        ValueError,
        "tensor on meta, but .* accelerators only",
    ),
    "root": (lambda: dist.broadcast(t(2), 9), ValueError, "9"),
    "gather_count": (lambda: dist.all_gather([t(2)], t(2)), ValueError, "2 ranks, got 1"),
    "gather_dtype": (
        lambda: dist.all_gather([t(2), t(2)], t(2, dtype=f64)),
        (TypeError, ValueError),  # type: ignore[dict-item]
        "(?i)float",
    ),
    "gather_into_size": (
        lambda: dist.all_gather_into_tensor(t(3), t(2)),
        ValueError,
        "needs an output of 4 elements, got 3",
    ),
    "scatter_size": (
        lambda: dist.reduce_scatter_tensor(t(2), t(5)),
        ValueError,
        "needs an input of 4 elements, got 5",
    ),
    "scatter_dtype": (
        lambda: dist.reduce_scatter_tensor(t(2), t(4, dtype=f64)),
        TypeError,
        "one dtype",
    ),
    "send_to_self": (
        lambda: dist.send(t(2), dist.get_rank()),
        ValueError,
        "(?i)itself|same|self",
    ),
    "gather_list_dtype": (
        lambda: backend().gather([[t(2), t(2, dtype=f64)]], [t(2)], gather_to_me()),
        TypeError,
        "one dtype",
    ),
    "gather_no_list": (
        lambda: backend().gather([], [t(2)], gather_to_me()),
        ValueError,
        "gather wants one list of tensors, .* got 0 lists",
    ),
    "gather_own_share": (
        lambda: backend().gather([[t(3), t(3)]], [t(2)], gather_to_me()),
        ValueError,
        "8 bytes for itself, and room for 12",
    ),
    "scatter_list_count": (
        lambda: backend().scatter([t(2)], [[t(2)] * 3], scatter_from_me()),
        ValueError,
        "2 ranks, got 3",
    ),
    "outputs_overlap": (overlapping, ValueError, "two outputs share memory"),
    "expanded_output": (
        lambda: dist.all_gather([t(1).expand(4), t(4)], t(4)),
        ValueError,
        "several elements at one memory location",
    ),
    "all_to_all_count": (
        lambda: dist.all_to_all([t(2), t(2)], [t(2)]),
        ValueError,
        "2 ranks, got 1",
    ),
    "all_to_all_dtype": (
        lambda: backend().alltoall([t(2), t(2)], [t(2), t(2, dtype=f64)], dist.AllToAllOptions()),
        TypeError,
        "one dtype",
    ),
    "all_to_all_own_share": (
        lambda: dist.all_to_all([t(3), t(3)], [t(2), t(2)]),
        ValueError,
        "8 bytes for itself, and room for 12",
    ),
    "single_odd": (lambda: dist.all_to_all_single(t(3), t(3)), ValueError, "3 rows of its input"),
    "single_scalar": (lambda: dist.all_to_all_single(t(()), t(())), ValueError, "scalar"),
    "single_splits_count": (
        lambda: dist.all_to_all_single(t(4), t(4), [2, 2], [1, 1, 2]),
        ValueError,
        "one split size of its input for each of the 2 ranks, got 3",
    ),
    "single_splits_sum": (
        lambda: dist.all_to_all_single(t(4), t(4), [2, 2], [1, 2]),
        ValueError,
        r"input, \[1, 2\], add up to 3, but there are 4 rows",
    ),
    "single_splits_large": (
        lambda: dist.all_to_all_single(t(4), t(4), [2, 1 << 62], [2, 2]),
        ValueError,
        "output, .* are no way to cut 4 rows",
    ),
    "single_splits_negative": (
        lambda: dist.all_to_all_single(t(4), t(4), [2, 2], [5, -1]),
        ValueError,
        "no way to cut",
    ),
}


def call_wrongly(rank: int, name: str) -> None:
    call, kind, words = WRONG[name]
    with pytest.raises(kind, match=words):
        call()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2, 2, 2]


@pytest.mark.parametrize("name", sorted(WRONG))
def test_wrong_arguments(name: str) -> None:
    run_ranks(2, call_wrongly, name)


def test_error_types() -> None:
    assert issubclass(RingcommError, dist.DistBackendError)
    assert issubclass(CollectiveTimeoutError, TimeoutError)
    for kind in (ringcomm.PeerDiedError, MismatchError, CollectiveTimeoutError):
        assert issubclass(kind, RingcommError)
    assert not issubclass(ringcomm.PeerDiedError, TimeoutError)
