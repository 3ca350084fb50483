"""Units of a model, which are gathered together, and their materialization from the meta device."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from ringcomm import torch_names
from ringcomm.parallel.expert.local_experts import LocalExperts
from ringcomm.parallel.flat_collectives import device_of
from ringcomm.parallel.model.describe import Model, describe, start_equal


def forked_generators(device: torch.device) -> Any:
    """torch.random.fork_rng() of the CPU and of this device."""
    if device.type == "cpu":
        return torch.random.fork_rng([])
    return torch.random.fork_rng([device], device_type=device.type)


def _has_forward(module: nn.Module) -> bool:
    """Whether the module can be called; containers such as ModuleList cannot."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def default_units(model: nn.Module) -> list[nn.Module]:
    """The entries of every outermost ModuleList, or of every outermost Sequential without one.

    And the parts of a model that cannot be called, such as a ModuleDict. None inside of sharded
    experts, which differ between ranks.
    """
    entries = _entries(model, nn.ModuleList) or _entries(model, nn.Sequential)
    return [*entries, *(part for part in _callable_parts(model) if part is not model)]


def _entries(module: nn.Module, kind: type[nn.Module]) -> list[nn.Module]:
    if isinstance(module, LocalExperts) and module.group.size() > 1:
        return []
    if isinstance(module, kind):
        return [unit for entry in module.children() for unit in _callable_parts(entry)]
    return [unit for child in module.children() for unit in _entries(child, kind)]


def _callable_parts(module: nn.Module) -> list[nn.Module]:
    """The module, or its children if it cannot be called."""
    if _has_forward(module):
        return [module]
    return [part for child in module.children() for part in _callable_parts(child)]


def params_of_units(
    described: Model, units: Iterable[nn.Module] | None
) -> list[tuple[nn.Module, list[nn.Parameter]]]:
    """The parameters of each unit, the model first; units without parameters are left out.

    A parameter belongs to the innermost unit around it. One that several units share belongs to
    the model: it is needed wherever one of them runs. None for default_units(). Sharded experts are
    units, which other ranks share, and have none inside. Raises TypeError and ValueError for a unit
    that is no module, not of the model, or cannot be called.
    """
    model, units = described.module, _with_experts(described, units)
    params: dict[nn.Module, list[nn.Parameter]] = {model: []}
    params |= {unit: [] for unit in units}
    for param, found in _units_of_params(model, units).items():
        params[found.pop() if len(found) == 1 else model].append(param)
    for module, own in params.items():
        _check_called(module, is_called=not own or _has_forward(module))
    return [(module, own) for module, own in params.items() if own]


def fsdp_units(
    described: Model, units: Iterable[nn.Module] | None
) -> list[tuple[nn.Module, list[nn.Parameter]]]:
    """The modules for fully_shard and the parameters that each shards, the model last.

    A unit that shares a parameter with another, or with the rest of the model, is not one of them:
    its parameters are the model's. Nor is a model that cannot be called and has no parameters left.
    Sharded experts are units as in params_of_units(), and it raises as that does.
    """
    model, units = described.module, _with_experts(described, units)
    units_of_params = _units_of_params(model, units)
    done: set[nn.Parameter] = set()
    found = []
    for module in [*dict.fromkeys(unit for unit in units if unit is not model), model]:
        parts = set(module.modules())
        own = [param for param in module.parameters() if param not in done]
        is_apart = own and all(units_of_params[param] <= parts for param in own)
        if is_apart or (module is model and (own or _has_forward(model))):
            _check_called(module, is_called=torch_names.takes_fully_shard(module))
            done.update(own)
            found.append((module, own))
    return found


def _check_called(unit: nn.Module, *, is_called: bool) -> None:
    if not is_called:
        raise ValueError(
            f"a unit with parameters must be a module that can be called, got {type(unit).__name__}"
            ": pass the parts that are called as units="
        )


