"""Operators that a device lacks, and branches that are for any accelerator: on emulated GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import emulated_gpu
import pytest
import torch
import torch.distributed as dist
from emulated_gpu import in_emulated_ranks
from steps import apply_steps
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ringcomm.nn import VocabParallelEmbedding
from ringcomm.ops import cross_entropy, linear_cross_entropy
from ringcomm.ops.triton_kernels import check_operators
from ringcomm.optim import AdaLomo, Lomo

pytestmark = emulated_gpu.needs_emulated_gpu

GPU = "emugpu"


@contextmanager
def lacking(name: str, implementation: Any = torch.library.fallthrough_kernel) -> Iterator[None]:
    """The device has no implementation of an operator."""
    library = torch.library.Library("ringcomm", "IMPL", "PrivateUse1")
    library.impl(name, implementation)
    check_operators.cache_clear()
    try:
        yield
    finally:
        library._destroy()
        check_operators.cache_clear()


class Model(nn.Module):
    """The last layer, whose weight is updated first, needs another operator than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(10, 8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 10, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.norm(self.embedding(ids)))
        return cross_entropy(logits.flatten(0, -2), ids.flatten())


@pytest.mark.parametrize(
    ("kind", "operator"),
    [(kind, operator) for kind in (Lomo, AdaLomo) for operator in kind.operators],
)
@in_emulated_ranks(1, backend=None)
def test_an_update_that_a_device_lacks(rank: int, kind: Any, operator: str) -> None:
    """Raises before a weight is written, also one whose update the device has."""
    model = Model().to(GPU)
    before = [param.detach().clone() for param in model.parameters()]
    optimizer = kind(model, 0.1)
    ids = torch.arange(6, device=GPU).view(2, 3)
    with lacking(operator):
        loss = model(ids)
        with pytest.raises(NotImplementedError, match=f"ringcomm::{operator} .* on {GPU}: no weig"):
            loss.backward()
    for param, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(param, value)
    optimizer.zero_grad()
    model(ids).backward()
    apply_steps(optimizer)
    assert not torch.equal(model.norm.bias, before[2])


@pytest.mark.parametrize("operator", ["cross_entropy_loss", "cross_entropy_grad"])
@in_emulated_ranks(1, backend=None)
def test_a_loss_that_a_device_lacks(rank: int, operator: str) -> None:
    model = Model().to(GPU)
    before = [param.detach().clone() for param in model.parameters()]
    Lomo(model, 0.1)

    def refuse(*_: Any, **__: Any) -> None:
        """As torch, for a device that has no fallback."""
        raise NotImplementedError(f"Could not run '{operator}' with arguments from '{GPU}'")

    with lacking(operator, refuse), pytest.raises(NotImplementedError, match=f"{operator}.*{GPU}"):
        model(torch.arange(6, device=GPU).view(2, 3)).backward()
    for param, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(param, value)


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
