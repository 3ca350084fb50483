"""Optimizers that update in the backward pass: full fine-tuning with the memory of inference.

The package is a training system like those in ringcomm/parallel and imports their common parts
(model, shards, experts, clipping); nothing in ringcomm/parallel imports it.
"""

from ringcomm.optim.in_backward import InBackwardOptimizer as InBackwardOptimizer
from ringcomm.optim.lomo import AdaLomo, Lomo

__all__ = ["AdaLomo", "Lomo"]
