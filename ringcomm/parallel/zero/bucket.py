"""Weights that are reduced, updated and gathered together: one flat buffer, a shard per rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcomm.ops.fused_update import shard_range
from ringcomm.parallel.flat_collectives import all_gather_shards, reduce_scatter_mean


class Bucket:
    """Some weights of one parameter group, which become views of one buffer.

    Attributes:
        params: the weights, in the order of the buffer.
        group_idx: of the parameter group that they are of.
        weights: all ranks' shards of them, in rank order; one dimension.
        shard: what the optimizer updates: this rank's part of `weights` or, where that has 16 bits,
            of the same weights in float32.
        shard_grad: the gradient of the shard, in the gradients' dtype; None before it is reduced.
        has_master: whether the shard is kept in float32 beside 16-bit weights.
        is_fresh: whether a weight's gradient has come since the last reduction.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        group_idx: int,
        group: dist.ProcessGroup,
        dtype: torch.dtype | None,
    ) -> None:
        """Takes the values of rank 0, and keeps them as `dtype`, by default their own.

        Collective.
        """
        self.params, self.group_idx, self._group = list(params), group_idx, group
        values = torch.cat([param.detach().reshape(-1) for param in params])
        dist.broadcast(values, group=group, group_src=0)
        self.weights = values if dtype is None else values.to(dtype)
        mine = slice(*self.shard_range)
        self.has_master = self.is_half
        self.shard = values[mine].float().clone() if self.is_half else self.weights[mine]
        begin = 0
        self._places: dict[nn.Parameter, tuple[int, int]] = {}
        for param in self.params:
            self._places[param] = begin, begin + param.numel()
            begin += param.numel()
        for param in self.params:
            param.grad = None
            param.data = self.view(self.weights, param)
        self.shard_grad: Tensor | None = None
        self._grads: Tensor | None = None
        self._arrived: set[nn.Parameter] = set()
        self.is_fresh = False

    @property
    def shard_range(self) -> tuple[int, int]:
        """The elements [begin, end) of this rank."""
        return shard_range(self.weights.numel(), self._group.size(), self._group.rank())

    @property
    def is_half(self) -> bool:
        """Whether the weights have 16 bits."""
        return self.weights.dtype != torch.float32

    def give_master(self) -> Tensor:
        """Hands over the float32 shard to who keeps it; `shard` is of 16 bits from now on."""
        master, self.shard = self.shard, self.weights[slice(*self.shard_range)]
        self.has_master = False
        return master

    def view(self, flat: Tensor, param: nn.Parameter) -> Tensor:
        """A weight's part of a buffer of the bucket's size, in the weight's shape."""
        return flat[slice(*self._places[param])].view(param.shape)

    def _is_view(self, tensor: Tensor, flat: Tensor, param: nn.Parameter) -> bool:
        """Whether a tensor of a weight is view(flat, param); makes none, for speed."""
        begin, _ = self._places[param]
        address = flat.data_ptr() + begin * flat.element_size()
        is_there = tensor.data_ptr() == address or tensor.numel() == 0
        return is_there and tensor.dtype == flat.dtype

    def has_weight(self, param: nn.Parameter) -> bool:
        """Whether a weight is still where it was put."""
        return self._is_view(param, self.weights, param)

    # ---- whole gradients

    @property
    def gradient_tensors(self) -> list[Tensor]:
        """Those that it keeps in memory here."""
        return [tensor for tensor in (self._grads, self.shard_grad) if tensor is not None]

    @property
    def is_complete(self) -> bool:
        """Whether all weights' gradients have come."""
        return len(self._arrived) == len(self.params)

    def has_taken(self, param: nn.Parameter) -> bool:
        """Whether a weight's gradient is where take() puts it."""
        if self._grads is None or param.grad is None:
            return False
        return self._is_view(param.grad, self._grads, param)

    def take(self, param: nn.Parameter, *, keep_view: bool) -> None:
        """Moves a gradient that autograd has left into the buffer.

        With `keep_view` it stays readable in its place as `param.grad`, and autograd adds to it
        there; otherwise it is gone, and what comes next is added.
        """
        assert param.grad is not None
        if self._grads is None:
            self._grads = torch.empty_like(self.weights)
        view = self.view(self._grads, param)
        if not self.has_taken(param):
            if param in self._arrived and not keep_view:
                view.add_(param.grad)
            else:
                view.copy_(param.grad)
        self._arrived.add(param)
        self.is_fresh = True
        param.grad = view if keep_view else None

    def drop(self, param: nn.Parameter) -> None:
        """Forgets a weight's gradient, which somebody has set to None."""
        self._arrived.discard(param)
        if not self._arrived:
            self.forget_gradients()

    def whole_gradients(self) -> Tensor:
        """The buffer, with zeros for what has not come."""
        if self._grads is None:
            self._grads = torch.empty_like(self.weights)
        for param in self.params:
            if param not in self._arrived:
                self.view(self._grads, param).zero_()
        return self._grads

    def forget_gradients(self) -> None:
        """Waits for new ones; the buffer stays for them, where it was kept so far."""
        self._arrived.clear()
        self.shard_grad = None
        self.is_fresh = False

    def reduce(self) -> None:
        """Makes this rank's shard of the ranks' mean gradient, of all that has come. Collective."""
        self.shard_grad = reduce_scatter_mean(self.whole_gradients(), self._group)
        self.is_fresh = False

    def reduce_and_free(self) -> None:
        """Adds this rank's shard of the ranks' mean gradient to what it has. Collective.

        Whole gradients are freed; what comes next is a new sum.
        """
        before = self.shard_grad
        self.reduce()
        if before is not None:
            self.shard_grad = before.add_(self.shard_grad)  # type: ignore[arg-type]
        self.free_gradients()

    def free_gradients(self) -> None:
        """Frees whole gradients."""
        self._grads = None
        self._arrived.clear()
        self.is_fresh = False

    # ---- states of whole weights

    def whole_of(self, shard: Tensor) -> Tensor:
        """All ranks' shards of a state. Collective."""
        whole = shard.new_zeros(self.weights.numel())
        whole[slice(*self.shard_range)] = shard
        all_gather_shards(whole, self._group)
        return whole

    def shard_of(self, values: Mapping[nn.Parameter, Tensor]) -> Tensor:
        """This rank's part of a state by weight, in float32; zeros where a weight has none."""
        mine_begin, mine_end = self.shard_range
        shard = torch.zeros_like(self.shard, dtype=torch.float32)
        for param, value in values.items():
            begin, end = self._places[param]
            first, last = max(begin, mine_begin), min(end, mine_end)
            if first < last:
                part = value.detach().reshape(-1)[first - begin : last - begin]
                shard[first - mine_begin : last - mine_begin] = part
        return shard

    # ---- around the update

    def see_written_weights(self) -> None:
        """Takes what somebody has written into 16-bit weights, such as a loaded state_dict."""
        if self.has_master:
            mine = self.weights[slice(*self.shard_range)]
            is_written = mine != self.shard.to(mine.dtype)
            if is_written.any():
                self.shard[is_written] = mine[is_written].float()

    def gather(self) -> None:
        """Gives all ranks the new weights. Collective."""
        if self.has_master:
            self.weights[slice(*self.shard_range)] = self.shard
        all_gather_shards(self.weights, self._group)


def cut_into_buckets(
    params: Iterable[nn.Parameter], bucket_bytes: int, dtype: torch.dtype | None
) -> list[list[nn.Parameter]]:
    """Neighbours of one dtype and device, of at most so many bytes; more only for one weight.

    The last weights come first, since a backward pass brings their gradients first.
    """
    buckets: list[list[nn.Parameter]] = []
    num_bytes = 0
    kind = None
    for param in reversed(list(params)):
        size = param.numel() * (dtype or param.dtype).itemsize
        if not buckets or (param.dtype, param.device) != kind or num_bytes + size > bucket_bytes:
            buckets.append([])
            num_bytes = 0
        buckets[-1].append(param)
        num_bytes += size
        kind = (param.dtype, param.device)
    return buckets
