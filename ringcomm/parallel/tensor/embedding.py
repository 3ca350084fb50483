"""An embedding whose rows are split over ranks (Shoeybi et al. 2019, section 3)."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Self

from ringcomm.backend import resolve_group
from ringcomm.env import checks_targets
from ringcomm.ops import shard_range
from ringcomm.parallel.tensor.regions import reduce_from_tp
from ringcomm.parallel.tensor.splits import Split, SplitModule, draw_part

__all__ = ["VocabParallelEmbedding"]


class VocabParallelEmbedding(SplitModule):
    """nn.Embedding of which each rank has some rows.

    A rank's result is 0 for ids that it has not, so that the sum over the ranks has the bits of the
    whole layer; gradients of rows are at their owners alone.

    Args:
        num_embeddings, embedding_dim, padding_idx, device, dtype: of the whole layer, as in
            nn.Embedding. Seed all ranks alike, as for ColumnParallelLinear.
        group: None for the default group.
        sequence_dim: of the result, see reduce_from_tp(); 1 for tokens (batch, length).
        reduce_output: whether the result passes reduce_from_tp(). Without it a rank's result is its
            part of the sum.

    Attributes:
        rows: the ids [begin, end) of this rank; none where there are fewer than ranks.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        sequence_dim: int | None = None,
        reduce_output: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        whole = nn.Embedding(num_embeddings, embedding_dim, padding_idx, device="meta", dtype=dtype)
        drawn_on = torch.device(device or torch.get_default_device())
        self._cut(whole, group, sequence_dim, reduce_output, drawn_on)

    def _cut(
        self,
        whole: nn.Embedding,
        group: dist.ProcessGroup | None,
        sequence_dim: int | None,
        reduce_output: bool,
        drawn_on: torch.device | None = None,
    ) -> None:
        if whole.max_norm is not None or whole.scale_grad_by_freq or whole.sparse:
            raise ValueError(
                "an embedding with max_norm, scale_grad_by_freq or sparse=True is not split"
            )
        self.group, self.sequence_dim = resolve_group(group), sequence_dim
        self.reduce_output = reduce_output
        self.num_embeddings, self.embedding_dim = whole.num_embeddings, whole.embedding_dim
        self.padding_idx = whole.padding_idx
        num, num_ranks = whole.num_embeddings, self.group.size()
        ranges = tuple(shard_range(num, num_ranks, rank) for rank in range(num_ranks))
        split = Split(0, ranges, self.group.rank())
        self.rows = split.begin, split.end
        self.splits = {"weight": split}
        if drawn_on is None:
            part = split.cut(whole.weight.detach()).clone()
        else:
            sizes = tuple(whole.weight.shape)
            part = draw_part(sizes, split, nn.init.normal_, drawn_on, whole.weight.dtype)
            if self.padding_idx is not None and split.begin <= self.padding_idx < split.end:
                part[self.padding_idx - split.begin] = 0
        self.weight = nn.Parameter(part, requires_grad=whole.weight.requires_grad)

    @classmethod
    def from_embedding(
        cls,
        embedding: nn.Embedding,
        *,
        group: dist.ProcessGroup | None = None,
        sequence_dim: int | None = None,
        reduce_output: bool = True,
    ) -> Self:
        """This rank's part of a whole layer, whose values are the same on all ranks.

        Raises:
            ValueError: it has max_norm, scale_grad_by_freq or sparse gradients.
        """
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._cut(embedding, group, sequence_dim, reduce_output)
        return made

    def forward(self, ids: Tensor) -> Tensor:
        """Ids of any shape, the same on all ranks, to (..., embedding_dim), or this rank's tokens.

        Raises:
            IndexError: an id is not in the whole embedding; on all ranks. On a GPU and in compiled
                code, where to look would wait for the device, such a result is NaN instead; on a
                GPU RINGCOMM_CHECK_TARGETS=1 has it looked at.
        """
        is_id = (ids >= 0) & (ids < self.num_embeddings)
        is_free = ids.device.type == "cpu" and not torch.compiler.is_compiling()
        if (is_free or (ids.is_cuda and checks_targets())) and not is_id.all():
            raise IndexError(f"ids are in [0, {self.num_embeddings}), got others")
        begin, end = self.rows
        is_mine = (ids >= begin) & (ids < end)
        # What this rank has not is 0 of the sum, and what nobody has is no number.
        other = torch.where(is_id, 0.0, float("nan")).to(self.weight.dtype)[..., None]
        if begin == end:
            out = other.expand(*ids.shape, self.embedding_dim) + self.weight.sum()
        else:
            local = torch.where(is_mine, ids - begin, 0)
            out = torch.where(is_mine[..., None], F.embedding(local, self.weight), other)
            if self.padding_idx is not None:  # as in torch, it has no gradient
                is_pad = (ids == self.padding_idx)[..., None]
                out = torch.where(is_pad, out.detach(), out)
        if not self.reduce_output:
            return out
        return reduce_from_tp(out, self.group, sequence_dim=self.sequence_dim, inplace=True)

    def extra_repr(self) -> str:
        """As nn.Embedding has it."""
        begin, end = self.rows
        return f"{begin}:{end} of {self.num_embeddings}, {self.embedding_dim}"
