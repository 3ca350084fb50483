"""What an optimizer's step acts on. It is known by class, or the user says it; nothing is tried.

Ranks that have parts of weights make the steps of one process only if a step treats each element by
itself, or if one rank steps with the full weight. A trial cannot tell: classes factor matrices only
above a size, or begin with other steps.
"""

import enum
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from ringcomm.torch_names import is_attribute_of_torch, tree_leaves


class Kind(enum.Enum):
    """What a step acts on, as messages say it."""

    ELEMENTS = "updates each element by itself"
    WEIGHTS = "needs full weights"
    TOGETHER = "updates several weights together"
    RANDOM = "draws random numbers in its step, other ones on each rank"
    SPARSE = "needs sparse gradients"


# By the package that has a class: its name in the package.
_CLASSES: dict[Kind, dict[str, str]] = {
    Kind.ELEMENTS: {
        "torch": "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD",
    },
    Kind.WEIGHTS: {
        "torch": "Adafactor Muon",
        "transformers": "Adafactor",
    },
    Kind.TOGETHER: {
        "torch": "LBFGS",
    },
    Kind.RANDOM: {},
    Kind.SPARSE: {
        "torch": "SparseAdam",
    },
}
_KINDS = {
    f"{package}.{name}": kind
    for kind, packages in _CLASSES.items()
    for package, names in packages.items()
    for name in names.split()
}
_declared: dict[type, Kind] = {}


def declare_optimizers(*, elementwise: Collection[type] = (), whole: Collection[type] = ()) -> None:
    """Says what optimizers of a user's classes act on, in this process.

        ringcomm.parallel.declare_optimizers(elementwise=[MyLion], whole=[MyMuon])

    For models that are split by hand, whose optimizers ask at their first step: layers of
    ringcomm.nn, tensor_parallelize(), expert_parallelize() and pipeline.Pipeline. Functions that
    take an optimizer have the same arguments.

    Args:
        elementwise: classes whose step treats each element of a weight by itself, as AdamW's does.
        whole: classes whose step treats each weight by itself, and needs all of it, as Muon's does.

    Raises:
        TypeError: an argument is no collection of classes.
        ValueError: a class is in both, or is known to need full weights and said to be elementwise.
    """
    _declared.update(_said(elementwise, whole))


def needs_whole(
    optimizer: torch.optim.Optimizer,
    elementwise: Collection[type] = (),
    whole: Collection[type] = (),
    *,
    say: str = "pass {}",
) -> bool:
    """Whether an optimizer needs full weights, each by itself; else it is elementwise.

    Args:
        optimizer: of any class.
        elementwise: see declare_optimizers().
        whole: see declare_optimizers().
        say: how the user says a word.

    Raises:
        TypeError: neither is so, or nobody knows.
        ValueError: a word is wrong; see declare_optimizers().
    """
    of_class, said = type(optimizer), _declared | _said(elementwise, whole)
    if hasattr(optimizer, "is_whole"):  # offload.Offloaded has asked
        return bool(optimizer.is_whole)
    name, kind = of_class.__name__, known_kind(of_class)
    if kind in (None, Kind.ELEMENTS):
        kind = said.get(of_class, kind)
    if kind is None:
        words = (say.format(f"{word}=[{name}]") for word in ("elementwise", "whole"))
        raise TypeError(
            "an optimizer of weights that are split must update each weight by itself, and ringcomm"
            " does not know whether {} does: {} if its step treats each element of a weight by"
            " itself, as AdamW's does, or {} if it needs full weights, as Muon's does".format(
                name, *words
            )
        )
    reason = None if kind in (Kind.ELEMENTS, Kind.WEIGHTS) else kind.value
    if reason := reason or _misfit(optimizer):
        raise TypeError(
            "an optimizer of weights that are split must update each weight by itself, as AdamW and"
            f" Muon do, but {name} {reason}: use another optimizer, or DistributedDataParallel"
        )
    return kind is Kind.WEIGHTS


def known_kind(of_class: type) -> Kind | None:
    """What a class of the table acts on; None for another."""
    return _KINDS.get(f"{of_class.__module__.partition('.')[0]}.{of_class.__name__}")


def _said(elementwise: Collection[type], whole: Collection[type]) -> dict[type, Kind]:
    said: dict[type, Kind] = {}
    for word, classes in (("elementwise", elementwise), ("whole", whole)):
        kind = Kind.ELEMENTS if word == "elementwise" else Kind.WEIGHTS
        if isinstance(classes, type) or not all(isinstance(each, type) for each in classes):
            raise TypeError(f"{word}= must be a list of classes, such as [MyClass], got {classes}")
        for each in classes:
            known = known_kind(each) or kind
            if said.setdefault(each, kind) is not kind:
                raise ValueError(f"{each.__name__} is in elementwise= and in whole=: pass it once")
            if known not in (kind, Kind.ELEMENTS):
                raise ValueError(
                    f"{word}= names {each.__name__}, which {known.value}: leave it out"
                )
    return said


def attributes_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What the optimizer's class keeps beside groups and state."""
    own = vars(optimizer).items()
    return {key: value for key, value in own if not is_attribute_of_torch(key)}


def _misfit(optimizer: torch.optim.Optimizer) -> str | None:
    """What prevents copies of an optimizer that step on parts of its weights."""
    leaves = tree_leaves({**attributes_of(optimizer), "defaults": None})
    if any(isinstance(leaf, (Tensor, nn.Module, torch.optim.Optimizer)) for leaf in leaves):
        return "keeps tensors, a module or an optimizer outside of its groups and state"
    states = (value for state in optimizer.state.values() for value in state.values())
    if any(isinstance(value, Tensor) and value.is_meta for value in states):
        return "already has state on the meta device"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "is asked for a graph through its updates, by differentiable=True"
    return None
