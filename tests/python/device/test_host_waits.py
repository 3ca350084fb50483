"""What a GPU costs the host: waits for the device, copies, and calls of CUDA's driver."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import emugpu
import emulated_gpu
import pytest
import torch
import torch.distributed as dist
from curves import batch, make_model
from emulated_gpu import driver_calls, in_emulated_ranks
from gpu_ranks import meet
from pipeline_models import make_tied, token_batch, tokens_loss
from ranks import place, run_ranks
from rows import Blocks, adamw, sgd, trained_by
from steps import apply_steps
from test_parallelize import ids_of
from test_parallelize import make as make_of_transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ringcomm
from ringcomm.optim import AdaLomo, Lomo
from ringcomm.parallel import ParallelDims, ParameterServer, activations, parallelize, pipeline
from ringcomm.torch_names import TORCH_VERSION, all_gather_single

pytestmark = emulated_gpu.needs_emulated_gpu

GPU = "emugpu"
# The aim is no wait, but where the program asks for a number of the device: a norm, a loss scale.
# Of operators: the result is a number, or has a shape that depends on values.
READING = (
    *("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal"),
    *("aten::_unique2", "aten::bincount", "aten::repeat_interleave"),
)
INDEXING = ("aten::index", "aten::index_put", "aten::index_put_")  # by a mask
# Of the driver, outside of operators.
WAITING = {
    "cuEventSynchronize": "event",
    "cuStreamSynchronize": "stream",
    "cuCtxSynchronize": "device",
}


def waits_of_driver() -> Counter[str]:
    calls = driver_calls()
    return Counter({kind: calls[name] for name, kind in WAITING.items()})


class Waits(TorchDispatchMode):
    """Counts reads of values, copies between host and device that the host waits for, and waits
    for events, streams and the device.

    It sees the operators of this thread and of its backward passes. The emulator waits for a stream
    in operators that it leaves to the CPU, where a GPU does not; collectives must not wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.places: list[str] = []
        self._before = waits_of_driver()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.counts += waits_of_driver() - self._before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = self._kind(func.name().split(".")[0], args, kwargs)
        if kind:
            ours = [f for f in traceback.extract_stack() if "/ringcomm/" in f.filename]
            self.counts[kind] += 1
            self.places.append(kind + "".join(f" {f.filename}:{f.lineno}" for f in ours[-3:]))
        before = waits_of_driver()
        result = func(*args, **kwargs)
        if "c10d" not in func.namespace:
            self._before += waits_of_driver() - before
        return result

    def _kind(self, name: str, args: Any, kwargs: Any) -> str:
        if name in READING:
            return "wait" if args[0].device.type == GPU else ""
        if name in INDEXING and any(x is not None and x.dtype == torch.bool for x in args[1]):
            return "wait" if args[0].device.type == GPU else ""
        if name not in ("aten::_to_copy", "aten::copy_"):
            return ""
        is_new = name == "aten::_to_copy"
        source = args[0] if is_new else args[1]
        target = (kwargs.get("device") or source.device) if is_new else args[0].device
        kinds = (source.device.type, torch.device(target).type)
        if kinds[0] == kinds[1] or kwargs.get("non_blocking") or args[2:3] == (True,):
            return ""
        return "down" if kinds[1] == "cpu" else "up"


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def shard(system: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Steps of a system of rows.py."""

    def make(device: torch.device) -> Callable[[], None]:
        model = Blocks().to(device, dtype)
        x = torch.ones(4, 7, dtype=dtype, device=device)
        own = trained_by(system, model, adamw(model), **options)

        def step() -> None:
            loss = loss_of(model, x)
            getattr(own, "scale", lambda loss: loss)(loss).backward()
            apply_steps(own)

        return step

    return make


def serve(device: torch.device) -> Callable[[], None]:
    """A worker's calls."""
    model = Blocks().to(device)
    x = torch.ones(4, 7, device=device)
    server = ParameterServer(model, lambda params: torch.optim.SGD(params, 0.1), staleness=0)

    def step() -> None:
        server.pull()
        loss_of(model, x).backward()
        server.push()

    return step


def in_backward(kind: Any, group: Any = "none", **options: Any) -> Any:
    """Steps of an optimizer that updates in the backward pass."""

    def make(device: torch.device) -> Callable[[], None]:
        model = Blocks().to(device)
        x = torch.ones(4, 7, device=device)
        own = kind(model, 0.01, group=group or dist.group.WORLD, **options)

        def step() -> None:
            own.backward(loss_of(model, x))
            own.step()
            own.zero_grad()

        return step

    return make


def on_mesh(kind: str, sizes: dict[str, Any], *, pins: bool = False, **options: Any) -> Any:
    """Steps of a model of transformers by parallelize(), with batches of the host."""

    def make(device: torch.device) -> Callable[[], None]:
        model = make_of_transformers(kind).to(device)
        sgd_of = partial(torch.optim.SGD, lr=0.1)
        owner = parallelize(model, ParallelDims(**sizes), sgd_of, **options)
        ids = ids_of(0).pin_memory() if pins else ids_of(0)

        def step() -> None:
            owner.step({"input_ids": ids, "labels": ids})
            owner.optimizer.step()
            owner.optimizer.zero_grad()

        return step

    return make


def in_stages(move: Any = None, *, is_tied: bool = False) -> Any:
    """Steps of a Pipeline of torch's layers, with batches of the host or as `move` makes them."""

    def make(device: torch.device) -> Callable[[], None]:
        blocks: Any = make_tied().blocks() if is_tied else make_model()
        loss_of = tokens_loss if is_tied else nn.functional.mse_loss
        more: Any = {"num_microbatches": 2, "count_items": Tensor.numel, "device": device}
        pipe = pipeline.Pipeline(blocks, loss_of, **more)
        optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
        x, y = token_batch(0) if is_tied else batch(0)
        if move is not None:
            x, y = move(x), move(y)

        def step() -> None:
            pipe.step(x, y)
            apply_steps(optimizer)

        return step

    return make


def partitioned(**options: Any) -> Any:
    def make(device: torch.device) -> Callable[[], None]:
        model = Blocks().to(device)
        x = torch.ones(4, 7, device=device)
        optimizer = sgd(model)

        def step() -> None:
            with activations.partition(min_elems=0, **options):
                loss = loss_of(model, x)
            loss.backward()
            apply_steps(optimizer)

        return step

    return make


# Models of transformers wait once in a forward pass, for whether sequences are packed, and in a
# pipeline once for each block and micro-batch.
OF_TRANSFORMERS = {"wait": 1}
CHECKED: dict[str, Any] = {"clipped": {"clip_grad_norm": 1.0}, "scaled": {"loss_scale": 1024.0}}
SYSTEMS: dict[str, tuple[Any, dict[str, int]]] = {
    "one process": (shard("one process"), {}),
    **{f"zero {stage}": (shard(f"zero {stage}"), {}) for stage in (1, 2, 3)},
    **{f"zero {stage}, bf16": (shard(f"zero {stage}", torch.bfloat16), {}) for stage in (1, 2)},
    **{
        f"zero {stage}, {name}": (shard(f"zero {stage}", **options), {"wait": 1})
        for stage in (1, 2, 3)
        for name, options in CHECKED.items()
    },
    # The first gradient of a pass is checked before a weight is written.
    "Lomo": (in_backward(Lomo), {"wait": 1}),
    "AdaLomo": (in_backward(AdaLomo), {"wait": 1}),
    "Lomo, replicas": (in_backward(Lomo, None), {"wait": 1}),
    "Lomo, scaled": (in_backward(Lomo, loss_scale=1024.0), {"down": 1}),
    "Lomo, clipped": (in_backward(Lomo, clip_grad_norm=1.0), {"down": 1}),
    "Lomo, clipped in two passes": (  # and each linear layer
        in_backward(Lomo, clip_grad_norm=1.0, clip_mode="two_pass"),
        {"down": 5},
    ),
    # Each of twelve weights and its gradient, before the host updates it; the next is on its way.
    "offload": (shard("offload"), {"event": 12}),
    "offload, bf16": (shard("offload", torch.bfloat16), {"event": 12}),
    # Shards of weights, and a bucket of gradients, which come in the backward pass.
    "zero 2, host": (shard("zero 2, host"), {"event": 13}),
    **{
        f"zero 2, host, {name}": (shard("zero 2, host", **options), {"wait": 1, "event": 13})
        for name, options in CHECKED.items()
    },
    # Twelve gradients, and two units on their way up, before the host writes their rows.
    **{
        f"infinity, {dtype}": (shard("infinity", dtype), {"event": 14})
        for dtype in (torch.float32, torch.bfloat16)
    },
    "data parallel": (on_mesh("Llama", {"dp": 2}), OF_TRANSFORMERS),
    "fsdp": (on_mesh("Llama", {"dp": 1, "fsdp": 2}), OF_TRANSFORMERS),
    "tensor parallel": (on_mesh("Llama", {"tp": 2}), OF_TRANSFORMERS),
    "sequence parallel": (
        on_mesh("Llama", {"tp": 2}, sequence_parallel=True),
        OF_TRANSFORMERS,
    ),
    "pipeline": (in_stages(), {}),
    "pipeline, tied": (in_stages(is_tied=True), {}),
    "pipeline, batches of the device": (in_stages(lambda x: x.to(GPU)), {}),
    "pipeline of transformers": (on_mesh("Llama", {"pp": 2}, num_microbatches=2), {"wait": 4}),
    # The copy of the batch, which the program may then write again.
    "pipeline, pinned batches": (in_stages(Tensor.pin_memory), {"event": 1}),
    "data parallel, pinned batches": (
        on_mesh("Llama", {"dp": 2}, pins=True),
        {**OF_TRANSFORMERS, "event": 1},
    ),
    # One for each of four layers: how many tokens come.
    "experts": (on_mesh("Mixtral", {"dp": 2, "ep": 2}), {**OF_TRANSFORMERS, "down": 4}),
    # A copy of all weights up, of all gradients down, for each of two servers.
    "parameter server": (serve, {"up": 2, "down": 2}),
    # The digests of a forward pass.
    "partitioned activations": (partitioned(), {"down": 1}),
    "partitioned activations, on the host": (partitioned(offload="cpu"), {"down": 1}),
    "partitioned activations, not checked": (partitioned(offload="cpu", check=False), {}),
}


def count(rank: int, device: str, name: str) -> tuple[dict[str, int], list[str]]:
    """In the third step."""
    step = SYSTEMS[name][0](place(device, rank))
    step()
    step()
    with Waits() as waits:
        step()
    dist.barrier()  # groups of the call end with it, also of a server that others still use
    return dict(waits.counts), waits.places


@pytest.mark.parametrize("name", SYSTEMS)
def test_waits_of_a_step(name: str) -> None:
    for counts, places in run_ranks(2, count, GPU, name):
        assert counts == SYSTEMS[name][1], "\n".join(places)


@in_emulated_ranks(2, env={"RINGCOMM_EMULATOR_QUEUES": "0"})
def test_the_wait_for_a_pinned_batch_is_none_for_earlier_steps(rank: int) -> None:
    step = in_stages(Tensor.pin_memory)(place(GPU, rank))
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
