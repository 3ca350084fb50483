"""Runs an example of pytorch/examples on the CPU, in a rank of a client."""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from parameters import checksums
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import local_map
from torch.nn import functional as F

# The examples require an accelerator. Their calls of torch.accelerator get this one instead, which
# torch itself does not see: to torch, and to ringcomm, the machine still has none.
CPU: Any = SimpleNamespace(
    is_available=lambda: True,
    device_count=lambda: int(os.environ["LOCAL_WORLD_SIZE"]),
    current_accelerator=lambda: torch.device("cpu"),
    set_device_index=lambda index: None,
    device_index=lambda index: nullcontext(),
)
REPLACEMENTS = {
    "torch.accelerator.": "__import__('cpu_accelerator').",
    '{device_type}:{rank}")': '{device_type}")',  # a device: there is one CPU
    ".to(rank)": ".to('cpu')",
    ", device_ids=[rank])": ")",
    # FSDP2/example.py: torch refuses to bind a group to a CPU. Two runs in a row use one group, as
    # a second group of Gloo in a process fails or hangs.
    "torch.distributed.init_process_group(backend=backend, device_id=device)": (
        "torch.distributed.is_initialized() or torch.distributed.init_process_group(backend)"
    ),
    "    torch.distributed.destroy_process_group()\n": "",
    # FSDP2/model.py leaves the layers as to_empty() has made them, with any values.
    "        self.output.reset_parameters()\n": (
        "        self.output.reset_parameters()\n"
        "        for layer in self.layers:\n"
        "            layer.reset_parameters()\n"
    ),
    # tensor_parallelism/llama2_model.py: DTensor has no rule for the attention of CPUs.
    "F.scaled_dot_product_attention(xq, xk, xv, is_causal=True)": (
        "__import__('example_runs').attention(xq, xk, xv)"
    ),
}


def attention(q: DTensor, k: DTensor, v: DTensor) -> DTensor:
    """Causal attention of this rank's heads."""
    heads = [*q.placements]
    run = local_map(
        partial(F.scaled_dot_product_attention, is_causal=True),
        out_placements=heads,
        in_placements=(heads, heads, heads),
    )
    return run(q, k, v)


def run_example(folder: Path, source: Path | None, name: str, *options: str) -> list[float]:
    """The checksum of this rank's parameters after each optimizer step of a program.

    A second run finds the files that the first one has written to its current folder.
    """
    assert source is not None
    original = source / "distributed" / name
    copy = folder / f"rank{os.environ['RANK']}"  # of the program; each rank adapts its own
    if not copy.exists():
        shutil.copytree(original.parent, copy)
        for path in copy.glob("*.py"):
            text = path.read_text(encoding="utf-8")
            for old, new in REPLACEMENTS.items():
                text = text.replace(old, new)
            path.write_text(text, encoding="utf-8")
    os.chdir(folder)
    program = copy / original.name
    sys.argv = [str(program), *options]
    sys.path.insert(0, str(copy))
    sys.modules["cpu_accelerator"] = CPU
    torch.manual_seed(int(os.environ["RANK"]))  # not all examples choose a seed
    with checksums() as parameters:
        runpy.run_path(str(program), run_name="__main__")
    return parameters
