"""Optimizers that update in the backward pass: full fine-tuning with the memory of inference."""

from ringcomm.optim.in_backward import InBackwardOptimizer as InBackwardOptimizer
from ringcomm.optim.lomo import AdaLomo, Lomo

__all__ = ["AdaLomo", "Lomo"]
