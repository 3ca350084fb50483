"""Cross-entropy's operators on CUDA tensors: what csrc/bindings/ops/cross_entropy_ops.cc has for
the CPU, launched as the Triton kernels of ringcomm.kernels.

Nothing here waits for the device, but for RINGCOMM_CHECK_TARGETS. Triton is imported by the first
launch.
"""

import functools
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm import env
from ringcomm.ops.loss_options import LOGIT_DTYPES
from ringcomm.ops.triton_plans import (
    VECTOR_BYTES,
    grad_plan,
    held_plan,
    stats_plan,
    twice_plan,
)

NUM_STATS = 6
TOKEN_BLOCK = 128  # of kernels over tokens
COUNT_BLOCK = 2048  # of those that are one program


class Kernels(NamedTuple):
    """The modules of kernels, once Triton is imported."""

    rows: ModuleType
    in_place: ModuleType
    tokens: ModuleType


@functools.cache
def _kernels() -> Kernels:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "ringcomm's cross_entropy on CUDA tensors is made of Triton kernels, and `import triton`"
            f" failed ({error}): pip install triton"
        ) from error
    from ringcomm.kernels import cross_entropy, cross_entropy_in_place, token_losses

    return Kernels(cross_entropy, cross_entropy_in_place, token_losses)


# ---- rows


class Rows(NamedTuple):
    """Logits and targets, checked, and what kernels take of them."""

    logits: Tensor
    target: Tensor
    weight: Tensor | None
    vocab_start: int
    num_classes: int

    @property
    def num_tokens(self) -> int:
        return self.logits.shape[0]

    @property
    def width(self) -> int:
        return self.logits.shape[1]

    @property
    def shard_weight(self) -> Tensor | None:
        return None if self.weight is None else self.weight[self.vocab_start :]

    @property
    def vector_elems(self) -> int:
        return VECTOR_BYTES // self.logits.element_size()


def _lead(tensor: Tensor) -> int:
    """Elements between the last 16-byte boundary and the tensor."""
    return tensor.data_ptr() % VECTOR_BYTES // tensor.element_size()


def _checked_weight(weight: Tensor | None, vocab_size: int) -> Tensor | None:
    if weight is None:
        return None
    if weight.dtype != torch.float32:
        raise TypeError(f"ringcomm: class weights are float32, got {weight.dtype}")
    if weight.dim() != 1 or weight.shape[0] != vocab_size:
        raise ValueError(
            f"ringcomm: one weight for each of the {vocab_size} classes, got shape"
            f" {tuple(weight.shape)}"
        )
    return weight.contiguous()


def _rows_of(
    logits: Tensor, target: Tensor, weight: Tensor | None, vocab_start: int, vocab_size: int
) -> Rows:
    if logits.dim() != 2 or (logits.stride(1) != 1 and logits.shape[1] > 1):
        raise ValueError(
            f"ringcomm: logits are rows of classes side by side, got shape {tuple(logits.shape)}"
            f" with strides {logits.stride()}"
        )
    if target.dim() != 1 or target.shape[0] != logits.shape[0]:
        raise ValueError(
            f"ringcomm: one target for each row of logits, got shape {tuple(target.shape)} for"
            f" logits of shape {tuple(logits.shape)}"
        )
    if target.dtype != torch.int64:
        raise TypeError(f"ringcomm: targets are int64, got {target.dtype}")
    if logits.dtype not in LOGIT_DTYPES:
        raise TypeError(
            f"ringcomm: logits are float32, float16 or bfloat16, got {logits.dtype}"
        )
    width = logits.shape[1]
    num_classes = width if vocab_size < 0 else min(max(vocab_size - vocab_start, 0), width)
    weight = _checked_weight(weight, vocab_size)
    return Rows(logits, target.contiguous(), weight, vocab_start, num_classes)


def _check_stats(stats: Tensor, num_tokens: int) -> None:
    wanted = (num_tokens + 1, NUM_STATS)
    if stats.dtype != torch.float32 or not stats.is_contiguous() or stats.shape != wanted:
        raise ValueError(
            f"ringcomm: stats for {num_tokens} tokens are contiguous float32 of {num_tokens + 1}"
            f" rows of {NUM_STATS}, got {stats.dtype} of shape {tuple(stats.shape)}"
        )


