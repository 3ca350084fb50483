"""The program of test_torchrun.py: DDP with a checkpoint of each step, which a restart continues.

With "die", rank 1 is killed in the first attempt, when rank 0 is in the all_reduce of step 3.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from curves import STEPS, make_model, sgd, train
from torch.nn.parallel import DistributedDataParallel

import ringcomm


def main(folder: Path, must_die: bool) -> None:
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("ringcomm")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(make_model())
    optimizer = sgd(model.parameters())
    saved = folder / f"rank{rank}.pt"
    state: dict[str, Any] = {"losses": []}
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    losses = state["losses"]
    for step in range(len(losses), STEPS):
        if must_die and attempt == 0 and step == 3 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        losses += train(model, rank, world_size, optimizer, steps=[step])
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "losses": losses}, saved)
        dist.barrier()
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    report = {
        "losses": losses,
        "attempt": attempt,
        "backend": dist.get_backend(),
        "debug": dist.get_debug_level().name,
        "transport": ringcomm._C.transport_of(getattr(backend, "wrapped_pg", backend)),
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2] == "die")
