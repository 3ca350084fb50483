"""All that ringcomm uses of torch beyond its public names, and what torch's versions differ in.

No other file of the package touches a private name of torch, except
ringcomm/parallel/pipeline/torch_stage.py for its pipeline stages, and _ringcomm/autoload.py, which
imports nothing of ringcomm. Lint checks this, and tests/python/programs/test_torch_names.py that
the running torch has each name. The file is long because it is the one that a new torch may break.
"""

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch._library.effects import EffectType
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._utils import _take_tensors
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.utils._pytree import tree_leaves, tree_map_only

# Of torch, by their own names.
__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "tree_leaves",
    "tree_map_only",
]

NEWEST_TRIED = (2, 15)  # a later torch is warned about when ringcomm is imported
TORCH_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])

NO_GRAPH_TASK = -1  # of graph_task()
BUCKET_BYTES = 25 << 20  # of coalesced collectives, as DistributedDataParallel has it

# ---- autograd

# torch.compile runs such a function as it is. torch.compiler.disable would do the same, and import
# the compiler at once.
untraced = partial(torch._disable_dynamo, recursive=False)

# Attributes of a subclass of Tensor can then be read, as torch.compile does.
no_torch_function: Any = torch._C._disabled_torch_function_impl

# A context in which operators on subclasses of Tensor run as on Tensor.
without_torch_function: Any = torch._C.DisableTorchFunctionSubclass


def num_calls_under_way(module: nn.Module) -> int:
    """In this thread; a module may call itself."""
    found, frame = 0, inspect.currentframe()
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__:
            found += frame.f_locals["self"] is module
        frame = frame.f_back
    return found


def keep_calls_in_order(operator: str) -> None:
    """Makes compilers keep every call of an operator, in the order of the program."""
    torch.library._register_effectful_op(operator, EffectType.ORDERED)


def has_kernel(operator: str, device_type: str) -> bool:
    """Whether torch finds an implementation of an operator for tensors of a device."""
    key = torch._C._dispatch_key_for_device(device_type)
    if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(operator, key):
        return False
    is_own = torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)
    return not (is_own and torch._C._dispatch_kernel_for_dispatch_key_is_fallthrough(operator, key))


# Of the backward pass that runs in this thread: see backward_pass.py, which alone uses them.
graph_task = torch._C._current_graph_task_id
will_run = torch._C._will_engine_execute_node
running_node = torch._C._current_autograd_node
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph


def queue_callback(call: Callable[[], None]) -> None:
    """Makes the engine call a function at the end of the current backward pass."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)


# A tensor of a subclass, the first argument, without memory.
make_wrapper: Any = Tensor._make_wrapper_subclass


def in_transform() -> bool:
    """Whether a transformation of torch.func, such as vmap, or forward-mode AD is active."""
    is_forward_mode = torch.autograd.forward_ad._current_level >= 0
    return is_forward_mode or torch._C._are_functorch_transforms_active()


def clones_saved_tensors() -> bool:
    """Whether torch.autograd.graph.allow_mutation_on_saved_tensors() is active."""
    return torch.autograd.graph._allow_mutation_on_saved_tensors_enabled


def checks_saved_tensors() -> bool:
    """Whether autograd detects that a tensor which is saved now was written before its use.

    It does not in compiled functions, nor where saved tensors have hooks.
    """
    return (
        not torch.compiler.is_compiling()
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    )


def operators_are_seen() -> bool:
    """Whether a compiler, a mode of torch's dispatcher or a profiler looks at operators."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._autograd._profiler_enabled()
    )


def is_traced() -> bool:
    """Whether the caller runs under torch.compile; call it in an untraced function."""
    return torch._C._dynamo.eval_frame.get_eval_frame_callback() not in (None, False)


# ---- tensors

foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
to_copy = torch.ops.aten._to_copy
unsafe_view = torch.ops.aten._unsafe_view

# Raises RuntimeError unless a condition holds, which may be one of symbolic shapes.
check_shapes = torch._check


