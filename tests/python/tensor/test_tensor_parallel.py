"""Layers split over ranks: the training of one process, and the bytes of Megatron's formula."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from full_states import load_full_weights
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ringcomm
from ringcomm.nn import (
    ColumnParallelLinear,
    CrossEntropyLoss,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from ringcomm.ops import shard_range
from ringcomm.parallel import tensor
from ringcomm.parallel.tensor import splits

VOCAB, DIM, HEADS, FFN = 37, 24, 12, 50  # the vocabulary and FFN divide by no number of ranks
BATCH, LENGTH, LAYERS, STEPS, LR = 2, 12, 2, 4, 0.5


class Layer(nn.Module):
    """A transformer layer, whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in range(3))
        self.o = nn.Linear(DIM, DIM)
        self.gate, self.up = nn.Linear(DIM, FFN, bias=False), nn.Linear(DIM, FFN, bias=False)
        self.down = nn.Linear(FFN, DIM)

    def enter(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(self.norm1(x))
        q, k, v = (
            w(y).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for w in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.o(y)
        y = self.enter(self.norm2(x))
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok = nn.Embedding(VOCAB, DIM, padding_idx=3)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.loss: Any = CrossEntropyLoss()

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tok(ids)
        for layer in self.layers:
            x = layer(x)
        loss: Tensor = self.loss(self.head(self.norm(x)).flatten(0, 1), targets.flatten())
        return loss


class SplitLayer(Layer):
    sequence_dim: int | None = None

    def enter(self, x: Tensor) -> Tensor:
        return tensor.copy_to_tp(x, sequence_dim=self.sequence_dim)


def split(model: Net, *, is_sequence_split: bool) -> Net:
    """This rank's part of a model; what stays whole is shared, tokens and all."""
    dim = 1 if is_sequence_split else None
    unit = DIM // HEADS
    model.tok = VocabParallelEmbedding.from_embedding(model.tok, sequence_dim=dim)  # type: ignore[assignment]
    layers: Any = model.layers
    for layer in layers:
        layer.__class__ = SplitLayer
        layer.sequence_dim = dim
        for name in ("q", "k", "v", "gate", "up"):
            whole = getattr(layer, name)
            part = ColumnParallelLinear.from_linear(
                whole, copy_input=False, shard_multiple=unit if name in "qkv" else 1
            )
            setattr(layer, name, part)
        layer.o = RowParallelLinear.from_linear(layer.o, shard_multiple=unit, sequence_dim=dim)
        layer.down = RowParallelLinear.from_linear(layer.down, sequence_dim=dim)
    norms = [module for module in model.modules() if isinstance(module, nn.RMSNorm)]
    if is_sequence_split:
        for norm in norms:
            tensor.all_reduce_grad_(norm.weight)
    model.head = ColumnParallelLinear.from_linear(model.head, sequence_dim=dim)  # type: ignore[assignment]
    model.loss = CrossEntropyLoss(
        group=torch.distributed.group.WORLD, num_columns=model.head.weight.shape[0]
    )
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1], ids[:, 1:]


def train(model: Net) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), LR)
    losses = []
    for step in range(STEPS):
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def train_split(rank: int, is_sequence_split: bool) -> tuple[list[float], dict[str, Tensor]]:
    model = split(Net(), is_sequence_split=is_sequence_split)
    losses = train(model)
    return losses, {name: param.detach() for name, param in model.named_parameters()}


def whole_of(name: str, parts: list[Tensor], like: Tensor) -> Tensor:
    """Joined along the dimension that differs; the first one where none does."""
    if parts[0].shape == like.shape:
        assert all(torch.equal(part, parts[0]) for part in parts)
        return parts[0]
    dim = next(d for d in range(like.dim()) if parts[0].shape[d] != like.shape[d])
    return torch.cat(parts, dim)


