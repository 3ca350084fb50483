"""torch's distributed checkpoint: saved in the background, loaded into FSDP2 and into TP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mesh_model import make, step
from support import report
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh

REQUIREMENTS = ()
RANKS = 2
IS_SHORT = False
STEPS = 3


def main(folder: Path, source: Path | None) -> dict[str, list[float]]:
    dist.init_process_group("gloo")
    meshes = {
        "FSDP2": init_device_mesh("cpu", (2,), mesh_dim_names=("data",)),
        "TP": init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor")),
    }
    # Saving in a thread calls collectives while the program trains: on a group of its own.
    background = dist.new_group(backend="gloo")
    found = {}
    for kind in AsyncCheckpointerType:
        model, optimizer = make(meshes["FSDP2"], seed=0)
        losses = [step(model, optimizer, meshes["FSDP2"], number)[0] for number in range(STEPS)]
        weights, state = get_state_dict(model, optimizer)
        saved: Any = dcp.async_save(
            {"model": weights, "optimizer": state},
            checkpoint_id=folder / kind.value,
            async_checkpointer_type=kind,
            process_group=background,
        )
        for number in range(STEPS, 2 * STEPS):  # while it is saved
            losses += step(model, optimizer, meshes["FSDP2"], number)[:1]
        saved.result()
        found[f"{kind.value}: losses"] = losses
        for layout, mesh in meshes.items():
            other, its_optimizer = make(mesh, seed=1)
            weights, state = get_state_dict(other, its_optimizer)
            loaded: dict[str, Any] = {"model": weights, "optimizer": state}
            dcp.load(loaded, checkpoint_id=folder / kind.value)
            set_state_dict(
                other,
                its_optimizer,
                model_state_dict=loaded["model"],
                optim_state_dict=loaded["optimizer"],
            )
            again = [
                step(other, its_optimizer, mesh, number)[0] for number in range(STEPS, 2 * STEPS)
            ]
            differences = [abs(a - b) for a, b in zip(again, losses[STEPS:], strict=True)]
            assert max(differences) < 1e-5, (kind, layout, differences)
            found[f"{kind.value}: losses after loading into {layout}"] = again
    return found


if __name__ == "__main__":
    report(main)
