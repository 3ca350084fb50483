"""What tensors hold after a call that failed, as docs/reference/backend.md has it."""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import quick, slow
from ranks import in_ranks, run_ranks
from test_errors import ENVS, caught
from test_faults import end_process, in_threads

import ringcomm
from ringcomm import RingcommError
from ringcomm.ops import SGDStep, reduce_scatter_update_all_gather_, shard_range
from ringcomm.optim import Lomo
from ringcomm.torch_names import backend_of, set_timeout

WORLD_SIZE = 3
SIZES, MIDDLE = (5, 300_001), 20_000  # elements of a rank's share
MARGIN = 1024
GUARD, NOT_WRITTEN = -7.0, -1.0
WEIGHT = 8.0  # at the start; an update takes the sum of the gradients from it
# By name: the ranks' environment, and whether they use memory that peers map.
WAYS: dict[str, tuple[Any, bool]] = {
    **{name: (env, False) for name, env in ENVS.items()},
    "shm, ring": ({"RINGCOMM_ALGORITHM": "ring"}, False),
    "shm, in place": (None, True),
}


class Tensors:
    """Those of one call on one rank; each is inside a larger one, which must not change.

    Rank r has 2**r everywhere, so that a sum over any ranks is an integer from 1 to 7.
    """

    def __init__(self, rank: int, is_shared: bool) -> None:
        self.rank = rank
        self._empty = ringcomm.empty_shared if is_shared else torch.empty
        self._value = 2.0**rank
        self._made: list[tuple[str, torch.Tensor]] = []
        self.input, self.output, self.in_place, self.weight, self.state = (
            partial(self._make, kind) for kind in ("input", "output", "in place", "weight", "state")
        )

    def _make(self, kind: str, num_elems: int) -> torch.Tensor:
        whole = self._empty(num_elems + 2 * MARGIN).fill_(GUARD)
        self._made.append((kind, whole))
        value = {"output": NOT_WRITTEN, "weight": WEIGHT, "state": 0.0}.get(kind, self._value)
        return whole[MARGIN:-MARGIN].fill_(value)

    def inputs(self, num_elems: int) -> list[torch.Tensor]:
        return [self.input(num_elems) for _ in range(WORLD_SIZE)]

    def outputs(self, num_elems: int) -> list[torch.Tensor]:
        return [self.output(num_elems) for _ in range(WORLD_SIZE)]

    def violations(self, is_refused: bool) -> list[str]:
        """What the documentation does not allow after a failure."""
        found = []
        for kind, whole in self._made:
            tensor = whole[MARGIN:-MARGIN]
            if (whole[:MARGIN] != GUARD).any() or (whole[-MARGIN:] != GUARD).any():
                found.append(f"{kind}: written beside the tensor")
            if kind == "output":
                is_allowed = not is_refused or bool((tensor == NOT_WRITTEN).all())
            elif kind in ("weight", "state"):
                changed = WEIGHT - tensor if kind == "weight" else tensor
                sums = [0.0] if is_refused else range(2**WORLD_SIZE)
                is_allowed = bool(torch.isin(changed.round(decimals=3), torch.tensor(sums)).all())
            elif kind == "input" or is_refused:
                is_allowed = bool((tensor == self._value).all())
            else:
                values = torch.arange(1.0, 2.0**WORLD_SIZE)
                is_allowed = bool(torch.isin(tensor, values).all())
            if not is_allowed:
                found.append(f"{kind}: has {tensor.unique().tolist()}")
        return found


def pass_on(t: Tensors, n: int, g: Any) -> None:
    """Rank 0 sends to rank 1, and that to rank 2."""
    if t.rank > 0:
        dist.recv(t.in_place(n), t.rank - 1, g)
    if t.rank < 2:
        dist.send(t.input(n), t.rank + 1, g)


def fused_update(t: Tensors, n: int, g: Any, momentum: float) -> None:
    """Subtracts the sum of the gradients from the weights; this rank keeps its shard of it."""
    step = SGDStep(lr=1.0, momentum=momentum)
    begin, end = shard_range(n, dist.get_world_size(g), dist.get_rank(g))
    state = {name: t.state(end - begin) for name in step.state_names}
    reduce_scatter_update_all_gather_(
        t.weight(n), t.input(n), state, optimizer=step, step=1, group=g, average=False
    )


