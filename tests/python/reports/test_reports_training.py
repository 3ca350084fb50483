"""Loops and models from public reports about sharded training: one process is the oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from full_states import full_weights
from ranks import in_ranks
from steps import apply_steps
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from ringcomm.parallel import offload, zero

WORLD_SIZE = 2
INFINITY = 4  # a stage of these tests: 3 with offload_weights
SHARDED = [3, INFINITY]
STAGES = [1, 2, *SHARDED]

slow = pytest.mark.slow


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Any) -> Any:
        return x + self.b(torch.tanh(self.a(x)))


class Net(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block, num_blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))
        self.last = nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def rows(step: int, rank: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    params = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.SGD(params, **{"lr": 0.1, **options})


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4, **options)


def shard(model: nn.Module, given: Any, stage: int) -> Any:
    if stage != INFINITY:
        return zero.shard(model, given, stage)
    return zero.shard(model, offload.Offloaded(given), 3, offload_weights=True)


def square(output: Tensor) -> Tensor:
    return output.square().mean()


def backward(model: Any, ranks: list[int], loss_of: Any, step: int) -> float:
    """Of the mean over the ranks; returns it."""
    total = 0.0
    for rank in ranks:
        loss = loss_of(model, rows(step, rank)) / len(ranks)
        loss.backward()
        total += loss.item()
    return total


def train(model: Any, optimizer: Any, ranks: list[int], loss_of: Any, num_steps: int = 3) -> None:
    for step in range(num_steps):
        backward(model, ranks, loss_of, step)
        apply_steps(optimizer)


def check(
    rank: int,
    stage: int,
    make: Callable[[], nn.Module],
    loss_of: Callable[[Any, Tensor], Tensor] = lambda model, x: square(model(x)),
    loop: Callable[..., None] = train,
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
) -> None:
    """loop(model, optimizer, the ranks whose rows it has, loss_of) on ranks and in one process."""
    alone = make()
    loop(alone, optimizer_of(alone), [*range(WORLD_SIZE)], loss_of)
    model = make()
    optimizer = shard(model, optimizer_of(model), stage)
    loop(model, optimizer, [rank], loss_of)
    found = full_weights(optimizer)
    for name, param in alone.named_parameters():
        torch.testing.assert_close(found[name], param.detach(), rtol=0, atol=3e-5, msg=name)


class Kept(Net):
    """Keeps an activation from within a unit."""

    def __init__(self) -> None:
        super().__init__()
        inner: Any = self.blocks[1].a
        inner.register_forward_hook(self.keep)

    def keep(self, *args: Any) -> None:
        self.kept = args[-1]


def loss_of_kept(model: Any, x: Tensor) -> Tensor:
    model(x)
    return square(model.kept)


class WithLoss(Block):
    """The part of the loss that a block keeps has layers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.d = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        self.loss = square(self.d(torch.tanh(self.c(x.detach()))))
        return y


def all_losses(model: Any, x: Tensor) -> Tensor:
    return square(model(x)) + sum(block.loss for block in model.blocks)


class View(Block):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x).unsqueeze(0).squeeze(0)
        return y


class InPlaceAfter(Net):
    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
            x += 1.0
        return self.last(x)


@dataclasses.dataclass
class State:
    x: Tensor
    extra: Any = None


class OfStates(Block):
    def forward(self, state: State) -> State:
        return State(super().forward(state.x), {"seen": [state.x.sum()]})


class StatesNet(Net):
    def forward(self, x: Tensor) -> State:
        state = State(self.first(x))
        for block in self.blocks:
            state = block(state)
        return State(self.last(state.x), state.extra)


def loss_of_state(model: Any, x: Tensor) -> Tensor:
    state = model(x)
    loss: Tensor = square(state.x) + 0.1 * state.extra["seen"][0]
    return loss


class Appends(Block):
    """Hands its result on in a list that it was given."""

    def forward(self, values: list[Tensor]) -> None:
        values.append(super().forward(values[-1]))


