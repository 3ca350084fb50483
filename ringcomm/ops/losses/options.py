"""Options of the cross-entropy, their checks, and the operators' arguments in order."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import Unpack

from ringcomm.backend import resolve_group

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# ---- the classes of a rank


class VocabShard(NamedTuple):
    """This rank's part of the classes."""

    start: int
    size: int  # of the whole vocabulary, without padding; -1 if known only after the exchange
    group_name: str | None  # None: this rank has them all


# A float counts the classes in the exchange.
MAX_VOCAB_SIZE = 1 << 24


def find_vocab_shard(
    num_columns: int,
    group: dist.ProcessGroup | None,
    vocab_start: int | None,
    vocab_size: int | None,
    weight: Tensor | None,
) -> VocabShard:
    """The shard of a rank with logits of `num_columns` classes, padding included.

    Raises ValueError unless there is one class weight for each class. Collective if there is a
    group and no vocab_start, when shards are in rank order, or no vocab_size for class weights.
    """
    if group is None:
        if vocab_start not in (None, 0):
            raise ValueError(
                f"vocab_start={vocab_start} needs group=, whose ranks have the other shards"
            )
        size = num_columns if vocab_size is None else vocab_size
        if not 0 < size <= num_columns:
            raise ValueError(
                f"logits have {num_columns} columns, but the vocabulary only {size} classes"
            )
        return VocabShard(0, _checked_size(size, weight), None)
    name = resolve_group(group).group_name
    if vocab_start is None or (vocab_size is None and weight is not None):
        counts: list[Any] = [None] * group.size()
        dist.all_gather_object(counts, num_columns, group)  # on whatever devices the group has
        vocab_size = sum(counts) if vocab_size is None else vocab_size
        vocab_start = sum(counts[: group.rank()]) if vocab_start is None else vocab_start
    if vocab_start < 0:
        raise ValueError(f"vocab_start must be 0 or more, got {vocab_start}")
    if vocab_size is None:
        _checked_size(max(1, vocab_start + num_columns))
        return VocabShard(vocab_start, -1, name)
    return VocabShard(vocab_start, _checked_size(vocab_size, weight), name)


def _checked_size(vocab_size: int, weight: Tensor | None = None) -> int:
    if not 0 < vocab_size <= MAX_VOCAB_SIZE:
        raise ValueError(f"vocab_size must be in [1, {MAX_VOCAB_SIZE}], got {vocab_size}")
    if weight is not None and weight.shape != (vocab_size,):
        raise ValueError(
            f"class weights must have one element for each of the {vocab_size} classes, got shape"
            f" {tuple(weight.shape)}: give vocab_size= if the last classes are padding"
        )
    return vocab_size


def shard_of_dtensor(
    logits: Tensor,
    target: Tensor,
    group: dist.ProcessGroup | None,
    vocab_start: int | None,
) -> tuple[Tensor, Tensor, dist.ProcessGroup | None, int | None]:
    """Local logits and target, group and first class of a DTensor of logits sharded by class.

    Logits that are not a DTensor are returned unchanged, with the other arguments.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard  # 0.5 s of `import ringcomm`

    if not isinstance(logits, DTensor):
        return logits, target, group, vocab_start
    if group is not None or vocab_start is not None:
        raise ValueError("a DTensor of logits determines group and vocab_start: leave them out")
    mesh, last = logits.device_mesh, logits.dim() - 1
    sharding = [
        dim for dim, p in enumerate(logits.placements) if isinstance(p, Shard) and p.dim == last
    ]
    others = [p for dim, p in enumerate(logits.placements) if dim not in sharding]
    if len(sharding) > 1 or not all(isinstance(p, Replicate) for p in others):
        raise ValueError(
            "logits must be sharded in their last dimension over one dimension of the mesh, and"
            f" replicated over others; got {logits.placements}"
        )
    if isinstance(target, DTensor):
        if not all(isinstance(p, Replicate) for p in target.placements):
            raise ValueError(f"targets must be replicated, got {target.placements}")
        target = target.to_local()
    if not sharding:
        return logits.to_local(), target, None, None
    rank, world_size = mesh.get_local_rank(sharding[0]), mesh.size(sharding[0])
    longest = -(-logits.shape[last] // world_size)  # torch.chunk's: the last shards are shorter
    start = min(rank * longest, logits.shape[last])
    return logits.to_local(), target, mesh.get_group(sharding[0]), start


# ---- options

# Per-token results: rows of the operators' results.
OUTPUTS = ("loss", "lse", "entropy", "accuracy")
_FP32 = torch.finfo(torch.float32)


InPlace: TypeAlias = bool | Literal["forward"]  # see cross_entropy


class LossArguments(TypedDict, total=False):
    """The options of a loss as users pass them; see cross_entropy."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    logit_scale: float
    reduction: str
    outputs: Sequence[str]


