"""Weights that are reduced, updated and gathered together: one flat buffer, a shard per rank."""

from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcomm.parallel.flat_collectives import (
    all_gather_shards,
    place_in,
    reduce_scatter_mean,
    take_written,
    with_own_storage,
)
from ringcomm.parallel.zero.bucket_plan import BucketPlan


class Bucket:
    """Weights whose memory becomes part of one buffer; each has a storage of its own there.

    A gradient is first in a buffer of unsharded gradients, and after reduce() in this rank's shard
    of the mean over the ranks. Both accumulate all gradients since the last step.

    Attributes:
        group: the ranks that share it; None if this one is alone.
        weights: all ranks' shards of them, in rank order; one dimension.
        shard: this rank's part of `weights`, which the optimizer updates; with a master, the
            float32 values of 16-bit weights.
        grads: the buffer of unsharded gradients; None while there are none.
        shard_grad: the gradient of the shard; None before the first reduction. In pinned memory if
            an optimizer on the host updates the shard of an accelerator at stage 2.
        arrived: the weights whose gradient has arrived since the last reduction.
        reduced: those whose gradient has been reduced since the last step.
    """

    def __init__(
        self,
        plan: BucketPlan,
        group: dist.ProcessGroup,
        dtype: torch.dtype | None,
        grad_dtype: torch.dtype,
        *,
        keeps_buffer: bool,
    ) -> None:
        """Uses the weights' values, equal on all ranks, in `dtype`; by default their own.

        `keeps_buffer`: whether the buffer of unsharded gradients stays when they are reduced.
        """
        self.params, self._sizes, self.is_whole, experts = plan
        self.group = group if experts is None else experts.replica_group
        # Gradients of experts are sums over the tokens of all ranks that share the layer.
        self._divisor = 1 if experts is None else experts.group.size()
        self._grad_dtype, self._keeps_buffer = grad_dtype, keeps_buffer
        self._rank, _ = place_in(self.group)
        values = torch.cat([param.detach().reshape(-1) for param in self.params])
        self.weights = values if dtype is None else values.to(dtype)
        self._edges = [0, *accumulate(self._sizes)]
        self._mine = mine = slice(*self._edges[self._rank :][:2])
        self.has_master = self.weights.dtype != torch.float32
        self.shard = values[mine].float().clone() if self.has_master else self.weights[mine]
        ends = accumulate(param.numel() for param in self.params)
        self._places = {p: (e - p.numel(), e) for p, e in zip(self.params, ends, strict=True)}
        for param in self.params:
            param.grad = None
            param.data = with_own_storage(self._view(self.weights, param))
        self._shard_grad: Tensor | None = None
        self._sends = False  # gradients to the host
        self._sent: torch.Event | None = None  # behind the last copy
        self.grads: Tensor | None = None
        self.arrived: set[nn.Parameter] = set()
        self.reduced: set[nn.Parameter] = set()

    def offload(self) -> None:
        """The float32 shard has a new owner, on the host; `shard` has 16 bits from now on."""
        self.shard, self.has_master = self.weights[self._mine], False
        self._sends = self.weights.device.type != "cpu" and not self._keeps_buffer

    def _view(self, flat: Tensor, param: nn.Parameter) -> Tensor:
        """A weight's part of a buffer of the bucket's size, in the weight's shape."""
        return flat[slice(*self._places[param])].view(param.shape)

    def has_weight(self, param: nn.Parameter) -> bool:
        """Whether a weight is still in the buffer."""
        own = self._view(self.weights, param)
        is_there = param.data_ptr() == own.data_ptr() or param.numel() == 0
        return is_there and param.dtype == own.dtype

    # ---- parts of weights

    def part_range(self, param: nn.Parameter, rank: int | None = None) -> tuple[int, int]:
        """The elements [begin, end) of a weight in a rank's shard, by default this one's."""
        rank = self._rank if rank is None else rank
        first, last = self._edges[rank : rank + 2]
        begin, end = self._places[param]
        clamped = [min(max(edge, begin), end) - begin for edge in (first, last)]
        return clamped[0], clamped[1]

    def place_in_shard(self, param: nn.Parameter, last: nn.Parameter | None = None) -> slice:
        """The range in `shard` of this rank's part of a weight, or of weights up to `last`."""
        first, end = self._places[param][0], self._places[param if last is None else last][1]
        begin, num_elems = self._mine.start, self.shard.numel()
        edges = [min(max(edge - begin, 0), num_elems) for edge in (first, end)]
        return slice(*edges)

    # ---- gradients

    def take(self, param: nn.Parameter, grad: Tensor) -> None:
        """Adds a gradient to the buffer."""
        view = self._view(self.buffer(), param)
        if param in self.arrived:
            view.add_(grad)
        else:
            view.copy_(grad)
        self.arrived.add(param)

    def drop(self, param: nn.Parameter) -> None:
        """Drops a weight's gradient."""
        if param in self.reduced and self.shard_grad is not None:
            self.shard_grad[self.place_in_shard(param)] = 0
        self.arrived.discard(param)
        self.reduced.discard(param)

    def whole_gradients(self) -> Tensor:
        """The buffer, with zeros for missing gradients."""
        grads = self.buffer()
        for param in self.params:
            if param not in self.arrived:
                self._view(grads, param).zero_()
        return grads

    def buffer(self) -> Tensor:
        """Of unsharded gradients."""
        if self.grads is None:
            self.grads = torch.empty_like(self.weights, dtype=self._grad_dtype)
        return self.grads

    @property
    def shard_grad(self) -> Tensor | None:
        """See the class. Waits for a copy to the host."""
        if self._sent is not None:
            self._sent.synchronize()
            self._sent = None
        return self._shard_grad

    def reduce(self) -> None:
        """Accumulates this rank's shard of the ranks' mean gradient. Collective."""
        mean = reduce_scatter_mean(self.whole_gradients(), self.group, self._sizes)
        if self._divisor > 1:
            mean.div_(self._divisor)
        if not self._sends:
            # Not into `mean`: another stream may have made the sum, and would use its memory again.
            self._shard_grad = mean if self._shard_grad is None else self._shard_grad.add_(mean)
        else:  # by the stream that reduces, which then uses the memory of `mean` again
            if self._shard_grad is None:
                self._shard_grad = torch.empty_like(mean, device="cpu", pin_memory=True)
            else:
                mean += self._shard_grad.to(mean.device, non_blocking=True)
            self._shard_grad.copy_(mean, non_blocking=True)
            self._sent = torch.accelerator.current_stream(mean.device).record_event()
        self.reduced |= self.arrived
        self._empty_buffer()

    def _empty_buffer(self) -> None:
        self.arrived.clear()
        if not self._keeps_buffer:
            self.grads = None

    def forget_gradients(self) -> None:
        """Drops all gradients."""
        self._empty_buffer()
        self.reduced.clear()
        self._shard_grad = self._sent = None

    # ---- around the update

    def see_written_weights(self) -> None:
        """Updates the master after the weights were modified, as by a loaded state_dict."""
        if self.has_master:
            take_written(self.shard, self.weights[self._mine])

    def gather(self) -> None:
        """Gathers the new weights on all ranks. Collective."""
        if self.has_master:
            self.weights[self._mine] = self.shard
        all_gather_shards(self.weights, self.group, self._sizes)
