"""Pipeline parallelism: stages of a model on several ranks, which process micro-batches."""

from typing import TYPE_CHECKING

from ringcomm._renamed import getattr_of
from ringcomm.parallel.pipeline.blocks import cut as cut
from ringcomm.parallel.pipeline.pipeline import Pipeline
from ringcomm.parallel.pipeline.schedules import SCHEDULES as SCHEDULES
from ringcomm.parallel.pipeline.schedules import Timeline as Timeline
from ringcomm.parallel.pipeline.schedules import simulate as simulate

__all__ = ["Pipeline"]

if not TYPE_CHECKING:
    __getattr__ = getattr_of(__name__)
