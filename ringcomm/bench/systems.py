"""Whole training steps by every data-parallel system: loss, time, memory and bytes in one table.

All systems train the same model from the same weights on the same rows. Their losses must be those
of one process; bytes are counted by the backend and compared with the formula; memory is what
their tensors keep alive.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ringcomm.backend import stats
from ringcomm.bench.decoder import VOCAB_SIZE, Decoder
from ringcomm.bench.gradient_watch import GradientWatch, live_bytes
from ringcomm.bench.interleave import (
    Contender,
    Timings,
    measure,
    open_default_group,
    records_of,
)
from ringcomm.bench.quantiles import median
from ringcomm.bench.ranks import Team
from ringcomm.bench.records import percentiles
from ringcomm.bench.weather import WeatherWatch
from ringcomm.optim import Lomo
from ringcomm.parallel import ParameterServer, WeightShards, find_shards, offload, zero

BACKWARD = "backward alone"
# Steps whose losses are compared with one process's, which sees all rows.
CHECKED_STEPS = 4
TOLERANCE = 1e-4
# What AdamW and LOMO learn with.
ADAMW, LOMO = 1e-3, 0.1


@dataclass
class Trainee:
    """One rank's end of a model that a system trains."""

    model: nn.Module
    call: Callable[[Tensor], Tensor]
    optimizer: Any

    def step(self, ids: Tensor) -> float:
        """Trains a step; the loss of these rows before it."""
        loss = self.backward(ids)
        self.update()
        return loss

    def backward(self, ids: Tensor) -> float:
        """The first half of a step; the loss."""
        loss = self.call(ids)
        loss.backward()
        return float(loss.detach())

    def update(self) -> None:
        """The other half."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def grad_bytes(self) -> int:
        """What this rank keeps of gradients, between the halves."""
        grads = [param.grad for param in self.model.parameters()]
        if isinstance(self.optimizer, zero.ZeroOptimizer):
            grads += self.optimizer.gradient_tensors()
        return live_bytes(grads)

    def param_bytes(self) -> int:
        """What this rank keeps of the weights between steps."""
        found = []
        for param in self.model.parameters():
            shards = find_shards(param)
            found.append(param if shards is None else shards.shard_of(param))
        return live_bytes(found)

    def state_bytes(self) -> int:
        """What this rank keeps of the optimizer's state."""
        if isinstance(self.optimizer, zero.ZeroOptimizer | _Served):
            return live_bytes(self.optimizer.state_tensors())
        inner = getattr(self.optimizer, "optim", self.optimizer)
        states = inner.state.values()
        return live_bytes(v for state in states for v in state.values() if isinstance(v, Tensor))


@dataclass(frozen=True)
class System:
    """A way to train on several ranks.

    Attributes:
        make: from a model and its group.
        num_parts: what a rank sends in a step, in (N-1)/N of the weights' bytes.
        like: whose losses it has to have.
        backend: of its group.
        is_counted: whether what a rank sends belongs to one step; a server answers when asked.
    """

    make: Callable[[Decoder, dist.ProcessGroup], Trainee]
    num_parts: int
    like: Callable[[Decoder], torch.optim.Optimizer] = lambda model: _adamw(model.parameters())
    backend: str = "ringcomm"
    is_counted: bool = True


def _adamw(params: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, ADAMW, fused=True)


def _sgd(model: Decoder) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), LOMO)


def _ddp(model: Decoder, group: dist.ProcessGroup) -> Trainee:
    replica = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    return Trainee(model, replica, _adamw(model.parameters()))


def _torch_zero1(model: Decoder, group: dist.ProcessGroup) -> Trainee:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    replica = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        optimizer_class=torch.optim.AdamW,
        process_group=group,
        lr=ADAMW,
        fused=True,
    )
    return Trainee(model, replica, optimizer)


def _zero(stage: int, model: Decoder, group: dist.ProcessGroup) -> Trainee:
    optimizer = zero.shard(model, _adamw(model.parameters()), stage, group=group)
    return Trainee(model, model, optimizer)


