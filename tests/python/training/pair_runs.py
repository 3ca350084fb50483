"""Runs a case of a table on ranks and in one process, and says what is wrong with it."""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from model_zoo import distance
from oracle import all_equal, default_dtype
from pair_actions import Actions, action_of, turns
from pair_batches import STEPS
from pair_engines import LomoEngine, ParallelizedEngine, Place, ZeroEngine, dims_of, local_of
from pair_loops import launched
from pair_mesh import WORLD_SIZE, MeshByHand, num_data_ranks
from pair_models import DTYPES, is_small, unwrapped
from pair_oracle import LOST_SHARE, TOLERANCES, Alone, initial, train_alone
from pair_table import Case, Table
from pair_tables import TOLERANCE, views_of
from ranks import RankFailure, end_groups, init_group, run_ranks
from torch import Tensor

from ringcomm.parallel import get_state_dict

with contextlib.suppress(ImportError):  # before ranks are forked
    import peft  # noqa: F401
    from transformers import LlamaForCausalLM  # noqa: F401

TIMEOUT_S = 120.0
READS = ("eval", "input gradient", "generate", "state_dict")  # changes nothing


class Outcome(NamedTuple):
    """What a rank has seen of a case.

    Attributes:
        kind, text: of what was raised; empty if nothing was.
        is_unchanged: no weight was written in the call that raised.
        seen: by name what a loop sees besides weights: losses, tokens, gradients, states.
        weights: whole weights at the end.
        local, replica: this rank's own, and which ranks have the same.
        data_rank: of this rank.
    """

    kind: str = ""
    text: str = ""
    is_unchanged: bool = False
    seen: dict[str, Any] = {}  # noqa: RUF012
    weights: dict[str, Tensor] = {}  # noqa: RUF012
    local: list[Tensor] = []  # noqa: RUF012
    replica: tuple[int, ...] = ()
    data_rank: int = 0


def world_size(case: Case) -> int:
    if "trained by" in case:
        return WORLD_SIZE
    found = dims_of(case)
    return 2 if found is None else torch.Size(found[0].values()).numel()


def engine_of(case: Case, place: Place) -> Any:
    """A case's system. Collective."""
    if "trained by" in case:
        return MeshByHand(case, place)
    if dims_of(case) is not None:
        return ParallelizedEngine(case, place)
    is_lomo = "weights in" in case or "Lomo" in case.get("system", "")
    return (LomoEngine if is_lomo else ZeroEngine)(case, place)


# ---- on ranks


def outcome(rank: int, case: Case, folder: Path) -> Outcome:
    """Trains a case in a group of its own: what an error leaves of it harms no other case."""
    num_ranks, backend = world_size(case), case.get("backend", "ringcomm")
    timeout_s = 30.0 if is_small(case) else 10.0
    init_group(rank, num_ranks, folder / "store", timeout_s, backend=backend)
    try:
        if backend == "gloo":  # a rank that ends would break what another still connects
            dist.barrier()
        dtype = getattr(torch, case.get("default dtype", "float32"))
        with launched(case, rank, num_ranks), default_dtype(dtype):
            found = train(rank, case, folder)
        if case.get("leaving") == "one by one" and not found.kind:
            _leave(rank, num_ranks, found, folder)
        return found
    finally:
        end_groups()
        torch.compiler.reset()  # graphs of other cases have other shapes
        torch.compiler.set_stance("default")


def train(rank: int, case: Case, folder: Path) -> Outcome:
    """Trains a case in the default group."""
    seed = rank if case.get("seeds") == "per rank" else 0
    engine: Any = None
    before: list[Tensor] = []
    seen: dict[str, Any] = {}
    try:
        engine = engine_of(case, Place(folder / "first", seed))
        actions = Actions(engine, case)
        for steps in turns(case):
            before = engine.snapshot()
            seen |= actions.before(steps.start)
            engine = actions.engine
            before = engine.snapshot()
            engine.run(steps)
            actions.after_step()
        before = []
        seen |= actions.at_end()
        weights = unwrapped(get_state_dict(engine.owner, full=True)[0].items())
    except Exception as error:
        after = engine.snapshot() if engine is not None and before else []
        same = all_equal(before, after)
        if is_small(case) and engine is not None:  # options are refused by the first step
            same = same and steps.start == 0
        return Outcome(type(error).__name__, str(error), same)
    if is_small(case):
        local, replica = [*weights.values()], ((rank,) if case["resume"] == "one rank" else ())
    else:
        is_apart = case.get("system") == "infinity"  # weights are in files or host memory
        local = [] if is_apart else [local_of(param).clone() for param in engine.params]
        replica = engine.replica
    return Outcome("", "", False, seen, weights, local, replica, engine.data_rank)


def _leave(rank: int, num_ranks: int, found: Outcome, folder: Path) -> None:
    """Every rank but 0 ends right after its last call, without a word."""
    last = dist.new_group()
    if rank == 0:
        time.sleep(0.05)
        for peer in range(1, num_ranks):
            value = torch.zeros(1)
            dist.recv(value, peer, group=last)
            assert float(value) == peer
        return
    (folder / f"rank{rank}").write_bytes(pickle.dumps(found))
    dist.send(torch.tensor([float(rank)]), 0, group=last)
    os._exit(0)


# ---- in one process


