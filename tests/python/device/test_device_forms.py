"""Branches that are for any accelerator: on emulated GPUs."""

from __future__ import annotations

from typing import Any

import emulated_gpu
import pytest
import torch
import torch.distributed as dist
from emulated_gpu import in_emulated_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from ringcomm.nn import VocabParallelEmbedding
from ringcomm.ops import cross_entropy, linear_cross_entropy

pytestmark = emulated_gpu.needs_emulated_gpu

GPU = "emugpu"


@in_emulated_ranks(1, backend=None)
def test_autocast_of_any_accelerator(rank: int) -> None:
    """The operands are cast, and the products inside keep that type."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 8, device=GPU), torch.randn(10, 8, device=GPU)
    target = torch.arange(6, device=GPU)
    expected = linear_cross_entropy(hidden.bfloat16(), weight.bfloat16(), target)
    exact = linear_cross_entropy(hidden, weight, target)
    with torch.autocast(GPU, torch.bfloat16):
        found = linear_cross_entropy(hidden, weight, target)
    assert torch.equal(found.cpu(), expected.cpu())
    assert not torch.equal(found.float().cpu(), exact.cpu())


class Reads(TorchDispatchMode):
    """How often the host waits for values of the device."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func.name() == "aten::_local_scalar_dense" and args[0].device.type == GPU
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_checked", [False, True])
@in_emulated_ranks(1)
def test_values_are_looked_at_on_request(rank: int, is_checked: bool) -> None:
    """With RINGCOMM_CHECK_TARGETS: ids of an embedding, and which dimension has the classes."""
    embedding = VocabParallelEmbedding(10, 4, group=dist.group.WORLD).to(GPU)
    ids = torch.tensor([1, 10], device=GPU)
    logits = torch.zeros(4, 4, 3, device=GPU)
    classes_second = torch.zeros(4, 4, 3, device=GPU)
    classes_second[:, 0] = 1.0
    reads = Reads()
    with pytest.MonkeyPatch.context() as patch, reads:
        patch.setenv("RINGCOMM_CHECK_TARGETS", str(int(is_checked)))
        if is_checked:
            with pytest.raises(IndexError, match="ids must be in"):
                embedding(ids)
            with pytest.raises(ValueError, match="dimension"):
                cross_entropy(logits, classes_second)
        else:
            out = embedding(ids)
            cross_entropy(logits, classes_second)
    assert (reads.num > 0) == is_checked
    if not is_checked:
        assert out.isnan().any(-1).tolist() == [False, True]
