"""Memory of training systems on GPUs, by torch's allocator, and copies to host memory."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import slow
from gpu_ranks import device, in_gpu_ranks, kind, meet, module, on_one_gpu
from schedule_simulation import simulate
from steps import train_step
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ringcomm.parallel import activations, offload, pipeline, zero

# Blocks have the sizes that torch gives them with CUDA.
SEGMENTS = {"RINGCOMM_EMULATOR_SEGMENTS": "1"}
WIDTH, NUM_LAYERS = 256, 6


def allocated() -> int:
    """Bytes of the tensors that live now."""
    gc.collect()
    module().synchronize()
    found: int = module().memory_allocated()
    return found


def reserved() -> int:
    module().synchronize()
    found: int = module().memory_reserved()
    return found


def num_retries() -> int:
    """How often the allocator has emptied its cache to find memory."""
    found: int = module().memory_stats()["num_alloc_retries"]
    return found


def peak_of(step: Any) -> int:
    """The most bytes of tensors during a call."""
    module().synchronize()
    module().reset_peak_memory_stats()
    step()
    module().synchronize()
    found: int = module().max_memory_allocated()
    return found


# ---- ZeRO


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", [1, 2, 3])
@in_gpu_ranks(on_one_gpu, env=SEGMENTS)
def test_the_peak_is_that_of_predict_memory(rank: int, stage: int, dtype: torch.dtype) -> None:
    """16-bit weights have masters in float32. Buffers of the update are not predicted."""
    before = allocated()
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)]
    model = nn.Sequential(*layers).to(device())
    options: dict[str, Any] = {"bucket_bytes": 2 * WIDTH * WIDTH * dtype.itemsize}
    if dtype != torch.float32:
        options["param_dtype"] = dtype
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    place: Any = {"world_size": dist.get_world_size(), "rank": rank}
    expected = zero.predict_memory(model, optimizer, stage, **place, **options)
    sharded = zero.shard(model, optimizer, stage, **options)
    x = torch.ones(2, WIDTH, dtype=dtype, device=device())
    for _ in range(2):
        train_step(model(x).float().square().mean(), sharded)
    peak = peak_of(lambda: model(x).float().square().mean().backward()) - before
    at_end = allocated() - before
    few = 64 * 1024  # activations, and small tensors of the systems
    lasting = expected.parameters + expected.gradients + expected.states
    assert lasting <= at_end <= lasting + few
    assert lasting + WIDTH * WIDTH * dtype.itemsize < peak
    computed = WIDTH * WIDTH * dtype.itemsize if stage == 1 else 0  # a gradient, not in a bucket
    assert peak <= expected.total + computed + few


# ---- pipelines

ROWS = 64  # of a micro-batch
SENT = ROWS * WIDTH * 4  # bytes of a micro-batch between two layers
LAYERS_OF_STAGE = 4


def peak_of_pipeline(schedule: str, num_parts: int) -> tuple[int, int]:
    """Of a step, over what is there before; and the live micro-batches of this rank's stage."""
    world_size = dist.get_world_size()
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4 * world_size)]
    mesh = init_device_mesh(kind(), (world_size,))
    options: dict[str, Any] = {"mesh": mesh, "device": device()}
    pipe = pipeline.Pipeline(
        nn.Sequential(*layers), nn.functional.mse_loss, schedule, num_parts, **options
    )
    x, y = (torch.ones(num_parts * ROWS, WIDTH, device=device()) for _ in range(2))
    for _ in range(3):  # finds out shapes, asks the loss, and makes gradients
        pipe.step(x, y)
    before = allocated()
    peak = peak_of(lambda: pipe.step(x, y)) - before
    (stage,) = pipe.plan.stages_of(dist.get_rank())
    return peak, simulate(schedule, world_size, num_parts).max_live()[stage]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@in_gpu_ranks(on_one_gpu, env=SEGMENTS)
def test_the_peak_is_that_of_live_micro_batches(rank: int, schedule: str) -> None:
    """Of GPipe all of them, of 1F1B as many as there are stages from here on."""
    (few, live_few), (many, live_many) = (peak_of_pipeline(schedule, num) for num in (4, 12))
    assert live_many - live_few == (8 if schedule == "gpipe" else 0)
    kept = LAYERS_OF_STAGE * SENT + (SENT if rank > 0 else 0)  # and what was received
    assert many - few == pytest.approx((live_many - live_few) * kept, abs=SENT)


# ---- activations


