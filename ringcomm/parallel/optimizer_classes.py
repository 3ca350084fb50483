"""Optimizers of any class on parts of weights: which of them can, and copies of them."""

import copy
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ringcomm.torch_names import (
    COLLECTIVES,
    FakeTensorMode,
    TorchDispatchMode,
    is_attribute_of_torch,
    tree_leaves,
)
from ringcomm.trace.program import unrecorded

_KNOWN = (torch.optim.AdamW, torch.optim.SGD)
# Of torch: what needs full weights, and what zero.shard() refuses at all.
WHOLE = {
    "Adafactor": "keeps sums over rows and columns of a weight",
    "Muon": "orthogonalizes full matrices",
}
REFUSED = {
    "LBFGS": "needs dot products over all weights",
    "SparseAdam": "needs sparse gradients",
}
BY_WEIGHT = ("params", "param_names")  # lists in parameter groups
# More elements than a block of optimizers with quantized states, in parts of different sizes.
_SHAPE, _SIZES = (72, 64), (1, 1500, 3107)
# Steps of a trial: of any class, and of one that a user says to need full weights, which may begin
# with other steps.
_NUM_STEPS, _NUM_ASKED_STEPS = 3, 25


def params_in(groups: Iterable[dict[str, Any]]) -> list[Any]:
    """The parameters of all groups."""
    return [param for group in groups for param in group["params"]]


def over_groups(optimizer: Any, groups: list[dict[str, Any]]) -> Any:
    """A copy of an optimizer over other parameter groups, without state and hooks."""
    made = object.__new__(type(optimizer))
    vars(made).update(attributes_of(optimizer))
    made.__setstate__({"state": defaultdict(dict), "param_groups": groups})
    if hasattr(made, "train"):  # schedule-free; its step raises in the other mode
        made.train()
    return made


def of_parts(group: dict[str, Any], parts: Mapping[Any, Any]) -> dict[str, Any]:
    """A parameter group of those weights that have parts."""
    here = [i for i, param in enumerate(group["params"]) if param in parts]
    lists = {key: [group[key][i] for i in here] for key in BY_WEIGHT if key in group}
    return {**group, **lists, "params": [parts[param] for param in lists["params"]]}


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """A copy of a parameter group without its parameters and their names."""
    return {key: copy.deepcopy(value) for key, value in group.items() if key not in BY_WEIGHT}


def take_options(group: dict[str, Any], of: dict[str, Any]) -> None:
    """Sets the options of a parameter group to those of another."""
    group.update({key: value for key, value in of.items() if key not in BY_WEIGHT})


def run_on_parts(
    optimizer: Any,
    method: str,
    groups: Iterable[dict[str, Any]],
    parts: Mapping[Any, Tensor],
    grads: Mapping[Any, Tensor | None],
    factor: float,
    states: Mapping[Any, dict[str, Any]],
) -> tuple[dict[Any, dict[str, Any]], list[dict[str, Any]]]:
    """Calls a method of a copy without groups on parts of weights, which it writes.

    `grads` and `states` are those of the parts; gradients are multiplied by the factor. Returns the
    new states, and the groups with their new options.
    """
    made: dict[Any, nn.Parameter] = {}
    for param, part in parts.items():
        made[param] = weight = nn.Parameter(part.detach(), param.requires_grad)
        vars(weight).update(vars(param))  # attributes that users have set
        if (grad := grads[param]) is not None:
            weight.grad = grad.to(part.dtype).view(part.shape)
            if factor != 1:
                weight.grad *= factor
    called = [of_parts(group, made) for group in groups]
    found = defaultdict[Any, Any](dict, {made[p]: of for p, of in states.items() if of})
    optimizer.param_groups, optimizer.state = called, found
    try:
        getattr(optimizer, method)()
        found = optimizer.state
    finally:
        optimizer.param_groups, optimizer.state = [], {}
    for param, weight in made.items():
        if weight.data_ptr() != parts[param].data_ptr():  # the class has set `.data`
            parts[param].copy_(weight)
    return {p: found[weight] for p, weight in made.items() if weight in found}, called


def new_state(optimizer: Any, group: dict[str, Any], param: Any, value: Tensor) -> dict[str, Any]:
    """The state before the first step, by a step of a weight with these values that it keeps."""
    other = nn.Parameter(value)
    other.grad = torch.zeros_like(other)
    still = {"lr": 0 * group["lr"]} if group.get("lr") is not None else {}
    twin = over_groups(
        optimizer, [{**of_parts(group, {param: other}), **options_of(group), **still}]
    )
    with unrecorded():
        twin.step()
    made: dict[str, Any] = twin.state.get(other, {})
    return {key: value * 0 if key == "step" else value for key, value in made.items()}


