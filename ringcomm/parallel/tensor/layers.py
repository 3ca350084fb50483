"""Layers whose features, rows or heads are sharded over ranks (Shoeybi et al. 2019, section 3)."""

import math
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Self

from ringcomm.backend import resolve_group
from ringcomm.options import checks_targets
from ringcomm.parallel.flat_collectives import take_from_rank0
from ringcomm.parallel.tensor.regions import (
    all_reduce_grad_,
    copy_to_tp,
    gather_from_tp,
    reduce_from_tp,
)
from ringcomm.parallel.tensor.splits import Split, SplitModule, drawn_part, ranges_of

# ---- heads of attention

_rows: WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]] = WeakKeyDictionary()


class HeadShares(NamedTuple):
    """The distribution of heads over ranks."""

    num_together: int  # query heads that stay on one rank: those of one key and value head, or 1
    num_replicas: int  # consecutive ranks with the same key and value head


def share_heads(num_heads: int, num_kv_heads: int, world_size: int) -> HeadShares:
    """Distributes query heads and key and value heads over ranks; supports GQA and MQA.

        shares = share_heads(32, 8, group.size())
        q = ColumnParallelLinear(dim, 32 * width, shard_multiple=shares.num_together * width)
        k = ColumnParallelLinear(
            dim, 8 * width, shard_multiple=width, num_replicas=shares.num_replicas
        )
        o = RowParallelLinear(32 * width, dim, shard_multiple=shares.num_together * width)

    Raises:
        ValueError: num_heads is not a multiple of num_kv_heads, or the ranks cannot split them.
    """
    if min(num_heads, num_kv_heads) < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"the number of query heads must be a multiple of the {num_kv_heads} key heads, got"
            f" {num_heads}"
        )
    if num_kv_heads >= world_size:
        return HeadShares(num_heads // num_kv_heads, 1)
    if world_size % num_kv_heads or num_heads % world_size:
        raise ValueError(
            f"{world_size} ranks cannot split {num_heads} query heads with {num_kv_heads} key and"
            f" value heads: use at most {num_kv_heads} ranks, or a multiple of {num_kv_heads}"
            f" that divides {num_heads}"
        )
    return HeadShares(1, world_size // num_kv_heads)


def _ranks_in_a_row(group: dist.ProcessGroup, num: int) -> dist.ProcessGroup:
    """The group of ranks 0 to num - 1, num to 2 num - 1, ... of a group; made once. Collective."""
    if num == group.size():
        return group
    made = _rows.setdefault(group, {})
    if num not in made:
        first = group.rank() // num * num
        ranks = dist.get_process_group_ranks(group)[first : first + num]
        new = dist.new_group(ranks, backend=dist.get_backend(group), use_local_synchronization=True)
        assert isinstance(new, dist.ProcessGroup)
        made[num] = new
    return made[num]


# ---- linear layers


def _options_of(linear: nn.Linear) -> dict[str, Any]:
    """What makes a layer of the same size, on the meta device."""
    if not isinstance(linear, nn.Linear):
        raise TypeError(f"from_linear() takes an nn.Linear, got {type(linear).__name__}")
    sizes = {"in_features": linear.in_features, "out_features": linear.out_features}
    return {
        **sizes,
        "bias": linear.bias is not None,
        "device": "meta",
        "dtype": linear.weight.dtype,
    }


def _split(layer: Any, dim: int, shard_multiple: int, num_replicas: int = 1) -> None:
    """Splits the features of a dimension over the ranks, in whole units such as heads."""
    num = (layer.out_features, layer.in_features)[dim]
    if shard_multiple < 1 or num % shard_multiple:
        what = ("out_features", "in_features")[dim]
        raise ValueError(f"{what} must be a multiple of {shard_multiple}, got {num}")
    parts = ranges_of(num, layer.group.size() // num_replicas, shard_multiple)
    ranges = tuple(part for part in parts for _ in range(num_replicas))
    layer.splits = {"weight": Split(dim, ranges, layer.group.rank(), num_replicas)}
    layer.features = ranges[layer.group.rank()]


def _draw(
    layer: Any, has_bias: bool, device: torch.device | str | None, dtype: torch.dtype | None
) -> None:
    """Draws random values as nn.Linear does."""
    draw = partial(drawn_part, device=device, dtype=dtype)
    bound = 1 / math.sqrt(layer.in_features) if layer.in_features else 0.0
    split, shape = layer.splits["weight"], (layer.out_features, layer.in_features)
    layer.weight = draw(shape, split, lambda x: nn.init.kaiming_uniform_(x, a=math.sqrt(5)))
    if not has_bias:
        layer.register_parameter("bias", None)
        return
    if split.dim == 0:
        layer.splits["bias"] = split
    of_bias = layer.splits.get("bias")
    layer.bias = draw(shape[:1], of_bias, lambda x: nn.init.uniform_(x, -bound, bound))


def _sizes(layer: Any) -> str:
    """extra_repr() with this rank's features."""
    sizes: list[Any] = [layer.out_features, layer.in_features]
    dim, (begin, end) = layer.splits["weight"].dim, layer.features
    sizes[dim] = f"{begin}:{end} of {sizes[dim]}"
    return "in_features={1}, out_features={0}".format(*sizes)


class ColumnParallelLinear(SplitModule):
    """nn.Linear whose output features are sharded over ranks.

    Args:
        in_features, out_features, bias, device, dtype: of the unsharded layer, as in nn.Linear. Use
            the same seed on all ranks. On the CPU values are those of nn.Linear; on other devices
            they are a different draw, the same for any number of ranks. The unsharded layer is
            never in memory.
        group, mesh: the ranks, a group or a one-dimensional DeviceMesh; by default all.
        shard_multiple: output features that stay on one rank, such as those of a head.
        num_replicas: the number of consecutive ranks with the same features, for key and value
            heads that are fewer than ranks; their gradients are summed over these ranks.
        copy_input: apply copy_to_tp() to the input. Layers that share an input do this once.
        gather_output: gather the result on all ranks, with gather_from_tp().
        sequence_dim: see copy_to_tp().

    Attributes:
        features: the output features [begin, end) of this rank.

    Raises:
        ValueError: out_features is not a multiple of shard_multiple, or num_replicas does not
            divide the ranks.

    Collective if num_replicas is above 1.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    features: tuple[int, int]

    extra_repr = _sizes

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        shard_multiple: int = 1,
        num_replicas: int = 1,
        copy_input: bool = True,
        gather_output: bool = False,
        sequence_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.group, self.copy_input = resolve_group(group, mesh), copy_input
        self.gather_output, self.sequence_dim = gather_output, sequence_dim
        self.in_features, self.out_features = in_features, out_features
        world_size = self.group.size()
        if num_replicas < 1 or world_size % num_replicas or (gather_output and num_replicas > 1):
            raise ValueError(
                f"num_replicas must divide the {world_size} ranks, and be 1 with gather_output;"
                f" got {num_replicas}"
            )
        _split(self, 0, shard_multiple, num_replicas)
        _draw(self, bias, device, dtype)
        if num_replicas > 1:
            copies = _ranks_in_a_row(self.group, num_replicas)
            take_from_rank0(self.parameters(), copies)
            for param in self.parameters():
                all_reduce_grad_(param, copies)

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Any) -> Self:
        """Makes this rank's part of an unsharded layer.

        Args:
            linear: the layer, of the same size on all ranks; it becomes that of the group's rank 0,
                and this rank's part of it is copied.
            options: those of the class.

        Raises:
            TypeError: it is not a linear layer.

        Collective, unless the layer is on the meta device.
        """
        return cls(**options, **_options_of(linear)).take(linear)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) to (..., this rank's output features), or to all of them."""
        if self.copy_input:
            x = copy_to_tp(x, self.group, sequence_dim=self.sequence_dim, inplace=True)
        out = F.linear(x, self.weight, self.bias)
        if not self.gather_output:
            return out
        sizes = [end - begin for begin, end in self.splits["weight"].ranges]
        return gather_from_tp(out, sizes, self.group)


class RowParallelLinear(SplitModule):
    """nn.Linear whose input features are sharded over ranks, as after a column-parallel layer.

    Args:
        in_features, out_features, bias, device, dtype: as for ColumnParallelLinear. All ranks have
            the bias.
        group, mesh: as for ColumnParallelLinear.
        shard_multiple: input features that stay on one rank.
        sequence_dim: see reduce_from_tp().

    Attributes:
        features: the input features [begin, end) of this rank.

    Raises ValueError if in_features is not a multiple of shard_multiple. Collective if it has a
    bias, which becomes that of rank 0.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    features: tuple[int, int]

    extra_repr = _sizes

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        shard_multiple: int = 1,
        sequence_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.group, self.sequence_dim = resolve_group(group, mesh), sequence_dim
        self.in_features, self.out_features = in_features, out_features
        _split(self, 1, shard_multiple)
        _draw(self, bias, device, dtype)
        if self.bias is not None:
            take_from_rank0([self.bias], self.group)
            if sequence_dim is not None:
                all_reduce_grad_(self.bias, self.group)  # each rank adds it to its own tokens

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Any) -> Self:
        """As ColumnParallelLinear.from_linear()."""
        return cls(**options, **_options_of(linear)).take(linear)

    def forward(self, x: Tensor) -> Tensor:
        """(..., this rank's input features) to (..., out_features), or this rank's tokens of it."""
        part = F.linear(x, self.weight)
        out = reduce_from_tp(part, self.group, sequence_dim=self.sequence_dim, inplace=True)
        return out if self.bias is None else out + self.bias.to(out.dtype)


# ---- embeddings


class VocabParallelEmbedding(SplitModule):
    """nn.Embedding whose rows are sharded over ranks.

    A rank's result is 0 for ids of other ranks, so the sum over the ranks equals the unsharded
    layer bitwise. Only the owner of a row has its gradient.

    Args:
        num_embeddings, embedding_dim, padding_idx, device, dtype: of the unsharded layer, as in
            nn.Embedding. Use the same seed on all ranks, as for ColumnParallelLinear.
        group, mesh: as for ColumnParallelLinear.
        sequence_dim: a dimension of the result, see reduce_from_tp(); 1 for tokens (batch, length).
        reduce_output: apply reduce_from_tp() to the result. Without it a rank's result is its part
            of the sum.

    Attributes:
        rows: the ids [begin, end) of this rank; empty on some ranks if there are fewer ids than
            ranks.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        sequence_dim: int | None = None,
        reduce_output: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.group, self.sequence_dim = resolve_group(group, mesh), sequence_dim
        self.reduce_output = reduce_output
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        rank, ranges = self.group.rank(), ranges_of(num_embeddings, self.group.size())
        split = Split(0, ranges, rank)
        begin, end = self.rows = ranges[rank]
        self.splits = {"weight": split}
        whole = nn.Embedding(num_embeddings, embedding_dim, padding_idx, device="meta")
        self.padding_idx = idx = whole.padding_idx
        self.weight = drawn_part(whole.weight.shape, split, nn.init.normal_, device, dtype)
        if idx is not None and begin <= idx < end:
            self.weight.detach()[idx - begin] = 0

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, **options: Any) -> Self:
        """Makes this rank's part of an unsharded layer. Collective, as from_linear() of the others.

        Args:
            embedding: the layer; it becomes that of rank 0, and this rank's part of it is copied.
            options: group, mesh, sequence_dim and reduce_output of the class.

        Raises TypeError if it is no nn.Embedding, and ValueError for max_norm, scale_grad_by_freq
        and sparse gradients.
        """
        given: Any = embedding
        if not isinstance(given, nn.Embedding):
            got = type(given).__name__
            raise TypeError(f"from_embedding() takes an nn.Embedding, got {got}")
        if embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
            raise ValueError(
                "an embedding with max_norm, scale_grad_by_freq or sparse=True cannot be split"
            )
        sizes = embedding.num_embeddings, embedding.embedding_dim, embedding.padding_idx
        options |= {"device": "meta", "dtype": embedding.weight.dtype}
        return cls(*sizes, **options).take(embedding)

    def forward(self, ids: Tensor) -> Tensor:
        """Ids of any shape, the same on all ranks, to (..., embedding_dim), or this rank's tokens.

        Raises:
            IndexError: on all ranks: an id is out of range. On a GPU and in compiled code, where
                the check would wait for the device, the result is NaN instead; on a GPU
                RINGCOMM_CHECK_TARGETS=1 enables the check.
        """
        is_id = (ids >= 0) & (ids < self.num_embeddings)
        is_free = ids.device.type == "cpu" and not torch.compiler.is_compiling()
        is_asked = ids.device.type not in ("cpu", "meta") and checks_targets()
        if (is_free or is_asked) and not is_id.all():
            raise IndexError(f"ids must be in [0, {self.num_embeddings}), got others")
        begin, end = self.rows
        is_mine = (ids >= begin) & (ids < end)
        # An id of another rank gives 0 in the sum, an id out of range gives NaN.
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
