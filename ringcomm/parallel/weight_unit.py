"""A module whose weights are gathered and freed together; see weight_shards.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcomm.ops import shard_range
from ringcomm.torch_names import all_gather_single


class Unit:
    """Its parameters, this rank's pieces of them, and whether they are whole now.

    Attributes:
        shards: this rank's elements of each parameter, 1-D.
    """

    def __init__(
        self, module: nn.Module, params: list[nn.Parameter], group: dist.ProcessGroup
    ) -> None:
        self.module, self.params = module, params
        self.shards: dict[nn.Parameter, Tensor] = {}
        self._group = group
        self._is_whole = True
        self._has_frozen = any(not param.requires_grad for param in params)
        self._has_left = False
        # Whose gradients have not been consumed since the backward pass came here.
        self._awaited: set[nn.Parameter] = set()

    def split(self) -> None:
        """Keeps this rank's pieces of rank 0's weights, and frees the rest. Collective."""
        size, rank = self._group.size(), self._group.rank()
        with torch.no_grad():
            for param in self.params:
                dist.broadcast(param.detach(), group_src=0, group=self._group)
                begin, end = shard_range(param.numel(), size, rank)
                self.shards[param] = param.detach().view(-1)[begin:end].clone()
        self.free()

    def gather(self) -> None:
        """Makes the weights whole, from the pieces of now. Collective, unless they are."""
        if self._is_whole:
            return
        for param in self.params:
            storage = param.untyped_storage()
            storage.resize_(param.numel() * param.element_size())
        for dtype in dict.fromkeys(param.dtype for param in self.params):
            self._gather_dtype([param for param in self.params if param.dtype == dtype])
        self._is_whole = True

    def _gather_dtype(self, params: list[nn.Parameter]) -> None:
        """By one collective; ranks' pieces are filled up to the longest, which is rank 0's."""
        size = self._group.size()
        lengths = [-(-param.numel() // size) for param in params]
        mine = params[0].new_empty(sum(lengths)).detach()
        offset = 0
        for param, length in zip(params, lengths, strict=True):
            piece = self.shards[param]
            mine[offset : offset + piece.numel()] = piece
            offset += length
        whole = mine.new_empty(size, sum(lengths))
        all_gather_single(whole.view(-1), mine, group=self._group)
        offset = 0
        for param, length in zip(params, lengths, strict=True):
            # What autograd has saved of the weight is the same as before.
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(param):
                flat = param.view(-1)
                for rank in range(size):
                    begin, end = shard_range(param.numel(), size, rank)
                    flat[begin:end] = whole[rank, offset : offset + end - begin]
            offset += length

    def free(self) -> None:
        """Leaves the pieces alone."""
        for param in self.params:
            param.untyped_storage().resize_(0)
        self._is_whole = self._has_left = False
        self._awaited.clear()

    # ---- the backward pass

    def entered(self) -> None:
        """The gradient of the output is there. Collective."""
        self.gather()
        self._has_left = False
        self._awaited = {param for param in self.params if param.requires_grad}

    def left(self) -> None:
        """The gradient of an input is there."""
        self._has_left = True
        self._free_if_done()

    def consumed(self, param: nn.Parameter) -> None:
        """A parameter's gradient is."""
        self._awaited.discard(param)
        self._free_if_done()

    def _free_if_done(self) -> None:
        # A frozen weight has no gradient to tell that nobody needs it any more.
        if self._is_whole and not self._awaited and (self._has_left or not self._has_frozen):
            self.free()
