"""Optimizers inside the backward pass: full fine-tuning in the memory of inference."""

from ringcomm.optim.adalomo import AdaLomo
from ringcomm.optim.in_backward import InBackwardOptimizer
from ringcomm.optim.layouts import Split
from ringcomm.optim.lomo import Lomo

__all__ = ["AdaLomo", "InBackwardOptimizer", "Lomo", "Split"]