def _check_targets(target: Tensor, vocab_size: int, ignore_index: int) -> None:
    """IndexError naming the first that is no class. Waits for the device."""
    is_wrong = (target != ignore_index) & ((target < 0) | (target >= vocab_size))
    wrong = is_wrong.nonzero()
    if len(wrong):
        first = int(wrong[0])
        raise IndexError(
            f"ringcomm: target {first} is {int(target[first])}, and there are {vocab_size} classes;"
            f" ignore_index is {ignore_index}"
        )


def _check_shards(stats: Tensor, vocab_size: int) -> int:
    """The number of all shards' classes, or ValueError where it is none. Waits for the device."""
    end, _, size, *_ = stats[-1].tolist()
    if end != size:
        raise ValueError(
            f"ringcomm: the shards of the vocabulary do not add up: they have {size:.0f} classes"
            f" together, and the last one ends at {end:.0f}; is every vocab_start right?"
        )
    if vocab_size >= 0 and size != vocab_size:
        raise ValueError(
            f"ringcomm: the shards have {size:.0f} of the vocabulary's {vocab_size} classes"
        )
    return int(size)


def _mark_written(tensor: Tensor) -> None:
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


# ---- softmax_stats


def softmax_stats(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    vocab_start: int,
    vocab_size: int,
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    wants_weighted: bool,
    wants_more: bool,
) -> Tensor:
    """The stats of a shard's logits, shape (tokens + 1, 6)."""
    rows = _rows_of(logits, target, weight, vocab_start, vocab_size)
    stats = logits.new_empty([rows.num_tokens + 1, NUM_STATS], dtype=torch.float32)
    plan = stats_plan(rows.width)
    with torch.cuda.device_of(logits):
        _kernels().rows.stats_kernel[(rows.num_tokens + 1,)](
            logits,
            rows.target,
            rows.shard_weight if wants_weighted else None,
            stats,
            _lead(logits),
            logits.stride(0),
            rows.num_tokens,
            rows.num_classes,
            vocab_start,
            ignore_index,
            logit_scale,
            softcap,
            VEC=rows.vector_elems,
            BLOCK=plan.block,
            HAS_SOFTCAP=softcap != 0,
            WANTS_WEIGHTED=wants_weighted,
            WANTS_MORE=wants_more,
            num_warps=plan.num_warps,
        )
    return stats


# ---- merge_softmax_stats


def merge_gathered(gathered: Tensor, num_ranks: int) -> Tensor:
    """The stats of all ranks, one behind the other, as those of whole rows."""
    num_entries = gathered.shape[0] // num_ranks
    merged = gathered.new_empty([num_entries, NUM_STATS])
    with torch.cuda.device_of(gathered):
        _kernels().tokens.merge_kernel[(_num_blocks(num_entries, TOKEN_BLOCK),)](
            gathered, merged, num_entries, NUM_RANKS=num_ranks, BLOCK=TOKEN_BLOCK, num_warps=4
        )
    return merged


def merge_softmax_stats(stats: Tensor, group_name: str) -> Tensor:
    """The ranks' stats merged in rank order, after an all_gather by the group's own backend."""
    if (
        stats.dtype != torch.float32
        or stats.dim() != 2
        or stats.shape[1] != NUM_STATS
        or not stats.is_contiguous()
    ):
        raise ValueError(
            f"ringcomm: stats are contiguous float32 of rows of {NUM_STATS}, got {stats.dtype} of"
            f" shape {tuple(stats.shape)}"
        )
    resolve: Any = dist.distributed_c10d._resolve_process_group
    group = resolve(group_name)
    gathered = stats.new_empty([group.size() * stats.shape[0], NUM_STATS])
    dist.all_gather_into_tensor(gathered, stats, group=group)
    return merge_gathered(gathered, group.size())


