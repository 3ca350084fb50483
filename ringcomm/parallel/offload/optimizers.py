"""AdamW and SGD with state in host memory or in files: ZeRO-Offload's optimizer.

Ren et al. 2021 (arXiv 2101.06840, section 5.1) for the host, Rajbhandari et al. 2021 (arXiv
2104.07857, section 5.2) for files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count, zip_longest
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ringcomm import ops
from ringcomm.ops.updates.fused_update import Rule, rule_of
from ringcomm.parallel.flat_collectives import local_of
from ringcomm.parallel.offload.tiers import Loan, Tier, make_tier, split_row
from ringcomm.parallel.offload.transfers import BufferPool


class Operands:
    """Access to a parameter and its gradient; subclasses store them elsewhere."""

    def shape(self, param: Tensor) -> torch.Size:
        """The shape of this rank's part of a parameter."""
        return local_of(param).shape

    def has_grad(self, param: Tensor) -> bool:
        """Whether a parameter has a gradient. Raises ValueError for a sparse gradient."""
        if param.grad is not None and param.grad.is_sparse:
            raise ValueError("gradients must be dense: make the embedding with sparse=False")
        return param.grad is not None

    def start(self, param: Tensor) -> None:
        """Called ahead of get()."""

    def get(self, param: Tensor) -> tuple[Tensor, Tensor | None]:
        """The weights, to be written in place, and their gradient if there is one."""
        grad = None if param.grad is None else local_of(param.grad.detach())
        return local_of(param.detach()), grad

    def done(self, param: Tensor) -> None:
        """Called after the last get() of a step."""


class StatesView(Mapping[Any, dict[str, Any]]):
    """Copies of offloaded states by parameter, made on lookup; {} before the first update."""

    def __init__(self, stepped: Iterable[Any], state_of: Callable[[Any], dict[str, Any]]) -> None:
        self._stepped, self._state_of = list(stepped), state_of

    def __getitem__(self, param: Any) -> dict[str, Any]:
        """A copy: use load_state_dict() to replace it."""
        return self._state_of(param)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._stepped)

    def __len__(self) -> int:
        return len(self._stepped)


def numbered_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The parameter groups as in torch's state_dict()."""
    number, groups = count(), optimizer.param_groups
    return [{**group, "params": [next(number) for _ in group["params"]]} for group in groups]


class _Chunk(NamedTuple):
    """A part of a parameter; its states, `names`, are one row."""

    param: Tensor
    rule: Rule
    names: list[str]
    begin: int
    end: int
    key: str
    step: int


