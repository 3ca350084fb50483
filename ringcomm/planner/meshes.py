"""Which arrangements of ranks are looked at."""

from __future__ import annotations

from collections.abc import Iterator

from ringcomm.planner.cluster import Cluster
from ringcomm.planner.job import Job
from ringcomm.planner.mesh import Mesh
from ringcomm.planner.shapes import ModelShape

__all__ = ["divisors", "meshes_of"]


def divisors(number: int) -> list[int]:
    """All of them, ascending."""
    small = [k for k in range(1, int(number**0.5) + 1) if number % k == 0]
    return sorted({*small, *(number // k for k in small)})


def meshes_of(shape: ModelShape, cluster: Cluster, job: Job) -> Iterator[Mesh]:
    """All that have as many ranks as there are devices, and sizes as the job wants them.

    Also those that the model does not allow.

    Raises:
        ValueError: the sizes that the job wants do not divide the devices.
    """
    total = cluster.num_gpus
    wanted = (job.dp or 1) * (job.pp or 1) * (job.tp or 1)
    are_all_set = job.dp and job.pp and job.tp
    if total % wanted or (are_all_set and wanted != total):
        sizes = ", ".join(f"{name} {getattr(job, name)}" for name in ("dp", "pp", "tp"))
        raise ValueError(f"{sizes.replace(' 0', ' any')} do not make {total} gpus")
    for tp in [job.tp] if job.tp else divisors(total):
        for pp in [job.pp] if job.pp else divisors(total // tp):
            if total % (tp * pp) or (job.dp and job.dp * tp * pp != total):
                continue
            dp = total // (tp * pp)
            for ep in _expert_sizes(shape, job, dp):
                is_split = job.is_sequence_split
                if is_split is None:
                    is_split = tp > 1 and job.sequence % tp == 0
                yield Mesh(dp, pp, tp, ep, is_split)


def _expert_sizes(shape: ModelShape, job: Job, dp: int) -> list[int]:
    if job.ep:
        return [job.ep]
    return [ep for ep in divisors(dp) if ep == 1 or (shape.experts and shape.experts % ep == 0)]
