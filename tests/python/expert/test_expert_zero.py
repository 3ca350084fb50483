"""zero.shard() of models with sharded experts: the steps of one process, bytes, states, meshes, and
checkpoints between meshes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import covering, slow
from full_states import (
    full_state,
    full_weights,
    load_full_state,
    load_full_weights,
    load_parts,
    save_parts,
)
from gradient_watch import gradients_of, states_of
from oracle import all_equal
from ranks import in_ranks, run_ranks
from rows import adamw, muon
from steps import apply_steps, train_step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from whole_optimizers import Averaged
from zero_models import assert_alike, assert_close, live_bytes, same, sent_bytes

from ringcomm.nn import ColumnParallelLinear, MixtureOfExperts
from ringcomm.parallel import ParallelDims, clip_grad_norm_, expert, offload, parallelize, zero
from ringcomm.parallel.optimizer_classes import optimizers_of

STEPS, ROWS = 4, 24


class Net(nn.Module):
    """Layers of odd sizes around experts, in a mesh of expert-parallel ranks and replicas."""

    def __init__(self, num_experts: int, *groups: dist.ProcessGroup | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        options: Any = dict(zip(("group", "replica_group"), groups, strict=True))
        self.first = nn.Linear(6, 7)
        self.moe = MixtureOfExperts(
            7, self.make_expert, num_experts, min(2, num_experts), **options
        )
        self.last = nn.Linear(7, 3)

    @staticmethod
    def make_expert() -> nn.Module:
        return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 7))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        out: Tensor = self.last(x + self.moe(x))
        return out


def alone(rank: int) -> dist.ProcessGroup:
    made: Any = dist.new_group([rank], use_local_synchronization=True)
    return made


def mesh(rank: int, world_size: int, num_shards: int) -> tuple[Any, Any]:
    """The ranks that share the experts, and those with the same."""
    rows = [dist.new_group([*range(i, i + num_shards)]) for i in range(0, world_size, num_shards)]
    columns = [dist.new_group([*range(j, world_size, num_shards)]) for j in range(num_shards)]
    has_replicas = num_shards < world_size
    return rows[rank // num_shards], columns[rank % num_shards] if has_replicas else None


def make_optimizer(kind: str, model: nn.Module) -> Any:
    params = [*model.parameters()]
    if kind == "offloaded":
        return offload.Offloaded(torch.optim.AdamW(params, 0.02, eps=1e-3), to="cpu")
    if kind == "adamw":
        return adamw(model)
    if kind == "sgd":
        return torch.optim.SGD(params, 0.1, momentum=0.9)
    if kind == "adafactor":
        return torch.optim.Adafactor(params, 0.02, eps=(1e-6, 1e-3))
    both = muon(model)
    return [offload.Offloaded(each) for each in both] if kind == "muon offloaded" else both


def train(
    model: Any, optimizer: Any, steps: range, place: tuple[int, int], clip: float | None = None
) -> None:
    """Two micro-batches a step; `clip` for one process."""
    rank, world_size = place
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x, y = (torch.randn(2, ROWS, size, generator=generator) for size in (6, 3))
        for part, target in zip(x, y, strict=True):
            own, wanted = part.chunk(world_size)[rank], target.chunk(world_size)[rank]
            loss = nn.functional.mse_loss(model(own).float(), wanted)
            (optimizer.scale(loss) if hasattr(optimizer, "scale") else loss).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        apply_steps(*optimizers_of(optimizer))


# Kinds of optimizers for ZeRO-Infinity, and the same in memory.
IN_MEMORY = {"offloaded": "adamw", "muon offloaded": "muon"}


def plain_after(num_experts: int, kind: str, clip: Any, rank: int) -> Net:
    """One process after two steps."""
    model = Net(num_experts, alone(rank), None)
    train(model, make_optimizer(kind, model), range(2), (0, 1), clip)
    return model


@pytest.mark.parametrize(
    ("world_size", "num_shards", "num_experts", "stage", "kind", "clip"),
    [
        (2, 2, 4, 1, "adamw", None),
        (2, 2, 4, 2, "sgd", 0.1),
        (4, 2, 3, 1, "muon", 0.1),
        slow(4, 2, 4, 2, "adamw", 0.1),
        (4, 4, 3, 2, "muon", None),  # a rank without experts
        (4, 2, 4, 2, "adafactor", None),
        slow(2, 2, 4, 3, "adamw", None),
        slow(2, 2, 3, 3, "sgd", 0.1),
        slow(4, 2, 3, 3, "muon", 0.1),
        (4, 2, 4, 3, "adamw", 0.1),
        (4, 4, 3, 3, "muon", None),
        (4, 2, 4, 3, "adafactor", None),
        (2, 2, 3, 3, "offloaded", None),
        slow(4, 2, 4, 3, "offloaded", 0.1),
        slow(4, 4, 3, 3, "offloaded", 0.1),
        slow(2, 2, 3, 3, "muon offloaded", None),
        slow(4, 2, 4, 3, "muon offloaded", 0.1),
        (4, 4, 3, 3, "muon offloaded", None),
    ],
)
@in_ranks()
def test_steps_are_those_of_one_process(
    rank: int, world_size: int, num_shards: int, num_experts: int, stage: int, kind: str, clip: Any
) -> None:
    """Gradients of experts have their size: https://github.com/deepspeedai/DeepSpeed/issues/6545,
    https://github.com/deepspeedai/DeepSpeed/issues/5618; each counts once in the norm:
    https://github.com/deepspeedai/DeepSpeed/issues/8475,
    https://github.com/hpcaitech/ColossalAI/issues/2192.
    """
    plain, is_infinity = Net(num_experts, alone(rank), None), kind in IN_MEMORY
    given = make_optimizer(IN_MEMORY.get(kind, kind), plain)
    train(plain, given, range(STEPS), (0, 1), clip)
    place = rank, world_size
    groups = mesh(rank, world_size, num_shards)
    model = Net(num_experts, *groups)
    own = make_optimizer(kind, model)
    options: dict[str, Any] = {"loss_scale": 64.0, "clip_grad_norm": clip} if clip else {}
    options |= {"offload_weights": True} if is_infinity else {}
    arguments = model, own, stage
    memory = zero.predict_memory(*arguments, world_size=world_size, rank=rank, **options)
    optimizer = zero.shard(*arguments, bucket_bytes=300, **options)
    train(model, optimizer, range(2), place)
    state = full_state(optimizer)
    train(model, optimizer, range(2, STEPS), place)
    assert_close(full_weights(model), full_weights(plain), 2e-6)
    assert live_bytes(states_of(optimizer)) == pytest.approx(memory.states, rel=0.05)
    # A whole state goes on where ranks have other experts, at another stage, and in one process.
    again, next_stage = Net(num_experts, alone(rank), None), 3 if is_infinity else stage % 3 + 1
    made = make_optimizer(kind, again)
    resumed = zero.shard(again, made, next_stage, group=alone(rank), **options)
    of_plain = plain_after(num_experts, IN_MEMORY.get(kind, kind), clip, rank)
    load_full_weights(again, full_weights(of_plain))
    load_full_state(resumed, state)
    train(again, resumed, range(2, STEPS), (0, 1))
    assert_close(full_weights(again), full_weights(plain), 2e-6)
    native = optimizer.state_dict()
    optimizer.load_state_dict(native)


@pytest.mark.parametrize(
    ("stage", "sizes"),
    [(1, {}), (2, {}), (3, {"dp": 1, "fsdp": 4}), (3, {"dp": 2, "fsdp": 2})],
    ids=str,
)
@in_ranks(4)
def test_parallelize(rank: int, stage: int, sizes: dict[str, Any]) -> None:
    """One call: experts over 2 ranks, 2 replicas; at stage 3 also with replicas of the rest."""
    dims = ParallelDims(**sizes, ep=2)
    plain = Net(4, alone(rank), None)
    given = make_optimizer("adamw", plain)
    model = Net(4, dims.group("ep"), dims.group("edp"))
    job = parallelize(
        model,
        dims,
        lambda params: torch.optim.AdamW(params, 0.02, eps=1e-3),
        loss_fn=nn.functional.mse_loss,
        zero_stage=stage,
    )
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x, y = (torch.randn(ROWS, size, generator=generator) for size in (6, 3))
        train_step(nn.functional.mse_loss(plain(x), y), given)
        job.step(x.chunk(4)[rank], y.chunk(4)[rank])
        apply_steps(job.optimizer)
    assert_close(full_weights(job), full_weights(plain), 2e-6)


@pytest.mark.parametrize(
    ("of_kind", "num_shards"),
    covering(
        [*itertools.product(("adamw", "muon"), (1, 2, 3)), *((kind, 3) for kind in IN_MEMORY)],
        [2, 4],
    ),
)
@in_ranks(4)
def test_bytes_of_a_step(rank: int, of_kind: tuple[str, int], num_shards: int) -> None:
    """Without the tokens; the passes send these and gradients, the step also rows to owners."""
    kind, stage = of_kind
    # With rounds of whole weights ranks with fewer experts take part in those of the others.
    model = Net(4 if kind == "muon offloaded" else 3, *mesh(rank, 4, num_shards))
    arguments = model, make_optimizer(kind, model), stage
    options: dict[str, Any] = {"clip_grad_norm": 0.1, "offload_weights": kind in IN_MEMORY}
    expected = zero.predict_traffic(*arguments, world_size=4, rank=rank, **options)
    optimizer = zero.shard(*arguments, **options)
    train(model, optimizer, range(1), (rank, 4))
    before = sent_bytes()
    model(torch.ones(4, 6)).square().mean().backward()
    passed = sent_bytes()
    tokens = sum(passed[name] - before[name] for name in passed if "all_to_all" in name)
    optimizer.step()
    assert sum(sent_bytes().values()) - sum(before.values()) - tokens == expected


@pytest.mark.parametrize("stage", [1, 2, 3])
@in_ranks(4)
def test_memory_is_what_was_predicted(rank: int, stage: int) -> None:
    torch.manual_seed(0)
    make_expert = lambda: nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))  # noqa: E731
    groups: Any = dict(zip(("group", "replica_group"), mesh(rank, 4, 2), strict=True))
    layer = MixtureOfExperts(64, make_expert, 3, **groups)
    model: Any = nn.Sequential(nn.Linear(64, 64), layer, nn.Linear(64, 64))
    arguments = model, torch.optim.AdamW(model.parameters()), stage
    expected = zero.predict_memory(*arguments, world_size=4, rank=rank)
    optimizer = zero.shard(*arguments)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        found = live_bytes(grads if stage == 3 else gradients_of(optimizer))
        optimizer.step()
    assert found == pytest.approx(expected.gradients, rel=0.05)
    assert live_bytes(model.parameters()) == pytest.approx(expected.parameters, rel=0.05)
    assert live_bytes(states_of(optimizer)) == pytest.approx(expected.states, rel=0.05)


def only(*names: str) -> Callable[[nn.Module], None]:
    """Trains the weights with these parts of names alone."""

    def freeze(model: nn.Module) -> None:
        for own, param in model.named_parameters():
            param.requires_grad_(any(name in own for name in names))

    return freeze


def one_choice(model: Any) -> None:
    """Equal probabilities: the first two experts get all tokens."""
    model.moe.router.weight.requires_grad_(False).zero_()


def frozen_experts(model: Any) -> None:
    model.moe.experts.requires_grad_(False)


def two_experts_alone(model: Any) -> None:
    """All tokens go to the first two, which are one rank's."""
    with torch.no_grad():
        model.first.bias.fill_(9)
        model.moe.router.weight.zero_()
        model.moe.router.weight[:2] = torch.tensor([[5.0], [4.0]])


