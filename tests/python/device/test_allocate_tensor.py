"""FSDP2 and DDP on GPUs, whose buffers other ranks map: they are ordinary memory."""

from __future__ import annotations

from typing import Any

import emugpu
import emulated_gpu
import pytest
import torch
import torch.distributed as dist
from emulated_gpu import in_emulated_ranks
from test_lent_memory import TABLE_BYTES, few_calls, used_bytes
from test_peer_allocations import num_mapped
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

pytestmark = emulated_gpu.needs_emulated_gpu

GPU = "emugpu"
MIB = 1 << 20


@in_emulated_ranks(2)
def test_allocate_tensor(rank: int) -> None:
    group: Any = dist.group.WORLD
    backend = group._get_backend(torch.device(GPU, 0))
    for device in (torch.device(GPU), torch.device(GPU, emugpu.current_device())):
        tensor = backend.allocate_tensor(10, dtype=torch.int16, device=device)
        assert (tensor.device.index, tensor.dtype) == (emugpu.current_device(), torch.int16)
        assert tensor.shape == (10,)
    assert backend.supports_tensor_alloc(device)
    with pytest.raises(ValueError, match="-5"):
        backend.allocate_tensor(-5, dtype=torch.uint8, device=device)


def trained(rank: int, kind: str, from_group: bool) -> tuple[list[Tensor], list[int]]:
    """Weights by FSDP2, and the memory in use after each step."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(256, 700), nn.Tanh(), nn.Linear(700, 256)).double()
    model = model.to(kind)
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
        if from_group:
            module.set_allocate_memory_from_process_group_for_comm(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    used = []
    for step in range(4):
        x = torch.arange(4.0 * 256, dtype=torch.float64).reshape(4, 256).sub(500).mul(1e-3)
        optimizer.zero_grad()
        model(x.add(rank + step).to(kind)).square().mean().backward()
        optimizer.step()
        if kind == GPU:
            emugpu.synchronize()
            used.append(used_bytes())
    return [parameter.full_tensor().cpu() for parameter in model.parameters()], used


@in_emulated_ranks(2, fresh=True)
def test_fsdp2_allocates_from_the_group(rank: int) -> None:
    """Memory in use is the same after each step, and its buffers are mapped."""
    few_calls()
    expected, _ = trained(rank, "cpu", False)
    for from_group in (False, True):
        weights, used = trained(rank, GPU, from_group)
        for a, b in zip(weights, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        if from_group:
            assert max(used[1:]) - min(used[1:]) < MIB + TABLE_BYTES, used
            assert num_mapped() > 0


@in_emulated_ranks(2, env={"DDP_DISABLE_COMM_MEM": "0"}, fresh=True)
def test_ddp_allocates_from_the_group(rank: int) -> None:
    """Its reducer asks the group for buckets, as FSDP2 does, where the environment lets it."""
    group: Any = dist.group.WORLD
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)  # as of "ringcomm" alone
    torch.manual_seed(0)
    model = nn.Linear(512, 1024).to(GPU)
    ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

    def hook(_: object, bucket: dist.GradBucket) -> Any:
        work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    hook.__annotations__.clear()  # DDP compares types, and these are strings
    ddp.register_comm_hook(None, hook)
    world_size = dist.get_world_size()
    for step in range(5):
        ddp.zero_grad()
        ddp(torch.full((2, 512), rank + 1.0 + step, device=GPU)).sum().backward()
        expected = sum(2 * (r + 1.0 + step) for r in range(world_size))
        assert model.weight.grad is not None
        assert model.weight.grad[::99].cpu().unique().tolist() == [expected]
    assert num_mapped() >= world_size - 1  # its first buckets and the rebuilt ones
