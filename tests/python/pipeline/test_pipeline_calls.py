"""What a pipeline refuses, and says to change; the meta device and evaluation."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from curves import assert_weights, batch
from full_states import full_weights, load_full_weights
from pipeline_models import M, make_deep, make_tied, mse, token_batch, tokens_loss
from ranks import in_ranks, run_ranks
from steps import apply_steps
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from ringcomm import RingcommError
from ringcomm.integrations.transformers.pipeline import pipeline_blocks
from ringcomm.nn import MixtureOfExperts
from ringcomm.parallel import pipeline, set_state_dict


def make(model: Any = None, schedule: str = "1f1b", **options: Any) -> pipeline.Pipeline:
    given = make_deep() if model is None else model
    return pipeline.Pipeline(given, mse, schedule, options.pop("num_microbatches", M), **options)


class Named(nn.Module):
    """A model that is no row of blocks."""


@in_ranks(2)
def test_what_is_no_pipeline(rank: int) -> None:
    def refused(kind: type[Exception], message: str, *args: Any, **options: Any) -> None:
        with pytest.raises(kind, match=message):
            make(*args, **options)

    refused(TypeError, "blocks must be an nn.Sequential, .*got Named", Named())
    refused(TypeError, "block 1 must be an nn.Module, got int", [nn.Linear(8, 8), 3])
    refused(ValueError, "at least one block", nn.Sequential())
    refused(ValueError, "2 stages need 2 blocks or more, and the model has 1", [nn.Linear(8, 8)])
    refused(ValueError, "10 stages need 10 blocks or more, and the model has 9", None,
            "interleaved", num_stages_per_rank=5)  # fmt: skip
    refused(ValueError, "name of block a.b begins with that of block a,",
            {"a": nn.Linear(8, 8), "a.b": nn.Linear(8, 8)})  # fmt: skip
    refused(ValueError, "costs must have one element per block, got 2 for 9 blocks", costs=[1, 2])
    refused(ValueError, "loss_reduction must be", loss_reduction="none")
    refused(ValueError, "ranks disagree on the options", num_microbatches=4 + 4 * rank)
    refused(ValueError, "ranks disagree on the parameters' shapes",
            [nn.Linear(8, 8 + rank), nn.Linear(8, 8)], costs=[1, 1])  # fmt: skip
    refused(ValueError, "rank 1 would have no parameters, only 1,", [nn.Linear(8, 8), nn.Tanh()])
    bare = nn.ParameterList([torch.empty(2, device="meta")])
    message = "rank 0 has ValueError..0, a ParameterList, .* no reset_parameters.*rank 1 has None"
    refused(ValueError, message, [bare, nn.Linear(8, 8)])


def with_new_weights(stage: nn.Module) -> nn.Module:
    """As fully_shard does."""
    for module in stage.modules():
        for name, param in [*module.named_parameters(recurse=False)]:
            setattr(module, name, nn.Parameter(param.detach().clone()))
    return stage


@in_ranks(2)
def test_a_wrapper_that_replaces_weights(rank: int) -> None:
    """It ends the tie of two stages on one rank, and changes nothing else."""
    options: Any = {"num_microbatches": M, "wrap": with_new_weights, "count_items": Tensor.numel}
    with pytest.raises(ValueError, match="zbv puts two stages with a tied parameter on one rank"):
        pipeline.Pipeline(make_tied().blocks(), tokens_loss, "zbv", **options)
    for schedule in ("1f1b", "interleaved"):
        whole, wrapped = make(schedule=schedule), make(schedule=schedule, **options)
        assert torch.equal(whole.step(*batch(0)), wrapped.step(*batch(0)))


@in_ranks(2)
def test_what_is_no_step(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/126600: rows that micro-batches do not divide."""
    pipe = make()
    x, y = batch(0)

    def refused(kind: type[Exception], message: str, *args: Any) -> None:
        with pytest.raises(kind, match=message):
            pipe.step(*args)

    refused(ValueError, "12 rows of inputs do not divide into 8 micro-batches: use 8 or 16",
            x[:12], y[:12])  # fmt: skip
    refused(ValueError, "0 rows of inputs", x[:0], y[:0])
    refused(ValueError, "4 rows of inputs do not divide into 8 micro-batches: use 8 rows",
            x[:4], y)  # fmt: skip
    refused(ValueError, "the target have 8 rows, but the inputs 16", x, y[:8])
    refused(TypeError, "target must be tensors, got NoneType", x, None)
    refused(ValueError, r"stage 0 \(rank 0\) failed with float32\[2, 5\]: .*", x[:, :5], y)
    refused(ValueError, "ranks disagree on the inputs of a micro-batch", x.double() if rank else x,
            y)  # fmt: skip
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"call evaluate\(\)"):
        pipe.step(x, y)
    with pytest.raises(RuntimeError, match=r"call step\(..., record=True\)"):
        pipe.timeline()
    with pytest.raises(RuntimeError, match=r"a Pipeline cannot be called.* Call step\(\), eval"):
        pipe.module(x)
    with pytest.raises(AttributeError, match=r"a Pipeline has no 'generate'.*get_state_dict"):
        pipe.module.generate()
    for copied in (copy.deepcopy, pickle.dumps):
        for value in (pipe, pipe.module):
            with pytest.raises(RuntimeError, match="cannot be copied or pickled"):
                copied(value)
    assert not hasattr(pipe.module, "generate")
    first = pipe.step(x, y)  # nothing of this has done harm
    assert torch.equal(first, pipe.step(x, y))
    assert float(pipe.step(x[:8], y[:8])) != float(first)  # another shape


