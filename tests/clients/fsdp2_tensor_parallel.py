"""torch's FSDP2 over 2 ranks and tensor parallelism over 2."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from mesh_model import make, step, whole
from support import report
from torch.distributed.device_mesh import init_device_mesh

REQUIREMENTS = ()
RANKS = 4
IS_SHORT = True
STEPS = 8


def main(folder: Path, source: Path | None) -> dict[str, list[float]]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model, optimizer = make(mesh, seed=0)
    found = [step(model, optimizer, mesh, number) for number in range(STEPS)]
    sums = [float(whole(param).double().sum()) for param in model.parameters()]
    return {
        "losses": [loss for loss, _ in found],
        "norms": [norm for _, norm in found],
        "sums of weights": sums,
    }


if __name__ == "__main__":
    report(main)
