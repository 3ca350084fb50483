"""The program's phases in a trace: forward, backward and optimizer, beside its calls."""

from __future__ import annotations

import itertools
import json
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import name_of, quick
from ranks import run_ranks
from test_trace import Event, merged, of, record
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ringcomm.optim import Lomo
from ringcomm.parallel import offload, zero
from ringcomm.parallel.pipeline import Pipeline
from ringcomm.trace import program

STEP = ["forward", "backward", "optimizer"]


def phases(events: list[Event], rank: int) -> list[str]:
    return [e["name"] for e in sorted(of(events, "program", rank), key=lambda e: e["ts"])]


def model_of() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def train(model: Any, optimizer: Any, after: Callable[[], object] = lambda: None) -> None:
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
        after()
        optimizer.step()
        optimizer.zero_grad()


def plain(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, lambda: [dist.all_reduce(p.grad) for p in model.parameters()])


def ddp(model: nn.Module) -> None:
    train(DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1))


def fsdp(model: nn.Module) -> None:
    fully_shard(model)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def compiled(model: nn.Module) -> None:
    """No phase is part of the compiled function, which has no break."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(torch.compile(model, backend="eager", fullgraph=True), optimizer)


class Halving(torch.optim.Optimizer):
    """An optimizer of the user's own, which torch.compile traces into."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(0.5)


def run_compiled_step(rank: int) -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = Halving([weight], {})
    torch.compile(optimizer.step, backend="eager", fullgraph=True)()
    assert weight.tolist() == [0.5, 0.5]


def test_hooks_of_optimizers_are_no_part_of_a_compiled_step(tmp_path: Path) -> None:
    record(tmp_path, run_compiled_step, world_size=1)


def sharded_optimizer(model: nn.Module) -> None:
    """Whose step calls the steps of the given optimizer."""
    train(model, zero.shard(model, torch.optim.AdamW(model.parameters()), stage=1))


def lomo(model: nn.Module) -> None:
    """Whose weights change in the backward pass."""
    train(model, Lomo(model, 0.1, group=dist.group.WORLD))


def clipped_lomo(model: nn.Module) -> None:
    """Which needs a second backward pass for the norm, of the same graph."""
    train(model, Lomo(model, 0.1, group=dist.group.WORLD, clip_grad_norm=1.0))


def offloaded(model: nn.Module) -> None:
    """Whose step calls the step of an optimizer of its class."""
    adamw = torch.optim.AdamW(model.parameters(), foreach=False)
    train(DistributedDataParallel(model), offload.Offloaded(adamw))


def offloaded_shards(model: nn.Module) -> None:
    adamw = offload.Offloaded(torch.optim.AdamW(model.parameters()))
    train(model, zero.shard(model, adamw, stage=2))


def weights_in_host_memory(model: nn.Module) -> None:
    adamw = offload.Offloaded(torch.optim.AdamW(model.parameters()))
    train(model, zero.shard(model, adamw, stage=3, offload_weights=True))


def pipelined(model: Any, schedule: str = "1f1b") -> None:
    pipe = Pipeline(model, nn.functional.mse_loss, schedule, num_microbatches=2)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for _ in range(2):
        pipe.step(torch.ones(2, 8), target=torch.ones(2, 8))
        optimizer.step()
        optimizer.zero_grad()


def zero_bubble(model: nn.Module) -> None:
    """Which computes the gradients of inputs and of weights apart, by torch.autograd.grad()."""
    pipelined(model, "zero-bubble")