def retire(optimizer: torch.optim.Optimizer, new_owner: str) -> None:
    """Makes an optimizer that was given away raise before it writes anything."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            f"this optimizer was given to {new_owner} and no longer has the weights: use the"
            f" optimizer that {new_owner} returned"
        )

    optimizer.register_step_pre_hook(refuse)  # a scheduler has replaced `step`
    names = {"zero_grad", "add_param_group", "state_dict", "load_state_dict"}
    for name in names | ({"train", "eval"} & {*dir(optimizer)}):
        setattr(optimizer, name, refuse)


def attributes_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What the optimizer's class keeps beside groups and state."""
    own = vars(optimizer).items()
    return {key: value for key, value in own if not is_attribute_of_torch(key)}


@unrecorded()
def needs_whole(optimizer: torch.optim.Optimizer, asked: Collection[type]) -> bool:
    """Whether an optimizer needs full weights, each by itself; else it is elementwise.

    It makes steps of the optimizer's class on a weight of 4,608 elements and on its parts, and, if
    these differ, on two small weights together and alone. `asked`: classes that need full ones.

    Raises:
        TypeError: neither is so.
        ValueError: `asked` has its class, which takes parts in many steps, too.
    """
    name, is_asked = type(optimizer).__name__, isinstance(optimizer, tuple(asked))
    known: bool | None = getattr(optimizer, "is_whole", None)  # an offloaded one has been tried
    if known or (known is not None and not is_asked):
        return known
    reasons = [
        reason
        for known, reason in REFUSED.items()
        if isinstance(optimizer, getattr(torch.optim, known, ()))
    ]
    leaves = tree_leaves({**attributes_of(optimizer), "defaults": None})
    if any(isinstance(leaf, (Tensor, nn.Module, torch.optim.Optimizer)) for leaf in leaves):
        reasons.append("keeps tensors, a module or an optimizer outside of its groups and state")
    if any(
        isinstance(x, Tensor) and x.is_meta for s in optimizer.state.values() for x in s.values()
    ):
        reasons.append("already has state on the meta device")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        reasons.append("is asked for a graph through its updates, by differentiable=True")
    if not reasons:
        num_steps = _NUM_ASKED_STEPS if is_asked else _NUM_STEPS
        is_known = type(optimizer) in _KNOWN or known is not None
        if is_known or _takes_parts(optimizer, num_steps):
            if is_asked:
                raise ValueError(
                    f"whole= names {name}, which is elementwise: leave"
                    " it out, and its state is sharded evenly"
                )
            return False
        reasons = [] if is_asked else [_coupling(optimizer, g) for g in optimizer.param_groups]
    if any(reasons):
        raise TypeError(
            "an optimizer to shard or to offload must update each weight by itself, as AdamW and"
            f" Muon do, but {name} {next(filter(None, reasons))}: use another optimizer, or"
            " DistributedDataParallel"
        )
    return True


def _takes_parts(optimizer: torch.optim.Optimizer, num_steps: int) -> bool:
    try:
        with _NoCollectives():
            return all(
                _is_same_on_parts(optimizer, group, shape, num_steps)
                for group in optimizer.param_groups
                for shape in dict.fromkeys((_SHAPE, _shape_of(group)))
            )
    except _OtherStates as error:
        raise TypeError(str(error)) from None
    except Exception:  # it may refuse weights of one dimension
        return False


