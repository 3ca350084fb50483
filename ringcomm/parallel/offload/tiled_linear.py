"""Memory-centric tiling: a linear layer in parts (Rajbhandari et al. 2021, section 5.1.3)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ringcomm.ops import shard_range

__all__ = ["TiledLinear", "tiles_of"]


class TiledLinear(nn.Module):
    """nn.Linear as tiles that run one after the other, for layers that memory cannot hold whole.

    With zero.shard(..., offload_weights=True) each tile is a unit of its own: the memory of one
    tile's weights at a time, forward and backward. Anywhere else it is a linear layer.

    Args:
        in_features, out_features, bias, device, dtype: as in nn.Linear.
        in_splits, out_splits: into how many parts inputs and outputs are cut, uneven by an element;
            in_splits * out_splits tiles. Outputs are summed over the parts of the input.

    Raises:
        ValueError: there are fewer features than parts, or no parts.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        in_splits: int = 1,
        out_splits: int = 4,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not (1 <= in_splits <= in_features and 1 <= out_splits <= out_features):
            raise ValueError(
                f"{in_features} x {out_features} features are not to be cut into {in_splits} x"
                f" {out_splits} parts"
            )
        self.in_features, self.out_features = in_features, out_features
        self._ins = _sizes(in_features, in_splits)
        self._outs = _sizes(out_features, out_splits)
        # By output, then by input; the bias is the first input's.
        self.tiles = nn.ModuleList(
            nn.Linear(ins, outs, bias=bias and i == 0, device=device, dtype=dtype)
            for outs in self._outs
            for i, ins in enumerate(self._ins)
        )

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, in_splits: int = 1, out_splits: int = 4
    ) -> TiledLinear:
        """A layer with copies of another one's weights."""
        tiled = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            in_splits=in_splits,
            out_splits=out_splits,
            device=linear.weight.device,
            dtype=linear.weight.dtype,
        )
        rows = linear.weight.detach().split(tiled._outs)
        blocks = [block for row in rows for block in row.split(tiled._ins, dim=1)]
        biases = None if linear.bias is None else linear.bias.detach().split(tiled._outs)
        with torch.no_grad():
            for i, tile in enumerate(tiled.tiles):
                assert isinstance(tile, nn.Linear)
                tile.weight.copy_(blocks[i])
                if biases is not None and i % in_splits == 0:
                    tile.bias.copy_(biases[i // in_splits])
        return tiled

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features)."""
        parts = x.split(self._ins, dim=-1)
        tiles = iter(self.tiles)
        outputs = []
        for _ in self._outs:
            total = next(tiles)(parts[0])
            for part in parts[1:]:
                total = total + next(tiles)(part)
            outputs.append(total)
        return torch.cat(outputs, dim=-1)

    def extra_repr(self) -> str:
        """As nn.Linear has it."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


def tiles_of(model: nn.Module) -> list[nn.Module]:
    """The tiles of all tiled layers of a model."""
    return [
        tile
        for module in model.modules()
        if isinstance(module, TiledLinear)
        for tile in module.tiles
    ]


def _sizes(num_features: int, num_parts: int) -> list[int]:
    ranges = [shard_range(num_features, num_parts, part) for part in range(num_parts)]
    return [end - begin for begin, end in ranges]
