"""Preallocated memory for checkpoints and gradients: Md of ZeRO-R (Rajbhandari 2020, 6.3).

SavedTensors are the hooks that move a saved tensor there, for partition.py too.
"""

import logging
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from typing_extensions import Self

from ringcomm.torch_names import base_of, storage_id, version_of


class Kept:
    """A dense tensor with any strides, as its elements in memory order.

    Attributes:
        flat: the elements, of one dimension; a view of the tensor until they are kept elsewhere.
        shape, stride, device: the tensor's.
        is_shard: whether `flat` is this rank's shard.
        is_there: the event after which `flat` has them; None if it has.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.source = StorageWeakRef(tensor.untyped_storage())
        tensor = tensor.resolve_conj().resolve_neg()
        # Torch keeps the strides of a dense tensor, in any order of dimensions.
        if torch.empty_like(tensor, device="meta").stride() != tensor.stride():
            tensor = tensor.contiguous()
        self.shape, self.stride, self.device = tensor.shape, tensor.stride(), tensor.device
        self.flat = tensor.as_strided([tensor.numel()], [1])
        self.is_shard = False
        self.is_there: torch.Event | None = None

    def viewed(self, flat: Tensor) -> Tensor:
        """Elements of one dimension with the tensor's shape and strides."""
        return flat.as_strided(self.shape, self.stride)


class SavedTensors:
    """Autograd's hooks of a context, which moves some of the tensors that are saved inside of it.

    It may be entered repeatedly and recursively. A tensor that is saved twice between entering and
    leaving it is stored once; of writes between the two, those that autograd does not count are not
    seen: by `.data`, numpy or a collective. With hooks, torch does not check whether a saved tensor
    was modified in place; this class does.
    """

    def __init__(self) -> None:
        self.entered: list[AbstractContextManager[Any]] = []
        # Keyed by the identity of the tensor. A storage's address is not reused as long as
        # Kept.source refers to it.
        self._known: WeakValueDictionary[Any, Kept] = WeakValueDictionary()

    def enter(
        self,
        takes: Callable[[Tensor], bool],
        keep: Callable[[Kept], None],
        restore: Callable[[Kept], Tensor],
    ) -> None:
        """From now on keep() moves `flat`, a view, of the tensors that takes() is true of.

        restore() returns a tensor with the saved bits. Other tensors are unchanged.
        """
        pack, unpack = partial(self._pack, takes, keep), partial(_unpack, restore)
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        hooks.__enter__()
        self.entered.append(hooks)

    def leave(self, *error: Any) -> None:
        """Ends what the last enter() began."""
        self.entered.pop().__exit__(*error)
        if not self.entered:
            self._known.clear()

    def _pack(
        self, takes: Callable[[Tensor], bool], keep: Callable[[Kept], None], tensor: Tensor
    ) -> tuple[Kept | Tensor, Tensor, int]:
        """Returns the stored tensor, a tensor that counts writes, and their number so far."""
        if not takes(tensor):
            # An output referenced by its own node would never be freed.
            whole = tensor if tensor.is_leaf else tensor.detach()
            return whole, whole, version_of(whole)
        place = storage_id(tensor), tensor.storage_offset()
        kind = tensor.dtype, version_of(tensor), tensor.is_conj(), tensor.is_neg()
        key = *place, tensor.shape, tensor.stride(), *kind
        kept = self._known.get(key)
        if kept is None:
            kept = Kept(tensor.detach())
            keep(kept)
            self._known[key] = kept
        # An empty tensor with the same version counter: `.data` replaces everything but the
        # counter.
        alias = tensor.detach()
        alias.data = tensor.new_empty(0)
        return kept, alias, version_of(alias)