def expected(case: Case) -> list[tuple[dict[str, Any], dict[str, Tensor]]]:
    """By data rank what it should see, and the weights."""
    if is_small(case):
        num_data = num_data_ranks(case["mesh"]) if "mesh" in case else 2
        return [({}, train_alone(case, num_data))] * num_data
    found = dims_of(case)
    num_data = 2 if found is None else found[0]["dp"] * found[0].get("fsdp", 1)
    num_parts = 1 if found is None else int(case.get("micro-batches", "2"))
    engine = Alone(case, num_data, num_parts)
    actions = Actions(engine, case)
    seen: list[dict[str, Any]] = [{} for _ in range(num_data)]

    def by_rank(call: Callable[[], dict[str, Any]], is_each: bool) -> None:
        """What each rank sees with its own buffers; what changes something is done once."""
        shared = None if is_each else call()
        for rank in range(num_data):
            with engine.as_rank(rank):
                seen[rank] |= call() if shared is None else shared
        key = "loss in evaluation"
        if found is not None and key in seen[0]:
            mean = sum(of_rank[key] for of_rank in seen) / num_data  # as evaluate() gives
            for of_rank in seen:
                of_rank[key] = mean

    for step in range(STEPS):
        by_rank(lambda step=step: actions.before(step), action_of(case) in READS)  # type: ignore[misc]
        engine.run(range(step, step + 1))
        actions.after_step()
    by_rank(actions.at_end, True)
    weights = unwrapped(engine.model.named_parameters())
    return [(of_rank, weights) for of_rank in seen]


# ---- both


def problem_of(tables: Iterable[Table], case: Case, folder: Path) -> str:
    """Runs a case; what is wrong with it by the tables, or nothing."""
    folder.mkdir(exist_ok=True)
    num_ranks, leaves = world_size(case), case.get("leaving") == "one by one"
    options: dict[str, Any] = {"backend": None, "timeout_s": TIMEOUT_S, "fresh": leaves}
    if leaves:
        options["may_die"] = range(1, num_ranks)
    try:
        results = run_ranks(num_ranks, outcome, case, folder, **options)
    except RankFailure as failure:
        return str(failure)
    found: list[Outcome] = [
        pickle.loads((folder / f"rank{rank}").read_bytes()) if each is None else each
        for rank, each in enumerate(results)
    ]
    reasons = [
        why for table in tables for view in views_of(case) for why in table.refusals_of(view)
    ]
    if reasons:
        unknown = [
            f"rank {rank}: {each.kind}: {each.text} (weights unchanged: {each.is_unchanged})"
            for rank, each in enumerate(found)
            if not any(why.explains(*each[:3]) for why in reasons)
        ]
        return "\n".join(unknown)
    raised = [f"rank {r}: {each.kind}: {each.text}" for r, each in enumerate(found) if each.kind]
    return "\n".join(raised or differences(case, found))


def differences(case: Case, results: list[Outcome]) -> list[str]:
    """From one process, and between replicas."""
    alone = expected(case)
    change, limit = _change_and_limit(case, alone[0][1])
    dims = dims_of(case)
    has_stages = dims is not None and dims[0].get("pp", 1) > 1
    found = []
    first: dict[tuple[int, ...], list[Tensor]] = {}
    for rank, mine in enumerate(results):
        seen, weights = alone[mine.data_rank]
        if missing := weights.keys() - mine.weights.keys():
            found.append(f"rank {rank} lacks {sorted(missing)}")
            continue
        # Weights of 16 bits are masters rounded.
        rounded = {name: w.to(mine.weights[name].dtype).float() for name, w in weights.items()}
        error = min(distance(mine.weights, aim) for aim in (weights, rounded))
        if not error < limit:
            found.append(f"rank {rank}: weights are off by {error / change:.2g} of their change")
        stages = [each for each in results if each.data_rank == mine.data_rank]
        for name, values in seen.items():
            found += [f"rank {rank}: {name}: {what}" for what in _off(mine.seen[name], values)]
            if isinstance(values, dict):
                all_of = [each.seen[name] for each in (stages if has_stages else [mine])]
                if missing := values.keys() - set().union(*all_of):
                    found.append(f"rank {rank}: {name} lacks {sorted(missing)}")
        same = first.setdefault(mine.replica, mine.local)
        if not all_equal(same, mine.local):
            found.append(f"rank {rank}: its weights are not those of its replicas")
    return found


def _change_and_limit(case: Case, weights: dict[str, Tensor]) -> tuple[float, float]:
    """How far training moves the weights, and how far from them they may be.

    The limit is a fraction of what lost rows change: with them, a case would fail.
    """
    change = distance(initial(case), weights)
    if not is_small(case):  # float64
        return change, TOLERANCE * change
    num_data = num_data_ranks(case["mesh"]) if "mesh" in case else 2
    lost = distance(train_alone({**case, "loses": "rows"}, num_data), weights)
    return change, min(TOLERANCES[DTYPES[case["dtype"]]] * change, LOST_SHARE * lost)


def _off(found: Any, expected: Any, name: str = "") -> list[str]:
    """What is not as expected, in a value of tensors."""
    if isinstance(expected, dict):  # a stage of a pipeline has some of the names
        return [w for key in found for w in _off(found[key], expected[key], key)]
    if isinstance(expected, list):
        return [w for pair in zip(found, expected, strict=True) for w in _off(*pair, name)]
    one, other = torch.as_tensor(found), torch.as_tensor(expected)
    if one.shape != other.shape:
        return [f"{name} has shape {tuple(one.shape)} instead of {tuple(other.shape)}"]
    if one.dtype == torch.int64:
        return [] if torch.equal(one, other) else [f"{one.tolist()} instead of {other.tolist()}"]
    error = float((one.double() - other.double()).norm() / other.double().norm().clamp(min=1e-6))
    return [] if error < TOLERANCE else [f"{name} is off by {error:.2g}"]
