"""activations.arena() and gradient_arena(): the same bits, from memory that was set aside."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ringcomm.parallel import activations

ROWS = 24
LINE = 64


class Block(nn.Module):
    def __init__(self, width: int, out: int | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, out or width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))
        return out


def make() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block(20) for _ in range(4))


def run(blocks: nn.ModuleList, seed: int = 1, reentrant: bool = False) -> Tensor:
    torch.manual_seed(seed)
    x = torch.randn(ROWS, 20, requires_grad=True).mul(1)
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=reentrant)
    return x


def gradients(model: nn.Module) -> list[Tensor]:
    found = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    model.zero_grad()
    return found


def expect(blocks: nn.ModuleList, reentrant: bool = False) -> list[Tensor]:
    """Gradients without an arena."""
    run(blocks, reentrant=reentrant).square().sum().backward()
    return gradients(blocks)


def lines(*num_bytes: int) -> int:
    return sum(-(-size // LINE) * LINE for size in num_bytes)


SAVED = lines(*[4 * ROWS * 20] * 4)


# ---- what comes back, and where it was


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_same_bits_in_one_block(reentrant: bool) -> None:
    blocks = make()
    expected = expect(blocks, reentrant)
    arena = activations.arena(SAVED)
    used = []
    for _ in range(3):
        with arena:
            out = run(blocks, reentrant=reentrant)
        used.append(arena.used_bytes)
        out.square().sum().backward()
        assert all(torch.equal(a, b) for a, b in zip(gradients(blocks), expected, strict=True))
        assert arena.used_bytes == 0  # places are free after the backward pass
    assert used == [SAVED] * 3
    assert (arena.num_blocks, arena.reserved_bytes) == (1, SAVED)


def test_a_full_arena_grows_once_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    blocks = make()
    expected = expect(blocks)
    arena = activations.arena(SAVED // 4 + 60)
    counts = []
    with caplog.at_level(logging.WARNING, "ringcomm"):
        for _ in range(3):
            with arena:
                out = run(blocks)
            out.square().sum().backward()
            counts.append(arena.num_blocks)
            assert all(torch.equal(a, b) for a, b in zip(gradients(blocks), expected, strict=True))
    assert counts == [4, 4, 4]  # none after the first step
    (said,) = caplog.messages
    assert said.startswith(f"an arena of {SAVED // 4 + 60} bytes has no room for {SAVED // 4} more")
    with activations.arena(1) as tiny:  # one tensor larger than a block
        run(blocks)
    assert tiny.num_blocks == 5


def test_an_output_that_its_own_node_saves_is_freed() -> None:
    with activations.arena(1 << 12) as arena:
        y = torch.ones(100, requires_grad=True).exp()
    assert arena.used_bytes == lines(400)
    with arena:
        z = nn.Parameter(torch.ones(100)).view(-1).exp()  # the view is kept whole
    storages = [
        torch.multiprocessing.reductions.StorageWeakRef(t.untyped_storage()) for t in (y, z)
    ]
    gc.disable()
    del y, z
    gc.enable()
    assert arena.used_bytes == 0
    assert all(storage.expired() for storage in storages)


# ---- views, aliases, dtypes


def looks() -> Iterator[Tensor]:
    base = torch.randn(6, 8)
    yield from (base.t(), base[:, ::2], base[1:, 3:5], base[2, 3], base.expand(2, 6, 8))
    yield torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    yield torch.randn(2, 3, 4).permute(2, 0, 1)
    yield from (base.double(), base.bfloat16(), base.half(), torch.complex(base, base))
    yield torch.complex(base, base).conj()
    yield torch.tensor([float("nan"), -0.0, float("inf")])


@pytest.mark.parametrize("like", list(looks()), ids=lambda like: f"{like.dtype}-{like.stride()}")
def test_looks(like: Tensor) -> None:
    back = []

    class Save(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, saved: Tensor) -> Tensor:
            ctx.save_for_backward(saved)
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            back.extend(ctx.saved_tensors)
            return grad, None

    with activations.arena(1 << 12) as arena:
        out = Save.apply(torch.ones(2, requires_grad=True), like)
    assert arena.used_bytes == lines(like.numel() * like.element_size())
    out.sum().backward()
    (found,) = back
    assert found.dtype == like.dtype
    assert found.shape == like.shape
    assert torch.equal(torch.nan_to_num(found, nan=7), torch.nan_to_num(like, nan=7))
    if torch.empty_like(like).stride() == like.stride():
        assert found.stride() == like.stride()
    assert found.untyped_storage().data_ptr() != like.untyped_storage().data_ptr()


def test_a_place_is_not_given_away_while_it_is_in_use() -> None:
    """Old graphs stay as they are while new ones come and go."""
    blocks = make()
    expected = expect(blocks)
    arena = activations.arena(2 * SAVED + SAVED // 4)  # square() saves the last output
    with arena:
        old = run(blocks, seed=1)
    for seed in range(2, 6):
        with arena:
            run(blocks, seed=seed).square().sum().backward()
    blocks.zero_grad()
    assert arena.used_bytes == SAVED
    old.square().sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(blocks), expected, strict=True))
    assert arena.num_blocks == 1


def test_memory_that_is_used_again_is_no_tensor_that_is_known() -> None:
    arena = activations.arena(1 << 14)
    x = torch.ones(100, requires_grad=True)
    sums = []
    with arena:
        for factor in range(20):
            y = x.mul(factor)
            sums.append((y * y).sum())
            del y  # its graph is kept, its memory is not
    assert arena.used_bytes == 20 * lines(400)
    grads = [float(torch.autograd.grad(total, x)[0][0]) for total in sums]
    assert grads == [2.0 * factor**2 for factor in range(20)]


# ---- autograd's own rules


def test_retain_graph_and_double_backward() -> None:
    blocks = make()

    def second_order(context: contextlib.AbstractContextManager[Any]) -> list[Tensor]:
        torch.manual_seed(3)
        x = torch.randn(ROWS, 20, requires_grad=True)
        with context:
            out = x.mul(1)
            for block in blocks:
                out = checkpoint(block, out, use_reentrant=False)
            loss = out.square().sum()
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            again = grad.square().sum()
        again.backward(retain_graph=True)
        again.backward()
        return [grad.detach(), *gradients(blocks)]

    expected = second_order(contextlib.nullcontext())
    found = second_order(activations.arena(1 << 20))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", ["saved", "its view", "parameter"])
def test_written_after_it_was_saved(kind: str) -> None:
    def step(context: contextlib.AbstractContextManager[Any]) -> None:
        weight = nn.Parameter(torch.randn(20))
        x = torch.randn(ROWS, 20, requires_grad=True).mul(1)
        view = x.view(-1)
        with context:
            out = (x * x * weight).sum()
        with torch.no_grad():
            {"saved": x, "its view": view, "parameter": weight}[kind].add_(1)
        if kind == "its view":
            del x  # the tensor is gone, its memory is not
        out.backward()

    message = "modified by an inplace operation.*is at version 1; expected version 0 instead"
    for context in (contextlib.nullcontext(), activations.arena(1 << 14)):  # as torch does
        with pytest.raises(RuntimeError, match=message):
            step(context)


def test_in_place_before_it_is_saved_is_fine() -> None:
    x = torch.randn(ROWS, 20, requires_grad=True)
    with activations.arena(1 << 14):
        y = x.mul(2)
        y.add_(1)
        out = (y * y).sum()
        y = y.mul(3).exp_()
        (out + y.sum()).backward()
    z = (2 * x + 1).detach()
    torch.testing.assert_close(x.grad, 4 * z + 6 * (3 * z).exp())


# ---- together with others


@pytest.mark.parametrize("set_to_none", [True, False])
def test_training(set_to_none: bool) -> None:
    """Micro-batches, momentum, autocast, a scaled loss and clipping; gradients have an arena."""

    def train(blocks: nn.ModuleList, context: contextlib.AbstractContextManager[Any]) -> None:
        optimizer = torch.optim.SGD(blocks.parameters(), 0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)  # the first steps are skipped

        def loss_of(seed: int) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return scaler.scale(run(blocks, seed=seed).float().square().mean())

        for step in range(5):
            with context:  # a backward pass inside, and outside of it
                loss_of(2 * step).backward()
                loss = loss_of(2 * step + 1)
            loss.backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(blocks.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=set_to_none)

    plain, ours, before = make(), make(), make()
    train(plain, contextlib.nullcontext())
    buffers = activations.gradient_arena(ours.parameters())
    arena = activations.arena(2 * SAVED)
    train(ours, arena)
    for a, b, c in zip(plain.parameters(), ours.parameters(), before.parameters(), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
    assert (arena.num_blocks, arena.used_bytes) == (1, 0)
    assert sum(b.nbytes for b in buffers) == sum(param.nbytes for param in ours.parameters())


def test_nested_and_left_by_an_error() -> None:
    arena = activations.arena(1 << 14)
    x = torch.ones(50, requires_grad=True)
    with contextlib.suppress(KeyError), arena:
        raise KeyError
    with arena:
        a = x.sin()
        with arena:
            b = x.mul(2).sin()
        c = x.mul(3).sin()
    assert arena.used_bytes == 3 * lines(200)  # the first one, a leaf, as well
    d = x.mul(4).sin()
    assert arena.used_bytes == 3 * lines(200)
    (a + b + c + d).sum().backward()
    with pytest.raises(ValueError, match="block_bytes is 1 or more, got 0"):
        activations.arena(0)


# ---- gradients


def test_gradients_are_views_for_good() -> None:
    torch.manual_seed(0)
    each = [Block(20) for _ in range(4)]
    blocks = nn.ModuleList(each)
    each[1].up.requires_grad_(False)
    each[2].down.to(torch.float64)
    each[0].norm.weight.grad = torch.ones(20)
    buffers = activations.gradient_arena([*blocks.parameters(), *each[0].parameters()])
    trained = [param for param in blocks.parameters() if param.requires_grad]
    assert [buffer.dtype for buffer in buffers] == [torch.float32, torch.float64]
    assert sum(b.nbytes for b in buffers) == sum(param.nbytes for param in trained)
    assert bool((each[0].norm.weight.grad == 1).all())  # it has moved

    def places() -> list[int]:
        return [param.grad.data_ptr() for param in trained if param.grad is not None]

    def backward() -> None:
        torch.manual_seed(1)
        for block in each:
            x = torch.randn(3, 20)
            h = torch.tanh(block.up(block.norm(x)))
            block.down(h.to(block.down.weight.dtype)).sum().backward()

    blocks.zero_grad()
    assert all(param.grad is None for param in blocks.parameters())
    backward()
    first = places()
    inside = [range(b.data_ptr(), b.data_ptr() + b.nbytes) for b in buffers]
    assert len(first) == len(trained)
    assert all(any(place in of for of in inside) for place in first)
    once = [buffer.clone() for buffer in buffers]
    backward()
    assert places() == first  # summed up there
    assert all(torch.equal(b, 2 * o) for b, o in zip(buffers, once, strict=True))
    blocks.zero_grad()
    backward()
    assert places() == first
    assert all(torch.equal(b, o) for b, o in zip(buffers, once, strict=True))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_gradients_that_stay_where_they_are() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    activations.gradient_arena(table.parameters())
    table(torch.tensor([1, 2])).sum().backward()
    assert table.weight.grad is not None
    assert table.weight.grad.is_sparse
    conv = nn.Conv2d(3, 4, 2)
    conv.weight.data = conv.weight.data.to(memory_format=torch.channels_last)
    activations.gradient_arena(conv.parameters())
    conv(torch.randn(1, 3, 5, 5)).sum().backward()
    assert conv.weight.grad is not None
    assert conv.weight.grad.stride() == conv.weight.stride()
    w = nn.Parameter(torch.ones(3))
    activations.gradient_arena([w])
    w.pow(3).sum().backward(create_graph=True)
    assert w.grad is not None
    w.grad.sum().backward()
    assert w.grad.tolist() == [9.0] * 3  # 3 and 6
    with pytest.raises(TypeError, match="plain parameters"):
        activations.gradient_arena([w * 2])  # type: ignore[list-item]


def check_ddp(rank: int) -> None:
    torch.set_num_threads(1)
    plain, ours = make(), make()
    results = []
    for blocks, is_ours in ((plain, False), (ours, True)):
        net = nn.Sequential(*blocks)
        if is_ours:
            buffers = activations.gradient_arena(net.parameters())
        replica = DistributedDataParallel(net)
        for step in range(3):
            net.zero_grad()
            torch.manual_seed(10 * step + rank)
            replica(torch.randn(ROWS, 20)).square().mean().backward()
        results.append(gradients(net))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert sum(int(buffer.count_nonzero()) for buffer in buffers) == sum(
        int(grad.count_nonzero()) for grad in results[1]
    )


def test_gradients_under_ddp() -> None:
    run_ranks(2, check_ddp)
