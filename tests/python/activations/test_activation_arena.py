"""activations.arena() and gradient_arena(): the same bits, from memory that was set aside."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from activation_models import PLAN, SAVED_BYTES, assert_equal, backward, gradients, make, run
from ranks import in_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ringcomm.parallel import activations

LINE = 64
assert SAVED_BYTES % LINE == 0


def lines(num_bytes: int) -> int:
    return -(-num_bytes // LINE) * LINE


# ---- what comes back, and where it was


def test_a_full_arena_grows_once_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    blocks = make()
    expected = backward(run(blocks), blocks)
    arena = activations.arena(SAVED_BYTES + 60)
    with caplog.at_level(logging.WARNING, "ringcomm"):
        for _ in range(3):
            with arena:
                out = run(blocks)
            assert_equal(backward(out, blocks), expected)
            assert arena.num_blocks == 4  # none after the first step
    (said,) = caplog.messages
    text = f"an arena of {SAVED_BYTES + 60} bytes has no room for {SAVED_BYTES} more"
    assert said.startswith(text)
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


def looks() -> Iterator[Tensor]:
    base = torch.randn(6, 8)
    yield from (base.t(), base[:, ::2], base[1:, 3:5], base[2, 3], base.expand(2, 6, 8))
    yield torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    yield torch.randn(2, 3, 4).permute(2, 0, 1)
    yield from (base.double(), base.bfloat16(), base.half(), torch.complex(base, base))
    yield torch.complex(base, base).conj()
    yield torch.tensor([float("nan"), -0.0, float("inf")])


class Save(torch.autograd.Function):
    """Saves a tensor, and gives what comes back to a list."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: Tensor, back: list[Tensor]) -> Tensor:
        ctx.save_for_backward(saved)
        ctx.back = back
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.back.extend(ctx.saved_tensors)
        return grad, None, None


def test_looks() -> None:
    for like in looks():
        back: list[Tensor] = []
        with activations.arena(1 << 12) as arena:
            out = Save.apply(torch.ones(2, requires_grad=True), like, back)
        assert arena.used_bytes == lines(like.numel() * like.element_size())
        out.sum().backward()
        (found,) = back
        assert (found.dtype, found.shape) == (like.dtype, like.shape)
        assert torch.equal(torch.nan_to_num(found, nan=7), torch.nan_to_num(like, nan=7))
        if torch.empty_like(like).stride() == like.stride():
            assert found.stride() == like.stride()
        assert found.untyped_storage().data_ptr() != like.untyped_storage().data_ptr()


