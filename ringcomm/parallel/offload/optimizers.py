"""Optimizers with states in host memory or in files: ZeRO-Offload's.

Ren et al. 2021 (arXiv 2101.06840, section 5.1) for the host, Rajbhandari et al. 2021 (arXiv
2104.07857, section 5.2) for files.
"""

import os
from collections.abc import Callable, Collection
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ringcomm.parallel.flat_collectives import local_of
from ringcomm.parallel.offload.piece_steps import PieceSteps, dtype_of
from ringcomm.parallel.offload.state_rows import (
    OffloadedStates,
    Operands,
    StateRows,
    StatesView,
    large_tensors,
    numbered_groups,
)
from ringcomm.parallel.offload.tiers import RowHandle, Tier, make_tier
from ringcomm.parallel.optimizer_classes import (
    attributes_of,
    drop_unstepped,
    new_state,
    over_groups,
    params_in,
    retire,
    takes_empty_groups,
)
from ringcomm.parallel.optimizer_kinds import needs_whole
from ringcomm.torch_names import mark_stepped, move_hooks, run_state_hooks, tree_map_only


class Offloaded(PieceSteps):
    """An optimizer of any class, with its states in host memory or in files.

        muon = offload.Offloaded(torch.optim.Muon(matrices), to="nvme", path="/mnt/nvme")
        adamw = offload.Offloaded(torch.optim.AdamW(others), to="nvme", path="/mnt/nvme")
        optimizer = zero.shard(model, [muon, adamw], stage=2)

    It works alone, under DistributedDataParallel, and with zero.shard() at any stage: it then has
    the states of this rank's shards, or of the weights that this rank owns. A step updates one
    weight at a time, or pieces of weights by classes that update each element by itself. It reads
    and writes each state once, while others are updated. In memory are the states of some pieces.
    16-bit weights have float32 masters, with which the class computes. torch's AdamW and SGD are
    updated by a kernel: AdamW reads and writes 8 bytes each per float32 weight, 12 per 16-bit one.
    Files are unnamed and deleted with the process: use state_dict() for checkpoints.

    The given optimizer's parameter groups are shared, so that schedulers made for it work. Its
    state and step hooks move here, and its methods raise afterwards.

    Attributes:
        tier: where the states are.
        steps: by parameter that has a state, the number of its updates.
        inner: a copy of the optimizer, without groups.
        is_whole: whether it updates full weights; else pieces of weights.

    Args:
        optimizer: of any class that updates each weight by itself.
        to: "cpu" or "nvme".
        path: for "nvme", a folder on the disk to use.
        chunk_elems: the maximum number of weights in a piece.
        elementwise, whole: see zero.shard().

    Raises:
        TypeError: the optimizer updates several weights together, is of a class that is neither
            known nor in `elementwise` or `whole`, or is offloaded or sharded.
        ValueError: it was given away before, or needs full weights of which this rank has shards;
            or an option is out of range, or a weight is not contiguous.
        OSError: no file can be created at the path.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        to: Literal["cpu", "nvme"] = "cpu",
        path: str | os.PathLike[str] | None = None,
        chunk_elems: int = 1 << 20,
        elementwise: Collection[type] = (),
        whole: Collection[type] = (),
    ) -> None:
        is_ours = hasattr(optimizer, "saved_states")  # as of zero.shard()
        if not isinstance(optimizer, torch.optim.Optimizer) or is_ours:
            raise TypeError(
                "offload.Offloaded() takes an optimizer that is neither offloaded nor sharded, got"
                f" {type(optimizer).__name__}"
            )
        if "state_dict" in vars(optimizer):  # see retire()
            raise ValueError(f"this {type(optimizer).__name__} was given to another optimizer")
        self.is_whole = needs_whole(optimizer, elementwise, whole)
        drop_unstepped(optimizer)
        params = params_in(optimizer.param_groups)
        if self.is_whole and any(isinstance(param, DTensor) for param in params):
            raise ValueError(
                f"{type(optimizer).__name__} needs full weights, and the model is already sharded:"
                " give offload.Offloaded() to zero.shard(), which shards a model itself"
            )
        torch.optim.Optimizer.__init__(self, optimizer.param_groups, {})
        self.defaults, self.to, self.path = optimizer.defaults, to, path
        self.given, self.inner = optimizer, over_groups(optimizer, [])
        self._chunk_elems, self._takes_empty = chunk_elems, takes_empty_groups(optimizer)
        self._begin()
        for param, state in optimizer.state.items():
            self.set_state_of(param, state)
        move_hooks(optimizer, self)
        retire(optimizer, "offload.Offloaded()")

    def _begin(
        self, tier: Tier | None = None, operands: Operands | None = None, first: int = 0
    ) -> None:
        """Starts without states. `first` is the number of the first parameter in the tier."""
        if self._chunk_elems < 1:
            raise ValueError(f"chunk_elems must be positive, got {self._chunk_elems}")
        self._note_groups()
        self.tier = tier or make_tier(self.to, self.path)
        self.steps: dict[Tensor, int] = {}
        self._rows = StateRows(self.tier, first)
        self._operands = operands or Operands()
        self._ahead: dict[tuple[int, int], RowHandle | None] = {}
        self._copied: dict[tuple[int, int], Any] = {}  # to the host: weight and gradient, events

    def _note_groups(self) -> None:
        groups = enumerate(self.param_groups)
        params = [(param, number) for number, group in groups for param in group["params"]]
        self._places = {param: (idx, number) for idx, (param, number) in enumerate(params)}
        for param in () if self.is_whole else self._places:
            if not local_of(param.detach()).is_contiguous():
                raise ValueError(
                    f"a weight of shape {tuple(param.shape)} is not contiguous: call contiguous()"
                    " on it first"
                )

    def over(
        self, groups: list[dict[str, Any]], operands: Operands, tier: Tier | None, first: int
    ) -> Any:
        """The same optimizer over other parameters, such as shards; by default in the same tier.

        This optimizer releases its tier and must not be used afterwards.
        """
        self.tier.close()
        made = object.__new__(type(self))
        vars(made).update(attributes_of(self))
        made.__setstate__({"param_groups": groups})
        made._begin(tier, operands, first)
        return made

    def __reduce_ex__(self, *_: Any) -> NoReturn:
        """Raises RuntimeError."""
        raise RuntimeError(
            "an offloaded optimizer cannot be copied or pickled: make another one, and load the"
            " state_dict() of this one"
        )

    __deepcopy__ = __reduce_ex__

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch."""
        super().add_param_group(param_group)
        if hasattr(self, "tier"):
            try:
                self._note_groups()
            except BaseException:
                self.param_groups.pop()
                self._note_groups()
                raise

    # ---- the step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters that have a gradient, piece by piece.

        While a piece is updated, the states of the next are read and those of the previous one are
        written.

        Raises:
            OSError: the file system failed. Some pieces of parameters have been updated and the
                optimizer can no longer be used: continue from a checkpoint.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.run("step", [*filter(self._operands.has_grad, self._places)])
        mark_stepped(self.given)  # for schedulers that were made for it
        return loss

    def train(self) -> None:
        """For schedule-free optimizers."""
        self.run("train", [*self._places])

    def eval(self) -> None:
        """For schedule-free optimizers."""
        self.run("eval", [*self._places])

    # ---- states

    def state_of(self, param: Tensor) -> dict[str, Any]:
        """A copy of a parameter's state in memory, as torch.optim keeps it; {} before a step.

        16-bit weights also have "master".
        """
        number, pieces = self._places[param][0], self._pieces(param)
        if param not in self.steps:
            return {}
        parts = [self._rows.copy((number, begin)) for begin, _ in pieces]
        if self.is_whole:
            return parts[0]
        shape, columns = self._operands.shape(param), zip(*map(large_tensors, parts), strict=True)
        joined = (torch.cat(column).view(shape) for column in columns)
        of_whole = tree_map_only(Tensor, lambda x: next(joined) if x.dim() else x, parts[0])
        return {**of_whole}

    def kept_of(self, param: Tensor) -> Any:
        """The object that describes a parameter's state; another one, once it is replaced."""
        return self._rows.kept.get((self._places[param][0], 0))

    def new_state_of(self, param: Tensor, weight: Tensor) -> dict[str, Any]:
        """The value of state_of() before the first step, for a parameter with values `weight`."""
        value = weight.detach().to("cpu", dtype_of(param), copy=True)
        group = self.param_groups[self._places[param][1]]
        state = new_state(self.inner, group, param, value.clone())
        return {**state, "master": value} if value.dtype != param.dtype else state

    @torch.no_grad()
    def set_state_of(self, param: Tensor, state: dict[str, Any]) -> None:
        """Takes a parameter's state; the inverse of state_of(). A master stays if it has none."""
        number, dtype = self._places[param][0], dtype_of(param)
        for begin, end in self._pieces(param):

            def cut(value: Tensor, place: slice = slice(begin, end)) -> Tensor:
                if not value.dim():
                    return value
                value = local_of(value).to(dtype if value.is_floating_point() else value.dtype)
                return value if self.is_whole else value.reshape(-1)[place]

            given = tree_map_only(Tensor, cut, {**state})
            old = self._rows.copy((number, begin))
            self._rows.kept.pop((number, begin), None)
            if dtype == param.dtype:
                given.pop("master", None)
            elif "master" in old:
                given.setdefault("master", old["master"])
            if given:
                self._rows.keep((number, begin), given)
        self.steps.pop(param, None)
        if state:
            self.steps[param] = 0 if state.keys() == {"master"} else 1

    @property
    def state(self) -> Any:
        """Copies of the states by parameter; read-only."""
        return StatesView(self.steps, self.state_of)

    @state.setter
    def state(self, states: Any) -> None:
        if states:
            raise AttributeError("`state` has copies: use load_state_dict() to replace states")

    @property
    def saved_states(self) -> OffloadedStates:
        """The states, for state dicts."""
        return OffloadedStates(self)

    def state_dict(self) -> Any:
        """torch's, with copies of all states in memory."""
        run_state_hooks(self, "state_dict_pre")
        states = {idx: self.state_of(param) for param, (idx, _) in self._places.items()}
        found = {
            "state": {idx: state for idx, state in states.items() if state},
            "param_groups": numbered_groups(self),
        }
        return run_state_hooks(self, "state_dict_post", found)

    @torch.inference_mode(False)  # updates must be able to write states
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state_dict() of torch's optimizer, or of this one.

        Raises ValueError, and nothing has been written: it is of other parameters.
        """
        state_dict = run_state_hooks(self, "load_state_dict_pre", {**state_dict})
        twin = over_groups(self.inner, [{**group} for group in self.param_groups])
        torch.optim.Optimizer.load_state_dict(twin, {**state_dict, "state": {}})
        # torch.distributed.checkpoint has names for numbers.
        keys = params_in(state_dict["param_groups"])
        for param, key in zip(self._places, keys, strict=True):
            for name, value in {} if self.is_whole else state_dict["state"].get(key, {}).items():
                size = self._operands.shape(param).numel()
                if isinstance(value, Tensor) and value.dim() and local_of(value).numel() != size:
                    raise ValueError(
                        f"{name} of parameter {key} has {local_of(value).numel()} elements, but the"
                        f" parameter has {size}"
                    )
        for group, loaded in zip(self.param_groups, twin.param_groups, strict=True):
            group.update(loaded)  # schedulers may share the dict
        for param, key in zip(self._places, keys, strict=True):
            self.set_state_of(param, state_dict["state"].get(key, {}))
        run_state_hooks(self, "load_state_dict_post")

    def close(self) -> None:
        """Releases memory and files; the optimizer must not be used afterwards."""
        self.tier.close()
