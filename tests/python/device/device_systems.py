"""The training systems as a GPU has them: what a step costs the host, and the weights it leads to.

    python tests/python/device/device_systems.py --device cuda [--systems NAME;...] --json FILE

Two ranks on one device train with each system in turn, on the CPU and on the device, without
pytest. For each there is a line of JSON at once: what the host has waited for in the last step, the
device's peak memory, and the largest difference of a weight from the CPU's. The status is 1 where
that is more than rounding, the host waits more often than SYSTEMS says, or a system fails.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as conftest.py has it for pytest
    sys.path[:0] = [str(folder) for folder in Path(__file__).parents[1].iterdir()]

import torch
import torch.distributed as dist
from curves import batch, make_model
from full_states import full_weights
from pipeline_models import make_tied, token_batch, tokens_loss
from ranks import place
from rows import Blocks, adamw, sgd, trained_by
from steps import apply_steps
from test_parallelize import ids_of
from test_parallelize import make as make_of_transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ringcomm.measure.ranks import Team, run_ranks
from ringcomm.optim import AdaLomo, Lomo
from ringcomm.parallel import ParallelDims, ParameterServer, activations, parallelize, pipeline

Trained = tuple[nn.Module, Callable[[], None]]  # and a step
# The aim is no wait, but where the program asks for a number of the device: a norm, a loss scale.
# Of operators: the result is a number, or has a shape that depends on values.
READING = (
    *("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal"),
    *("aten::_unique2", "aten::bincount", "aten::repeat_interleave"),
)
INDEXING = ("aten::index", "aten::index_put", "aten::index_put_")  # by a mask


class Waits(TorchDispatchMode):
    """Counts reads of values, copies between host and device that the host waits for, and, where a
    driver counts them, waits for events, streams and the device.

    It sees the operators of this thread and of its backward passes. The emulator waits for a stream
    in operators that it leaves to the CPU, where a GPU does not; collectives must not wait.
    """

    def __init__(self, of_driver: Callable[[], Counter[str]] = Counter) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.places: list[str] = []
        self._of_driver, self._before = of_driver, of_driver()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.counts += self._of_driver() - self._before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = self._kind(func.name().split(".")[0], args, kwargs)
        if kind:
            ours = [f for f in traceback.extract_stack() if "/ringcomm/" in f.filename]
            self.counts[kind] += 1
            self.places.append(kind + "".join(f" {f.filename}:{f.lineno}" for f in ours[-3:]))
        before = self._of_driver()
        result = func(*args, **kwargs)
        if "c10d" not in func.namespace:
            self._before += self._of_driver() - before
        return result

    def _kind(self, name: str, args: Any, kwargs: Any) -> str:
        if name in READING:
            return "wait" if args[0].device.type != "cpu" else ""
        if name in INDEXING and any(x is not None and x.dtype == torch.bool for x in args[1]):
            return "wait" if args[0].device.type != "cpu" else ""
        if name not in ("aten::_to_copy", "aten::copy_"):
            return ""
        is_new = name == "aten::_to_copy"
        source = args[0] if is_new else args[1]
        target = (kwargs.get("device") or source.device) if is_new else args[0].device
        kinds = (source.device.type, torch.device(target).type)
        if kinds[0] == kinds[1] or kwargs.get("non_blocking") or args[2:3] == (True,):
            return ""
        return "down" if kinds[1] == "cpu" else "up"


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def shard(system: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Steps of a system of rows.py."""

    def make(device: torch.device) -> Trained:
        model = Blocks().to(device, dtype)
        x = torch.ones(4, 7, dtype=dtype, device=device)
        own = trained_by(system, model, adamw(model), **options)

        def step() -> None:
            loss = loss_of(model, x)
            getattr(own, "scale", lambda loss: loss)(loss).backward()
            apply_steps(own)

        return model, step

    return make


def serve(device: torch.device) -> Trained:
    """A worker's calls."""
    model = Blocks().to(device)
    x = torch.ones(4, 7, device=device)
    server = ParameterServer(model, lambda params: torch.optim.SGD(params, 0.1), staleness=0)

    def step() -> None:
        server.pull()
        loss_of(model, x).backward()
        server.push()

    return model, step


def in_backward(kind: Any, group: Any = "none", **options: Any) -> Any:
    """Steps of an optimizer that updates in the backward pass."""

    def make(device: torch.device) -> Trained:
        model = Blocks().to(device)
        x = torch.ones(4, 7, device=device)
        own = kind(model, 0.01, group=group or dist.group.WORLD, **options)

        def step() -> None:
            own.backward(loss_of(model, x))
            own.step()
            own.zero_grad()

        return model, step

    return make