@pytest.mark.parametrize("is_sequence_split", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_training_of_one_process(world_size: int, is_sequence_split: bool) -> None:
    results = run_ranks(world_size, train_split, is_sequence_split)
    model = Net()
    losses = train(model)
    for found, _ in results:
        assert found == results[0][0]
        torch.testing.assert_close(found, losses, rtol=0, atol=2e-6)
    for name, param in model.named_parameters():
        whole = whole_of(name, [weights[name] for _, weights in results], param)
        torch.testing.assert_close(whole, param.detach(), rtol=0, atol=2e-6)


def sent_bytes() -> dict[str, int]:
    found: dict[str, int] = {}
    for (name, _), entry in ringcomm.stats().items():
        found[name] = found.get(name, 0) + entry["sent_bytes"]
    return found


def count_bytes(rank: int, is_sequence_split: bool) -> tuple[dict[str, int], dict[str, int]]:
    model = split(Net(), is_sequence_split=is_sequence_split)
    ids, targets = batch(0)
    before = sent_bytes()
    loss = model(ids, targets)
    middle = sent_bytes()
    loss.backward()
    after = sent_bytes()
    return (
        {name: middle[name] - before.get(name, 0) for name in middle},
        {name: after[name] - middle.get(name, 0) for name in after},
    )


@pytest.mark.parametrize("is_sequence_split", [False, True])
def test_bytes_of_a_step(is_sequence_split: bool) -> None:
    """2 all_reduces a layer each way, one for the embedding, one for the head's input backward."""
    activations, tokens = 4 * BATCH * LENGTH * DIM, BATCH * LENGTH
    loss = 24 * (tokens + 1)  # the loss's one collective, with how many targets count
    num = 2 * LAYERS + 1
    for forward, backward in run_ranks(2, count_bytes, is_sequence_split):
        half = activations // 2
        if not is_sequence_split:
            assert forward["all_reduce"] == num * activations + loss
            assert backward["all_reduce"] == num * activations
            continue
        # Halves: what enters is gathered, what leaves is scattered; backward the other way round.
        assert forward["reduce_scatter"] == num * half
        assert forward["all_gather"] == num * half
        assert forward["all_reduce"] == loss
        assert backward["reduce_scatter"] == num * half
        assert backward["all_gather"] == num * half
        small = (2 * LAYERS + 1) + 2 * LAYERS  # norms, and biases of what leaves
        assert backward["all_reduce"] == 4 * DIM * small


def check_layers(rank: int, world_size: int) -> None:
    torch.manual_seed(1)
    whole = nn.Linear(10, 7)
    torch.manual_seed(1)
    part = ColumnParallelLinear(10, 7)
    begin, end = shard_range(7, world_size, rank)
    assert part.features == (begin, end)
    assert torch.equal(part.weight, whole.weight[begin:end])
    assert part.bias is not None
    assert torch.equal(part.bias, whole.bias[begin:end])
    assert f"{begin}:{end} of 7" in repr(part)
    torch.manual_seed(1)
    rows = RowParallelLinear(10, 7)
    begin, end = rows.features
    assert torch.equal(rows.weight, whole.weight[:, begin:end])
    x = torch.randn(3, 10)
    torch.testing.assert_close(rows(x[:, begin:end]), whole(x))
    table = nn.Embedding(2, 5)  # fewer rows than ranks
    few = VocabParallelEmbedding.from_embedding(table)
    ids = torch.tensor([[0, 1, 1]])
    assert torch.equal(few(ids), table(ids))
    few(ids).sum().backward()
    with pytest.raises(IndexError, match=r"ids are in \[0, 2\)"):
        few(torch.tensor([2]))
    with pytest.raises(ValueError, match="no whole number of units of 3"):
        ColumnParallelLinear(10, 7, shard_multiple=3)
    with pytest.raises(ValueError, match="is not split"):
        VocabParallelEmbedding.from_embedding(nn.Embedding(3, 3, sparse=True))
    if world_size > 1:
        with pytest.raises(ValueError, match=r"cannot share 7 tokens evenly: pad"):
            tensor.reduce_from_tp(torch.zeros(1, 7, 2), sequence_dim=1)
    for layer in (part, rows, few):
        with pytest.raises(RuntimeError, match="copy the whole ones before"):
            copy.deepcopy(layer)


class Largest(TorchDispatchMode):
    """The most elements that any result had."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elems = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not result.is_meta:
            self.num_elems = max(self.num_elems, result.numel())
        return result


def draw_parts(rank: int, dtype: torch.dtype) -> None:
    """Blocks of 16 and 32 rows, a shorter one at the end, and one that is too short to be alone."""
    splits.BLOCK_ELEMS = 32 * 7
    try:
        for num_rows in (5, 40, 64, 67, 100):
            made: list[Any] = []
            with Largest() as largest:
                torch.manual_seed(num_rows)
                made.append(ColumnParallelLinear(7, num_rows, dtype=dtype))
                made.append(RowParallelLinear(7, num_rows, dtype=dtype))
                made.append(VocabParallelEmbedding(num_rows, 7, 3, dtype=dtype))
            after = torch.rand(1)
            torch.manual_seed(num_rows)
            whole = [nn.Linear(7, num_rows, dtype=dtype) for _ in range(2)]
            whole.append(nn.Embedding(num_rows, 7, 3, dtype=dtype))  # type: ignore[arg-type]
            assert torch.equal(after, torch.rand(1))
            for part, of in zip(made, whole, strict=True):
                for name, param in of.named_parameters():
                    split = part.splits.get(name)
                    wanted = param if split is None else split.cut(param)
                    assert torch.equal(part.get_parameter(name), wanted), (num_rows, name)
            # A block of 32 rows, with fewer than 16 more behind it, or the larger part of rows.
            assert largest.num_elems <= max(47 * 7, num_rows * 4)
        part = ColumnParallelLinear(7, 5, device="meta")
        whole_state = nn.Linear(7, 5, device="meta").state_dict()
        load_full_weights(part, whole_state)  # memory where the state is
        assert part.weight.is_meta
        load_full_weights(part, nn.Linear(7, 5).state_dict())
        assert part.weight.device.type == "cpu"
    finally:
        splits.BLOCK_ELEMS = 1 << 22


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parts_are_drawn_as_the_whole_without_having_it(dtype: torch.dtype) -> None:
    run_ranks(2, draw_parts, dtype)


def compiled_embedding(rank: int) -> None:
    torch.manual_seed(0)
    table = nn.Embedding(7, 4)
    part = VocabParallelEmbedding.from_embedding(table)
    call = torch.compile(part, backend="aot_eager", fullgraph=True)
    ids = torch.tensor([[0, 6, 3], [5, 5, 1]])
    found = call(ids)
    assert torch.equal(found, table(ids))
    found.square().sum().backward()
    table(ids).square().sum().backward()
    grad = table.weight.grad
    assert grad is not None
    assert torch.equal(part.weight.grad, grad[slice(*part.rows)])  # type: ignore[arg-type]
    wrong = call(torch.tensor([[0, 7, -1], [1, 2, 3]]))
    assert wrong.isnan().any(-1).tolist() == [[False, True, True], [False] * 3]


def test_a_compiled_embedding() -> None:
    """In one graph: nothing of it waits for ids."""
    run_ranks(2, compiled_embedding, timeout_s=120)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_layers(world_size: int) -> None:
    run_ranks(world_size, check_layers, world_size)


class Feed(nn.Module):
    """An embedding and a feed-forward block, whose layers are all in parts."""

    def __init__(self, sequence_dim: int | None) -> None:
        super().__init__()
        self.tokens = VocabParallelEmbedding(VOCAB, DIM, sequence_dim=sequence_dim)
        self.up = ColumnParallelLinear(DIM, FFN, sequence_dim=sequence_dim)
        self.down = RowParallelLinear(FFN, DIM, sequence_dim=sequence_dim)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        out: Tensor = x + self.down(torch.relu(self.up(x)))
        return out


def compiled_gradients(rank: int, sequence_dim: int | None) -> None:
    torch.manual_seed(0)
    model = Feed(sequence_dim)
    ids = torch.randint(VOCAB, (BATCH, LENGTH))
    found = []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        out = run(ids)
        out.square().sum().backward()
        found.append([out.detach(), *(param.grad for param in model.parameters())])
        model.zero_grad()
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager)


@pytest.mark.parametrize("sequence_dim", [None, 1])
def test_torch_compile_takes_parallel_layers_as_one_graph(sequence_dim: int | None) -> None:
    run_ranks(2, compiled_gradients, sequence_dim, timeout_s=120)