def two_experts_only(model: Any) -> None:
    two_experts_alone(model)
    only("experts")(model)


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), 0.5)


def averaged(model: nn.Module) -> Any:
    made = Averaged(model.parameters())
    made.train()
    return made


@dataclasses.dataclass(frozen=True)
class Variant:
    """What is trained, and by which optimizer; over how many ranks experts are; ranks' rows."""

    prepare: Callable[[Any], None] = lambda _: None
    num_shards: int = 2
    make: Callable[[Any], Any] = sgd
    num_rows: tuple[int, ...] = (6, 6, 6, 6)
    after_first: Callable[[Any], Any] = lambda _: None


VARIANTS: dict[str, Variant] = {
    "all": Variant(),
    "an expert without tokens": Variant(one_choice, 4),
    "frozen experts": Variant(frozen_experts),
    # A rank has none: https://github.com/ScienceOne-AI/DeepSeek-671B-SFT-Guide/issues/7.
    "only experts": Variant(only("experts"), 4),
    "only router": Variant(only("router")),
    "only first": Variant(only("first")),
    "only last experts": Variant(only("last", "experts")),
}
# At stages 1 and 2.
REPORTED: dict[str, Variant] = {
    # With Muon, of which experts have an owner among their replicas.
    "thawed": Variant(
        only("last"), make=muon, after_first=lambda model: model.requires_grad_(True)
    ),
    "only experts, adamw": Variant(only("experts"), 4, adamw),
    "only experts, muon": Variant(only("experts"), 4, muon),
    "two experts, adamw": Variant(two_experts_only, 2, adamw),
    "two experts, muon": Variant(two_experts_only, 2, muon),
    # https://github.com/NVIDIA/Megatron-LM/pull/4851, https://github.com/NVIDIA-NeMo/Automodel/pull/935:
    # of its own, or for its experts.
    "a rank without tokens": Variant(num_rows=(12, 0, 6, 6), make=adamw),
    "tokens of two experts": Variant(two_experts_alone, 4, adamw),
    # https://github.com/deepspeedai/DeepSpeed/issues/7156: their states are sharded, too.
    "schedule-free": Variant(make=averaged),
}


