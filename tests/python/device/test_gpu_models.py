"""DDP, FSDP2 and compiled functions with models on GPUs: what one process makes of them."""

from __future__ import annotations

import oracle
import pytest
import torch
import torch.distributed as dist
from curves import Run, assert_same_run, batch, make_model, single_process, train, weights_of
from gpu_ranks import NUM_RANKS, Gpus, device, in_gpu_ranks, kind, on_all_gpus, on_cuda, on_gpu
from test_functional import PROGRAMS
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FUNCTIONAL = ["all_reduce sum", "reduce_scatter dim 1", "coalesced", "in place"]
# Compilers of a GPU sum in another order than the CPU's: fp32, five steps.
ATOL = 1e-4


def batch_on_gpu(step: int, share: int, num_shares: int) -> tuple[Tensor, Tensor]:
    """Shares as even as the ranks allow, and of the same size: the mean of means is the mean."""
    x, y = batch(step)
    rows = len(x) // num_shares
    part = slice(share * rows, (share + 1) * rows)
    return on_gpu(x[part]), on_gpu(y[part])


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
    def data(step: int, share: int, num_shares: int) -> tuple[Tensor, Tensor]:
        """What all ranks together see."""
        x, y = batch(step)
        rows = len(x) // gpus.world_size * gpus.world_size
        return x[:rows], y[:rows]

    assert_same_run(gpus.run(run_fsdp2, from_group), single_process(data=data), ATOL)


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
