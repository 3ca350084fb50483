"""Works and futures; send and recv; transport "messages" and what carries it.

Works waited for in any order; sizes, matching by source, tag and order, layouts, types and objects
of messages: test_collectives.py and test_random_sequences.py.
"""

from __future__ import annotations

import datetime
import itertools
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from failures import TRANSPORTS, caught
from machines import comes_true
from ranks import hosts, in_ranks, run_ranks
from sequence_calls import KINDS
from sequences import run_calls
from test_collectives import covering_calls
from torch import Tensor
from torch.distributed._functional_collectives import allow_inflight_collective_as_graph_input_ctx
from torch.utils._python_dispatch import TorchDispatchMode

from ringcomm import Options, message_backend


@in_ranks(2, TRANSPORTS)
@pytest.mark.parametrize("depth", [1, 12])
def test_a_continuation_waits_for_a_call_that_was_started_before_it(rank: int, depth: int) -> None:
    """https://github.com/pytorch/pytorch/issues/48478: hooks of DDP that wait in callbacks."""
    works: list[Any] = [dist.all_reduce(torch.ones(2), async_op=True) for _ in range(depth + 1)]
    futures = [work.get_future() for work in works]
    sums = [
        future.then(lambda own, later=later: own.value()[0] + later.wait()[0])
        for future, later in itertools.pairwise(futures)
    ]
    assert [found.wait().tolist() for found in sums] == [[4, 4]] * depth


@in_ranks(1)
def test_a_block_frees_its_tensors_without_the_lock_of_the_group(rank: int) -> None:
    """A block that stays open drops works that are done. Their tensors' end runs Python, which may
    ask the group: with the lock held, this thread, or one that has Python's, waits for ever."""
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    asked: list[Any] = []

    class Asks:
        def __del__(self) -> None:
            asked.append(backend.get_error())

    def call(tensor: Tensor) -> None:
        dist.all_reduce(tensor, async_op=True).wait()

    backend._start_coalescing()
    marked = torch.ones(1)
    marked.asks = Asks()  # type: ignore[attr-defined]
    call(marked)
    del marked
    assert not asked  # the block has the tensor
    for _ in range(1024):
        call(torch.ones(1))
    assert len(asked) == 1
    backend._end_coalescing().wait()


@in_ranks(2, TRANSPORTS)
def test_chain(rank: int) -> None:
    """PowerSGD's way: a callback issues the next collective and waits for it, three deep."""

    def next_one(future: Any) -> Tensor:
        value = future.value()
        tensor = value[0] if isinstance(value, list) else value
        dist.all_reduce(tensor)
        return tensor

    def next_async(future: Any) -> Tensor:
        (tensor,) = dist.all_reduce(future.value(), async_op=True).get_future().wait()
        return tensor

    def fail(future: Any) -> None:
        raise ZeroDivisionError("the callback's own")

    for _ in range(20):
        work: Any = dist.all_reduce(torch.ones(1000), async_op=True)
        result = work.get_future().then(next_one).then(next_async).then(next_one).wait()
        assert (result == 2.0**4).all()
    with pytest.raises(Exception, match="the callback's own"):
        work.get_future().then(fail).wait()
    dist.barrier()


@in_ranks((1, 2))
def test_results(rank: int) -> None:
    """Works and futures give the caller's tensors, also when they are asked late."""
    tensor = torch.full((3,), rank + 1.0)
    work: Any = dist.all_reduce(tensor, async_op=True)
    (value,) = work.get_future().wait()
    assert value.data_ptr() == work.result()[0].data_ptr() == tensor.data_ptr()
    assert torch.equal(work.get_future().then(lambda f: f.value()[0] * 2).wait(), tensor * 2)
    outputs = [torch.empty(3) for _ in range(dist.get_world_size())]
    work = dist.all_gather(outputs, tensor, async_op=True)
    for output, given in zip(outputs, work.get_future().wait(), strict=True):
        assert output.data_ptr() == given.data_ptr()
    barrier: Any = dist.barrier(async_op=True)
    assert barrier.get_future().wait() is not None
    assert work.wait(datetime.timedelta(seconds=5))


