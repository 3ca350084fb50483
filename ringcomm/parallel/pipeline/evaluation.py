"""Forwards without backwards: one stage after the other, all micro-batches through each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcomm.parallel.pipeline.schedules import Plan
from ringcomm.parallel.pipeline.shapes import Specs

__all__ = ["forward_only"]


def forward_only(
    plan: Plan,
    modules: Mapping[int, nn.Module],
    boundaries: Sequence[Specs],
    inputs: Sequence[tuple[Tensor, ...]],
    group: dist.ProcessGroup,
    device: torch.device,
) -> list[Any]:
    """What the last stage returns for each micro-batch; what is last on this rank, elsewhere.

    Modules are this rank's, by stage, in the order of the model; boundaries what each stage takes;
    inputs those of the first stage, by micro-batch, where it is. Collective: sends and receives.
    """
    sent: list[dist.Work | None] = []
    outputs: list[Any] = list(inputs)
    for stage, module in modules.items():
        values, outputs = outputs, []
        is_local = stage == 0 or stage - 1 in modules
        for micro_batch in range(plan.num_microbatches):
            if is_local:
                value = values[micro_batch]
            else:
                source = plan.rank_of(stage - 1)
                value = tuple(spec.like(device).detach() for spec in boundaries[stage])
                for tensor in value:
                    dist.recv(tensor, group=group, group_src=source)
            result = module(*(value if isinstance(value, tuple) else (value,)))
            outputs.append(result)
            if stage + 1 < plan.num_stages and stage + 1 not in modules:
                target = plan.rank_of(stage + 1)
                for tensor in result if isinstance(result, tuple) else (result,):
                    sent.append(dist.isend(tensor, group=group, group_dst=target))
    for work in sent:
        if work is not None:
            work.wait()
    return outputs
