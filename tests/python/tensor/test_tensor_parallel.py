"""Layers split over ranks: the training of one process, and what they refuse."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from full_states import full_weights, load_full_weights
from ranks import in_ranks, place
from steps import train_step
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from zero_models import assert_alike

import ringcomm
from ringcomm.nn import (
    ColumnParallelLinear,
    CrossEntropyLoss,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from ringcomm.parallel import tensor
from ringcomm.parallel.tensor import splits

VOCAB, DIM, FFN = 37, 24, 50  # divide by no number of ranks
BATCH, LENGTH, STEPS, LR = 2, 12, 4, 0.5


class Net(nn.Module):
    """A feed-forward block between an embedding and an output layer, whole."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens: Any = nn.Embedding(VOCAB, DIM, padding_idx=3)
        self.norm = nn.RMSNorm(DIM)
        self.up: Any = nn.Linear(DIM, FFN)
        self.down: Any = nn.Linear(FFN, DIM)
        self.head: Any = nn.Linear(DIM, VOCAB, bias=False)
        self.loss: Any = CrossEntropyLoss()

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids)
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        loss: Tensor = self.loss(self.head(x).flatten(0, 1), targets.flatten())
        return loss


def split(model: Net, dim: int | None) -> Net:
    """This rank's part of a model; with a dim tokens are shared between the layers."""
    model.tokens = VocabParallelEmbedding.from_embedding(model.tokens, sequence_dim=dim)
    model.up = ColumnParallelLinear.from_linear(model.up, sequence_dim=dim)
    model.down = RowParallelLinear.from_linear(model.down, sequence_dim=dim)
    if dim is not None:
        tensor.all_reduce_grad_(model.norm.weight)
    model.head = ColumnParallelLinear.from_linear(model.head, sequence_dim=dim)
    world: Any = torch.distributed.group.WORLD
    model.loss = CrossEntropyLoss(group=world, num_columns=model.head.weight.shape[0])
    return model


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=generator)


def train(model: Net) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), LR)
    losses = []
    for step in range(STEPS):
        ids = batch(step).to(model.norm.weight.device)
        losses.append(train_step(model(ids[:, :-1], ids[:, 1:]), optimizer))
    return losses


F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("world_size", "dim", "dtype"),
    [(1, None, F32), (2, 1, F32), (2, 1, BF16), (3, None, F32), (3, 1, F32)],
)
@in_ranks()
def test_the_training_of_one_process(
    rank: int, dim: int | None, dtype: torch.dtype, device: str
) -> None:
    model, alone = split(Net().to(place(device, rank), dtype), dim), Net().to(dtype)
    found, atol = train(model), 2e-6 if dtype == F32 else 2e-2
    torch.testing.assert_close(found, train(alone), rtol=0, atol=atol)
    torch.testing.assert_close(full_weights(model), dict(alone.state_dict()), rtol=0, atol=atol)
    assert_alike({"losses": torch.tensor(found, dtype=torch.float64)})


@pytest.mark.parametrize("world_size", [1, 2, 3])
@in_ranks()
def test_results_are_modified_in_place(rank: int) -> None:
    """https://github.com/NVIDIA/Megatron-LM/pull/6657, https://github.com/huggingface/transformers/pull/40162:
    autograd refuses that of a view that a custom function returns.
    """
    torch.manual_seed(0)
    column, row, table = nn.Linear(8, 7), nn.Linear(8, 7), nn.Embedding(9, 8)
    numbers, ids = torch.randn(2, 3, 8), torch.randint(9, (2, 3))
    gathers, part = (
        ColumnParallelLinear.from_linear(column, gather_output=gathers) for gathers in (True, False)
    )
    rows, few = RowParallelLinear.from_linear(row), VocabParallelEmbedding.from_embedding(table)
    columns, features = slice(*part.features), slice(*rows.features)
    whole: Any
    layer: Any
    for layer, whole, given, own, weights, results in (
        (gathers, column, numbers, numbers, columns, ...),
        (part, column, numbers, numbers, columns, (..., columns)),
        (rows, row, numbers, numbers[..., features], (slice(None), features), ...),
        (few, table, ids, ids, slice(*few.rows), ...),
    ):
        right, found = (whole(given)[results] * 2).relu(), layer(own)
        found.mul_(2).relu_()
        torch.testing.assert_close(found, right)
        found.square().sum().backward()
        right.square().sum().backward()
        torch.testing.assert_close(layer.weight.grad, whole.weight.grad[weights])
        whole.zero_grad()
    world: Any = torch.distributed.group.WORLD
    sizes = [end - begin for begin, end in splits.ranges_of(7, world.size())]
    for dim in (0, 1, -1):
        leaf = torch.randn(7, 7, 7).requires_grad_()
        gathered = tensor.gather_from_tp(leaf.split(sizes, dim)[rank], sizes, dim=dim)
        assert torch.equal(gathered, leaf)
        gathered.mul_(3).square().sum().backward()
        assert leaf.grad is not None
        torch.testing.assert_close(*(x.split(sizes, dim)[rank] for x in (leaf.grad, 18 * leaf)))
    calls = ringcomm.stats()
    for region in (tensor.copy_to_tp, tensor.reduce_from_tp):
        leaf = torch.randn(5, 7).requires_grad_()
        region(leaf * 1).mul_(3).square().sum().backward()
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, 18 * world.size() * leaf)
    assert (ringcomm.stats() == calls) == (world.size() == 1)