def _offloaded(model: Decoder, group: dist.ProcessGroup) -> Trainee:
    """All of it in files, in a folder that goes with the trainee."""
    folder = tempfile.TemporaryDirectory(prefix="bench-systems-")
    adamw = offload.AdamW(model.parameters(), ADAMW, to="nvme", path=folder.name)
    optimizer = zero.shard(model, adamw, 3, group=group, offload_weights=True)
    weakref.finalize(optimizer, folder.cleanup)
    return Trainee(model, model, optimizer)


class _Served:
    """A parameter server as an optimizer; what a step starts is over at its end."""

    def __init__(self, model: Decoder, group: dist.ProcessGroup) -> None:
        self.made: list[torch.optim.Optimizer] = []
        self.server = ParameterServer(model, self._make, group=group)

    def _make(self, groups: Any) -> torch.optim.Optimizer:
        self.made.append(_adamw(groups))
        return self.made[-1]

    def step(self) -> None:
        """Waits for the update, which would go on beside whoever is measured next."""
        self.server.push()
        self.server.pull(fresh=True)

    def zero_grad(self) -> None:
        """push() has dropped them."""

    def state_tensors(self) -> list[Tensor]:
        """Of the keys that this rank serves: its copies of them, and the optimizer's state."""
        copies = [p for made in self.made for group in made.param_groups for p in group["params"]]
        states = [state for made in self.made for state in made.state.values()]
        return [*copies, *(v for s in states for v in s.values() if isinstance(v, Tensor))]


def _served(model: Decoder, group: dist.ProcessGroup) -> Trainee:
    return Trainee(model, model, _Served(model, group))


def _lomo(model: Decoder, group: dist.ProcessGroup) -> Trainee:
    return Trainee(model, model, Lomo(model, LOMO, group=group))


def _lomo_on_shards(model: Decoder, group: dist.ProcessGroup) -> Trainee:
    WeightShards(model, group)
    return Trainee(model, model, Lomo(model, LOMO))


SYSTEMS: dict[str, System] = {
    "ddp": System(_ddp, 2),
    "torch's zero-1": System(_torch_zero1, 3),
    "torch's zero-1 on gloo": System(_torch_zero1, 3, backend="gloo"),
    "zero-1": System(partial(_zero, 1), 2),
    "zero-2": System(partial(_zero, 2), 2),
    "zero-3": System(partial(_zero, 3), 3),
    "zero-3 in files": System(_offloaded, 3),
    "parameter server": System(_served, 2, is_counted=False),
    "lomo": System(_lomo, 2, like=_sgd),
    "lomo on shards": System(_lomo_on_shards, 3, like=_sgd),
}


@dataclass(frozen=True)
class Systems:
    """What is measured.

    Attributes:
        names: of SYSTEMS, in the table's order; others are compared with the first.
        rows, tokens: of each rank's batch.
    """

    world_size: int
    names: list[str]
    width: int
    num_layers: int
    rows: int
    tokens: int
    seconds: float
    repeats: int

    def check(self) -> None:
        """Raises ValueError where it makes no sense, naming the option."""
        unknown = [name for name in self.names if name not in SYSTEMS]
        if unknown or not self.names:
            raise ValueError(f"--systems are some of {', '.join(SYSTEMS)}, got {unknown or None}")
        if min(self.world_size, self.num_layers, self.rows, self.tokens) < 1:
            raise ValueError("wants a rank, a layer, a row and a token at least")
        if self.width < 32 or self.width % 32:
            raise ValueError(f"--width is a multiple of 32, got {self.width}")

    def model(self) -> Decoder:
        """The same on every rank."""
        return Decoder(self.width, self.num_layers, self.tokens)

    def ids(self, step: int) -> Tensor:
        """All ranks' rows of a step."""
        generator = torch.Generator().manual_seed(step)
        shape = [self.world_size * self.rows, self.tokens + 1]
        return torch.randint(VOCAB_SIZE, shape, generator=generator)

    def my_ids(self, step: int, rank: int) -> Tensor:
        """One rank's."""
        return self.ids(step)[rank * self.rows : (rank + 1) * self.rows]

    def expected_losses(self, system: System) -> list[float]:
        """Those of one process on all rows."""
        model = self.model()
        alone = Trainee(model, model, system.like(model))
        return [alone.step(self.ids(step)) for step in range(CHECKED_STEPS)]


