"""Pipeline parallelism: stages of a model on several ranks, which process micro-batches."""

from ringcomm.parallel.pipeline.blocks import cut as cut
from ringcomm.parallel.pipeline.pipeline import Pipeline
from ringcomm.parallel.pipeline.schedules import SCHEDULES as SCHEDULES
from ringcomm.parallel.pipeline.schedules import Timeline as Timeline

__all__ = ["Pipeline"]
