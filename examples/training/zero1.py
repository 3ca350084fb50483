"""ZeRO stage 1 (Rajbhandari et al. 2020): the optimizer's state is split over the ranks.

Per step: reduce-scatter the gradients, update the 1/N of the weights that this rank owns, and
all-gather the weights. That moves (N-1)/N of each, together what one all-reduce moves. torch's
``ZeroRedundancyOptimizer`` all-reduces and then broadcasts every weight, half as much again.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from training.updaters import (
    Moments,
    live_bytes,
    make_torch_optimizer,
    set_lr,
    set_optimizer_state,
)
from training.wire import Wire


class Zero1:
    """AdamW or SGD on a shard; see ``updaters.Updater``. Collective: all ranks step together.

    The weights become views of one flat fp32 buffer, padded to N equal chunks, and so do their
    gradients; rank r owns chunk r, whichever weights lie there.
    """

    def __init__(self, named_params: list[tuple[str, nn.Parameter]], kind: str, wire: Wire) -> None:
        self._named = named_params
        self._wire = wire
        num_elems = sum(p.numel() for _, p in named_params)
        self._chunk_elems = -(-num_elems // wire.world_size)
        first = named_params[0][1]
        self._weights = first.new_zeros(self._chunk_elems * wire.world_size).detach()
        self._grads = torch.zeros_like(self._weights)
        for (_, param), weight, grad in zip(
            named_params, self._by_param(self._weights), self._by_param(self._grads), strict=True
        ):
            weight.copy_(param.detach())
            param.data = weight
            param.grad = grad
        # A view: the all-gather finds this rank's part in its place.
        self._shard = self._my_chunk(self._weights)
        self._shard.grad = torch.empty_like(self._shard)
        self._optimizer = make_torch_optimizer(kind, [self._shard])
        self.grad_bytes = 0
        self.measured = False

    def _by_param(self, flat: Tensor) -> list[Tensor]:
        views, offset = [], 0
        for _, param in self._named:
            views.append(flat[offset : offset + param.numel()].view(param.shape))
            offset += param.numel()
        return views

    def _my_chunk(self, flat: Tensor) -> Tensor:
        start = self._wire.rank * self._chunk_elems
        return flat[start : start + self._chunk_elems]

    def begin(self, lr: float) -> None:
        """See ``Updater``. Gradients accumulate into the flat buffer, so it has to be cleared."""
        set_lr(self._optimizer, lr)
        self._grads.zero_()

    def finish(self) -> None:
        """See ``Updater``: reduce-scatter, update of the shard, all-gather."""
        shard_grad = self._shard.grad
        assert shard_grad is not None
        if self.measured:
            self.grad_bytes = live_bytes([shard_grad, *(p.grad for _, p in self._named)])
        self._wire.reduce_scatter(shard_grad, self._grads)
        shard_grad.div_(self._wire.world_size)
        self._optimizer.step()
        self._wire.all_gather(self._weights, self._shard)

    def state_bytes(self) -> int:
        """See ``Updater``."""
        entries = self._optimizer.state.values()
        return live_bytes(v for entry in entries for v in entry.values())

    def moments(self) -> Moments:
        """The state of ALL weights, gathered from the ranks. Collective."""
        found: Moments = {}
        for key, value in self._optimizer.state.get(self._shard, {}).items():
            if key != "step":
                whole = torch.empty_like(self._weights)
                self._wire.all_gather(whole, value)
                names = [name for name, _ in self._named]
                found[key] = dict(zip(names, self._by_param(whole), strict=True))
        return found

    def load_moments(self, moments: Moments, num_updates: int) -> None:
        """Takes this rank's chunk of the given state; the weights are already there."""
        state = {}
        for key, by_name in moments.items():
            whole = torch.zeros_like(self._weights)
            for (name, _), view in zip(self._named, self._by_param(whole), strict=True):
                view.copy_(by_name[name])
            state[key] = self._my_chunk(whole)
        set_optimizer_state(self._optimizer, self._shard, state, num_updates)
