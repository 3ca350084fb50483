"""Takes the launchers of weight updates through Triton up to the launch, for an H200 elsewhere.

As a script it prints as JSON whether each kernel that was asked for moves vectors: [name, width,
bool] each. What update_variants.py is told of arguments, Triton finds out here by itself.
"""

from __future__ import annotations

import json

import torch
from triton_compile import compile_instead_of_launching

from ringcomm.ops.updates import arguments as update_plans
from ringcomm.ops.updates import weight_update_cuda as launchers


def launch_all(width: int, rounding_seed: int, low: torch.Tensor | None) -> None:
    """Every operator on a matrix of four rows; nothing is computed."""
    weight = torch.zeros(4, width, dtype=torch.bfloat16)
    grad, grad_out = torch.zeros_like(weight), torch.zeros(3, 4, dtype=torch.bfloat16)
    ids, x = torch.zeros(3, dtype=torch.int64), torch.zeros(3, width, dtype=torch.bfloat16)
    given = (0.1, 0.0, 1.0, rounding_seed)
    launchers.sgd_update_(weight, grad, *given, low=low)
    launchers.linear_sgd_update_(weight, x, grad_out, *given, low=low)
    wide = torch.zeros(3, 16, dtype=torch.bfloat16)
    tall = torch.zeros(16, width, dtype=torch.bfloat16)
    launchers.linear_sgd_update_(tall, x, wide, *given, clip_value=1.0)
    for weight_decay in (0.0, 0.1):
        given = (0.1, weight_decay, 1.0, rounding_seed)
        launchers.embedding_sgd_update_(weight, ids, x, *given, low=low)
    rows, cols = torch.ones(4), torch.ones(width)
    launchers.square_sums(grad, 1.0)
    launchers.adalomo_squares(weight, grad, rows, cols, 1.0, low=low)
    launchers.adalomo_update_(weight, grad, rows, cols, torch.ones(2), 1.0, rounding_seed, low=low)


def main() -> None:
    made: list[tuple[str, int, bool]] = []
    width = 0
    update_plans.machine_of = lambda device: update_plans.Machine(True, 132)  # type: ignore[assignment]
    compile_instead_of_launching(
        lambda name, ptx: made.append((name, width, "global.v4.b32" in ptx))
    )
    for width in (1001, 4096):
        launch_all(width, 5, None)
    launch_all(width, -1, torch.zeros(4, width, dtype=torch.int16))
    print(json.dumps(made))


if __name__ == "__main__":
    main()
