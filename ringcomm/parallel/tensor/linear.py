"""Linear layers whose features are split over ranks (Shoeybi et al. 2019, section 3)."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Self

from ringcomm.backend import resolve_group
from ringcomm.ops import shard_range
from ringcomm.parallel.tensor.heads import ranks_in_a_row
from ringcomm.parallel.tensor.regions import (
    all_reduce_grad_,
    copy_to_tp,
    gather_from_tp,
    reduce_from_tp,
)
from ringcomm.parallel.tensor.splits import Split, SplitModule, draw_part

__all__ = ["ColumnParallelLinear", "RowParallelLinear"]


def feature_ranges(
    num_features: int, shard_multiple: int, num_parts: int, what: str
) -> tuple[tuple[int, int], ...]:
    """The features [begin, end) of all parts, in whole units such as heads.

    Raises:
        ValueError: there is no whole number of units.
    """
    if shard_multiple < 1 or num_features % shard_multiple:
        raise ValueError(f"{what}={num_features} is no whole number of units of {shard_multiple}")
    ranges = (
        shard_range(num_features // shard_multiple, num_parts, part) for part in range(num_parts)
    )
    return tuple((begin * shard_multiple, end * shard_multiple) for begin, end in ranges)


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
        shard_multiple: output features that stay together, such as those of a head.
        num_replicas: so many ranks in a row have the same features, such as a key and value head
            where there are fewer than ranks; its gradient is summed over them.
        copy_input: whether the input passes copy_to_tp(). Layers that share an input do that once.
        gather_output: whether the result is whole on all ranks, by gather_from_tp().
        sequence_dim: see copy_to_tp().

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
        shard_multiple: int = 1,
        num_replicas: int = 1,
        copy_input: bool = True,
        gather_output: bool = False,
        sequence_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        linear = nn.Linear(in_features, out_features, bias, device="meta", dtype=dtype)
        drawn_on = torch.device(device or torch.get_default_device())
        self._cut(
            linear,
            group,
            shard_multiple,
            num_replicas,
            copy_input,
            gather_output,
            sequence_dim,
            drawn_on,
        )

    def _cut(
        self,
        linear: nn.Linear,
        group: dist.ProcessGroup | None,
        shard_multiple: int,
        num_replicas: int,
        copy_input: bool,
        gather_output: bool,
        sequence_dim: int | None,
        drawn_on: torch.device | None = None,
    ) -> None:
        self.group, self.copy_input = resolve_group(group), copy_input
        self.gather_output, self.sequence_dim = gather_output, sequence_dim
        self.in_features, self.out_features = linear.in_features, linear.out_features
        rank, world_size = self.group.rank(), self.group.size()
        if num_replicas < 1 or world_size % num_replicas or (gather_output and num_replicas > 1):
            raise ValueError(f"{world_size} ranks cannot have {num_replicas} copies of each part")
        parts = feature_ranges(
            linear.out_features, shard_multiple, world_size // num_replicas, "out_features"
        )
        ranges = tuple(part for part in parts for _ in range(num_replicas))
        self.features = ranges[rank]
        self._take(linear, Split(0, ranges, rank, num_replicas), drawn_on)
        if num_replicas > 1:
            copies = ranks_in_a_row(self.group, num_replicas)
            for param in self.parameters():
                all_reduce_grad_(param, copies)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        group: dist.ProcessGroup | None = None,
        shard_multiple: int = 1,
        num_replicas: int = 1,
        copy_input: bool = True,
        gather_output: bool = False,
        sequence_dim: int | None = None,
    ) -> Self:
        """This rank's part of a whole layer, whose values are the same on all ranks."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._cut(
            linear, group, shard_multiple, num_replicas, copy_input, gather_output, sequence_dim
        )
        return made

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) to (..., this rank's output features), or to all of them."""
        if self.copy_input:
            x = copy_to_tp(x, self.group, sequence_dim=self.sequence_dim, inplace=True)
        out = F.linear(x, self.weight, self.bias)
        if not self.gather_output:
            return out
        sizes = [end - begin for begin, end in self.splits["weight"].ranges]
        return gather_from_tp(out, sizes, self.group)

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
        shard_multiple: input features that stay together.
        sequence_dim: see reduce_from_tp().

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
        shard_multiple: int = 1,
        sequence_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        linear = nn.Linear(in_features, out_features, bias, device="meta", dtype=dtype)
        drawn_on = torch.device(device or torch.get_default_device())
        self._cut(linear, group, shard_multiple, sequence_dim, drawn_on)

    def _cut(
        self,
        linear: nn.Linear,
        group: dist.ProcessGroup | None,
        shard_multiple: int,
        sequence_dim: int | None,
        drawn_on: torch.device | None = None,
    ) -> None:
        self.group, self.sequence_dim = resolve_group(group), sequence_dim
        self.in_features, self.out_features = linear.in_features, linear.out_features
        rank, world_size = self.group.rank(), self.group.size()
        ranges = feature_ranges(linear.in_features, shard_multiple, world_size, "in_features")
        self.features = ranges[rank]
        self._take(linear, Split(1, ranges, rank), drawn_on)
        if self.bias is not None and sequence_dim is not None:
            all_reduce_grad_(self.bias, self.group)  # each rank adds it to its own tokens

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        group: dist.ProcessGroup | None = None,
        shard_multiple: int = 1,
        sequence_dim: int | None = None,
    ) -> Self:
        """This rank's part of a whole layer, whose values are the same on all ranks."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._cut(linear, group, shard_multiple, sequence_dim)
        return made

    def forward(self, x: Tensor) -> Tensor:
        """(..., this rank's input features) to (..., out_features), or this rank's tokens of it."""
        part = F.linear(x, self.weight)
        out = reduce_from_tp(part, self.group, sequence_dim=self.sequence_dim, inplace=True)
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        """As nn.Linear has it."""
        begin, end = self.features
        return f"in_features={begin}:{end} of {self.in_features}, out_features={self.out_features}"
