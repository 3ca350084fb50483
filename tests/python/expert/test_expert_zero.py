"""zero.shard() of models with sharded experts: the steps of one process, bytes, states, meshes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_states import full_state, full_weights, load_full_state
from ranks import in_ranks, run_ranks
from torch import Tensor, nn
from whole_optimizers import Muon64, by_dimensions
from zero_models import assert_close, live_bytes, same, sent_bytes

from ringcomm.nn import MixtureOfExperts
from ringcomm.parallel import ParallelDims, expert, parallelize, zero
from ringcomm.parallel.optimizer_classes import optimizers_of

STEPS, ROWS = 4, 24


class Net(nn.Module):
    """Layers of odd sizes around experts, in a mesh of expert-parallel ranks and replicas."""

    def __init__(self, num_experts: int, *groups: dist.ProcessGroup | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        group, replicas = groups
        self.first = nn.Linear(6, 7)
        self.moe = MixtureOfExperts(
            7, self.make_expert, num_experts, group=group, replica_group=replicas
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
    if kind == "adamw":
        return torch.optim.AdamW(params, 0.02, eps=1e-3)
    if kind == "sgd":
        return torch.optim.SGD(params, 0.1, momentum=0.9)
    if kind == "adafactor":
        return torch.optim.Adafactor(params, 0.02, eps=(1e-6, 1e-3))
    return by_dimensions(
        [{"params": params}], Muon64, lambda own: torch.optim.AdamW(own, 0.02, eps=1e-3)
    )


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
        for each in optimizers_of(optimizer):
            each.step()
            each.zero_grad()


def compare(
    rank: int, world_size: int, num_shards: int, num_experts: int, stage: int, kind: str, clip: Any
) -> None:
    plain = Net(num_experts, alone(rank), None)
    given = make_optimizer(kind, plain)
    train(plain, given, range(STEPS), (0, 1), clip)
    place = rank, world_size
    groups = mesh(rank, world_size, num_shards)
    model = Net(num_experts, *groups)
    own = make_optimizer(kind, model)
    options = {"loss_scale": 64.0, "clip_grad_norm": clip} if clip is not None else {}
    arguments = model, own, stage
    memory = zero.predict_memory(*arguments, world_size=world_size, rank=rank)
    optimizer = zero.shard(*arguments, bucket_bytes=300, **options)
    train(model, optimizer, range(2), place)
    state = full_state(optimizer)
    train(model, optimizer, range(2, STEPS), place)
    assert_close(full_weights(model), full_weights(plain), 2e-6)
    assert live_bytes(optimizer.state_tensors()) == pytest.approx(memory.states, rel=0.05)
    # A whole state goes on where ranks have other experts, and in one process.
    again = Net(num_experts, alone(rank), None)
    resumed = zero.shard(again, make_optimizer(kind, again), stage, group=alone(rank), **options)
    again.load_state_dict(full_weights(plain_after(num_experts, kind, clip, rank)))
    load_full_state(resumed, state)
    train(again, resumed, range(2, STEPS), (0, 1))
    assert_close(full_weights(again), full_weights(plain), 2e-6)
    native = optimizer.state_dict()
    optimizer.load_state_dict(native)


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
        (4, 2, 4, 2, "adamw", 0.1),
        (4, 4, 3, 2, "muon", None),  # a rank without experts
        (4, 2, 4, 2, "adafactor", None),
    ],
)
def test_steps_are_those_of_one_process(
    world_size: int, num_shards: int, num_experts: int, stage: int, kind: str, clip: Any
) -> None:
    run_ranks(world_size, compare, world_size, num_shards, num_experts, stage, kind, clip)


@pytest.mark.parametrize("stage", [1, 2])
@in_ranks(4)
def test_parallelize(rank: int, stage: int) -> None:
    """One call: experts over 2 ranks, 2 replicas."""
    dims = ParallelDims(dp=4, ep=2)
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
        nn.functional.mse_loss(plain(x), y).backward()
        given.step()
        given.zero_grad()
        job.step(x.chunk(4)[rank], y.chunk(4)[rank])
        job.optimizer.step()
        job.optimizer.zero_grad()
    assert_close(full_weights(job), full_weights(plain), 2e-6)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@in_ranks(4)
def test_bytes_of_a_step(rank: int, kind: str) -> None:
    """At stage 1, where the tokens go in the passes and the gradients in the step."""
    model = Net(3, *mesh(rank, 4, 2))
    arguments = model, make_optimizer(kind, model), 1
    expected = zero.predict_traffic(*arguments, world_size=4, rank=rank)
    optimizer = zero.shard(*arguments)
    train(model, optimizer, range(1), (rank, 4))
    model(torch.ones(4, 6)).square().mean().backward()
    before = sum(sent_bytes().values())
    optimizer.step()
    assert sum(sent_bytes().values()) - before == expected


def with_unused_layers(rank: int, stage: int) -> dict[str, Tensor]:
    """Rank 1 uses neither the first layer nor the last one in some passes."""
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
        optimizer.step()
        optimizer.zero_grad()
    return full_weights(model)


def test_ranks_use_different_layers() -> None:
    """Stage 2 must not wait for a rank that waits for this one's tokens."""
    found = [run_ranks(4, with_unused_layers, stage) for stage in (1, 2)]
    for weights in (*found[0], *found[1]):
        assert_close(weights, found[0][0], 2e-6)


@in_ranks(4)
def test_errors(rank: int) -> None:
    shards, replicas = mesh(rank, 4, 2)
    model = Net(4, shards, None)  # the user forgot them
    before = {name: param.clone() for name, param in model.named_parameters()}
    with pytest.raises(ValueError, match=r"4 data-parallel ranks, but moe\.experts.* in 1 rep"):
        zero.shard(model, torch.optim.SGD(model.parameters()), 2)
    known = Net(4, shards, replicas)
    with pytest.raises(ValueError, match="each rank has different experts in moe"):
        zero.shard(known, torch.optim.SGD(known.parameters()), 3)
    optimizer = zero.shard(known, torch.optim.SGD(known.parameters()), 2)
    with pytest.raises(ValueError, match="already has an optimizer that takes its gradients"):
        zero.shard(known, torch.optim.SGD(known.parameters()), 2)
    nn.functional.mse_loss(known(torch.ones(2, 6)), torch.ones(2, 3)).backward()
    with pytest.raises(RuntimeError, match="gradients are in the optimizer"):
        expert.average_gradients(known)
    assert same(dict(model.named_parameters()), before)
    del optimizer
