"""What ``--parallel``, ``--optimizer`` and the mesh choose: a system, and what updates weights."""

from __future__ import annotations

from dataclasses import replace

import torch

from ringcomm.parallel import tensor
from training.hybrid import Hybrid
from training.lomo import Lomo
from training.mesh import MeshSizes
from training.model import Llama, ModelConfig
from training.system import System, TrainState
from training.updaters import Offload, TorchUpdater
from training.wire import Wire
from training.zero import Zero

ZERO_STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}
PARALLELS = ("ddp", "tp", *ZERO_STAGES, "single")
MESH = "mesh"
OPTIMIZERS = ("adamw", "sgd", "lomo")


def why_impossible(
    parallel: str,
    optimizer: str,
    config: ModelConfig,
    world_size: int,
    mesh: MeshSizes | None = None,
    *,
    offloads: bool = False,
    clips: bool = False,
) -> str | None:
    """The reason why a system cannot be built, for the user; None if it can."""
    if optimizer == "lomo" and (parallel in ZERO_STAGES or offloads):
        what = "ZeRO splits" if parallel in ZERO_STAGES else "--offload moves"
        return f"{what} optimizer state, and LOMO has none: choose --optimizer adamw or sgd"
    if optimizer == "lomo" and mesh is not None and (mesh.tp < world_size or mesh.zero_stage):
        return (
            "LOMO has no gradients to average or to gather from micro-batches: choose --optimizer"
            " adamw or sgd, or --tp for all ranks"
        )
    if clips and optimizer == "lomo":
        return "LOMO has no gradients left to clip after the backward pass: choose --optimizer sgd"
    sizes = MeshSizes(tp=world_size) if parallel == "tp" else mesh
    if sizes is None:
        return None
    reason = sizes.why_impossible(world_size, config)
    if reason is None:
        try:
            tensor.share_heads(config.num_heads, config.num_kv_heads, sizes.tp)
        except ValueError as error:
            return f"tensor parallelism gives every rank whole heads: {error}"
    return reason


def build_system(
    parallel: str,
    optimizer: str,
    config: ModelConfig,
    wire: Wire | None,
    state: TrainState,
    device: torch.device,
    mesh: MeshSizes | None = None,
    *,
    overlap: bool = True,
    offload: Offload | None = None,
    recompute: bool = False,
    clip_grad_norm: float | None = None,
) -> System:
    """Builds a replica that continues from ``state``. Collective.

    Args:
        parallel: one of ``PARALLELS``, where ``single`` ignores ``wire``, or ``MESH``.
        optimizer: one of ``OPTIMIZERS``.
        config: sizes of the whole model.
        wire: the group to communicate over; None only for ``single``.
        state: the same on every rank.
        device: where the model lives.
        mesh: for ``MESH``.
        overlap: False makes DDP's all-reduces blocking, and times those of layers in parts.
        offload: where optimizer state goes, and with ``zero3`` weights and gradients, too.
        recompute: save inputs of layers alone, in shards under ``tp``, in host memory with
            ``offload``.
        clip_grad_norm: the largest norm of all gradients of a step; None for any.

    Raises:
        ValueError: the combination makes no sense; see ``why_impossible``.
    """
    if parallel == "single":
        wire = None
    elif wire is None:
        raise ValueError(f"{parallel} needs a group to communicate over")
    world_size = wire.world_size if wire else 1
    clips = clip_grad_norm is not None
    reason = why_impossible(parallel, optimizer, config, world_size, mesh, clips=clips)
    if reason is not None:
        raise ValueError(reason)
    with torch.device(device):
        model = Llama(config)
    model.load_state_dict(state.weights)  # before it is cut: parts are of the same whole
    system: System
    if parallel in ("tp", MESH) and wire:
        sizes = mesh if mesh and parallel == MESH else MeshSizes(tp=world_size)
        system = Hybrid(config, wire, model, sizes)
    else:
        system = System(config, wire, model)
    if offload is not None and offload.path is not None:
        offload = replace(offload, path=system.new_folder(offload.path))
    named = list(system.part.named_parameters())
    if parallel in ZERO_STAGES and wire:
        stage = ZERO_STAGES[parallel]
        system.updater = Zero(model, optimizer, wire, stage, offload, None, clip_grad_norm)
    elif isinstance(system, Hybrid) and system.mesh.sizes.zero_stage and wire:
        group, sizes = system.mesh.dp, system.mesh.sizes
        num_backwards = sizes.num_microbatches_or_default if sizes.pp > 1 else 1
        how = (sizes.zero_stage, offload, group, clip_grad_norm, num_backwards)
        system.updater = Zero(system.part, optimizer, wire, *how)
    elif optimizer == "lomo":
        system.updater = Lomo(named, wire if parallel == "ddp" else None)
    else:
        system.updater = TorchUpdater(named, optimizer, offload)
    if not isinstance(system.updater, Zero):
        system.max_norm = clip_grad_norm
    system.load_moments(state)
    if recompute:
        system.recompute_layers(to_host=offload is not None)
    system.is_timed = isinstance(system, Hybrid) and not overlap
    if parallel == "ddp" and optimizer != "lomo":
        system.wrap_in_ddp(overlap)
    return system
