"""activations.partition(): the same bits in 1/N of what is saved, for (N-1)/N of its bytes."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import ringcomm
from ringcomm.parallel import activations

ROWS, TOKENS, WIDTH, NUM_BLOCKS = 2, 7, 24, 4
SAVED_BYTES = 4 * ROWS * TOKENS * WIDTH


class Spread(torch.autograd.Function):
    """In front of column-parallel layers: gradients of all ranks are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class Collect(torch.autograd.Function):
    """Behind row-parallel layers: outputs of all ranks are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Half(nn.Module):
    """A column-parallel layer and a row-parallel one; each rank has weights of its own."""

    def __init__(self, rank: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(1000 * seed + rank)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH, bias=False)
        self.dropout = 0.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(Spread.apply(self.norm(x))))
        out: Tensor = x + Collect.apply(self.down(hidden))
        return nn.functional.dropout(out, self.dropout, self.training)


class Block(nn.Sequential):
    """Two halves, as attention and MLP are: six all_reduces in a step with recomputation."""

    def __init__(self, rank: int, number: int) -> None:
        super().__init__(Half(rank, 2 * number), Half(rank, 2 * number + 1))


def sent_bytes(name: str) -> int:
    return sum(entry["sent_bytes"] for key, entry in ringcomm.stats().items() if key[0] == name)


def make(rank: int, dropout: float = 0.0) -> nn.ModuleList:
    blocks = nn.ModuleList(Block(rank, number) for number in range(NUM_BLOCKS))
    for module in blocks.modules():
        if isinstance(module, Half):
            module.dropout = dropout
    return blocks


def run(
    blocks: nn.ModuleList, reentrant: bool | None, dtype: torch.dtype = torch.float32
) -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(ROWS, TOKENS, WIDTH, requires_grad=True).to(dtype)
    for block in blocks:
        x = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
    return x


def gradients(blocks: nn.ModuleList) -> list[Tensor]:
    found = [param.grad.clone() for param in blocks.parameters() if param.grad is not None]
    blocks.zero_grad()
    return found


def check_bits(rank: int, options: dict[str, Any], reentrant: bool | None, dropout: float) -> None:
    blocks = make(rank, dropout)
    plain = run(blocks, reentrant)
    plain.square().sum().backward()
    expected = gradients(blocks)
    with activations.partition(min_elems=0, **options) as held:
        out = run(blocks, reentrant)
    assert torch.equal(out, plain)
    assert held.num_saved > 0
    out.square().sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(blocks), expected, strict=True))
    del out
    gc.collect()
    assert held.saved_bytes == held.host_bytes == 0


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("options", [{}, {"offload": "cpu"}, {"check": True}], ids=str)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_bits(world_size: int, options: dict[str, Any], reentrant: bool, dropout: float) -> None:
    run_ranks(world_size, check_bits, options, reentrant, dropout)


def test_one_rank_keeps_all() -> None:
    run_ranks(1, check_one_rank)


def check_one_rank(rank: int) -> None:
    blocks = make(rank)
    with activations.partition(min_elems=0) as held:
        run(blocks, False).sum().backward()
    assert held.num_saved == 0


def check_bytes(rank: int, world_size: int, offload: str | None) -> tuple[int, int, int]:
    blocks = make(rank)
    before = sent_bytes("all_reduce")
    # Recomputed to the end, as the paper counts; torch stops a block before its last all_reduce.
    with (
        set_checkpoint_early_stop(False),
        activations.partition(min_elems=0, offload=offload) as held,  # type: ignore[arg-type]
    ):
        out = run(blocks, False)
    kept = held.saved_bytes, held.host_bytes
    gathered = sent_bytes("all_gather")
    out.sum().backward()
    gathered = sent_bytes("all_gather") - gathered
    reduced = sent_bytes("all_reduce") - before
    assert held.num_saved == NUM_BLOCKS
    assert held.gathered_bytes == NUM_BLOCKS * SAVED_BYTES
    mine = sum(kept)
    if offload:
        assert kept[0] == 0
        assert held.to_host_bytes == held.to_device_bytes == mine
    else:
        assert kept[1] == held.to_host_bytes == 0
    assert gathered == (world_size - 1) * mine
    return mine, gathered, reduced


@pytest.mark.parametrize("offload", [None, "cpu"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_bytes_kept_and_sent(world_size: int, offload: str | None) -> None:
    options = ringcomm.Options(algorithm="two_shot")
    by_rank = run_ranks(world_size, check_bytes, world_size, offload, pg_options=options)
    whole = NUM_BLOCKS * SAVED_BYTES
    assert sum(kept for kept, _, _ in by_rank) == whole
    gathered = sum(sent for _, sent, _ in by_rank)
    assert gathered == (world_size - 1) * whole
    # Of tensor parallelism's, a twelfth.
    assert 12 * gathered == sum(sent for _, _, sent in by_rank)


def check_what_is_left(rank: int) -> None:
    """Parameters, their views, small tensors, and what is saved twice."""
    weight = nn.Parameter(torch.randn(8, 8))
    x = torch.randn(5, 8)
    with activations.partition(min_elems=0) as held:
        (x @ weight.t()).sum().backward()  # saves x and a view of the weight
    assert held.num_saved == 1
    with activations.partition(min_elems=0) as held:
        y = (x * x).requires_grad_()
        out = (y * y).sum() + (y.sin()).sum()
    assert held.num_saved == 1
    assert held.saved_bytes == y.nbytes // 2
    out.backward(retain_graph=True)
    out.backward()
    torch.testing.assert_close(y.grad, 2 * (2 * y + y.cos()))
    with activations.partition(min_elems=41) as held:
        (x.requires_grad_() * weight[0]).sin().sum().backward()
    assert held.num_saved == 0
    # Neither contiguous nor dense.
    for odd in (torch.randn(6, 8).t(), torch.randn(8, 12)[:, ::2]):
        z = odd.clone(memory_format=torch.preserve_format).requires_grad_()
        with activations.partition(min_elems=0):
            out = z.sin().sum() if odd.is_contiguous() else (z[:, ::2].exp()).sum()
        out.backward()
        expected = torch.zeros_like(z)
        expected[:, ::2] = z[:, ::2].detach().exp()
        torch.testing.assert_close(z.grad, expected)


def test_what_stays_whole() -> None:
    run_ranks(2, check_what_is_left)


def fail_inside() -> None:
    with activations.partition(min_elems=0):
        raise KeyError("on purpose")


def check_drop_and_errors(rank: int) -> None:
    blocks = make(rank)
    with activations.partition(min_elems=0) as held:
        out = run(blocks, False)
    calls = sum(entry["num_calls"] for entry in ringcomm.stats().values())
    del out  # no backward pass
    gc.collect()
    assert held.saved_bytes == 0
    assert calls == sum(entry["num_calls"] for entry in ringcomm.stats().values())
    with activations.partition(min_elems=0) as outer, activations.partition(min_elems=0) as inner:
        run(blocks, False)
    assert outer.num_saved == 0 < inner.num_saved
    with pytest.raises(KeyError, match="on purpose"):
        fail_inside()
    before = torch.ones(3, requires_grad=True)
    before.sin().sum().backward()  # not partitioned any more
    with pytest.raises(ValueError, match="offload is None or"):
        activations.partition(offload="nvme").__enter__()  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="min_elems is 0 or more"):
        activations.partition(min_elems=-1).__enter__()
    mine = torch.full((4, 4), float(rank), requires_grad=True)
    with (
        pytest.raises(ValueError, match=r"shape \(4, 4\) is saved that rank 1 has otherwise"),
        activations.partition(min_elems=0, check=True),
    ):
        mine.sin()


def test_drops_and_errors() -> None:
    run_ranks(2, check_drop_and_errors)


def check_16_bits(rank: int) -> None:
    blocks = make(rank).to(torch.bfloat16)
    plain = run(blocks, False, torch.bfloat16)
    plain.float().square().sum().backward()
    expected = gradients(blocks)
    with activations.partition(min_elems=0), torch.autocast("cpu", dtype=torch.bfloat16):
        run(blocks, False, torch.bfloat16)
    with activations.partition(min_elems=0):
        out = run(blocks, False, torch.bfloat16)
    out.float().square().sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(blocks), expected, strict=True))


def test_16_bits() -> None:
    run_ranks(2, check_16_bits)