@in_ranks(3)
def test_layers(rank: int) -> None:
    part, rows = ColumnParallelLinear(10, 7), RowParallelLinear(10, 7)
    begin, end = ((0, 3), (3, 6), (6, 7))[rank]  # torch.chunk's
    assert part.features == (begin, end)
    assert f"{begin}:{end} of 7" in repr(part)
    assert f"{rows.features[0]}:{rows.features[1]} of 10" in repr(rows)
    table = nn.Embedding(2, 5)  # fewer rows than ranks
    few = VocabParallelEmbedding.from_embedding(table)
    ids = torch.tensor([[0, 1, 1]])
    assert torch.equal(few(ids), table(ids))
    few(ids).sum().backward()
    with pytest.raises(IndexError, match=r"ids must be in \[0, 2\)"):
        few(torch.tensor([2]))
    with pytest.raises(ValueError, match="must be a multiple of 3"):
        ColumnParallelLinear(10, 7, shard_multiple=3)
    with pytest.raises(ValueError, match="cannot be split"):
        VocabParallelEmbedding.from_embedding(nn.Embedding(3, 3, sparse=True))
    with pytest.raises(ValueError, match=r"cannot split 7 tokens evenly: pad"):
        tensor.reduce_from_tp(torch.zeros(1, 7, 2), sequence_dim=1)
    for layer in (part, rows, few):
        with pytest.raises(RuntimeError, match="cannot be copied"):
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@in_ranks(2)
def test_parts_are_drawn_as_the_whole_without_having_it(rank: int, dtype: torch.dtype) -> None:
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


@in_ranks(2, timeout_s=120)
def test_torch_compile_takes_parallel_layers_as_one_graph(rank: int) -> None:
    model, ids = split(Net(), None), batch(0)  # with a dim they are operators of ringcomm.ops
    found = []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        loss = run(ids[:, :-1], ids[:, 1:])
        loss.backward()
        found.append([loss.detach(), *(param.grad for param in model.parameters())])
        model.zero_grad()
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager)
    # Compiled code does not wait for ids: what is none is NaN.
    whole = VocabParallelEmbedding.from_embedding(nn.Embedding(7, 4))
    wrong = torch.compile(whole, backend="aot_eager")(torch.tensor([[0, 7, -1], [1, 2, 3]]))
    assert wrong.isnan().any(-1).tolist() == [[False, True, True], [False] * 3]


@in_ranks(2)
def test_dtypes_under_autocast_are_those_of_linear_layers(rank: int) -> None:
    plain = nn.Linear(8, 4)
    x = torch.ones(2, 8)
    row = RowParallelLinear.from_linear(copy.deepcopy(plain))
    with torch.autocast("cpu", torch.bfloat16):
        assert row(x.chunk(2, 1)[rank]).dtype == plain(x).dtype == torch.bfloat16


@in_ranks(2)
def test_a_projection_of_which_a_part_bypasses_the_split_layer(rank: int) -> None:
    """https://github.com/pytorch/torchtitan/pull/1373: the gradient of rotary keys of one rank."""

    def run(down: nn.Linear, up: Any, scale: Tensor, enter: Callable[[Tensor], Tensor]) -> Tensor:
        inner, beside = down(torch.ones(3, 8)).split([4, 4], -1)
        return (up(inner).unflatten(-1, (-1, 4)) * scale[:, None] * enter(beside)[:, None]).sum()

    torch.manual_seed(0)
    down, whole, scale = nn.Linear(8, 8), nn.Linear(4, 16), torch.arange(4.0)
    run(down, whole, scale, lambda x: x).backward()
    wanted, down.weight.grad = down.weight.grad, None
    up = ColumnParallelLinear.from_linear(whole)
    run(down, up, scale[2 * rank : 2 * rank + 2], tensor.copy_to_tp).backward()
    torch.testing.assert_close(down.weight.grad, wanted)


@in_ranks(2)
def test_gradients_that_are_not_contiguous(rank: int) -> None:
    """https://github.com/NVIDIA/Megatron-LM/issues/5337: a sum that stays in a copy."""
    x = torch.ones(3, 4, requires_grad=True)
    tensor.copy_to_tp(x).t().mul(torch.full((4, 3), rank + 1.0)).sum().backward()
    assert x.grad is not None
    assert x.grad.eq(3).all()
    y = tensor.reduce_from_tp(torch.full((4, 3), rank + 1.0).t())
    assert y.eq(3).all()
