"""Predicts which system and mesh train a model fastest on given machines; starts no rank.

    from ringcomm.planner import Cluster, Job, plan
    plans = plan("llama-7b", Cluster(8, "h100", memory_bytes=80 << 30), Job(tokens=1 << 22))
    print(plans.best.candidate.name, plans.best.tokens_per_s)

See docs/design/planner.md.
"""

from ringcomm.planner.hardware import Cluster
from ringcomm.planner.job import Job
from ringcomm.planner.plans import plan

__all__ = ["Cluster", "Job", "plan"]
