"""LOMO, SGD that applies each gradient inside the backward pass, and AdaLomo."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcomm.ops.fused_update import LomoStep
from ringcomm.optim.gradients import EmbeddingGradient, Gradient, LinearGradient
from ringcomm.optim.in_backward import InBackwardOptimizer, Numbers
from ringcomm.optim.options import options_of
from ringcomm.optim.slot import Slot
from ringcomm.parallel.model.cut import Box, Cut, pieces_of

_ops: Any = torch.ops.ringcomm


class Lomo(InBackwardOptimizer):
    """W <- (1 - lr * weight_decay) * W - lr * G, inside the backward pass (Lv et al. 2023).

    For the ordinary loop: forward, loss.backward(), step(), zero_grad(). Weights are updated when
    backward() returns; step() then only counts.

    In one process, if the model is given, weight gradients of nn.Linear and nn.Embedding are never
    materialized, and one other gradient is in memory at a time. With several ranks one gradient is
    in memory at a time, two with overlap, and those of one unit under fully_shard.

    Clipping by norm and a loss scale need all gradients of a step before an update. By default
    gradients are kept until step(); for a layer its input and its output's gradient are kept
    instead, if they are smaller. With clip_mode="two_pass", `opt.backward(loss)` runs the backward
    pass twice, first for the norm. This keeps LOMO's memory and costs a second backward pass (and
    recomputation), but never a second forward pass.

    Args:
        model_or_params: a model, whose parameters that require grad are trained; or parameters, or
            torch.optim's parameter groups.
        lr: the learning rate, positive.
        weight_decay: decoupled; for an embedding it decays all rows.
        model: with parameters or groups, the model that they belong to. It is needed for fusion,
            names and tensor-parallel layers, and required in a job of several ranks.
        options: these, with their defaults:
            clip_grad_norm (None): multiply all gradients by min(1, clip_grad_norm / norm), with the
                norm over gradients of all ranks. Each element of a sharded or replicated weight
                counts once.
            clip_grad_value (None): clamp each element to +-clip_grad_value instead.
            clip_mode ("deferred"): or "two_pass".
            loss_scale (None): a factor for float16, or "dynamic": from 2**16, halved on overflow,
            doubled after 2000 good steps. The loop is then opt.scale(loss).backward(). An overflow
            on any rank skips the step on all ranks.
            accumulation_steps (1): micro-batches per step(). All gradients are kept in memory until
                the last micro-batch.
            reduce_dtype (torch.float32): the dtype in which gradients are accumulated and reduced;
                or the dtype of 16-bit weights. Weights of fully_shard use its MixedPrecisionPolicy.
            group (None): ranks with replicas, over which each gradient is averaged inside the
                backward pass. Weights and buffers of the model start from those of rank 0, and
                weights stay bitwise equal. Buffers that change later (running statistics of
                BatchNorm) are each rank's own. A missing gradient on some ranks counts as zeros;
                a weight without a gradient on all ranks is not updated. Ranks may make different
                numbers of backward passes before step(). Required for replicated weights in a job
                of several ranks; "none" trains this rank's model independently of the others.
                Shards of fully_shard have their own group. Gradients of sharded experts are
                averaged over the ranks with the same ones; those that all share wait for step().
            mesh (None): a DeviceMesh of one dimension, instead of a group.
            overlap (None): continue the backward pass while a gradient is reduced; two gradients
                are then in memory. None: enabled unless the ranks are on CPUs, or up to four share
                one GPU: there one operator reduces, updates and gathers.
            stochastic_rounding (False): round bfloat16 weights up or down at random, without bias,
                so that small updates are not lost. It needs no memory, but on CUDA a linear layer's
                gradient of up to 256 MiB is materialized in bfloat16.
            master (None): "split" stores the lower 16 bits of fp32 master weights separately:
                exact, with 2 more bytes per bfloat16 weight.
            seed (0): the 32-bit seed of stochastic rounding.

    Raises:
        NotImplementedError: in the backward pass, before a weight is written: the weights' device
            lacks an operator of ringcomm.
        ValueError: an argument is out of range or conflicts with another; a parameter is not
            supported; the model is a DistributedDataParallel or produces sparse gradients; in a job
            of several ranks the model is missing, or group= for replicated weights. In the backward
            pass, before a weight is written: the model has changed so that one of these holds, a
            weight was replaced or unfrozen, or the learning rate is negative or NaN.
        RuntimeError: in the backward pass, before a weight is written: the first gradient is not
            finite and there is no loss scale; the loss was not scaled; clip_mode="two_pass" without
            opt.backward(); or, on all ranks, a shard has a gradient on some ranks only. Before the
            second update of a weight in one step. In zero_grad(): weights were updated since the
            last step().

    Collective if gradients are averaged over a group, or weights are sharded: exchanges an object,
    and broadcasts.

    If a backward pass raises on all ranks, the weights whose gradients had arrived stay updated;
    step() ends a step by these gradients, and zero_grad() drops those that wait. Under fully_shard
    both raise RuntimeError then.

    Between a gradient's arrival and step(), a parameter's .grad is a placeholder that raises
    RuntimeError when read, because torch.nn.utils.clip_grad_norm_ would find no gradient. With
    Trainer and Accelerate call register() of ringcomm.integrations.transformers or .accelerate.
    Under torch.compile all gradients are materialized, and clip_mode="two_pass" needs
    torch._functorch.config.donated_buffer = False, or raises.
    """

    operators = ("sgd_update_", "linear_sgd_update_", "embedding_sgd_update_")

    def __init__(
        self,
        model_or_params: nn.Module | Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        *,
        model: nn.Module | None = None,
        **options: Any,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay}
        super().__init__(model_or_params, model, defaults, options_of(self, options))

    def update(self, slot: Slot, gradient: Gradient, numbers: Numbers) -> None:
        """See InBackwardOptimizer."""
        scalars = numbers.lr, numbers.group["weight_decay"], numbers.factor, numbers.seed
        weight, low = slot.local, numbers.state.get("low")
        options: dict[str, Any] = {"low": low, "clip_value": self.options.clip_grad_value}
        if isinstance(gradient, LinearGradient):
            _ops.linear_sgd_update_(weight, *gradient.parts, *scalars, **options)
        elif isinstance(gradient, EmbeddingGradient):
            options["padding_idx"] = gradient.padding_idx
            _ops.embedding_sgd_update_(weight, *gradient.parts, *scalars, **options)
        else:
            options["first_elem"] = slot.cut.first_elem
            _ops_for(weight).sgd_update_(weight, gradient.dense(), *scalars, **options)

    def update_replicas(self, group_name: str, slot: Slot, grad: Tensor, factor: float) -> bool:
        """One operator reduces, updates and gathers, with half as many memory passes."""
        options, weight = self.options, slot.local
        is_rounded = options.stochastic_rounding or options.master is not None
        if is_rounded or weight.dtype == torch.float64 or not weight.is_contiguous():
            return False
        step = LomoStep(
            lr=self._lr_of(slot),
            weight_decay=self._group_of(slot)["weight_decay"],
            clip_value=options.clip_grad_value,
        )
        _ops.reduce_scatter_update_all_gather_(
            *(weight, grad.contiguous(), [], None, group_name),
            optimizer=step.operator_name,
            numbers=step.numbers,
            nesterov=False,
            step=1,
            average=True,
            grad_scale=factor,
        )
        return True


class AdaLomo(InBackwardOptimizer):
    """Updates by second moments inside the backward pass (Lv et al. 2023, arXiv 2310.10195).

    In step t, with beta = 1 - t ** -0.8 and means over the rows and columns of a matrix:

        R <- beta R + (1 - beta) (row means of G^2 + eps[0]), C likewise with column means
        U = G / sqrt(R C / mean(R)),  U <- U / max(1, RMS(U) / clip_threshold)
        s = lr * max(eps[1], RMS(W)), W <- (1 - s * weight_decay) W - s U

    A weight that is not a matrix has one moment per element. State: "exp_avg_sq_row" and
    "exp_avg_sq_col", or "exp_avg_sq", float32, or float64 for float64 weights. Gradients are in
    memory as with Lomo, but those of linear and embedding layers are materialized one at a time.

    Args:
        model_or_params: as for Lomo, like model, options and the errors.
        lr: the learning rate, relative to each weight's RMS; positive.
        weight_decay: decoupled, also relative to it.
        eps: a pair: a summand of squared gradients, and the lower bound of a weight's RMS.
        clip_threshold: the largest RMS of an update.
        decay_rate: the exponent of t in beta, negative.
        model: as Lomo.
        options: as Lomo.
    """

    flat_states = ("exp_avg_sq",)
    operators = ("square_sums", "adalomo_moments_", "adalomo_squares", "adalomo_update_")

    def __init__(
        self,
        model_or_params: nn.Module | Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        *,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        model: nn.Module | None = None,
        **options: Any,
    ) -> None:
        if not (min(eps) > 0 and clip_threshold > 0 and decay_rate < 0):
            raise ValueError(
                f"eps and clip_threshold must be positive and decay_rate negative, got {eps}, "
                f"{clip_threshold} and {decay_rate}"
            )
        defaults: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "eps": eps}
        defaults |= {"clip_threshold": clip_threshold, "decay_rate": decay_rate}
        super().__init__(model_or_params, model, defaults, options_of(self, options))

    def _new_state(self, slot: Slot) -> dict[str, Tensor]:
        zeros = partial(slot.local.new_zeros, dtype=_wide(slot.local))
        if len(slot.cut.shape) != 2:
            return {"exp_avg_sq": zeros(slot.local.numel())}
        rows, columns = slot.cut.shape
        return {"exp_avg_sq_row": zeros(rows), "exp_avg_sq_col": zeros(columns)}

    def update(self, slot: Slot, gradient: Gradient, numbers: Numbers) -> None:
        """See InBackwardOptimizer."""
        group, factor, state = numbers.group, numbers.factor, numbers.state
        cut, local = slot.cut, slot.local
        ops = _ops_for(local)
        low = state.get("low")
        # Row by row, whatever the order in memory.
        weight, grad = local.contiguous(), gradient.dense(_wide(local)).contiguous()
        low_rows = None if low is None else low.contiguous()
        boxes, firsts = _matrices_of(slot)
        limit = {"clip_value": self.options.clip_grad_value}
        grads = pieces_of(grad, boxes)
        sums = [ops.square_sums(part, factor, **limit) for part in grads]
        is_matrix, is_whole = len(cut.shape) == 2, len(boxes) == 1 and not cut.groups
        rows, columns = sums[0] if is_whole or not is_matrix else _full_sums(cut, weight, sums)
        row = state["exp_avg_sq_row"] if is_matrix else None
        column = state["exp_avg_sq_col" if is_matrix else "exp_avg_sq"]
        share = (group["step"] + 1) ** group["decay_rate"]
        factors, mean = ops.adalomo_moments_(row, column, rows, columns, share, group["eps"][0])
        lows = [None] * len(boxes) if low_rows is None else pieces_of(low_rows, boxes)
        blocks: list[tuple[Any, dict[str, Any]]] = []
        for box, own, grad_part, low_part in zip(
            boxes, pieces_of(weight, boxes), grads, lows, strict=True
        ):
            row_part = None if row is None else _along(0, box, row)
            given = own, grad_part, row_part, _along(1, box, factors), mean
            blocks.append((given, {"low": low_part, **limit}))
        found = [ops.adalomo_squares(*given, factor, **options) for given, options in blocks]
        if len(found) == 1 and not cut.groups:
            squares = found[0]
        else:  # of this rank's boxes, of which there may be none
            sums_of = [square.sum(1, keepdim=True) for square in found]
            squares = _summed(sum(sums_of, weight.new_zeros(2, 1, dtype=torch.float64)), cut)
        scalars: tuple[Any, ...] = (squares, max(1, cut.shape.numel()), numbers.lr)
        scalars += (group["weight_decay"], group["eps"][1], group["clip_threshold"])
        scalars += (factor, numbers.seed)
        for (given, options), first in zip(blocks, firsts, strict=True):
            ops.adalomo_update_(*given, *scalars, **options, first_elem=first)
        if weight is not local:
            local.copy_(weight)
        if low is not None and low_rows is not None and low_rows is not low:
            low.copy_(low_rows)


def _ops_for(weight: Tensor) -> Any:
    return _Float64 if weight.dtype == torch.float64 else _ops


class _Float64:
    """Operators for float64 weights, in torch's operations: of models that are checked."""

    @staticmethod
    def sgd_update_(
        weight: Tensor, grad: Tensor, lr: float, decay: float, factor: float, _: int, **options: Any
    ) -> None:
        grad = _clamped(grad, factor, options["clip_value"])
        weight.mul_(1 - lr * decay).sub_(grad, alpha=lr)

    @staticmethod
    def square_sums(
        grad: Tensor, factor: float, *, clip_value: float | None
    ) -> tuple[Tensor, Tensor]:
        squares = _clamped(grad, factor, clip_value).square()
        return squares.sum(1)[None], squares.sum(0)[None]

    @staticmethod
    def adalomo_moments_(
        row: Tensor | None, col: Tensor, rows: Tensor, columns: Tensor, share: float, eps: float
    ) -> tuple[Tensor, Tensor]:
        col.lerp_(columns[0] / (1 if row is None else len(row)) + eps, share)
        if row is None:
            return col.rsqrt(), col
        return col.rsqrt(), row.lerp_(rows[0] / len(col) + eps, share).mean()

    @staticmethod
    def adalomo_squares(weight: Tensor, *given: Any, **options: Any) -> Tensor:
        squares = _direction(given, **options).square(), weight.square()
        return torch.stack([square.sum() for square in squares])[:, None]

    @staticmethod
    def adalomo_update_(weight: Tensor, *given: Any, **options: Any) -> None:
        *factored, squares, num_elems, lr, decay, least_rms, threshold, factor, _ = given
        update_rms, weight_rms = (squares.sum(1) / num_elems).sqrt().unbind()
        size = lr * weight_rms.clamp(min=least_rms)
        update = _direction((*factored, factor), **options)
        update *= size / (update_rms / threshold).clamp(min=1.0)
        weight.mul_(1 - size * decay).sub_(update)


