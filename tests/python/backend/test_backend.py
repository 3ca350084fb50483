"""ringcomm as a backend of torch.distributed: registration, counters, its object, its groups."""

from __future__ import annotations

import copy
import datetime
import json
import os
import signal
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from failures import TRANSPORTS, caught
from ranks import hosts, in_ranks, init_group
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.distributed.device_mesh import init_device_mesh

import _ringcomm.autoload
import ringcomm
from ringcomm import _C, Options, RingcommError
from ringcomm.ops import shard_range
from ringcomm.torch_names import TORCH_VERSION

ENVS_OF_FOUR: dict[str, Any] = {**TRANSPORTS, "aaba": hosts("aaba")}


def test_defaults_stay() -> None:
    _ringcomm.autoload.register()  # again
    defaults = dist.Backend.default_device_backend_map
    assert (defaults["cpu"], defaults["cuda"]) == ("gloo", "nccl")
    assert dist.Backend.backend_capability["ringcomm"] == ["cpu", "cuda"]


def backend_of(group: Any = None) -> Any:
    world: Any = dist.group.WORLD
    return (group or world)._get_backend(torch.device("cpu"))


@in_ranks((2, 4))
def test_names_and_memory(rank: int) -> None:
    world_size = dist.get_world_size()
    backend = backend_of()
    assert (dist.get_backend(), backend.name()) == ("ringcomm", "ringcomm")
    assert (backend.size(), backend.rank()) == (world_size, rank)
    pairs = world_size * (world_size - 1) // 2
    assert 0 < _C.mapped_bytes(backend) <= pairs * (8 << 20)


@in_ranks(
    2,
    env={
        "RINGCOMM_ALGORITHM": "two_shot",
        "RINGCOMM_DETERMINISTIC": "rank_order",
        "RINGCOMM_MAX_THREADS": "4",
    },
)
def test_environment(rank: int) -> None:
    """It decides what options leave at their defaults, of groups too."""
    for options, algorithm in ((None, "two_shot"), (Options(algorithm="one_shot"), "one_shot")):
        group: Any = dist.new_group(backend="ringcomm", pg_options=options)
        dist.all_reduce(torch.ones(10), group=group)
        assert list(ringcomm.stats(group)) == [("all_reduce", algorithm)]
        assert "deterministic=rank_order" in backend_of(group).options.text
    assert Options().with_environment().max_threads == 4


# ---- counters


def count(group: Any, op: str, algorithm: str) -> tuple[int, int]:
    entry = ringcomm.stats(group).get((op, algorithm), {"num_calls": 0, "sent_bytes": 0})
    return entry["num_calls"], entry["sent_bytes"]


def sent_elems(algorithm: str, num_elems: int, world_size: int, rank: int) -> int:
    """What a rank sends of an all_reduce: of a ring over all ranks 2 (N - 1) / N of it."""
    begin, end = shard_range(num_elems, world_size, rank)
    if algorithm == "ring":  # all chunks but this rank's own, then all but its neighbour's
        first, last = shard_range(num_elems, world_size, (rank + 1) % world_size)
        return 2 * num_elems - (end - begin) - (last - first)
    if algorithm == "one_shot":
        return (world_size - 1) * num_elems
    # What the others own goes to them, the own result to all of them.
    return num_elems + (world_size - 2) * (end - begin)


@in_ranks((2, 3, 4), TRANSPORTS)
def test_stats(rank: int) -> None:
    """Calls and bytes of each algorithm, to the byte where no number of ranks divides the elements,
    and of another collective. What auto takes: test_cost_model.py.
    """
    world_size = dist.get_world_size()
    algorithms: tuple[Any, ...] = ("one_shot", "two_shot", "ring")
    for algorithm, num_elems in product(algorithms, (120_000, 120_011)):
        sent_bytes = 4 * sent_elems(algorithm, num_elems, world_size, rank)
        group = dist.new_group(backend="ringcomm", pg_options=Options(algorithm=algorithm))
        assert ringcomm.stats(group) == {}
        before = count(None, "all_reduce", algorithm)
        for turn in range(1, 3):
            dist.all_reduce(torch.ones(num_elems), group=group)
            assert count(group, "all_reduce", algorithm) == (turn, turn * sent_bytes)
        after = count(None, "all_reduce", algorithm)
        assert after == (before[0] + 2, before[1] + 2 * sent_bytes)
        assert list(ringcomm.stats(group)) == [("all_reduce", algorithm)]
        dist.destroy_process_group(group)
    group = dist.new_group(backend="ringcomm")
    outputs = [torch.empty(1000) for _ in range(world_size)] if rank == 1 else None
    dist.gather(torch.ones(1000), outputs, 1, group)
    assert count(group, "gather", "direct") == (1, 4000 * (rank != 1))
    dist.destroy_process_group(group)


