"""The result of parallelize(): steps, evaluation and clipping on a mesh."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ringcomm.parallel.clip import clip_grad_norm_
from ringcomm.parallel.expert.local_experts import LocalExperts, average_gradients
from ringcomm.parallel.flat_collectives import device_of
from ringcomm.parallel.loss import Batch, PartLoss, make_batch
from ringcomm.parallel.mesh import ParallelDims
from ringcomm.torch_names import version_of


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
        self._num_parts = 1 if pipe is None else num_microbatches  # outside of step()
        averages = stage == 0 and dims["batch"].size() > 1
        has_experts = any(isinstance(module, LocalExperts) for module in model.modules())
        self._has_ddp = averages and pipe is None and not has_experts
        self._averages = averages and not self._has_ddp
        if dims["batch"].size() > 1:
            loss.model = model
        self._trained: list[bool] = []
        self._is_sent: torch.Event | None = None  # of the last batch
        self._ddp_weights: list[nn.Parameter] = []
        self._used: list[bool] = []  # those that have a gradient of this step
        if self._has_ddp:
            self._make_ddp()

    def _trains(self) -> list[bool]:
        return [param.requires_grad for param in self.model.parameters()]

    def _make_ddp(self) -> None:
        """DistributedDataParallel, which knows only weights that require grad when it is made."""
        self._trained, self._runs = self._trains(), self.model
        self._ddp_weights = [param for param in self.model.parameters() if param.requires_grad]
        group = self.dims.group("batch")
        # The weights are equal already. Ranks may use different ones: see _complete().
        self._runs = DistributedDataParallel(self.model, process_group=group, init_sync=False)

    def step(self, inputs: Any, targets: Tensor | None = None) -> Tensor:
        """Forward and backward pass of a batch; gradients are averaged over dims["batch"].

        The loss is the mean over all labels of the batch, on all ranks of dims["batch"] and in all
        micro-batches, which may have different numbers of them; a rank may have none. Call
        optimizer.step() and zero_grad() after each step(): gradients are not averaged again.

        Args:
            inputs: what a data loader gives: for a model of transformers a dict with input_ids,
                labels, and perhaps attention_mask and position_ids, which restart in packed
                sequences. Or a tensor, or a tuple of tensors. Rows are in the first dimension,
                different ones on each rank of dims["batch"], the same on others.
            targets: for the loss, with as many rows, if they are not `labels` in a dict; for a
                model of transformers, the labels.

        Returns:
            The loss of the batch, the same on all ranks; a scalar tensor without gradient.

        Raises:
            TypeError: the inputs are of another type. Or loss_fn trains weights that are not in the
                model; no weight is written.
            ValueError: there are no labels, rows do not divide into micro-batches, or the model
                cannot separate packed sequences.

        Collective.
        """
        batch, num_items = self._prepared(inputs, targets, self._num_microbatches)
        scale = getattr(self.optimizer, "loss_scale", 1.0)
        loss = self._run(batch, num_items, scale)
        if self._averages:
            average_gradients(self.model, self.dims.group("batch"))
        return self._shared(loss)

    def _run(self, batch: Batch, num_items: float, scale: float | None) -> Tensor:
        """The loss; with gradients of `scale` times the loss, or without any."""
        device = batch.targets.device if self.pipeline is None else self.pipeline.device
        total = torch.zeros((), dtype=torch.float32, device=device)
        if self.pipeline is not None:
            step = partial(self.pipeline.step, loss_scale=scale)
            run = self.pipeline.evaluate if scale is None else step
            self.pipeline.known_labels = self._counts
            named = {"kwargs": batch.kwargs, "num_items": num_items}
            try:
                loss: Tensor = run(batch.args, batch.targets, **named)
            finally:
                self.pipeline.known_labels = None
            return loss
        self._used = []
        parts = batch.chunk(len(self._counts))
        for idx, (part, num_own) in enumerate(zip(parts, self._counts, strict=True)):
            numbers = part.targets, num_own, num_items
            waits = isinstance(self._runs, DistributedDataParallel) and idx < len(parts) - 1
            before = [] if waits or scale is None else self._gradients()
            with self._runs.no_sync() if waits else nullcontext():
                output = self._runs(*part.args, **part.kwargs, **self._loss.arguments(*numbers))
                loss = self._loss(output, *numbers)
                if scale is not None:
                    (loss * scale).backward()
            if before:
                self._complete(before)
            total += loss.detach()
        return total

    def _gradients(self) -> list[tuple[Tensor, int] | None]:
        """The gradients of DDP's weights, and how often they were written."""
        grads = (param.grad for param in self._ddp_weights)
        return [None if grad is None else (grad, version_of(grad)) for grad in grads]

    def _complete(self, before: list[tuple[Tensor, int] | None]) -> None:
        """Ends a backward pass in which this rank has not used all weights.

        DDP waits for the gradients of all of them: the others get one of zeros. With
        find_unused_parameters it would traverse the graph in each step.
        """
        both = [*zip(self._ddp_weights, before, strict=True)]
        self._used = [param.grad is not None for param, _ in both]
        unused = [
            param
            for param, old in both
            if param.grad is None
            or (old is not None and param.grad is old[0] and version_of(param.grad) == old[1])
        ]
        if unused:
            torch.autograd.backward(unused, [torch.zeros_like(param) for param in unused])

    def evaluate(self, inputs: Any, targets: Tensor | None = None) -> Tensor:
        """The loss of a batch as of step(), without gradients. Collective."""
        batch, num_items = self._prepared(inputs, targets, self._num_parts)
        with torch.no_grad():
            found = self._run(batch, num_items, None)
        return self._shared(found)

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
        batch, problem, self._counts = None, None, [0.0]
        num_ranks = self.dims["batch"].size()
        try:
            batch = self._loss.checked(make_batch(inputs, targets, num))
            self._counts = self._loss.labels(self._loss.labels_of(batch), num)
        except Exception as error:  # count_items may raise any
            problem = error
        is_changed = self._has_ddp and self._trained != self._trains()
        numbers = [sum(self._counts), problem is not None, is_changed]
        facts = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        # Ranks without the last stage may have targets without values.
        for axis in ("batch", "pp", "tp"):
            op = dist.ReduceOp.SUM if axis == "batch" else dist.ReduceOp.MAX
            if self.dims[axis].size() > 1:
                group = self.dims.group(axis)
                facts = facts.to(device_of(group))
                dist.all_reduce(facts, op, group=group)
        num_items, num_problems, num_changed = facts.tolist()
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
        moved, self._is_sent = batch.sent_to(self._device())
        return moved, num_items / num_ranks

    def _shared(self, loss: Tensor) -> Tensor:
        """The mean over dims["batch"], which also ends the step of DDP. Collective."""
        loss, group = loss.detach(), self.dims.group("batch")
        if group.size() > 1:
            used = torch.tensor(self._used, dtype=loss.dtype, device="cpu")
            numbers = torch.cat([loss[None], used.to(loss.device, non_blocking=True)])
            dist.all_reduce(numbers, group=group)
            loss = numbers[0] / group.size()
            if not all(self._used):
                # Zeros of weights that no rank has used go: weight decay leaves these.
                for param, num in zip(self._ddp_weights, numbers[1:].tolist(), strict=True):
                    if num == 0:
                        param.grad = None
        if self._is_sent is not None:  # the program may write its pinned batch again
            self._is_sent.synchronize()
        return loss

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clips by the norm of the whole model's gradient; see parallel.clip_grad_norm_()."""
        has_own = hasattr(self.optimizer, "clip_grad_norm_")
        return clip_grad_norm_(self.optimizer if has_own else self.model, max_norm)