class WithLoss(nn.Module):
    """As Trainer calls a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.model(x), labels)}


def trainer(model: nn.Module) -> None:
    """transformers.Trainer over DistributedDataParallel."""
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            folder,
            max_steps=2,
            per_device_train_batch_size=1,
            max_grad_norm=0,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        rows = [{"x": torch.ones(8), "labels": torch.ones(8)}] * 8
        transformers.Trainer(WithLoss(model), args, train_dataset=rows).train()


def run_system(rank: int, system: Callable[[Any], None]) -> None:
    system(model_of())
    dist.barrier()


F, B, O = STEP
STEPPED = (
    *(plain, ddp, fsdp, compiled, sharded_optimizer, lomo, clipped_lomo, offloaded),
    *(offloaded_shards, weights_in_host_memory, trainer),
)
# By system the phases of a step on each of two ranks.
SYSTEMS: dict[Callable[[Any], None], list[list[str]]] = {
    **dict.fromkeys(STEPPED, [STEP] * 2),
    pipelined: [[F, F, B, B, O], [F, B, F, B, O]],
    zero_bubble: [[F, F, B, B, B, B, O], [F, B, F, B, B, B, O]],
}
# What Trainer reads of torchrun.
ENV = [
    {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"} for rank in "01"
]


@pytest.mark.parametrize("system", quick(SYSTEMS, ddp, pipelined), ids=name_of)
def test_every_system_has_its_phases(system: Any, tmp_path: Path) -> None:
    if system is trainer:
        pytest.importorskip("transformers")
    env = ENV if system is trainer else [{}] * 2
    record(tmp_path, run_system, system, world_size=2, env=env)
    events, notes = merged(tmp_path)
    assert notes == []
    for rank, step in enumerate(SYSTEMS[system]):
        assert phases(events, rank) == step * 2, phases(events, rank)
        rows = {e["tid"] for e in of(events, "program", rank)}
        named = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
        assert [named[row] for row in rows] == ["program"]
        times = sorted((e["ts"], e["ts"] + e["dur"]) for e in of(events, "program", rank))
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(times))
        if system is ddp:  # whose all_reduces begin in its backward pass
            passes = [time for time, name in zip(times, step * 2, strict=True) if name == B]
            calls = [e["ts"] for e in of(events, "call", rank) if e["name"].endswith(":all_reduce")]
            assert len(calls) == 2
            for begin, (first, last) in zip(sorted(calls), passes, strict=True):
                assert first - 1 <= begin <= last + 1


# ---- in one process, of which the recorder is used alone


@pytest.fixture
def recorded(tmp_path: Path) -> Any:
    """Runs a function in a process that records the newest 64 phases; returns what is read."""

    def run(body: Callable[[], None]) -> list[program.Phase]:
        path = tmp_path / "rank.program"
        run_ranks(1, record_alone, path, body, fresh=True)
        return program.read(path)

    return run


def record_alone(rank: int, path: Path, body: Callable[[], None]) -> None:
    program.start(os.open(path, os.O_RDWR | os.O_CREAT), 64)
    body()


def fail_in_every_phase() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 7))
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 8)).backward()

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    optimizer.register_step_post_hook(fail)
    model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    model(torch.ones(2, 8))


def test_after_an_error_phases_go_on(recorded: Any) -> None:
    found = recorded(fail_in_every_phase)
    names = ["forward", "forward", "backward", *STEP, "forward"]
    assert [phase.name for phase in found] == names
    assert all(0 < phase.begin_ns <= phase.end_ns for phase in found)
    assert [phase.number for phase in found] == [*range(1, 8)]


def step_with_a_closure() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        loss = model(torch.ones(2, 8)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    model(torch.ones(2, 8))


def test_a_closure_has_its_own_phases(recorded: Any) -> None:
    names = [phase.name for phase in recorded(step_with_a_closure)]
    assert names == ["optimizer", "forward", "backward", "forward"]


def recompute_in_backward() -> None:
    model, x = model_of(), torch.ones(2, 8, requires_grad=True)
    torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
    torch.autograd.grad(model(x).sum(), x)
    assert [torch.autograd.grad.__name__, torch.autograd.backward.__name__] == ["grad", "backward"]


def test_recomputed_layers_are_of_the_backward_pass(recorded: Any) -> None:
    names = [phase.name for phase in recorded(recompute_in_backward)]
    assert names == ["forward", "backward"] * 2


def run_in_threads_and_a_fork() -> None:
    model = model_of()
    threads = [threading.Thread(target=model, args=(torch.ones(2, 8),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    child = os.fork()
    if child == 0:
        model(torch.ones(2, 8))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_each_thread_has_its_phases_and_a_child_none(recorded: Any) -> None:
    found = recorded(run_in_threads_and_a_fork)
    assert Counter(phase.name for phase in found) == {"forward": 2}


def run_many() -> None:
    for _ in range(100):
        model_of()(torch.ones(2, 8))


def test_the_newest_are_kept(recorded: Any) -> None:
    assert [phase.number for phase in recorded(run_many)] == [*range(37, 101)]


class Stuck(nn.Module):
    def forward(self, x: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
        return x


def die_in_a_forward_pass(rank: int) -> None:
    dist.barrier()
    model = model_of()
    model(torch.ones(2, 8))
    if rank == 1:
        Stuck()(torch.ones(1))


def test_a_killed_rank_was_in_its_forward_pass(tmp_path: Path) -> None:
    """https://github.com/gaogaotiantian/viztracer/issues/436: a killed process has no trace."""
    record(tmp_path, die_in_a_forward_pass, world_size=2, may_die=[1])
    events = merged(tmp_path)[0]
    unfinished = [e for e in of(events, "program", 1) if "unfinished" in e["args"]]
    assert [e["name"] for e in of(events, "program", 1)] == ["forward", "forward"]
    assert len(unfinished) == 1
    assert json.loads((tmp_path / "trace.json").read_text("utf-8"))