def train_variant(
    model: Any, optimizer: Any, variant: Variant, ranks: list[int], keeps: bool = False
) -> list[float]:
    """Each step has two micro-batches, of the rows of some ranks; returns the norms."""
    norms = []
    for step in range(3):
        for micro_batch in range(2):
            generator = torch.Generator().manual_seed(2 * step + micro_batch)
            x, y = (torch.randn(ROWS, size, generator=generator) for size in (6, 3))
            with optimizer.no_sync() if keeps and micro_batch == 0 else nullcontext():
                for rank in ranks:
                    own, wanted = (part.split(variant.num_rows)[rank] for part in (x, y))
                    # A sum: ranks may have different numbers of rows.
                    loss = (model(own) - wanted).square().sum() * 4 / (3 * ROWS)
                    loss = loss + 0.1 * model.moe.routing.router_z_loss
                    (loss / len(ranks)).backward()
        if not hasattr(optimizer, "no_sync"):
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        apply_steps(*optimizers_of(optimizer))
        norms += [optimizer.grad_norm] if hasattr(optimizer, "no_sync") else []
        if step == 0:
            variant.after_first(model)
    return norms


@pytest.mark.parametrize(
    ("name", "stage"),
    [*covering(VARIANTS, [1, 2, 3, "infinity"]), *itertools.product(REPORTED, [1, 2])],
)
@in_ranks(4)
def test_what_is_trained(rank: int, stage: Any, name: str) -> None:
    """With no_sync(), the routers' loss, which does not pass the experts, and clipping.

    Ranks that wait for an expert without tokens or for a rank without experts:
    https://github.com/deepspeedai/DeepSpeed/issues/4808. Gradients of experts that
    are divided by too few ranks: https://github.com/NVIDIA/Megatron-LM/pull/5956. Frozen parts:
    https://github.com/NovaSky-AI/SkyRL/pull/1568, https://github.com/modelscope/ms-swift/issues/5512
    """
    variant = {**VARIANTS, **REPORTED}[name]
    plain, model = Net(3, alone(rank), None), Net(3, *mesh(rank, 4, variant.num_shards))
    for each in (plain, model):
        variant.prepare(each)
    norms = train_variant(plain, variant.make(plain), variant, [*range(4)])
    own = variant.make(model)
    options: dict[str, Any] = {"bucket_bytes": 300} if stage in (1, 2) else {"units": [model.moe]}
    if stage == "infinity":
        own = offload.Offloaded(own, to="cpu")
        options["offload_weights"] = True
    keeps = stage != "infinity"
    stage = 3 if stage == "infinity" else stage
    optimizer: Any = zero.shard(model, own, stage, clip_grad_norm=0.1, **options)
    assert train_variant(model, optimizer, variant, [rank], keeps) == pytest.approx(norms, rel=1e-4)
    assert_close(full_weights(model), full_weights(plain), 2e-6 if name in VARIANTS else 5e-6)