@in_ranks(1, backend="gloo")
def test_stats_of_another_backend(rank: int) -> None:
    for counters in (ringcomm.stats, ringcomm.peer_stats):
        with pytest.raises(ValueError, match="gloo"):
            counters(dist.group.WORLD)
        assert counters() == {}


# ---- what its object offers: options, splits, numbers, its end


@in_ranks(3)
def test_options(rank: int) -> None:
    """Those of a group may be copied, and make groups too."""
    group: Any = dist.new_group(
        backend="ringcomm",
        pg_options=Options(algorithm="ring", deterministic="rank_order"),
        timeout=datetime.timedelta(seconds=17),
    )
    options = backend_of(group).options
    copied = copy.deepcopy(options)
    assert copied is not options
    for each in (options, copied):
        assert "algorithm=ring deterministic=rank_order" in each.text
        assert each._timeout == datetime.timedelta(seconds=17)
        assert (each.global_ranks_in_group, each.backend) == ([0, 1, 2], "ringcomm")
    again: Any = dist.new_group(backend="ringcomm", pg_options=copied)
    assert backend_of(again).options.text == options.text
    backend_of(again).set_timeout(datetime.timedelta(seconds=5))
    assert backend_of(again).options._timeout == datetime.timedelta(seconds=5)
    dist.barrier(again)


@in_ranks(3)
def test_split(rank: int) -> None:
    """ProcessGroup.split_group. Before torch 2.15, dist's wants a group bound to an accelerator."""
    if TORCH_VERSION < (2, 15):
        with pytest.raises(RuntimeError, match="No device associated"):
            dist.split_group(split_ranks=[[0, 2], [1]])
    else:
        found: Any = dist.split_group(split_ranks=[[0, 2], [1]])
        assert found.size() == (2 if rank in (0, 2) else 1)
    world: Any = dist.group.WORLD
    assert backend_of().supports_splitting
    for _ in range(2):
        mine = [0, 2] if rank in (0, 2) else [1]
        part = world.split_group(mine, group_name=f"part{mine}", group_desc="a part")  # again
        assert (part.size(), part.rank()) == (len(mine), mine.index(rank))
        assert isinstance(backend_of(part), _C.ProcessGroupRingcomm)
        assert backend_of(part).options.global_ranks_in_group == mine
        tensor = torch.full((4,), float(rank))
        part.allreduce([tensor]).wait()
        assert (tensor == sum(mine)).all()
        part.shutdown()
    dist.barrier()


@in_ranks(2)
def test_sequence_numbers(rank: int) -> None:
    """Numbers are given when calls are made, also to those that wait for their turn."""
    backend = backend_of()
    first = backend._get_sequence_number_for_group()
    works: list[Any] = [dist.all_reduce(torch.ones(n), async_op=True) for n in (300_000, 3, 2)]
    assert backend._get_sequence_number_for_group() == first + 3
    for work in works:
        work.wait()
    with pytest.raises(ValueError, match="band"):
        dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND)
    assert backend._get_sequence_number_for_group() == first + 3


@in_ranks(2)
def test_end(rank: int) -> None:
    """abort() and shutdown() may be called again and in any order."""
    error_type = torch._C._distributed_c10d.ErrorType
    for order in (("abort", "abort", "shutdown"), ("shutdown", "abort", "shutdown")):
        group: Any = dist.new_group(backend="ringcomm")
        backend = backend_of(group)
        dist.barrier(group)
        assert backend.get_error() == error_type.SUCCESS
        for name in order:
            getattr(backend, name)()
            if name == "abort" and order[0] == "abort":
                assert backend.get_error() == error_type.COMM_ERROR
                with pytest.raises(RingcommError, match="aborted"):
                    dist.barrier(group)
        with pytest.raises(ValueError, match="has been destroyed"):
            dist.barrier(group)
        dist.barrier()
        dist.destroy_process_group(group)


@in_ranks(2, fresh=True, group_timeout_s=0.3)
def test_get_error_after_a_time_out(rank: int) -> None:
    if rank == 0:
        with pytest.raises(RingcommError):
            dist.barrier()
        assert "TIMEOUT" in str(backend_of().get_error())


