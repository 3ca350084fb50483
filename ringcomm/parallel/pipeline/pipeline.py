"""A model in stages on several ranks, trained as if it were whole."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ringcomm._renamed import object_getattr
from ringcomm.backend import resolve_group
from ringcomm.parallel.flat_collectives import check_agreement
from ringcomm.parallel.model_axes import StagePart
from ringcomm.parallel.pipeline.blocks import (
    Blocks,
    StageModule,
    add_blocks,
    cut,
    default_costs,
    named_blocks,
)
from ringcomm.parallel.pipeline.running import Runner
from ringcomm.parallel.pipeline.schedules import make_plan
from ringcomm.parallel.pipeline.stage import Log
from ringcomm.parallel.pipeline.tied import TiedWeights, find_tied
from ringcomm.parallel.pipeline.timeline import Action, Timeline
from ringcomm.parallel.shards.units import check_can_materialize, materialize

__all__ = ["Pipeline"]

Loss = Callable[[Any, Tensor], Tensor]


class Pipeline:
    """Cuts a model into stages, keeps this rank's, and runs micro-batches through all of them.

        pipe = pipeline.Pipeline(model, nn.functional.cross_entropy, num_microbatches=8)
        optimizer = torch.optim.AdamW(pipe.parameters())
        for x, target in batches:
            loss = pipe.step(x, target)
            optimizer.step()
            optimizer.zero_grad()

    Each stage's gradients are those of one process that runs the same micro-batches one after the
    other. A boundary between stages on different ranks carries its activations forward and their
    gradients back: 2 m b s h elements a step for m micro-batches of b s h each.

    Args:
        blocks: modules that make the model when they are called in turn: an nn.Sequential, a list,
            or a dict by name ({"embed": ..., "layers.0": ...}: the names in checkpoints). The same
            on all ranks. A tuple that one returns is the arguments of the next. Blocks may be on
            the meta device; this rank's then get memory, and values by reset_parameters(). A
            parameter that several blocks share stays one: where they are on several ranks, its
            gradients are summed over these, and values start from the first.
        loss_fn: of the last block's output and a micro-batch of the target; a tensor without
            dimensions.
        schedule: "gpipe", "1f1b", "interleaved" (1F1B with several stages per rank), "zero-bubble"
            (1F1B whose backward is done in halves: ZB-H1 and its interleaved form), or "zbv"
            (ZB-V). The last two have backwards in halves: gradients of inputs first, for which the
            stage before waits, and of weights later.
        num_microbatches: what a batch is cut into, along its first dimension.
        group: of the pipeline's ranks; None for the default group.
        num_stages_per_rank: default 2 for "interleaved" and "zbv", otherwise 1.
        costs: of each block, for the cut: times of a forward, say. Default: numbers of parameters,
            without tables of embeddings. See `pipeline.cut`.
        recompute: keep the inputs of blocks only, and compute the rest again in the backward, of
            which the halves are then done together.
        loss_reduction: "mean" if loss_fn is a mean over rows, "sum" if it is a sum.
        device: of the stages; default: that of the blocks, the CPU for those on the meta device.
        wrap: makes of each stage what data parallelism wants, say
            `lambda stage: DistributedDataParallel(stage, process_group=dp_group)`, which is not for
            backwards in halves.

    Attributes:
        module: this rank's blocks under their names in the whole model.
        plan: the schedule, and who computes what in which order.
        stages: for each stage of the model its blocks' names.
        group, device, tied: as resolved.

    Raises:
        TypeError: blocks are no modules.
        ValueError: there are fewer blocks than stages, the schedule does not come with these
            numbers, a block on the meta device cannot make values, ranks disagree, or `wrap` made
            what the schedule does not work with.

    Collective: one object; values of shared parameters.
    """

    def __init__(
        self,
        blocks: Blocks,
        loss_fn: Loss,
        schedule: str = "1f1b",
        num_microbatches: int = 8,
        *,
        group: dist.ProcessGroup | None = None,
        num_stages_per_rank: int | None = None,
        costs: Sequence[float] | None = None,
        recompute: bool = False,
        loss_reduction: str = "mean",
        device: torch.device | str | None = None,
        wrap: Callable[[nn.Module], nn.Module] | None = None,
    ) -> None:
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f'loss_reduction is "mean" or "sum", got {loss_reduction!r}')
        named = named_blocks(blocks)
        self.group = resolve_group(group)
        rank, num_ranks = self.group.rank(), self.group.size()
        self.plan = make_plan(schedule, num_ranks, num_microbatches, num_stages_per_rank)
        if costs is not None and len(costs) != len(named):
            raise ValueError(f"costs are of each block: {len(costs)} for {len(named)} blocks")
        found = default_costs(list(named.values())) if costs is None else costs
        names = list(named)
        self.stages = [
            [names[idx] for idx in blocks_of] for blocks_of in cut(found, self.plan.num_stages)
        ]
        names_of = [
            [name for stage in self.plan.stages_of(r) for name in self.stages[stage]]
            for r in range(num_ranks)
        ]
        self._own = {name: named[name] for name in names_of[rank]}
        self.module = StagePart(self.group, named.values())
        add_blocks(self.module, self._own)
        first: dict[nn.Parameter, str] = {}
        for name, block in named.items():
            for inside, param in block.named_parameters():
                first.setdefault(param, f"{name}.{inside}")
        self.module.first_names = {n: first[p] for n, p in self.module.named_parameters()}
        problem = _problem_of(self.module)
        shapes = [[tuple(p.shape) for p in block.parameters()] for block in named.values()]
        options = (schedule, num_microbatches, self.plan.stages_per_rank, recompute, loss_reduction)
        check_agreement(
            {
                "options": options,
                "stages": self.stages,
                "parameters' shapes": shapes,
                "state of their blocks": problem,
            },
            self.group,
        )
        if problem != "ready":
            raise ValueError(problem)
        made = [p.device for p in self.module.parameters() if not p.is_meta]
        self.device = torch.device(device or (made[0] if made else "cpu"))
        materialize(self.module, list(self.module.parameters()), self.device)
        self.module.to(self.device)
        tied = find_tied([[named[name] for name in own] for own in names_of], rank)
        self.tied = TiedWeights(tied, self.group)
        self.tied.copy_from_first()
        self._given = weakref.ref(blocks) if isinstance(blocks, nn.Module) else None
        modules = {
            stage: StageModule([self._own[name] for name in self.stages[stage]], recompute)
            for stage in self.plan.stages_of(rank)
        }
        name_of = {param: name for name, param in self.module.named_parameters()}
        wrapped = modules if wrap is None else {s: wrap(m) for s, m in modules.items()}
        new = dict(self.module.named_parameters())
        self.tied.replace({param: new[name] for param, name in name_of.items()})
        self.module.own(self._own.values(), self.tied.params, self.tied.is_counted_elsewhere)
        self._check_wrapped(wrapped.values())
        self._runner = Runner(
            self.plan,
            modules,
            loss_fn,
            loss_reduction == "mean",
            self.group,
            self.device,
            wrapped,
            recompute,
        )
        self._log: Log = []

    def _check_wrapped(self, modules: Iterable[nn.Module]) -> None:
        has_halves = any(work.kind == "W" for order in self.plan.orders for work in order)
        if has_halves and any(isinstance(m, DistributedDataParallel) for m in modules):
            raise ValueError(
                f"DistributedDataParallel does not see the gradients of {self.plan.schedule}, whose"
                " backwards are in halves: average them after step(), or call zero.shard() on"
                " Pipeline.module"
            )

    if not TYPE_CHECKING:
        __getattr__ = object_getattr

    # ---- this rank's part

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's, each once."""
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's, by their names in the whole model."""
        return self.module.named_parameters()

    # ---- steps

    def step(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        target: Tensor,
        *,
        loss_scale: float = 1.0,
        record: bool = False,
    ) -> Tensor:
        """Forward and backward of a batch; gradients are added to those that are there.

        Args:
            inputs: of the first block, rows first. Ranks without the first stage look at shapes and
                dtypes only; a tensor on the meta device will do there.
            target: for loss_fn, with as many rows; only the rank with the last stage looks at it.
            loss_scale: gradients are those of the loss times this.
            record: write down what is computed when, for `timeline()`.

        Returns:
            The loss of the batch, on all ranks: one broadcast of 4 bytes.

        Raises:
            ValueError: rows do not divide into micro-batches, ranks have inputs of different
                shapes, or the first step with inputs of a shape finds that a block does not take
                them: on all ranks. Or the model was changed.
            RingcommError: a rank failed, or called something else.

        What a rank's blocks raise ends the group, so that other ranks do not wait for it. Under
        torch.autocast forwards run in it, and backwards without. Collective.
        """
        self._check_unchanged()
        self._log = []
        with self.tied.summed():
            return self._runner.step(inputs, target, loss_scale, self._log if record else None)

    def evaluate(self, inputs: Tensor | tuple[Tensor, ...], target: Tensor) -> Tensor:
        """The loss of a batch without gradients, on all ranks; arguments as of step().

        Modules stay in the mode that they are in: call `pipe.module.eval()` before. Collective.
        """
        self._check_unchanged()
        return self._runner.evaluate(inputs, target)

    def timeline(self) -> Timeline:
        """What all ranks computed in the last step, which was recorded. Times are of one host.

        Raises:
            RuntimeError: it was not recorded, on any rank.

        Collective: one object.
        """
        everyone: list[Any] = [None] * self.group.size()
        dist.all_gather_object(everyone, self._log, group=self.group)
        if not all(everyone):
            raise RuntimeError("the last step was not recorded: call step(..., record=True)")
        actions = [Action(rank, *entry) for rank, log in enumerate(everyone) for entry in log]
        return Timeline(self.group.size(), tuple(sorted(actions, key=lambda a: a.begin_us)))

    def _check_unchanged(self) -> None:
        given = None if self._given is None else self._given()
        if given is None:
            return
        known = [name for stage in self.stages for name in stage]
        is_same = all(given._modules.get(name) is block for name, block in self._own.items())
        if list(given._modules) != known or not is_same:
            raise ValueError(
                f"the model was cut when its blocks were {known}, and they have been changed: make"
                " a new Pipeline of it"
            )


def _problem_of(module: nn.Module) -> str:
    """What keeps a rank from beginning, or "ready"."""
    devices = {str(p.device) for p in module.parameters() if not p.is_meta}
    if len(devices) > 1:
        return f"the blocks are on several devices, {', '.join(sorted(devices))}: move them"
    try:
        check_can_materialize(module)
    except ValueError as error:
        return str(error)
    return "ready"
