"""What systems refuse of a model: one table, asked before anything is sent or changed."""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ringcomm.parallel.model.cut import find_shards, find_trainer
from ringcomm.parallel.model.describe import Model, Weight
from ringcomm.parallel.model.stage_part import StagePart
from ringcomm.parallel.optimizer_classes import params_in
from ringcomm.parallel.tensor.regions import summed_over
from ringcomm.torch_names import accumulate_hooks_of, backward_hooks_of, root_mesh

# Of a weight with hooks of users that gradients at stage 3 do not pass.
HOOK_AT_STAGE_3 = (
    "has a hook of register_hook(), which stage 3 would never call, because gradients belong to"
    " gathered weights: remove it, or use stage 1 or 2"
)
_FLAT, _FSDP, _INFINITY = {"zero 1", "zero 2"}, {"zero 3"}, {"infinity"}
_ZERO = _FLAT | _FSDP | _INFINITY
_LOMO, _SERVER = {"Lomo"}, {"ParameterServer"}
_PIPELINE, _CALL, _EXPERTS = {"Pipeline"}, {"parallelize"}, {"expert_parallelize"}
_TENSOR = {"tensor_parallelize"} | _EXPERTS
_TRAINERS = _ZERO | _LOMO | _SERVER
_MADE_HERE = _ZERO | {"stage"}  # from the meta device
_HALVES = torch.float16, torch.bfloat16


class Asked(NamedTuple):
    """Which system asks, and what it was given.

    Attributes:
        system: one of those above, "stage" for a rank's part of a pipeline, or "optimizer" for one
            that parallelize() has made.
        name: the system in messages; of an optimizer why it needs full weights, or "".
        trained: the parameters of its optimizer; all that require grad by default.
        options: zero.shard's ShardOptions.
        mesh: zero.shard's, for stage 3.
        is_replicated: whether several ranks train the weights together.
        others: more systems, of parallelize().
    """

    system: str
    name: str
    trained: Collection[nn.Parameter] | None = None
    options: Any = None
    mesh: DeviceMesh | None = None
    is_replicated: bool = True
    others: Collection[str] = ()


class _Row(NamedTuple):
    systems: set[str]
    is_so: Callable[[Any, Asked], Any]  # of a module, a weight or a model
    text: str
    kind: type[Exception] = ValueError


def _own_tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _is_table(module: Any) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag)


_MODULES = (
    _Row(
        _TRAINERS | _PIPELINE | _TENSOR | _CALL,
        lambda m, _: isinstance(m, DistributedDataParallel | FullyShardedDataParallel),
        "{name} is wrapped in {type}, which reduces gradients itself: pass its `module` to"
        " {asked.name}, before it is wrapped",
    ),
    _Row(
        _ZERO | _SERVER,
        lambda m, _: isinstance(m, FSDPModule),
        "{name} is already sharded by fully_shard",
    ),
    _Row(
        _ZERO | _LOMO,
        lambda m, _: _is_table(m) and m.sparse and m.weight.requires_grad,
        "{name} produces sparse gradients: make it with sparse=False",
    ),
    _Row(
        _EXPERTS,
        lambda m, _: hasattr(m, "get_base_layer") and hasattr(m.get_base_layer(), "gate_up_proj"),
        "{name}, a {type} of PEFT, adapts the stacked weights of all experts, which the ranks would"
        " split: adapt other modules, or use ep 1",
    ),
    _Row(
        _TRAINERS,
        lambda m, a: a.is_replicated and _is_table(m) and m.max_norm and m.weight.requires_grad,
        "{asked.name} cannot keep {name}.weight equal on all ranks, because max_norm changes it in"
        " the forward pass of one: set max_norm=None, and scale the embeddings that are looked up",
    ),
    _Row(
        _FSDP | _INFINITY,
        lambda m, _: isinstance(m, StagePart),
        "stage 3 gathers weights around the model's forward, which a pipeline does not call: use"
        " stage 1 or 2, or Pipeline(wrap=lambda stage: fully_shard(stage, mesh=...))",
    ),
    _Row(
        _MADE_HERE,
        lambda m, _: not hasattr(m, "reset_parameters") and any(t.is_meta for t in _own_tensors(m)),
        "{name}, a {type}, is on the meta device and has no reset_parameters() to initialize it",
    ),
    _Row(
        _MADE_HERE,
        lambda m, _: len({t.is_meta for t in _own_tensors(m)}) > 1,
        "{name}, a {type}, is partly on the meta device: put all its weights there, or none",
    ),
)


def _is_trained(weight: Weight, asked: Asked) -> bool:
    if asked.trained is None:
        return weight.tensor.requires_grad
    return weight.tensor in asked.trained