def _with_experts(described: Model, units: Iterable[nn.Module] | None) -> list[nn.Module]:
    model, apart = described.module, described.experts.values()
    inside = {part for experts in apart for part in experts.modules()}
    given = default_units(model) if units is None else [*units]
    for unit in given:
        if not isinstance(unit, nn.Module):
            raise TypeError(f"units must be modules, got {type(unit).__name__}")
    # In one order on all ranks, also of a set; inner ones first.
    inner_first: list[nn.Module] = []
    model.apply(inner_first.append)
    place = {module: number for number, module in enumerate(inner_first)}
    given.sort(key=lambda unit: place.get(unit, -1))
    return [*apart, *(unit for unit in given if unit not in inside)]


def new_group_alone() -> dist.ProcessGroup:
    """A group of this rank."""
    made: Any = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return made


def _units_of_params(
    model: nn.Module, units: Sequence[nn.Module]
) -> dict[nn.Parameter, set[nn.Module]]:
    """The innermost units, or the model, around each use of a parameter; checks the units."""
    chosen, found = set(units), dict[nn.Parameter, set[nn.Module]]()
    for unit in chosen - {*model.modules()}:
        raise ValueError(f"units must be parts of the model, got another {type(unit).__name__}")

    def visit(module: nn.Module, unit: nn.Module) -> None:
        unit = module if module in chosen else unit
        for param in module.parameters(recurse=False):
            found.setdefault(param, set()).add(unit)
        for child in module.children():
            visit(child, unit)

    visit(model, model)
    return found


def device_of_model(params: Iterable[Tensor]) -> torch.device:
    """The device of weights; of those on the meta device torch's default one, or the CPU."""
    devices = (next(iter(params)).device, torch.get_default_device(), torch.device("cpu"))
    return next(device for device in devices if device.type != "meta")


def materialize(model: nn.Module, params: Sequence[nn.Parameter], device: torch.device) -> None:
    """Allocates and initializes those of a module's parameters that are on the meta device.

    `model` has all modules of shared ones: a later reset_parameters() would overwrite them.
    Parameters keep their identity. Modules are processed in the order of model.modules(); each
    reset_parameters() sees all parameters of its module. Modules with only buffers are initialized
    too. Values of an expert do not depend on the rank that has it.
    """
    wanted = {param for param in params if param.is_meta}
    for module in model.modules():
        if isinstance(module, LocalExperts) and any(param.is_meta for param in module.parameters()):
            # Ranks with one seed have different experts.
            seed = int(torch.randint(1 << 62, (), dtype=torch.int64, device="cpu"))
            for number, expert in module.items():
                with forked_generators(device):
                    torch.manual_seed(seed + int(number))
                    materialize(expert, params, device)
        own = dict(module.named_parameters(recurse=False))
        buffers = module.buffers(recurse=False)
        is_meta = any(param.is_meta for param in own.values())
        has_wanted = is_meta and not wanted.isdisjoint(own.values())
        if not has_wanted and (own or not any(buffer.is_meta for buffer in buffers)):
            continue
        for param in own.values():
            if param.is_meta:
                value = torch.empty_like(param, device=device)
                new = nn.Parameter(value, requires_grad=param.requires_grad)
                torch.utils.swap_tensors(param, new)
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=device))
        module.reset_parameters()  # type: ignore[operator]


def shard_units(
    model: Model,
    group: dist.ProcessGroup,
    mesh: DeviceMesh | None,
    units: Iterable[nn.Module] | None,
    **options: Any,
) -> Model:
    """Shards unit by unit: initializes those on the meta device and broadcasts rank 0's values.

    Sharded experts are sharded over the ranks with the same ones. `options` are fully_shard's.
    Returns the description of the sharded model.
    """
    device = next(iter(model.weights)).device
    device = device_of(group) if device.type == "meta" else device
    meshes: dict[Any, DeviceMesh] = {} if mesh is None else {group: mesh}
    for module, params in fsdp_units(model, units):
        materialize(module, params, device)
        start_equal(model, [group], params, over_data=True)
        ranks = model.weights[params[0]].data_group(group) if params else group
        if ranks not in meshes:
            meshes[ranks] = DeviceMesh.from_group(ranks or new_group_alone(), device.type)
        made: Any = fully_shard(module, mesh=meshes[ranks], **options)
        # Ranks may use different weights of a unit that all of them run.
        torch_names.reduce_unused(made)
        if ranks is not group:
            torch_names.gather_when_needed(made)
            divide_gradients(made, group)
    materialize(model.module, (), device)  # modules with only buffers
    made_of = describe(model.module)
    start_equal(made_of, [group], made_of.buffers, over_data=True)
    return made_of


