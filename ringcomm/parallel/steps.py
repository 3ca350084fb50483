"""The result of parallelize(): steps, evaluation and clipping on a mesh."""

import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ringcomm.parallel.clip import clip_grad_norm_
from ringcomm.parallel.expert.local_experts import LocalExperts, average_gradients
from ringcomm.parallel.flat_collectives import device_of
from ringcomm.parallel.loss import Batch, Labels, LossError, PartLoss, make_batch
from ringcomm.parallel.mesh import ParallelDims


class Parallelized:
    """A model on a mesh, `dims`, and its optimizer; made by parallelize().

    Attributes:
        model: the given model; with a pipeline this rank's part of it, which cannot be called.
        optimizer: the optimizer of this rank's parameters; the loop calls step() and zero_grad().
        pipeline: the Pipeline, or None.
    """

    def __init__(
        self,
        dims: ParallelDims,
        model: Any,
        optimizer: torch.optim.Optimizer,
        pipe: Any,
        loss: PartLoss,
        stage: int,
        num_microbatches: int,
    ) -> None:
        self.dims, self.model, self.optimizer, self.pipeline = dims, model, optimizer, pipe
        self._num_microbatches, self._loss, self._runs = num_microbatches, loss, model
        if dims["batch"].size() > 1:
            loss.model = model
        self._num_parts = 1 if pipe is None else num_microbatches  # outside of step()
        averages = stage == 0 and dims["batch"].size() > 1
        has_experts = any(isinstance(module, LocalExperts) for module in model.modules())
        self._has_ddp = averages and pipe is None and not has_experts
        self._averages = averages and not self._has_ddp
        self._trained: list[bool] = []
        if self._has_ddp:
            self._make_ddp()

    def _trains(self) -> list[bool]:
        return [param.requires_grad for param in self.model.parameters()]

    def _make_ddp(self) -> None:
        """DistributedDataParallel, which knows only weights that require grad when it is made."""
        self._trained, self._runs = self._trains(), self.model
        # The weights are equal already. Ranks may use different ones.
        warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")
        self._runs = DistributedDataParallel(
            self.model,
            process_group=self.dims.group("batch"),
            init_sync=False,
            find_unused_parameters=True,
        )

    def step(self, inputs: Any, targets: Tensor | None = None) -> Tensor:
        """Forward and backward pass of a batch; gradients are averaged over dims["batch"].

        The loss is the mean over all labels of the batch, on all ranks of dims["batch"] and in all
        micro-batches, which may have different numbers of them; a rank may have none. Remaining
        gradients of an earlier step() are not averaged again: call optimizer.step() and zero_grad()
        after each step().

        Args:
            inputs: what a data loader gives: for a model of transformers a dict or BatchEncoding
                with input_ids, labels, and perhaps attention_mask and position_ids; packed
                sequences have position_ids that restart. Or a tensor, or a tuple of tensors. Rows
                are in the first dimension, different ones on each rank of dims["batch"];
                tensor-parallel and pipeline ranks have the same rows.
            targets: for the loss, with as many rows, if they are not `labels` in a dict; for a
                model of transformers, the labels.

        Returns:
            The loss of the batch, the same on all ranks; a scalar tensor without gradient.

        Raises:
            TypeError: the inputs are of another type.
            ValueError: there are no labels, rows do not divide into micro-batches, or the model
                cannot separate packed sequences. Or loss_fn does not weight parts of the batch by
                the labels that are counted; gradients are then there, and to be dropped. It is
                raised on all ranks of dims["batch"].

        Collective.
        """
        batch, num_items = self._prepared(inputs, targets, self._num_microbatches)
        scale = getattr(self.optimizer, "loss_scale", 1.0)
        loss, problem = self._run(batch, num_items, scale)
        if self._averages:
            average_gradients(self.model, self.dims.group("batch"))
        return self._shared(loss, problem)

    def _run(
        self, batch: Batch, num_items: float, scale: float | None
    ) -> tuple[Tensor, LossError | None]:
        """The loss and a refusal; with gradients of `scale` times the loss, or without any."""
        device = batch.targets.device if self.pipeline is None else self.pipeline.device
        total = torch.zeros((), dtype=torch.float32, device=device)
        if self.pipeline is not None:
            step = partial(self.pipeline.step, loss_scale=scale)
            run = self.pipeline.evaluate if scale is None else step
            try:
                named = {"kwargs": batch.kwargs, "num_items": num_items}
                return run(batch.args, batch.targets, **named), None
            except LossError as error:  # other pipelines do not know it yet
                return total, error
        parts = batch.chunk(len(self._counts))
        for idx, (part, num_own) in enumerate(zip(parts, self._counts, strict=True)):
            numbers = part.targets, num_own, num_items
            waits = isinstance(self._runs, DistributedDataParallel) and idx < len(parts) - 1
            with self._runs.no_sync() if waits else nullcontext():
                output = self._runs(*part.args, **part.kwargs, **self._loss.arguments(*numbers))
                loss = self._loss(output, *numbers)
                if scale is not None:
                    (loss * scale).backward()
            total += loss.detach()
        return total, self._loss.answer()

    def evaluate(self, inputs: Any, targets: Tensor | None = None) -> Tensor:
        """The loss of a batch as of step(), without gradients. Collective."""
        batch, num_items = self._prepared(inputs, targets, self._num_parts)
        with torch.no_grad():
            found = self._run(batch, num_items, None)
        return self._shared(*found)

    @torch.no_grad()
    def __call__(self, inputs: Any) -> Any:
        """The model's output for inputs as of step(), without gradients; labels are not used.

        For a model of transformers the logits, over the whole vocabulary. Collective.
        """
        batch = self._loss.checked(make_batch(inputs, None, self._num_parts, has_targets=False))
        batch = batch.to(self._device())
        if self.pipeline is not None:
            return self._loss.result_of(self.pipeline.forward(batch.args, kwargs=batch.kwargs))
        return self._loss.result_of(self.model(*batch.args, **batch.kwargs))

    # ---- batches

    def _device(self) -> torch.device:
        return next(iter(self.model.parameters())).device

    def _prepared(self, inputs: Any, targets: Any, num: int) -> tuple[Batch, float]:
        """The batch, and the mean number of labels of a rank of dims["batch"]. Collective."""
        batch, problem, labels = None, None, Labels([0.0], 0)
        num_ranks = self.dims["batch"].size()
        try:
            batch = self._loss.checked(make_batch(inputs, targets, num))
            labels = self._loss.labels(self._loss.labels_of(batch), num)
        except Exception as error:  # count_items may raise any
            problem = error
        self._counts = labels.counts
        is_changed = self._has_ddp and self._trained != self._trains()
        bits = (problem is not None, is_changed, labels.kinds & 1, labels.kinds >> 1)
        facts = torch.tensor([sum(labels.counts), *bits], dtype=torch.float64, device="cpu")
        # Ranks without the last stage may have targets without values.
        for axis, op in (("batch", dist.ReduceOp.SUM), ("pp", dist.ReduceOp.MAX)):
            if self.dims[axis].size() > 1:
                group = self.dims.group(axis)
                facts = facts.to(device_of(group))
                dist.all_reduce(facts, op, group=group)
        num_items, num_problems, num_changed, *kinds = facts.tolist()
        if problem is not None:
            raise problem
        if num_problems or batch is None:
            raise ValueError("another rank cannot use its batch: see that rank's error")
        if num_items == 0:
            raise ValueError(
                'the batch has no labels on any rank of dims["batch"]: all are -100. Leave it out'
                " on all ranks"
            )
        if num_changed not in (0, num_ranks):
            raise ValueError(
                f"weights were frozen or unfrozen on {num_changed:.0f} of {num_ranks} ranks: set"
                " requires_grad alike on all of them"
            )
        if num_changed:
            self._make_ddp()
        if num_ranks * self._num_microbatches > 1:
            self._loss.expect(bool(kinds[0]) | 2 * bool(kinds[1]))
        self._asked = self._loss.asking
        return batch.to(self._device()), num_items / num_ranks

    def _shared(self, loss: Tensor, problem: LossError | None) -> Tensor:
        """The mean over dims["batch"]; raises on all ranks if one has a problem. Collective."""
        loss, group = loss.detach(), self.dims.group("batch")
        if group.size() > 1:
            both = torch.stack([loss, loss.new_tensor(float(problem is not None))])
            dist.all_reduce(both, group=group)
            loss = both[0] / group.size()
            if self._asked and problem is None and both[1] > 0:
                problem = LossError("loss_fn is refused by another rank: see that rank's error")
        if problem is not None:
            raise problem
        return loss

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clips by the norm of the whole model's gradient; see parallel.clip_grad_norm_()."""
        has_own = hasattr(self.optimizer, "clip_grad_norm_")
        return clip_grad_norm_(self.optimizer if has_own else self.model, max_norm)