def _sent_bytes() -> int:
    return sum(entry["sent_bytes"] for entry in stats().values())


def _train_checked(
    systems: Systems, team: Team, groups: dict[str, Any], name: str
) -> tuple[Trainee, dict[str, Any]]:
    """A system after its first steps, and what they were. Collective."""
    system = SYSTEMS[name]
    model = systems.model()
    num_params = sum(param.numel() for param in model.parameters())
    watch = GradientWatch(model)
    trainee = system.make(model, groups[system.backend])
    losses, held = [], 0
    for step in range(CHECKED_STEPS):
        before = _sent_bytes()
        mine = trainee.backward(systems.my_ids(step, team.rank))
        held = max(held, trainee.grad_bytes())
        trainee.update()
        sent = _sent_bytes() - before
        losses.append(sum(team.share(mine)) / team.world_size)
    expected = systems.expected_losses(system)
    wrong = sum(abs(a - b) > TOLERANCE * b for a, b in zip(losses, expected, strict=True))
    held = max(held, watch.stop())
    is_counted = system.backend == "ringcomm" and system.is_counted
    by_rank = team.share((trainee.param_bytes(), held, trainee.state_bytes(), sent))
    params, grads, states, _ = (max(values) for values in zip(*by_rank, strict=True))
    return trainee, {
        "loss": losses[-1],
        "one_process_loss": expected[-1],
        "param_bytes": params,
        "grad_bytes": grads,
        "state_bytes": states,
        # The ranks' mean: shards differ by an element.
        "sent_bytes": sum(rank[3] for rank in by_rank) / team.world_size if is_counted else None,
        "formula_bytes": system.num_parts * (1 - 1 / team.world_size) * 4 * num_params,
        "wrong_elems": wrong,
    }


def run_rank(systems: Systems, team: Team) -> None:
    """One rank: all systems, first checked, then in turn against the clock. Collective."""
    open_default_group(team, "ringcomm")
    others = {SYSTEMS[name].backend for name in systems.names} - {"ringcomm"}
    groups = {"ringcomm": dist.group.WORLD}
    groups |= {backend: dist.new_group(backend=backend) for backend in sorted(others)}
    watch = WeatherWatch(team)
    found, contenders = {}, {}
    ids = systems.my_ids(0, team.rank)
    for name in systems.names:
        trainee, found[name] = _train_checked(systems, team, groups, name)
        contenders[name] = Contender(partial(_step, trainee, ids), dist.barrier)
    contenders[BACKWARD] = Contender(partial(_backward_alone, systems.model(), ids), dist.barrier)
    wrong = {name: facts["wrong_elems"] for name, facts in found.items()}
    timings, weather = watch.calmest(
        partial(measure, team, contenders, systems.seconds), systems.repeats
    )
    if timings is not None:
        bare = timings.pop(BACKWARD)
        records = records_of(timings, systems.names[0], wrong, name="system")
        for record in records:
            name = record["system"]
            record.update(found[name] | _time_beyond(timings[name], bare) | weather.record())
        team.report(records)
    dist.destroy_process_group()


def _time_beyond(timing: Timings, bare: Timings) -> dict[str, float]:
    """What a step takes beyond forward and backward alone, in neighbouring blocks."""
    pairs = zip(timing.blocks, bare.blocks, strict=True)
    beyond_us = [1e6 * (median(mine) - median(theirs)) for mine, theirs in pairs]
    return {f"update_{name}": value for name, value in percentiles(beyond_us, "us").items()}


def _backward_alone(model: Decoder, ids: Tensor) -> None:
    model(ids).backward()
    model.zero_grad()


def _step(trainee: Trainee, ids: Tensor) -> None:
    trainee.step(ids)