Call = Callable[[Tensors, int, Any], object]
W = WORLD_SIZE
CALLS: dict[str, Call] = {
    "all_reduce": lambda t, n, g: dist.all_reduce(t.in_place(n), group=g),
    "broadcast": lambda t, n, g: dist.broadcast(t.in_place(n), 1, g),
    "reduce": lambda t, n, g: dist.reduce(t.in_place(n), 0, group=g),
    "all_gather": lambda t, n, g: dist.all_gather(t.outputs(n), t.input(n), g),
    "all_gather_into_tensor": lambda t, n, g: dist.all_gather_into_tensor(
        t.output(W * n), t.input(n), g
    ),
    "reduce_scatter": lambda t, n, g: dist.reduce_scatter(t.output(n), t.inputs(n), group=g),
    "reduce_scatter_tensor": lambda t, n, g: dist.reduce_scatter_tensor(
        t.output(n), t.input(W * n), group=g
    ),
    "all_to_all": lambda t, n, g: dist.all_to_all(t.outputs(n), t.inputs(n), g),
    "all_to_all_single": lambda t, n, g: dist.all_to_all_single(
        t.output(W * n), t.input(W * n), group=g
    ),
    "gather": lambda t, n, g: dist.gather(
        t.input(n), t.outputs(n) if t.rank == 0 else None, 0, g
    ),
    "scatter": lambda t, n, g: dist.scatter(
        t.output(n), t.inputs(n) if t.rank == 0 else None, 0, g
    ),
    "send and recv": pass_on,
    "ops.all_reduce": lambda t, n, g: ringcomm.ops.all_reduce(t.input(n), "sum", g),
    "ops.all_reduce, out": lambda t, n, g: ringcomm.ops.all_reduce(
        t.input(n), "sum", g, out=t.output(n)
    ),
    "ops.reduce_scatter": lambda t, n, g: ringcomm.ops.reduce_scatter(t.input(W * n), "sum", g),
    "ops.all_gather": lambda t, n, g: ringcomm.ops.all_gather(t.input(n), g),
    "ops.broadcast": lambda t, n, g: ringcomm.ops.broadcast(t.input(n), 1, g),
    "ops.reduce": lambda t, n, g: ringcomm.ops.reduce(t.input(n), 0, "sum", g),
    "fused update": partial(fused_update, momentum=0.0),
    "fused update, momentum": partial(fused_update, momentum=0.9),
}  # fmt: skip
Found = dict[str, tuple[str, list[str]]]


def fail(rank: int, how: str, is_shared: bool) -> Found:
    """Each call in a thread and a group of its own, until rank 1 is missing.

    Returns of each the kind of the error, and what is wrong with the tensors of the call.
    """
    sizes = SIZES[1:] if how == "dies in the middle" else SIZES
    timeout = datetime.timedelta(seconds=30)
    groups = {(name, n): dist.new_group(timeout=timeout) for name in CALLS for n in sizes}
    for group in groups.values() if how == "late" else ():  # that have connected meanwhile
        options = backend_of(group, torch.device("cpu")).options
        set_timeout(options, datetime.timedelta(seconds=0.5))
    dist.barrier()
    found: Found = {}
    if rank == 1 and how == "late":
        return found
    if rank == 1:
        threading.Timer(0.3, end_process, ["kill"]).start()
    if rank == 1 and how == "dies":
        time.sleep(30)

    def call_until_it_fails(key: tuple[str, int]) -> None:
        name, num_elems = key
        while True:
            tensors = Tensors(rank, is_shared)
            try:
                CALLS[name](tensors, num_elems, groups[key])
            except RingcommError as error:
                said = tensors.violations(False)
                found[f"{name} of {num_elems}"] = (type(error).__name__, said)
                return

    in_threads(call_until_it_fails, groups)
    return found


KINDS = {
    "late": "CollectiveTimeoutError",
    "dies": "PeerDiedError",
    "dies in the middle": "PeerDiedError",
    "another call": "MismatchError",
}


@pytest.mark.parametrize(
    ("way", "how"),
    quick(
        product(WAYS, [*KINDS][:3]),
        *product(("shm", "shm, ring", "messages"), ("dies in the middle",)),
        *product(("shm", "shm, in place"), ("late", "dies")),
        ("hosts", "dies"),
    ),
)
def test_inputs_are_unchanged_and_nothing_else_is_written(way: str, how: str) -> None:
    env, is_shared = WAYS[way]
    num_sizes = 1 if how == "dies in the middle" else len(SIZES)
    may_die = [1] if how != "late" else []
    args = (how, is_shared)
    results = run_ranks(WORLD_SIZE, fail, *args, fresh=True, may_die=may_die, env=env)
    for found in results[::2]:
        assert len(found) == num_sizes * len(CALLS)
        assert {kinds for kinds, _ in found.values()} == {KINDS[how]}, found
        assert not {name: said for name, (_, said) in found.items() if said}