@in_ranks(2)
def test_waiting_releases_the_gil(rank: int) -> None:
    """Rank 0 comes once a thread of rank 1 has run for a while beside the wait of rank 1."""
    store: Any = dist.distributed_c10d._get_default_store()
    is_waiting = threading.Event()
    ticks: list[int] = []

    def tick() -> None:
        is_waiting.wait()
        for number in range(10):
            time.sleep(0.005)
            ticks.append(number)
        store.set("rank 1 ran a thread", "")

    if rank == 0:
        store.wait(["rank 1 ran a thread"], datetime.timedelta(seconds=20))
        store.delete_key("rank 1 ran a thread")
        dist.barrier()
    else:
        thread = threading.Thread(target=tick)
        thread.start()
        is_waiting.set()
        dist.barrier()
        assert len(ticks) == 10
        thread.join()


@in_ranks(4, {**TRANSPORTS, "aaba": hosts("aaba")})
def test_batches_that_differ_between_ranks(rank: int) -> None:
    """https://github.com/NVIDIA/nccl/issues/2130 https://github.com/pytorch/pytorch/issues/109401"""
    peer = rank ^ 1
    mine, theirs, last = torch.full((9,), rank), torch.zeros(9, dtype=torch.long), torch.zeros(1)
    batch = [dist.P2POp(dist.isend, mine, peer)] if rank % 2 else []
    batch += [dist.P2POp(dist.irecv, theirs, peer)]
    batch += [] if rank % 2 else [dist.P2POp(dist.isend, mine, peer)]
    works = dist.batch_isend_irecv(batch)
    if rank % 2:  # the other rank has no such batch: a send, and later a receive
        works += dist.batch_isend_irecv([dist.P2POp(dist.irecv, last, peer)])
    else:
        dist.send(torch.tensor([4.0]), peer)
    for work in works:
        work.wait()
    assert theirs.unique().tolist() == [peer]
    assert last.item() == (4 if rank % 2 else 0)


# ---- a receive into a larger tensor than the message

# In an envelope of a message or a slot of a link, and in several.
ROOM_SIZES = (0, 3, 5000, 400_000)
AS_GLOO = {name: {**(env or {}), "RINGCOMM_AS_GLOO": "1"} for name, env in TRANSPORTS.items()}


@in_ranks(2, AS_GLOO, fresh=True)
def test_as_gloo_the_beginning_is_written(rank: int) -> None:
    """Gloo and MPI write the beginning, NCCL hangs (https://github.com/NVIDIA/nccl/issues/1938).

    Without RINGCOMM_AS_GLOO=1, and for a larger message always, it is an error with both sizes.
    """
    room = max(ROOM_SIZES)
    for size, value in itertools.product(ROOM_SIZES, range(4)):
        if rank == 0:
            dist.send(torch.full((size,), float(value)), 1, tag=value)
            continue
        columns = torch.full((room, 2), -1.0)
        y = columns[:, 0] if value == 1 else torch.full((room,), -1.0)
        if value == 3:
            work: Any = dist.irecv(y, 0, tag=value)
            work.wait()
        else:
            assert dist.recv(y, None if value == 2 else 0, tag=value) == 0
        assert bool((y[:size] == value).all()), (size, value)
        assert bool((y[size:] == -1).all()), (size, value)
        assert bool((columns[:, 1] == -1).all()), (size, value)
    if rank == 0:
        error = caught(lambda: (dist.send(torch.ones(room + 1), 1), dist.barrier()))
    else:
        error = caught(dist.recv, torch.zeros(room), 0)
    assert error["type"] == "MismatchError", error
    assert f"{4 * room + 4} bytes" in error["text"], error


# ---- transport "messages"


@in_ranks(
    2,
    pg_options=Options(transport="messages", message_backend="ringcomm"),
    env={"RINGCOMM_AS_GLOO": "1"},
)
def test_over_another_backend(rank: int) -> None:
    """ringcomm's own shared memory as a stranger: a backend with Backend.abort() only.

    As a message backend must, it then takes messages that are shorter than their receive.
    """
    kinds = [kind for kind in KINDS if kind != "barrier"]
    assert run_calls([call for kind in kinds for call in covering_calls(kind)[::10]]) == []


def test_a_backend_that_takes_no_shorter_message() -> None:
    with pytest.raises(ValueError, match=r"'ringcomm' does with RINGCOMM_AS_GLOO=1 only"):
        message_backend.checked("ringcomm")