def on_mesh(kind: str, sizes: dict[str, Any], *, pins: bool = False, **options: Any) -> Any:
    """Steps of a model of transformers by parallelize(), with batches of the host."""

    def make(device: torch.device) -> Trained:
        given = make_of_transformers(kind).to(device)
        sgd_of = partial(torch.optim.SGD, lr=0.1)
        owner = parallelize(
            given, ParallelDims(**sizes, device_type=device.type), sgd_of, **options
        )
        ids = ids_of(0).pin_memory() if pins and device.type != "cpu" else ids_of(0)

        def step() -> None:
            owner.step({"input_ids": ids, "labels": ids})
            owner.optimizer.step()
            owner.optimizer.zero_grad()

        return owner.model, step

    return make


def pinned(x: Tensor, device: torch.device) -> Tensor:
    """In memory from which this device copies by itself."""
    return x.pin_memory()


def in_stages(move: Any = None, *, is_tied: bool = False) -> Any:
    """Steps of a Pipeline of torch's layers, with batches of the host or as `move` makes them."""

    def make(device: torch.device) -> Trained:
        blocks: Any = make_tied().blocks() if is_tied else make_model()
        loss_of = tokens_loss if is_tied else nn.functional.mse_loss
        more: Any = {"num_microbatches": 2, "count_items": Tensor.numel, "device": device}
        pipe = pipeline.Pipeline(blocks, loss_of, **more)
        optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
        x, y = token_batch(0) if is_tied else batch(0)
        if move is not None and device.type != "cpu":
            x, y = move(x, device), move(y, device)

        def step() -> None:
            pipe.step(x, y)
            apply_steps(optimizer)

        return pipe.module, step

    return make


def partitioned(**options: Any) -> Any:
    def make(device: torch.device) -> Trained:
        model = Blocks().to(device)
        x = torch.ones(4, 7, device=device)
        optimizer = sgd(model)

        def step() -> None:
            with activations.partition(min_elems=0, **options):
                loss = loss_of(model, x)
            loss.backward()
            apply_steps(optimizer)

        return model, step

    return make


# Models of transformers wait once in a forward pass, for whether sequences are packed, and in a
# pipeline once for each block and micro-batch.
OF_TRANSFORMERS = {"wait": 1}
CHECKED: dict[str, Any] = {"clipped": {"clip_grad_norm": 1.0}, "scaled": {"loss_scale": 1024.0}}
SYSTEMS: dict[str, tuple[Any, dict[str, int]]] = {
    "one process": (shard("one process"), {}),
    **{f"zero {stage}": (shard(f"zero {stage}"), {}) for stage in (1, 2, 3)},
    **{f"zero {stage}, bf16": (shard(f"zero {stage}", torch.bfloat16), {}) for stage in (1, 2)},
    **{
        f"zero {stage}, {name}": (shard(f"zero {stage}", **options), {"wait": 1})
        for stage in (1, 2, 3)
        for name, options in CHECKED.items()
    },
    # The first gradient of a pass is checked before a weight is written.
    "Lomo": (in_backward(Lomo), {"wait": 1}),
    "AdaLomo": (in_backward(AdaLomo), {"wait": 1}),
    "Lomo, replicas": (in_backward(Lomo, None), {"wait": 1}),
    "Lomo, scaled": (in_backward(Lomo, loss_scale=1024.0), {"down": 1}),
    "Lomo, clipped": (in_backward(Lomo, clip_grad_norm=1.0), {"down": 1}),
    "Lomo, clipped in two passes": (  # and each linear layer
        in_backward(Lomo, clip_grad_norm=1.0, clip_mode="two_pass"),
        {"down": 5},
    ),
    # Each of twelve weights and its gradient, before the host updates it; the next is on its way.
    "offload": (shard("offload"), {"event": 12}),
    "offload, bf16": (shard("offload", torch.bfloat16), {"event": 12}),
    # Shards of weights, and a bucket of gradients, which come in the backward pass.
    "zero 2, host": (shard("zero 2, host"), {"event": 13}),
    **{
        f"zero 2, host, {name}": (shard("zero 2, host", **options), {"wait": 1, "event": 13})
        for name, options in CHECKED.items()
    },
    # Twelve gradients, and two units on their way up, before the host writes their rows.
    **{
        f"infinity, {dtype}": (shard("infinity", dtype), {"event": 14})
        for dtype in (torch.float32, torch.bfloat16)
    },
    "data parallel": (on_mesh("Llama", {"dp": 2}), OF_TRANSFORMERS),
    "fsdp": (on_mesh("Llama", {"dp": 1, "fsdp": 2}), OF_TRANSFORMERS),
    "tensor parallel": (on_mesh("Llama", {"tp": 2}), OF_TRANSFORMERS),
    "sequence parallel": (
        on_mesh("Llama", {"tp": 2}, sequence_parallel=True),
        OF_TRANSFORMERS,
    ),
    "pipeline": (in_stages(), {}),
    "pipeline, tied": (in_stages(is_tied=True), {}),
    "pipeline, batches of the device": (in_stages(Tensor.to), {}),
    "pipeline of transformers": (on_mesh("Llama", {"pp": 2}, num_microbatches=2), {"wait": 4}),
    # The copy of the batch, which the program may then write again.
    "pipeline, pinned batches": (in_stages(pinned), {"event": 1}),
    "data parallel, pinned batches": (
        on_mesh("Llama", {"dp": 2}, pins=True),
        {**OF_TRANSFORMERS, "event": 1},
    ),
    # One for each of four layers: how many tokens come.
    "experts": (on_mesh("Mixtral", {"dp": 2, "ep": 2}), {**OF_TRANSFORMERS, "down": 4}),
    # A copy of all weights up, of all gradients down, for each of two servers.
    "parameter server": (serve, {"up": 2, "down": 2}),
    # The digests of a forward pass.
    "partitioned activations": (partitioned(), {"down": 1}),
    "partitioned activations, on the host": (partitioned(offload="cpu"), {"down": 1}),
    "partitioned activations, not checked": (partitioned(offload="cpu", check=False), {}),
}


