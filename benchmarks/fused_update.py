#!/usr/bin/env python3
"""Compares ways to average gradients over ranks and update parameters with them, in one run.

    python benchmarks/fused_update.py --world 2 --optimizer adamw --seconds 4
    python benchmarks/fused_update.py --device cuda --layout one --mps --dtype bfloat16 --world 4

    fused       ringcomm's reduce_scatter_update_all_gather_
    zero1       reduce_scatter, torch.optim on this rank's shard, all_gather, over ringcomm
    ringcomm    all_reduce over ringcomm, torch.optim on everything (DDP), on CPUs
    gloo        the same over Gloo, on CPUs
    nccl        what zero1 does, over NCCL, on GPUs

torch.optim is the fused=True form, one pass over memory; 16-bit parameters have fp32 master
weights, except with LOMO. The ways take turns in short blocks on separate parameters and gradients;
the time of a step is that of the slowest rank. After three steps from one start all must have the
parameters of a single process. On devices the floor is what the ranks together must read and write
(2 N S bytes, and the optimizer's states twice) at the speed of a copy in the same run. One JSON
line per way and size is appended to benchmarks/results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import harness  # before torch: it sets the number of threads
import placement
import torch
import torch.distributed as dist
from groups import labelled, open_groups
from harness import Bench, Options, Report, flag
from placement import Placement
from torch import Tensor

from ringcomm import ops
from ringcomm.measure.ranks import Team, run_main
from ringcomm.screen import byte_count, whole_numbers
from ringcomm.torch_names import all_gather_single, reduce_scatter_single

DEFAULT_SIZES = "1048576,4194304,16777216,67108864"
DTYPES = ("float32", "bfloat16")
WAYS = ("fused", "zero1", "ringcomm", "gloo")  # the others are compared with the first
DEVICE_WAYS = ("fused", "zero1", "nccl")


OPTIMIZERS = ("sgd", "momentum", "adamw", "lomo")
LR = 1e-3
# Steps of the check: enough for every term of the update to matter.
NUM_CHECKED_STEPS = 3
# Allowed after those steps between ways that round differently.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}

_OURS: dict[str, ops.SGDStep | ops.AdamWStep | ops.LomoStep] = {
    "sgd": ops.SGDStep(lr=LR),
    "momentum": ops.SGDStep(lr=LR, momentum=0.9),
    "adamw": ops.AdamWStep(lr=LR),
    "lomo": ops.LomoStep(lr=LR),
}


def torch_optimizer(kind: str, param: Tensor) -> torch.optim.Optimizer:
    """torch's own, in one pass over memory; of LOMO, plain descent."""
    if kind == "adamw":
        return torch.optim.AdamW([param], lr=LR, fused=True)
    return torch.optim.SGD([param], lr=LR, momentum=0.9 if kind == "momentum" else 0.0, fused=True)


def keeps_master(kind: str, dtype: torch.dtype) -> bool:
    """Whether there are fp32 masters: for 16-bit weights, except with LOMO."""
    return dtype != torch.float32 and kind != "lomo"


