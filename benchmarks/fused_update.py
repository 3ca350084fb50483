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
(2 N S bytes, and the optimizer's states twice) at the speed of a copy in the same run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import harness  # before torch: it sets the number of threads
import placement
import torch
import torch.distributed as dist
from front_door import NCCL_FLAG
from groups import labelled, open_groups
from harness import Bench, Options, flag
from placement import Placement
from torch import Tensor

from _ringcomm.values import several, whole
from ringcomm import ops
from ringcomm.measure.ranks import Team
from ringcomm.screen import byte_count
from ringcomm.torch_names import all_gather_single, reduce_scatter_single

DEFAULT_SIZES = "1048576,4194304,16777216,67108864"
DTYPES = ("float32", "bfloat16")
WAYS = ("fused", "zero1", "ringcomm", "gloo")  # the others are compared with the first
DEVICE_WAYS = ("fused", "zero1", "nccl")
WHOLE = ("ringcomm", "gloo")
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

    def __init__(self, name: str, kind: str, num_elems: int, bench: Bench, dtype: Any) -> None:
        self.param = start(num_elems, dtype, bench.device)
        self.grad = gradient_of(bench.team.rank, num_elems, dtype, bench.device)
        self.group = bench.groups[name if name in bench.groups else "ringcomm"]
        self.state_bytes = 0
        self._num_steps = 0
        self._kind = kind
        self._has_master = keeps_master(kind, dtype)
        self.step: Callable[[], None] = (
            self._fused() if name == "fused" else self._by_torch(is_whole=name in WHOLE)
        )

    def _fused(self) -> Callable[[], None]:
        optimizer = _OURS[self._kind]
        own = ops.shard_range(self.param.numel(), self.group.size(), self.group.rank())
        shard = self.param[slice(*own)].float()
        state = {name: torch.zeros_like(shard) for name in optimizer.state_names}
        if self._has_master:
            state["master"] = shard
        self.state_bytes = sum(tensor.nbytes for tensor in state.values())
        update = partial(ops.reduce_scatter_update_all_gather_, self.param, self.grad, state)

        def step() -> None:
            self._num_steps += 1
            update(optimizer=optimizer, step=self._num_steps, group=self.group)

        return step

    def _by_torch(self, *, is_whole: bool) -> Callable[[], None]:
        """Updates everything after an all_reduce, or a shard before an all_gather."""
        world_size, rank = self.group.size(), self.group.rank()
        begin, end = ops.shard_range(self.param.numel(), world_size, rank)
        mine = self.param if is_whole else self.param[begin:end]
        averaged = self.grad.clone() if is_whole else torch.empty_like(mine)
        weight = mine.float() if self._has_master else mine
        weight.grad = grad = torch.empty_like(weight) if self._has_master else averaged
        optimizer = torch_optimizer(self._kind, weight)

        def step() -> None:
            if is_whole:  # in place: from the second step on each rank has the average, which stays
                dist.all_reduce(averaged, group=self.group)
                averaged.div_(world_size)
            else:
                reduce_scatter_single(averaged, self.grad, group=self.group)
            if self._has_master:
                grad.copy_(averaged)
            if not is_whole:
                grad.div_(world_size)
            optimizer.step()
            if self._has_master:
                mine.copy_(weight)
            if not is_whole:
                all_gather_single(self.param, mine, group=self.group)

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


# ---- a point


def run_rank(bench: Bench, options: Options) -> None:
    """Every size in turn; rank 0 reports each one's records."""
    team, names, kind = bench.team, options.names, options.optimizer
    backends = ["ringcomm", *(name for name in ("gloo", "nccl") if name in names)]
    bench = replace(bench, groups=open_groups(team, labelled(backends)))
    dtype = getattr(torch, options.dtype)
    versions = {"nccl": ".".join(map(str, placement.nccl_version()))} if "nccl" in names else {}
    for num_bytes in options.sizes:
        num_elems = num_bytes // dtype.itemsize // team.world_size * team.world_size
        ways = {name: Way(name, kind, num_elems, bench, dtype) for name in names}
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
    # Gradients, parameters, the states twice, and without a master copy the parameters once more.
    read_once = 0 if keeps_master(kind, way.param.dtype) else way.param.nbytes
    moved = 2 * team.world_size * way.param.nbytes + 2 * state_bytes + read_once
    on_a_device = moved * where.share(team.world_size)
    over_a_link = 2 * (team.world_size - 1) / team.world_size * way.param.nbytes
    return {
        "floor_us": speeds.floor_us(on_a_device, over_a_link),
        "state_bytes": state_bytes,
        **speeds.record(),
    }


def check(options: Options) -> None:
    """Chooses the ways that are supported, and prints why NCCL is not. Raises ValueError."""
    if min(options.sizes) < 4 * options.world:
        raise ValueError("each size must be at least one parameter per rank")
    torch_optimizer(options.optimizer, torch.zeros(1))  # so that ranks need not import for seconds
    options.names = WAYS
    if not options.placement.is_cpu:
        reason = placement.why_nccl_cannot(options.placement, options.world)
        if reason is not None:
            print(f"not available: nccl: {reason}")
        options.names = tuple(name for name in DEVICE_WAYS if name != "nccl" or reason is None)


def file_of(options: Options) -> str:
    """The name of the records' file."""
    where = "" if options.device == "cpu" else f"-{options.device}-{options.layout}"
    return f"fused_update-{options.optimizer}-w{options.world}{where}"


PROGRAM = harness.Program(
    doc=__doc__,
    kind="fused_update",
    rank=run_rank,
    seconds=4.0,
    per="size, for all ways",
    device="cpu",
    has_sharing=True,
    flags=[
        flag("--world", whole(2), 2, "ranks, all on this machine"),
        flag("--sizes", several(whole(1)), DEFAULT_SIZES, "bytes of the parameters"),
        flag("--optimizer", str, "adamw", choices=OPTIMIZERS),
        flag("--dtype", str, "float32", "of parameters and gradients", choices=DTYPES),
        NCCL_FLAG,
    ],
    check=check,
    file=file_of,
    named=("optimizer", "dtype"),
    facts=lambda o: {} if o.placement.is_cpu else {"kind": "fused_update_on_device"},
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

if __name__ == "__main__":
    PROGRAM.run_script()