# ---- labels, and arguments of all blocks


def uneven_batch() -> tuple[Tensor, Tensor]:
    """Micro-batches have 6, 0, 5, 6, 6, ... labels."""
    x, y = token_batch(0)
    y = y.clone()
    y[2:4] = y[4, 0] = -100
    return x, y


def summed(logits: Tensor, target: Tensor, num_items_in_batch: float) -> Tensor:
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
    return loss / num_items_in_batch


@in_ranks(2)
def test_a_number_of_labels_that_is_given(rank: int) -> None:
    """With a tied weight. Labels that are counted: loss_rows.py."""
    x, y = uneven_batch()
    model = make_tied()
    expected = tokens_loss(model(x), y)
    expected.backward()
    options: dict[str, Any] = {"num_items": int((y != -100).sum())}
    pipe = pipeline.Pipeline(make_tied().blocks(), summed, num_microbatches=M)
    assert float(pipe.evaluate(x, y, **options)) == pytest.approx(expected.item(), rel=1e-6)
    assert float(pipe.step(x, y, **options)) == pytest.approx(expected.item(), rel=1e-6)
    for name, param in pipe.named_parameters():
        grad = model.get_parameter(name).grad
        torch.testing.assert_close(param.grad, grad, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="all are -100" if rank else "rank 1 has ValueError"):
        pipe.step(x, torch.full_like(y, -100))


