"""Tensor parallelism as in Megatron-LM (Shoeybi et al. 2019): every weight matrix is split.

``enter`` (f in the paper) is the identity forward and an all-reduce backward, ``leave`` (g) the
other way round; one pair around attention and one around the feed-forward part make 4 all-reduces
per layer and step. The embedding and the output layer are split along the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from training.model import Whole, shard_range
from training.wire import Wire


class _Enter(torch.autograd.Function):
    """f: the gradients of the ranks' parts add up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wire: Wire) -> Tensor:
        ctx.wire = wire
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # A copy: autograd may hand the same gradient to somebody else.
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        return ctx.wire.all_reduce(grad), None


class _Leave(torch.autograd.Function):
    """g: the ranks' partial outputs add up; the gradient of a sum goes to each part as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wire: Wire) -> Tensor:
        # In place: x is the fresh output of a product, and products save their inputs only.
        ctx.mark_dirty(x)
        return wire.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy over logits whose columns are spread over the ranks.

    Two all-reduces forward (the row maxima; then the sums of exponentials and the target logits in
    one message of 2 * tokens), none backward. Saves softmax [tokens, vocab part].
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, start: int, wire: Wire) -> Tensor:
        num_tokens, part = logits.shape
        peak = wire.all_reduce(logits.amax(dim=-1), op=dist.ReduceOp.MAX)
        shifted = logits - peak[:, None]
        here = (targets >= start) & (targets < start + part)
        rows = here.nonzero().squeeze(1)
        columns = targets[rows] - start
        sums = logits.new_zeros(2, num_tokens)
        sums[1, rows] = shifted[rows, columns]
        exponentials = shifted.exp_()
        sums[0] = exponentials.sum(dim=-1)
        wire.all_reduce(sums)
        ctx.save_for_backward(exponentials.div_(sums[0, :, None]), rows, columns)
        return (sums[0].log() - sums[1]).mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        softmax, rows, columns = ctx.saved_tensors
        scale = grads[0] / softmax.shape[0]
        grad = softmax * scale
        grad[rows, columns] -= scale
        return grad, None, None, None


class TensorParallel(Whole):
    """The sharding of a model over the ranks of ``wire``; all ranks call it with the same rows."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.rank = wire.rank
        self.world_size = wire.world_size

    def enter(self, x: Tensor) -> Tensor:
        """See f above."""
        out: Tensor = _Enter.apply(x, self.wire)
        return out

    def leave(self, x: Tensor) -> Tensor:
        """See g above; changes x in place."""
        out: Tensor = _Leave.apply(x, self.wire)
        return out

    def embed(self, ids: Tensor, weight: Tensor, vocab_size: int) -> Tensor:
        """Looks up the ids of this rank's part, zero for the others', and sums over the ranks."""
        start = shard_range(vocab_size, self.world_size, self.rank).start
        local = ids - start
        here = (local >= 0) & (local < weight.shape[0])
        looked_up = F.embedding(torch.where(here, local, 0), weight) * here[..., None]
        return self.leave(looked_up)

    def cross_entropy(self, logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
        """Mean over all targets, the same on every rank. Two all-reduces, none backward."""
        start = shard_range(vocab_size, self.world_size, self.rank).start
        loss: Tensor = _VocabParallelCrossEntropy.apply(logits, targets, start, self.wire)
        return loss
