"""What other libraries do with a sharded model: they save full weights, or raise."""

import pickle
from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import chain
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ringcomm.torch_names import APPLY, like_dtensor


def refuse_copy(*_: Any) -> NoReturn:
    """Raises RuntimeError: a copy would have a part of the weights, and no hooks."""
    raise RuntimeError(
        "sharded weights cannot be copied or pickled: copy the model before it is sharded, or load"
        " ringcomm.parallel.get_state_dict(model, full=True) into another one"
    )


def refuse_saving(value: Tensor, name: str, of: str = "model") -> None:
    """Makes a value of state_dict(), one rank's part, raise RuntimeError when a file is written.

    torch.save asks a tensor how to pickle it. safetensors and huggingface_hub ask for its storage,
    whether it is contiguous, or for its parts. torch.distributed.checkpoint asks for the storages
    of plain tensors only. copy.deepcopy() of the value works; a file of the copy raises, too. `of`:
    the arguments of get_state_dict() that save it.
    """

    def refuse(*_: Any, **__: Any) -> NoReturn:  # a function, which copies of the tensor share
        raise RuntimeError(
            f"{name} of this state_dict() is the part of one rank, which a file would have in place"
            f" of the whole: save ringcomm.parallel.get_state_dict({of}, full=True), or all ranks'"
            " parts with torch.distributed.checkpoint"
        )

    of_dtensors = "untyped_storage", "storage", "__tensor_flatten__"
    of_kind = of_dtensors if isinstance(value, DTensor) else ("is_contiguous",)
    for asked in ("__reduce_ex__", *of_kind):
        setattr(value, asked, refuse)


def _to_another_process(value: DTensor) -> Any:
    """Pickles a DTensor for a process of this machine, as async_save() does: without a refusal."""
    if "__reduce_ex__" in vars(value):
        value = like_dtensor(value, value.to_local())
    return value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


ForkingPickler.register(DTensor, _to_another_process)


def refuse_part(module: nn.Module, kind: type[Tensor] = Tensor) -> None:
    """As refuse_saving(), for all values of the kind in state_dict() of a module."""

    def after(module: nn.Module, values: Any, prefix: str, _: Any) -> None:
        tensors = chain(module.named_parameters(), module.named_buffers())
        own = {id(tensor) for _, tensor in tensors}  # keep_vars=True is asked for these
        for name, value in values.items():
            if name.startswith(prefix) and isinstance(value, kind) and id(value) not in own:
                refuse_saving(value, name)

    module.register_state_dict_post_hook(after)


def refuse_parts(model: nn.Module) -> None:
    """Refuses copies of a model's modules with DTensors, and files of their state_dict()."""
    for module in model.modules():
        if any(isinstance(param, DTensor) for param in module.parameters()):
            module.__deepcopy__ = module.__reduce_ex__ = refuse_copy  # type: ignore[assignment]
            refuse_part(module, DTensor)


def save_full(model: nn.Module, group: dist.ProcessGroup | None = None) -> Callable[[], None]:
    """Makes save_pretrained() of a model, or of the outermost modules that have it, write all.

    It becomes collective over the group, by default over all ranks, and the first rank writes the
    full weights; with state_dict= it stays as it was. Modules that are in such a model already are
    left alone. Returns a function that undoes it.
    """
    changed: list[nn.Module] = []
    waiting = [model]
    for module in waiting:
        save = getattr(type(module), "save_pretrained", None)
        if save is None:
            waiting += module.children()
        elif "save_pretrained" not in vars(module):
            bound: Any = module
            bound.save_pretrained = partial(_save_full, module, bound.save_pretrained, group)
            changed.append(module)

    def undo() -> None:
        for module in changed:
            vars(module).pop("save_pretrained", None)

    return undo


def _save_full(
    module: Any,
    save: Callable[..., Any],
    group: dist.ProcessGroup | None,
    *args: Any,
    state_dict: Any = None,
    **options: Any,
) -> Any:
    if state_dict is not None:
        return save(*args, state_dict=state_dict, **options)
    # By name: it is slow to import, and imports all systems.
    get_state_dict = import_module("ringcomm.parallel").get_state_dict
    full, _ = get_state_dict(module, full=True, rank0_only=True, group=group)
    try:
        if dist.get_rank(group) == 0:
            module.state_dict = lambda *_, **__: full
            return save(*args, **options)
    finally:
        vars(module).pop("state_dict", None)
        dist.barrier(group)
    return None


def refuse_moves(model: nn.Module) -> None:
    """Makes to(), half() and similar methods raise where they would change a weight or a buffer.

    Not on parts without weights, such as an activation, which several models may have.
    """
    for module in model.modules():
        if next(module.parameters(), None) is not None:
            setattr(module, APPLY, partial(_move_nothing, module))


def _move_nothing(
    module: nn.Module, move: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """Raises RuntimeError if `move` changes any kind of tensor that the module has.

    Freed weights, and those that hooks refer to, cannot be replaced.
    """
    tensors = (*module.parameters(recurse), *module.buffers(recurse))
    for dtype, device, dim in dict.fromkeys((x.dtype, x.device, x.dim()) for x in tensors):
        # Strides of tensors without elements, or of size 1, are those of any memory format.
        trial = torch.empty((2,) * dim, dtype=dtype, device=device)
        was_shared = trial.is_shared()
        if move(trial) is not trial or trial.is_shared() != was_shared:
            raise RuntimeError(
                "the weights are sharded, so to(), half() and similar calls cannot move or cast"
                " them: call these before zero.shard(stage=3). transformers'"
                " Trainer moves its model when it is made: make it first"
            )
    return module
