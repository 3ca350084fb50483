"""Loops and models from public reports about sharded training: one process is the oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from full_states import full_weights
from ranks import in_ranks
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from ringcomm.parallel import WeightShards, offload, zero
from ringcomm.torch_names import TORCH_VERSION

WORLD_SIZE = 2
INFINITY = 4  # a stage of these tests: 3 with offload_weights
SHARDED = [3, INFINITY]
STAGES = [1, 2, *SHARDED]

slow = pytest.mark.slow
each_stage = pytest.mark.parametrize("stage", STAGES)


def some(*stages: int) -> Any:
    """A test of these stages; the others are slow, because they have been right all along."""
    params = [s if s in stages else pytest.param(s, marks=slow) for s in STAGES]
    return pytest.mark.parametrize("stage", params)


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
    made: Any = offload.AdamW if isinstance(given, torch.optim.AdamW) else offload.SGD
    names = ("lr", "betas", "eps", "weight_decay", "momentum")
    options = {name: given.defaults[name] for name in names if name in given.defaults}
    params = given.param_groups[0]["params"]
    return zero.shard(model, made(params, **options), 3, offload_weights=True)


def square(output: Tensor) -> Tensor:
    return output.square().mean()


def train(model: Any, optimizer: Any, ranks: list[int], loss_of: Any, num_steps: int = 3) -> None:
    for step in range(num_steps):
        for rank in ranks:
            (loss_of(model, rows(step, rank)) / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()


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


# ---- how gradients enter a unit


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


@some(INFINITY)
@in_ranks(WORLD_SIZE)
def test_a_loss_of_an_activation_within_a_unit(rank: int, stage: int) -> None:
    """https://github.com/pytorch/pytorch/issues/173709: backward reads freed weights."""
    if stage == 3:  # fully_shard only looks at outputs
        with pytest.raises(RuntimeError, match="storage of size 0"):
            check(rank, stage, Kept, loss_of_kept)
        return
    check(rank, stage, Kept, loss_of_kept)


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


@pytest.mark.parametrize("stage", [pytest.param(1, marks=slow), INFINITY])
@in_ranks(WORLD_SIZE)
def test_a_loss_that_a_block_keeps(rank: int, stage: int) -> None:
    """https://github.com/pytorch/pytorch/pull/174829: backward enters by a tensor that is kept."""
    check(rank, stage, lambda: Net(WithLoss), all_losses)


class View(Block):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x).unsqueeze(0).squeeze(0)
        return y


class InPlaceAfter(Net):
    def __init__(self) -> None:
        super().__init__(View)

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
            x += 1.0
        return self.last(x)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=slow), INFINITY])
@in_ranks(WORLD_SIZE)
def test_an_output_that_is_a_view_and_changed_in_place(rank: int, stage: int) -> None:
    """https://github.com/pytorch/pytorch/issues/181832: the hook on the output is lost."""
    check(rank, stage, InPlaceAfter)


@dataclasses.dataclass
class State:
    x: Tensor
    extra: Any = None


class OfStates(Block):
    def forward(self, state: State) -> State:
        return State(super().forward(state.x), {"seen": [state.x.sum()]})


class StatesNet(Net):
    def __init__(self) -> None:
        super().__init__(OfStates)

    def forward(self, x: Tensor) -> State:
        state = State(self.first(x))
        for block in self.blocks:
            state = block(state)
        return State(self.last(state.x), state.extra)


def loss_of_state(model: Any, x: Tensor) -> Tensor:
    state = model(x)
    loss: Tensor = square(state.x) + 0.1 * state.extra["seen"][0]
    return loss


@slow
@each_stage
@in_ranks(WORLD_SIZE)
def test_dataclasses(rank: int, stage: int) -> None:
    """https://github.com/pytorch/pytorch/issues/77812: outputs in dataclasses are not seen."""
    check(rank, stage, StatesNet, loss_of_state)


class Appends(Block):
    """Hands its result on in a list that it was given."""

    def forward(self, values: list[Tensor]) -> None:
        values.append(super().forward(values[-1]))


class AppendsNet(Net):
    def __init__(self) -> None:
        super().__init__(Appends)

    def forward(self, x: Tensor) -> Any:
        values = [self.first(x)]
        for block in self.blocks:
            block(values)
        return self.last(values[-1])


@pytest.mark.parametrize("stage", [pytest.param(1, marks=slow), INFINITY])
@in_ranks(WORLD_SIZE)
def test_a_list_that_a_unit_changes(rank: int, stage: int) -> None:
    """https://github.com/facebookresearch/fairscale/pull/701: inputs in lists and dicts."""
    check(rank, stage, AppendsNet)


# ---- weights that leave their unit


