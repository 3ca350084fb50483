"""Takes cross-entropy's launchers through Triton up to the launch, for an H200 that is not here.

As a script it prints as JSON whether each kernel that was asked for moves vectors: [name, classes,
bool] each. What triton_variants.py is told of arguments, Triton finds out here by itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from ringcomm.ops import cross_entropy_cuda as launchers
from ringcomm.ops.token_losses_cuda import merge_gathered


class Driver:
    """What Triton asks a driver before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def launch_all(vocab: int, dtype: torch.dtype, weight: torch.Tensor | None) -> None:
    """Every operator on three tokens; nothing is computed."""
    logits, target = torch.zeros(3, vocab, dtype=dtype), torch.zeros(3, dtype=torch.int64)
    smoothing, softcap = (0.0, 0.0) if weight is None else (0.1, 30.0)
    wants = weight is not None
    terms = (smoothing, 0.0)
    options = (vocab, -100, 1.0, softcap)
    stats = launchers.softmax_stats(logits, target, weight, 0, *options, wants, wants)
    merge_gathered(torch.cat([stats, stats]), 2)
    _, _, denominator = launchers.cross_entropy_loss(
        stats, target, weight, None, vocab, -100, *terms, "mean"
    )
    upstream = torch.ones([])
    given = (target, weight, stats, denominator, 0, *options, *terms)
    launchers.cross_entropy_grad(upstream, logits, *given)
    launchers.cross_entropy_grad_(upstream, logits, *given)
    launchers.cross_entropy_and_grad_(logits, target, weight, None, *options, *terms, "mean", wants)
    launchers.scale_(logits, denominator)


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    made: list[tuple[str, int, bool]] = []
    vocab = 0

    def compile_only(kernel: Any, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            compiled = kernel.run(*args, grid=grid, warmup=True, **options)
            made.append((kernel.fn.__name__, vocab, "global.v4.b32" in _short(compiled.asm["ptx"])))

        return launch

    JITFunction.__getitem__ = compile_only
    for vocab in (1, 1001, 50257):
        for weight in (None, torch.ones(vocab)):
            launch_all(vocab, torch.bfloat16, weight)
    print(json.dumps(made))


def _short(ptx: str) -> str:
    """Without what stands between an access and its width: hints to the caches."""
    return ptx.replace("L1::evict_first.L2::cache_hint.", "")


if __name__ == "__main__":
    main()
