"""Runs steps: splits batches, makes torch's stages for their shapes, and hands out the loss."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcomm.errors import RingcommError
from ringcomm.parallel.flat_collectives import check_agreement, device_of
from ringcomm.parallel.pipeline.schedules import Plan
from ringcomm.parallel.pipeline.shapes import Specs, TensorSpec, find_boundaries
from ringcomm.parallel.pipeline.stage import Log, Stage
from ringcomm.torch_names import all_gather_single

__all__ = ["Runner", "forward_only"]

Inputs = Tensor | tuple[Tensor, ...]

# So many shapes of inputs have stages ready; the one not used for longest goes first.
MAX_SHAPES = 8


class _Made(NamedTuple):
    """What there is for inputs of one shape."""

    boundaries: list[Specs]
    stages: list[Stage]
    schedule: Any
    trained: list[bool]  # this rank's weights


class Runner:
    """This rank's stages at work. Arguments are those of Pipeline, which has checked them."""

    def __init__(
        self,
        plan: Plan,
        modules: Mapping[int, nn.Module],
        loss_fn: Callable[[Any, Tensor], Tensor],
        is_mean: bool,
        group: dist.ProcessGroup,
        device: torch.device,
        wrapped: Mapping[int, nn.Module],
        recompute: bool,
    ) -> None:
        self._plan = plan
        self._modules = modules
        self._wrapped = wrapped
        self._recompute = recompute
        self._loss_fn = loss_fn
        self._divisor = plan.num_microbatches if is_mean else 1
        self._group = group
        self._device = device
        self._made: OrderedDict[Any, _Made] = OrderedDict()
        self._has_run = False
        self._loss_scale = 1.0
        self._losses: list[Tensor] = []  # of this step's micro-batches

    @property
    def _has_first(self) -> bool:
        return 0 in self._modules

    @property
    def _has_last(self) -> bool:
        return self._plan.num_stages - 1 in self._modules

    # ---- a step

    def step(self, inputs: Inputs, target: Tensor, loss_scale: float, log: Log | None) -> Tensor:
        """As Pipeline.step()."""
        if not torch.is_grad_enabled():
            raise RuntimeError("step() under torch.no_grad() has no gradients: call evaluate()")
        batch, made = self._prepared(inputs, target)
        self._guarded(self._check_trained, made)
        for stage in made.stages:
            stage.log = log
        self._loss_scale = loss_scale
        self._losses = []
        args = [value.to(self._device) for value in batch] if self._has_first else []
        options: dict[str, Any] = {"target": target.to(self._device)} if self._has_last else {}
        self._guarded(made.schedule.step, *args, **options, return_outputs=False)
        return self._shared_loss()

    def _guarded(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Other ranks shall not wait for what a failed one does not send."""
        try:
            return call(*args, **kwargs)
        except RingcommError:
            raise
        except Exception:
            self._group.abort()
            raise

    def _check_trained(self, made: _Made) -> None:
        if self._trained() != made.trained:
            raise ValueError(
                "weights were frozen, thawed or added after the first step, when stages agreed on"
                " who gets gradients: make a new Pipeline of the same blocks"
            )

    def _trained(self) -> list[bool]:
        modules = self._modules.values()
        return [param.requires_grad for module in modules for param in module.parameters()]

    def _loss_of(self, output: Any, target: Tensor) -> Tensor:
        loss = self._loss_fn(output, target)
        if loss.dim() != 0:
            raise ValueError(
                f"loss_fn returns a tensor without dimensions, got {tuple(loss.shape)}: is it"
                ' reduction="none"?'
            )
        self._losses.append(loss.detach())
        return loss / self._divisor * self._loss_scale

    def _shared_loss(self) -> Tensor:
        total = torch.zeros((), device=self._device)
        losses, self._losses = self._losses, []
        if self._has_last:
            total += torch.stack(losses).float().sum() / self._divisor
        owner = self._plan.rank_of(self._plan.num_stages - 1)
        dist.broadcast(total, group=self._group, group_src=owner)
        return total

    # ---- preparation

    def _checked(self, inputs: Inputs, target: Tensor) -> tuple[Tensor, ...]:
        batch = inputs if isinstance(inputs, tuple) else (inputs,)
        num = self._plan.num_microbatches
        for name, value in (*(("inputs", x) for x in batch), ("target", target)):
            if not isinstance(value, Tensor):
                raise TypeError(f"{name} are tensors, got a {type(value).__name__}")
            num_rows = value.shape[0] if value.dim() else 0
            if num_rows == 0 or num_rows % num:
                below = num_rows - num_rows % num
                fit = f"{below} or {below + num}" if below else f"{num}"
                raise ValueError(
                    f"{num_rows} rows of {name} do not divide into {num} micro-batches: take {fit}"
                    " rows, or another num_microbatches"
                )
            if value.shape[0] != batch[0].shape[0]:
                raise ValueError(
                    f"the {name} have {num_rows} rows, and the inputs {batch[0].shape[0]}"
                )
        return batch

    def _prepared(self, inputs: Inputs, target: Tensor) -> tuple[tuple[Tensor, ...], _Made]:
        """The inputs, and the stages for them.

        Raises:
            TypeError, ValueError: they do not fit, on this rank or another. On all ranks, since the
                others would wait for messages.
        """
        num = self._plan.num_microbatches
        kind = self._device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        batch: tuple[Tensor, ...] = ()
        specs: Specs = ()
        problem: Exception | None = None
        try:
            batch = self._checked(inputs, target)
            specs = tuple(
                TensorSpec((x.shape[0] // num, *x.shape[1:]), x.dtype, False) for x in batch
            )
        except (TypeError, ValueError) as error:
            problem = error
        shown = ", ".join(map(str, specs)) if problem is None else f"a {type(problem).__name__}"
        key = (shown, autocast)
        if not self._is_alike(key):
            try:
                check_agreement(
                    {"inputs of a micro-batch": shown, "autocast": autocast}, self._group
                )
            except ValueError as error:
                raise problem or error from None
        if problem is not None:
            raise problem
        if key not in self._made:
            self._made[key] = self._make(specs)
            if len(self._made) > MAX_SHAPES:
                self._made.popitem(last=False)
        self._made.move_to_end(key)
        return batch, self._made[key]

    def _is_alike(self, key: Any) -> bool:
        """Whether all ranks have the same; 8 bytes from each."""
        device, num_ranks = device_of(self._group), self._group.size()
        mine = torch.tensor([zlib.crc32(repr(key).encode())], device=device)
        digests = mine.new_empty(num_ranks)
        all_gather_single(digests, mine, group=self._group)
        return len(set(digests.tolist())) == 1

    def _make(self, specs: Specs) -> _Made:
        plan = self._plan
        boundaries = find_boundaries(
            *(plan, self._modules, specs, self._device, self._group), computes=not self._has_run
        )
        self._has_run = True
        stages = [
            Stage(
                module,
                idx,
                plan.num_stages,
                self._device,
                self._group,
                boundaries[idx],
                boundaries[idx + 1],
                self._recompute,
            )
            for idx, module in self._wrapped.items()
        ]
        last = stages[-1]
        schedule = plan.start(stages, lambda *args: last.extend_forward(self._loss_of, *args))
        return _Made(boundaries, stages, schedule, self._trained())

    # ---- without gradients

    @torch.no_grad()
    def evaluate(self, inputs: Inputs, target: Tensor) -> Tensor:
        """As Pipeline.evaluate(): all micro-batches through a stage, then through the next."""
        batch, made = self._prepared(inputs, target)
        boundaries = made.boundaries
        num = self._plan.num_microbatches
        chunks = [x.to(self._device).chunk(num) for x in batch] if self._has_first else []
        first = list(zip(*chunks, strict=True))
        outputs = self._guarded(
            forward_only, self._plan, self._modules, boundaries, first, self._group, self._device
        )
        self._losses = []
        if self._has_last:
            for output, wanted in zip(outputs, target.to(self._device).chunk(num), strict=True):
                self._guarded(self._loss_of, output, wanted)
        return self._shared_loss()


def forward_only(
    plan: Plan,
    modules: Mapping[int, nn.Module],
    boundaries: Sequence[Specs],
    inputs: Sequence[tuple[Tensor, ...]],
    group: dist.ProcessGroup,
    device: torch.device,
) -> list[Any]:
    """What the last stage returns for each micro-batch; what is last on this rank, elsewhere.

    Modules are this rank's, by stage, in the order of the model; boundaries what each stage takes;
    inputs those of the first stage, by micro-batch, where it is. Collective: sends and receives.
    """
    sent: list[dist.Work | None] = []
    outputs: list[Any] = list(inputs)
    for stage, module in modules.items():
        values, outputs = outputs, []
        is_local = stage == 0 or stage - 1 in modules
        for micro_batch in range(plan.num_microbatches):
            if is_local:
                value = values[micro_batch]
            else:
                source = plan.rank_of(stage - 1)
                value = tuple(spec.like(device).detach() for spec in boundaries[stage])
                for tensor in value:
                    dist.recv(tensor, group=group, group_src=source)
            result = module(*(value if isinstance(value, tuple) else (value,)))
            outputs.append(result)
            if stage + 1 < plan.num_stages and stage + 1 not in modules:
                target = plan.rank_of(stage + 1)
                for tensor in result if isinstance(result, tuple) else (result,):
                    sent.append(dist.isend(tensor, group=group, group_dst=target))
    for work in sent:
        if work is not None:
            work.wait()
    return outputs