class ReturnsWeight(Net):
    is_view = False

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.scale[:2] if self.is_view else self.scale


class ReturnsView(ReturnsWeight):
    is_view = True


class ReturnsInDataclass(ReturnsWeight):
    def forward(self, x: Tensor) -> Any:
        return State(*super().forward(x))


def scaled_loss(model: Any, x: Tensor) -> Tensor:
    out = model(x)
    y, scale = out if isinstance(out, tuple) else (out.x, out.extra)
    return square(y) * scale.sum()


@pytest.mark.parametrize("make", [ReturnsWeight, ReturnsView])
@some(*SHARDED)
@in_ranks(WORLD_SIZE)
def test_a_model_that_returns_a_weight(rank: int, stage: int, make: Any) -> None:
    """https://github.com/mlfoundations/open_clip/pull/358: logit_scale; the process crashed."""
    check(rank, stage, make, scaled_loss)


@slow
@pytest.mark.parametrize("stage", SHARDED)
@in_ranks(WORLD_SIZE)
def test_a_weight_returned_in_a_dataclass_is_refused(rank: int, stage: int) -> None:
    """https://github.com/pytorch/pytorch/issues/82461: a weight is read outside of the forward."""
    with pytest.raises(RuntimeError, match=r"returned one of them in a State"):
        check(rank, stage, ReturnsInDataclass, scaled_loss)


class Embedded(Net):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8, **options)

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.embedding((x.abs() * 3).long().clamp(max=9)))


@in_ranks(WORLD_SIZE)
def test_an_embedding_that_renormalizes_its_weight_is_refused(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/37246: max_norm writes weights in the forward."""
    for stage in STAGES:
        model = Embedded(max_norm=0.5)
        with pytest.raises(ValueError, match=r"embedding\.weight equal on all ranks"):
            shard(model, sgd(model), stage)
    with pytest.raises(ValueError, match="max_norm"):
        WeightShards(Embedded(max_norm=0.5))


@slow
@each_stage
@in_ranks(WORLD_SIZE)
def test_an_embedding_with_padding(rank: int, stage: int) -> None:
    """https://github.com/pytorch/pytorch/issues/26596: embeddings whose rows are special."""
    check(rank, stage, lambda: Embedded(padding_idx=0))


# ---- optimizers, schedulers and flags


def one_cycle(model: Any, optimizer: Any, ranks: list[int], loss_of: Any) -> None:
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=8)
    for _ in range(2):
        train(model, optimizer, ranks, loss_of, num_steps=1)
        scheduler.step()
    assert optimizer.defaults.keys() & {"momentum", "betas"}


@pytest.mark.parametrize("kind", ["adamw", "momentum"])
@some(2, INFINITY)
@in_ranks(WORLD_SIZE)
def test_one_cycle(rank: int, stage: int, kind: str) -> None:
    """https://github.com/pytorch/pytorch/pull/113548: it looks for momentum in the defaults."""
    optimizer_of = adamw if kind == "adamw" else lambda model: sgd(model, momentum=0.9)
    check(rank, stage, Net, loop=one_cycle, optimizer_of=optimizer_of)


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=slow), 3])
@in_ranks(WORLD_SIZE)
def test_a_learning_rate_in_a_tensor(rank: int, stage: int) -> None:
    """https://github.com/pytorch/pytorch/issues/126670: lr=torch.tensor(...) is not a number."""

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01), eps=1e-4, foreach=False)

    check(rank, stage, Net, optimizer_of=adam)


def maximized(model: Any, optimizer: Any, ranks: list[int], loss_of: Any) -> None:
    for step in range(3):
        for group in optimizer.param_groups:
            group.update(maximize=step % 2 == 1, weight_decay=0.01 * step)
        train(model, optimizer, ranks, loss_of, num_steps=1)


@some(INFINITY)
@in_ranks(WORLD_SIZE)
def test_flags_that_are_set_between_steps(rank: int, stage: int) -> None:
    """https://github.com/pytorch/pytorch/issues/84485: groups change after the constructor."""
    check(rank, stage, Net, loop=maximized)


def without_zero_grad(model: Any, optimizer: Any, ranks: list[int], loss_of: Any) -> None:
    for step in range(3):
        if len(ranks) > 1:  # one process; an optimizer of zero.shard() has dropped its gradients
            optimizer.zero_grad()
        for rank in ranks:
            (loss_of(model, rows(step, rank)) / len(ranks)).backward()
        optimizer.step()


@slow
@each_stage
@in_ranks(WORLD_SIZE)
def test_a_step_drops_the_gradients(rank: int, stage: int) -> None:
    """https://github.com/deepspeedai/DeepSpeed/pull/6554: whose zero_grad() drops which."""
    check(rank, stage, Net, loop=without_zero_grad)


