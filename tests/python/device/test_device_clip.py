"""clip_grad_norm_() of models on a device, whose norms the ranks gather there."""

from __future__ import annotations

import emugpu
import emulated_gpu
import torch
import torch.distributed as dist
from emulated_gpu import in_emulated_ranks
from torch import nn

from ringcomm.nn import ColumnParallelLinear
from ringcomm.parallel import clip_grad_norm_

pytestmark = emulated_gpu.needs_emulated_gpu


@in_emulated_ranks(2)
def test_a_rank_without_gradients(rank: int) -> None:
    device = torch.device("emugpu", emugpu.current_device())
    model = ColumnParallelLinear.from_linear(nn.Linear(4, 6, bias=False), group=dist.group.WORLD)
    model = model.to(device)
    for param in model.parameters():
        param.grad = torch.full_like(param, 2.0) if rank == 0 else None
    norm = clip_grad_norm_(model, 1.0)
    assert norm.item() == torch.full((12,), 2.0).norm().item()
