"""LOMO: SGD whose gradients are consumed while the backward pass makes them; and AdaLomo."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcomm.optim.gradients import EmbeddingGradient, Gradient, LinearGradient
from ringcomm.optim.in_backward import InBackwardOptimizer, StepOptions
from ringcomm.optim.slot import Layout, Slot

_ops: Any = torch.ops.ringcomm


class Lomo(InBackwardOptimizer):
    """W <- (1 - lr * weight_decay) * W - lr * G, inside the backward pass (Lv et al. 2023).

    A torch.optim.Optimizer for the ordinary loop: forward, loss.backward(), step(), zero_grad(),
    schedulers, closures, state_dict. The weights are new when backward() returns, and at most one
    gradient is in memory at a time; those of nn.Linear and nn.Embedding never are, if the model is
    given and no ranks share the work. step() then only counts.

    Clipping by norm and a loss scale must know the whole step before it is made. By default
    gradients are held until step(); of a layer its input and its output's gradient, where that is
    smaller. With clip_mode="two_pass" `opt.backward(loss)` runs the backward pass twice, first for
    the norm: LOMO's memory, a second backward pass (and recomputation), never a second forward.

    Args:
        model_or_params: a model, of which all that requires grad is trained; or parameters, or
            torch.optim's parameter groups.
        lr: the learning rate, positive.
        weight_decay: decoupled; of an embedding's table, too, it decays all rows.
        model: beside parameters or groups, the model they are in: for fusion, names, and layers of
            tensor parallelism. Required in a job of several ranks.
        options: these, with their defaults:
            clip_grad_norm (None): multiply all gradients by min(1, clip_grad_norm / norm), the norm
            over gradients of all ranks. Each element of a weight that ranks share counts once.
            clip_grad_value (None): clamp each element to +-clip_grad_value instead.
            clip_mode ("deferred"): or "two_pass".
            loss_scale (None): a factor for float16, or "dynamic": from 2**16, halved on overflow,
            doubled after 2000 good steps. The loop then is opt.scale(loss).backward(). With Inf or
            NaN in a gradient no weight and no state changes on any rank.
            accumulation_steps (1): micro-batches per step(). Their gradients are kept until the
            last one's are consumed: all gradients' memory.
            reduce_dtype (torch.float32): what gradients are accumulated and reduced in; or the
            dtype of 16-bit weights. Weights of fully_shard go by its MixedPrecisionPolicy.
            group (None): ranks with replicas, over which each gradient is averaged inside the
            backward pass. Replicas stay equal to the last bit. A weight without a gradient on some
            ranks counts as zeros there; without one on all ranks it is left alone. Required for
            replicated weights in a job of several ranks; "none" has this rank train a model of its
            own. Shards of fully_shard or WeightShards know their group.
            mesh (None): a DeviceMesh of one dimension in place of a group.
            overlap (None): let the backward pass go on while a gradient is reduced; two are in
            memory then. None: where the ranks are not on CPUs.
            stochastic_rounding (False): round bfloat16 weights up or down by chance, on average
            right, so that small updates are not lost; no memory.
            master (None): "split" keeps what bfloat16 weights lack of fp32 in 2 more bytes a
            weight, exactly.
            seed (0): of stochastic rounding; 32 bits.

    Raises:
        ValueError: an argument is out of range or excludes another; a parameter cannot be managed;
            the model is a DistributedDataParallel or makes sparse gradients; in a job of several
            ranks there is no model, or no group= for replicated weights. In the forward pass: such
            a thing has come to be since. In the backward pass: the learning rate is negative or
            NaN.
        RuntimeError: in the backward pass, before a weight is written: the first gradient is not
            finite and there is no loss scale; the loss was not scaled; clip_mode="two_pass" and not
            opt.backward(); a shard gets a gradient on some ranks only (on all ranks). Before that
            weight is written: it was updated in this step already.

    Parameters without a gradient are left alone, as in torch.optim. Between the use of a gradient
    and step() a parameter's .grad is a stand-in that raises RuntimeError when read, because
    torch.nn.utils.clip_grad_norm_ and torch.amp.GradScaler would find nothing. With Trainer and
    Accelerate call prepare() of ringcomm.integrations.transformers or .accelerate. Under
    torch.compile all gradients are made as tensors, and clip_mode="two_pass" wants
    torch._functorch.config.donated_buffer = False, or raises.
    """

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
        super().__init__(model_or_params, model, defaults, StepOptions(**options))

    def _new_state(self, slot: Slot) -> dict[str, Tensor]:
        return {}

    def update(self, slot: Slot, gradient: Gradient, factor: float) -> None:
        """See InBackwardOptimizer."""
        decay = self._group_of(slot)["weight_decay"]
        scalars = (self._lr_of(slot), decay, factor, self._rounding_seed(slot))
        weight, low = slot.local, self.state[slot.param].get("low")
        options: dict[str, Any] = {"low": low, "clip_value": self.options.clip_grad_value}
        if isinstance(gradient, LinearGradient):
            _ops.linear_sgd_update_(weight, *gradient.parts, *scalars, **options)
        elif isinstance(gradient, EmbeddingGradient):
            options["padding_idx"] = gradient.padding_idx
            _ops.embedding_sgd_update_(weight, *gradient.parts, *scalars, **options)
        else:
            options["first_elem"] = slot.layout.first_elem
            _ops.sgd_update_(weight, gradient.dense(), *scalars, **options)

    def update_replicas(self, group_name: str, slot: Slot, grad: Tensor, factor: float) -> bool:
        """By the operator that reduces, updates and gathers, on CPUs: half of the passes."""
        options, weight = self.options, slot.local
        is_rounded = options.stochastic_rounding or options.master is not None
        if is_rounded or weight.device.type != "cpu" or not weight.is_contiguous():
            return False
        _ops.reduce_scatter_update_all_gather_.lomo(
            weight,
            grad.contiguous(),
            group_name,
            lr=self._lr_of(slot),
            weight_decay=self._group_of(slot)["weight_decay"],
            clip_value=options.clip_grad_value,
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

    What is no matrix keeps a moment for each element. State: "exp_avg_sq_row" and "exp_avg_sq_col",
    or "exp_avg_sq", float32. Of a linear layer's gradient one exists at a time.

    Args:
        model_or_params: as Lomo, as are model, options and what is raised.
        lr: the learning rate, relative to each weight's RMS; positive.
        weight_decay: decoupled, relative likewise.
        eps: added to squares of gradients; the least RMS of a weight.
        clip_threshold: the largest RMS of an update.
        decay_rate: the exponent of t in beta, negative.
        model: as Lomo.
        options: as Lomo.
    """

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
        super().__init__(model_or_params, model, defaults, StepOptions(**options))

    def _new_state(self, slot: Slot) -> dict[str, Tensor]:
        rows, columns = slot.layout.matrix
        device = slot.local.device
        if not slot.layout.is_matrix:
            return {"exp_avg_sq": torch.zeros(columns, device=device)}
        return {
            "exp_avg_sq_row": torch.zeros(rows, device=device),
            "exp_avg_sq_col": torch.zeros(columns, device=device),
        }

    def update(self, slot: Slot, gradient: Gradient, factor: float) -> None:
        """See InBackwardOptimizer."""
        group, layout, local = self._group_of(slot), slot.layout, slot.local
        lr, seed = self._lr_of(slot), self._rounding_seed(slot)
        low = self.state[slot.param].get("low")
        # In the order of memory.
        weight, grad = _flat(local, local), _flat(gradient.dense(torch.float32), local)
        low = None if low is None else _flat(low, local)
        rows, columns = self._factors(slot, grad, factor)
        blocks = [
            (block.of(weight), block.of(grad), rows[block.rows], columns[block.columns])
            for block in layout.blocks
        ]
        options: list[dict[str, Any]] = [
            {
                "low": None if low is None else block.of(low),
                "clip_value": self.options.clip_grad_value,
            }
            for block in layout.blocks
        ]
        squares = torch.zeros(2, device=weight.device)
        for given, more in zip(blocks, options, strict=True):
            squares += _ops.adalomo_squares(*given, factor, **more)
        mean_squares = _summed(squares, layout) / max(1, layout.shape.numel())
        update_rms, weight_rms = mean_squares.sqrt().unbind()
        size = lr * weight_rms.clamp(min=group["eps"][1])
        shrunk = size / (update_rms / group["clip_threshold"]).clamp(min=1.0)
        scalars = torch.stack([shrunk, 1 - size * group["weight_decay"]])
        for given, more, block in zip(blocks, options, layout.blocks, strict=True):
            first_elem = layout.first_elem + block.begin
            _ops.adalomo_update_(*given, scalars, factor, seed, **more, first_elem=first_elem)

    def _factors(self, slot: Slot, grad: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        """Moves the moments on; what rows and columns of G are multiplied by to make U."""
        group, state, layout = self._group_of(slot), self.state[slot.param], slot.layout
        eps, weight = group["eps"][0], (group["step"] + 1) ** group["decay_rate"]
        num_rows, num_columns = layout.matrix
        sums = torch.zeros(num_rows + num_columns, device=grad.device)
        rows, columns = sums[:num_rows], sums[num_rows:]
        for block in layout.blocks:
            of_rows, of_columns = _ops.square_sums(
                block.of(grad), factor, clip_value=self.options.clip_grad_value
            )
            rows[block.rows] += of_rows
            columns[block.columns] += of_columns
        if not layout.is_matrix:
            moment = state["exp_avg_sq"].lerp_(columns + eps, weight)
            return torch.ones(1, device=grad.device), moment.rsqrt()
        _summed(sums, layout)
        row = state["exp_avg_sq_row"].lerp_(rows / num_columns + eps, weight)
        column = state["exp_avg_sq_col"].lerp_(columns / num_rows + eps, weight)
        return (row / row.mean()).rsqrt(), column.rsqrt()


def _summed(sums: Tensor, layout: Layout) -> Tensor:
    """Sums over this rank's part of a weight become those of the whole, in place. Collective."""
    for group in layout.groups:
        dist.all_reduce(sums, group=group)
    return sums.div_(layout.num_copies)


def _flat(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor's elements in the memory order of `like`, which is dense."""
    if tensor.stride() != like.stride():
        tensor = torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
    return tensor.as_strided([tensor.numel()], [1])
