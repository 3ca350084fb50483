"""What must be known of a step before it is made: its gradients' norm, and that all are finite."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm.optim.gradients import Gradient

Groups = tuple[dist.ProcessGroup, ...]


class StepFacts:
    """Sums over gradients as they come.

    A weight whose parts several ranks hold counts once: parts are added up over their groups.
    """

    def __init__(self) -> None:
        self._sums: dict[Groups, Tensor] = {}  # (squares, gradients that are not finite), float64

    def add(self, gradient: Gradient, groups: Groups, *, with_norm: bool) -> None:
        """One weight's gradient, or this rank's part of it."""
        not_finite = (~gradient.is_finite()).double()
        square = gradient.square_sum() if with_norm else torch.zeros_like(not_finite)
        sums = torch.stack([square, not_finite])
        before = self._sums.get(groups)
        self._sums[groups] = sums if before is None else before + sums

    def finish(self, all_groups: Iterable[Groups], device: torch.device) -> tuple[float, bool]:
        """The norm of all gradients, and whether they are finite.

        Collective over every group in `all_groups`, which names those of all weights, in an order
        that the ranks share.
        """
        total = torch.zeros(2, dtype=torch.float64, device=device)
        for groups in all_groups:
            sums = self._sums.get(groups)
            sums = torch.zeros_like(total) if sums is None else sums.to(device)
            for group in groups:
                dist.all_reduce(sums, group=group)
            total += sums
        square, num_not_finite = total.tolist()
        return float(square) ** 0.5, num_not_finite == 0


def backward_of_two(loss: Tensor) -> None:
    """The first of two backward passes, which finds the facts.

    Raises:
        RuntimeError: compiled code has no second one. No weight has been written.
    """
    try:
        loss.backward(retain_graph=True)
    except RuntimeError as error:
        if "donated buffers" not in str(error):
            raise
        raise RuntimeError(
            'clip_mode="two_pass" runs the backward pass twice, and torch.compile has made code'
            ' that gives up its buffers in the first: take clip_mode="deferred", or set'
            " torch._functorch.config.donated_buffer = False before the model compiles"
        ) from error