def fsdp_roots(model: nn.Module) -> list[Any]:
    """The model, or the outermost units in one that cannot be called."""
    if isinstance(model, FSDPModule):
        return [model]
    return [*dict.fromkeys(root for child in model.children() for root in fsdp_roots(child))]


def divide_gradients(module: Any, group: dist.ProcessGroup, scale: float = 1.0) -> None:
    """Makes fully_shard divide by the ranks that gradients are sums over, and a loss scale."""
    sizes = [part.mesh_info.shard_mesh_size for part in torch_names.fsdp_groups(module)]
    # Gloo supports only SUM; where weights are replicated only, torch 2.13 would divide twice.
    module.set_force_sum_reduction_for_comms(max(sizes, default=1) > 1)
    module.set_gradient_divide_factor(group.size() * scale)


def watch_whole_weights(
    unit: nn.Module, seen: Callable[[nn.Module, str, nn.Parameter], None]
) -> Callable[[], Any]:
    """Calls seen(module, name, weight) once for each gathered, trainable weight of a unit.

    Autograd accumulates gradients into them, which fully_shard reduces into those of the sharded
    parameters. They exist from the first forward of the unit on; with DTensor's tensor parallelism
    they are DTensors of another mesh. Returns a function that removes the hooks.
    """
    torch_names.gather_outside_inference_mode(unit)
    meshes = {getattr(param, "device_mesh", None) for param in unit.parameters()}
    found: set[nn.Parameter] = set()

    @torch_names.untraced
    def before_forward(*_: Any) -> None:
        for module in unit.modules():
            for name, param in module.named_parameters(recurse=False):
                mesh = getattr(param, "device_mesh", None)
                is_whole = mesh is None or mesh not in meshes
                if is_whole and param.requires_grad and param not in found:
                    found.add(param)
                    seen(module, name, param)

    return unit.register_forward_pre_hook(before_forward).remove


# ---- what a unit returns, and its backward pass


def with_own_memory(output: Any, weights: Iterable[Tensor]) -> Any:
    """A module's output, in which tensors in the memory of weights are copies.

    That memory is freed after the forward. Raises RuntimeError if a copy cannot be put there.
    """
    addresses = {weight.untyped_storage().data_ptr() for weight in weights} - {0}

    def is_shared(tensor: Tensor) -> bool:
        with suppress(RuntimeError):  # sparse tensors and those of torch.func have no storage
            return tensor.untyped_storage().data_ptr() in addresses
        return False

    if not any(map(is_shared, tensors_in(output))):
        return output
    copied = torch_names.tree_map_only(Tensor, lambda x: x.clone() if is_shared(x) else x, output)
    if any(map(is_shared, tensors_in(copied))):
        kind = type(output).__name__
        raise RuntimeError(
            f"a module with sharded weights returned one of them in a {kind}, but they are freed"
            " after its forward: return a clone() of the weight"
        )
    return copied


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in a tree of sequences, mappings and dataclasses."""
    for leaf in torch_names.tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):
            yield from tensors_in([*leaf.values()])
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from tensors_in([getattr(leaf, f.name) for f in dataclasses.fields(leaf)])


def refuse_create_graph(system: str) -> None:
    """Raises RuntimeError in a backward pass with create_graph=True.

    A graph of gradients would keep weights that are freed when the pass ends.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"create_graph=True (a gradient penalty) is not supported with {system}, which frees"
            " weights after their use: use stage 1 or 2 of zero.shard()"
        )
