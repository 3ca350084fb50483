"""Memory set aside for checkpoints and gradients: Md of ZeRO-R (Rajbhandari et al. 2020, 6.3)."""

from __future__ import annotations

import logging
import threading
import weakref
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType

import torch
from torch import Tensor, nn
from typing_extensions import Self

from ringcomm.parallel.activations.saved_tensors import Look, SavedTensors, flatten, is_plain

_log = logging.getLogger("ringcomm")

# Of a cache line, and more than any load wants.
ALIGNMENT_BYTES = 64


class _FreeSpace:
    """The free parts of [0, num_bytes), neighbours joined.

    Attributes:
        num_bytes: of all.
        free_bytes: of the free parts together.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = self.free_bytes = num_bytes
        # Begins and ends of the free parts, ascending.
        self._begins, self._ends = [0], [num_bytes]

    def take(self, num_bytes: int) -> int | None:
        """The begin of the first free part that is large enough, which is taken; None without."""
        for idx, begin in enumerate(self._begins):
            if self._ends[idx] - begin >= num_bytes:
                self._begins[idx] += num_bytes
                if self._begins[idx] == self._ends[idx]:
                    del self._begins[idx], self._ends[idx]
                self.free_bytes -= num_bytes
                return begin
        return None

    def give_back(self, begin: int, num_bytes: int) -> None:
        """Makes [begin, begin + num_bytes) free, which take() has returned."""
        idx, end = bisect(self._begins, begin), begin + num_bytes
        self._begins.insert(idx, begin)
        self._ends.insert(idx, end)
        for right in (idx + 1, idx):  # a part ends where the next one begins
            if 0 < right < len(self._begins) and self._ends[right - 1] == self._begins[right]:
                del self._ends[right - 1], self._begins[right]
        self.free_bytes += num_bytes


class Room:
    """A place in an arena, which is free again when this object is gone.

    Attributes:
        flat: its elements, one dimension.
    """

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat


class _Kept:
    """A saved tensor: its place, and how it looked."""

    def __init__(self, room: Room, look: Look) -> None:
        self.room, self.look = room, look


class Arena(SavedTensors[_Kept]):
    """Blocks of memory into which saved tensors are copied; a context, entered any number of times.

    Attributes:
        device: of the tensors that it takes.
        num_blocks: that it has.
        reserved_bytes: of its blocks.
    """

    def __init__(self, block_bytes: int, device: torch.device | str | None, min_elems: int) -> None:
        super().__init__()
        if block_bytes < 1:
            raise ValueError(f"block_bytes is 1 or more, got {block_bytes}")
        if min_elems < 0:
            raise ValueError(f"min_elems is 0 or more, got {min_elems}")
        self._block_bytes, self._min_elems = block_bytes, min_elems
        self._blocks: list[Tensor] = []
        self._space: list[_FreeSpace] = []
        # Garbage is collected anywhere, in the middle of allocate() too: it only leaves a note.
        self._given_back: deque[tuple[int, int, int]] = deque()
        self._lock = threading.Lock()
        self._entered: list[torch.autograd.graph.saved_tensors_hooks] = []
        self._add_block(block_bytes, torch.device(device or torch.get_default_device()))
        self.device = self._blocks[0].device

    @property
    def num_blocks(self) -> int:
        """See the class."""
        return len(self._blocks)

    @property
    def reserved_bytes(self) -> int:
        """See the class."""
        return sum(block.nbytes for block in self._blocks)

    @property
    def used_bytes(self) -> int:
        """Of places that are taken now, each of whole cache lines."""
        with self._lock:
            self._take_back()
            return sum(space.num_bytes - space.free_bytes for space in self._space)

    def copy(self, flat: Tensor) -> Room:
        """Copies a tensor of one dimension to a place of its own.

        A full arena grows by a block, and says so the first time.
        """
        with self._lock:
            self._take_back()
            num_bytes = max(1, -(-flat.nbytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
            block_idx, begin = self._find(num_bytes)
        place = self._blocks[block_idx][begin : begin + flat.nbytes].view(flat.dtype)
        room = Room(place.copy_(flat))
        note = (block_idx, begin, num_bytes)
        weakref.finalize(room, self._given_back.append, note).atexit = False
        return room

    def __enter__(self) -> Self:
        hooks = self.hooks()
        hooks.__enter__()
        self._entered.append(hooks)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._entered.pop().__exit__(kind, error, trace)

    # ---- saved tensors

    def takes(self, tensor: Tensor) -> bool:
        """See SavedTensors."""
        is_large = tensor.numel() >= self._min_elems
        return is_plain(tensor) and tensor.device == self.device and is_large

    def keep(self, tensor: Tensor) -> _Kept:
        """See SavedTensors."""
        flat, look = flatten(tensor)
        return _Kept(self.copy(flat), look)

    def restore(self, kept: _Kept) -> Tensor:
        """See SavedTensors."""
        return kept.look.over(kept.room.flat.clone())

    # ---- places

    def _find(self, num_bytes: int) -> tuple[int, int]:
        for block_idx, space in enumerate(self._space):
            begin = space.take(num_bytes)
            if begin is not None:
                return block_idx, begin
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
        begin = self._space[-1].take(num_bytes)
        assert begin is not None
        return len(self._blocks) - 1, begin

    def _add_block(self, num_bytes: int, device: torch.device) -> None:
        self._blocks.append(torch.empty(num_bytes, dtype=torch.uint8, device=device))
        self._space.append(_FreeSpace(num_bytes))

    def _take_back(self) -> None:
        while self._given_back:
            block_idx, begin, num_bytes = self._given_back.popleft()
            self._space[block_idx].give_back(begin, num_bytes)


def arena(
    block_bytes: int, *, device: torch.device | str | None = None, min_elems: int = 0
) -> Arena:
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
        min_elems: smaller tensors stay where they are.

    Returns:
        A context, which may be entered again and again, also in itself.

    Raises:
        ValueError: an argument is out of its range.
        RuntimeError: in the backward pass, torch's own, of a tensor that was written meanwhile.

    Not collective. A place is used again in the order of the device's stream: a forward and a
    backward pass that run on different streams must wait for each other.
    """
    return Arena(block_bytes, device, min_elems)


