"""Cross-entropy's kernels for clusters, by the operator's launcher: on emulated GPUs.

The kernels themselves are tested in tests/ptx/test_loss_rows.cc. Here: which calls they serve, what
they are launched with, streams and graphs. The right results are those of the CPU's operator.
Only nvcc compiles these kernels, so most of it runs in `.ci/run ptx`.
"""

from __future__ import annotations

from typing import Any

import emugpu
import emulated_gpu
import pytest
import torch
from cluster_cases import BF16, FP16, SERVED, by_clusters, check_served, options_of, random_rows
from emulated_gpu import in_emulated_ranks

# .ci/run ptx runs them all.
pytestmark = [pytest.mark.slow, emulated_gpu.needs_emulated_gpu]
alone = in_emulated_ranks(1, backend=None)
by_ptx = pytest.mark.skipif(not emulated_gpu.PTX_FORM, reason="without RINGCOMM_TEST_PTX")


@by_ptx
@alone
def test_calls_that_are_served_have_the_cpus_results(rank: int) -> None:
    for name in SERVED:
        check_served(name, "emugpu")


@by_ptx
@alone
def test_calls_that_are_not_served_change_nothing(rank: int) -> None:
    logits, target = (tensor.to("emugpu") for tensor in random_rows(16384, BF16))
    before = logits.clone()
    weight = torch.ones(16384, device="emugpu")
    # Nothing is done where the kernels do not serve: Triton's do it.
    refused: tuple[dict[str, Any], ...] = (
        {"softcap": 30.0},
        {"wants_more": True},
        {"reduction": "none"},
        {"logit_scale": -1.0},
        {"logit_scale": 0.0},
    )
    for changes in refused:
        assert by_clusters(logits, target, options=options_of(**changes)) is None, changes
    smooth = options_of(label_smoothing=0.1)
    assert by_clusters(logits, target, weight, options=smooth) is None
    assert by_clusters(logits[:, :8192], target) is None
    assert by_clusters(logits[:0], target[:0]) is None
    assert by_clusters(logits.to(FP16), target) is None
    assert by_clusters(logits.cpu(), target.cpu()) is None
    wide = torch.zeros(1, 300_000, dtype=BF16, device="emugpu")
    assert by_clusters(wide, target[:1]) is None
    assert torch.equal(logits.cpu(), before.cpu())
    assert by_clusters(logits, target) is not None


@emulated_gpu.needs_build_without_kernels
@in_emulated_ranks(1, backend=None, env={"RINGCOMM_CUDA_IMAGE": ""})
def test_a_build_without_kernels_serves_nothing(rank: int) -> None:
    logits, target = (tensor.to("emugpu") for tensor in random_rows(16384, BF16))
    assert by_clusters(logits, target) is None


@in_emulated_ranks(1, backend=None, env={"RINGCOMM_CUDA_IMAGE": "/nowhere"})
def test_an_image_that_cannot_be_read_is_an_error(rank: int) -> None:
    logits, target = (tensor.to("emugpu") for tensor in random_rows(16384, BF16))
    before = logits.clone()
    for _ in range(2):  # no error is kept as "no kernels"
        with pytest.raises(RuntimeError, match="RINGCOMM_CUDA_IMAGE: cannot read /nowhere"):
            by_clusters(logits, target)
    assert torch.equal(logits.cpu(), before.cpu())


@by_ptx
@alone
def test_it_goes_to_the_current_stream_and_into_graphs(rank: int) -> None:
    logits, target = random_rows(16384, BF16)
    source, there = logits.to("emugpu"), target.to("emugpu")
    right = by_clusters(source.clone(), there)
    emugpu.synchronize()
    side = torch.Stream(device="emugpu")
    held = emugpu.hold(side)
    with side:
        rows = source.clone()
        loss = by_clusters(rows, there)[0]
    assert not side.query()  # the call has not waited
    held.release()
    side.synchronize()
    assert torch.equal(loss.cpu(), right[0].cpu())

    rows = torch.empty_like(source)
    emugpu.synchronize()
    graph = emugpu.CUDAGraph()
    with emugpu.graph(graph):
        rows.copy_(source)
        results = by_clusters(rows, there)
    for shift in range(3):
        source.copy_(logits.roll(shift, 1).to("emugpu"))
        graph.replay()
        eager = source.clone()
        for found, wanted in zip(results, by_clusters(eager, there), strict=True):
            assert torch.equal(found.cpu(), wanted.cpu())
        assert torch.equal(rows.cpu(), eager.cpu())
