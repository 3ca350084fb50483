"""Memory set aside for checkpoints and gradients: Md of ZeRO-R (Rajbhandari et al. 2020, 6.3)."""

from __future__ import annotations

import logging
import threading
import weakref
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from ringcomm.parallel.activations.saved_tensors import Look, SavedTensors, flatten, is_plain

_log = logging.getLogger("ringcomm")

ALIGNMENT_BYTES = 64  # a cache line, and more than any load wants


class Room:
    """A place in an arena, of one dimension; free again when this object is gone."""

    def __init__(self, flat: Tensor, look: Look) -> None:
        self.flat, self.look = flat, look


class Arena(SavedTensors):
    """What arena() returns.

    Attributes:
        device: of the tensors that it takes.
    """

    def __init__(self, block_bytes: int, device: torch.device | str | None) -> None:
        super().__init__()
        if block_bytes < 1:
            raise ValueError(f"block_bytes is 1 or more, got {block_bytes}")
        self._block_bytes = block_bytes
        self._blocks: list[Tensor] = []
        # Free parts, ascending and with gaps between them: block, begin, end.
        self._free: list[tuple[int, int, int]] = []
        # Garbage is collected anywhere, in the middle of _take() too: it only leaves a note.
        self._given_back: deque[tuple[int, int, int]] = deque()
        self._lock = threading.Lock()
        self._add_block(block_bytes, torch.device(device or torch.get_default_device()))
        self.device = self._blocks[0].device

    @property
    def num_blocks(self) -> int:
        """One, and one more for each time that it was full."""
        return len(self._blocks)

    @property
    def reserved_bytes(self) -> int:
        """Of its blocks."""
        return sum(block.nbytes for block in self._blocks)

    @property
    def used_bytes(self) -> int:
        """Of places that are taken now, each of whole cache lines."""
        with self._lock:
            self._join_free()
            return self.reserved_bytes - sum(end - begin for _, begin, end in self._free)

    def copy(self, flat: Tensor, look: Look) -> Room:
        """Copies a tensor of one dimension to a place of its own.

        A full arena grows by a block, and says so the first time.
        """
        num_bytes = max(1, -(-flat.nbytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
        with self._lock:
            self._join_free()
            block, begin = self._take(num_bytes) or self._grow(num_bytes)
        place = self._blocks[block][begin : begin + flat.nbytes].view(flat.dtype)
        room = Room(place.copy_(flat), look)
        note = (block, begin, begin + num_bytes)
        weakref.finalize(room, self._given_back.append, note).atexit = False
        return room

    def _takes(self, tensor: Tensor) -> bool:
        return is_plain(tensor) and tensor.device == self.device

    def _keep(self, tensor: Tensor) -> Room:
        return self.copy(*flatten(tensor))

    def _restore(self, kept: Room) -> Tensor:
        return kept.look.over(kept.flat.clone())

    # ---- places

    def _take(self, num_bytes: int) -> tuple[int, int] | None:
        """Block and begin of the first free part that is large enough."""
        for idx, (block, begin, end) in enumerate(self._free):
            if end - begin >= num_bytes:
                rest = (block, begin + num_bytes, end)
                self._free[idx : idx + 1] = [rest] if end - begin > num_bytes else []
                return block, begin
        return None

    def _grow(self, num_bytes: int) -> tuple[int, int]:
        before = self.reserved_bytes
        self._add_block(max(self._block_bytes, num_bytes), self.device)
        if len(self._blocks) == 2:
            _log.warning(
                "an arena of %d bytes has no room for %d more: it grows to %d. Blocks of the bytes"
                " that a step saves need no second one",
                before,
                num_bytes,
                self.reserved_bytes,
            )
        place = self._take(num_bytes)
        assert place is not None
        return place

    def _add_block(self, num_bytes: int, device: torch.device) -> None:
        self._free.append((len(self._blocks), 0, num_bytes))
        self._blocks.append(torch.empty(num_bytes, dtype=torch.uint8, device=device))

    def _join_free(self) -> None:
        """Adds to the free parts what was given back."""
        while self._given_back:
            block, begin, end = self._given_back.popleft()
            idx = bisect(self._free, (block, begin, end))
            if idx < len(self._free) and self._free[idx][:2] == (block, end):
                end = self._free.pop(idx)[2]
            if idx > 0 and self._free[idx - 1][::2] == (block, begin):
                idx -= 1
                begin = self._free.pop(idx)[1]
            self._free.insert(idx, (block, begin, end))


def arena(block_bytes: int, *, device: torch.device | str | None = None) -> Arena:
    """Has tensors that autograd saves inside of it copied into memory that was set aside for them.

    Around checkpoints: what they keep until the backward pass does not lie between activations that
    go at once, so that these leave no holes behind.

        arena = activations.arena(1 << 30)
        for batch in batches:
            with arena:
                loss = loss_of(model, batch)  # with torch.utils.checkpoint.checkpoint inside
            loss.backward()

    The backward pass gets a copy each time: the bits that were saved. A place is free again when
    its graph is, after the backward pass or when it is dropped. Parameters and their views stay as
    they are, so do tensors of other devices. For the innermost context of saved tensors only:
    partition() takes an `arena` for its shards.

    Args:
        block_bytes: of the block that is allocated now, and of each that is added when it is full.
            A saved tensor takes whole lines of 64 bytes.
        device: None for torch.get_default_device().

    Returns:
        A context, which may be entered again and again, also in itself.

    Raises:
        ValueError: block_bytes is not positive.
        RuntimeError: in the backward pass, torch's own, of a tensor that was written meanwhile.

    Not collective. A place is used again in the order of the device's stream: a forward and a
    backward pass that run on different streams must wait for each other.
    """
    return Arena(block_bytes, device)


def gradient_arena(params: Iterable[nn.Parameter]) -> list[Tensor]:
    """Has the gradients of some parameters stand one behind the other, for good.

        activations.gradient_arena(model.parameters())

    A gradient that autograd has made goes to its place at once, and `param.grad` is a view of it;
    sums over micro-batches are made there. After `zero_grad()` it is None until the next one comes
    and takes the place again, so that optimizers leave out what has none.

    Args:
        params: those that require no gradient are left out; gradients that are there move.

    Returns:
        The memory, of one dimension, for each dtype and device in the order of the parameters.

    Raises:
        TypeError: a parameter is a DTensor or another subclass, or no leaf; nothing has changed.

    Not collective. Sparse gradients, those of create_graph=True and those of another dtype stay
    where they are. Not with what places gradients itself: DistributedDataParallel with
    gradient_as_bucket_view, zero.shard().
    """
    trained = [param for param in dict.fromkeys(params) if param.requires_grad]
    kinds: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
    for param in trained:
        if not (param.is_leaf and type(param.data) is Tensor):
            raise TypeError(
                f"gradients of plain parameters have room in an arena, got a {type(param.data)}"
                " or what is computed from others; give what is sharded to its own system"
            )
        kinds.setdefault((param.device, param.dtype), []).append(param)
    buffers = []
    for (device, dtype), alike in kinds.items():
        sizes = [param.numel() for param in alike]
        buffers.append(torch.zeros(sum(sizes), dtype=dtype, device=device))
        for param, place in zip(alike, buffers[-1].split(sizes), strict=True):
            move = _mover(_like(param, place))
            move(param)
            param.register_post_accumulate_grad_hook(move)
    return buffers


def _like(param: Tensor, place: Tensor) -> Tensor:
    """A view in a parameter's shape, and with its strides where it is dense."""
    if torch.empty_like(param, device="meta").stride() == param.stride():
        return place.as_strided(param.shape, param.stride())
    return place.view(param.shape)


def _mover(view: Tensor) -> Callable[[Tensor], None]:
    def move(param: Tensor) -> None:
        grad = param.grad
        if grad is None or grad is view or grad.layout != torch.strided:
            return
        # A graph of second order goes through a gradient that requires one.
        if grad.dtype != view.dtype or grad.requires_grad:
            return
        if grad.data_ptr() != view.data_ptr() or view.numel() == 0:
            view.copy_(grad)
        param.grad = view

    return move