def storage_id(tensor: Tensor) -> int:
    """The same for tensors that share their memory."""
    return int(tensor.untyped_storage()._cdata)


def version_of(tensor: Tensor) -> int:
    """The number of writes to a tensor's memory, as autograd counts them."""
    return tensor._version


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor that a tensor is a view of; None if it is not a view."""
    return tensor._base


def backward_hooks_of(tensor: Tensor) -> Any:
    """The hooks of register_hook(), by number; None or empty without one."""
    return tensor._backward_hooks


def forget_backward_hooks(tensor: Tensor) -> None:
    """Removes the hooks of register_hook()."""
    tensor._backward_hooks = None


def accumulate_hooks_of(tensor: Tensor) -> Any:
    """The hooks of register_post_accumulate_grad_hook(), by number; None or empty without one."""
    return tensor._post_accumulate_grad_hooks


# ---- modules

SAVE_MODULE, LOAD_MODULE = nn.Module._save_to_state_dict, nn.Module._load_from_state_dict
APPLY = "_apply"  # the method that to(), half() and similar methods call
FORWARD_PRE_HOOKS = "_forward_pre_hooks"  # in the state of a module
EXTRA_STATE = nn.modules.module._EXTRA_STATE_KEY_SUFFIX  # the key of what get_extra_state() returns


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The children by name, each time that one occurs, which named_children() does not give."""
    return module._modules


def forward_pre_hooks_of(module: nn.Module) -> Mapping[int, Callable[..., Any]]:
    """The hooks of register_forward_pre_hook(), by number."""
    return module._forward_pre_hooks


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks that run before or after its forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def shallow_copy(
    module: nn.Module,
    replaced: Mapping[str, nn.Module],
    keeps: Callable[[Callable[..., Any]], bool],
) -> nn.Module:
    """A copy with the same parameters and children, except some that are replaced.

    It has the hooks before the forward that it `keeps`, and none after it.
    """
    made = copy.copy(module)
    made._modules = {**module._modules, **replaced}
    made._forward_hooks = OrderedDict()
    made._forward_pre_hooks = OrderedDict(
        (key, hook) for key, hook in module._forward_pre_hooks.items() if keeps(hook)
    )
    return made


# ---- functions that are replaced, as (owner, name)

TOTAL_NORM = clip_grad, "_get_total_norm"  # which clip_grad_norm_() calls
UNSCALE = torch.amp.GradScaler, "_unscale_grads_"


def optimizer_state_dict() -> tuple[Any, str]:
    """What torch.distributed.checkpoint.state_dict makes an optimizer's state with."""
    from torch.distributed.checkpoint import state_dict  # slow

    return state_dict, "_get_optim_state_dict"


# ---- process groups

_c10d: Any = dist.distributed_c10d
AllgatherOptions = _c10d.AllgatherOptions

# torch 2.13 renamed these; 2.11 has only the old names, and the new torch warns about
# them on every call.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Replaces tensors of any dtypes and shapes with those of a rank of a group, in buckets, as
# DistributedDataParallel does: (group, tensors, bytes of a bucket, rank).
broadcast_coalesced_ = dist._broadcast_coalesced

# The group of this process with torch's name for it.
group_named = _c10d._resolve_process_group

# The backends of dist.Backend.register_backend, by their names in upper case.
BACKEND_PLUGINS: dict[str, Any] = dist.Backend._plugins

# What a backend's creator takes as its first argument.
new_backend_options = _c10d._DistributedBackendOptions

# Makes a group of all ranks the default group; the one before stays as an ordinary group.
replace_default_group = _c10d._update_default_pg