def _unpack(restore: Callable[[Kept], Tensor], packed: tuple[Kept | Tensor, Tensor, int]) -> Tensor:
    kept, alias, version = packed
    found = restore(kept) if isinstance(kept, Kept) else kept
    if version_of(alias) != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an"
            f" inplace operation: [{found.type()} {list(found.shape)}] is at version"
            f" {version_of(alias)}; expected version {version} instead"
        )
    return found


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has its own elements, in memory that is freed with the graph.

    False for parameters and their views, subclasses, sparse and quantized tensors.
    """
    base = base_of(tensor)
    root = tensor if base is None else base
    return (
        type(tensor) is Tensor
        and not isinstance(root, nn.Parameter)
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and tensor.numel() > 0
    )


_log = logging.getLogger("ringcomm")

ALIGNMENT_BYTES = 64  # a cache line, and more than any load needs


class _Block:
    """Memory with first-fit allocation; each part is taken until its owner is garbage-collected."""

    def __init__(self, num_bytes: int, device: torch.device | str) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.taken: list[tuple[int, int, Any]] = []  # begin, end, a weak reference; ascending

    def take(self, num_bytes: int, owner: Kept) -> Tensor | None:
        """The first free part that is large enough; None if there is none."""
        self.taken = [part for part in self.taken if part[2]() is not None]
        begin, size = 0, self.memory.nbytes
        for idx, (end, next_begin, _) in enumerate([*self.taken, (size, size, None)]):
            if end - begin >= num_bytes:
                self.taken.insert(idx, (begin, begin + num_bytes, weakref.ref(owner)))
                return self.memory[begin : begin + num_bytes]
            begin = next_begin
        return None


class arena:  # noqa: N801  # a context, as torch's saved_tensors_hooks
    """Copies the tensors that autograd saves inside this context into preallocated memory.

    Use it around checkpoints. Tensors that are kept until the backward pass are then not between
    activations that are freed at once, which avoids fragmentation.

        arena = activations.arena(1 << 30)
        for batch in batches:
            with arena:
                loss = loss_of(model, batch)  # with torch.utils.checkpoint.checkpoint inside
            loss.backward()

    The backward pass gets a copy with the saved bits. Memory is reused when its graph is freed,
    after the backward pass or when the graph is dropped. Parameters and their views, and tensors on
    other devices, are not copied. Only the innermost context of saved tensors has an effect:
    partition() has an option `arena` for its shards. The context may be entered repeatedly and
    recursively.

    Args:
        block_bytes: the size of the first block, and of each block that is added when all are full.
            A saved tensor occupies a multiple of 64 bytes.
        device: of the tensors that are copied, where the first block is allocated at once; None for
            that of the first tensor that is saved, and then.

    Attributes:
        device: the device of the tensors that are copied; None before there is one.

    Raises:
        ValueError: block_bytes is not positive.
        RuntimeError: in the backward pass, from torch: a saved tensor was modified in place.

    Not collective. Memory is reused in the order of the device's stream: a forward and a backward
    pass on different streams must be synchronized.
    """

    def __init__(self, block_bytes: int, *, device: torch.device | str | None = None) -> None:
        if block_bytes < 1:
            raise ValueError(f"block_bytes must be 1 or more, got {block_bytes}")
        self._saved = SavedTensors()
        self._block_bytes = block_bytes
        self._lock = threading.Lock()
        self.device = None if device is None else torch.device(device)
        self._blocks = [] if device is None else [_Block(block_bytes, device)]
        if device is not None:
            self.device = self._blocks[0].memory.device  # with its index

    def __enter__(self) -> Self:
        self._saved.enter(self._takes, self._keep, self._restore)
        return self

    def __exit__(self, *error: Any) -> None:
        self._saved.leave(*error)

    @property
    def num_blocks(self) -> int:
        """The number of blocks: one, plus one for each time that all were full."""
        return len(self._blocks)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.memory.nbytes for block in self._blocks)

    @property
    def used_bytes(self) -> int:
        """Bytes in use, each tensor rounded up to cache lines."""
        parts = (part for block in self._blocks for part in block.taken)
        return sum(end - begin for begin, end, owner in parts if owner() is not None)

    def _takes(self, tensor: Tensor) -> bool:
        return is_plain(tensor) and self.device in (None, tensor.device)

    def _keep(self, kept: Kept) -> None:
        """A full arena grows by a block and warns the first time."""
        flat = kept.flat
        num_bytes = max(1, -(-flat.nbytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
        with self._lock:
            if not self._blocks:
                self.device = flat.device
                self._blocks = [_Block(self._block_bytes, self.device)]
            places = (block.take(num_bytes, kept) for block in self._blocks)
            place = next((place for place in places if place is not None), None)
            if place is None:
                before = self.reserved_bytes
                self._blocks.append(_Block(max(self._block_bytes, num_bytes), flat.device))
                place = self._blocks[-1].take(num_bytes, kept)
                if len(self._blocks) == 2:
                    _log.warning(
                        "an arena of %d bytes has no room for %d more and grows to %d. Set"
                        " block_bytes to the bytes that a step saves, so that one block suffices",
                        before,
                        num_bytes,
                        self.reserved_bytes,
                    )
        assert place is not None
        kept.flat = place[: flat.nbytes].view(flat.dtype).copy_(flat)

    def _restore(self, kept: Kept) -> Tensor:
        return kept.viewed(kept.flat.clone())


def gradient_arena(params: Iterable[nn.Parameter]) -> list[Tensor]:
    """Places the gradients of parameters permanently in contiguous memory.

        activations.gradient_arena(model.parameters())

    A gradient from autograd is moved to its place at once, and `param.grad` is a view of it;
    micro-batches accumulate there. After `zero_grad()` it is None until the next gradient takes the
    place again, so optimizers skip parameters without a gradient.

    Args:
        params: parameters; those that do not require grad are skipped, and existing gradients are
            moved.

    Returns:
        One one-dimensional buffer for each dtype and device, in the order of the parameters.

    Raises:
        TypeError: a parameter is a DTensor or another subclass, or not a leaf; nothing has been
            changed.

    Not collective. Sparse gradients, those of create_graph=True and those of another dtype are not
    moved. It cannot be combined with DistributedDataParallel's gradient_as_bucket_view or
    zero.shard(), which place gradients themselves.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
    for param in filter(lambda param: param.requires_grad, dict.fromkeys(params)):
        if not (param.is_leaf and type(param.data) is Tensor):
            raise TypeError(
                f"an arena holds the gradients of plain parameters, got {type(param.data)} or a"
                " computed tensor; do not pass sharded parameters"
            )
        kinds.setdefault((param.device, param.dtype), []).append(param)
    buffers = []
    for (device, dtype), alike in kinds.items():
        sizes = [param.numel() for param in alike]
        buffers.append(torch.zeros(sum(sizes), dtype=dtype, device=device))
        for param, place in zip(alike, buffers[-1].split(sizes), strict=True):
            move = partial(_move, Kept(param.detach()).viewed(place))
            move(param)
            param.register_post_accumulate_grad_hook(move)
    return buffers


def _move(view: Tensor, param: Tensor) -> None:
    grad = param.grad
    if grad is None or grad is view or grad.layout != torch.strided:
        return
    # A graph of second order goes through a gradient that requires one.
    if grad.dtype != view.dtype or grad.requires_grad:
        return
    if grad.data_ptr() != view.data_ptr() or view.numel() == 0:
        view.copy_(grad)
    param.grad = view
