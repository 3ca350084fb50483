"""Pipeline parallelism: stages of a model on several ranks, micro-batches through all of them."""

from ringcomm.parallel.pipeline.blocks import cut
from ringcomm.parallel.pipeline.drawing import draw
from ringcomm.parallel.pipeline.pipeline import Pipeline
from ringcomm.parallel.pipeline.schedules import SCHEDULES, Plan, Work
from ringcomm.parallel.pipeline.simulation import simulate
from ringcomm.parallel.pipeline.timeline import Action, Timeline

__all__ = [
    "SCHEDULES",
    "Action",
    "Pipeline",
    "Plan",
    "Timeline",
    "Work",
    "cut",
    "draw",
    "simulate",
]
