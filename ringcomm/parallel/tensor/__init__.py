"""Tensor parallelism: what modules of ringcomm.nn and a model's own code communicate with."""

from ringcomm.parallel.tensor.full_state import full_state_dict, load_full_state_dict, whole_of
from ringcomm.parallel.tensor.heads import HeadShares, share_heads
from ringcomm.parallel.tensor.regions import enter, join, leave, sum_gradients, summed_over
from ringcomm.parallel.tensor.splits import Split, SplitModule, split_params

__all__ = [
    "HeadShares",
    "Split",
    "SplitModule",
    "enter",
    "full_state_dict",
    "join",
    "leave",
    "load_full_state_dict",
    "share_heads",
    "split_params",
    "sum_gradients",
    "summed_over",
    "whole_of",
]