def _num_blocks(num_elems: int, block: int) -> int:
    return -(-num_elems // block)


# ---- cross_entropy_loss


def _denominator(
    target: Tensor,
    weight: Tensor | None,
    num_items: Tensor | None,
    ignore_index: int,
    reduction: str,
) -> Tensor:
    """What the losses' sum is divided by: float64, on the target's device."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"ringcomm: reduction is mean, sum or none, got '{reduction}'")
    if reduction != "mean":
        return target.new_ones([], dtype=torch.float64)
    if num_items is not None:
        if num_items.device == target.device:
            return num_items.detach().reshape([]).to(torch.float64, copy=True)
        # A number of the host's. To copy it over would wait for the device.
        return target.new_full([], num_items.item(), dtype=torch.float64)
    denominator = target.new_empty([], dtype=torch.float64)
    with torch.cuda.device_of(target):
        _kernels().tokens.count_kernel[(1,)](
            target,
            weight,
            denominator,
            target.numel(),
            0 if weight is None else weight.numel(),
            ignore_index,
            BLOCK=COUNT_BLOCK,
            num_warps=8,
        )
    return denominator


def _weight_sum(weight: Tensor | None, label_smoothing: float) -> Tensor | None:
    if weight is None or label_smoothing == 0:
        return None
    return weight.sum(dtype=torch.float64)


def _losses(
    stats: Tensor,
    target: Tensor,
    weight: Tensor | None,
    denominator: Tensor,
    vocab_size: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The results of cross_entropy_loss, from stats that are merged."""
    num_tokens = target.numel()
    by_token = stats.new_empty([4, num_tokens])
    tokens = _kernels().tokens
    with torch.cuda.device_of(stats):
        if num_tokens:
            tokens.loss_kernel[(_num_blocks(num_tokens, TOKEN_BLOCK),)](
                stats,
                target,
                weight,
                _weight_sum(weight, label_smoothing),
                by_token,
                num_tokens,
                vocab_size,
                ignore_index,
                label_smoothing,
                z_loss,
                SMOOTHS=label_smoothing != 0,
                BLOCK=TOKEN_BLOCK,
                num_warps=4,
            )
        if reduction == "none":
            return by_token[0].clone(), by_token, denominator
        loss = stats.new_empty([])
        tokens.reduce_kernel[(1,)](
            by_token, denominator, loss, num_tokens, BLOCK=COUNT_BLOCK, num_warps=8
        )
    return loss, by_token, denominator


def cross_entropy_loss(
    stats: Tensor,
    target: Tensor,
    weight: Tensor | None,
    num_items: Tensor | None,
    vocab_size: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, what is known of each token, and the denominator."""
    target = target.contiguous()
    _check_stats(stats, target.numel())
    if weight is not None and vocab_size < 0:
        vocab_size = weight.numel()
    weight = _checked_weight(weight, vocab_size)
    if env.checks_targets():
        _check_targets(target, _check_shards(stats, vocab_size), ignore_index)
    denominator = _denominator(target, weight, num_items, ignore_index, reduction)
    return _losses(
        stats,
        target,
        weight,
        denominator,
        vocab_size,
        ignore_index,
        label_smoothing,
        z_loss,
        reduction,
    )


# ---- cross_entropy_grad


def _differentiate(
    grad_loss: Tensor,
    rows: Rows,
    stats: Tensor,
    denominator: Tensor,
    vocab_start: int,
    vocab_size: int,
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    label_smoothing: float,
    z_loss: float,
    to: Tensor,
) -> None:
    """The gradient goes into `to`, which may be the logits."""
    logits = rows.logits
    _check_stats(stats, rows.num_tokens)
    if grad_loss.dim() != 0 and grad_loss.numel() != rows.num_tokens:
        raise ValueError(
            "ringcomm: the loss's gradient is one number, or one for each of"
            f" {rows.num_tokens} tokens; got shape {tuple(grad_loss.shape)}"
        )
    if not logits.numel():
        return
    vector, plan = rows.vector_elems, grad_plan(rows.width, logits.element_size())
    lead, to_lead = _lead(logits), _lead(to)
    is_aligned = lead == to_lead and (logits.stride(0) - to.stride(0)) % vector == 0
    with torch.cuda.device_of(logits):
        _kernels().rows.grad_kernel[(rows.num_tokens,)](
            grad_loss.to(torch.float32).contiguous(),
            int(grad_loss.dim() != 0),
            logits,
            to,
            rows.target,
            rows.weight,
            rows.shard_weight,
            _weight_sum(rows.weight, label_smoothing),
            stats,
            denominator.to(torch.float64),
            lead,
            logits.stride(0),
            to_lead,
            to.stride(0),
            rows.num_tokens,
            rows.width,
            rows.num_classes,
            vocab_start,
            vocab_size,
            ignore_index,
            logit_scale,
            softcap,
            label_smoothing,
            z_loss,
            VEC=vector,
            BLOCK=plan.block,
            HAS_SOFTCAP=softcap != 0,
            SMOOTHS=label_smoothing != 0,
            HAS_PADDING=rows.num_classes < rows.width,
            IS_ALIGNED=is_aligned,
            num_warps=plan.num_warps,
        )


def cross_entropy_grad(
    grad_loss: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    denominator: Tensor,
    vocab_start: int,
    vocab_size: int,
    *options: Any,
) -> Tensor:
    """The gradient of the logits, as a new tensor."""
    rows = _rows_of(logits, target, weight, vocab_start, vocab_size)
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    _differentiate(grad_loss, rows, stats, denominator, vocab_start, vocab_size, *options, grad)
    return grad


def cross_entropy_grad_(
    grad_loss: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    denominator: Tensor,
    vocab_start: int,
    vocab_size: int,
    *options: Any,
) -> None:
    """The same in the place of the logits."""
    rows = _rows_of(logits, target, weight, vocab_start, vocab_size)
    _differentiate(grad_loss, rows, stats, denominator, vocab_start, vocab_size, *options, logits)
    _mark_written(logits)


# ---- cross_entropy_and_grad_


def cross_entropy_and_grad_(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    num_items: Tensor | None,
    vocab_size: int,
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
    wants_more: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of all classes' logits, which become their gradient.

    float16 has no room for a gradient over the number of tokens: it is left out there, and the
    caller divides.
    """
    rows = _rows_of(logits, target, weight, 0, vocab_size)
    if env.checks_targets():
        _check_targets(rows.target, vocab_size, ignore_index)
    denominator = _denominator(rows.target, rows.weight, num_items, ignore_index, reduction)
    is_narrow = logits.dtype == torch.float16
    stats = logits.new_empty([rows.num_tokens + 1, NUM_STATS], dtype=torch.float32)
    held = held_plan(rows.width, (softcap != 0) + (weight is not None) + wants_more)
    plan = held or twice_plan(logits.element_size())
    with torch.cuda.device_of(logits):
        _kernels().in_place.stats_and_grad_kernel[(rows.num_tokens + 1,)](
            logits,
            rows.target,
            rows.weight,
            _weight_sum(rows.weight, label_smoothing),
            stats,
            torch.ones_like(denominator) if is_narrow else denominator,
            _lead(logits),
            logits.stride(0),
            rows.num_tokens,
            rows.width,
            rows.num_classes,
            ignore_index,
            logit_scale,
            softcap,
            label_smoothing,
            z_loss,
            VEC=rows.vector_elems,
            BLOCK=plan.block,
            HAS_SOFTCAP=softcap != 0,
            SMOOTHS=label_smoothing != 0,
            HAS_PADDING=rows.num_classes < rows.width,
            WANTS_MORE=wants_more,
            IS_HELD=held is not None,
            num_warps=plan.num_warps,
        )
    _mark_written(logits)
    return _losses(
        stats,
        rows.target,
        rows.weight,
        denominator,
        vocab_size,
        ignore_index,
        label_smoothing,
        z_loss,
        reduction,
    )


# ---- scale_


def scale_(tensor: Tensor, factor: Tensor) -> None:
    """Multiplies rows in place by a number that the device reads; by 1 it touches nothing."""
    rows = tensor if tensor.dim() == 2 else tensor.view(1, -1)
    if rows.dtype not in LOGIT_DTYPES or (rows.stride(1) != 1 and rows.shape[1] > 1):
        raise ValueError(
            f"ringcomm: scale_ wants rows side by side of float32, float16 or bfloat16, got"
            f" {tensor.dtype} with strides {tensor.stride()}"
        )
    if rows.numel():
        plan = grad_plan(rows.shape[1], rows.element_size())
        with torch.cuda.device_of(rows):
            _kernels().rows.scale_kernel[(rows.shape[0],)](
                rows,
                factor.to(rows.device),
                _lead(rows),
                rows.stride(0),
                rows.shape[1],
                VEC=VECTOR_BYTES // rows.element_size(),
                BLOCK=plan.block,
                num_warps=plan.num_warps,
            )
    _mark_written(tensor)


_CUDA = torch.library.Library("ringcomm", "IMPL", "CUDA")
for _launcher in (
    softmax_stats,
    merge_softmax_stats,
    cross_entropy_loss,
    cross_entropy_grad,
    cross_entropy_grad_,
    cross_entropy_and_grad_,
    scale_,
):
    _CUDA.impl(_launcher.__name__, _launcher)
