"""What exact clipping costs, and which way of it to take."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import nn

from ringcomm.optim.layouts import local_tensor
from ringcomm.optim.managed import ModelWeights
from ringcomm.parallel import find_shards

_INDEX_BYTES = 8  # of a token in an embedding, int64


@dataclasses.dataclass(frozen=True)
class WeightCost:
    """One weight's share.

    Attributes:
        name: the parameter's.
        shape: its shape.
        held_bytes: what a deferred step holds of its gradient.
        is_pair: whether that is (input, output's gradient), or (tokens, output's gradient).
        norm_ops: multiplications and additions of the gradient's norm.
        is_gram: whether the norm is taken by the Gram identity.
        backward_ops: those of another backward pass through the layer: the input's gradient.
        forward_ops: those of the layer's forward pass, where a checkpoint repeats it.
    """

    name: str
    shape: tuple[int, ...]
    held_bytes: int
    is_pair: bool
    norm_ops: int
    is_gram: bool
    backward_ops: int
    forward_ops: int


@dataclasses.dataclass(frozen=True)
class ClipProposal:
    """How to clip; print it for the reasons.

    Attributes:
        mode: "deferred" or "two_pass".
        held_bytes: what that mode holds of gradients.
        extra_ops: multiplications and additions that it adds to a step.
        deferred_bytes: what "deferred" holds, whatever was proposed; "two_pass" holds nothing.
        deferred_ops: what "deferred" adds: the norm.
        two_pass_ops: what "two_pass" adds: the norm and another backward pass.
        num_tokens: of a step.
        max_held_bytes: the limit that was given.
        is_checkpointed: whether another backward pass repeats forward passes.
        weights: each weight's share.
    """

    mode: str
    held_bytes: int
    extra_ops: int
    deferred_bytes: int
    deferred_ops: int
    two_pass_ops: int
    num_tokens: int
    max_held_bytes: int | None
    is_checkpointed: bool
    weights: list[WeightCost]

    def __str__(self) -> str:
        return "\n".join(_reasons(self))


def propose_clip_mode(
    model: nn.Module,
    num_tokens: int,
    max_held_bytes: int | None = None,
    *,
    is_checkpointed: bool | None = None,
    has_replicas: bool = False,
) -> ClipProposal:
    """Which clip_mode of Lomo and AdaLomo to take for clip_grad_norm, and what each costs.

    "deferred" has hardly more to compute than a step without clipping, and holds each gradient
    until step(): as a tensor or as the pair (input, output's gradient), whichever is smaller. What
    ranks have reduced is float32, by Lomo's default. "deferred" is proposed where that fits.
    "two_pass" holds nothing, and runs the backward pass again.

    Counts are of layers' products alone: operations of attention and of what works element by
    element are left out, so "two_pass" takes somewhat more. Every layer is taken to see all tokens
    once, in the weight's dtype, or autocast's where that is on.

    Args:
        model: as Lomo gets it, on any device ("meta" too).
        num_tokens: of a step on this rank; for layers with other inputs, their rows.
        max_held_bytes: as Lomo's; None for no limit.
        is_checkpointed: whether the backward pass repeats forward passes; None asks the model, as
            those of transformers say.
        has_replicas: whether Lomo gets a group, whose gradients are all made as tensors.

    Raises:
        ValueError: num_tokens or max_held_bytes is not positive, or as Lomo of a model.
    """
    if num_tokens < 1:
        raise ValueError(f"num_tokens is positive, got {num_tokens}")
    if max_held_bytes is not None and max_held_bytes < 1:
        raise ValueError(f"max_held_bytes is positive or None, got {max_held_bytes}")
    if is_checkpointed is None:
        is_checkpointed = any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    weights = list(_weight_costs(model, num_tokens, has_replicas))
    if not weights:
        raise ValueError("the model has no parameter that requires grad")
    held = sum(weight.held_bytes for weight in weights)
    norm = sum(weight.norm_ops for weight in weights)
    again = sum(weight.backward_ops for weight in weights)
    if is_checkpointed:
        again += sum(weight.forward_ops for weight in weights)
    is_deferred = max_held_bytes is None or held <= max_held_bytes
    return ClipProposal(
        mode="deferred" if is_deferred else "two_pass",
        held_bytes=held if is_deferred else 0,
        extra_ops=norm if is_deferred else norm + again,
        deferred_bytes=held,
        deferred_ops=norm,
        two_pass_ops=norm + again,
        num_tokens=num_tokens,
        max_held_bytes=max_held_bytes,
        is_checkpointed=is_checkpointed,
        weights=weights,
    )


def _weight_costs(model: nn.Module, num_tokens: int, has_replicas: bool) -> Iterator[WeightCost]:
    known = ModelWeights(model)
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        known.check(param, name)
        is_alone = not has_replicas and find_shards(param) is None
        owner = known.fusable_owner(param) if is_alone else None
        if isinstance(owner, nn.Linear):
            yield _of_linear(name, param, num_tokens)
        elif owner is not None:
            yield _of_embedding(name, param, num_tokens)
        else:
            product = _products(known.owners(param), param, num_tokens)
            yield _of_tensor(name, param, product, is_reduced=not is_alone)


def _products(owners: list[nn.Module], param: nn.Parameter, num_tokens: int) -> int:
    """Operations of one product with the weight, in those layers that multiply by it."""
    num_linear = sum(isinstance(m, nn.Linear) and m.weight is param for m in owners)
    return num_linear * 2 * num_tokens * param.numel()


def _of_linear(name: str, param: nn.Parameter, num_tokens: int) -> WeightCost:
    """As LinearGradient and InBackwardOptimizer._hold."""
    num_out, num_in = param.shape
    pair_bytes = num_tokens * (num_in + num_out) * _token_dtype(param).itemsize
    is_pair = pair_bytes <= local_tensor(param, find_shards(param)).nbytes
    product = 2 * num_tokens * num_in * num_out
    is_gram = num_tokens * (num_in + num_out) < num_in * num_out
    return WeightCost(
        name=name,
        shape=tuple(param.shape),
        held_bytes=pair_bytes if is_pair else local_tensor(param, find_shards(param)).nbytes,
        is_pair=is_pair,
        norm_ops=2 * num_tokens**2 * (num_in + num_out) if is_gram else product,
        is_gram=is_gram,
        backward_ops=product,
        forward_ops=product,
    )


def _of_embedding(name: str, param: nn.Parameter, num_tokens: int) -> WeightCost:
    """As EmbeddingGradient, whose norm adds up the tokens of each row first."""
    width = param.shape[1]
    pair_bytes = num_tokens * (_INDEX_BYTES + width * param.element_size())
    is_pair = pair_bytes <= local_tensor(param, find_shards(param)).nbytes
    return WeightCost(
        name=name,
        shape=tuple(param.shape),
        held_bytes=pair_bytes if is_pair else local_tensor(param, find_shards(param)).nbytes,
        is_pair=is_pair,
        norm_ops=3 * num_tokens * width,
        is_gram=False,
        backward_ops=0,
        forward_ops=0,
    )


def _of_tensor(name: str, param: nn.Parameter, product: int, *, is_reduced: bool) -> WeightCost:
    """As DenseGradient; its layer's second backward pass makes it again."""
    local = local_tensor(param, find_shards(param))
    dtype = torch.promote_types(local.dtype, torch.float32) if is_reduced else local.dtype
    return WeightCost(
        name=name,
        shape=tuple(param.shape),
        held_bytes=local.numel() * dtype.itemsize,
        is_pair=False,
        norm_ops=2 * local.numel(),
        is_gram=False,
        backward_ops=2 * product,
        forward_ops=product,
    )


def _token_dtype(param: nn.Parameter) -> torch.dtype:
    """The dtype of a linear layer's input."""
    kind = param.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return param.dtype


def _reasons(found: ClipProposal) -> Iterator[str]:
    num_pairs = sum(weight.is_pair for weight in found.weights)
    num_gram = sum(weight.is_gram for weight in found.weights)
    limit = found.max_held_bytes
    if limit is None:
        verdict = "and no limit was given"
    elif found.deferred_bytes <= limit:
        verdict = f"which fits in {_mib(limit)}"
    else:
        verdict = f"which is more than {_mib(limit)}"
    yield f'clip_mode="{found.mode}", for {found.num_tokens} tokens a step'
    yield (
        f"  deferred holds {_mib(found.deferred_bytes)}, {verdict}; {num_pairs} of"
        f" {len(found.weights)} gradients as what their layer makes them of"
    )
    yield (
        f"  deferred adds {found.deferred_ops / 1e9:.3g} GFLOP for the norm, of {num_gram} weights"
        " by the Gram identity"
    )
    repeated = ", with the forward passes that checkpoints repeat" if found.is_checkpointed else ""
    yield (
        f"  two_pass holds nothing and adds {found.two_pass_ops / 1e9:.3g} GFLOP, for the norm and"
        f" another backward pass{repeated}"
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.1f} MiB"
