"""Takes cross-entropy's launchers through Triton up to the launch, for an H200 that is not here.

As a script it prints as JSON whether each kernel that was asked for moves vectors: [name, classes,
bool] each. What triton_variants.py is told of arguments, Triton finds out here by itself.
"""

from __future__ import annotations

import json

import torch
from triton_compile import compile_instead_of_launching

from ringcomm.ops.losses import cross_entropy_cuda as launchers
from ringcomm.ops.losses.token_losses_cuda import merge_gathered


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
    made: list[tuple[str, int, bool]] = []
    vocab = 0
    compile_instead_of_launching(
        lambda name, ptx: made.append((name, vocab, "global.v4.b32" in _short(ptx)))
    )
    for vocab in (1, 1001, 50257):
        for weight in (None, torch.ones(vocab)):
            launch_all(vocab, torch.bfloat16, weight)
    print(json.dumps(made))


def _short(ptx: str) -> str:
    """Without what stands between an access and its width: hints to the caches."""
    return ptx.replace("L1::evict_first.L2::cache_hint.", "")


if __name__ == "__main__":
    main()