@pytest.mark.parametrize("stage", [1, 3])
@in_ranks(4)
def test_norm_beside_tensor_parallelism(rank: int, stage: int) -> None:
    """The ranks of the experts are all data ranks, by the same group: one sum of both."""
    plain = Net(4, alone(rank), None)
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0))
    plain(x).square().mean().backward()
    grads: Any = [param.grad for param in plain.parameters()]
    expected = nn.utils.get_total_norm(grads)
    data, tensors = mesh(rank, 4, 2)
    model: Any = Net(4, data, None)
    model.first = ColumnParallelLinear.from_linear(model.first, group=tensors, gather_output=True)
    own = torch.optim.SGD(model.parameters(), 0.1)
    options: dict[str, Any] = {"loss_scale": 2.0}
    optimizer = zero.shard(model, own, stage, group=data, **options)
    optimizer.scale(model(x[data.rank()]).square().mean()).backward()
    torch.testing.assert_close(optimizer.clip_grad_norm_(torch.inf), expected)


@in_ranks(4)
def test_ranks_use_different_layers(rank: int) -> None:
    """Rank 1 uses neither the first layer nor the last one in some passes.

    Stage 2 must not wait for a rank that waits for this one's tokens.
    """
    found = []
    for stage in (1, 2):
        model = Net(4, *mesh(rank, 4, 2))
        optimizer = zero.shard(model, make_optimizer("sgd", model), stage, bucket_bytes=100)
        for step in range(3):
            for part in range(2):
                generator = torch.Generator().manual_seed(10 * step + part)
                x = torch.randn(4, 5, 6, generator=generator)[rank]
                if rank == 1 and part == 0:
                    hidden = model.moe(nn.functional.pad(x, (0, 1)))
                    hidden.square().mean().backward()
                else:
                    model(x).square().mean().backward()
            apply_steps(optimizer)
        found.append(full_weights(model))
        assert_alike(found[-1])
    assert_close(found[1], found[0], 2e-6)


