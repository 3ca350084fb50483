"""ZeRO (Rajbhandari et al. 2020): optimizer state, gradients and weights in shards over ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Unpack

from ringcomm._renamed import getattr_of
from ringcomm.backend import resolve_group
from ringcomm.parallel.flat_collectives import device_of
from ringcomm.parallel.model_units import materialize
from ringcomm.parallel.zero.checks import check_model, check_ranks, mark_sharded
from ringcomm.parallel.zero.flat import ZeroAdamW, ZeroSGD
from ringcomm.parallel.zero.infinity import ZeroInfinity
from ringcomm.parallel.zero.optimizer import ZeroOptimizer
from ringcomm.parallel.zero.options import ShardArguments, ShardOptions
from ringcomm.parallel.zero.prediction import Memory, predict_memory, predict_traffic
from ringcomm.parallel.zero.stage3 import Zero3
from ringcomm.parallel.zero.statistics import Statistics

__all__ = [
    "Memory",
    "Statistics",
    "Zero3",
    "ZeroAdamW",
    "ZeroInfinity",
    "ZeroOptimizer",
    "ZeroSGD",
    "predict_memory",
    "predict_traffic",
    "shard",
]

if not TYPE_CHECKING:
    __getattr__ = getattr_of(__name__)


def shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    stage: int,
    *,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    units: Iterable[nn.Module] | None = None,
    **options: Unpack[ShardArguments],
) -> ZeroOptimizer:
    """Shards a model's training over the ranks of a group; every rank has rows of its own.

        optimizer = zero.shard(model, torch.optim.AdamW(model.parameters()), stage=2)
        for batch in batches:
            optimizer.scale(loss_of(model, batch)).backward()  # scale() where there is loss_scale
            optimizer.step()
            optimizer.zero_grad()

    With Phi weights, N ranks and AdamW a rank holds, in bytes, with `param_dtype` of 16 bits:
    6 Phi + 12 Phi/N at stage 1 (weights and gradients whole, state in shards), 2 Phi + 16 Phi/N at
    stage 2 (gradients in shards, too), 16 Phi/N at stage 3. It sends 2, 2 and 3 (N-1)/N Phi
    elements a step. Gradients are averaged over the ranks; weights start from rank 0's, and are
    equal on all ranks, to the last bit, ever after.

    At stages 1 and 2 gradients are in the optimizer, and operators on `param.grad` raise: clip by
    optimizer.clip_grad_norm_() or clip_grad_norm=, and scale by loss_scale=. Ranks may leave out
    different weights there, and make different numbers of backward passes before step().

    Args:
        model: changed in place. At stages 1 and 2 its weights become views of flat buckets; at
            stage 3 they become DTensors, and the model one of fully_shard. It may be on the meta
            device: modules then get values by reset_parameters(), at stage 3 unit by unit, and rank
            0's count.
        optimizer: AdamW or SGD of torch.optim, or of ringcomm.parallel.offload for state in host
            memory or files, over the model's weights, with any parameter groups and
            hyper-parameters. Its state, if it has some, is sharded as well. It is not to be used
            any more: schedulers are made for what is returned.
        stage: 1, 2 or 3. Accumulating micro-batches before step() costs nothing more at stage 1; at
            stages 2 and 3 each of them is reduced, and stage 3 gathers weights for each.
        mesh: in place of group, of one dimension. At stage 3 also of two, ("replicate", "shard"):
            weights are sharded over the second and replicated over the first (HSDP).
        group: None for the default group; of any backend. On ringcomm shards differ by one element;
            on others they are padded on the wire.
        units: at stage 3 the modules whose weights are gathered together. Default: the entries of
            every outermost ModuleList, or Sequential without one. Weights that several units share
            are the root's. All ranks run the same units in the same order.
        bucket_bytes: at stages 1 and 2 weights travel in buckets of at most so many bytes (one
            weight more where that is larger). Stage 2 keeps whole gradients of one at a time.
        param_dtype: torch.bfloat16 or float16: keep float32 weights and their gradients in 16 bits,
            and the float32 ones in shards. Frozen weights, and floating inputs of the model's
            forward, are cast as well; buffers stay.
        reduce_dtype: what gradients are accumulated and reduced in. Default: float32. The dtype of
            16-bit weights halves the gradients' memory at stages 1 and 2, and their traffic.
        loss_scale: a factor for float16, or "dynamic": from 2**16, halved where a gradient is not
            finite on any rank, and then no rank changes a weight; doubled after 2000 good steps.
        offload_weights: at stage 3 keep weights and gradients where an optimizer of
            ringcomm.parallel.offload keeps its state (ZeRO-Infinity). The model is on the CPU, or
            on the meta device: each unit then gets its values by reset_parameters() when it is
            sharded. It may be of 16 bits, and has float32 masters. With a path, every step ends in
            a commit. All ranks use the same weights in each backward pass, or all get an error.
        resume: with offload_weights go on after the last step whose files are complete; from the
            first weights if that is none.
        clip_grad_norm: multiply all gradients by min(1, clip_grad_norm / norm), the norm over all
            ranks; without loss_scale, what is not finite is an error. This and loss_scale take an
            all_gather of 32 bytes a rank. On a mesh the norm is the whole model's, and so is what
            loss_scale looks at, for one such all_gather more over tensor-parallel ranks and over
            stages. Or call the optimizer's clip_grad_norm_().

    Returns:
        A torch.optim.Optimizer: ZeroAdamW or ZeroSGD at stages 1 and 2, Zero3 at stage 3, and
        ZeroInfinity with offload_weights.

    Raises:
        TypeError: the optimizer is another one.
        ValueError: the model and the optimizer do not fit, are wrapped in DistributedDataParallel
            or sharded already; an option is out of range; ranks disagree. Nothing is changed.

    Collective: one object of options and shapes, and a broadcast for each bucket or weight.
    """
    if stage not in (1, 2, 3):
        raise ValueError(f"stage is 1, 2 or 3, got {stage!r}")
    if units is not None and stage != 3:
        raise ValueError("units are gathered together at stage 3 alone")
    found = ShardOptions(**options)
    if found.offload_weights and stage != 3:
        raise ValueError("offload_weights is for stage 3")
    check_model(model, optimizer, found, is_flat=stage < 3)
    if mesh is not None and mesh.ndim == 2:
        if stage != 3 or found.offload_weights or group is not None:
            raise ValueError("a mesh of two dimensions is for stage 3, alone and without a group")
        resolved = mesh._flatten().get_group()
    else:
        resolved = resolve_group(group, mesh)
    check_ranks(optimizer, stage, found, resolved)
    state = optimizer.state_dict()
    made: ZeroOptimizer
    if found.offload_weights:
        made = ZeroInfinity(model, optimizer, resolved, found, units)
    elif stage == 3:
        made = Zero3(model, optimizer, resolved, found, units, mesh)
    else:
        materialize(model, list(model.parameters()), device_of(resolved))
        kind = ZeroAdamW if isinstance(optimizer, torch.optim.AdamW) else ZeroSGD
        made = kind(model, optimizer, stage, resolved, found)
    mark_sharded(made)
    if state["state"]:
        made.load_state_dict(state)
    return made
