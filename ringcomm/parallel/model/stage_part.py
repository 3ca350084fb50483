"""A rank's blocks of a pipeline, as a module that knows which ranks have the others."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch.distributed as dist
from torch import nn

from ringcomm.parallel.model.saving import refuse_copy, refuse_part
from ringcomm.parallel.tensor.splits import tensor_groups_of
from ringcomm.parallel.torch_checks import register_part

_part_of_block: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[StagePart]]" = (
    weakref.WeakKeyDictionary()
)


class StagePart(nn.Module):
    """This rank's blocks of a pipeline, under their names in the whole model.

    Calls, copies, and names that only the whole model has raise an error. It is made from the
    pipeline's ranks and all blocks of the model, including those of other ranks.

    Attributes:
        tied: the parameters that other ranks of the pipeline have too, with all their ranks.
        num_stages: on this rank.
        late: the parameters whose gradients are complete only when Pipeline.step() returns: tied
            ones, and all of them if the schedule splits backward passes, because torch adds the
            gradients of weights itself then.
        after_backward: called after each backward pass of a stage, in the same order on all
            data-parallel ranks.
        first_names: for a parameter's name here, its name in the first block of the model that has
            it.
        names_of_tied: of each parameter that several blocks of the model have, its names in them.
    """

    __deepcopy__ = __reduce_ex__ = refuse_copy

    def __init__(self, group: dist.ProcessGroup, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.group = group
        register_part(self)
        if group.size() > 1:
            refuse_part(self)
        self.tensor_groups = tensor_groups_of(blocks)
        self.tied: dict[nn.Parameter, list[int]] = {}
        self.num_stages = 1
        self.late: set[nn.Parameter] = set()
        self.after_backward: list[Callable[[], None]] = []
        self.first_names: dict[str, str] = {}
        self.names_of_tied: list[list[str]] = []

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        """Raises RuntimeError."""
        raise RuntimeError(
            "the module of a Pipeline cannot be called: it has only this rank's blocks. Call"
            " step(), evaluate() or forward() of the Pipeline, or step() or evaluate() of what"
            " parallelize() returned"
        )

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError with the reason for what only the whole model has."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(
                f"the module of a Pipeline has no {name!r}: it has only this rank's blocks. For"
                " training and evaluation, call methods of the Pipeline. For anything else, such"
                " as generate(), load ringcomm.parallel.get_state_dict(..., full=True) into a whole"
                " model"
            ) from None

    def own(self, blocks: Iterable[nn.Module]) -> None:
        """Marks this rank's blocks, so that axes_of() for a subset raises."""
        for block in blocks:
            _part_of_block[block] = weakref.ref(self)

    def is_counted_elsewhere(self, param: nn.Parameter) -> bool:
        """Whether an earlier rank of the pipeline has the same parameter."""
        return param in self.tied and self.tied[param][0] != self.group.rank()


def has_several_stages(model: nn.Module | None) -> bool:
    """Whether a model is a rank's stages of a pipeline, which have a backward pass each."""
    return isinstance(model, StagePart) and model.num_stages > 1


def stage_part_of(model: nn.Module) -> StagePart | None:
    """The model's blocks of a pipeline.

    Raises ValueError for a piece of a pipeline whose other stages are on other ranks.
    """
    modules = list(model.modules())
    if found := next((module for module in modules if isinstance(module, StagePart)), None):
        return found
    owners = (_part_of_block[module]() for module in modules if module in _part_of_block)
    if any(part is not None and part.group.size() > 1 for part in owners):
        raise ValueError(
            f"this {type(model).__name__} has blocks of a Pipeline with stages on other ranks:"
            " pass the Pipeline"
        )
    return None
