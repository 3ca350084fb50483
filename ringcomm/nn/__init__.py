"""Modules over ringcomm's operators."""

from ringcomm.nn.cross_entropy import CrossEntropyLoss, LinearCrossEntropyLoss

__all__ = ["CrossEntropyLoss", "LinearCrossEntropyLoss"]