def all_reduce_coalesced_(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Replaces tensors of any dtypes and shapes with their sums over the group, in buckets.

    Collective, unless there is no tensor.
    """
    for bucket in _take_tensors(tensors, BUCKET_BYTES):
        flats = [tensor.reshape(-1) for tensor in bucket]
        flat = flats[0] if len(flats) == 1 else torch.cat(flats)
        dist.all_reduce(flat, group=group)
        parts = flat.split([tensor.numel() for tensor in bucket])
        reduced = [part.view(tensor.shape) for part, tensor in zip(parts, bucket, strict=True)]
        foreach_copy_(bucket, reduced)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend of a group for a device's tensors; raises RuntimeError without one."""
    return group._get_backend(device)


def devices_of(group: dist.ProcessGroup) -> list[torch.device]:
    """The types of devices whose tensors a group has a backend for."""
    return group._device_types


def all_groups() -> list[dist.ProcessGroup]:
    """The groups of this process that have not been destroyed."""
    return list(_c10d._world.pg_map)


def timeout_of(backend: Any) -> Any:
    """The timeout of a backend, as a timedelta."""
    return backend.options._timeout


def set_timeout(options: Any, timeout: Any) -> None:
    """Sets the timeout in the options of a backend."""
    options._timeout = timeout


def global_ranks_of(group: dist.ProcessGroup) -> dict[int, int]:
    """The ranks of a group in the default group, by their rank in the group."""
    # Not by the public get_process_group_ranks(): a group that has lost a member has a gap.
    return {rank: number for number, rank in _c10d._world.pg_group_ranks[group].items()}


def new_process_group(
    like: dist.ProcessGroup,
    rank: int,
    global_ranks: list[int],
    store: dist.Store,
    name: str,
    options: Any,
    timeout: Any,
) -> dist.ProcessGroup:
    """A group with the backends of another one, over a store of its own. Collective over it.

    torch knows it by its name. `options` are those of ringcomm's backend.
    """
    world, backend = _c10d._world, _c10d._world.pg_map[like][0]
    # torch hands one options object to all of a group's backends.
    others = [getattr(backend_of(like, device), "options", None) for device in devices_of(like)]
    is_ringcomm = all(isinstance(other, type(options)) for other in others)
    made, _ = _c10d._new_process_group_helper(
        len(global_ranks),
        rank,
        [] if like is dist.group.WORLD else global_ranks,
        backend,
        store,
        name,
        backend_options=options if is_ringcomm else None,
        timeout=timeout,
        device_id=like.bound_device_id,
        group_desc=f"{like.group_desc}:shrunk",
    )
    world.pg_group_ranks[made] = {number: idx for idx, number in enumerate(global_ranks)}
    return made


def renumber_groups(kept: list[int], leave: Container[Any]) -> None:
    """Numbers global ranks anew, but in the groups to leave: kept[i] becomes i, others go."""
    number_of = {old: new for new, old in enumerate(kept)}
    for group, old_ranks in _c10d._world.pg_group_ranks.items():
        if group in leave or not isinstance(group, dist.ProcessGroup):  # not in that group
            continue
        ranks = {number_of[old]: rank for old, rank in old_ranks.items() if old in number_of}
        _c10d._world.pg_group_ranks[group] = ranks
        for device in devices_of(group) if len(ranks) == group.size() else ():
            # A group that is split from this one gets these options.
            options = getattr(backend_of(group, device), "options", None)
            if options is not None:
                options.global_ranks_in_group = sorted(ranks, key=ranks.__getitem__)


# Makes the kernel send a signal to this process when its parent dies.
die_with_parent = torch.multiprocessing._prctl_pr_set_pdeathsig  # type: ignore[attr-defined]


# ---- Gloo's backend

# What its class has for making one, and its method for timeouts.
GLOO_STATICS = ("Device", "_Options", "create_device", "create_default_device")
SET_DEFAULT_TIMEOUT = "_set_default_timeout"
# What its options have beside those of other backends.
GLOO_OPTIONS = ("_devices", "_threads")

# ---- DistributedDataParallel

_ddp: Any = DistributedDataParallel


# The DistributedDataParallel whose forward pass runs; None without one.
active_ddp = _ddp._get_active_ddp_module

# Replaces ignored_in_ddp(): takes a model and the names.
ignore_in_ddp = _ddp._set_params_and_buffers_to_ignore_for_model


def params_of_ddp(ddp: Any) -> list[nn.Parameter]:
    """The parameters whose gradients it reduces."""
    return ddp._module_parameters


def ignored_in_ddp(model: nn.Module) -> list[str]:
    """The names of parameters and buffers that DistributedDataParallel will leave alone."""
    return list(getattr(model, "_ddp_params_and_buffers_to_ignore", []))


def is_ignored_in_ddp(param: nn.Parameter) -> bool:
    """Whether a DistributedDataParallel that was made leaves the parameter alone."""
    return bool(getattr(param, "_ddp_ignored", False))


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile() has wrapped it, or its compile() was called."""
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


# ---- wrappers

# By class, the attribute with the module that they wrap. Not imported: most models have none.
WRAPPERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": (
        "_checkpoint_wrapped_module"
    ),
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": (
        "_fsdp_wrapped_module"
    ),
}


# ---- DeviceMesh and DTensor


def flat_mesh(mesh: Any, name: str | None = None) -> Any:
    """A mesh of one dimension over the ranks of a mesh. Collective for the first of its name."""
    return mesh._flatten(name)


def root_mesh(mesh: Any) -> Any:
    """The mesh that a mesh is a part of, or itself."""
    return mesh._get_root_mesh()


def like_dtensor(param: Any, local: Tensor) -> Any:
    """A DTensor with the sharding of another, around a tensor of any kind."""
    return type(param.data)(local, param._spec, requires_grad=False)


def shape_and_offset(shape: Any, mesh: Any, placements: Any) -> tuple[Any, Any]:
    """The shape of this rank's part of a DTensor, and where it begins."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    with torch.device("cpu"):  # torch computes with tensors on the default device
        return compute_local_shape_and_global_offset(shape, mesh, placements)


class AsDTensor(torch.autograd.Function):
    """make(part), a DTensor of a local tensor, whose backward takes a missing gradient.

    DistributedDataParallel gives none for an output that the loss does not use, and the backward of
    DTensor.from_local() takes that from torch 2.13 on.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, make: Callable[[Tensor], Any]) -> Any:
        made = make(part.detach())
        ctx.set_materialize_grads(False)
        ctx.placed = made.device_mesh, made.placements
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        return None if grad is None else grad.redistribute(*ctx.placed).to_local(), None


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Makes learning-rate schedulers see that the optimizer has made a step."""
    vars(optimizer)["_opt_called"] = True


def move_hooks(optimizer: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    """Moves the hooks of users, of step(), state_dict() and load_state_dict(), to another one."""
    for name, hooks in vars(optimizer).items():
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            getattr(other, name).update(hooks)
            hooks.clear()


def run_state_hooks(optimizer: torch.optim.Optimizer, when: str, *state: Any) -> Any:
    """Runs hooks, "state_dict_pre" for example; a state may be replaced, and is returned."""
    for hook in getattr(optimizer, f"_optimizer_{when}_hooks").values():
        found = hook(optimizer, *state)
        state = state if found is None else (found,)
    return state[0] if state else None


def is_attribute_of_torch(key: str) -> bool:
    """Whether each optimizer has the attribute: groups, state, hooks, and torch's schedulers'."""
    own = ("state", "param_groups", "step", "zero_grad", "_opt_called", "_zero_grad_profile_name")
    return key in own or key.startswith("_optimizer_")


# ---- fully_shard


def takes_fully_shard(module: nn.Module) -> bool:
    """Whether fully_shard takes a module: before torch 2.13 no container, even with a forward()."""
    has_forward = TORCH_VERSION >= (2, 13) and type(module).forward is not nn.Module.forward
    return has_forward or not isinstance(module, nn.ModuleList | nn.ModuleDict)


def fsdp_groups(module: Any) -> list[Any]:
    """fully_shard's objects for a unit, by group of ranks."""
    state = module._get_fsdp_state()
    # One group before torch 2.13.
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def fsdp_params(module: Any) -> list[list[Any]]:
    """fully_shard's objects for the weights of a unit, by group of ranks."""
    return [group.fsdp_params for group in fsdp_groups(module)]


def gather_when_needed(unit: Any) -> None:
    """Makes a unit of fully_shard neither prefetched in a backward pass nor prefetch another.

    For units that some ranks lack: the others would gather the next unit at another time.
    """
    for group in fsdp_groups(unit):
        group._record_post_forward = lambda: None


def is_gathered(module: Any) -> bool:
    """Whether a unit of fully_shard has its full weights now."""
    return all(p.sharded_state.name == "UNSHARDED" for group in fsdp_params(module) for p in group)


def gather_outside_inference_mode(unit: Any) -> None:
    """Makes a unit of fully_shard allocate its gathered weights outside inference mode.

    fully_shard keeps those of the first forward pass, and training cannot write into a tensor that
    was made in inference mode.
    """
    for param in (param for params in fsdp_params(unit) for param in params):
        for name in ("init_all_gather_outputs", "init_unsharded_param"):
            if name not in vars(param):
                setattr(param, name, partial(_outside_inference_mode, getattr(param, name)))


def _outside_inference_mode(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_inference_mode_enabled():  # entering it costs 3 us
        return call(*args, **kwargs)
    with torch.inference_mode(False):
        return call(*args, **kwargs)


def gathered_weights(module: Any) -> list[Any]:
    """The full weights of a unit of fully_shard, which has run its forward."""
    params = (param for group in fsdp_params(module) for param in group)
    return [param._unsharded_param for param in params if hasattr(param, "_unsharded_param")]


def fill_accumulated(params: Iterable[Any]) -> None:
    """Adds zeros to what no_sync() has accumulated for weights of a unit without a gradient.

    torch reduces all gradients of a unit in one dtype, including accumulated ones with
    reduce_dtype, and if a weight has none. From 2.15 on it makes such zeros itself.
    """
    params = list(params)
    if TORCH_VERSION >= (2, 15) or all(
        param.unsharded_accumulated_grad is None for param in params
    ):
        return
    for param in params:
        if param.unsharded_accumulated_grad is None and param.sharded_param.requires_grad:
            param.unsharded_accumulated_grad = torch.zeros_like(
                param._unsharded_param, dtype=param.reduce_dtype, requires_grad=False
            )


def drop_accumulated(params: Iterable[Any]) -> None:
    """Drops the unsharded gradients of a unit."""
    for param in params:
        if hasattr(param, "_unsharded_param"):  # otherwise the unit has never run
            param._unsharded_param.grad = None
            if TORCH_VERSION < (2, 15):  # the same gradient from then on
                param.unsharded_accumulated_grad = None


def accumulating(model: nn.Module) -> set[Any]:
    """Weights, sharded and full, of which units have a gradient in another dtype so far."""
    units = [module for module in model.modules() if hasattr(module, "_get_fsdp_state")]
    params = [param for unit in units for group in fsdp_params(unit) for param in group]
    kept = [p for p in params if getattr(p, "unsharded_accumulated_grad", None) is not None]
    return {each for p in kept for each in (p.sharded_param, p._unsharded_param)}


def reduce_unused(unit: Any) -> None:
    """Makes a unit of fully_shard reduce zeros for weights without a gradient on this rank.

    Without it, ranks with gradients of different weights of equal sizes would sum unrelated
    gradients.
    """
    if hasattr(unit, "set_reduce_scatter_unused_params"):  # from torch 2.13 on
        unit.set_reduce_scatter_unused_params(True, recurse=False)
        return
    group = unit._get_fsdp_state()._fsdp_param_group
    if group is None:
        return
    reduce = group.post_backward

    def post_backward(*unused: Any) -> None:
        for param in group.fsdp_params if group.reduce_grads else ():
            whole = getattr(param, "_unsharded_param", None)
            if whole is None or not whole.requires_grad:
                continue
            if whole.grad is None and param.unsharded_accumulated_grad is None:
                whole.grad = torch.zeros_like(whole)
        reduce(*unused)

    group.post_backward = post_backward