class Scaled(nn.Linear):
    """A block that gets an argument which the others do not know."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        return y if scale is None else y * scale[:, None]


@pytest.mark.parametrize("recompute", [False, True])
@in_ranks(2)
def test_arguments_of_all_blocks(rank: int, recompute: bool) -> None:
    torch.manual_seed(5)
    model = nn.Sequential(Scaled(8, 8), nn.Tanh(), Scaled(8, 8), nn.Tanh(), Scaled(8, 3))
    x, y = batch(0)
    scale = torch.rand(len(x))
    value = x
    for block in model:
        value = block(value, scale) if isinstance(block, Scaled) else block(value)
    expected = mse(value, y)
    pipe = make(model, "interleaved", recompute=recompute)
    found = pipe.step(x, y, kwargs={"scale": scale})
    assert float(found) == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(pipe.forward(x, kwargs={"scale": scale}), value)
    assert float(pipe.evaluate(x, y)) != pytest.approx(expected.item(), rel=1e-3)
    with pytest.raises(TypeError, match="no block of the pipeline has a parameter mask"):
        pipe.step(x, y, kwargs={"mask": scale})
    with pytest.raises(ValueError, match="scale is on the meta device"):
        pipe.step(x, y, kwargs={"scale": scale.to("meta")})


def fail(*_: Any) -> None:
    raise ArithmeticError("out of memory, say")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("shape", "was the model changed after the Pipeline was made? Make a new Pipeline"),
        ("frozen", "weights were frozen, unfrozen or added after the first step"),
        ("fails", "out of memory, say"),
    ],
)
@in_ranks(2, fresh=True, timeout_s=20.0)
def test_blocks_that_change_after_the_first_step(rank: int, change: str, message: str) -> None:
    """One rank knows what happened, and the other does not wait for the time-out of 30 s."""
    pipe = make()
    pipe.step(*batch(0))
    if rank == 0:
        block: Any = pipe.module.get_submodule(pipe.stages[0][-1])
        if change == "shape":
            block.forward = lambda x: x[:, :4]
        elif change == "frozen":
            block.requires_grad_(False)
        else:
            block.register_forward_pre_hook(fail)
    with pytest.raises((ValueError, ArithmeticError, RingcommError)) as caught:
        pipe.step(*batch(1))
    assert ("rank 0" if rank else message) in str(caught.value)


def build_on_meta(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    with torch.device("meta"):
        model = make_tied()
    torch.manual_seed(rank)
    pipe = pipeline.Pipeline(model.blocks(), tokens_loss, "1f1b", M, count_items=Tensor.numel)
    others = [name for name, p in model.named_parameters() if p.is_meta]
    assert others, "blocks of other ranks stay where they were"
    loss = pipe.step(*token_batch(0))
    assert loss.isfinite()
    with pytest.raises(ValueError, match="do not divide"):  # and gradients stay
        pipe.step(*(part[:7] for part in token_batch(0)))
    assert sum(p.numel() for p in pipe.parameters()) < sum(p.numel() for p in model.parameters())
    state = full_weights(pipe)
    with torch.no_grad():
        for param in pipe.parameters():
            param.zero_()
    load_full_weights(pipe, state)
    assert_weights(full_weights(pipe), state, atol=0)
    return state, {k: p.grad for k, p in pipe.named_parameters()}  # type: ignore[misc]


def test_models_on_the_meta_device() -> None:
    """Each rank gives values to its own blocks; a shared weight has those of the first."""
    results = run_ranks(2, build_on_meta)
    state = results[0][0]
    assert torch.equal(state["embed.weight"], state["head.weight"])
    assert torch.equal(results[0][1]["embed.weight"], results[1][1]["head.weight"])
    model = make_tied()
    model.load_state_dict(state)
    x, y = token_batch(0)
    tokens_loss(model(x), y).backward()
    grad = model.embed.weight.grad
    assert grad is not None
    torch.testing.assert_close(results[0][1]["embed.weight"], grad, rtol=0, atol=1e-6)


class Odd(nn.Module):
    """Tuples between blocks, with an integer and views; dropout, and a count in a buffer."""

    def __init__(self, is_view: bool) -> None:
        super().__init__()
        self.is_view = is_view
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)
        self.num_calls: Tensor
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        self.num_calls += 1
        if int(ids.max()) < 0:  # looks at values
            x = x + 1
        y = self.dropout(self.linear(x))
        return (y.view_as(y) if self.is_view else y.t().contiguous().t()), ids


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.linear(x) + ids.unsqueeze(1)


def make_odd() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Odd(i % 2 == 0) for i in range(5)), Head())


def whole_odd(model: nn.Sequential, x: Tensor, ids: Tensor) -> Tensor:
    value: Any = (x, ids)
    for block in model:
        value = block(*value)
    return value


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@in_ranks(2)
def test_evaluation_and_odd_blocks(rank: int, schedule: str) -> None:
    pipe = make(make_odd(), schedule, costs=[1] * 6)
    x, y = batch(0)
    ids = torch.arange(16)
    with torch.no_grad():
        expected = mse(whole_odd(make_odd().eval(), x, ids), y)
    if schedule == "1f1b":  # a rank that lacks an end of the model needs shapes alone
        x, ids, y = (x, ids, y.to("meta")) if rank == 0 else (x.to("meta"), ids.to("meta"), y)
    counts = [b for n, b in pipe.module.named_buffers() if n.endswith("num_calls")]
    pipe.module.eval()
    found = float(pipe.evaluate((x, ids), y))
    again = float(pipe.evaluate((x, ids), y))
    assert found == again
    pipe.module.train()
    trained = float(pipe.step((x, ids), y))
    assert trained != found
    assert {int(count) for count in counts} == {3 * M}  # shapes were found without a trace
    assert found == pytest.approx(expected.item(), rel=1e-6)


class Counts(nn.Module):
    """Counts its forward passes as BatchNorm does, and the rows of all."""

    num_calls: Tensor
    num_rows: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("num_calls", torch.zeros(1, dtype=torch.long))
        self.register_buffer("num_rows", torch.zeros(2, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.num_rows.add_(len(x))
        return self.norm(x)


@in_ranks(2)
def test_new_shapes_of_inputs_change_no_buffer(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/159942"""
    pipe = make([nn.Linear(8, 8), Counts(), Counts()], costs=[2, 1, 1])
    for num_rows in (2 * M, 3 * M, 4 * M):
        pipe.step(torch.ones(num_rows, 8), torch.ones(num_rows, 8))
    values = full_weights(pipe.module)
    for name in ("1", "2"):
        counted = [f"{name}.norm.num_batches_tracked", f"{name}.num_calls"]
        assert [int(values[key]) for key in counted] == [3 * M] * 2
        assert values[f"{name}.num_rows"].tolist() == [9 * M] * 2


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@in_ranks(2)
def test_shapes_that_change_between_accumulated_steps(rank: int, schedule: str) -> None:
    """https://github.com/NVIDIA-NeMo/Automodel/pull/3530: no gradient is lost."""
    pipe, plain = make(schedule=schedule), nn.Sequential(*make_deep())
    for num_rows in (M, 2 * M, M):
        x, y = (part[:num_rows] for part in batch(0))
        pipe.step(x, y)
        mse(plain(x), y).backward()
    own = dict(pipe.named_parameters())
    assert own
    for name, param in plain.named_parameters():
        if name in own:
            torch.testing.assert_close(own[name].grad, param.grad)


