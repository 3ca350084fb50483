"""How an optimizer answers for its states, also for those that its first step would make."""

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ringcomm.parallel.optimizer_classes import new_state, params_in
from ringcomm.torch_names import version_of

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
        counting = [param for param in states if _counts_from_0(self.inner_of(param))]
        at_0 = [param for param in counting if float(states[param].get("step", 1)) == 0]
        unstepped = self._unstepped()
        unstepped.clear()
        unstepped.update((param, self._seen(param)) for param in at_0)

    def _unstepped(self) -> dict[Any, Any]:
        """The states that stand for none, which the next step drops."""
        if self.optimizer not in _unstepped:
            _unstepped[self.optimizer] = {}
            self.optimizer.register_step_pre_hook(drop_unstepped)
        return _unstepped[self.optimizer]

    def _load(self, groups: list[State], states: Mapping[Any, State]) -> None:
        numbered = enumerate(params_in(self.optimizer.param_groups))
        given = {number: states[param] for number, param in numbered if states[param]}
        self.optimizer.load_state_dict({**self._native, "param_groups": groups, "state": given})


def states_of(optimizer: Any) -> States:
    """The states of any optimizer, or of the one that a wrapper, as Accelerate's, has in it.

    Raises TypeError for a wrapper with weights or a state of its own, or without `optimizer`.
    """
    while hasattr(inner := getattr(optimizer, "optimizer", None), "step"):
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
        return found  # type: ignore[no-any-return]
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


def _counts_from_0(inner: Any) -> bool:
    """Whether a class has step 0 in states that stand for none."""
    is_torchs = type(inner).__module__.startswith("torch.optim")
    return is_torchs and not isinstance(inner, torch.optim.Adagrad)
