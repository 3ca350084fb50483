"""ZeRO (Rajbhandari et al. 2020): optimizer state, gradients and weights sharded over ranks."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ringcomm.backend import resolve_group
from ringcomm.parallel.expert.local_experts import check_data_ranks
from ringcomm.parallel.flat_collectives import agreeing, take_from_rank0
from ringcomm.parallel.model.cut import note_trainer
from ringcomm.parallel.model.describe import Model, describe
from ringcomm.parallel.model.refuse import Asked, refuse, refuse_split
from ringcomm.parallel.offload.infinity import ZeroInfinity as ZeroInfinity
from ringcomm.parallel.offload.optimizers import Offloaded
from ringcomm.parallel.optimizer_classes import (
    drop_unstepped,
    optimizers_of,
    params_in,
    retire,
    takes_empty_groups,
)
from ringcomm.parallel.optimizer_kinds import needs_whole
from ringcomm.parallel.zero.inner import Given, Inner, ShardOptions
from ringcomm.parallel.zero.optimizer import ZeroOptimizer
from ringcomm.parallel.zero.prediction import predict_memory, predict_traffic
from ringcomm.parallel.zero.stage1_2 import FlatZero
from ringcomm.parallel.zero.stage3 import Zero3
from ringcomm.parallel.zero.states import check_shape
from ringcomm.torch_names import flat_mesh

__all__ = ["ZeroOptimizer", "predict_memory", "predict_traffic", "shard"]


@torch.inference_mode(False)  # what it makes is trained later
def shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    stage: int,
    *,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    units: Iterable[nn.Module] | None = None,
    bucket_bytes: int = 25 << 20,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    loss_scale: float | Literal["dynamic"] | None = None,
    offload_weights: bool = False,
    clip_grad_norm: float | None = None,
    elementwise: Collection[type] = (),
    whole: Collection[type] = (),
) -> ZeroOptimizer:
    """Shards the training of a model over the ranks of a group; every rank has different rows.

        optimizer = zero.shard(model, torch.optim.AdamW(model.parameters()), stage=2)
        for batch in batches:
            optimizer.scale(loss_of(model, batch)).backward()  # scale() is for loss_scale
            optimizer.step()
            optimizer.zero_grad()

    Stage 1 shards the optimizer's state, stage 2 also gradients, stage 3 also weights;
    predict_memory() and predict_traffic() predict the cost. Gradients are averaged over the ranks.
    Weights and buffers start from rank 0's; weights stay bitwise equal on all ranks. Buffers that
    the forward pass changes, such as BatchNorm's running statistics, then differ between ranks:
    broadcast model.buffers() before evaluating and saving, or use nn.SyncBatchNorm on GPUs.

    At stages 1 and 2 operators on `param.grad` raise: clip by optimizer.clip_grad_norm_() or
    clip_grad_norm=, and scale by loss_scale=. Ranks may use different weights there, and make
    different numbers of backward passes before step().

    Args:
        model: changed in place. At stages 1 and 2 its weights move into flat buckets; at
            stage 3 they become DTensors, and fully_shard is applied to the model. It may be on the
            meta device: modules are then initialized by reset_parameters(), at stage 3 unit by
            unit, and rank 0's values are used.
        optimizer: over the model's weights: of torch.optim, or any other class that updates each
            weight by itself; or several over different weights, such as [muon, adamw]. Of an
            elementwise one, such as AdamW, each rank updates its shards. Of one that needs full
            weights, such as Muon, one rank updates a weight. States of those that are of
            ringcomm.parallel.offload, such as Offloaded(muon), are in host memory or in files.
            Hooks and state move to the returned optimizer. The given ones raise afterwards,
            but have the same parameter groups: schedulers made for them work.
        stage: 1, 2 or 3. Stages 2 and 3 reduce each micro-batch, except in the optimizer's
            no_sync(), and stage 3 gathers weights for each.
        mesh: a one-dimensional DeviceMesh, instead of group. At stage 3 also two-dimensional,
            ("replicate", "shard"): weights are sharded over the second and replicated over the
            first (HSDP). Weights that are DTensors of torch's tensor parallelism
            (parallelize_module) need stage 3 and dimensions of the same DeviceMesh.
        group: None for the default group; of any backend. With ringcomm shards differ by one
            element; with other backends they are padded when they are sent. Experts of
            ringcomm.nn.MixtureOfExperts are sharded over their replica_group instead.
        units: at stage 3 the modules whose weights are gathered together. Default: the entries of
            every outermost ModuleList, or Sequential without one; also the parts of a model that
            cannot be called. Weights that several units share belong to the root. All ranks must
            run the same units in the same order. Without offload_weights a unit gets copies of
            lists and dicts with tensors, and losses must depend on outputs of units.
        bucket_bytes: at stages 1 and 2, the maximum size of a bucket of weights; a larger weight
            has its own bucket. Stage 2 keeps unsharded gradients of one bucket at a time.
        param_dtype: torch.bfloat16 or float16: keep float32 weights and their gradients in 16 bits,
            and shards of the float32 weights. Frozen weights and floating-point inputs of the
            model's forward are cast too; buffers are not.
        reduce_dtype: the dtype in which gradients are accumulated and reduced. Default: float32.
            The dtype of 16-bit weights halves the gradients' memory at stages 1 and 2, and their
            traffic.
        loss_scale: a factor for float16, or "dynamic": starts at 2**16, halves after an overflow,
            doubles after 2000 good steps. An overflow on any rank skips the step on all ranks.
        offload_weights: at stage 3 keep weights and gradients in the same tier as the states
            (ZeRO-Infinity). All optimizers are ringcomm.parallel.offload.Offloaded, with equal
            `to` and `path`. Of full matrices that it updates, a rank has one at a time in memory.
            16-bit weights get float32 masters. A model on an accelerator computes there, with the
            gathered weights of one unit; what its ranks keep is in pinned host memory, and the
            host updates it. A model on the meta device is made on torch's default device. The
            group needs backend ringcomm for CPUs and for the model's device.
            Files end with the process: save by ringcomm.parallel.get_state_dict() and
            torch.distributed.checkpoint. All ranks must use the same weights in each backward
            pass; otherwise all raise.
        clip_grad_norm: multiply all gradients by min(1, clip_grad_norm / norm), with the norm over
            all ranks and dimensions of a mesh. Without loss_scale, a norm that is not finite
            raises. Alternatively call the optimizer's clip_grad_norm_().
        elementwise: see ringcomm.parallel.declare_optimizers(); of classes that ringcomm does not
            know.
        whole: likewise.

    Returns:
        A torch.optim.Optimizer over the same groups.

    Raises:
        TypeError: an optimizer updates several weights together, or is of a class that is neither
            known nor in `elementwise` or `whole`.
        ValueError: the model and the optimizer do not match, or the model is wrapped in
            DistributedDataParallel or already sharded; a weight has hooks that would not see its
            gradient, or is of an embedding with max_norm; an option is out of range; ranks have
            different arguments. Nothing has been changed.

    Collective: exchanges one object of options, names and shapes; broadcasts of weights, buffers
    and states.
    """
    is_grid = mesh is not None and mesh.ndim == 2 and group is None
    resolved = flat_mesh(mesh).get_group() if is_grid else resolve_group(group, mesh)
    with agreeing(resolved) as mine:
        units = None if units is None else [*units]
        options = ShardOptions(
            bucket_bytes=bucket_bytes,
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
            loss_scale=loss_scale,
            clip_grad_norm=clip_grad_norm,
            offload_weights=offload_weights,
        )
        if stage not in (1, 2, 3):
            raise ValueError(f"stage must be 1, 2 or 3, got {stage!r}")
        if units is not None and stage != 3:
            raise ValueError("units= is for stage 3 only")
        if offload_weights and stage != 3:
            raise ValueError("offload_weights is for stage 3 only")
        if is_grid and (stage != 3 or offload_weights):
            raise ValueError(
                "a mesh of two dimensions needs stage 3, without group and offload_weights"
            )
        described, inners = check_arguments(
            model, optimizers_of(optimizer), options, stage, mesh, (elementwise, whole)
        )
        check_data_ranks(described.experts, resolved, "zero.shard()")
        state = _joined_state(inners)
        names = {module: name for name, module in described.module.named_modules()}
        param_groups = [group for inner in inners for group in inner.groups]
        # Ranks have different experts.
        weights = [[described.weights[p] for p in g["params"]] for g in param_groups]
        shared = [[w for w in of_group if w.experts is None] for of_group in weights]
        numbered = enumerate(w for of_group in weights for w in of_group)
        shared_states = [
            (w, state["state"][i]) for i, w in numbered if w.experts is None and i in state["state"]
        ]
        buffers = [value for value, of in described.buffers.items() if of.experts is None]
        mine |= {
            "stage": stage,
            "options": options,
            "optimizer": [(type(inner.optimizer).__name__, inner.is_whole) for inner in inners],
            "parameter groups": [
                [(w.name, tuple(w.tensor.shape), str(w.tensor.dtype)) for w in of_group]
                for of_group in shared
            ],
            "buffers": [(tuple(buffer.shape), str(buffer.dtype)) for buffer in buffers],
            "presence of states": bool(state["state"]),
            "states": [
                (w.name, {key: _look_of(x) for key, x in of_weight.items()})
                for w, of_weight in shared_states
            ],
            "units": sorted(
                names.get(unit, "") for unit in units or () if isinstance(unit, nn.Module)
            ),
        }
    given = Given(described, inners, stage, resolved, mesh, units, options)
    made: ZeroOptimizer
    if offload_weights:
        made = ZeroInfinity(given)
    elif stage == 3:
        made = Zero3(given)
    else:
        made = FlatZero(given)
    note_trainer(made.all_params(), made)
    for weight, of_weight in shared_states:  # one after the other: each needs memory
        if not weight.is_apart(resolved):
            take_from_rank0([x for x in of_weight.values() if isinstance(x, Tensor)], resolved)
    if state["state"]:
        made.load_state_dict(state)
    for inner in inners:
        retire(inner.optimizer, "zero.shard()")
    return made


def _look_of(value: Any) -> Any:
    """What ranks must have alike of a state whose values rank 0 sends."""
    if isinstance(value, Tensor):
        return tuple(value.shape), str(value.dtype)
    return value if isinstance(value, int | float) else type(value).__name__


def _joined_state(inners: Sequence[Inner]) -> dict[str, Any]:
    """The state of several optimizers as of one, in torch's format."""
    joined: dict[str, Any] = {"state": {}, "param_groups": []}
    begin = 0
    for inner in inners:
        drop_unstepped(inner.optimizer)  # the next step would
        state = inner.optimizer.state_dict()
        for number, param in enumerate(() if inner.is_whole else params_in(inner.groups)):
            for key, value in state["state"].get(number, {}).items():
                check_shape(key, begin + number, value, param)
        joined["state"] |= {begin + number: value for number, value in state["state"].items()}
        for group in state["param_groups"]:
            # Without options: the dicts stay, and with them tensors that a user may hold.
            joined["param_groups"].append({"params": [begin + n for n in group["params"]]})
        begin += len(params_in(inner.groups))
    return joined


