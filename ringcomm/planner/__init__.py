"""Which system, on which mesh, trains a model on some machines: on paper, before a rank starts.

    from ringcomm import planner
    plans = planner.plan(
        planner.find_model("llama-7b"),
        planner.Cluster(8, memory_bytes=80 << 30),
        planner.Job(tokens=1 << 22),
    )
    print(plans.best.candidate.name, plans.best.tokens_per_s)

See docs/design/planner.md.
"""

from ringcomm.planner.cluster import Cluster
from ringcomm.planner.hardware import HARDWARE, Hardware, find_hardware
from ringcomm.planner.job import Job
from ringcomm.planner.mesh import SYSTEMS, Mesh
from ringcomm.planner.models import MODELS, ModelShape, find_model, model_of_config
from ringcomm.planner.plans import Plan, Plans, Refusal
from ringcomm.planner.rank_weights import kept_bytes
from ringcomm.planner.search import plan

__all__ = [
    "HARDWARE",
    "MODELS",
    "SYSTEMS",
    "Cluster",
    "Hardware",
    "Job",
    "Mesh",
    "ModelShape",
    "Plan",
    "Plans",
    "Refusal",
    "find_hardware",
    "find_model",
    "kept_bytes",
    "model_of_config",
    "plan",
]