class OffloadedOptimizer(torch.optim.Optimizer):
    """The base of optimizers with states in a tier.

    Attributes:
        to, path: as given.
        tier: where the states are.
        steps: by parameter that has a state, the number of its updates.
        counts: by group, the options that the class changes in a step.
        is_whole: whether each parameter is updated as a whole, by itself.
    """

    to: Literal["cpu", "nvme"]
    path: Any
    tier: Tier
    steps: dict[Tensor, int]
    counts: list[dict[str, Any]]
    is_whole = False

    def _begin(
        self, tier: Tier | None = None, operands: Operands | None = None, first: int = 0
    ) -> None:
        """Starts without states. `first` is the number of the first parameter in the tier."""
        self.tier = tier or make_tier(self.to, self.path, keep=False, pool=BufferPool())
        self.steps, self.counts = {}, [{} for _ in self.param_groups]
        self._operands, self._first = operands or Operands(), first

    def over(
        self, groups: list[dict[str, Any]], operands: Operands, tier: Tier | None, first: int
    ) -> Any:
        """The same optimizer over other parameters, such as shards; by default in the same tier.

        This optimizer releases its tier and must not be used afterwards.
        """
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters that have a gradient.

        While one part is updated, the next is read and the previous one is written.

        Raises:
            OSError: the file system failed. Some parts of parameters have been updated and the
                optimizer can no longer be used: continue from a checkpoint.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.run("step", [*filter(self._operands.has_grad, self._places())])
        return loss

    def run(
        self,
        method: str,
        params: Sequence[Tensor],
        grad_scale: float = 1.0,
        before: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        """A method of the class on some parameters, with gradients multiplied by a factor.

        `before` has the options of the groups at the beginning of a step of several calls.
        """
        raise NotImplementedError

    def state_of(self, param: Tensor) -> dict[str, Any]:
        """A copy of a parameter's state in memory, as torch.optim keeps it; {} before a step.

        16-bit weights also have "master".
        """
        raise NotImplementedError

    def set_state_of(self, param: Tensor, state: dict[str, Any]) -> None:
        """Takes a parameter's state; the inverse of state_of()."""
        raise NotImplementedError

    def saved_of(self, param: Tensor) -> Any:
        """What is not in the tier of a parameter's state, for JSON."""
        return self.steps.get(param)

    def restore(self, param: Tensor, saved: Any) -> None:
        """Takes what saved_of() returned, not None, for a state in the tier."""
        self.steps[param] = saved

    def saved_counts(self) -> Any:
        """What the class has changed in its groups, for JSON."""
        return []

    def restore_counts(self, saved: Any) -> None:
        """Takes what saved_counts() returned."""

    def _places(self) -> dict[Tensor, tuple[int, dict[str, Any]]]:
        """By parameter, its number and its group."""
        params = ((param, group) for group in self.param_groups for param in group["params"])
        return {param: (idx, group) for idx, (param, group) in enumerate(params)}

    @property
    def state(self) -> Any:
        """Copies of the states by parameter; read-only."""
        return StatesView(self.steps, self.state_of)

    @state.setter
    def state(self, states: Any) -> None:
        if states:
            raise AttributeError("`state` has copies: use load_state_dict() to replace states")

    def state_dict(self) -> dict[str, Any]:
        """torch's, with copies of all states in memory."""
        states = {idx: self.state_of(param) for param, (idx, _) in self._places().items()}
        return {
            "state": {idx: state for idx, state in states.items() if state},
            "param_groups": numbered_groups(self),
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state_dict() of torch's optimizer, or of this one."""
        groups = self.param_groups
        super().load_state_dict({**state_dict, "state": {}})
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.update(loaded)
        self.param_groups = groups  # which schedulers may share
        for param, (idx, _) in self._places().items():
            self.set_state_of(param, state_dict["state"].get(idx, {}))

    def close(self) -> None:
        """Releases memory and files; the optimizer must not be used afterwards."""
        self.tier.close()


class _Chunked(OffloadedOptimizer):
    """Updates parts of parameters by the kernels of ringcomm.ops."""

    def __init__(
        self,
        params: Any,
        *args: Any,
        to: Literal["cpu", "nvme"] = "cpu",
        path: str | os.PathLike[str] | None = None,
        chunk_elems: int = 1 << 20,
        **options: Any,
    ) -> None:
        if options.get("fused"):  # GradScaler would expect such an optimizer to unscale gradients
            raise ValueError("fused is not supported with offloaded state")
        super().__init__(params, *args, **options)
        if chunk_elems < 1:
            raise ValueError(f"chunk_elems must be positive, got {chunk_elems}")
        for group in self.param_groups:
            self._check_group(group)
        self.to, self.path, self._chunk_elems = to, path, chunk_elems
        self._begin()

    def _check_group(self, group: dict[str, Any]) -> None:
        _rule_of(self, group)
        for param in group["params"]:
            local = local_of(param.detach())
            if local.dtype not in (torch.float32, torch.float16, torch.bfloat16):
                raise ValueError(f"weights must be float32, float16 or bfloat16, got {local.dtype}")
            if not local.is_contiguous():
                raise ValueError(
                    f"a weight of shape {tuple(param.shape)} is not contiguous: call contiguous()"
                    " on it first"
                )

    def over(
        self, groups: list[dict[str, Any]], operands: Operands, tier: Tier | None, first: int
    ) -> _Chunked:
        """See OffloadedOptimizer."""
        self.tier.close()
        made = type(self)(groups, chunk_elems=self._chunk_elems)
        made.to, made.path = self.to, self.path
        made._begin(tier, operands, first)
        return made

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch."""
        super().add_param_group(param_group)
        if hasattr(self, "tier"):
            self._check_group(self.param_groups[-1])

    @torch.no_grad()
    def run(
        self,
        method: str,
        params: Sequence[Tensor],
        grad_scale: float = 1.0,
        before: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        """See OffloadedOptimizer."""
        places = self._places()
        steps = {param: self.steps.get(param, 0) + 1 for param in params}
        chunks = [
            chunk
            for param, step in steps.items()
            for chunk in self._chunks_of(param, *places[param], step)
        ]
        ahead: Loan | None = None
        for chunk, following in zip_longest(chunks, chunks[1:]):
            loan = ahead or self._start(chunk)
            ahead = None if following is None else self._start(following)
            self._update(chunk, split_row(loan.wait(), chunk.names), grad_scale)
            self.tier.give_back(loan, is_written=True)
            if following is None or following.param is not chunk.param:
                self._operands.done(chunk.param)
        self.steps |= steps

    def _start(self, chunk: _Chunk) -> Loan:
        if chunk.begin == 0:
            self._operands.start(chunk.param)
        return self._fetch(chunk)

    def _chunks_of(
        self, param: Tensor, idx: int, group: dict[str, Any], step: int
    ) -> Iterator[_Chunk]:
        num_elems, rule = self._operands.shape(param).numel(), _rule_of(self, group)
        names = _state_names(rule, param)
        for begin in range(0, num_elems, self._chunk_elems):
            end = min(begin + self._chunk_elems, num_elems)
            yield _Chunk(param, rule, names, begin, end, f"state.{self._first + idx}.{begin}", step)

    def _fetch(self, chunk: _Chunk) -> Loan:
        if chunk.key in self.tier:
            return self.tier.fetch(chunk.key)
        num_elems = (chunk.end - chunk.begin) * len(chunk.names)
        loan = self.tier.new(chunk.key, num_elems, torch.float32)
        loan.wait().zero_()
        return loan

    def _update(self, chunk: _Chunk, state: dict[str, Tensor], grad_scale: float) -> None:
        whole, grads = self._operands.get(chunk.param)
        assert grads is not None
        weights = whole.view(-1)[chunk.begin : chunk.end]
        on_host = weights.to("cpu")
        grad = grads.reshape(-1)[chunk.begin : chunk.end].to("cpu")
        master = state.get("master")
        if master is not None:
            # All rows are new at the first step, later only those that load_state_dict() has
            # replaced.
            is_written = master.to(on_host.dtype) != on_host
            if is_written.any():
                master[is_written] = on_host[is_written].float()
        ops.optimizer_update_(
            on_host, grad, state, optimizer=chunk.rule, step=chunk.step, grad_scale=grad_scale
        )
        if on_host is not weights:
            weights.copy_(on_host)

    def state_of(self, param: Tensor) -> dict[str, Any]:
        """See OffloadedOptimizer."""
        step = self.steps.get(param)
        if step is None:
            return {}
        state = self.new_state_of(param)
        for chunk in self._chunks_of(param, *self._places()[param], step):
            with self.tier.row(chunk.key) as row:
                for name, part in split_row(row, chunk.names).items():
                    state[name].view(-1)[chunk.begin : chunk.end] = part
        if step == 0:
            return {"master": state["master"]} if "master" in state else {}
        if "step" in state:
            state["step"].fill_(step)
        return state

    def new_state_of(self, param: Tensor, weight: Tensor | None = None) -> dict[str, Any]:
        """The value of state_of() before the first step, for a parameter with values `weight`."""
        shape = self._operands.shape(param)
        names = _state_names(_rule_of(self, self._places()[param][1]), param)
        on_host = partial(torch.zeros, dtype=torch.float32, device="cpu")
        state: dict[str, Any] = {name: on_host(shape) for name in names}
        if "master" in state and weight is not None:
            state["master"] = weight.detach().float().reshape(shape)
        if isinstance(self, torch.optim.AdamW):
            state["step"] = on_host([])
        return state

    def set_state_of(self, param: Tensor, state: dict[str, Any]) -> None:
        """See OffloadedOptimizer."""
        if not state:
            self.steps.pop(param, None)
            return
        # SGD has no step count: it only matters whether there was a step.
        step = int(state.get("step", 0 if state.keys() == {"master"} else 1))
        for chunk in self._chunks_of(param, *self._places()[param], step):
            loan = self._fetch(chunk)
            row = split_row(loan.wait(), chunk.names)
            for name in row.keys() & state.keys():
                row[name].copy_(local_of(state[name]).reshape(-1)[chunk.begin : chunk.end])
            self.tier.give_back(loan, is_written=True)
        self.steps[param] = step


class AdamW(_Chunked, torch.optim.AdamW):
    """torch.optim.AdamW with exp_avg and exp_avg_sq in host memory, or in files.

        optimizer = offload.AdamW(model.parameters(), lr=1e-3, to="nvme", path="/mnt/nvme")

    It also works with zero.shard(), at any stage: it then has the states of this rank's shards. A
    step reads and writes each state once, by chunks: 8 bytes each way per float32 weight, 12 per
    16-bit weight, which includes its fp32 master. State in files needs three chunks of memory. The
    files are unnamed and deleted with the process: use state_dict() for checkpoints.

    Args:
        params, *args, **options: as in torch, except amsgrad and similar options; weights must be
            contiguous, and float32, float16 or bfloat16.
        to: "cpu" or "nvme".
        path: for "nvme", a folder on the disk to use.
        chunk_elems: the number of weights that are updated at a time.

    Raises:
        ValueError: an option is out of range, or a weight is not supported.
        OSError: no file can be created at the path.
    """


class SGD(_Chunked, torch.optim.SGD):
    """torch.optim.SGD with its momentum in host memory, or in files; see AdamW."""


def _state_names(rule: Rule, param: Tensor) -> list[str]:
    return [*rule.state_names, *(["master"] if param.dtype != torch.float32 else [])]


def _rule_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Rule:
    for name in ("maximize", "amsgrad", "differentiable", "capturable"):
        if group.get(name):
            raise ValueError(f"{name} is not supported with offloaded state")
    rule = rule_of(optimizer, {**group, "lr": float(group["lr"])})
    assert rule is not None
    return rule
