"""Optimizers that update in the backward pass: full fine-tuning with the memory of inference."""

from typing import TYPE_CHECKING

from ringcomm._renamed import getattr_of
from ringcomm.optim.in_backward import InBackwardOptimizer as InBackwardOptimizer
from ringcomm.optim.lomo import AdaLomo, Lomo

__all__ = ["AdaLomo", "Lomo"]

if not TYPE_CHECKING:
    __getattr__ = getattr_of(__name__)
