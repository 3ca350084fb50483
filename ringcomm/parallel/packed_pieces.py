"""Small parameters that travel as one: each rank's pieces of all of them stand in one buffer."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ringcomm.ops.updates.fused_update import shard_range

__all__ = ["PackedPieces"]


class PackedPieces:
    """This rank's pieces of some tensors, one behind the other, as bytes.

    Args:
        flats: the whole tensors, of one dimension; those with larger elements first, so that all
            pieces are aligned.
        world_size: the number of ranks.
        rank: this one.
        is_padded: whether the rows of all ranks have the size of the longest.

    Attributes:
        row: this rank's pieces, bytes.
        row_bytes: the size of each rank's row.
        pieces: the views of `row`, in the dtypes of the tensors.
    """

    def __init__(
        self, flats: Sequence[Tensor], world_size: int, rank: int, *, is_padded: bool
    ) -> None:
        self._targets = [
            [flat.view(torch.uint8)[slice(*_bytes_of(flat, world_size, r))] for flat in flats]
            for r in range(world_size)
        ]
        self.row_bytes = [sum(target.numel() for target in row) for row in self._targets]
        if is_padded:
            self.row_bytes = [max(self.row_bytes)] * world_size
        device = flats[0].device if flats else None
        self.row = torch.zeros(self.row_bytes[rank], dtype=torch.uint8, device=device)
        sizes = [target.numel() for target in self._targets[rank]]
        pieces = self.row[: sum(sizes)].split(sizes) if sizes else ()
        self.pieces = [piece.view(flat.dtype) for piece, flat in zip(pieces, flats, strict=True)]

    def new_rows(self) -> Tensor:
        """Room for the rows of all ranks, one behind the other."""
        return self.row.new_empty(sum(self.row_bytes))

    def unpack(self, rows: Tensor) -> None:
        """Copies the rows of all ranks to where they stand in the whole tensors."""
        for row, targets in zip(rows.split(self.row_bytes), self._targets, strict=True):
            sizes = [target.numel() for target in targets]
            if sizes:
                torch._foreach_copy_(targets, row[: sum(sizes)].split(sizes))


def _bytes_of(flat: Tensor, world_size: int, rank: int) -> tuple[int, int]:
    begin, end = shard_range(flat.numel(), world_size, rank)
    return begin * flat.element_size(), end * flat.element_size()