# ---- errors that a loop catches


class Fails(Block):
    """Raises in its forward or backward when it is told to."""

    where = ""

    def forward(self, x: Tensor) -> Any:
        if self.where == "forward":
            raise ArithmeticError
        y = super().forward(x)
        if self.where == "backward" and y.requires_grad:
            y.register_hook(self.fail)
        return y

    def fail(self, _: Tensor) -> None:
        raise ArithmeticError


def failing_forward(model: Any, optimizer: Any, ranks: list[int], loss_of: Any) -> None:
    """A micro-batch is left out."""
    for step in range(3):
        for rank in ranks:
            (loss_of(model, rows(step, rank)) / len(ranks)).backward()
        model.blocks[1].where = "forward"
        with pytest.raises(ArithmeticError):
            model(rows(9, ranks[0]))
        model.blocks[1].where = ""
        optimizer.step()
        optimizer.zero_grad()


@some(3)
@in_ranks(WORLD_SIZE)
def test_a_forward_that_fails_before_a_step(rank: int, stage: int) -> None:
    """https://github.com/pytorch/torchtitan/pull/3724: units stay as they were in the error."""
    if stage == 3 and TORCH_VERSION < (2, 13):
        pytest.skip("fully_shard has no reset_iter_state()")
    check(rank, stage, lambda: Net(Fails), loop=failing_forward)


def failing_backward(model: Any, optimizer: Any, ranks: list[int], loss_of: Any) -> None:
    """Out of memory, for instance: the batch is left out."""
    for step in range(3):
        model.blocks[0].where = "backward"
        with pytest.raises(ArithmeticError):
            loss_of(model, rows(9, ranks[0])).backward()
        model.blocks[0].where = ""
        optimizer.zero_grad()
        train(model, optimizer, ranks, lambda m, x, s=step: loss_of(m, x + s), num_steps=1)


@some(3)
@in_ranks(WORLD_SIZE)
def test_a_backward_that_fails(rank: int, stage: int) -> None:
    """https://github.com/pytorch/torchtitan/issues/1329: batches that do not fit are skipped."""
    if stage == 3 and TORCH_VERSION < (2, 13):
        pytest.skip("fully_shard has no reset_iter_state()")
    check(rank, stage, lambda: Net(Fails), loop=failing_backward)


# ---- several passes


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


@slow
@pytest.mark.parametrize("loss_of", [two_forwards, teacher, adversarial])
@each_stage
@in_ranks(WORLD_SIZE)
def test_several_forwards(rank: int, stage: int, loss_of: Any) -> None:
    """https://github.com/deepspeedai/DeepSpeed/pull/1227: several forwards before a backward."""
    check(rank, stage, Net, loss_of)


