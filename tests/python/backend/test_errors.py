"""Wrong arguments, and calls and groups that differ between ranks: what is raised, and by whom."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from failures import ENVS, TRANSPORTS, caught
from ranks import in_ranks

import ringcomm
from ringcomm import _C, CollectiveTimeoutError, MismatchError, Options, RingcommError, ops

# ---- calls that differ; each takes a group

f16, f32, f64 = torch.float16, torch.float32, torch.float64
i32, i64 = torch.int32, torch.int64
EAGER = 1 << 16  # bytes of an envelope
Call = Callable[[Any], Any]


def all_reduce(num_elems: int, dtype: torch.dtype = f32, op: Any = dist.ReduceOp.SUM) -> Call:
    return lambda g: dist.all_reduce(torch.zeros(num_elems, dtype=dtype), op, g)


def broadcast(num_elems: int, root: int = 0, dtype: torch.dtype = f32) -> Call:
    return lambda g: dist.broadcast(torch.zeros(num_elems, dtype=dtype), root, g)


def all_gather(num_elems: int) -> Call:
    x = torch.zeros(num_elems)
    return lambda g: dist.all_gather_into_tensor(x.new_empty(g.size() * num_elems), x, g)


def all_to_all(columns: int) -> Call:
    x = torch.ones(3, columns)
    return lambda g: dist.all_to_all_single(torch.empty_like(x), x, group=g)


def sparse(rows: int, dtype: torch.dtype = f32) -> Call:
    return lambda g: dist.all_reduce(torch.ones(rows, 3, dtype=dtype).to_sparse(1), group=g)


def operator(num_elems: int) -> Call:
    return lambda g: ops.all_reduce(torch.ones(num_elems), group=g)


def ring(num_elems: int) -> Call:
    call = torch.ops.ringcomm.ring_all_reduce_
    return lambda g: call(torch.ones(num_elems), g.group_name)


# What rank 0 calls, what all others call, and a word of each in the message.
DIFFERENT: dict[str, tuple[Call, Call, str, str]] = {
    "size": (all_reduce(4), all_reduce(5), "16 bytes", "20 bytes"),
    "dtype": (all_reduce(4, f32), all_reduce(2, f64), "float32", "float64"),
    "reduction": (all_reduce(4), all_reduce(4, op=dist.ReduceOp.MAX), "sum", "max"),
    "collective": (all_reduce(4), broadcast(4), "all_reduce", "broadcast"),
    "root": (broadcast(4, 0), broadcast(4, 1), "root 0", "root 1"),
    "another root": (broadcast(4, 1), broadcast(4, 0), "root 1", "root 0"),
    "algorithm": (ring(10), all_reduce(10), "40 bytes, ring", "40 bytes, one_shot"),
    "operator": (operator(2), operator(3), "8 bytes", "12 bytes"),
    "sparse rows": (sparse(50), sparse(51), "", ""),
    "sparse dtype": (sparse(50), sparse(50, f64), "", ""),
    "sparse and not": (sparse(50), all_reduce(150), "", ""),
    "envelope": (all_gather(EAGER // 4), all_gather(EAGER // 4 + 1), "65536", "65540"),
    "no envelope": (all_gather(2), all_gather(EAGER // 4), "8 bytes", "65536"),
    # A rank that was a step ahead ended processes over Gloo:
    # https://github.com/PrimeIntellect-ai/prime-diloco/issues/68
    "a step ahead": (all_reduce(261_551), all_reduce(260_064), "1046204", "1040256"),
    # https://github.com/pytorch/gloo/pull/456
    "a large step ahead": (all_reduce(48_619_680), all_reduce(1), "194478720", "4 bytes"),
    # Floats arrived as whole numbers: https://github.com/pytorch/pytorch/issues/91535
    "dtype of a broadcast": (broadcast(8), broadcast(4, dtype=i64), "float32", "int64"),
    # Hangs over NCCL: https://github.com/NVIDIA/nccl/issues/147
    "size of a broadcast": (
        broadcast(53, dtype=i64),
        broadcast(25_503_912, dtype=f16),
        "424 bytes",
        "51007824",
    ),
    "columns": (all_to_all(3), all_to_all(4), "", ""),
}


@in_ranks(3, ENVS)
def test_different_calls(rank: int) -> None:
    """Every rank raises, the message names both calls, and the group stays as it is.

    In an all_to_all (`columns`), too: https://github.com/pytorch/pytorch/issues/158016
    """
    is_shm = _C.transport_of(backend()).startswith("shm: ")
    has_hosts = "inside a host" in _C.transport_of(backend())
    for name, (ours, theirs, *words) in DIFFERENT.items():
        if name == "algorithm" and not is_shm:
            continue
        group: Any = dist.new_group(backend="ringcomm")
        calls = [ours if rank == 0 else theirs, all_reduce(1), all_reduce(1)]
        for number, call in enumerate(calls):
            error = caught(call, group)
            if not (error or number or is_shm):
                continue  # over messages, a rank whose own part fits hears of it in its next call
            assert error["type"] == "MismatchError", (name, error)
            # Inside a host of several only a digest of the arguments is compared.
            is_digest = has_hosts and "passed other sizes or arguments" in error["text"]
            assert is_digest or all(word in error["text"] for word in words), (name, error)
            assert error["rank"] in range(3)
            assert error["pid"] > 0
            is_hinted = "did the ranks run different numbers of batches?" in error["text"]
            assert is_hinted == (name == "collective"), (name, error)
        dist.barrier()
        dist.destroy_process_group(group)
    group = dist.new_group(backend="ringcomm")
    sizes = [4, 4, 5]  # of what rank 0 has for rank 2, which expects 4
    for _ in range(3):  # as above; and the root is ahead of a rank by one call
        given = [torch.zeros(n) for n in sizes] if rank == 0 else None
        error = caught(lambda given=given: dist.scatter(torch.zeros(4), given, 0, group=group))
    said = "rank 0 has 20 bytes for rank 2, which expects 16 bytes"
    assert error["type"] == "MismatchError", error
    assert (said if is_shm else "bytes for rank") in error["text"], error
    dist.barrier()
    dist.destroy_process_group(group)


@in_ranks(2, TRANSPORTS)
def test_a_message_of_another_size(rank: int) -> None:
    """Nothing of it is written, and both ranks hear both sizes.

    Over NCCL the shorter receive is filled, and the longer one hangs
    (https://github.com/NVIDIA/nccl/issues/1938); https://github.com/pytorch/pytorch/issues/113376
    asks for the sizes. What an envelope carries is 4080 bytes.
    """
    for sent, taken in ((0, 1), (12, 32), (4080, 4079), (4080, 4081), (1 << 18, 8)):
        group: Any = dist.new_group(backend="ringcomm")
        x = torch.full((sent if rank == 0 else taken,), 7, dtype=torch.uint8)
        if rank == 0:
            error = caught(lambda x=x, group=group: (dist.send(x, 1, group), dist.barrier(group)))
        else:
            error = caught(dist.recv, x, 0, group)
            assert x.eq(7).all()
        assert error["type"] == "MismatchError", error
        assert f" {sent} bytes" in error["text"], error
        assert f" {taken} bytes" in error["text"] or f"receives {taken}" in error["text"], error
        dist.barrier()
        dist.destroy_process_group(group)


def call_of_dtype(op: str, rank: int, taken: torch.Tensor, own: torch.Tensor, group: Any) -> None:
    if op == "all_gather":
        dist.all_gather_into_tensor(taken, own[:64], group)
    elif op == "broadcast":
        dist.broadcast(own if rank == 1 else taken, 1, group)
    else:
        dist.all_to_all_single(taken, own, group=group)
    dist.barrier(group)


@in_ranks(3, ENVS)
def test_another_dtype_of_the_same_size_is_not_written(rank: int) -> None:
    """What fits an envelope comes with its header, which is compared first."""
    for op in ("all_gather", "broadcast", "all_to_all"):
        group: Any = dist.new_group(backend="ringcomm")
        dtype = f32 if rank == 1 else i32
        own, taken = (torch.full((3 * 64,), value, dtype=dtype) for value in (9, 5))
        error = caught(call_of_dtype, op, rank, taken, own, group)
        assert error["type"] == "MismatchError", error
        parts = taken.split(64)
        others = (0, 2) if rank == 1 else (0, 1, 2) if op == "broadcast" else (1,)
        assert all(parts[source].eq(5).all() for source in others)
        dist.barrier()
        dist.destroy_process_group(group)


def fail_later(rank: int) -> weakref.ref[torch.Tensor]:
    """The tensor of a call whose error its work and its futures have."""
    group: Any = dist.new_group(backend="ringcomm")
    tensor = torch.zeros(4 + rank)
    work: Any = dist.all_reduce(tensor, group=group, async_op=True)
    future = work.get_future()
    for wait in (*[work.wait] * 2, *[work.get_future().wait] * 2):
        with pytest.raises(MismatchError, match="all_reduce") as caught:
            wait()
        assert caught.value.op == "all_reduce"
        del caught
    with pytest.raises(Exception, match="all_reduce"):
        future.wait()
    assert work.is_completed()
    assert not work.is_success()
    dist.barrier()
    dist.destroy_process_group(group)
    return weakref.ref(tensor)


@in_ranks(2, fresh=True)
def test_no_asynchronous_error_is_lost(rank: int) -> None:
    """Also one that another thread finds while the caller is still submitting.

    A work and its future keep their error, and must not keep the callers' variables with it.
    """
    for _ in range(20):
        kept = fail_later(rank)
        gc.collect()
        deadline = time.monotonic() + 60
        while kept() is not None and time.monotonic() < deadline:  # its thread ends with the call
            time.sleep(0.01)
        assert kept() is None


# ---- bad options


BAD: list[tuple[Any, dict[str, str], str, str]] = [
    (None, {"RINGCOMM_TRANSPORT": "p2p"}, "ValueError", "shm or messages, got 'p2p'"),
    (Options(transport="messages", message_backend="none"), {}, "ValueError", "message_backend"),
    ({"algorithm": "ring"}, {}, "TypeError", "ringcomm.Options"),
    (None, {"RINGCOMM_ALGORITHM": "tree"}, "ValueError", "one_shot"),
    (None, {"RINGCOMM_MAX_THREADS": "four"}, "ValueError", "RINGCOMM_MAX_THREADS"),
]


@pytest.mark.parametrize(
    ("option", "known"),
    [
        ({"algorithm": "tree"}, "auto, one_shot, two_shot or ring, got 'tree'"),
        ({"algorithm": None}, "auto, one_shot, two_shot or ring, got None"),
        ({"transport": "tcp"}, "shm or messages, got 'tcp'"),
        ({"deterministic": True}, "rank_order, got True"),
        *(({"max_threads": value}, "from 1 on, got") for value in (0, -1, True, 1.5, "2")),
    ],
)
def test_bad_options_raise_where_they_are_made(option: dict[str, Any], known: str) -> None:
    (name,) = option
    said = f"{name} of ringcomm.Options, or RINGCOMM_{name.upper()}, must be .*{known}"
    with pytest.raises(ValueError, match=said):
        Options(**option)


@in_ranks(1, backend=None, fresh=True)
def test_bad_options_and_environment(rank: int, tmp_path: Path) -> None:
    for number, (options, env, kind, words) in enumerate(BAD):
        os.environ.update(env)
        store = dist.FileStore(str(tmp_path / str(number)), 1)
        place: dict[str, Any] = {"rank": 0, "world_size": 1, "pg_options": options}
        error = caught(partial(dist.init_process_group, "ringcomm", store=store, **place))
        assert (error["type"], words in error["text"]) == (kind, True), (words, error)
        for name in env:
            del os.environ[name]


# ---- wrong arguments: an error here and now, and nothing happened to the group

t = torch.ones


def backend() -> Any:
    return dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]


def rooted(options: Any) -> Any:
    options.rootRank = dist.get_rank()
    return options


def gather(outputs: Any) -> Any:
    return lambda: backend().gather(outputs, [t(2)], rooted(dist.GatherOptions()))


def split(outputs: list[int], inputs: list[int]) -> Any:
    return lambda: dist.all_to_all_single(t(4), t(4), outputs, inputs)


def overlapping() -> None:
    both = t(6)
    dist.all_gather([both[:4], both[2:]], t(4))


def freed() -> torch.Tensor:
    tensor = t(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def in_base(num_out: int, num_in: int, dtype: torch.dtype = f32) -> Any:
    """Below torch's own checks."""
    return lambda: backend()._allgather_base(t(num_out), t(num_in, dtype=dtype))


def half_of_itself() -> None:
    x = t(4)
    backend()._allgather_base(x, x[1:3])


Wrong = tuple[Callable[[], Any], type[Exception], str]
WRONG: list[Wrong] = [
    (lambda: dist.all_reduce(t(2), dist.ReduceOp.BAND), ValueError, "band"),
    (lambda: dist.all_reduce(torch.zeros(2, dtype=torch.float8_e5m2)), TypeError, "Float8"),
    (lambda: dist.all_reduce(t(2) * 1j, dist.ReduceOp.MAX), ValueError, "complex|not support"),
    (lambda: dist.all_reduce(t(1).expand(4)), ValueError, r"one memory location.*clone"),
    # Not by dist.all_reduce: torch's own kernel for meta tensors accepts them and does nothing.
    (
        lambda: backend().allreduce([t(2, device="meta")], dist.AllreduceOptions()),
        ValueError,
        r"tensor on meta; .* accelerators only",
    ),
    (lambda: dist.broadcast(t(2), 9), ValueError, "9"),
    (lambda: dist.all_gather([t(2)], t(2)), ValueError, "2 ranks, got 1"),
    (lambda: dist.all_gather_into_tensor(t(3), t(2)), ValueError, "output of 4 elements, got 3"),
    (lambda: dist.reduce_scatter_tensor(t(2), t(5)), ValueError, "input of 4 elements, got 5"),
    (lambda: dist.reduce_scatter_tensor(t(2), t(4, dtype=f64)), TypeError, "one dtype"),
    (lambda: dist.send(t(2), dist.get_rank()), ValueError, "(?i)itself|same|self"),
    (lambda: dist.irecv(t(2), 1 - dist.get_rank(), tag=-1), ValueError, "0 or more, got -1"),
    (gather([[t(2), t(2, dtype=f64)]]), TypeError, "one dtype"),
    (gather([]), ValueError, "one list of tensors, .* got 0 lists"),
    (gather([[t(3), t(3)]]), ValueError, "own input shard has 8 bytes and its own output shard 12"),
    (
        lambda: backend().scatter([t(2)], [[t(2)] * 3], rooted(dist.ScatterOptions())),
        ValueError,
        "2 ranks, got 3",
    ),
    (overlapping, ValueError, "two outputs share memory"),
    (lambda: dist.all_to_all([t(2), t(2)], [t(2)]), ValueError, "2 ranks, got 1"),
    (lambda: dist.all_to_all_single(t(3), t(3)), ValueError, "3 rows of its input"),
    (lambda: dist.all_to_all_single(t(()), t(())), ValueError, "scalar"),
    (split([2, 2], [1, 1, 2]), ValueError, "each of the 2 ranks, got 3"),
    (split([2, 2], [1, 2]), ValueError, r"\[1, 2\], add up to 3, but there are 4 rows"),
    (split([2, 1 << 62], [2, 2]), ValueError, "do not fit its 4 rows"),
    (split([-1, 5], [2, 2]), ValueError, "fit|negative"),
    (in_base(4, 4), ValueError, "needs an output of 8"),
    (in_base(4, 2, f16), TypeError, "one dtype"),
    (half_of_itself, ValueError, "share memory"),
    (lambda: backend()._reduce_scatter_base(t(4), t(4)), ValueError, "needs an input of 8"),
    (lambda: backend().alltoall_base(t(3), t(3), [], []), ValueError, "3 rows"),
    (lambda: dist.broadcast(freed(), 0), Exception, "memory was freed"),
]


@in_ranks(2, TRANSPORTS)
def test_wrong_arguments(rank: int) -> None:
    """Splits among them: https://github.com/pytorch/pytorch/issues/101380"""
    for call, kind, words in WRONG:
        with pytest.raises(kind, match=words):
            call()
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2, 2, 2]


def test_error_types() -> None:
    assert issubclass(RingcommError, dist.DistBackendError)
    assert issubclass(CollectiveTimeoutError, TimeoutError)
    for kind in (ringcomm.PeerDiedError, MismatchError, CollectiveTimeoutError):
        assert issubclass(kind, RingcommError)
