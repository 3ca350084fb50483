"""Optimizers inside the backward pass: full fine-tuning in the memory of inference.

And, for type checks, what ringcomm.parallel.zero.shard() makes of torch's.
"""

from typing import TYPE_CHECKING

from ringcomm._renamed import getattr_of
from ringcomm.optim.adalomo import AdaLomo
from ringcomm.optim.in_backward import InBackwardOptimizer
from ringcomm.optim.layouts import Split
from ringcomm.optim.lomo import Lomo

__all__ = [
    "AdaLomo",
    "InBackwardOptimizer",
    "Lomo",
    "Split",
]

if not TYPE_CHECKING:
    __getattr__ = getattr_of(__name__)