def apart(model: Any, optimizer: Any, ranks: list[int], loss_of: Any) -> None:
    for step in range(3):
        for rank in ranks:
            out = model(rows(step, rank))
            (square(out[:, :2]) / len(ranks)).backward(retain_graph=True)
            (out[:, 2:].abs().mean() / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()


@slow
@each_stage
@in_ranks(WORLD_SIZE)
def test_two_backwards_of_one_forward(rank: int, stage: int) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/3539: a graph that is retained."""
    check(rank, stage, Net, loop=apart)


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
        optimizer.step()
        optimizer.zero_grad()


@slow
@each_stage
@in_ranks(WORLD_SIZE)
def test_blocks_that_run_in_turn(rank: int, stage: int) -> None:
    """https://github.com/facebookresearch/fairscale/issues/796: a layer is left out of a step."""
    check(rank, stage, Alternates, loop=in_turn, optimizer_of=lambda m: sgd(m, momentum=0.9))


def toggled(model: Any, optimizer: Any, ranks: list[int], loss_of: Any) -> None:
    for step in range(4):
        model.blocks[step % 2].requires_grad_(False)
        for rank in ranks:
            (loss_of(model, rows(step, rank)) / len(ranks)).backward()
        model.blocks[step % 2].requires_grad_(True)
        optimizer.step()
        optimizer.zero_grad()


@slow
@each_stage
@in_ranks(WORLD_SIZE)
def test_weights_that_are_frozen_in_turn(rank: int, stage: int) -> None:
    """https://github.com/Lightning-AI/pytorch-lightning/issues/20138: toggle_optimizer()."""
    check(rank, stage, Net, loop=toggled)


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


@slow
@each_stage
@in_ranks(WORLD_SIZE)
def test_cells_in_a_loop_over_time(rank: int, stage: int) -> None:
    """https://github.com/facebookresearch/fairscale/pull/784: a unit runs several times."""
    check(rank, stage, Recurrent)


class Checkpointed(Net):
    kind = "units"

    def forward(self, x: Tensor) -> Any:
        def blocks(y: Tensor) -> Any:
            for block in self.blocks:
                is_nested = self.kind == "nested"
                y = checkpoint(block, y, use_reentrant=False) if is_nested else block(y)
            return y

        x = checkpoint(blocks, self.first(x), use_reentrant=self.kind == "reentrant")
        return self.last(x)


@slow
@pytest.mark.parametrize("kind", ["units", "nested", "reentrant"])
@each_stage
@in_ranks(WORLD_SIZE)
def test_a_checkpoint_over_several_units(rank: int, stage: int, kind: str) -> None:
    """https://github.com/pytorch/pytorch/issues/153354: units that run again in the backward."""

    def make() -> nn.Module:
        model = Checkpointed()
        model.kind = kind
        return model

    check(rank, stage, make)


# ---- hooks, contexts and weights that are computed


def with_hooks() -> nn.Module:
    model = Net()
    for block in model.blocks:
        before: Any = lambda _, grads: tuple(2 * g for g in grads)  # noqa: E731
        after: Any = lambda _, grads, __: tuple(g / 3 for g in grads)  # noqa: E731
        block.register_full_backward_pre_hook(before)
        block.register_full_backward_hook(after)
    return model


@slow
@each_stage
@in_ranks(WORLD_SIZE)
def test_backward_hooks_of_units(rank: int, stage: int) -> None:
    """https://github.com/pytorch/pytorch/issues/117925: hooks of modules change gradients."""
    check(rank, stage, with_hooks)


def saved_on_host(model: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return square(model(x))


def with_anomaly_detection(model: Any, x: Tensor) -> Tensor:
    with torch.autograd.detect_anomaly(check_nan=False):
        return square(model(x))


@slow
@pytest.mark.parametrize("loss_of", [saved_on_host, with_anomaly_detection])
@each_stage
@in_ranks(WORLD_SIZE)
def test_contexts_around_the_forward(rank: int, stage: int, loss_of: Any) -> None:
    """https://github.com/pytorch/pytorch/pull/70165: saved tensors, with weights, are copied."""
    check(rank, stage, Net, loss_of)


def normalized() -> nn.Module:
    model: Any = Net()
    for block in model.blocks:
        parametrizations.weight_norm(block.a)
        prune.l1_unstructured(block.b, "weight", 0.5)
    parametrizations.orthogonal(model.first)
    return model


@slow
@each_stage
@in_ranks(WORLD_SIZE)
def test_weights_that_are_computed(rank: int, stage: int) -> None:
    """https://github.com/pytorch/pytorch/issues/61470: weight_norm and other parametrizations."""
    check(rank, stage, normalized)


class Expanded(Block):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(1, 8))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * self.w.expand_as(x) + self.v.t().expand(8, len(x)).t()


@slow
@each_stage
@in_ranks(WORLD_SIZE)
def test_gradients_that_are_not_contiguous(rank: int, stage: int) -> None:
    """https://github.com/pytorch/pytorch/issues/98501: gradients that are views of others."""
    check(rank, stage, lambda: Net(Expanded), lambda model, x: 0.01 * model(x).sum())


def clamped(model: Any, optimizer: Any, ranks: list[int], loss_of: Any) -> None:
    for _ in range(2):
        train(model, optimizer, ranks, loss_of, num_steps=1)
        with torch.no_grad():
            for param in model.parameters():
                param.clamp_(-0.1, 0.1)


@slow
@each_stage
@in_ranks(WORLD_SIZE)
def test_weights_that_the_loop_clamps(rank: int, stage: int) -> None:
    """https://github.com/pytorch/pytorch/issues/117742: weights written between steps."""
    if stage == INFINITY:
        with pytest.raises(RuntimeError, match=r"clamp_\(\) of a weight that is sharded and freed"):
            check(rank, stage, Net, loop=clamped)
        return
    check(rank, stage, Net, loop=clamped)


def by_closure(model: Any, optimizer: Any, ranks: list[int], loss_of: Any) -> None:
    for step in range(3):

        def closure(step: int = step) -> float:
            optimizer.zero_grad()
            total = 0.0
            for rank in ranks:
                loss = loss_of(model, rows(step, rank)) / len(ranks)
                loss.backward()
                total += loss.item()
            return total

        assert optimizer.step(closure) > 0


@slow
@each_stage
@in_ranks(WORLD_SIZE)
def test_a_step_with_a_closure(rank: int, stage: int) -> None:
    """https://github.com/pytorch/pytorch/pull/46750: the closure of a sharded optimizer."""
    check(rank, stage, Net, loop=by_closure)