class Blocks(nn.Sequential):
    """In checkpoints."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def blocks() -> Blocks:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_LAYERS))
    return Blocks(*layers).to(device())


@pytest.mark.parametrize("kind_of", [*map(slow, ("arena", "partition", "host")), "auto"])
@in_gpu_ranks(on_one_gpu, env=SEGMENTS)
def test_reserved_memory_is_constant(rank: int, kind_of: str) -> None:
    """After a step, and `num_alloc_retries` is 0; gradients are in an arena."""
    model = blocks()
    activations.gradient_arena(model.parameters())
    mesh = init_device_mesh(kind(), (dist.get_world_size(),))
    context: Any = {
        "arena": lambda: activations.arena(1 << 20),
        "partition": lambda: activations.partition(mesh=mesh, min_elems=0),
        "host": lambda: activations.partition(mesh=mesh, min_elems=0, offload="cpu"),
        "auto": lambda: activations.auto(mesh=mesh, min_elems=0),
    }[kind_of]()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(num_rows: int = 4 * ROWS) -> int:
        with context:
            loss = model(torch.ones(num_rows, WIDTH, device=device()).requires_grad_().mul(1))
        loss.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss
        return reserved()

    module().empty_cache()
    retries = num_retries()
    step()
    expected = step()  # the first has made the states
    for _ in range(5):
        assert step() == expected
    assert num_retries() == retries
    assert step(512 * ROWS) > expected  # which it would see


@in_gpu_ranks(on_one_gpu, env=SEGMENTS)
def test_autos_default_limit_is_the_free_memory(rank: int) -> None:
    mesh = init_device_mesh(kind(), (dist.get_world_size(),))
    auto = activations.auto(mesh=mesh)
    meet()
    free, total = module().mem_get_info()
    mine = free + reserved() - allocated()
    assert auto.limit_bytes == pytest.approx(mine, abs=0.01 * total)
    meet()


@in_gpu_ranks(on_one_gpu)
def test_checkpoints_in_host_memory_are_pinned(rank: int) -> None:
    model = blocks()
    mesh = init_device_mesh(kind(), (dist.get_world_size(),))
    copies = Copies()
    with copies:
        with activations.partition(mesh=mesh, min_elems=0, offload="cpu", check=False) as held:
            out = model(torch.ones(ROWS, WIDTH, device=device()).requires_grad_().mul(1))
        assert held.host_bytes > 0
        out.sum().backward()
    copies.check()


# ---- copies


class Copies(TorchDispatchMode):
    """Copies between device and host: how many, and what of them is not as it should be."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.beside_kernels: list[str] = []  # in the order of the current stream
        self._compute = module().current_stream()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func.name().split(".")[0] in ("aten::copy_", "aten::_to_copy"):
            is_new = "_to_copy" in func.name()
            source, target = (args[0], found) if is_new else (args[1], args[0])
            waits = not (kwargs.get("non_blocking") or args[2:3] == (True,))
            self._look(source, target, waits)
        return found

    def _look(self, source: Tensor, target: Tensor, waits: bool) -> None:
        kinds = source.device.type, target.device.type
        if kinds[0] == kinds[1] or "cpu" not in kinds or not source.numel():
            return
        direction, on_host = ("down", target) if kinds[1] == "cpu" else ("up", source)
        self.counts[direction] += 1
        what = f"{direction} {tuple(on_host.shape)} {on_host.dtype}"
        self.wrong += [f"{what}: not pinned"] * (not on_host.is_pinned())
        self.wrong += [f"{what}: the host waits"] * waits
        if module().current_stream() == self._compute:
            self.beside_kernels.append(what)

    def check(self) -> None:
        assert self.wrong == []
        assert min(self.counts["down"], self.counts["up"]) >= NUM_LAYERS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@in_gpu_ranks(on_one_gpu)
def test_offload_copies_pinned_memory(rank: int, stage: int, dtype: torch.dtype) -> None:
    """In both directions, and no copy is waited for; stage 0 is without zero.shard()."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)]
    model = nn.Sequential(*layers).to(device(), dtype)
    own: Any = offload.Offloaded(torch.optim.AdamW(model.parameters(), 0.01), chunk_elems=1 << 14)
    optimizer = zero.shard(model, own, stage, offload_weights=stage == 3) if stage else own
    x = torch.ones(2, WIDTH, dtype=dtype, device=device())
    train_step(model(x).float().square().mean(), optimizer)
    copies = Copies()
    with copies:
        train_step(model(x).float().square().mean(), optimizer)
    copies.check()
    assert copies.beside_kernels == []