@in_ranks(2)
def test_refused_steps_leave_the_group_whole(rank: int) -> None:
    """Values that only one rank misses, and a weight that is frozen after the first step."""
    pipe = make()
    x, y = batch(0)
    for inputs, target in ((x.to("meta"), y), (x, y.to("meta"))):
        message = r"is on the meta device, but this rank's|ranks disagree on the inputs"
        with pytest.raises(ValueError, match=message):
            pipe.step(inputs, target)
    pipe.step(x if rank == 0 else x.to("meta"), y if rank == 1 else y.to("meta"))
    weight = next(pipe.parameters())
    weight.requires_grad_(rank > 0)
    with pytest.raises(ValueError, match=r"weights were frozen|rank 0 has ValueError"):
        pipe.step(x, y)
    pipe.evaluate(x, y)
    weight.requires_grad_(True)
    assert pipe.step(x, y).isfinite()


class WritesInTraining(nn.Linear):
    """As with nn.Dropout(inplace=True)."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x.mul_(2)
        return super().forward(x)


@in_ranks(2)
def test_a_block_that_writes_its_input_in_training(rank: int) -> None:
    """An evaluation before the first step does not write."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), WritesInTraining(8, 3))
    pipe = make(model, costs=[1, 1])
    x, y = batch(0)
    for training in (False, True):
        model.train(training)
        pipe.module.train(training)
        expected = mse(model(x), y).item()
        found = pipe.step(x, y) if training else pipe.evaluate(x, y)
        assert float(found) == pytest.approx(expected, rel=1e-6)


class ReadsValues(nn.Linear):
    """Fake tensors have none."""

    def forward(self, x: Tensor) -> Tensor:
        assert bool(x.detach().isfinite().all())
        return super().forward(x)


RESETS = hasattr(FSDPModule, "reset_iter_state")  # after an error, from torch 2.13 on