def start(num_elems: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The parameters before the first step."""
    return torch.linspace(-1, 1, num_elems, device=device).to(dtype)


def gradient_of(rank: int, num_elems: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Multiples of 1/64 that differ from rank to rank: sums over a few ranks are exact."""
    index = torch.arange(num_elems, device=device)
    return ((index * (rank + 3) % 97 - 48).float() / 64).to(dtype)


class Way:
    """Parameters, a gradient, and the step.

    Attributes:
        state_bytes: of this rank's optimizer state, master weights included.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        num_elems: int,
        team: Team,
        groups: Any,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        device = device or torch.device("cpu")
        self.param = start(num_elems, dtype, device)
        self.grad = gradient_of(team.rank, num_elems, dtype, device)
        self.group = groups[name if name in groups else "ringcomm"]
        self.state_bytes = 0
        self._num_steps = 0
        self._world_size = team.world_size
        self._kind = kind
        self._has_master = keeps_master(kind, dtype)
        make: Callable[[], Callable[[], None]] = {
            "fused": self._fused,
            "zero1": self._zero1,
            "nccl": self._zero1,
        }.get(name, self._whole)
        self.step = make()

    def _fused(self) -> Callable[[], None]:
        optimizer = _OURS[self._kind]
        state = ops.new_shard_state(self.param, optimizer, self.group, master=self._has_master)
        self.state_bytes = sum(tensor.nbytes for tensor in state.values())

        def step() -> None:
            self._num_steps += 1
            ops.reduce_scatter_update_all_gather_(
                self.param,
                self.grad,
                state,
                optimizer=optimizer,
                step=self._num_steps,
                group=self.group,
            )

        return step

    def _zero1(self) -> Callable[[], None]:
        begin, end = ops.shard_range(
            self.param.numel(), self._world_size, dist.get_rank(self.group)
        )
        shard = self.param[begin:end]
        reduced = torch.empty_like(shard)
        weight = shard.float() if self._has_master else shard
        weight.grad = torch.empty_like(weight) if self._has_master else reduced
        optimizer = torch_optimizer(self._kind, weight)

        def step() -> None:
            reduce_scatter_single(reduced, self.grad, group=self.group)
            if self._has_master:
                assert weight.grad is not None
                weight.grad.copy_(reduced)
            assert weight.grad is not None
            weight.grad.div_(self._world_size)
            optimizer.step()
            if self._has_master:
                shard.copy_(weight)
            all_gather_single(self.param, shard, group=self.group)

        return step

    def _whole(self) -> Callable[[], None]:
        weight = self.param.float() if self._has_master else self.param
        optimizer = torch_optimizer(self._kind, weight)
        averaged = self.grad.clone()
        weight.grad = averaged.float() if self._has_master else averaged

        def step() -> None:
            # In place: from the second step on each rank has the average, which stays what it is.
            dist.all_reduce(averaged, group=self.group)
            averaged.div_(self._world_size)
            assert weight.grad is not None
            if self._has_master:
                weight.grad.copy_(averaged)
            optimizer.step()
            if self._has_master:
                self.param.copy_(weight)

        return step


def count_wrong(ways: dict[str, Way], kind: str, team: Team) -> dict[str, int]:
    """Elements of all ranks that differ from a single process's, after some steps. Collective."""
    param = next(iter(ways.values())).param
    num_elems, dtype, device = param.numel(), param.dtype, param.device
    whole = start(num_elems, dtype, device)
    expected = whole.float() if keeps_master(kind, dtype) else whole
    total = torch.zeros(num_elems, device=device)
    for rank in range(team.world_size):
        total += gradient_of(rank, num_elems, dtype, device).float()
    expected.grad = (total / team.world_size).to(expected.dtype)
    del total
    optimizer = torch_optimizer(kind, expected)
    for _ in range(NUM_CHECKED_STEPS):
        optimizer.step()
    tolerance = TOLERANCES[dtype]
    wrong = {}
    for name, way in ways.items():
        for _ in range(NUM_CHECKED_STEPS):
            way.step()
        is_close = torch.isclose(way.param, expected.to(dtype), rtol=tolerance, atol=tolerance)
        wrong[name] = sum(team.share(int((~is_close).sum())))
    return wrong


def floor_bytes(param: Tensor, state_bytes: int, world_size: int, has_master: bool) -> int:
    """What the ranks together read and write: gradients, parameters, and the states twice.

    Without a master copy the parameters are read too, each once.
    """
    read_once = 0 if has_master else param.nbytes
    return 2 * world_size * param.nbytes + 2 * state_bytes + read_once


# ---- a point


def run_rank(bench: Bench, options: Options) -> None:
    """Every size in turn; rank 0 reports each one's records."""
    team, names, kind = bench.team, options.names, options.optimizer
    backends = ["ringcomm", *(name for name in ("gloo", "nccl") if name in names)]
    groups = open_groups(team, labelled(backends))
    dtype = getattr(torch, options.dtype)
    versions = {"nccl": ".".join(map(str, placement.nccl_version()))} if "nccl" in names else {}
    for num_bytes in options.sizes:
        num_elems = num_bytes // dtype.itemsize // team.world_size * team.world_size
        ways = {
            name: Way(name, kind, num_elems, team, groups, dtype, bench.device) for name in names
        }
        wrong = count_wrong(ways, kind, team)
        contenders = {name: bench.contender(way.step, way.group) for name, way in ways.items()}
        floor = _floor(team, ways["fused"], options.placement, kind)
        facts = {"bytes": num_elems * dtype.itemsize, **versions, **floor}
        records = bench.race(contenders, names[0], wrong, **facts)
        if floor:
            records = [r | {"share_of_floor": floor["floor_us"] / r["p50_us"]} for r in records]
        bench.report(records)
        del ways, contenders


def _floor(team: Team, way: Way, where: Placement, kind: str) -> dict[str, Any]:
    """The least µs of a step on devices, and what it follows from; nothing on CPUs. Collective."""
    if where.is_cpu:
        return {}
    speeds = placement.measure_speeds(team, where)
    state_bytes = sum(team.share(way.state_bytes))
    has_master = keeps_master(kind, way.param.dtype)
    moved = floor_bytes(way.param, state_bytes, team.world_size, has_master)
    on_a_device = moved * where.max_ranks(team.world_size) / team.world_size
    over_a_link = 2 * (team.world_size - 1) / team.world_size * way.param.nbytes
    return {
        "floor_us": speeds.floor_us(on_a_device, over_a_link),
        "state_bytes": state_bytes,
        **speeds.record(),
    }


def check(options: Options) -> None:
    """Raises ValueError for invalid options; with another NCCL the program restarts itself.

    Chooses the ways that are supported, and prints why NCCL is not.
    """
    if options.world < 2 or min(options.sizes) < 4 * options.world:
        raise ValueError("--world must be 2 or more, and each size at least one parameter per rank")
    if options.nccl_library is not None:
        placement.preload(options.nccl_library)
    options.names = WAYS
    if not options.placement.is_cpu:
        reason = placement.why_nccl_cannot(options.placement, options.world)
        if reason is not None:
            print(f"not available: nccl: {reason}")
        options.names = tuple(name for name in DEVICE_WAYS if name != "nccl" or reason is None)


def measure(options: Options, report: Report) -> None:
    """In ranks that need not import for seconds."""
    torch_optimizer(options.optimizer, torch.zeros(1))
    PROGRAM.run_worlds(options, report)


def facts_of(options: Options) -> dict[str, Any]:
    """The fields of all records."""
    found = {"world_size": options.world, "optimizer": options.optimizer, "dtype": options.dtype}
    if options.placement.is_cpu:
        return found
    return {"kind": "fused_update_on_device", **found, **placement.facts(options.placement)}


def file_of(options: Options) -> str:
    """The name of the records' file."""
    where = "" if options.device == "cpu" else f"-{options.device}-{options.layout}"
    return f"fused_update-{options.optimizer}-w{options.world}{where}"


PROGRAM = harness.Program(
    doc=__doc__,
    kind="fused_update",
    rank=run_rank,
    measure=measure,
    seconds=4.0,
    per="size, for all ways",
    device="cpu",
    has_sharing=True,
    flags=[
        flag("--world", int, 2, "ranks, all on this machine"),
        flag("--sizes", whole_numbers, DEFAULT_SIZES, "bytes of the parameters"),
        flag("--optimizer", str, "adamw", choices=OPTIMIZERS),
        flag("--dtype", str, "float32", "of parameters and gradients", choices=DTYPES),
        placement.NCCL_FLAG,
    ],
    check=check,
    file=file_of,
    facts=facts_of,
    columns=[
        ("parameters", lambda r: byte_count(r["bytes"])),
        *("way", "p50 µs", "p90 µs", "p99 µs"),
        ("of floor", lambda r: f"{r['share_of_floor']:.0%}" if "share_of_floor" in r else ""),
        *("time / fused", "others %"),
    ],
    section=("bytes",),
    caption="* other programs used the machine.",
    title=lambda o: f"{o.world} ranks, {o.optimizer}, {o.dtype}, {o.device}",
)
parse, main = PROGRAM.parse, PROGRAM.main

if __name__ == "__main__":
    sys.exit(run_main("fused_update.py", main))