# ---- without pytest

NUM_STEPS = 3
TIMEOUT = timedelta(seconds=20)
# Of float32 and of 16-bit weights, after a few steps of a small rate.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2.0**-6}


def train(team: Team, kind: str, name: str, facts: dict[str, Any]) -> dict[str, Tensor]:
    """The weights after some steps, on the host; what the last one took goes to the facts.

    In a default group of its own, so that one that failed spoils no other. Collective.
    """
    place_in_group: Any = {"rank": team.rank, "world_size": team.world_size, "timeout": TIMEOUT}
    dist.init_process_group("ringcomm", store=team.open_store(f"{name}, {kind}"), **place_in_group)
    try:
        device = torch.device(kind) if kind == "cpu" else place(kind, 0)
        model, step = SYSTEMS[name][0](device)
        for _ in range(NUM_STEPS - 1):
            step()
        module: Any = torch.get_device_module(device)
        warn = getattr(module, "set_sync_debug_mode", lambda mode: None)  # torch.cuda has it
        warn("warn")
        begin = time.perf_counter()
        with warnings.catch_warnings(record=True) as warned, Waits() as waits:
            warnings.simplefilter("always")
            try:
                step()
            finally:
                warn("default")
        module.synchronize(device)
        facts |= {"waits": dict(waits.counts), "step_ms": 1e3 * (time.perf_counter() - begin)}
        facts["num_warnings"] = sum("synchroniz" in str(each.message) for each in warned)
        found = {key: value.detach().cpu() for key, value in full_weights(model).items()}
        dist.barrier()  # groups end with it, also that of a server which a peer still uses
        return found
    finally:
        dist.destroy_process_group()


def compare(team: Team, kind: str, name: str) -> dict[str, Any]:
    """What a rank finds of a system. Collective."""
    facts: dict[str, Any] = {"right": False}
    try:
        expected = train(team, "cpu", name, {})
        device = place(kind, 0)
        module: Any = torch.get_device_module(device)
        gc.collect()
        module.reset_peak_memory_stats(device)
        before = module.memory_allocated(device)
        found = train(team, kind, name, facts)
        facts["peak_bytes"] = module.max_memory_allocated(device) - before
        parts = [
            (found[key].double() - value.double()).abs().max() / TOLERANCES[value.dtype]
            for key, value in expected.items()
            if value.numel() and value.is_floating_point()
        ]
        facts |= {
            "num_weights": len(parts),
            "difference_of_tolerance": float(torch.stack(parts).max()),
        }
        has_few_waits = Counter(facts["waits"]) <= Counter(SYSTEMS[name][1])
        facts["right"] = facts["difference_of_tolerance"] <= 1 and has_few_waits
    except Exception:
        facts["error"] = traceback.format_exc(limit=-3)
    return facts


def main(argv: list[str]) -> int:
    """Trains with each system; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--systems", default=";".join(SYSTEMS), help="separated by semicolons")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="lines go there")
    options = parser.parse_args(argv)
    names = options.systems.split(";")
    if unknown := set(names) - {*SYSTEMS}:
        parser.error(f"unknown systems {'; '.join(sorted(unknown))}")
    is_right = True

    def rank_main(team: Team) -> None:
        torch.set_num_threads(1)
        for name in names:
            by_rank = team.share(compare(team, options.device, name))
            if team.rank == 0:
                right = all(facts.pop("right") for facts in by_rank)
                team.report({"system": name, "right": right, "ranks": by_rank})

    def write(line: dict[str, Any]) -> None:
        nonlocal is_right
        is_right = is_right and line["right"]
        text = json.dumps({"kind": "device_systems", "device": options.device, **line})
        print(text, flush=True)
        with options.json.open("a", encoding="utf-8") as file:
            print(text, file=file)

    run_ranks(2, rank_main, write)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