@pytest.mark.parametrize(
    "kind",
    [
        nn.Linear,
        pytest.param(ReadsValues, marks=pytest.mark.skipif(not RESETS, reason="torch >= 2.13")),
    ],
)
@in_ranks(4, timeout_s=60.0)
def test_stages_of_fully_shard_are_made_again(rank: int, kind: Any) -> None:
    """For another mode and other rows, also of some data-parallel ranks alone.

    The weights are gathered anew, after an evaluation too.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))

    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), kind(8, 8), nn.Linear(8, 8), nn.Linear(8, 3))

    options: dict[str, Any] = {"mesh": mesh["pp"], "costs": [1] * 4}
    wrap = partial(fully_shard, mesh=mesh["dp"])
    whole, pipe = made(), make(made(), "interleaved", wrap=wrap, **options)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (whole, pipe)]
    if RESETS:
        with pytest.raises(ValueError, match=r"stage 0 \(rank 0\) failed"):
            pipe.step(torch.ones(M, 7), torch.ones(M, 3))
        with torch.no_grad():
            for param in (*whole.parameters(), *pipe.parameters()):
                param.mul_(1.5)
    # A forward pass with values gathers weights, so that all data-parallel ranks must make it.
    for num_rows in ((M, M), (2 * M, M if kind is nn.Linear else 2 * M), (3 * M, 3 * M)):
        for training in (False, True):
            whole.train(training)
            pipe.module.train(training)
            parts = [(torch.randn(num, 8), torch.randn(num, 3)) for num in num_rows]
            losses = [mse(whole(x.clone()), y) for x, y in parts]
            found = (pipe.step if training else pipe.evaluate)(*parts[rank // 2])
            assert float(found) == pytest.approx(float(losses[rank // 2]), rel=1e-5)
            if training:
                torch.stack(losses).mean().backward()
                apply_steps(*optimizers)


@pytest.mark.parametrize("rank0_only", [False, True])
@pytest.mark.parametrize("given", ["embed.weight", "head.weight"])
@in_ranks(2)
def test_a_tied_weight_is_loaded_by_any_of_its_names(
    rank: int, given: str, rank0_only: bool
) -> None:
    model = make_tied()
    pipe = pipeline.Pipeline(model.blocks(), tokens_loss, "1f1b", M, count_items=Tensor.numel)
    value = torch.full_like(model.embed.weight, 0.25).detach()
    values = {} if rank0_only and rank > 0 else {given: value}
    with pytest.raises(ValueError, match="lacks"):
        set_state_dict(pipe, None, values, rank0_only=rank0_only)
    set_state_dict(pipe, None, values, rank0_only=rank0_only, strict=False)
    own = "head.weight" if rank else "embed.weight"
    assert torch.equal(pipe.module.get_parameter(own), value)


@in_ranks(4, timeout_s=60.0)
def test_experts_in_stages_and_shapes_that_are_new_to_some_ranks(rank: int) -> None:
    """Ranks 0 and 1, and 2 and 3, are pipelines; stages share experts over the pipelines."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "pp"))
    torch.manual_seed(0)
    router, experts = nn.Linear(8, 4, bias=False), [nn.Linear(8, 8) for _ in range(4)]
    alone = [dist.new_group([r]) for r in range(4)][rank]

    def made(group: Any) -> list[nn.Module]:
        options: Any = {"top_k": 1, "group": group}
        layers = [MixtureOfExperts.from_experts(router, experts, **options) for _ in range(2)]
        torch.manual_seed(1)
        return [nn.Linear(8, 8), layers[0], layers[1], nn.Linear(8, 3)]

    whole = nn.Sequential(*made(alone))
    pipe = make(made(mesh["ep"].get_group()), mesh=mesh["pp"], costs=[1] * 4)
    for shape in ((M, 8), (M, 1 + rank // 2, 8), (M * (2 - rank // 2), 8)):
        torch.manual_seed(rank // 2)
        x, y = torch.randn(shape), torch.randn(*shape[:-1], 3)
        for _ in range(2):
            assert float(pipe.step(x, y)) == pytest.approx(float(mse(whole(x), y)), rel=1e-5)


def test_blocks_of_a_module_that_is_no_language_model() -> None:
    with pytest.raises(TypeError, match="Linear is not a model of transformers"):
        pipeline_blocks(nn.Linear(2, 2))