def _direction(given: Sequence[Any], **options: Any) -> Tensor:
    grad, row, col_factor, row_mean, factor = given
    update = _clamped(grad, factor, options["clip_value"]) * col_factor
    return update if row is None else update * (row / row_mean).rsqrt()[:, None]


def _clamped(grad: Tensor, factor: float, clip_value: float | None) -> Tensor:
    grad = grad * factor
    return grad if clip_value is None else grad.clamp(-clip_value, clip_value)


def _wide(weight: Tensor) -> torch.dtype:
    return torch.promote_types(weight.dtype, torch.float32)


def _matrices_of(slot: Slot) -> tuple[tuple[Box, ...], list[int]]:
    """This rank's boxes of a matrix, and the index of each one's first element in the weight.

    A weight that is not a matrix is one row, of the local elements.
    """
    cut = slot.cut
    if len(cut.shape) == 2:
        return cut.boxes, [cut.index_of(box) for box in cut.boxes]
    return (Box((0, 0), (1, slot.local.numel())),), [cut.first_elem]


def _along(dim: int, box: Box, values: Tensor) -> Tensor:
    """The values of a box's rows (dimension 0) or columns (1)."""
    return values.narrow(0, box.offsets[dim], box.sizes[dim])


def _full_sums(
    cut: Cut, weight: Tensor, found: Sequence[tuple[Tensor, Tensor]]
) -> tuple[Tensor, ...]:
    """Sums over the rows and columns of this rank's boxes as those of the full matrix."""
    sums = weight.new_zeros(1, sum(cut.shape), dtype=_wide(weight))
    full = sums.split([*cut.shape], 1)
    for box, parts in zip(cut.boxes, found, strict=True):
        for dim in (0, 1):
            _along(dim, box, full[dim][0]).add_(parts[dim].sum(0))
    _summed(sums, cut)
    return full


def _summed(sums: Tensor, cut: Cut) -> Tensor:
    """Reduces sums over this rank's part to sums over the full weight, in place. Collective."""
    for group in cut.groups:
        dist.all_reduce(sums, group=group)
    return sums.div_(cut.num_copies)
