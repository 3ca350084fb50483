"""What one sees of ringcomm: TORCH_DISTRIBUTED_DEBUG=DETAIL, and the profiler's events."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from curves import Run, assert_same_run, make_model, single_process, train, weights_of
from ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel

WORLD = 2


# ---- TORCH_DISTRIBUTED_DEBUG=DETAIL: torch wraps the group, and compares calls over a Gloo group


def train_in_detail(rank: int, folder: str) -> tuple[Run, str]:
    """The run, and the error of calls that differ: torch's own check comes before ringcomm's."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # the variable is read when torch is imported
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group("ringcomm", store=store, rank=rank, world_size=WORLD)
    wrapper: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    assert "Wrapper" in type(wrapper).__name__
    assert wrapper.wrapped_pg.name() == "ringcomm"
    model = DistributedDataParallel(make_model(), bucket_cap_mb=0.001)
    losses = train(model, rank, WORLD)
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(2 + rank))
    total = torch.ones(3)  # nothing has been exchanged, the group lives
    dist.all_reduce(total, group=dist.new_group([1, 0]))
    assert total.tolist() == [2] * 3
    everyone: list[Any] = [None] * WORLD
    dist.all_gather_object(everyone, rank)
    assert everyone == [0, 1]
    dist.barrier()
    return Run(losses, weights_of(model)), str(caught.value)


def test_detail_trains_and_names_both_calls(tmp_path: Path) -> None:
    results = run_ranks(WORLD, train_in_detail, str(tmp_path), backend=None, fresh=True)
    assert_same_run([run for run, _ in results], single_process())
    for _, text in results:
        assert "running collective: CollectiveFingerPrint" in text
        assert "TensorShape=[2]" in text
        assert "TensorShape=[3]" in text


# ---- profiler

Event = dict[str, Any]
# The call; of record_param_comms the name, elements in and out, and dtype.
Profiled = tuple[Callable[[bool], Any], str, int, int, str]


def traced(path: str, body: Callable[[], Any]) -> list[Event]:
    """The events of `body`, as a trace file has them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        body()
    profiler.export_chrome_trace(path)
    with open(path) as file:
        return list(json.load(file)["traceEvents"])


def calls(rank: int) -> dict[str, Profiled]:
    """By the event that torch's own tests look for."""
    small, large = torch.ones(10), torch.ones(200_000)
    wide, one = torch.ones(20, dtype=torch.bfloat16), torch.ones(10, dtype=torch.bfloat16)
    uneven, parts = [torch.ones(1), torch.ones(2)], [torch.ones(10), torch.ones(10)]
    of_root: Any = parts if rank == 0 else None
    at_root = 20 if rank == 0 else 0
    message: Profiled = (
        lambda a: dist.send(small, 1) if rank == 0 else dist.recv(small, 0),
        *("send", 10, 0, "Float"),
    )
    if rank == 1:
        message = (message[0], "recv", 0, 10, "Float")
    two_shot = ("all_reduce/two_shot", 200_000, 200_000, "Float")
    return {
        "all_reduce": (
            lambda a: dist.all_reduce(small, async_op=a),
            *("all_reduce/one_shot", 10, 10, "Float"),
        ),
        "all_reduce ": (lambda a: dist.all_reduce(large, async_op=a), *two_shot),
        "broadcast": (
            lambda a: dist.broadcast(small, 0, async_op=a),
            *("broadcast", 10, 10, "Float"),
        ),
        "reduce": (lambda a: dist.reduce(small, 0, async_op=a), "reduce", 10, 10, "Float"),
        "all_gather": (
            lambda a: dist.all_gather(uneven, uneven[rank].clone(), async_op=a),
            *("all_gather", rank + 1, 3, "Float"),
        ),
        "_all_gather_base": (
            lambda a: dist.all_gather_into_tensor(wide, one, async_op=a),
            *("_all_gather_base", 10, 20, "BFloat16"),
        ),
        "reduce_scatter": (
            lambda a: dist.reduce_scatter(small, parts, async_op=a),
            *("reduce_scatter", 20, 10, "Float"),
        ),
        "_reduce_scatter_base": (
            lambda a: dist.reduce_scatter_tensor(one, wide, async_op=a),
            *("_reduce_scatter_base", 20, 10, "BFloat16"),
        ),
        "gather": (
            lambda a: dist.gather(small, of_root, async_op=a),
            *("gather", 10, at_root, "Float"),
        ),
        "scatter": (
            lambda a: dist.scatter(small, of_root, async_op=a),
            *("scatter", at_root, 10, "Float"),
        ),
        "all_to_all": (
            lambda a: dist.all_to_all_single(torch.empty_like(wide), wide, async_op=a),
            *("all_to_all", 20, 20, "BFloat16"),
        ),
        "send" if rank == 0 else "recv": message,
    }


def check_events(rank: int, folder: str, is_async: bool) -> None:
    for number, (name, (call, *expected)) in enumerate(calls(rank).items()):

        def body(call: Callable[[bool], Any] = call) -> None:
            work = call(is_async)
            if hasattr(work, "wait"):
                work.wait()

        events = traced(f"{folder}/{number}-{rank}", body)
        assert len([e for e in events if e.get("name") == f"ringcomm:{name.strip()}"]) == 1, name
        (event,) = (e["args"] for e in events if e.get("name") == "record_param_comms")
        fields = ("Collective name", "In msg nelems", "Out msg nelems", "dtype", "Group size")
        assert [event[field] for field in fields] == [*expected, WORLD], name
    # Without a profiler nothing is recorded, nor afterwards.
    dist.all_reduce(torch.ones(3))
    assert not [
        e for e in traced(f"{folder}/none{rank}", lambda: None) if "comms" in e.get("name", "")
    ]


@pytest.mark.parametrize("is_async", [False, True])
def test_profiler(is_async: bool, tmp_path: Path) -> None:
    run_ranks(WORLD, check_events, str(tmp_path), is_async)
