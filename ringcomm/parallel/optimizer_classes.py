"""Optimizers of any class: copies, which step on parts of weights, and their states."""

import copy
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ringcomm.torch_names import (
    FakeTensorMode,
    is_attribute_of_torch,
    tree_leaves,
    version_of,
)
from ringcomm.trace.program import unrecorded

BY_WEIGHT = ("params", "param_names")  # lists in parameter groups


def params_in(groups: Iterable[dict[str, Any]]) -> list[Any]:
    """The parameters of all groups."""
    return [param for group in groups for param in group["params"]]


def attributes_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What the optimizer's class keeps beside groups and state."""
    own = vars(optimizer).items()
    return {key: value for key, value in own if not is_attribute_of_torch(key)}


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


def _twin(optimizer: Any, groups: Iterable[dict[str, Any]], parts: Mapping[Any, Tensor]) -> Any:
    """A copy over parts of weights whose step changes nothing else."""
    made = over_groups(optimizer, [{**of_parts(g, parts), **options_of(g)} for g in groups])
    vars(made).update(copy.deepcopy(attributes_of(optimizer)))
    return made


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
        if others := [key for key in found if not isinstance(key, Tensor)]:
            raise TypeError(
                f"{type(optimizer).__name__} has a state of no weight, {others[0]!r}, which would"
                " begin anew in each step: keep it in the parameter groups"
            )
    finally:
        optimizer.param_groups, optimizer.state = [], {}
    for param, weight in made.items():
        if weight.data_ptr() != parts[param].data_ptr():  # the class has set `.data`
            parts[param].copy_(weight)
    return {p: found[weight] for p, weight in made.items() if weight in found}, called


@unrecorded()
def new_state(optimizer: Any, group: dict[str, Any], param: Any, value: Tensor) -> dict[str, Any]:
    """The state before the first step, by a step of a weight with these values that it keeps."""
    other = nn.Parameter(value)
    other.grad = torch.zeros_like(other)
    twin = _twin(optimizer, [group], {param: other})
    still = ("lr", "weight_decay", "capturable")
    for own in twin.param_groups:
        own.update({key: 0 * own[key] for key in still if own.get(key) is not None})
    with torch.random.fork_rng(devices=[]):
        twin.step()
    made: dict[str, Any] = twin.state.get(other, {})
    return {key: value * 0 if key == "step" else value for key, value in made.items()}


def retire(optimizer: torch.optim.Optimizer, new_owner: str) -> None:
    """Makes an optimizer that was given away raise before it writes anything, and drops its state.

    A scheduler that was made for it keeps it.
    """

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            f"this optimizer was given to {new_owner} and no longer has the weights: use the"
            f" optimizer that {new_owner} returned"
        )

    optimizer.state = defaultdict(dict)
    optimizer.register_step_pre_hook(refuse)  # a scheduler has replaced `step`
    names = {"zero_grad", "add_param_group", "state_dict", "load_state_dict"}
    for name in names | ({"train", "eval"} & {*dir(optimizer)}):
        setattr(optimizer, name, refuse)


@unrecorded()
def takes_empty_groups(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's step does nothing where its groups have no weights."""
    try:
        _twin(optimizer, optimizer.param_groups, {}).step()
    except Exception:
        return False
    return True


def optimizers_of(given: Any) -> Sequence[torch.optim.Optimizer]:
    """A list of one optimizer, or the list that was given."""
    return [given] if isinstance(given, torch.optim.Optimizer) else given


def state_elems(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], *, is_whole: bool
) -> dict[nn.Parameter, int]:
    """The elements of each weight's states, from a step on a small weight, or on each shape."""

    def of_shape(param: nn.Parameter, shape: Sequence[int]) -> int:
        def made() -> dict[str, Any]:
            weight = torch.ones(shape, dtype=torch.float32, device="cpu")
            return new_state(optimizer, group, param, weight)

        known, scale = optimizer.state.get(param, {}), math.prod(shape) / max(1, param.numel())
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):  # of a large weight no values
                state = known or made()
        except Exception:  # its step reads values
            state = made()
        found = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor) and leaf.dim()]
        return int(sum(leaf.numel() for leaf in found) * (scale if known else 1))

    first = {param.shape: param for param in group["params"]}
    if not is_whole:
        num_states = of_shape(group["params"][0], (2, 2)) // 4 if first else 0
        return {param: num_states * param.numel() for param in group["params"]}
    of_shapes = {shape: of_shape(param, shape) for shape, param in first.items()}
    return {param: of_shapes[param.shape] for param in group["params"]}


# ---- states, also those that a first step would make

State = dict[str, Any]

MASTER = "master"  # float32 values of 16-bit weights; optional for optimizers without masters

# By optimizer and weight, the states that stand for none: the next step begins without them, unless
# they have been replaced or written by then. A state dict has a value for every key, so that a
# checkpoint can be loaded into it. But no value is the same as none for momentum with dampening,
# NAdam, ASGD and Rprop.
_unstepped: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()