def _sizes_on_ranks(weight: Weight) -> list[int]:
    ranges = () if weight.split is None else weight.split.ranges
    return [weight.tensor.numel(), *(end - begin for begin, end in ranges)]


def _has_hook(weight: Weight, asked: Asked, hooks_of: Callable[[Tensor], Any]) -> bool:
    return _is_trained(weight, asked) and bool(hooks_of(weight.tensor))


def _is_on_shared_mesh(weight: Weight, asked: Asked) -> bool:
    tensor: Any = weight.tensor
    if not isinstance(tensor, DTensor) or asked.mesh is None:
        return False
    own, mesh = tensor.device_mesh, asked.mesh
    shared = set(own.mesh.flatten().tolist()) & set(mesh.mesh.flatten().tolist())
    roots = [root_mesh(each).mesh.flatten().tolist() for each in (own, mesh)]
    return len(shared) > 1 or roots[0] != roots[1] or not mesh.mesh_dim_names


def _is_split(weight: Weight) -> bool:
    ranges = () if weight.split is None else weight.split.ranges
    return isinstance(weight.tensor, DTensor) or len(ranges) > 1


def _dtype_problem(weight: Weight, asked: Asked) -> str:
    name, own, options = weight.name, weight.tensor.dtype, asked.options
    known = {torch.float32} if asked.system == "zero 3" else {torch.float32, *_HALVES}
    if not _is_trained(weight, asked):
        return ""
    if own not in known:
        kinds = "float32" if len(known) == 1 else "float32, float16 or bfloat16"
        return f"{name} must be {kinds} to be sharded, got {own}"
    if options.reduce_dtype not in (None, torch.float32, computed := options.param_dtype or own):
        words = f"torch.float32 or the dtype of {name}, {computed}"
        return f"reduce_dtype must be {words}, got {options.reduce_dtype}"
    if options.param_dtype and own != torch.float32:
        return f"param_dtype is for float32 weights, but {name} is {own}"
    return ""


_WEIGHTS = (
    _Row(
        _TRAINERS | _PIPELINE | _TENSOR,
        lambda w, _: find_shards(w.tensor) is not None,
        "{name} is already sharded by zero.shard(offload_weights=True): close() that optimizer"
        " first",
    ),
    _Row(
        (_TRAINERS - _LOMO) | _TENSOR,
        lambda w, _: find_trainer(w.tensor) is not None,
        "{name} already has an optimizer that takes its gradients, {trainer}: use that one alone",
    ),
    _Row(
        _TRAINERS | _PIPELINE | _TENSOR | _CALL,
        lambda w, _: isinstance(w.tensor, nn.UninitializedParameter),
        "{name} is an UninitializedParameter of a lazy module: run the model once before"
        " {asked.name}",
        TypeError,
    ),
    _Row(
        _ZERO,
        lambda w, a: isinstance(w.tensor, DTensor) and (a.system != "zero 3" or a.mesh is None),
        "{name} is a DTensor: only stage 3 without offload_weights shards such weights, with mesh=,"
        " other dimensions of the DeviceMesh that they are on",
    ),
    _Row(
        _INFINITY,
        lambda w, _: type(w.tensor.data) is not torch.Tensor,
        "weights to shard must be plain tensors, but {name} is a {type}",
        TypeError,
    ),
    _Row(
        _INFINITY | _FSDP,
        lambda w, _: w.tensor.layout != torch.strided or not w.tensor.is_contiguous(),
        "weights to shard must be dense and contiguous, but {name} is not",
    ),
    _Row(
        _ZERO | _SERVER,
        lambda w, a: w.tensor.requires_grad and not _is_trained(w, a),
        "{name} requires grad and is in no parameter group of the optimizer, so nothing keeps its"
        " replicas equal: add it, or call requires_grad_(False)",
    ),
    _Row(
        _ZERO,
        lambda w, _: w.is_mixed,
        "{name} is in sharded experts and elsewhere in the model, but ranks have different"
        " experts: use two parameters",
    ),
    _Row(
        _FSDP,
        lambda w, a: (
            w.experts and (isinstance(w.tensor, DTensor) or a.options.grad_dtype == torch.float16)
        ),
        "{name} is of sharded experts, which stage 3 takes as plain tensors, with a reduce_dtype of"
        " torch.float32 or torch.bfloat16",
    ),
    _Row(
        _FSDP,
        lambda w, _: w.tensor.dim() == 0 or 0 in _sizes_on_ranks(w),
        "{name} is a scalar, or empty on some rank, which fully_shard (stage 3) does not support:"
        " use stage 1 or 2, or fewer tensor-parallel or expert-parallel ranks",
    ),
    _Row(
        _FSDP,
        lambda w, a: a.options.param_dtype and str(w.tensor.dtype).startswith("torch.float8"),
        "stage 3 would cast {name}, {w.tensor.dtype}, without its scales: use stage 1 or 2",
    ),
    _Row(
        _FSDP,
        _is_on_shared_mesh,
        "{name} is a DTensor on {w.tensor.device_mesh}: mesh= must be other dimensions of the same"
        " DeviceMesh, got {asked.mesh}",
    ),
    _Row(
        _FSDP | _INFINITY,
        lambda w, a: _is_trained(w, a) and summed_over(w.tensor) is not None,
        "the gradient of {name} is summed over the ranks of a tensor-parallel group, which stage 3"
        " does not support: use stage 1 or 2",
    ),
    _Row(_FSDP, lambda w, a: _has_hook(w, a, backward_hooks_of), "{name} " + HOOK_AT_STAGE_3),
    _Row(
        _ZERO,
        lambda w, a: _has_hook(w, a, accumulate_hooks_of),
        "{name} has a hook of register_post_accumulate_grad_hook(), which would see the gradient of"
        " one rank and one backward pass: remove it, or use register_hook()",
    ),
    _Row(_ZERO, _dtype_problem, "{found}"),
    _Row(
        {"optimizer"},
        lambda w, a: a.name and _is_trained(w, a) and _is_split(w),
        "{asked.name}, but {name} is split over ranks of tensor or expert parallelism: use another"
        " optimizer, such as AdamW, or tp and ep 1",
        TypeError,
    ),
)


