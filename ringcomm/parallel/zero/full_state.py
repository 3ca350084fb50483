"""Optimizer state in torch's own format, whole: between world sizes, stages and plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ringcomm.parallel.zero.optimizer import ZeroOptimizer


def full_state_dict(optimizer: ZeroOptimizer, *, rank0_only: bool = False) -> dict[str, Any]:
    """The state_dict() that the optimizer given to zero.shard() would have now.

    In memory of the CPU; a weight's state also has "master", its values in float32, where the
    model's weights have 16 bits.

    Args:
        optimizer: sharded.
        rank0_only: rank 0 of the group has the state. The others return {}, and hold one value of
            one weight at a time.

    Collective: gathers the states of one weight after the other.
    """
    keeps = optimizer.group.rank() == 0 or not rank0_only
    numbers = {param: number for number, param in enumerate(optimizer.all_params())}
    by_number = {}
    for param in optimizer.all_params():
        state = {
            key: whole.to("cpu", copy=True) if isinstance(whole, Tensor) else whole
            for key, whole in optimizer.whole_state(param)
            if keeps
        }
        if state:
            by_number[numbers[param]] = state
    return {"state": by_number, "param_groups": optimizer.numbered_groups()} if keeps else {}


def load_full_state_dict(optimizer: ZeroOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Takes this rank's shards of a whole state, one of torch's optimizers among them.

    Args:
        optimizer: sharded, of any world size and stage.
        state_dict: the same on all ranks; its parameter groups have as many parameters.

    Raises:
        ValueError: the groups or a state's shape do not fit; nothing has been written.

    Collective where weights have 16 bits and masters: these are gathered.
    """
    optimizer.load_state_dict(dict(state_dict))
