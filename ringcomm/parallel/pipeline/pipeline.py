"""Trains a model whose stages are on several ranks."""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ringcomm.backend import resolve_group
from ringcomm.parallel.flat_collectives import agreeing, check_agreement, gathered_rows
from ringcomm.parallel.loss import (
    Batch,
    CountItems,
    PartLoss,
    check_rows,
    check_values,
    parameters_of,
)
from ringcomm.parallel.model.saving import refuse_copy
from ringcomm.parallel.model.units import materialize
from ringcomm.parallel.pipeline.blocks import (
    Blocks,
    StageModule,
    check_blocks,
    copy_tied_from_first,
    cut_blocks,
    named_blocks,
    part_of,
    tied_gradients_summed,
    wrap_stages,
)
from ringcomm.parallel.pipeline.schedules import Log, Timeline, make_plan
from ringcomm.parallel.pipeline.stage import (
    MAX_SHAPES,
    Made,
    Metas,
    Runtime,
    aborted_on_failure,
    forward_only,
    make_stages,
    shown,
)
from ringcomm.parallel.pipeline.torch_stage import meta_like

Inputs = Tensor | tuple[Tensor, ...]


class Pipeline:
    """Cuts a model into stages, keeps this rank's, and runs micro-batches through all of them.

        pipe = pipeline.Pipeline(model, nn.functional.cross_entropy, num_microbatches=8)
        optimizer = torch.optim.AdamW(pipe.parameters())
        for x, target in batches:
            loss = pipe.step(x, target)
            optimizer.step()
            optimizer.zero_grad()

    Each stage's gradients equal those of one process that runs the same micro-batches one after the
    other. A boundary between stages on different ranks sends its activations forward and their
    gradients back: 2 m b s h elements per step for m micro-batches of b s h each.

    Args:
        blocks: the modules of the model in call order, the same on all ranks: an nn.Sequential, a
            list, or a dict by name ({"embed": ..., "layers.0": ...}: the names in checkpoints). A
            returned tuple is the arguments of the next block. Blocks may be on the meta device;
            this rank's blocks then get memory, and values by reset_parameters(). A parameter that
            several blocks share stays tied: if they are on several ranks, its gradients are summed
            over these ranks, and values start from the first.
        loss_fn: a function of the last block's output and a micro-batch of the target that returns
            a scalar tensor: a mean over labels, or with a parameter num_items_in_batch a sum over
            labels, divided by it. A mean needs count_items, unless it is a loss of torch or
            ringcomm, as in parallelize().
        schedule: "gpipe", "1f1b", "interleaved" (1F1B with several stages per rank), "zero-bubble"
            (ZB-H1 and its interleaved form), or "zbv" (ZB-V). The last two split the backward pass:
            first the gradients of inputs, for which the previous stage waits, and later those of
            weights.
        num_microbatches: the number of micro-batches, along a batch's first dimension.
        group, mesh: the pipeline's ranks, a group or a one-dimensional DeviceMesh; by default all.
        num_stages_per_rank: default 2 for "interleaved" and "zbv", otherwise 1.
        costs: one per block, for the cut, such as forward times. Default: numbers of parameters,
            without embedding tables. See `pipeline.cut`.
        recompute: keep only the inputs of blocks, and recompute the rest in the backward pass,
            which is then not split.
        loss_reduction: "mean" if loss_fn is a mean over labels, "sum" if it is a sum. Means of
            micro-batches are weighted by their numbers of labels.
        count_items: a function of targets that returns the number of labels in loss_fn's mean.
            Default: what a loss of torch or ringcomm has in its mean; with num_items_in_batch the
            labels other than -100, or the rows of targets that are not integers.
        device: the device of the stages; default: that of the blocks, or the CPU for the meta
            device.
        wrap: a function that wraps each stage for data parallelism, such as `lambda stage:
            DistributedDataParallel(stage, process_group=dp_group)`. It does not work with
            "zero-bubble" and "zbv".

    Attributes:
        module: this rank's blocks under their names in the whole model.
        plan: the schedule, with the computations of each rank in order.
        stages: the names of the blocks of each stage of the model.
        group, device: as resolved.

    Raises:
        TypeError: blocks are not modules, or loss_fn does not say what its mean is over.
        ValueError: there are fewer blocks than stages, a rank would have no parameters, the
            schedule does not support these numbers, a block on the meta device has no
            reset_parameters(), ranks have different arguments, or the schedule does not support the
            result of `wrap`.

    Collective: exchanges two objects, and the values of shared parameters.
    """

    def __init__(
        self,
        blocks: Blocks,
        loss_fn: Callable[..., Tensor] | PartLoss,
        schedule: str = "1f1b",
        num_microbatches: int = 8,
        *,
        group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        num_stages_per_rank: int | None = None,
        costs: Sequence[float] | None = None,
        recompute: bool = False,
        loss_reduction: str = "mean",
        count_items: CountItems | None = None,
        device: torch.device | str | None = None,
        wrap: Callable[[nn.Module], nn.Module] | None = None,
    ) -> None:
        self.group = resolve_group(group, mesh)
        rank, ranks = self.group.rank(), range(self.group.size())
        with agreeing(self.group) as mine:
            named = named_blocks(blocks)
            self.plan = make_plan(schedule, len(ranks), num_microbatches, num_stages_per_rank)
            if loss_reduction not in ("mean", "sum"):
                raise ValueError(f'loss_reduction must be "mean" or "sum", got {loss_reduction!r}')
            self._is_sum = loss_reduction == "sum"
            if not isinstance(loss_fn, PartLoss):
                loss_fn = PartLoss(loss_fn, count_items, is_sum=self._is_sum)
            self._loss = loss_fn
            self.stages = cut_blocks(named, costs, self.plan.num_stages)
            own = [[name for s in self.plan.stages_of(r) for name in self.stages[s]] for r in ranks]
            self.module = part_of(named, own, self.group)
            stages_per_rank = self.plan.stages_per_rank
            mine |= {
                "options": (schedule, num_microbatches, stages_per_rank, recompute, loss_reduction),
                "loss": self._loss.shown,
                "stages": self.stages,
                "parameters' shapes": [
                    [tuple(p.shape) for p in block.parameters()] for block in named.values()
                ],
            }
            check_blocks(self.module, named, own)
            if self._loss.problem:
                raise TypeError(self._loss.problem)
        self._loss_scale = 1.0
        self.known_labels: list[float] | None = None  # of the next batch, if its caller has counted
        self._losses: list[Tensor] = []  # of the micro-batches so far, detached and not scaled
        params = list(self.module.parameters())
        found = (p.device for p in params if not p.is_meta)
        self.device = torch.device(device or next(found, "cpu"))
        materialize(self.module, params, self.device)
        self.module.to(self.device)
        if self.device.type != "cpu":  # all ranks' first call on it, before messages of some
            one = torch.ones(1, dtype=torch.float32, device=self.device)
            dist.all_reduce(one, group=self.group)
        copy_tied_from_first(self.module)
        self._names = {name for b in named.values() for name in parameters_of(b.forward)}
        self._modules = {
            idx: StageModule([named[name] for name in self.stages[idx]], recompute)
            for idx in self.plan.stages_of(rank)
        }
        wrapped = wrap_stages(self.module, self._modules, wrap, self.plan)
        self._runtime = Runtime(self.plan, self._modules, wrapped, self.device, self.group)
        self._num_made, self._made = 0, dict[Any, Made]()
        self._trained: list[bool] | None = None  # of this rank's weights, which, in the first step
        self._log: Log = []
        self._is_sent: torch.Event | None = None  # of the last batch

    __deepcopy__ = __reduce_ex__ = refuse_copy

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, each once."""
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters, by their names in the whole model."""
        return self.module.named_parameters()

    # ---- steps

    def step(
        self,
        inputs: Inputs,
        target: Tensor,
        *,
        kwargs: Mapping[str, Tensor] | None = None,
        num_items: float | None = None,
        loss_scale: float = 1.0,
        record: bool = False,
    ) -> Tensor:
        """Forward and backward pass of a batch; gradients are accumulated.

        Args:
            inputs: the arguments of the first block, rows in the first dimension. Ranks without the
                first stage use only shapes and dtypes, so a tensor on the meta device suffices
                there.
            target: for loss_fn, with as many rows; used only on the rank with the last stage.
            kwargs: keyword arguments of all blocks, in all stages, with as many rows, such as an
                attention mask; a block gets those that its forward has by name. Ranks need the
                values.
            num_items: the number of labels by which the sum of losses is divided, such as those of
                all data-parallel ranks, divided by the number of these ranks. Default: the number
                of labels in the target.
            loss_scale: a factor of the loss for the gradients.
            record: record the times of all computations for `timeline()`.

        Returns:
            The loss of the batch, on all ranks: one broadcast of 4 bytes.

        Raises:
            ValueError: on all ranks: rows do not divide into micro-batches, ranks have inputs of
                different shapes, or a block raises for a new shape of inputs. Or weights were
                frozen or unfrozen.
            RingcommError: a rank failed, or called something else.

        An exception of a rank's blocks aborts the group, so that other ranks do not wait. Under
        torch.autocast only forward passes are autocast. Collective.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "step() needs gradients, but torch.no_grad() is active: call evaluate()"
            )
        self._log = []
        with tied_gradients_summed(self.module):
            batch, made = self._prepared(inputs, (target,), kwargs, num_items, trains=True)
            for module in self._modules.values():
                module.log = self._log if record else None
            self._loss_scale = loss_scale
            options = {"target": batch.targets[0]} if self._has(-1) else {}
            with aborted_on_failure(self.group):
                made.schedule.step(*batch.args, **options, return_outputs=False)
                for stage in made.stages:
                    stage.drop_unused()
            return self._shared_loss()

    @torch.no_grad()
    def evaluate(
        self,
        inputs: Inputs,
        target: Tensor,
        *,
        kwargs: Mapping[str, Tensor] | None = None,
        num_items: float | None = None,
    ) -> Tensor:
        """The loss of a batch without gradients, on all ranks; arguments as of step().

        The mode of modules is not changed: call `pipe.module.eval()` before. Collective.
        """
        outputs, targets, _ = self._run_forward(inputs, (target,), kwargs, num_items)
        if self._has(-1):
            wanted = targets[0].chunk(self.plan.num_microbatches)
            with aborted_on_failure(self.group):
                for output, part in zip(outputs, wanted, strict=True):
                    self._next_loss(output, part)
        return self._shared_loss()

    @torch.no_grad()
    def forward(self, inputs: Inputs, *, kwargs: Mapping[str, Tensor] | None = None) -> Tensor:
        """The last block's output for a batch, on all ranks, without gradients.

        The arguments are those of step(). The mode of modules is not changed. Raises TypeError if
        the last block returns several tensors. Collective: broadcasts the output.
        """
        outputs, _, metas = self._run_forward(inputs, (), kwargs)
        if len(metas) != 1:
            raise TypeError(f"the last block must return one tensor, it returns {len(metas)}")
        shape = metas[0].shape[0] * self.plan.num_microbatches, *metas[0].shape[1:]
        whole = torch.empty(shape, dtype=metas[0].dtype, device=self.device)
        if self._has(-1):
            torch.cat(outputs, out=whole)
        dist.broadcast(whole, group=self.group, group_src=self.plan.rank_of(-1))
        self._wait_for_batch()
        return whole

    def _run_forward(self, *args: Any) -> tuple[list[Any], Any, Metas]:
        """The last rank's outputs of micro-batches, its targets, and the outputs' shape.

        Arguments of _prepared().
        """
        batch, made = self._prepared(*args)
        chunks = [value.chunk(self.plan.num_microbatches) for value in batch.args]
        first = list(zip(*chunks, strict=True))
        with aborted_on_failure(self.group):
            outputs = forward_only(self._runtime, made.boundaries, first)
        return outputs, batch.targets, made.boundaries[-1]

    def _wait_for_batch(self) -> None:
        """The program may write its pinned batch again."""
        if self._is_sent is not None:
            self._is_sent.synchronize()

    def timeline(self) -> Timeline:
        """The timeline of all ranks in the last recorded step. All ranks must be on one host.

        Raises RuntimeError if the last step was not recorded. Collective: exchanges one object.
        """
        return Timeline.gathered(self._log, self.group)

    def _has(self, stage: int) -> bool:
        return stage % self.plan.num_stages in self._modules

    def _shared_loss(self) -> Tensor:
        """The loss, from the rank that computed it. Collective."""
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        if self._has(-1):
            total += torch.stack(self._losses).float().sum()
            self._losses.clear()
        dist.broadcast(total, group=self.group, group_src=self.plan.rank_of(-1))
        self._wait_for_batch()
        return total

    def _next_loss(self, output: Any, target: Tensor) -> Tensor:
        """The loss of the next micro-batch, for its gradients."""
        num_own = self._num_own[len(self._losses)]
        loss = self._loss(output, target, num_own, self._num_items)
        self._losses.append(loss.detach())
        return loss * self._loss_scale

    def _count_labels(self, targets: tuple[Tensor, ...], num_items: float | None) -> None:
        """Counts the labels of micro-batches, if this rank computes their losses."""
        self._losses, num = [], self.plan.num_microbatches
        self._num_own, self._num_items = [1.0] * num, 1.0 if num_items is None else num_items
        known, self.known_labels = self.known_labels, None
        if not targets or self._is_sum:
            return
        self._num_own = known or self._loss.labels(targets[0], num)
        if num_items is None:
            self._num_items = sum(self._num_own)
        if not self._num_items:
            raise ValueError("no label in the target counts: all are -100")

    # ---- preparation

    @torch.inference_mode(False)  # stages and the state of modules are kept for later calls
    def _prepared(
        self,
        inputs: Inputs,
        targets: tuple[Tensor, ...],
        kwargs: Mapping[str, Tensor] | None,
        num_items: float | None = None,
        *,
        trains: bool = False,
    ) -> tuple[Batch, Made]:
        """What this rank needs, on its device, and its stages.

        Raises TypeError or ValueError on all ranks.
        """
        num, kind = self.plan.num_microbatches, self.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        batch, kwargs = inputs if isinstance(inputs, tuple) else (inputs,), kwargs or {}
        metas: Metas = ()
        problem: Exception | None = None
        trained = [p.requires_grad for m in self._modules.values() for p in m.parameters()]
        try:
            if trains and self._trained not in (None, trained):
                raise ValueError(
                    "weights were frozen, unfrozen or added after the first step, in which stages"
                    " agreed on the weights that get gradients: make a new Pipeline of the same"
                    " blocks"
                )
            if unknown := kwargs.keys() - self._names:
                raise TypeError(f"no block of the pipeline has a parameter {sorted(unknown)[0]}")
            named = [*(("inputs", x) for x in batch), *kwargs.items()]
            check_rows([*named, *(("target", y) for y in targets)], num)
            needed = [*kwargs.items(), *(("target", y) for y in targets if self._has(-1))]
            check_values([*needed, *(("inputs", x) for x in batch if self._has(0))])
            metas = tuple(meta_like(x[: len(x) // num], False) for x in (*batch, *kwargs.values()))
            self._count_labels(targets if self._has(-1) else (), num_items)
        except Exception as error:  # count_items may raise any
            problem = error
        words = ", ".join([shown(metas), *kwargs])
        if problem is not None:
            words = f"{type(problem).__name__}: {problem}"
        # In another mode a block may write its input, and freezing changes what has a gradient.
        key = words, autocast, self.module.training, tuple(trained)
        made = self._made.get(key)
        mine = zlib.crc32(repr(key[:2]).encode()) + ((made.number if made else 0) << 32)
        digest = torch.tensor(mine, dtype=torch.int64, device="cpu")
        found = {*gathered_rows(digest, self.group).tolist()}
        if len({each % (1 << 32) for each in found}) > 1:
            facts = {"inputs of a micro-batch": words, "autocast": autocast}
            with nullcontext() if problem is None else suppress(ValueError):
                check_agreement(facts, self.group)
        if problem is not None:
            raise problem
        if made is None or len(found) > 1:  # other ranks may have none, or another one
            given = metas, [*kwargs], self.module.after_backward
            more: Any = {"number": self._num_made + 1, "loss_fn": self._next_loss}
            made = make_stages(self._runtime, *given, **more)
            self._num_made = made.number
        self._made.pop(key, None)
        self._made[key] = made  # most recently used last
        if trains:
            self._trained = trained
        if len(self._made) > MAX_SHAPES:
            del self._made[next(iter(self._made))]
        own = batch if self._has(0) else (), {**kwargs}, targets if self._has(-1) else ()
        moved, self._is_sent = Batch(*own).sent_to(self.device)
        chunks = [value.chunk(num) for value in moved.kwargs.values()]
        parts = [dict(zip(kwargs, part, strict=True)) for part in zip(*chunks, strict=True)]
        for module in self._modules.values():
            module.kwargs = parts
        return moved, made