def mismatch(rank: int, is_refused: bool, is_shared: bool) -> Found:
    """Rank 1 calls a barrier, or has one element more."""
    found: Found = {}
    sizes = (*SIZES, MIDDLE) if is_refused else SIZES[1:]
    for name, call in CALLS.items():
        for n in sizes:
            for kind in ("another call", "another size"):
                if (name, kind) == ("send and recv", "another call"):
                    continue  # messages are no calls of the group
                group: Any = dist.new_group()
                tensors = Tensors(rank, is_shared)
                is_other = rank == 1
                made: Callable[[], object] = partial(call, tensors, n + is_other, group)
                if is_other and kind == "another call":
                    made = partial(dist.barrier, group)
                try:
                    made()
                except RingcommError as error:
                    said = tensors.violations(is_refused or name == "send and recv")
                    found[f"{name} of {n}, {kind}"] = (type(error).__name__, said)
                dist.barrier()
                dist.destroy_process_group(group)
    return found


@pytest.mark.parametrize("way", quick(WAYS, "shm", "shm, in place"))
def test_a_mismatch_over_shared_memory_has_written_nothing(way: str) -> None:
    """Over messages it may be found in the middle of a call, as a death, or in the next call."""
    env, is_shared = WAYS[way]
    is_shm = way.startswith("shm")
    args = (is_shm, is_shared)
    for found in run_ranks(WORLD_SIZE, mismatch, *args, fresh=True, env=env):
        assert {kinds for kinds, _ in found.values()} == {"MismatchError"}, found
        assert not {name: said for name, (_, said) in found.items() if said}
        names = {name.partition(" of ")[0] for name in found}
        assert not is_shm or names >= CALLS.keys() - {"send and recv"}
        assert not is_shm or len(found) >= 6 * (len(CALLS) - 1)


# ---- LOMO, whose weights are updated in the backward pass


@in_ranks(3, ENVS, fresh=True, may_die="may_die")
@pytest.mark.parametrize(
    ("how", "may_die"), [slow("late", []), ("dies in the middle", [1]), ("another call", [])]
)
def test_lomo_has_updated_a_weight_or_not(rank: int, how: str) -> None:
    world: Any = dist.group.WORLD
    if how == "late":
        set_timeout(backend_of(world, torch.device("cpu")).options, datetime.timedelta(seconds=1))
    model = torch.nn.Linear(SIZES[1], 1, bias=False)
    optimizer = Lomo(model, lr=3.0, group=world)
    x = torch.full((1, SIZES[1]), 2.0**rank)
    dist.barrier()
    if rank == 1 and how == "late":
        time.sleep(3)
        return
    if rank == 1 and how == "another call":
        with contextlib.suppress(RingcommError):
            dist.barrier()
        return
    if rank == 1:
        threading.Timer(0.3, end_process, ["kill"]).start()

    def step() -> None:
        with torch.no_grad():
            model.weight.fill_(WEIGHT)
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    while not (error := caught(step)):
        pass
    changed = (WEIGHT - model.weight.detach()).round(decimals=3).unique().tolist()
    assert error["type"] == KINDS[how]
    assert {*changed} <= ({0.0} if how == "another call" else {0.0, 7.0})


def test_what_must_not_be_written_is_seen() -> None:
    tensors = Tensors(1, False)
    given, result, changed = tensors.input(4), tensors.output(4), tensors.in_place(4)
    assert not tensors.violations(True)
    result[0], changed[0] = 3, 7  # a part of a result
    assert not tensors.violations(False)
    assert tensors.violations(True) == ["output: has [-1.0, 3.0]", "in place: has [2.0, 7.0]"]
    changed[1] = 0.5
    given[0] = 3
    given.as_strided((1,), (1,), given.storage_offset() - 1).zero_()
    assert tensors.violations(False) == [
        "input: written beside the tensor",
        "input: has [2.0, 3.0]",
        "in place: has [0.5, 2.0, 7.0]",
    ]