class States:
    """The states of an optimizer of torch's kind; other systems have subclasses.

    Attributes:
        is_stored: whether states are in another tier than device memory.
        is_in_place: whether load() is given the tensors of parts(), overwritten; else others.
        flat: the keys of states with one dimension for weights of any shape.
    """

    is_stored = False
    is_in_place = True

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.flat: tuple[str, ...] = getattr(optimizer, "flat_states", ())

    def groups(self) -> list[State]:
        """The parameter groups as in torch's state_dict()."""
        self._native = self.optimizer.state_dict()
        groups: list[State] = self._native["param_groups"]
        return groups

    def parts(self, param: Any) -> State:
        """This rank's values of a weight's state."""
        found: State = self.optimizer.state.get(param, {})
        return found

    def kept(self, param: Any) -> Any:
        """The object that holds a weight's state; another one, once it is replaced."""
        return self.optimizer.state.get(param)

    def _seen(self, param: Any) -> tuple[Any, list[int]]:
        return self.kept(param), _versions(self.kept(param))

    def place(self, param: Any) -> tuple[tuple[int, int] | None, bool]:
        """Of a flat weight, the elements [begin, end) that values are of; if an owner has all."""
        return None, False

    def inner_of(self, param: Any) -> Any:
        """The optimizer, of the user's class, that updates a weight."""
        return self.optimizer

    def new(self, param: Any) -> Tensor | None:
        """A copy of what a step updates of a weight that lacks a state here; else None."""
        if not param.requires_grad or self.parts(param).keys() - {MASTER}:
            return None
        copy: Tensor = param.detach().clone()
        return copy

    def replace(self, param: Any, state: State) -> None:
        """Replaces a weight's state; a master that it lacks stays."""
        old = self.optimizer.state.pop(param, {})
        if state := {key: old[key] for key in {MASTER} & old.keys()} | state:
            self.optimizer.state[param] = state

    def make(self) -> None:
        """Makes the missing states, until the next step. Collective for zero.shard()."""
        unstepped = self._unstepped()
        if hasattr(self.optimizer, "make_states"):  # it applies gradients in the backward pass
            self.optimizer.make_states()
            return
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if (value := self.new(param)) is not None:
                    self.replace(param, new_state(self.inner_of(param), group, param, value))
                    unstepped[param] = self._seen(param)

    def load(self, groups: list[State], states: Mapping[Any, State], **how: bool) -> None:
        """Takes parameter groups, and states by weight. Those with step 0 stand for none."""
        self._load(groups, states, **how)
        unstepped = self._unstepped()
        unstepped.clear()
        for param, state in states.items():
            inner = self.inner_of(param)
            # Those of torch count from 0; Adagrad has its states from the start.
            is_torchs = type(inner).__module__.startswith("torch.optim")
            counts_from_0 = is_torchs and not isinstance(inner, torch.optim.Adagrad)
            if counts_from_0 and float(state.get("step", 1)) == 0:
                unstepped[param] = self._seen(param)

    def _unstepped(self) -> dict[Any, Any]:
        """The states that stand for none, which the next step drops."""
        if self.optimizer not in _unstepped:
            _unstepped[self.optimizer] = {}
            self.optimizer.register_step_pre_hook(drop_unstepped)
        return _unstepped[self.optimizer]

    def _load(self, groups: list[State], states: Mapping[Any, State]) -> None:
        numbered = enumerate(params_in(self.optimizer.param_groups))
        given = {number: states[param] for number, param in numbered if states[param]}
        optimizer = self.optimizer
        own, state = optimizer.param_groups, optimizer.state
        optimizer.load_state_dict({**self._native, "param_groups": groups, "state": given})
        # A wrapper may share them.
        for group, loaded in zip(own, optimizer.param_groups, strict=True):
            if group is not loaded:
                group.clear()
                group.update(loaded)
        optimizer.param_groups = own
        if isinstance(state, dict) and state is not optimizer.state:
            state.clear()
            state.update(optimizer.state)
            optimizer.state = state


def states_of(optimizer: Any) -> States:
    """The states of any optimizer, or of the one that a wrapper, as Accelerate's, has in it.

    Raises TypeError for a wrapper with weights or a state of its own, or without `optimizer`.
    """
    while hasattr(inner := getattr(optimizer, "optimizer", None), "step"):
        if hasattr(optimizer, "get_last_lr"):
            raise TypeError(f"{type(optimizer).__name__} is a scheduler: pass its optimizer")
        own, its = (
            [vars(x).get("state"), getattr(x, "param_groups", None)] for x in (optimizer, inner)
        )
        if any(a is not None and a is not b for a, b in zip(own, its, strict=True)):
            raise TypeError(
                f"{type(optimizer).__name__} has other weights or states than its `optimizer`: pass"
                " that one, and save the others beside it"
            )
        optimizer = inner
    if (found := getattr(optimizer, "saved_states", None)) is not None:
        return found
    if not isinstance(optimizer, torch.optim.Optimizer):
        name = type(optimizer).__name__
        raise TypeError(f"expected an optimizer of torch's kind, got {name}: pass what it wraps")
    return States(optimizer)


def drop_unstepped(optimizer: Any, *_: Any) -> None:
    """Removes the states that stand for none."""
    if made := _unstepped.get(optimizer):
        states = states_of(optimizer)
        for param, (state, versions) in made.items():
            if states.kept(param) is state and _versions(state) == versions:
                states.replace(param, {})
        made.clear()


def _versions(kept: Any) -> list[int]:
    """Of the tensors of a state, which change when they are written."""
    values = kept.values() if isinstance(kept, dict) else ()
    return [version_of(value) for value in values if isinstance(value, Tensor)]