# ---- groups: a backend for each device, two default groups, subgroups


def sum_of(group: Any, value: float) -> float:
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


@in_ranks(2, backend=None, fresh=True)
@pytest.mark.parametrize("backend", ["cpu:ringcomm,cuda:ringcomm", "cpu:ringcomm,cuda:gloo"])
def test_form_with_devices(rank: int, backend: str, tmp_path: Path) -> None:
    """One object serves several devices; beside another backend it serves its own."""
    init_group(rank, 2, tmp_path / "store", backend=backend)
    assert backend_of().name() == "ringcomm"
    assert sum_of(None, rank) == 1
    assert sum_of(dist.new_group([0, 1]), 2) == 4


@in_ranks(3, backend=None, fresh=True, may_die=[2])
def test_errors_number_ranks_as_their_group_does(rank: int, tmp_path: Path) -> None:
    """In processes with two default groups, as trainers and engines of RLHF have.

    Ranks 1 and 2 of all are 0 and 1 elsewhere: https://github.com/vllm-project/vllm/issues/5477
    """
    if rank == 0:
        init_group(0, 1, str(tmp_path / "trainer"), 60)
    else:
        init_group(rank - 1, 2, str(tmp_path / "engine"), 60)
    c10d: Any = dist.distributed_c10d
    place = {"group_name": "all", "timeout": datetime.timedelta(seconds=60)}
    store = dist.PrefixStore("all", dist.FileStore(str(tmp_path / "all"), 3))
    everyone, _ = c10d._new_process_group_helper(
        3, rank, [], dist.Backend("ringcomm"), store, **place
    )
    c10d._world.pg_group_ranks[everyone] = {number: number for number in range(3)}
    assert sum_of(everyone, 1) == 3
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    for group, dead in ((everyone, 2), (None, 1))[: 2 if rank == 1 else 1]:
        error = caught(sum_of, group, 1)
        assert (error["type"], error["rank"]) == ("PeerDiedError", dead), error
        assert f"rank {dead} (pid" in error["text"], error


@in_ranks(4, ENVS_OF_FOUR)
def test_ways_to_make_groups(rank: int) -> None:
    """Of some ranks and of all, in turn: https://github.com/pytorch/pytorch/issues/145376"""
    pair, _ = dist.new_subgroups(2)
    assert sum_of(pair, rank) == (1 if rank < 2 else 5)
    crossed, _ = dist.new_subgroups_by_enumeration([[3, 0], [1, 2]])
    assert sum_of(crossed, 10**rank) == (1001 if rank in (0, 3) else 110)
    if rank in (1, 3):  # the other ranks do not even call
        local = dist.new_group([1, 3], use_local_synchronization=True)
        assert sum_of(local, rank) == 4
    everyone = dist.new_group()
    assert sum_of(everyone, rank) == 6
    if rank in (1, 3):
        assert sum_of(local, rank) == 4
        dist.destroy_process_group(local)
    dist.destroy_process_group(everyone)
    assert sum_of(None, rank) == 6