class AppendsNet(Net):
    def forward(self, x: Tensor) -> Any:
        values = [self.first(x)]
        for block in self.blocks:
            block(values)
        return self.last(values[-1])


class ReturnsWeight(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.scale


class ReturnsView(ReturnsWeight):
    def forward(self, x: Tensor) -> Any:
        y, scale = super().forward(x)
        return y, scale[:2]


class ReturnsInDataclass(ReturnsWeight):
    def forward(self, x: Tensor) -> Any:
        return State(*super().forward(x))


def scaled_loss(model: Any, x: Tensor) -> Tensor:
    out = model(x)
    y, scale = out if isinstance(out, tuple) else (out.x, out.extra)
    return square(y) * scale.sum()


class Embedded(Net):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8, **options)

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.embedding((x.abs() * 3).long().clamp(max=9)))


def one_cycle(model: Any, optimizer: Any, ranks: list[int], loss_of: Any) -> None:
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=8)
    for _ in range(2):
        train(model, optimizer, ranks, loss_of, num_steps=1)
        scheduler.step()
    assert optimizer.defaults.keys() & {"momentum", "betas"}


def with_momentum(model: nn.Module) -> torch.optim.Optimizer:
    return sgd(model, momentum=0.9)


def maximized(model: Any, optimizer: Any, ranks: list[int], loss_of: Any) -> None:
    for step in range(3):
        for group in optimizer.param_groups:
            group.update(maximize=step % 2 == 1, weight_decay=0.01 * step)
        train(model, optimizer, ranks, loss_of, num_steps=1)


def without_zero_grad(model: Any, optimizer: Any, ranks: list[int], loss_of: Any) -> None:
    for step in range(3):
        if len(ranks) > 1:  # one process; an optimizer of zero.shard() has dropped its gradients
            optimizer.zero_grad()
        backward(model, ranks, loss_of, step)
        optimizer.step()


def clamped(model: Any, optimizer: Any, ranks: list[int], loss_of: Any) -> None:
    for _ in range(2):
        train(model, optimizer, ranks, loss_of, num_steps=1)
        with torch.no_grad():
            for param in model.parameters():
                param.clamp_(-0.1, 0.1)


def by_closure(model: Any, optimizer: Any, ranks: list[int], loss_of: Any) -> None:
    for step in range(3):

        def closure(step: int = step) -> float:
            optimizer.zero_grad()
            return backward(model, ranks, loss_of, step)

        assert optimizer.step(closure) > 0


def two_forwards(model: Any, x: Tensor) -> Tensor:
    a, b = model(x), model(x + 1)
    return square(a - b.detach()) + nn.functional.cosine_similarity(a, b).mean()


def teacher(model: Any, x: Tensor) -> Tensor:
    student = model(x)
    with torch.no_grad():
        target = model(x + 1)
    return square(student - target)


def adversarial(model: Any, x: Tensor) -> Tensor:
    x.requires_grad_()
    (grad,) = torch.autograd.grad(square(model(x)), x)
    return square(model(x.detach() + 0.1 * grad.sign()))


def apart(model: Any, optimizer: Any, ranks: list[int], loss_of: Any) -> None:
    for step in range(3):
        for rank in ranks:
            out = model(rows(step, rank))
            (square(out[:, :2]) / len(ranks)).backward(retain_graph=True)
            (out[:, 2:].abs().mean() / len(ranks)).backward()
        apply_steps(optimizer)