@in_ranks(2)
def test_errors_at_stage_3(rank: int) -> None:
    model: Any = Net(2, *mesh(rank, 2, 2))
    params = [*model.parameters()]
    half = {"param_dtype": torch.float16, "reduce_dtype": torch.float16}
    with pytest.raises(ValueError, match=r"a reduce_dtype of torch\.float32 or torch\.bfloat16"):
        zero.shard(model, torch.optim.SGD(params), 3, **half)  # type: ignore[arg-type]
    model.tied = model.moe.experts[f"{rank}"][2]
    for stage in (1, 2, 3):
        with pytest.raises(ValueError, match="is in sharded experts and elsewhere in the model"):
            zero.shard(model, torch.optim.SGD(params), stage)
    del model.tied
    optimizer = zero.shard(model, torch.optim.SGD(params), 3)
    model(torch.ones(2, 6)).square().mean().backward()
    before = [param.grad.to_local().clone() for param in model.parameters()]
    with pytest.raises(RuntimeError, match="gradients are in the optimizer"):
        expert.average_gradients(model)
    with pytest.raises(RuntimeError, match=r"use ringcomm\.parallel\.clip_grad_norm_"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    after = [param.grad.to_local() for param in model.parameters()]
    assert all_equal(before, after)
    assert clip_grad_norm_(model, torch.inf) == pytest.approx(float(optimizer.clip_grad_norm_(1.0)))


@in_ranks(4)
def test_errors(rank: int) -> None:
    shards, replicas = mesh(rank, 4, 2)
    model = Net(4, shards, None)  # the user forgot them
    before = {name: param.clone() for name, param in model.named_parameters()}
    with pytest.raises(ValueError, match=r"4 data-parallel ranks, but moe\.experts.* in 1 rep"):
        zero.shard(model, torch.optim.SGD(model.parameters()), 2)
    known = Net(4, shards, replicas)
    optimizer = zero.shard(known, torch.optim.SGD(known.parameters()), 2)
    with pytest.raises(ValueError, match="already has an optimizer that takes its gradients"):
        zero.shard(known, torch.optim.SGD(known.parameters()), 2)
    nn.functional.mse_loss(known(torch.ones(2, 6)), torch.ones(2, 3)).backward()
    with pytest.raises(RuntimeError, match="gradients are in the optimizer"):
        expert.average_gradients(known)
    assert same(dict(model.named_parameters()), before)
    del optimizer


@pytest.mark.parametrize(("stage", "kind"), [(1, "sgd"), (2, "sgd"), (3, "sgd"), (3, "offloaded")])
@in_ranks(4)
def test_from_the_meta_device(rank: int, stage: int, kind: str) -> None:
    """No two experts are equal, which they would be if ranks drew the same numbers.

    https://github.com/laekov/fastmoe/pull/4
    """
    found = []
    for num_shards in (2, 4):
        with torch.device("meta"):
            model = Net(4, *mesh(rank, 4, num_shards))
        torch.manual_seed(5)
        options: dict[str, Any] = {"offload_weights": kind == "offloaded"}
        optimizer = zero.shard(model, make_optimizer(kind, model), stage, **options)
        found.append(full_weights(model))
        loss = nn.functional.mse_loss(model(torch.ones(2, 6)), torch.ones(2, 3))
        loss.backward()
        optimizer.step()
    experts = [found[0][f"moe.experts.{i}.0.weight"] for i in range(4)]
    assert not any(one.equal(other) for one, other in itertools.combinations(experts, 2))
    assert same(*found)


def wide(*groups: dist.ProcessGroup | None) -> Any:
    """Weights of experts that are files, and others that stay in memory."""
    torch.manual_seed(0)
    make_expert = lambda: nn.Sequential(nn.Linear(40, 500), nn.Linear(500, 40))  # noqa: E731
    layer = MixtureOfExperts(40, make_expert, 3, group=groups[0], replica_group=groups[1])
    model: Any = nn.Sequential(nn.Linear(6, 40), layer, nn.Linear(40, 3))
    model.forward = partial(checkpoint, model.forward, use_reentrant=False)
    return model


@pytest.mark.parametrize("num_shards", [2, 4])
@in_ranks(4)
def test_in_files(rank: int, num_shards: int, tmp_path: Path) -> None:
    """A run of ZeRO-Infinity goes on from a checkpoint, on a rank without experts too."""
    plain = wide(alone(rank), None)
    train(plain, torch.optim.SGD(plain.parameters(), 0.1), range(STEPS), (0, 1))
    groups = mesh(rank, 4, num_shards)
    options: dict[str, Any] = {"offload_weights": True}
    for steps, is_resumed in ((range(2), False), (range(2, STEPS), True)):
        model = wide(*groups)
        made = offload.Offloaded(
            torch.optim.SGD(model.parameters(), 0.1), to="nvme", path=tmp_path / "scratch"
        )
        expected = zero.predict_memory(model, made, 3, world_size=4, rank=rank, **options)
        optimizer: Any = zero.shard(model, made, 3, **options)
        if is_resumed:
            load_parts(model, optimizer, tmp_path / "saved")
        train(model, optimizer, steps, (rank, 4))
        save_parts(model, optimizer, tmp_path / "saved")
        packed = sum(unit.packed_row.numel() for unit in optimizer._weights.units)
        assert expected.parameters == packed
        if is_resumed:
            assert_close(full_weights(model), full_weights(plain), 2e-6)
        optimizer.close()


def save(rank: int, num_shards: int, stage: int, folder: Path) -> None:
    model = Net(3, *mesh(rank, 4, num_shards))
    optimizer = zero.shard(model, make_optimizer("adamw", model), stage)
    train(model, optimizer, range(2), (rank, 4))
    save_parts(model, optimizer, folder, by_torch=True)


def go_on(rank: int, num_shards: int, stage: int, folder: Path) -> None:
    plain = Net(3, alone(rank), None)
    train(plain, make_optimizer("adamw", plain), range(STEPS), (0, 1))
    model = Net(3, *mesh(rank, 4, num_shards))
    optimizer = zero.shard(model, make_optimizer("adamw", model), stage)
    load_parts(model, optimizer, folder, by_torch=True)
    train(model, optimizer, range(2, STEPS), (rank, 4))
    assert_close(full_weights(model), full_weights(plain), 2e-6)


@pytest.mark.parametrize(
    ("saved", "loaded"), [((2, 3), (4, 3)), ((4, 3), (2, 2)), ((2, 1), (2, 3))], ids=str
)
def test_checkpoints_go_between_meshes_and_stages(
    saved: tuple[int, int], loaded: tuple[int, int], tmp_path: Path
) -> None:
    """By torch's functions, between numbers of ranks that share the experts.

    https://github.com/pytorch/torchtitan/pull/732
    """
    run_ranks(4, save, *saved, tmp_path)
    run_ranks(4, go_on, *loaded, tmp_path)


@pytest.mark.parametrize("stage", [1, 2])
@in_ranks(2)
def test_an_overflow_of_one_expert(rank: int, stage: int) -> None:
    """https://github.com/deepspeedai/DeepSpeed/pull/5259: which one rank has."""
    model: Any = Net(4, *mesh(rank, 2, 2))
    optimizer = zero.shard(model, adamw(model), stage, loss_scale="dynamic")
    before = full_weights(model)
    if rank == 1:
        next(model.moe.experts.parameters()).register_hook(lambda grad: grad * math.inf)
    optimizer.scale(model(torch.ones(12, 6)).square().sum()).backward()
    optimizer.step()
    assert same(full_weights(model), before)
    assert optimizer.loss_scale == 2**15
