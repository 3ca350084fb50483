"""Optimizers inside the backward pass: full fine-tuning in the memory of inference.

And, for type checks, what ringcomm.parallel.zero.shard() makes of torch's.
"""

from ringcomm.optim.adalomo import AdaLomo
from ringcomm.optim.clip_cost import ClipProposal, propose_clip_mode
from ringcomm.optim.in_backward import InBackwardOptimizer
from ringcomm.optim.layouts import Split
from ringcomm.optim.lomo import Lomo
from ringcomm.optim.memory_report import MemoryReport, memory_report
from ringcomm.parallel.zero import ZeroAdamW, ZeroSGD

__all__ = [
    "AdaLomo",
    "ClipProposal",
    "InBackwardOptimizer",
    "Lomo",
    "MemoryReport",
    "Split",
    "ZeroAdamW",
    "ZeroSGD",
    "memory_report",
    "propose_clip_mode",
]
