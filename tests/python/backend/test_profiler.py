"""What torch.profiler shows of collectives."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

Event = dict[str, Any]


def traced(path: str, body: Callable[[], Any]) -> list[Event]:
    """The events of `body`, as a trace file has them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        body()
    profiler.export_chrome_trace(path)
    with open(path) as file:
        return list(json.load(file)["traceEvents"])


def calls() -> dict[str, tuple[Callable[[bool], Any], str, int, int, str]]:
    """Of each: the call, its name in the trace, elements in and out, dtype."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    small, large = torch.ones(10), torch.ones(200_000)
    wide = torch.ones(10 * world_size, dtype=torch.bfloat16)
    one = torch.ones(10, dtype=torch.bfloat16)
    lists = [torch.ones(r + 1) for r in range(world_size)]
    is_root = rank == 0
    return {
        "all_reduce": (
            lambda a: dist.all_reduce(small, async_op=a),
            "all_reduce/one_shot",
            10,
            10,
            "Float",
        ),
        "all_reduce_large": (
            lambda a: dist.all_reduce(large, async_op=a),
            "all_reduce/two_shot",
            200_000,
            200_000,
            "Float",
        ),
        "broadcast": (lambda a: dist.broadcast(small, 0, async_op=a), "broadcast", 10, 10, "Float"),
        "reduce": (lambda a: dist.reduce(small, 0, async_op=a), "reduce", 10, 10, "Float"),
        "all_gather": (
            lambda a: dist.all_gather(lists, lists[rank].clone(), async_op=a),
            "all_gather",
            rank + 1,
            world_size * (world_size + 1) // 2,
            "Float",
        ),
        "_all_gather_base": (
            lambda a: dist.all_gather_into_tensor(wide, one, async_op=a),
            "_all_gather_base",
            10,
            10 * world_size,
            "BFloat16",
        ),
        "_reduce_scatter_base": (
            lambda a: dist.reduce_scatter_tensor(one, wide, async_op=a),
            "_reduce_scatter_base",
            10 * world_size,
            10,
            "BFloat16",
        ),
        "gather": (
            lambda a: dist.gather(
                small, [torch.empty(10) for _ in range(world_size)] if is_root else None, async_op=a
            ),
            "gather",
            10,
            10 * world_size if is_root else 0,
            "Float",
        ),
        "scatter": (
            lambda a: dist.scatter(
                small, [small.clone()] * world_size if is_root else None, async_op=a
            ),
            "scatter",
            10 * world_size if is_root else 0,
            10,
            "Float",
        ),
        "all_to_all": (
            lambda a: dist.all_to_all_single(torch.empty_like(wide), wide, async_op=a),
            "all_to_all",
            10 * world_size,
            10 * world_size,
            "BFloat16",
        ),
    }


def check_collectives(rank: int, folder: str, is_async: bool) -> None:
    for name, (call, title, num_in, num_out, dtype) in calls().items():

        def body(call: Callable[[bool], Any] = call) -> None:
            work = call(is_async)
            if work is not None:
                work.wait()

        events = traced(f"{folder}/{name}{rank}", body)
        # The event that upstream's tests look for.
        assert [e for e in events if e.get("name") == "ringcomm:" + title.split("/")[0]], name
        (event,) = (e["args"] for e in events if e.get("name") == "record_param_comms")
        assert event["Collective name"] == title
        assert (event["In msg nelems"], event["Out msg nelems"]) == (num_in, num_out), name
        assert (event["Group size"], event["dtype"]) == (dist.get_world_size(), dtype)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("is_async", [False, True])
def test_collectives(world_size: int, is_async: bool, tmp_path: Any) -> None:
    if world_size > 1:
        run_ranks(world_size, check_collectives, str(tmp_path), is_async)
    else:
        run_ranks(1, check_unseen, str(tmp_path))


def check_unseen(rank: int, folder: str) -> None:
    """Without a profiler nothing is recorded, nor afterwards."""
    dist.all_reduce(torch.ones(3))
    assert not [e for e in traced(f"{folder}/none", lambda: None) if "comms" in e.get("name", "")]


def check_numbers(rank: int, folder: str) -> None:
    """Given when a call is made, also where it waits for its turn."""
    works: list[Any] = []

    def body() -> None:
        for num_elems in (300_000, 10, 20):
            works.append(dist.all_reduce(torch.ones(num_elems), async_op=True))
        # Here: torch writes the end of a work's event where the profiler, once it has stopped, has
        # freed it (c10d::Work carries the profiler's state along; Gloo's works crash as well).
        for work in works:
            work.wait()

    events = traced(f"{folder}/numbers{rank}", body)
    numbers = [e["args"]["Seq"] for e in events if e.get("name") == "record_param_comms"]
    assert numbers == list(range(numbers[0], numbers[0] + 3))


def test_sequence_numbers(tmp_path: Any) -> None:
    run_ranks(2, check_numbers, str(tmp_path))


def check_messages(rank: int, folder: str) -> None:
    tensor = torch.ones(7, dtype=torch.int64)

    def body() -> None:
        if rank == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)

    (event,) = (
        e["args"]
        for e in traced(f"{folder}/p2p{rank}", body)
        if e.get("name") == "record_param_comms"
    )
    assert event["Collective name"] == ("send" if rank == 0 else "recv")
    assert (event["In msg nelems"], event["Out msg nelems"]) == ((7, 0) if rank == 0 else (0, 7))
    assert event["dtype"] == "Long"


def test_messages(tmp_path: Any) -> None:
    run_ranks(2, check_messages, str(tmp_path))
