"""Wrong arguments, and calls and groups that differ between ranks: what is raised, and by whom."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks, run_ranks

import ringcomm
from ringcomm import CollectiveTimeoutError, MismatchError, Options, RingcommError

TRANSPORTS: dict[str, Any] = {"shm": None, "p2p": {"RINGCOMM_TRANSPORT": "p2p"}}
# Of three ranks.
ENVS: dict[str, Any] = {
    **TRANSPORTS,
    "hosts": [{"RINGCOMM_HOST_ID": f"host-{host}"} for host in "aba"],
}


def caught(fn: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """The error of a call, in a form that travels; {} if there was none."""
    try:
        fn(*args)
    except Exception as error:
        names = ("rank", "pid", "op", "seq", "host")
        return {
            "type": type(error).__name__,
            "text": str(error),
            **{name: getattr(error, name, None) for name in names},
        }
    return {}


# ---- calls that differ; each takes a group

f32, i32, f64 = torch.float32, torch.int32, torch.float64
Call = Callable[[Any], Any]


def tensors(*sizes: int) -> list[torch.Tensor]:
    return [torch.zeros(n) for n in sizes]


def all_reduce(num_elems: int, dtype: torch.dtype = f32, op: Any = dist.ReduceOp.SUM) -> Call:
    return lambda g: dist.all_reduce(torch.zeros(num_elems, dtype=dtype), op, g)


def broadcast(num_elems: int, root: int = 0, dtype: torch.dtype = f32) -> Call:
    return lambda g: dist.broadcast(torch.zeros(num_elems, dtype=dtype), root, g)


def all_gather(num_elems: int, dtype: torch.dtype = f32) -> Call:
    own = torch.zeros(num_elems, dtype=dtype)
    return lambda g: dist.all_gather([own.clone() for _ in range(g.size())], own, g)


def reduce_scatter(num_elems: int) -> Call:
    own = torch.zeros(num_elems)
    return lambda g: dist.reduce_scatter(own.clone(), [own] * g.size(), group=g)


def all_to_all(num_elems: int, dtype: torch.dtype = f32) -> Call:
    def call(g: Any) -> None:
        own = torch.zeros(num_elems * g.size(), dtype=dtype)
        dist.all_to_all_single(torch.empty_like(own), own, group=g)

    return call


def ring(num_slots: int) -> Call:
    call = torch.ops.ringcomm.ring_all_reduce_
    return lambda g: call(torch.ones(10), g.group_name, num_slots, 64)


# What rank 0 calls, what all others call, and a word of each in the message.
DIFFERENT: dict[str, tuple[Call, Call, str, str]] = {
    "size": (all_reduce(4), all_reduce(5), "16 bytes", "20 bytes"),
    "size_large": (all_reduce(300_000), all_reduce(300_001), "1200000 bytes", "1200004 bytes"),
    "size_other_algorithm": (all_reduce(4), all_reduce(300_000), "16 bytes", "1200000 bytes"),
    "zero_elements": (all_reduce(0), all_reduce(1), "0 bytes", "4 bytes"),
    "dtype": (all_reduce(4, f32), all_reduce(2, f64), "float32", "float64"),
    "reduction": (all_reduce(4), all_reduce(4, op=dist.ReduceOp.MAX), "sum", "max"),
    "collective": (all_reduce(4), broadcast(4), "all_reduce", "broadcast"),
    "barrier": (dist.barrier, all_reduce(4), "barrier", "all_reduce"),
    "root": (broadcast(4, 0), broadcast(4, 1), "root 0", "root 1"),
    "broadcast_size": (broadcast(4), broadcast(300_000), "16 bytes", "1200000 bytes"),
    "broadcast_dtype": (broadcast(4, 0, f32), broadcast(4, 0, i32), "Float", "Int"),
    "gather_dtype": (all_gather(4, f32), all_gather(4, i32), "Float", "Int"),
    "gather_size": (all_gather(4), all_gather(3), "16 bytes", "12 bytes"),
    "scatter_size": (reduce_scatter(4), reduce_scatter(3), "16 bytes", "12 bytes"),
    "all_to_all_size": (all_to_all(4), all_to_all(3), "16 bytes", "12 bytes"),
    "slots": (ring(2), ring(3), "2 slots of 64 bytes", "3 slots of 64 bytes"),
    "shares": (all_to_all(4), all_gather(4), "all_to_all", "all_gather"),
}
# Sizes that do not fit each other on one pair of three ranks: what each calls, and what is said.
MISFITS: dict[str, tuple[Callable[[int, Any], Any], str]] = {
    "all_gather": (
        lambda r, g: dist.all_gather(tensors(1, 2, 3 + r // 2), torch.zeros(r + 1 + r // 2), g),
        "rank 2 has 16 bytes for rank 0, which expects 12 bytes",
    ),
    "gather": (
        lambda r, g: dist.gather(
            torch.zeros(5 if r == 0 else 4), tensors(4, 4, 4) if r == 1 else None, 1, g
        ),
        "rank 0 has 20 bytes for rank 1, which expects 16 bytes",
    ),
    "scatter": (
        lambda r, g: dist.scatter(torch.zeros(4), tensors(4, 4, 5) if r == 0 else None, 0, g),
        "rank 0 has 20 bytes for rank 2, which expects 16 bytes",
    ),
    "reduce_scatter": (
        lambda r, g: dist.reduce_scatter(torch.zeros(4), tensors(4, 4, 4 + 2 * (r == 1)), group=g),
        "rank 1 has 24 bytes for rank 2, which expects 16 bytes",
    ),
    "all_to_all": (
        lambda r, g: dist.all_to_all(
            tensors(4, 2 if r == 2 else 4, 4), tensors(4, 2 if r == 2 else 4, 4), g
        ),
        "rank 1 has 16 bytes for rank 2, which expects 8 bytes",
    ),
    "all_to_all_single": (
        lambda r, g: dist.all_to_all_single(
            torch.zeros(6), torch.zeros(6), [1, 2, 3], [1, 2, 3], g
        ),
        "rank 0 has 8 bytes for rank 1, which expects 4",
    ),
}


def differ(rank: int) -> dict[str, list[dict[str, Any]]]:
    """The errors of each, in a group of its own, and of the next two calls."""
    found = {}
    for name, (ours, theirs, _, _) in DIFFERENT.items():
        group: Any = dist.new_group(backend="ringcomm")
        call, later = ours if rank == 0 else theirs, all_reduce(1)
        found[name] = [caught(each, group) for each in (call, later, later)]
        dist.barrier()
        dist.destroy_process_group(group)
    for name, (misfit, _) in MISFITS.items():
        if dist.get_world_size() != 3:
            continue
        group = dist.new_group(backend="ringcomm")
        if rank == 2 and name < "b":
            time.sleep(0.1)  # when the others have been waiting for a while
        found[f"misfit {name}"] = [caught(misfit, rank, group) for _ in range(2)]
        dist.barrier()
        dist.destroy_process_group(group)
    return found


@pytest.mark.parametrize(("world_size", "env"), [(2, "shm"), *((3, env) for env in ENVS)])
def test_different_calls(world_size: int, env: str) -> None:
    """Every rank raises, the message names both calls, and the group stays as it is."""
    for rank, found in enumerate(run_ranks(world_size, differ, env=ENVS[env])):
        for name, (_, _, ours, theirs) in DIFFERENT.items():
            for error in found[name]:
                assert error["type"] == "MismatchError", (rank, name, error)
                assert ours in error["text"], (name, error)
                assert theirs in error["text"], (name, error)
                assert error["rank"] in range(world_size)
                assert error["pid"] > 0
                is_hinted = "did the ranks run different numbers of batches?" in error["text"]
                assert is_hinted == (name in ("barrier", "collective")), error
        for name, (_, words) in MISFITS.items():
            if world_size == 3:  # elsewhere a rank whose own part fits hears of it in its next call
                error = found[f"misfit {name}"][-1]
                assert error["type"] == "MismatchError", (rank, name, error)
                assert (words if env == "shm" else "bytes for rank") in error["text"], (name, error)


def differ_in_message(rank: int) -> dict[str, Any]:
    if rank == 0:
        return caught(lambda: dist.send(torch.zeros(4), 1))
    return caught(lambda: dist.recv(torch.zeros(5), 0))


@pytest.mark.parametrize("env", ["shm", "p2p"])
def test_receive_of_another_size(env: str) -> None:
    _, error = run_ranks(2, differ_in_message, fresh=True, env=ENVS[env])
    assert error["type"] == "MismatchError"
    assert "16 bytes" in error["text"]


@in_ranks(2)
def test_no_asynchronous_error_is_lost(rank: int) -> None:
    """An error that another thread finds while the caller is still submitting is not lost."""
    for _ in range(40):
        group = dist.new_group(backend="ringcomm")
        work: Any = dist.all_reduce(torch.zeros(4 + rank), group=group, async_op=True)
        future = work.get_future()
        with pytest.raises(MismatchError):
            work.wait()
        with pytest.raises(Exception, match="all_reduce"):
            future.wait()
        assert work.is_completed()
        assert not work.is_success()
        dist.barrier()
        dist.destroy_process_group(group)


# ---- groups that differ, and bad options


def make_group(rank: int, options: list[Any], env: dict[str, str], folder: str) -> dict[str, Any]:
    os.environ.update(env)
    return caught(
        lambda: dist.init_process_group(
            "ringcomm",
            store=dist.FileStore(folder + "/store", len(options)),
            rank=rank,
            world_size=len(options),
            pg_options=options[rank],
            timeout=datetime.timedelta(seconds=10),
        )
    )


ODD: list[tuple[list[Any], str]] = [
    ([Options(algorithm="ring"), Options()], "algorithm=ring"),
    ([Options(transport="p2p", num_slots=4), Options(transport="p2p")], "num_slots=4"),
    ([Options(transport="p2p", p2p_backend="ringcomm"), Options(transport="p2p")], "=gloo"),
]


@pytest.mark.parametrize(("options", "words"), ODD, ids=["shm", "p2p", "p2p_backend"])
def test_different_options(tmp_path: Path, options: list[Any], words: str) -> None:
    args: Any = (options, {}, str(tmp_path))
    for error in run_ranks(2, make_group, *args, backend=None, fresh=True):
        assert error["type"] == "MismatchError"
        assert words in error["text"]


BAD: list[tuple[Any, dict[str, str], str, str]] = [
    (Options(algorithm="tree"), {}, "ValueError", "one_shot"),  # type: ignore[arg-type]
    (Options(num_slots=65), {}, "ValueError", "2 to 64"),
    (Options(num_slots=-3), {}, "ValueError", "num_slots of ringcomm.Options is out of range"),
    (Options(num_slots=2.5), {}, "TypeError", "num_slots"),  # type: ignore[arg-type]
    (Options(slot_bytes=0), {}, "ValueError", "multiple of 64"),
    (Options(slot_bytes=1 << 30), {}, "ValueError", "multiple of 64"),
    (Options(transport="tcp"), {}, "ValueError", "shm or p2p"),  # type: ignore[arg-type]
    (Options(transport="p2p", p2p_backend="none"), {}, "ValueError", "p2p_backend"),
    ({"algorithm": "ring"}, {}, "TypeError", "ringcomm.Options"),
    (None, {"RINGCOMM_ALGORITHM": "tree"}, "ValueError", "one_shot"),
    (None, {"RINGCOMM_NUM_SLOTS": "many"}, "ValueError", "RINGCOMM_NUM_SLOTS"),
    (None, {"RINGCOMM_SLOT_BYTES": "0"}, "ValueError", "multiple of 64"),
]


def make_bad_groups(rank: int, folder: str) -> list[dict[str, Any]]:
    found = []
    for options, env, _, _ in BAD:
        found.append(make_group(rank, [options], env, folder))
        for name in env:
            del os.environ[name]
    os.environ["RINGCOMM_SIMD"] = "mmx"  # which is looked at when it is first wanted
    dist.init_process_group("ringcomm", store=dist.HashStore(), rank=0, world_size=1)
    return [*found, caught(lambda: dist.all_reduce(torch.ones(3)))]


def test_bad_options_and_environment(tmp_path: Path) -> None:
    (errors,) = run_ranks(1, make_bad_groups, str(tmp_path), backend=None, fresh=True)
    expected = [*(case[2:] for case in BAD), ("ValueError", "RINGCOMM_SIMD")]
    for (kind, words), error in zip(expected, errors, strict=True):
        assert (error["type"], words in error["text"]) == (kind, True), (words, error)


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


Wrong = tuple[Callable[[], Any], type[Exception], str]
WRONG: list[Wrong] = [
    (lambda: dist.all_reduce(t(2), dist.ReduceOp.BAND), ValueError, "band"),
    (lambda: dist.all_reduce(t(2, dtype=torch.bool), dist.ReduceOp.AVG), ValueError, "avg"),
    (lambda: dist.all_reduce(torch.zeros(2, dtype=torch.float8_e5m2)), TypeError, "Float8"),
    (lambda: dist.all_reduce(t(2) * 1j, dist.ReduceOp.MAX), ValueError, "complex|not support"),
    (lambda: dist.all_reduce(t(1).expand(4)), ValueError, r"one memory location.*clone"),
    # Not by dist.all_reduce: torch's own kernel for meta tensors accepts them and does nothing.
    (
        lambda: backend().allreduce([t(2, device="meta")], dist.AllreduceOptions()),
        ValueError,
        r"tensor on meta, but .* accelerators only",
    ),
    (lambda: dist.broadcast(t(2), 9), ValueError, "9"),
    (lambda: dist.all_gather([t(2)], t(2)), ValueError, "2 ranks, got 1"),
    (lambda: dist.all_gather_into_tensor(t(3), t(2)), ValueError, "output of 4 elements, got 3"),
    (lambda: dist.reduce_scatter_tensor(t(2), t(5)), ValueError, "input of 4 elements, got 5"),
    (lambda: dist.reduce_scatter_tensor(t(2), t(4, dtype=f64)), TypeError, "one dtype"),
    (lambda: dist.send(t(2), dist.get_rank()), ValueError, "(?i)itself|same|self"),
    (gather([[t(2), t(2, dtype=f64)]]), TypeError, "one dtype"),
    (gather([]), ValueError, "one list of tensors, .* got 0 lists"),
    (gather([[t(3), t(3)]]), ValueError, "8 bytes for itself, and room for 12"),
    (
        lambda: backend().scatter([t(2)], [[t(2)] * 3], rooted(dist.ScatterOptions())),
        ValueError,
        "2 ranks, got 3",
    ),
    (overlapping, ValueError, "two outputs share memory"),
    (lambda: dist.all_gather([t(1).expand(4), t(4)], t(4)), ValueError, "one memory location"),
    (lambda: dist.all_to_all([t(2), t(2)], [t(2)]), ValueError, "2 ranks, got 1"),
    (lambda: dist.all_to_all([t(3), t(3)], [t(2), t(2)]), ValueError, "and room for 12"),
    (lambda: dist.all_to_all_single(t(3), t(3)), ValueError, "3 rows of its input"),
    (lambda: dist.all_to_all_single(t(()), t(())), ValueError, "scalar"),
    (split([2, 2], [1, 1, 2]), ValueError, "each of the 2 ranks, got 3"),
    (split([2, 2], [1, 2]), ValueError, r"\[1, 2\], add up to 3, but there are 4 rows"),
    (split([2, 1 << 62], [2, 2]), ValueError, "no way to cut 4 rows"),
    (split([2, 2], [5, -1]), ValueError, "no way to cut"),
]


@in_ranks(2)
def test_wrong_arguments(rank: int) -> None:
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
    assert not issubclass(ringcomm.PeerDiedError, TimeoutError)