@in_ranks(4, ENVS_OF_FOUR, fresh=True)
def test_the_end_after_meshes_of_some_and_all_ranks(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/190396"""
    part = init_device_mesh("cpu", (3,))
    if part.get_coordinate() is not None:
        assert sum_of(part.get_group(), 1) == 3
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    assert [sum_of(whole.get_group(dim), 1) for dim in range(2)] == [2, 2]
    dist.destroy_process_group()
    assert not dist.is_initialized()


# ---- a group in Python

PythonGroup: Any = dist.ProcessGroup  # torch's stubs do not know that it can be subclassed


class Forwarding(PythonGroup):
    """A group written in Python, as wrappers of process groups are."""

    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner = inner

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        return self.inner.allreduce(tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        return self.inner.broadcast(tensors, opts)

    def _allgather_base(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        return self.inner._allgather_base(output, tensor, opts)


@in_ranks(2, fresh=True)
def test_a_group_in_python(rank: int) -> None:
    """torch cannot hand "no work" from such a group to C++; the operators ask it for one."""
    inner = dist.group.WORLD
    assert inner is not None
    forwarding = Forwarding(inner)
    name: Any = "forwarding"
    _register_process_group(name, forwarding)
    try:
        x = torch.full((3,), rank + 1.0)
        oracle.assert_equal(
            torch.ops.ringcomm.all_reduce(x, "sum", "forwarding"), torch.full((3,), 3.0)
        )
        oracle.assert_equal(torch.ops.ringcomm.broadcast(x, 1, "forwarding"), torch.full((3,), 2.0))
        options = dist.AllreduceOptions()
        options.asyncOp = False
        assert forwarding.allreduce([x], options) is None
        oracle.assert_equal(x, torch.full((3,), 3.0))
    finally:
        _unregister_process_group(name)


# ---- what one sees of it: TORCH_DISTRIBUTED_DEBUG=DETAIL, the profiler's events


@in_ranks(2, backend=None, fresh=True)
def test_detail_names_both_calls(rank: int, tmp_path: Path) -> None:
    """torch's own check comes before ringcomm's. Training so: test_torchrun.py."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # the variable is read when torch is imported
    init_group(rank, 2, tmp_path / "store")
    wrapper: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    assert "Wrapper" in type(wrapper).__name__
    assert wrapper.wrapped_pg.name() == "ringcomm"
    with pytest.raises(RuntimeError, match="running collective: CollectiveFingerPrint") as caught:
        dist.all_reduce(torch.ones(2 + rank))
    assert all(f"TensorShape=[{size}]" in str(caught.value) for size in (2, 3))
    total = torch.ones(3)  # nothing has been exchanged, the group lives
    dist.all_reduce(total, group=dist.new_group([1, 0]))
    assert total.tolist() == [2] * 3
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, rank)
    assert everyone == [0, 1]
    dist.barrier()


def traced(path: Path, body: Callable[[], Any]) -> list[dict[str, Any]]:
    """The events of `body`, as a trace file has them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        body()
    own = [event for event in profiler.events() or () if event.name.startswith("ringcomm:")]
    assert all(event.is_async for event in own)  # torch's profilers know a backend's calls by that
    profiler.export_chrome_trace(str(path))
    return list(json.loads(path.read_text())["traceEvents"])


@in_ranks(2)
@pytest.mark.parametrize("is_async", [False, True])
def test_profiler(rank: int, is_async: bool, tmp_path: Path) -> None:
    """ringcomm's event, for which torch's own tests look, and record_param_comms.

    Once for each call: https://github.com/ROCm/aiter/issues/1946
    https://github.com/pytorch/pytorch/pull/46471
    """
    own, large, whole = torch.ones(10), torch.ones(200_000), torch.ones(20, dtype=torch.bfloat16)
    one, parts = whole[:10].clone(), [torch.ones(1), torch.ones(2)]
    fields = ("Collective name", "In msg nelems", "Out msg nelems", "dtype", "Group size")
    message = (dist.recv, (own, 0)) if rank else (dist.send, (own, 1))
    at_root = [torch.ones(10), torch.ones(10)] if rank == 0 else None
    cases: list[tuple[Any, tuple[Any, ...], str, int, int]] = [
        (dist.all_reduce, (own,), "all_reduce/one_shot", 10, 10),
        (dist.all_reduce, (large,), "all_reduce/two_shot", 200_000, 200_000),
        (dist.all_gather, (parts, parts[rank].clone()), "all_gather", rank + 1, 3),
        (dist.reduce_scatter_tensor, (one, whole), "_reduce_scatter_base", 20, 10),
        (dist.gather, (own, at_root, 0), "gather", 10, 20 * (1 - rank)),
        (*message, "recv" if rank else "send", 10 * (1 - rank), 10 * rank),
    ]
    for number, (call, args, name, *elems) in enumerate(cases):
        options = {} if call in (dist.send, dist.recv) else {"async_op": is_async}

        def body(call: Any = call, args: Any = args, options: Any = options) -> None:
            work = call(*args, **options)
            if hasattr(work, "wait"):
                work.wait()

        events = traced(tmp_path / f"{number}-{rank}", body)
        event_name = f"ringcomm:{name.partition('/')[0]}"
        assert len([e for e in events if e.get("name") == event_name]) == 1, name
        (event,) = (e["args"] for e in events if e.get("name") == "record_param_comms")
        dtype = "BFloat16" if name == "_reduce_scatter_base" else "Float"
        assert [event[field] for field in fields] == [name, *elems, dtype, 2], name
    # Without a profiler nothing is recorded, nor afterwards.
    dist.all_reduce(torch.ones(3))
    events = traced(tmp_path / f"none{rank}", lambda: None)
    assert not [e for e in events if "comms" in e.get("name", "")]