class GradientArena:
    """Buffers whose views become `param.grad`.

    Attributes:
        buffers: one of one dimension for each dtype and device, in the order of the parameters.
    """

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        trained = [param for param in dict.fromkeys(params) if param.requires_grad]
        for param in trained:
            if not (param.is_leaf and type(param.data) is Tensor):
                raise TypeError(
                    f"gradients of plain parameters have room in an arena, got a {type(param.data)}"
                    " or what is computed from others; give what is sharded to its own system"
                )
        kinds: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
        for param in trained:
            kinds.setdefault((param.device, param.dtype), []).append(param)
        self.buffers: list[Tensor] = []
        self._handles = []
        for (device, dtype), alike in kinds.items():
            buffer = torch.zeros(sum(p.numel() for p in alike), dtype=dtype, device=device)
            self.buffers.append(buffer)
            sizes = [param.numel() for param in alike]
            for param, place in zip(alike, buffer.split(sizes), strict=True):
                move = _mover(_like(param, place))
                move(param)
                self._handles.append(param.register_post_accumulate_grad_hook(move))

    @property
    def num_bytes(self) -> int:
        """Of all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def remove(self) -> None:
        """Lets gradients come where autograd makes them; those that are there stay."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


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


def gradient_arena(params: Iterable[nn.Parameter]) -> GradientArena:
    """Has the gradients of some parameters stand one behind the other, for good.

        activations.gradient_arena(model.parameters())

    A gradient that autograd has made goes to its place at once, and `param.grad` is a view of it;
    sums over micro-batches are made there. After `zero_grad()` it is None until the next one comes
    and takes the place again, so that optimizers leave out what has none. Hooks go with the
    parameters.

    Args:
        params: those that require no gradient are left out; gradients that are there move.

    Returns:
        The buffers.

    Raises:
        TypeError: a parameter is a DTensor or another subclass, or no leaf; nothing has changed.

    Not collective. Sparse gradients, those of create_graph=True and those of another dtype stay
    where they are. Not with what places gradients itself: DistributedDataParallel with
    gradient_as_bucket_view, zero.shard().
    """
    return GradientArena(params)
