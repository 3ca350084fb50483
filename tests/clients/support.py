"""report(): what a client calls as a program, in each of its ranks."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Series = dict[str, list[float]]
Main = Callable[[Path, "Path | None"], Series]


def report(main: Main) -> None:
    """Runs a client in this rank and writes rank{N}.json into the folder that the runner names.

    The file has the client's series, the name of the default group's backend, and the real backend
    of its CPU tensors. It also has them if the client destroys the group.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--source", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    destroy = dist.destroy_process_group

    def note_and_destroy(group: dist.ProcessGroup | None = None) -> None:
        if group in (None, dist.group.WORLD):
            found.update(_backends())
        destroy(group)

    for module in (dist, dist.distributed_c10d):
        vars(module)["destroy_process_group"] = note_and_destroy
    found["series"] = main(options.folder, options.source)
    if dist.is_initialized():
        dist.barrier()
        note_and_destroy()
    # A thread of Gloo's may wait for Python's lock to release the last operation. If it still waits
    # when Python finalizes, the process aborts.
    time.sleep(0.3)
    path = options.folder / f"rank{os.environ['RANK']}.json"
    path.write_text(json.dumps(found), encoding="utf-8")


def _backends() -> dict[str, str]:
    world: Any = dist.group.WORLD
    return {"named": dist.get_backend(), "real": world._get_backend(torch.device("cpu")).name()}
