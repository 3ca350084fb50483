"""The weights of one unit: this rank's pieces, and memory for gathered weights while needed.

A parameter's storage is freed and reallocated without changing the tensor object. A graph that
saved the tensor for backward therefore sees the gathered weights again, and autograd sees no
modification. While it is freed, the parameter is a FreedWeight, which raises when it is read.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcomm import torch_names
from ringcomm.ops.fused_update import shard_range
from ringcomm.parallel.flat_collectives import shard_sizes

# Parameters smaller than this are packed: one more copy, and far fewer calls.
PACKED_BYTES = 64 << 10

# What does not read values; of properties the name of the attribute.
_ALLOWED = frozenset(
    "shape dtype device layout requires_grad requires_grad_ grad grad_fn is_leaf output_nr ndim"  # noqa: SIM905
    " dim size stride storage_offset numel nelement element_size nbytes itemsize is_meta is_cuda"
    " is_cpu is_sparse is_quantized is_nested is_contiguous is_floating_point is_complex"
    " is_inference names has_names get_device data_ptr untyped_storage retain_grad register_hook"
    " register_post_accumulate_grad_hook _version __len__ __hash__ _backward_hooks"
    " _post_accumulate_grad_hooks empty_like zeros_like ones_like full_like rand_like randn_like"
    " new_empty new_zeros new_ones new_full new_tensor".split()
)


class FreedWeight(nn.Parameter):
    """The class of a parameter while its memory is freed; raises when its values are read.

    Storages of size 0 alone do not protect: kernels read from address 0.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raises RuntimeError for all but attributes, hooks and new tensors of the same shape."""
        name = func.__name__
        if name in ("__get__", "__set__", "__delete__"):
            name = func.__self__.__name__
        # get_gradient_edge() makes a view, and drops it.
        is_edge = name == "view_as" and args[0] is args[1]
        if name not in _ALLOWED and not is_edge:
            raise RuntimeError(
                f"{name}() of a weight that is sharded and freed: read it by"
                " ringcomm.parallel.get_state_dict(), or after optimizer.close(); write it by"
                " set_state_dict(); run it by calling the whole model"
            )
        with torch_names.without_torch_function():
            return func(*args, **(kwargs or {}))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Without values."""
        return f"FreedWeight(shape={tuple(self.shape)}, dtype={self.dtype})"


