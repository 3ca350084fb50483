"""Vocab-parallel cross-entropy on GPUs, against float64: Triton's kernels and the exchange of their
stats between the ranks. On emulated GPUs the kernels run by their PTX."""

from __future__ import annotations

import importlib.util
from typing import Any

import loss_oracle
import pytest
import torch
import torch.distributed as dist
from gpu_ranks import Gpus, device, on_gpu, on_gpus
from loss_oracle import OUTPUTS, random_logits, random_targets
from torch import Tensor

from ringcomm.ops import cross_entropy
from ringcomm.ops.losses import cross_entropy_cuda

OPERATORS = (
    "softmax_stats",
    "merge_softmax_stats",
    "cross_entropy_loss",
    "cross_entropy_grad_",
    "scale_",
)
SMOOTH: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.01}
# Each rank's number of classes, and the options.
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "even": ((40, 40, 40), {}),
    "uneven, smooth": ((51, 7, 33), SMOOTH),
    "an empty one": ((51, 0, 33), {"reduction": "sum"}),
}


def launch_on_emulated_gpus() -> None:
    """Makes Triton's kernels those of emulated GPUs too."""
    import triton_launch

    for name in OPERATORS:
        launcher = getattr(cross_entropy_cuda, name)
        torch.library.impl(f"ringcomm::{name}", device().type, launcher)
    triton_launch.install(90)


def check_shards(rank: int, sizes: tuple[int, ...], options: dict[str, Any]) -> list[Tensor]:
    if device().type != "cuda":
        launch_on_emulated_gpus()
    logits, target = random_logits((5, sum(sizes))), random_targets((5,), sum(sizes))
    start = sum(sizes[:rank])
    columns = slice(start, start + sizes[rank])
    where: dict[str, Any] = {"group": dist.group.WORLD, "vocab_start": start, "inplace": True}
    leaf = on_gpu(logits[:, columns].contiguous()).requires_grad_()
    loss, outputs = cross_entropy(leaf * 1, on_gpu(target), outputs=OUTPUTS, **where, **options)
    loss.backward()
    expected = loss_oracle.evaluate(logits, target, **options)
    expected = expected._replace(grad=expected.grad[:, columns])
    assert leaf.grad is not None
    results = {name: values.cpu() for name, values in outputs.items()}
    loss_oracle.assert_close((loss.cpu(), results), leaf.grad.cpu(), expected)
    return [loss.detach().cpu(), *results.values()]


@pytest.mark.slow
@on_gpus
@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_float64_and_the_same_on_all_ranks(gpus: Gpus, name: str) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    sizes, options = CASES[name]
    sizes = tuple(sizes[rank % len(sizes)] for rank in range(gpus.world_size))
    # The first to come compile the kernels' PTX, which takes minutes on a busy machine.
    limits: dict[str, Any] = {"group_timeout_s": 600, "timeout_s": 900}
    first, *others = gpus.run(check_shards, sizes, options, fresh=True, **limits)
    for results in others:
        for result, wanted in zip(results, first, strict=True):
            assert torch.equal(result, wanted)