def _devices(model: Model, *, with_meta: bool) -> list[str]:
    found = {str(param.device) for param in model.weights if with_meta or not param.is_meta}
    return sorted(found) if len(found) > 1 else []


_MODELS = (
    _Row(
        (_TRAINERS - _LOMO) | _PIPELINE | _TENSOR,
        lambda m, _: m.in_same_memory(with_buffers=False),
        "{found[0].name} and {found[1].name} are two parameters in the same memory, which"
        " {asked.name} would train as two weights: tie weights by using one parameter",
    ),
    _Row(
        _ZERO | _TENSOR,
        lambda m, _: sorted(
            m.in_same_memory(with_buffers=True) or (), key=lambda of: of.tensor in m.buffers
        ),
        "the buffer {found[1].name} is in the memory of {found[0].name}, and {asked.name} would"
        " separate them: make it from the weight in each forward, or clone() it",
    ),
    _Row(
        _ZERO,
        lambda m, _: _devices(m, with_meta=False),
        "weights to shard must be on one device, got {found}",
    ),
    _Row(
        _CALL,
        lambda m, _: " and ".join(_devices(m, with_meta=True)),
        "the model is on {found}: move it to one device",
    ),
)


def refuse(model: Model, asked: Asked) -> None:
    """Raises TypeError or ValueError if a system does not support a model."""
    for row in _rows(_MODULES, asked):
        for name, module in model.module.named_modules():
            if row.is_so(module, asked):
                kind = type(module).__name__
                raise row.kind(row.text.format(name=name or "the model", type=kind, asked=asked))
    for param in asked.trained or ():
        if param not in model.weights:
            raise ValueError(
                f"the optimizer has a parameter of shape {tuple(param.shape)} that is not in the"
                " model"
            )
    rows = _rows(_WEIGHTS, asked)
    for weight in model.weights.values():
        for row in rows:
            if found := row.is_so(weight, asked):
                tensor = weight.tensor
                facts = {
                    "name": weight.name,
                    "w": weight,
                    "asked": asked,
                    "trainer": type(find_trainer(tensor)).__name__,
                    "type": type(tensor.data if "{type}" in row.text else tensor).__name__,
                    "found": found,
                }
                raise row.kind(row.text.format(**facts))
    for row in _rows(_MODELS, asked):
        if found := row.is_so(model, asked):
            raise row.kind(row.text.format(found=found, asked=asked))


def refuse_split(
    model: Model,
    optimizer: torch.optim.Optimizer,
    needs_full: bool,
    *,
    to_split: Collection[Any] = (),
    of_others: Collection[Any] = (),
) -> None:
    """Raises TypeError if an optimizer needs full ones of weights that are split, or will be."""
    trained = {*params_in(optimizer.param_groups)}.difference(of_others)
    reason = f"{type(optimizer).__name__} needs full weights" if needs_full else ""
    parts = trained.intersection(to_split)
    split = [weight.name for param, weight in model.weights.items() if param in parts]
    if reason and split:
        raise TypeError(
            f"{reason}, and parallelize() would split {split[0]} over ranks: use another optimizer,"
            " such as AdamW, or tp 1 and ep 1"
        )
    refuse(model, Asked("optimizer", reason, trained=trained))


def _rows(table: tuple[_Row, ...], asked: Asked) -> list[_Row]:
    systems = {asked.system, *asked.others}
    return [row for row in table if not systems.isdisjoint(row.systems)]
