"""The job of restart.py: DDP that saves each step, and a rank that is killed once."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from small_model import LR, batch, mlp
from torch.nn.parallel import DistributedDataParallel

STEPS, DIES_AT = 6, 3


def main(folder: Path, dies: bool) -> None:
    dist.init_process_group("gloo")
    rank, path = dist.get_rank(), folder / "state.pt"
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
    losses: list[float] = []
    if path.exists():
        weights, state, losses = torch.load(path)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    for step in range(len(losses), STEPS):
        x, y = batch(step)
        loss = (model(x) - y).square().mean()
        if dies and is_first and step == DIES_AT and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)  # the other rank is in the backward pass
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach_())
        losses.append(float(loss))
        if rank == 0:
            torch.save((model.state_dict(), optimizer.state_dict(), losses), folder / "new.pt")
            (folder / "new.pt").replace(path)
    world: Any = dist.group.WORLD
    if rank == 0:
        real = world._get_backend(torch.device("cpu")).name()
        text = json.dumps({"losses": losses, "real": real, "is_first": is_first})
        (folder / "report.json").write_text(text, encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), dies=sys.argv[2] == "dies")