@in_ranks(2, env=TRANSPORTS["messages"])
def test_tags(rank: int) -> None:
    with pytest.raises(ValueError, match="tags over the message transport"):
        dist.send(torch.ones(1), 1 - rank, tag=0x7F000000)
    dist.barrier()


def test_transports_of_devices() -> None:
    with pytest.raises(ValueError, match=r"xpu .*cpu:ringcomm,cuda:nccl"):
        message_backend.for_device("gloo", "xpu")


def make_late(rank: int) -> float:
    """When rank 0 has made its end, or any other its group."""
    make, made_s = dist.ProcessGroupGloo, 0.0

    def make_own(*args: Any, **kwargs: Any) -> Any:
        nonlocal made_s
        backend = make(*args, **kwargs)
        time.sleep(0.2)
        made_s = time.monotonic()
        return backend

    if rank == 0:
        dist.ProcessGroupGloo = make_own  # type: ignore[assignment,misc]
    dist.destroy_process_group(dist.new_group())
    return made_s or time.monotonic()


def test_no_rank_has_a_group_before_all_have() -> None:
    """A rank that leaves it at once would close connections that others are making."""
    made_s, *others = run_ranks(3, make_late, fresh=True, env=TRANSPORTS["messages"])
    assert all(had_s >= made_s for had_s in others)


@in_ranks(2)
def test_works_of_compiled_programs_are_forgotten(rank: int) -> None:
    """torch keeps the works, and so the tensors, of calls that a compiled function may await."""
    num_kept = torch._C._distributed_c10d._get_work_registry_size
    x = torch.ones(4)
    with allow_inflight_collective_as_graph_input_ctx():
        for _ in range(3):
            dist.all_reduce(x, async_op=True).wait()
        dist.all_reduce(x)
        torch.ops._c10d_functional.wait_tensor(x)
        assert (num_kept(), x.tolist()) == (0, [16.0] * 4)
        dist.barrier()  # torch cannot register the work of a call that has none
        assert num_kept() == 0


class Handed(TorchDispatchMode):
    """Keeps the tensors that torch's dispatcher hands to a backend, and goes no further."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        self.tensors += args[0]
        raise InterruptedError


@in_ranks(1)
def test_another_backend_of_a_group_gets_no_views(rank: int) -> None:
    """As NCCL in cpu:ringcomm,cuda:nccl: it would send a conjugate view's memory as it is."""
    other: Any = dist.new_group(backend="fake")
    group: Any = dist.new_group(backend="cpu:ringcomm")
    kind = dist.ProcessGroup.BackendType.MPI
    group._register_backend(torch.device("meta"), kind, other._get_backend(torch.device("cpu")))
    for device, are_views in (("cpu", True), ("meta", False)):
        conjugate = torch.ones(2, dtype=torch.cfloat, device=device).conj()
        for view in (conjugate, conjugate.imag):
            with Handed() as handed, pytest.raises(InterruptedError):
                group.allreduce([view])
            (tensor,) = handed.tensors
            assert (tensor.is_conj() or tensor.is_neg()) == are_views, (device, view.dtype)


@in_ranks(2, TRANSPORTS)
def test_a_receive_for_the_end_of_the_job(rank: int) -> None:
    """Its timeout begins when somebody waits for it, as Gloo's."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    x = torch.zeros(1)
    receive: Any = dist.irecv(x, 1 - rank, group, tag=9)
    time.sleep(1.5)
    dist.barrier()
    send: Any = dist.isend(torch.tensor([7.0]), 1 - rank, group, tag=9)
    assert comes_true(lambda: receive.is_completed() and send.is_completed(), 60.0)
    receive.wait()
    assert x.item() == 7.0


@in_ranks(2, fresh=True)
def test_a_signal_handler_may_wait_for_other_messages(rank: int) -> None:
    """Below a receive of the main thread, which another thread's message needs to go on."""
    x, y = torch.zeros(1), torch.zeros(5_000_000)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        dist.send(torch.ones(5_000_000), 0, tag=1)
        store.wait(["handled"])
        dist.send(torch.ones(1), 0, tag=2)
        return

    def handle(*_: Any) -> None:
        thread = threading.Thread(target=dist.recv, args=(y, 1), kwargs={"tag": 1})
        thread.start()
        thread.join()
        store.set("handled", "yes")

    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    dist.recv(x, 1, tag=2)
    assert y.sum().item() == 5_000_000