@unrecorded()
def takes_empty_groups(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's step does nothing where its groups have no weights."""
    try:
        over_groups(optimizer, [of_parts(g, {}) for g in optimizer.param_groups]).step()
    except Exception:
        return False
    return True


def _shape_of(group: dict[str, Any]) -> tuple[int, ...]:
    """Of 4,608 elements, with as many dimensions as the group's weights, at most."""
    num_dims = max((param.dim() for param in group["params"]), default=2)
    known: dict[int, tuple[int, ...]] = {0: (4608,), 1: (4608,), 2: _SHAPE, 3: (18, 16, 16)}
    return known.get(num_dims, (18, 16, 4, 4, *[1] * (num_dims - 4)))


class _OtherStates(Exception):
    pass


class _NoCollectives(TorchDispatchMode):
    """Raises TypeError for a collective: owners of weights make other steps than other ranks."""

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in COLLECTIVES:
            raise TypeError("it calls collectives itself")
        return func(*args, **(kwargs or {}))


def _coupling(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> str:
    """What a step on two weights together does differently from two alone; "" if nothing."""
    generator = torch.Generator().manual_seed(0)
    # Smaller: a user's class may factorize products of rows, which large gradients make singular.
    small = [min(size // 4, 96) or 1 for size in _shape_of(group)]
    shape = (2, 1 + _NUM_STEPS, *small)
    values = torch.randn(shape, dtype=torch.float32, device="cpu", generator=generator)
    values[1, 1:] *= 10
    weights = [value[0].clone() for value in values]
    alone = [value[0].clone() for value in values]
    grads = [[*value[1:]] for value in values]
    try:
        with _NoCollectives():
            _steps(optimizer, group, weights, grads)
            for weight, own in zip(alone, grads, strict=True):
                _steps(optimizer, group, [weight], [own])
    except Exception as error:
        return f"cannot be tried on two small weights ({error}), unless whole= names it"
    for value, ours, theirs in zip(values, weights, alone, strict=True):
        change = (theirs - value[0]).norm()
        if not (ours - theirs).norm() <= 0.05 * change:
            return "gives other weights together than each alone"
    return ""


def optimizers_of(given: Any) -> Sequence[torch.optim.Optimizer]:
    """A list of one optimizer, or the list that was given."""
    return [given] if isinstance(given, torch.optim.Optimizer) else given


def state_elems(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], *, is_whole: bool
) -> dict[nn.Parameter, int]:
    """The elements of each weight's states, from steps on a small weight, or on each shape."""

    def stepped(shape: Sequence[int]) -> list[Tensor]:
        weight = torch.ones(shape, dtype=torch.float32, device="cpu")
        state = _steps(optimizer, group, [weight], [[torch.ones_like(weight)]])[0]
        return [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor) and leaf.dim()]

    def of_shape(shape: Sequence[int]) -> int:
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):  # of a large weight no values
                states = stepped(shape)
        except Exception:  # its step reads values
            states = stepped(shape)
        return sum(state.numel() for state in states)

    if not is_whole:
        num_states = of_shape((2, 2)) // 4
        return {param: num_states * param.numel() for param in group["params"]}
    of_shapes = {shape: of_shape(shape) for shape in {param.shape for param in group["params"]}}
    return {param: of_shapes[param.shape] for param in group["params"]}


def _is_same_on_parts(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], shape: Sequence[int], num_steps: int
) -> bool:
    """Whether steps on parts of a weight, and states, are as on the full weight."""
    generator = torch.Generator().manual_seed(0)
    sizes = (1 + num_steps, *shape)
    weight, *grads = torch.randn(sizes, dtype=torch.float32, device="cpu", generator=generator)
    for grad in grads:
        grad.view(-1)[_SIZES[1] :] *= 30  # norms of parts differ
    device = next((param.device for param in group["params"] if not param.is_meta), "cpu")
    weight, grads = weight.to(device), [grad.to(device) for grad in grads]
    parts = [part.clone() for part in weight.view(-1).split(_SIZES)]
    of_whole = _steps(optimizer, group, [weight], [grads])[0]
    by_part = zip(*(grad.view(-1).split(_SIZES) for grad in grads), strict=True)
    of_parts = [
        _steps(optimizer, group, [part], [own])[0] for part, own in zip(parts, by_part, strict=True)
    ]
    values = [(weight, parts)]
    for key, value in of_whole.items():
        if isinstance(value, Tensor) and value.shape == weight.shape:
            values.append((value, [state[key] for state in of_parts]))
        elif any(isinstance(leaf, Tensor) and leaf.dim() for leaf in tree_leaves(value)):
            return False
    for whole, found in values:
        joined = torch.cat([part.reshape(-1) for part in found])
        if not torch.allclose(joined, whole.view(-1), rtol=1e-4, atol=1e-6, equal_nan=True):
            return False
    return True


def _steps(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    weights: Sequence[Tensor],
    grads: Sequence[Sequence[Tensor]],
) -> list[dict[str, Any]]:
    """The states of weights after steps of a copy of the optimizer with the options of a group."""
    options = options_of(group)
    options |= {key: group[key][:1] * len(weights) for key in group.keys() & {"param_names"}}
    lr = options.get("lr")
    if lr is not None and float(lr) == 0:  # as a scheduler's warm-up may begin
        options["lr"] = 1e-3
    if options.get("capturable"):  # for GPUs only
        options["capturable"] = False
    known = (optimizer.state[param] for param in group["params"] if param in optimizer.state)
    state: dict[str, Any] = next(known, {})
    before = [weight.clone() for weight in weights]

    def stepped(state: dict[str, Any]) -> list[dict[str, Any]]:
        twin = over_groups(optimizer, [{**copy.deepcopy(options), "params": [*weights]}])
        for weight in weights if state else ():
            twin.state[weight] = {key: _like(value, weight) for key, value in state.items()}
        for of_step in zip(*grads, strict=True):
            for weight, grad in zip(weights, of_step, strict=True):
                weight.requires_grad_().grad = grad.clone()
            twin.step()
        for key in twin.state:
            if not isinstance(key, Tensor):
                raise _OtherStates(
                    f"zero.shard() has no place for a state of no weight, {key!r} of"
                    f" {type(optimizer).__name__}: keep it in the parameter groups"
                )
        return [twin.state.get(weight, {}) for weight in weights]

    eager = torch.compiler.set_stance("force_eager")  # compiled functions refuse modes
    with torch.no_grad(), torch.random.fork_rng(devices=[]), eager:
        try:
            return stepped({})
        except Exception:
            if not state:
                raise
            # Adagrad's state exists before its first step.
            for weight, value in zip(weights, before, strict=True):
                weight.copy_(value)
            return stepped(state)


def _like(value: Any, weight: Tensor) -> Any:
    """A state for another weight; values of the first element."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if not value.dim() or not value.numel():
        return value.detach().clone()
    return torch.full_like(weight, float(value.detach().reshape(-1)[0]))
