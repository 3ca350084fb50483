"""What a GPU costs the host: waits for the device, copies, and calls of CUDA's driver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import emugpu
import emulated_gpu
import pytest
import torch
import torch.distributed as dist
from device_systems import SYSTEMS, Waits, in_stages, pinned
from emulated_gpu import driver_calls, in_emulated_ranks
from gpu_ranks import meet
from ranks import place, run_ranks
from torch import Tensor

import ringcomm
from ringcomm.torch_names import TORCH_VERSION, all_gather_single

pytestmark = emulated_gpu.needs_emulated_gpu

GPU = "emugpu"
# Of the driver, outside of operators.
WAITING = {
    "cuEventSynchronize": "event",
    "cuStreamSynchronize": "stream",
    "cuCtxSynchronize": "device",
}


def waits_of_driver() -> Counter[str]:
    calls = driver_calls()
    return Counter({kind: calls[name] for name, kind in WAITING.items()})


def count(rank: int, device: str, name: str) -> tuple[dict[str, int], list[str]]:
    """In the third step."""
    _, step = SYSTEMS[name][0](place(device, rank))
    step()
    step()
    with Waits(waits_of_driver) as waits:
        step()
    dist.barrier()  # groups of the call end with it, also of a server that others still use
    return dict(waits.counts), waits.places


CONTROLS: dict[str, Callable[[Tensor], Any]] = {
    "wait": lambda x: x[x > 1],
    "up": lambda x: torch.ones(1).to(GPU),
    "down": lambda x: x.cpu(),
    "event": lambda x: emugpu.current_stream().record_event().synchronize(),
    "stream": lambda x: x.new_tensor([1.0]),  # a copy that no mode sees
    "device": lambda x: emugpu.synchronize(),
}


@pytest.mark.parametrize("kind", CONTROLS)
@in_emulated_ranks(1, backend=None)
def test_what_counts_as_a_wait(rank: int, kind: str) -> None:
    x = torch.ones(3, device=GPU)
    with Waits(waits_of_driver) as waits:
        CONTROLS[kind](x)
    assert waits.counts == {kind: 1}


@pytest.mark.parametrize("name", SYSTEMS)
def test_waits_of_a_step(name: str) -> None:
    for counts, places in run_ranks(2, count, GPU, name):
        assert counts == SYSTEMS[name][1], "\n".join(places)


@in_emulated_ranks(2, env={"RINGCOMM_EMULATOR_QUEUES": "0"})
def test_the_wait_for_a_pinned_batch_is_none_for_earlier_steps(rank: int) -> None:
    _, step = in_stages(pinned)(place(GPU, rank))
    step()
    emugpu.synchronize()
    held = emugpu.hold(emugpu.current_stream())
    earlier = emugpu.current_stream().record_event()
    step()
    assert not earlier.query()
    held.release()
    emugpu.synchronize()


# ---- calls of CUDA's driver

# Of a call on the caller's stream: which context, which capture, the kernel. The default stream
# has an event behind it when somebody asks.
ONE_CALL: tuple[str, ...] = ("cuCtxGetCurrent", "cuStreamGetCaptureInfo_v2", "cuLaunchKernel")
if TORCH_VERSION >= (2, 15):  # c10d looks at the current stream once more
    ONE_CALL += ONE_CALL[:2]
# Whose memory a buffer is in, of calls that could use it in place.
LOOK_AT_BUFFER = ("cuPointerGetAttributes",)
# Of one on the group's own stream, besides: it waits for the caller's stream, and has an event
# behind it. Then of wait(): the caller's stream waits for it.
OWN_STREAM = (
    *("cuEventRecord", "cuStreamWaitEvent", "cuEventRecord"),
    *("cuCtxGetCurrent", "cuStreamWaitEvent"),
)
# Whether an earlier call is over, whose tensors this rank still keeps.
ONE_LOOK = ("cuThreadExchangeStreamCaptureMode", "cuEventQuery")


counted = partial(in_emulated_ranks, env={"RINGCOMM_EMULATOR_SMS": "48"}, fresh=True)


def calls_of(body: Callable[[], Any], times: int) -> Counter[str]:
    """The driver's calls of `times` calls, after four that make what is used again and map it.

    The fewest of three tries: between calls that are long apart, a thread looks for freed memory.
    """
    for _ in range(4):
        body()
        emugpu.synchronize()
    found = []
    for _ in range(3):
        emugpu.synchronize()
        before = driver_calls()
        for _ in range(times):
            body()
        found.append(driver_calls() - before)
    return found[0] & found[1] & found[2]


@counted(2)
def test_synchronous_calls(rank: int) -> None:
    """Three calls of the driver each, and none more as calls add up. Large ones launch three
    kernels, and look at the allocation of their buffer and at one that is mapped. On another stream
    than the default one there is an event behind each.
    """
    world_size = dist.get_world_size()
    small, large = torch.ones(10, device=GPU), torch.ones(100_000, device=GPU)
    mapped = torch.ones(1 << 20, device=GPU)
    gathered = torch.empty(world_size * 10, device=GPU)
    ring = dist.new_group(pg_options=ringcomm.Options(algorithm="ring"))
    bodies: list[tuple[Callable[[], Any], int, int]] = [
        (lambda: dist.all_reduce(small), 1, 0),
        (lambda: dist.all_reduce(large), 1, 0),
        (lambda: dist.all_reduce(large, group=ring), 3, 0),
        (lambda: dist.broadcast(large, 0), 1, 0),
        (lambda: all_gather_single(gathered, small), 1, 0),
        (lambda: dist.all_reduce(mapped), 3, 2),
    ]
    for body, num_kernels, num_looks in bodies:
        calls = ONE_CALL + ("cuLaunchKernel",) * (num_kernels - 1) + LOOK_AT_BUFFER * num_looks
        assert calls_of(body, 50) == Counter(calls * 50)
        meet()  # what one cannot lend, the others stage as well, also in earlier calls
    with torch.Stream(GPU):
        assert calls_of(bodies[0][0], 50) == Counter((*ONE_CALL, "cuEventRecord") * 50)


@counted(2)
def test_asynchronous_calls(rank: int) -> None:
    """Six calls of the driver each, and two of wait(); two or three more where earlier ones are not
    waited for. The first makes no stream: a driver may wait with that until kernels have ended.
    """
    tensor = torch.ones(100_000, device=GPU)
    dist.all_reduce(tensor)
    before = driver_calls()
    dist.all_reduce(tensor, async_op=True).wait()
    assert (driver_calls() - before)["cuStreamCreate"] == 0
    assert before["cuStreamCreate"] > 0

    def one() -> None:
        work: Any = dist.all_reduce(tensor, async_op=True)
        work.wait()

    def bucketed() -> None:
        for work in [dist.all_reduce(tensor, async_op=True) for _ in range(3)]:
            work.wait()

    expected = Counter(ONE_CALL + OWN_STREAM)
    assert calls_of(one, 20) == Counter({name: 20 * num for name, num in expected.items()})
    found = calls_of(bucketed, 20)
    for name, num in expected.items():
        assert found.pop(name) == 60 * num
    assert set(found) <= set(ONE_LOOK)  # two of three calls look once or more
    assert found["cuEventQuery"] <= 3 * 60
    assert found["cuThreadExchangeStreamCaptureMode"] == 2 * found["cuEventQuery"]


@counted(3)
def test_messages(rank: int) -> None:
    """A batch of messages is one kernel and one event, whatever ranks they are with."""
    world_size = dist.get_world_size()
    peers = [peer for peer in range(world_size) if peer != rank]
    sent, received = torch.ones(1000, device=GPU), torch.empty(world_size, 1000, device=GPU)

    def batch() -> None:
        ops = [dist.P2POp(dist.isend, sent, peer) for peer in peers]
        ops += [dist.P2POp(dist.irecv, received[peer], peer) for peer in peers]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    found = calls_of(batch, 10)
    assert found["cuLaunchKernel"] == 10
    assert found["cuEventRecord"] == 2 * 10
    assert found["cuEventCreate"] == found["cuEventDestroy_v2"] == 0


@in_emulated_ranks(2, kernels=False)
def test_batches_over_messages(rank: int) -> None:
    """The ring over messages: a batch for each 4 MiB of a chunk and step, not for each 256 KiB."""
    ring = dist.new_group(pg_options=ringcomm.Options(algorithm="ring"))
    tensor = torch.ones(4 << 20, device=GPU)  # 16 MiB: two chunks of two slots, two steps
    found = calls_of(lambda: dist.all_reduce(tensor, group=ring), 1)
    assert found["cuLaunchHostFunc"] == 4