class Alternates(Net):
    def forward(self, x: Tensor) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        x = self.first(x)
        return self.last(self.blocks[self.calls // 4 % 2](x))


def in_turn(model: Any, optimizer: Any, ranks: list[int], loss_of: Any) -> None:
    for step in range(4):
        for rank in ranks:
            model.calls = 4 * step
            (loss_of(model, rows(step, rank)) / len(ranks)).backward()
        apply_steps(optimizer)


def toggled(model: Any, optimizer: Any, ranks: list[int], loss_of: Any) -> None:
    for step in range(4):
        model.blocks[step % 2].requires_grad_(False)
        backward(model, ranks, loss_of, step)
        model.blocks[step % 2].requires_grad_(True)
        apply_steps(optimizer)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cells = nn.ModuleList([nn.GRUCell(8, 8), nn.GRUCell(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        states = [torch.zeros_like(x)] * 2
        for time in range(3):
            y = x * (time + 1)
            for i, cell in enumerate(self.cells):
                states[i] = y = cell(y, states[i])
        return states[-1]


class Checkpointed(Net):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        def blocks(y: Tensor) -> Any:
            for block in self.blocks:
                is_nested = self.kind == "nested"
                y = checkpoint(block, y, use_reentrant=False) if is_nested else block(y)
            return y

        x = checkpoint(blocks, self.first(x), use_reentrant=self.kind == "reentrant")
        return self.last(x)


def with_hooks() -> nn.Module:
    model = Net()
    for block in model.blocks:
        before: Any = lambda _, grads: tuple(2 * g for g in grads)  # noqa: E731
        after: Any = lambda _, grads, __: tuple(g / 3 for g in grads)  # noqa: E731
        block.register_full_backward_pre_hook(before)
        block.register_full_backward_hook(after)
    return model


def saved_on_host(model: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return square(model(x))


def with_anomaly_detection(model: Any, x: Tensor) -> Tensor:
    with torch.autograd.detect_anomaly(check_nan=False):
        return square(model(x))


def normalized() -> nn.Module:
    model: Any = Net()
    for block in model.blocks:
        parametrizations.weight_norm(block.a)
        prune.l1_unstructured(block.b, "weight", 0.5)
    parametrizations.orthogonal(model.first)
    return model


class Expanded(Block):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(1, 8))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * self.w.expand_as(x) + self.v.t().expand(8, len(x)).t()


# ---- the cases: check()'s options, the quick stages, and all stages if some are left out
# The stages that are not quick have been right all along.

Case = tuple[dict[str, Any], Collection[int], Collection[int]]


def case(make: Any = Net, *quick: int, stages: Collection[int] = STAGES, **options: Any) -> Case:
    return {"make": make, **options}, quick, stages


CASES: dict[str, Case] = {
    # https://github.com/pytorch/pytorch/pull/174829: backward enters by a tensor that is kept.
    "loss that a block keeps": case(
        lambda: Net(WithLoss), INFINITY, stages=[1, INFINITY], loss_of=all_losses
    ),
    # https://github.com/pytorch/pytorch/issues/181832: the hook on the output is lost.
    "output is a view and changed in place": case(
        lambda: InPlaceAfter(View), INFINITY, stages=[2, INFINITY]
    ),
    # https://github.com/pytorch/pytorch/issues/77812: outputs in dataclasses are not seen.
    "dataclasses": case(lambda: StatesNet(OfStates), loss_of=loss_of_state),
    # https://github.com/facebookresearch/fairscale/pull/701: inputs in lists and dicts.
    "list that a unit changes": case(lambda: AppendsNet(Appends), INFINITY, stages=[1, INFINITY]),
    # https://github.com/mlfoundations/open_clip/pull/358: logit_scale; the process crashed.
    "returns a weight": case(ReturnsWeight, *SHARDED, loss_of=scaled_loss),
    "returns a view of a weight": case(ReturnsView, *SHARDED, loss_of=scaled_loss),
    # https://github.com/pytorch/pytorch/issues/26596: embeddings whose rows are special.
    "embedding with padding": case(lambda: Embedded(padding_idx=0)),
    # https://github.com/pytorch/pytorch/pull/113548: it looks for momentum in the defaults.
    "one cycle": case(Net, 2, INFINITY, loop=one_cycle, optimizer_of=with_momentum),
    # https://github.com/pytorch/pytorch/issues/84485: groups change after the constructor.
    "flags that are set between steps": case(Net, INFINITY, loop=maximized),
    # https://github.com/deepspeedai/DeepSpeed/pull/6554: whose zero_grad() drops which.
    "a step drops the gradients": case(loop=without_zero_grad),
    # https://github.com/pytorch/pytorch/issues/117742: weights written between steps.
    "weights that the loop clamps": case(stages=[1, 2, 3], loop=clamped),
    # https://github.com/pytorch/pytorch/pull/46750: the closure of a sharded optimizer.
    "step with a closure": case(loop=by_closure),
    # https://github.com/deepspeedai/DeepSpeed/pull/1227: several forwards before a backward.
    "two forwards": case(loss_of=two_forwards),
    "teacher": case(loss_of=teacher),
    "adversarial": case(loss_of=adversarial),
    # https://github.com/deepspeedai/DeepSpeed/issues/3539: a graph that is retained.
    "two backwards of one forward": case(loop=apart),
    # https://github.com/facebookresearch/fairscale/issues/796: a layer is left out of a step.
    "blocks that run in turn": case(Alternates, loop=in_turn, optimizer_of=with_momentum),
    # https://github.com/Lightning-AI/pytorch-lightning/issues/20138: toggle_optimizer().
    "weights that are frozen in turn": case(loop=toggled),
    # https://github.com/facebookresearch/fairscale/pull/784: a unit runs several times.
    "cells in a loop over time": case(Recurrent),
    # https://github.com/pytorch/pytorch/issues/153354: units that run again in the backward.
    "checkpoint over units": case(lambda: Checkpointed("units")),
    "nested checkpoint over units": case(lambda: Checkpointed("nested")),
    "reentrant checkpoint over units": case(lambda: Checkpointed("reentrant")),
    # https://github.com/pytorch/pytorch/issues/117925: hooks of modules change gradients.
    "backward hooks of units": case(with_hooks),
    # https://github.com/pytorch/pytorch/pull/70165: saved tensors, with weights, are copied.
    "saved on the host": case(loss_of=saved_on_host),
    "anomaly detection": case(loss_of=with_anomaly_detection),
    # https://github.com/pytorch/pytorch/issues/61470: weight_norm and other parametrizations.
    "weights that are computed": case(normalized),
    # https://github.com/pytorch/pytorch/issues/98501: gradients that are views of others.
    "gradients that are not contiguous": case(
        lambda: Net(Expanded), loss_of=lambda model, x: 0.01 * model(x).sum()
    ),
    # https://github.com/pytorch/pytorch/issues/173709: backward reads freed weights.
    "loss within a unit": case(Kept, INFINITY, stages=[1, 2, INFINITY], loss_of=loss_of_kept),
}


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        pytest.param(name, stage, marks=() if stage in quick else slow)
        for name, (_, quick, stages) in CASES.items()
        for stage in stages
    ],
)
@in_ranks(WORLD_SIZE)
def test_training_is_that_of_one_process(rank: int, name: str, stage: int) -> None:
    """Each case names its report in CASES."""
    check(rank, stage, **CASES[name][0])


@slow
@in_ranks(WORLD_SIZE)
def test_what_shards_cannot_do(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/173709: fully_shard only looks at outputs.

    https://github.com/pytorch/pytorch/issues/82461: a weight is read outside of the forward.
    https://github.com/pytorch/pytorch/issues/117742: weights written between steps.
    """
    with pytest.raises(RuntimeError, match="storage of size 0"):
        check(rank, 3, Kept, loss_of_kept)
    for stage in SHARDED:
        with pytest.raises(RuntimeError, match=r"returned one of them in a State"):
            check(rank, stage, ReturnsInDataclass, scaled_loss)
    with pytest.raises(RuntimeError, match=r"clamp_\(\) of a weight that is sharded and freed"):
        check(rank, INFINITY, Net, loop=clamped)


@in_ranks(WORLD_SIZE)
def test_an_embedding_that_renormalizes_its_weight_is_refused(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/37246: max_norm writes weights in the forward."""
    for stage in STAGES:
        model = Embedded(max_norm=0.5)
        with pytest.raises(ValueError, match=r"embedding\.weight equal on all ranks"):
            shard(model, sgd(model), stage)
    with pytest.raises(ValueError, match="max_norm"):
        shard(model := Embedded(max_norm=0.5), sgd(model), INFINITY)
