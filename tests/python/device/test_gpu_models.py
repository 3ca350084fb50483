"""DDP, FSDP2 and compiled functions with models on GPUs: what one process makes of them."""

from __future__ import annotations

import oracle
import pytest
import torch
import torch.distributed as dist
from curves import (
    Data,
    Run,
    assert_same_run,
    assert_weights,
    batch,
    make_model,
    single_process,
    train,
    weights_of,
)
from gpu_ranks import (
    NUM_RANKS,
    Gpus,
    device,
    in_gpu_ranks,
    kind,
    on_all_gpus,
    on_cuda,
    on_gpu,
    on_gpus,
)
from test_functional import PROGRAMS
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

FUNCTIONAL = ["all_reduce sum", "reduce_scatter dim 1", "coalesced", "in place"]
# Compilers of a GPU sum in another order than the CPU's: fp32, five steps.
ATOL = 1e-4


def batch_on_gpu(step: int, share: int, num_shares: int) -> tuple[Tensor, Tensor]:
    """Shares as even as the ranks allow, and of the same size: the mean of means is the mean."""
    x, y = batch(step)
    rows = len(x) // num_shares
    part = slice(share * rows, (share + 1) * rows)
    return on_gpu(x[part]), on_gpu(y[part])


def batch_of_all(world_size: int) -> Data:
    """What all ranks together see."""

    def data(step: int, share: int, num_shares: int) -> tuple[Tensor, Tensor]:
        x, y = batch(step)
        rows = len(x) // world_size * world_size
        return x[:rows], y[:rows]

    return data


def trained_in_double(rank: int, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    ddp = nn.parallel.DistributedDataParallel(model.to(device), bucket_cap_mb=1e-4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        batch = torch.from_numpy(oracle.floats(rank, 24, torch.float64, step).numpy()).view(4, 6)
        optimizer.zero_grad()
        ddp(batch.to(device)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def check_ddp(rank: int) -> list[bytes]:
    """The CPU's weights."""
    on_cpu, on_gpu = trained_in_double(rank, "cpu"), trained_in_double(rank, str(device()))
    for expected, actual in zip(on_cpu, on_gpu, strict=True):
        assert torch.allclose(actual, expected, rtol=1e-12, atol=1e-12)
    return [oracle.bits(parameter) for parameter in on_gpu]


@on_all_gpus
def test_ddp_has_the_weights_of_the_host(gpus: Gpus) -> None:
    replicas = gpus.run(check_ddp)
    assert all(replica == replicas[0] for replica in replicas)


def run_fsdp2(rank: int, from_group: bool) -> Run:
    model = make_model().to(device())
    mesh = init_device_mesh(kind(), (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in (*model, model) if from_group else ():
        module.set_allocate_memory_from_process_group_for_comm(True)
    losses = train(model, rank, dist.get_world_size(), data=batch_on_gpu)
    return Run(losses, {name: value.cpu() for name, value in weights_of(model).items()})


@on_all_gpus
@pytest.mark.parametrize("from_group", [False, True], ids=["torch's memory", "the group's"])
def test_fsdp2(gpus: Gpus, from_group: bool) -> None:
    expected = single_process(data=batch_of_all(gpus.world_size))
    assert_same_run(gpus.run(run_fsdp2, from_group), expected, ATOL)


CLIPPED_STEPS = 4


def train_clipped(model: nn.Module, data: Data, share: int = 0, num_shares: int = 1) -> None:
    """By a norm that the host awaits; gradients end while the optimizer still reads them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(CLIPPED_STEPS):
        x, y = data(step, share, num_shares)
        nn.functional.mse_loss(model(x), y).backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        own = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
        square = torch.stack([grad.square().sum() for grad in own]).sum()
        if num_shares > 1:
            dist.all_reduce(square)
        norm = float(square) ** 0.5
        torch._foreach_mul_(own, min(1.0, 0.1 / norm))
        del grads, own
        optimizer.step()
        optimizer.zero_grad()


def run_clipped_fsdp2(rank: int) -> dict[str, Tensor]:
    model = make_model().to(device())
    mesh = init_device_mesh(kind(), (dist.get_world_size(),))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    train_clipped(model, batch_on_gpu, rank, dist.get_world_size())
    return {name: value.cpu() for name, value in weights_of(model).items()}


@on_gpus
def test_fsdp2_clipped_by_a_norm_that_the_host_awaits(gpus: Gpus) -> None:
    """Gradients are made on a stream of fully_shard, and freed by the host behind `step()`."""
    expected = make_model()
    train_clipped(expected, batch_of_all(gpus.world_size))
    for weights in gpus.run(run_clipped_fsdp2):
        assert_weights(weights, weights_of(expected), ATOL)


@pytest.mark.skipif(NUM_RANKS != 2, reason="the oracle is of two ranks")
@in_gpu_ranks(on_cuda, group_timeout_s=120.0)
@pytest.mark.parametrize("compiler", [None, "aot_eager", "inductor"])
@pytest.mark.parametrize("name", FUNCTIONAL)
def test_functional_collectives(rank: int, name: str, compiler: str | None) -> None:
    program, expect = PROGRAMS[name]
    inputs = [torch.arange(16.0).reshape(4, 4) * (r + 1) for r in range(2)]
    if compiler is not None:
        torch._dynamo.reset()
        # Inductor's own processes would outlive the rank.
        torch._inductor.config.compile_threads = 1
        program = torch.compile(program, backend=compiler)
    for _ in range(2):
        result = program(on_gpu(inputs[rank]))
        assert torch.equal(result.cpu(), expect(inputs, rank))
