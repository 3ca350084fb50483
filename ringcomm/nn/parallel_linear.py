"""Linear layers whose features are split over ranks (Shoeybi et al. 2019, section 3)."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Self

from ringcomm.backend import resolve_group
from ringcomm.nn.drawing import draw_part
from ringcomm.ops import shard_range
from ringcomm.parallel.tensor.regions import enter, join, leave, sum_gradients
from ringcomm.parallel.tensor.splits import Split, SplitModule
from ringcomm.parallel.tensor.subgroups import ranks_in_a_row

__all__ = ["ColumnParallelLinear", "RowParallelLinear"]


def feature_ranges(
    num_features: int, unit: int, num_parts: int, what: str
) -> tuple[tuple[int, int], ...]:
    """The features [begin, end) of all parts, in whole units such as heads.

    Raises:
        ValueError: there is no whole number of units.
    """
    if unit < 1 or num_features % unit:
        raise ValueError(f"{what}={num_features} is no whole number of units of {unit}")
    ranges = (shard_range(num_features // unit, num_parts, part) for part in range(num_parts))
    return tuple((begin * unit, end * unit) for begin, end in ranges)


class _ParallelLinear(SplitModule):
    """A part of nn.Linear: `weight` and `bias` are this rank's."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def _take(self, linear: nn.Linear, split: Split, drawn_on: torch.device | None) -> None:
        """The weights of a whole layer, cut; in memory of their own.

        With `drawn_on` the layer is on the meta device, and its values are drawn as nn.Linear does.
        """
        self.splits = {"weight": split}
        if linear.bias is not None and split.dim == 0:
            self.splits["bias"] = split
        num_inputs = linear.in_features
        bound = 1 / math.sqrt(num_inputs) if num_inputs else 0.0

        def part_of(name: str, whole: Tensor) -> nn.Parameter:
            cut = self.splits.get(name)
            if drawn_on is None:
                values = whole.detach() if cut is None else cut.cut(whole.detach())
                return nn.Parameter(values.clone(), requires_grad=whole.requires_grad)

            def draw_(block: Tensor) -> None:
                if name == "weight":
                    nn.init.kaiming_uniform_(block, a=math.sqrt(5))
                else:
                    nn.init.uniform_(block, -bound, bound)

            return nn.Parameter(draw_part(tuple(whole.shape), cut, draw_, drawn_on, whole.dtype))

        self.weight = part_of("weight", linear.weight)
        bias: Tensor | None = linear.bias
        if bias is None:
            self.register_parameter("bias", None)
        else:
            self.bias = part_of("bias", bias)


