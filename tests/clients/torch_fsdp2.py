"""torch's FSDP2 over all ranks, with AdamW and the norm of the gradients."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from mesh_model import make, step, whole
from support import report
from torch.distributed.device_mesh import init_device_mesh

REQUIREMENTS = ()
RANKS = 2
IS_SHORT = True
ALSO_ON = (4, 1e-5)
STEPS = 8


def main(folder: Path, source: Path | None) -> dict[str, list[float]]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    model, optimizer = make(mesh, seed=0)
    found = [step(model, optimizer, mesh, number) for number in range(STEPS)]
    return {
        "losses": [loss for loss, _ in found],
        "norms": [norm for _, norm in found],
        "sums of weights": [float(whole(p).double().abs().sum()) for p in model.parameters()],
    }


if __name__ == "__main__":
    report(main)
