"""Tensor parallelism: what modules of ringcomm.nn and a model's own code communicate with."""

from ringcomm.parallel.tensor.regions import enter, leave, sum_gradients

__all__ = ["enter", "leave", "sum_gradients"]