class ColumnParallelLinear(_ParallelLinear):
    """nn.Linear of which each rank has some output features.

    Args:
        in_features, out_features, bias, device, dtype: of the whole layer, as in nn.Linear. Seed
            all ranks alike: on the CPU they take the values of nn.Linear, on other devices those
            of another draw, the same for any number of ranks. The whole is never in memory.
        group: None for the default group.
        unit: output features that stay together, such as those of a head.
        num_copies: so many ranks in a row have the same features, such as a key and value head
            where there are fewer than ranks; its gradient is summed over them.
        enters: whether the input passes enter(). Layers that share an input do that once for all.
        gathers: whether the result is whole on all ranks, by join().
        sequence_dim: see enter().

    Attributes:
        features: the output features [begin, end) of this rank.

    Raises:
        ValueError: out_features is no whole number of units, the group of copies.

    Collective where there are copies.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: dist.ProcessGroup | None = None,
        unit: int = 1,
        num_copies: int = 1,
        enters: bool = True,
        gathers: bool = False,
        sequence_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        linear = nn.Linear(in_features, out_features, bias, device="meta", dtype=dtype)
        drawn_on = torch.device(device or torch.get_default_device())
        self._cut(linear, group, unit, num_copies, enters, gathers, sequence_dim, drawn_on)

    def _cut(
        self,
        linear: nn.Linear,
        group: dist.ProcessGroup | None,
        unit: int,
        num_copies: int,
        enters: bool,
        gathers: bool,
        sequence_dim: int | None,
        drawn_on: torch.device | None = None,
    ) -> None:
        self.group, self.enters = resolve_group(group), enters
        self.gathers, self.sequence_dim = gathers, sequence_dim
        self.in_features, self.out_features = linear.in_features, linear.out_features
        rank, world_size = self.group.rank(), self.group.size()
        if num_copies < 1 or world_size % num_copies or (gathers and num_copies > 1):
            raise ValueError(f"{world_size} ranks cannot have {num_copies} copies of each part")
        parts = feature_ranges(linear.out_features, unit, world_size // num_copies, "out_features")
        ranges = tuple(part for part in parts for _ in range(num_copies))
        self.features = ranges[rank]
        self._take(linear, Split(0, ranges, rank, num_copies), drawn_on)
        if num_copies > 1:
            copies = ranks_in_a_row(self.group, num_copies)
            for param in self.parameters():
                sum_gradients(param, copies)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        group: dist.ProcessGroup | None = None,
        unit: int = 1,
        num_copies: int = 1,
        enters: bool = True,
        gathers: bool = False,
        sequence_dim: int | None = None,
    ) -> Self:
        """This rank's part of a whole layer, whose values are the same on all ranks."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._cut(linear, group, unit, num_copies, enters, gathers, sequence_dim)
        return made

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) to (..., this rank's output features), or to all of them."""
        if self.enters:
            x = enter(x, self.group, sequence_dim=self.sequence_dim, inplace=True)
        out = F.linear(x, self.weight, self.bias)
        if not self.gathers:
            return out
        sizes = [end - begin for begin, end in self.splits["weight"].ranges]
        return join(out, sizes, self.group)

    def extra_repr(self) -> str:
        """As nn.Linear has it."""
        begin, end = self.features
        return f"in_features={self.in_features}, out_features={begin}:{end} of {self.out_features}"


class RowParallelLinear(_ParallelLinear):
    """nn.Linear of which each rank has some input features, the result of a layer split by columns.

    Args:
        in_features, out_features, bias, device, dtype: as ColumnParallelLinear's. All ranks have
            the bias.
        group: None for the default group.
        unit: input features that stay together.
        sequence_dim: see leave().

    Attributes:
        features: the input features [begin, end) of this rank.

    Raises:
        ValueError: in_features is no whole number of units.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: dist.ProcessGroup | None = None,
        unit: int = 1,
        sequence_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        linear = nn.Linear(in_features, out_features, bias, device="meta", dtype=dtype)
        drawn_on = torch.device(device or torch.get_default_device())
        self._cut(linear, group, unit, sequence_dim, drawn_on)

    def _cut(
        self,
        linear: nn.Linear,
        group: dist.ProcessGroup | None,
        unit: int,
        sequence_dim: int | None,
        drawn_on: torch.device | None = None,
    ) -> None:
        self.group, self.sequence_dim = resolve_group(group), sequence_dim
        self.in_features, self.out_features = linear.in_features, linear.out_features
        rank, world_size = self.group.rank(), self.group.size()
        ranges = feature_ranges(linear.in_features, unit, world_size, "in_features")
        self.features = ranges[rank]
        self._take(linear, Split(1, ranges, rank), drawn_on)
        if self.bias is not None and sequence_dim is not None:
            sum_gradients(self.bias, self.group)  # each rank adds it to its own tokens

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        group: dist.ProcessGroup | None = None,
        unit: int = 1,
        sequence_dim: int | None = None,
    ) -> Self:
        """This rank's part of a whole layer, whose values are the same on all ranks."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._cut(linear, group, unit, sequence_dim)
        return made

    def forward(self, x: Tensor) -> Tensor:
        """(..., this rank's input features) to (..., out_features), or this rank's tokens of it."""
        part = F.linear(x, self.weight)
        out = leave(part, self.group, sequence_dim=self.sequence_dim, inplace=True)
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        """As nn.Linear has it."""
        begin, end = self.features
        return f"in_features={begin}:{end} of {self.in_features}, out_features={self.out_features}"