class ShardedUnit:
    """The parameters that are gathered and freed together.

    Parameters have equal values on all ranks. `shard_store` is a ShardStore.

    Attributes:
        module: the module whose forward needs them.
        params: dense, on one device; equal in shapes and dtypes on all ranks of the group.
        group: the ranks that have pieces, of backend ringcomm.
        device: the parameters'.
        shards: this rank's piece of each parameter, of one dimension, in host memory; those in the
            store are empty.
        large: the parameters that are sent separately, whose pieces are in the store.
        packed_row: this rank's pieces of the others, concatenated as bytes.
        is_full: whether the parameters are gathered.
    """

    def __init__(
        self,
        module: nn.Module,
        params: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        shard_store: Any,
    ) -> None:
        self.module, self.params, self.group = module, list(params), group
        self.device, self.is_full = params[0].device, True
        self._flats = {param: _own_memory(param) for param in params}
        self._classes = {param: type(param) for param in params}
        packed = [param for param in params if param.nbytes < PACKED_BYTES]
        # Larger elements first, so that all pieces are aligned.
        packed.sort(key=lambda param: -param.element_size())
        # For each rank, the places of its row's pieces in the gathered weights.
        self._targets = [
            [self._piece(param, rank).view(torch.uint8) for param in packed]
            for rank in range(group.size())
        ]
        self._row_bytes = [sum(target.numel() for target in row) for row in self._targets]
        rank = group.rank()
        self.packed_row = torch.zeros(
            self._row_bytes[rank],
            dtype=torch.uint8,
            device="cpu",
            pin_memory=self.device.type != "cpu",
        )
        pieces = _split(self.packed_row, self._targets[rank])
        self.shards = {p: piece.view(p.dtype) for p, piece in zip(packed, pieces, strict=True)}
        self.large = [param for param in params if param not in self.shards]
        for param, shard in self.shards.items():
            shard.copy_(self._piece(param, rank))
        for param in self.large:
            self.shards[param] = torch.empty(0, dtype=param.dtype, device="cpu")
        self._shard_store = shard_store
        values = {self.shards[param]: self._piece(param, rank) for param in self.large}
        shard_store.keep(values, self.packed_row)
        self.free()

    def _piece(self, param: Tensor, rank: int) -> Tensor:
        """A rank's elements of the gathered weight."""
        begin, end = shard_range(param.numel(), self.group.size(), rank)
        return self._flats[param][begin:end]  # type: ignore[index]

    def is_away(self, param: nn.Parameter) -> bool:
        """Whether this rank's piece is in the store, so that read_shard() makes a copy."""
        return any(param is large for large in self.large)

    def read_shard(self, param: nn.Parameter) -> Tensor:
        """This rank's piece, from any storage."""
        if not self.is_away(param):
            return self.shards[param]
        with self._shard_store.row(self.shards[param], is_written=False) as row:
            return row.clone()

    def write_shard(self, param: nn.Parameter, value: Tensor) -> None:
        """Replaces this rank's piece; not while the weight is gathered."""
        self._shard_store.settle()  # packed pieces are in no row, and may be on their way
        piece = self.shards[param]
        is_away = self.is_away(param)
        with (
            self._shard_store.row(piece, is_written=True) if is_away else nullcontext(piece) as row
        ):
            row.copy_(value)

    def gather(self) -> None:
        """Allocates memory and gathers the ranks' pieces; does nothing if already gathered.

        Collective: one call of the group.
        """
        if self.is_full:
            return
        for param, flat in self._flats.items():
            flat.untyped_storage().resize_(flat.nbytes)
            param.__class__ = self._classes[param]
        self.is_full = True
        try:
            with self._shard_store.in_memory(self) as inputs:
                self._exchange(inputs)
        except BaseException:
            self.free()
            raise

    def free(self) -> None:
        """Frees the memory of gathered weights."""
        for param, flat in self._flats.items():
            flat.untyped_storage().resize_(0)
            param.__class__ = FreedWeight
        self.is_full = False

    def _exchange(self, inputs: list[Tensor]) -> None:
        """One call for the large pieces, which are received in place, and then the packed ones."""
        rows = torch.empty(sum(self._row_bytes), dtype=torch.uint8, device=self.device)
        world_size = self.group.size()
        outputs = [
            self._flats[param].split(shard_sizes(param.numel(), world_size)) for param in self.large
        ]
        if rows.numel():
            outputs.append(rows.split(self._row_bytes))
        else:
            inputs = inputs[:-1]
        if inputs:
            options = torch_names.AllgatherOptions()
            options.asyncOp = False
            by_rank = [[pieces[rank] for pieces in outputs] for rank in range(world_size)]
            work = self.group.allgather_coalesced(by_rank, inputs, options)
            if work is not None:  # backends need none for a call that is over
                work.wait()
        for row, targets in zip(rows.split(self._row_bytes), self._targets, strict=True):
            if targets:
                torch_names.foreach_copy_(targets, _split(row, targets))


def _split(row: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """Splits the beginning of a row into parts of these sizes."""
    sizes = [part.numel() for part in parts]
    return list(row[: sum(sizes)].split(sizes)) if sizes else []


def _own_memory(param: nn.Parameter) -> Tensor:
    """The flat parameter, in its own memory that can be freed.

    A view of `data`: writes do not change the parameter's version.
    """
    storage = param.untyped_storage()
    if storage.nbytes() != param.nbytes or not storage.resizable():
        param.data = param.data.clone()
    return param.data.view(-1)
