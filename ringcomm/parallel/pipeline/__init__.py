"""Pipeline parallelism: stages of a model on several ranks, micro-batches through all of them."""

from typing import TYPE_CHECKING

from ringcomm._renamed import getattr_of
from ringcomm.parallel.pipeline.blocks import cut
from ringcomm.parallel.pipeline.pipeline import Pipeline
from ringcomm.parallel.pipeline.schedules import SCHEDULES, Timeline, simulate

__all__ = ["SCHEDULES", "Pipeline", "Timeline", "cut", "simulate"]

if not TYPE_CHECKING:
    __getattr__ = getattr_of(__name__)