def test_a_place_is_not_given_away_while_it_is_in_use() -> None:
    """Old graphs stay as they are while new ones come and go."""
    blocks = make(dropout=0.1)
    expected = backward(run(blocks, seed=1), blocks)
    arena = activations.arena(2 * PLAN + SAVED_BYTES)  # square() saves the last output
    with arena:
        old = run(blocks, seed=1)
    for seed in range(2, 6):
        with arena:
            backward(run(blocks, seed=seed), blocks)
    assert arena.used_bytes == PLAN
    assert_equal(backward(old, blocks), expected)
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
        x = torch.randn(5, 24, requires_grad=True)
        with context:
            out = x.mul(1)
            for block in blocks:
                out = checkpoint(block, out, use_reentrant=False)
            (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
            again = grad.square().sum()
        again.backward(retain_graph=True)
        again.backward()
        return [grad.detach(), *gradients(blocks)]

    expected = second_order(contextlib.nullcontext())
    assert_equal(second_order(activations.arena(1 << 20)), expected)


@pytest.mark.parametrize("is_view", [False, True])
def test_written_after_it_was_saved(is_view: bool) -> None:
    def step(context: contextlib.AbstractContextManager[Any]) -> None:
        x = torch.randn(6, 20, requires_grad=True).mul(1)
        view = x.view(-1)
        with context:
            out = (x * x).sum()
        with torch.no_grad():
            (view if is_view else x).add_(1)
        if is_view:
            del x  # the tensor is gone, its memory is not
        out.backward()

    message = "modified by an inplace operation.*is at version 1; expected version 0 instead"
    for context in (contextlib.nullcontext(), activations.arena(1 << 14)):  # as torch does
        with pytest.raises(RuntimeError, match=message):
            step(context)


def test_nested_left_by_an_error_and_written_before() -> None:
    arena = activations.arena(1 << 14)
    x = torch.ones(50, requires_grad=True)
    with contextlib.suppress(KeyError), arena:
        raise KeyError
    with arena:
        a = x.sin()
        with arena:
            b = x.mul(2).sin()
        c = x.mul(3)
        c.add_(1)  # before it is saved, and again as another tensor
        c = (c * c).sum() + c.mul(2).exp_().sum()
    assert arena.used_bytes == 4 * lines(200)  # the first one, a leaf, as well
    d = x.mul(4).sin()
    assert arena.used_bytes == 4 * lines(200)
    (a + b + d).sum().add(c).backward()
    y = 3 * x.detach() + 1
    expected = x.cos() + 2 * (2 * x).cos() + 4 * (4 * x).cos() + 6 * y + 6 * (2 * y).exp()
    torch.testing.assert_close(x.grad, expected.detach())
    with pytest.raises(ValueError, match="block_bytes must be 1 or more, got 0"):
        activations.arena(0)


# ---- gradients


def test_gradients_are_views_for_good() -> None:
    blocks = make()
    halves: list[Any] = [module for module in blocks.modules() if hasattr(module, "up")]
    one, other = halves[:2]
    one.up.requires_grad_(False)
    other.down.to(torch.float64)
    one.norm.weight.grad = torch.ones(24)
    buffers = activations.gradient_arena([*blocks.parameters(), *one.parameters()])
    trained = [param for param in blocks.parameters() if param.requires_grad]
    assert [buffer.dtype for buffer in buffers] == [torch.float32, torch.float64]
    assert sum(b.nbytes for b in buffers) == sum(param.nbytes for param in trained)
    assert bool((one.norm.weight.grad == 1).all())  # it has moved

    def places() -> list[int]:
        return [param.grad.data_ptr() for param in trained if param.grad is not None]

    def compute() -> None:
        torch.manual_seed(1)
        for param in trained:
            (param * torch.randn_like(param)).sum().backward()

    blocks.zero_grad()
    assert all(param.grad is None for param in blocks.parameters())
    compute()
    first = places()
    inside = [range(b.data_ptr(), b.data_ptr() + b.nbytes) for b in buffers]
    assert len(first) == len(trained)
    assert all(any(place in of for of in inside) for place in first)
    once = [buffer.clone() for buffer in buffers]
    compute()
    assert places() == first  # summed up there
    assert_equal(buffers, [2 * of for of in once])
    blocks.zero_grad()
    compute()
    assert places() == first
    assert_equal(buffers, once)


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


class Net(nn.Sequential):
    def forward(self, seed: int) -> Tensor:
        return run(self, seed=seed)


@in_ranks(2)
def test_training(rank: int) -> None:
    """Under DDP: micro-batches, momentum, autocast and clipping, with both arenas."""
    arena = activations.arena(PLAN + SAVED_BYTES)
    results = []
    for is_ours in (False, True):
        net = Net(*make(dropout=0.1))
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        buffers = activations.gradient_arena(net.parameters()) if is_ours else []
        context = arena if is_ours else contextlib.nullcontext()
        replica = DistributedDataParallel(net)
        for step in range(3):
            for part in range(2):  # a backward pass outside of the arena, and inside
                with context:
                    with torch.autocast("cpu", dtype=torch.bfloat16):
                        loss = replica(10 * step + 2 * rank + part).float().square().mean()
                    if part:
                        loss.backward()
                if not part:
                    loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            last = [param.grad.clone() for param in net.parameters() if param.grad is not None]
            optimizer.zero_grad(set_to_none=False)
        results.append([param.detach() for param in net.parameters()])
    assert_equal(*results)
    assert not torch.equal(results[0][0], next(make(dropout=0.1).parameters()))
    assert (arena.num_blocks, arena.used_bytes) == (1, 0)
    assert sum(b.nbytes for b in buffers) == sum(grad.nbytes for grad in last)
    assert not any(buffer.any() for buffer in buffers)  # zero_grad() has written them


def test_a_conjugate_is_not_what_it_is_of() -> None:
    """It has the memory, shape and strides of its tensor, and says that the values differ."""
    found: list[Tensor] = []
    for context in (contextlib.nullcontext(), activations.arena(1 << 20)):
        x = torch.randn(8, generator=torch.Generator().manual_seed(0), requires_grad=True)
        with context:
            z = torch.complex(x, 2 * x) * 1.0
            loss = (z * z.conj() * (1 + 2j)).sum().abs()
        loss.backward()
        assert x.grad is not None
        found.append(x.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", ["arena", "partition", "host", "auto"])
@in_ranks(2)
def test_a_tensor_that_is_saved_again_after_a_write(rank: int, kind: str) -> None:
    """https://github.com/meta-pytorch/torchtune/issues/1867

    Between two forward passes a buffer is written by `.data`, which autograd does not count.
    """
    context: Any = {
        "arena": lambda: activations.arena(1 << 14),
        "partition": lambda: activations.partition(min_elems=0),
        "host": lambda: activations.partition(min_elems=0, offload="cpu"),
        "auto": lambda: activations.auto(limit_bytes=0, min_elems=0),
    }[kind]()
    found: list[Any] = []
    for saving in (context, contextlib.nullcontext()):
        buffer, x = torch.ones(3, 3), torch.ones(3, 3, requires_grad=True)
        with saving:
            first = (x * buffer).sum()
        buffer.data.add_(1)
        with saving:
            second = (x * buffer).sum()
        second.backward()  # while there is the first graph
        found.append(x.grad)
        assert first.grad_fn is not None
    assert torch.equal(*found)