class LossOptions(NamedTuple):
    """The same with defaults."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    reduction: str = "mean"
    outputs: Sequence[str] = ()

    @property
    def wants_more(self) -> bool:
        """Whether the pass over the logits must compute more than the loss needs."""
        return "entropy" in self.outputs or "accuracy" in self.outputs

    def _for_logits(self, shard: VocabShard) -> tuple[Any, ...]:
        return shard.start, shard.size, self.ignore_index, self.logit_scale, self.softcap or 0.0

    def for_stats(self, shard: VocabShard) -> tuple[Any, ...]:
        """The options of softmax_stats."""
        return *self._for_logits(shard), self.label_smoothing > 0, self.wants_more

    def for_loss(self, shard: VocabShard) -> tuple[Any, ...]:
        """The options of cross_entropy_loss."""
        terms = (self.label_smoothing, self.z_loss)
        return shard.size, self.ignore_index, *terms, self.reduction

    def for_grad(self, shard: VocabShard) -> tuple[Any, ...]:
        """The options of cross_entropy_grad and cross_entropy_grad_."""
        return *self._for_logits(shard), self.label_smoothing, self.z_loss


# What every loss of rows of logits takes: target, class weights, num_items, shard and options.
Given = tuple[Tensor, Tensor | None, Tensor | None, VocabShard, LossOptions]


def checked_options(**given: Unpack[LossArguments]) -> LossOptions:
    """The options; raises ValueError for one that is out of range."""
    options = LossOptions(**given)
    if not 0 <= options.label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be in [0, 1], got {options.label_smoothing!r}")
    if not 0 <= options.z_loss < math.inf:
        raise ValueError(f"z_loss must be 0 or more, got {options.z_loss!r}")
    if options.softcap is not None and not _FP32.tiny <= options.softcap <= _FP32.max:
        raise ValueError(
            f"softcap must be None or positive and finite in float32, got {options.softcap!r}"
        )
    if not abs(options.logit_scale) <= _FP32.max:
        raise ValueError(f"logit_scale must be finite in float32, got {options.logit_scale!r}")
    if options.reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction must be "mean", "sum" or "none", got {options.reduction!r}')
    unknown = [name for name in options.outputs if name not in OUTPUTS]
    if unknown:
        raise ValueError(f"outputs must be some of {OUTPUTS}, got {unknown}")
    return options


def check_inplace(inplace: InPlace, reduction: str) -> None:
    """Raises ValueError unless `inplace` has a known value, and supports the reduction."""
    if inplace not in (False, True, "forward"):
        raise ValueError(f'inplace must be False, True or "forward", got {inplace!r}')
    if inplace == "forward" and reduction == "none":
        raise ValueError('inplace="forward" needs reduction="mean" or "sum"; True supports "none"')


def checked_num_items(num_items: float | Tensor | None, reduction: str) -> Tensor | None:
    """`num_items` as a tensor; raises ValueError unless the reduction is "mean"."""
    if num_items is None:
        return None
    if reduction != "mean":
        raise ValueError(f'num_items needs reduction="mean", got {reduction!r}')
    if isinstance(num_items, Tensor):
        if num_items.numel() != 1:
            raise ValueError(f"num_items must be one number, got shape {tuple(num_items.shape)}")
        return num_items.detach().reshape([])
    return torch.tensor(float(num_items), dtype=torch.float64, device="cpu")


def checked_weight(
    logits: Tensor, weight: Tensor | None, group: Any, name: str = "logits"
) -> Tensor | None:
    """Checks logits and class weights, except their number, and returns the weights in float32.

    float64 logits need weights in float64, as in torch.
    """
    if logits.dtype not in DTYPES and (logits.dtype != torch.float64 or group is not None):
        raise TypeError(
            f"{name} must be in float32, float16 or bfloat16, or without a group in float64, got"
            f" {logits.dtype}"
        )
    if weight is None:
        return None
    if not weight.is_floating_point() or logits.dtype == torch.float64 != weight.dtype:
        raise TypeError(
            f"class weights must be floating-point, float64 for float64 {name}, got {weight.dtype}"
        )
    if weight.device != logits.device:
        raise ValueError(f"class weights must be on {logits.device}, got {weight.device}")
    if weight.requires_grad:
        raise ValueError("class weights get no gradient and must not require grad")
    return weight.to(torch.promote_types(logits.dtype, torch.float32))


def has_rows(matrix: Tensor) -> bool:
    """Whether the rows of a matrix are contiguous and do not overlap."""
    num_rows, width = matrix.shape
    return (width <= 1 or matrix.stride(1) == 1) and (num_rows <= 1 or matrix.stride(0) >= width)


def check_targets(target: Tensor, shape: torch.Size, device: torch.device) -> None:
    """Raises ValueError or TypeError unless targets are class indices of the given shape."""
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise TypeError(f"targets must be integers, or probabilities, got {target.dtype}")
    if target.shape != shape:
        raise ValueError(f"targets must have shape {tuple(shape)}, got {tuple(target.shape)}")
    if target.device != device:
        raise ValueError(f"targets must be on {device}, got {target.device}")


def with_outputs(loss: Tensor, by_token: Tensor, target: Tensor, options: LossOptions) -> Any:
    """The result for the user: the loss in its shape, and the outputs by name if there are any."""
    if options.reduction == "none":
        loss = loss.view(target.shape)
    if not options.outputs:
        return loss
    named = dict(zip(OUTPUTS, by_token.unbind(0), strict=True))
    return loss, {name: named[name].view(target.shape) for name in options.outputs}


def first_order_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass that raises under create_graph=True.

    once_differentiable alone raises only where the upstream gradient requires grad; that of
    autograd.grad(loss, ...) does not, and the second derivative would be 0.
    """
    once = once_differentiable(backward)

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "ringcomm's cross-entropy has no second derivative (create_graph=True): use"
                " torch.nn.functional.cross_entropy for this loss"
            )
        # Here it would only enter no_grad() once more.
        compute = once if torch.compiler.is_compiling() else backward
        return compute(ctx, *grads)

    return checked