# ---- checks, before anything is sent or changed


def check_arguments(
    model: nn.Module | Model,
    optimizers: Sequence[torch.optim.Optimizer],
    options: ShardOptions,
    stage: int,
    mesh: DeviceMesh | None,
    words: tuple[Collection[type], Collection[type]],
) -> tuple[Model, list[Inner]]:
    """The model and its optimizers; raises TypeError or ValueError if it cannot be sharded."""
    if not isinstance(model, nn.Module | Model):
        raise TypeError(f"expected a model as the first argument, got {type(model).__name__}")
    if not isinstance(optimizers, Sequence) or not all(
        isinstance(optimizer, torch.optim.Optimizer) for optimizer in optimizers
    ):
        raise TypeError(
            "expected an optimizer, or a list of them, as the second argument, got"
            f" {type(optimizers).__name__}"
        )
    if options.offload_weights:
        offloaded = [x for x in optimizers if isinstance(x, Offloaded)]
        if len(offloaded) < max(1, len(optimizers)):
            raise ValueError(
                "offload_weights needs optimizers of class ringcomm.parallel.offload.Offloaded"
            )
        if len({(each.to, str(each.path)) for each in offloaded}) > 1:
            raise ValueError("offload_weights needs optimizers with equal `to` and `path`")
    described = model if isinstance(model, Model) else describe(model)
    inners = [
        Inner(
            optimizer,
            optimizer.param_groups,
            needs_whole(optimizer, *words),
            isinstance(optimizer, Offloaded) or takes_empty_groups(optimizer),
        )
        for optimizer in optimizers
    ]
    groups = [group for one in optimizers for group in one.param_groups]
    if len({"param_names" in group for group in groups}) > 1:
        raise ValueError("pass named parameters to all optimizers, or to none")
    trained = params_in(groups)
    params = {*trained}
    if not params:
        raise ValueError("the optimizer has no parameters")
    if options.needs_all_gradients:
        _ = described.stage  # raises for a piece of a pipeline
    system = "infinity" if options.offload_weights else f"zero {stage}"
    refuse(described, Asked(system, "zero.shard", params, options, mesh))
    for inner in inners:
        if inner.is_whole:
            refuse_split(described, inner.optimizer, needs_full=True)
    twice, num_uses = Counter(trained).most_common(1)[0]
    if num_uses > 1:
        raise ValueError(f"two optimizers have {described.weights[twice].name}: leave it to one")
    for weight in described.weights.values() if any(each.state for each in optimizers) else ():
        if isinstance(weight.tensor, DTensor) and weight.tensor in params:
            raise ValueError(
                f"{weight.name} is a DTensor, and the optimizer has already made"
                " a step: pass a new optimizer to zero.shard()"
            )
    if system == "zero 3" and options.loss_scale and options.grad_dtype == torch.float16:
        raise ValueError(
            "at stage 3 gradients are divided by loss_scale in reduce_dtype, and float16 would "
            "lose small ones: use reduce_dtype=torch.float32, the default"
        )
    return described, inners
