"""Compiles what the launchers launch for a GPU that is not here.

As a script: python triton_builds.py ARCH prints as JSON a list of builds: the kernel, what it was
launched for, whether it moves vectors, registers per thread, bytes of stack (spills) and of shared
memory. Nothing is computed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from ringcomm.ops import weight_update_cuda as updates
from ringcomm.ops.losses import cross_entropy_cuda as losses

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def compile_instead_of_launching(arch: int, seen: Callable[[str, Any], None]) -> None:
    """From now on a launch compiles, and tells `seen` the kernel's name and what was compiled."""

    class Driver:
        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", arch, 32)

    def compile_only(kernel: Any, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            seen(kernel.fn.__name__, kernel.run(*args, grid=grid, warmup=True, **options))

        return launch

    triton.runtime.driver.set_active(Driver())
    JITFunction.__getitem__ = compile_only


def report(compiled: Any) -> dict[str, Any]:
    ptx = compiled.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(CUOBJDUMP), "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack_bytes = re.findall(r"REG:(\d+) STACK:(\d+)", said)[0]
    return {
        "loads vectors": bool(re.search(r"\bld\.global[\w.:]*\.v4\.b32", ptx)),
        "stores vectors": bool(re.search(r"\bst\.global[\w.:]*\.v4\.b32", ptx)),
        "registers": int(registers),
        "stack_bytes": int(stack_bytes),
        "shared_bytes": compiled.metadata.shared,
    }


# ---- launches


def launch_loss(vocab: int, dtype: torch.dtype, weight: Tensor | None, smoothing: float) -> None:
    """Every operator of the losses on three tokens: with weights, all options."""
    logits, target = torch.zeros(3, vocab, dtype=dtype), torch.zeros(3, dtype=torch.int64)
    wants = weight is not None
    terms = (smoothing, 0.0)
    options = (vocab, -100, 1.0, 30.0 if wants else 0.0)
    stats = losses.softmax_stats(logits, target, weight, 0, *options, wants, wants)
    losses.merge_gathered(torch.cat([stats, stats]), 2)
    given = (target, weight, None, vocab, -100, *terms, "mean")
    denominator = losses.cross_entropy_loss(stats, *given)[2]
    upstream = torch.ones([])
    after = (target, weight, stats, denominator, 0, *options, *terms)
    losses.cross_entropy_grad(upstream, logits, *after)
    losses.cross_entropy_grad_(upstream, logits, *after)
    losses.cross_entropy_and_grad_(logits, target, weight, None, *options, *terms, "mean", wants)
    losses.scale_(logits, denominator)


def launch_updates(
    width: int, dtype: torch.dtype, grad_dtype: torch.dtype, seed: int, is_split: bool
) -> None:
    """Every operator of the updates, on a matrix of four rows."""
    weight, grad = torch.zeros(4, width, dtype=dtype), torch.zeros(4, width, dtype=grad_dtype)
    low = torch.zeros(4, width, dtype=torch.int16) if is_split else None
    updates.sgd_update_(weight, grad, 0.1, 0.0, 1.0, seed, low=low)
    updates.linear_sgd_update_(weight, grad, grad[:, :4], 0.1, 0.0, 1.0, seed, low=low)
    ids = torch.zeros(4, dtype=torch.int64)
    for weight_decay in (0.0, 0.1):
        updates.embedding_sgd_update_(weight, ids, grad, 0.1, weight_decay, 1.0, seed, low=low)
    row, cols, squares = torch.ones(4), torch.ones(width), torch.ones(2, 3, dtype=torch.float64)
    sums = updates.square_sums(grad, 1.0)
    factored = (weight, grad, row, *updates.adalomo_moments_(row, cols, *sums, 0.5, 1e-30))
    updates.adalomo_squares(*factored, 1.0, low=low)
    updates.adalomo_update_(*factored, squares, 9, 0.1, 0.0, 1e-3, 1.0, 1.0, seed, low=low)


def launches(arch: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """What each is for. Other GPUs than the H200 get the kinds that differ there."""
    # Rows that are read twice, held by a whole SM, and by a few warps of an odd length.
    for vocab in (128256, 32000, 1001) if arch == 90 else (128256, 1001):
        weights = torch.ones(vocab)
        for name, weight, smoothing in (
            ("plain", None, 0.0),
            ("label smoothing", None, 0.1),
            ("all options", weights, 0.1),
        ):
            yield f"loss {vocab} {name}", partial(launch_loss, vocab, BF16, weight, smoothing)
    for kind in ((BF16, BF16, 5, False), (BF16, BF16, -1, True), (FP32, BF16, -1, False)):
        yield f"update 4096 {kind}", partial(launch_updates, 4096, *kind)
    yield "update 1001", partial(launch_updates, 1001, BF16, BF16, 5, False)


def main() -> None:
    arch, builds, current = int(sys.argv[1]), dict[Any, dict[str, Any]](), {"for": ""}

    def seen(kernel: str, compiled: Any) -> None:
        if compiled.hash not in builds:
            builds[compiled.hash] = {"kernel": kernel, **current, **report(compiled)}

    compile_instead_of_launching(arch, seen)
    for name, launch in launches(arch):
        current["for"] = name
        launch()
    print(json.dumps(list(builds.values())))


if __name__ == "__main__":
    main()
