"""What one sees of ringcomm: TORCH_DISTRIBUTED_DEBUG=DETAIL, and the profiler's events."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks

# ---- TORCH_DISTRIBUTED_DEBUG=DETAIL: torch wraps the group, and compares calls over a Gloo group


@in_ranks(2, backend=None, fresh=True)
def test_detail_names_both_calls(rank: int, tmp_path: Path) -> None:
    """torch's own check comes before ringcomm's. Training so: test_torchrun.py."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # the variable is read when torch is imported
    store = dist.FileStore(str(tmp_path / "store"), 2)
    dist.init_process_group("ringcomm", store=store, rank=rank, world_size=2)
    wrapper: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    assert "Wrapper" in type(wrapper).__name__
    assert wrapper.wrapped_pg.name() == "ringcomm"
    with pytest.raises(RuntimeError, match="running collective: CollectiveFingerPrint") as caught:
        dist.all_reduce(torch.ones(2 + rank))
    assert all(f"TensorShape=[{size}]" in str(caught.value) for size in (2, 3))
    total = torch.ones(3)  # nothing has been exchanged, the group lives
    dist.all_reduce(total, group=dist.new_group([1, 0]))
    assert total.tolist() == [2] * 3
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, rank)
    assert everyone == [0, 1]
    dist.barrier()


# ---- profiler

Call = Callable[..., Any]
# The call; of record_param_comms the name, elements in and out, and dtype.
Profiled = tuple[Call, str, int, int, str]


def traced(path: Path, body: Callable[[], Any]) -> list[dict[str, Any]]:
    """The events of `body`, as a trace file has them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        body()
    profiler.export_chrome_trace(str(path))
    return list(json.loads(path.read_text())["traceEvents"])


def profiled(rank: int) -> dict[str, Profiled]:
    """By the event that torch's own tests look for."""
    small, large = torch.ones(10), torch.ones(200_000)
    wide, one = torch.ones(20, dtype=torch.bfloat16), torch.ones(10, dtype=torch.bfloat16)
    uneven, parts = [torch.ones(1), torch.ones(2)], [torch.ones(10), torch.ones(10)]
    of_root: Any = parts if rank == 0 else None
    at_root = 20 if rank == 0 else 0

    def of(call: Call, *args: Any) -> Call:
        return lambda is_async: call(*args, async_op=is_async)

    messages: dict[str, Profiled] = {
        "send": (lambda is_async: dist.send(small, 1), "send", 10, 0, "Float"),
        "recv": (lambda is_async: dist.recv(small, 0), "recv", 0, 10, "Float"),
    }
    message = ("send", "recv")[rank]
    gather, scatter = of(dist.gather, small, of_root, 0), of(dist.scatter, small, of_root, 0)
    return {
        "all_reduce": (of(dist.all_reduce, small), "all_reduce/one_shot", 10, 10, "Float"),
        "all_reduce ": (
            of(dist.all_reduce, large),
            *("all_reduce/two_shot", 200_000, 200_000, "Float"),
        ),
        "broadcast": (of(dist.broadcast, small, 0), "broadcast", 10, 10, "Float"),
        "reduce": (of(dist.reduce, small, 0), "reduce", 10, 10, "Float"),
        "all_gather": (
            of(dist.all_gather, uneven, uneven[rank].clone()),
            *("all_gather", rank + 1, 3, "Float"),
        ),
        "_all_gather_base": (
            of(dist.all_gather_into_tensor, wide, one),
            *("_all_gather_base", 10, 20, "BFloat16"),
        ),
        "reduce_scatter": (
            of(dist.reduce_scatter, small, parts),
            *("reduce_scatter", 20, 10, "Float"),
        ),
        "_reduce_scatter_base": (
            of(dist.reduce_scatter_tensor, one, wide),
            *("_reduce_scatter_base", 20, 10, "BFloat16"),
        ),
        "gather": (gather, "gather", 10, at_root, "Float"),
        "scatter": (scatter, "scatter", at_root, 10, "Float"),
        "all_to_all": (
            of(dist.all_to_all_single, torch.empty_like(wide), wide),
            *("all_to_all", 20, 20, "BFloat16"),
        ),
        message: messages[message],
    }


@in_ranks(2)
@pytest.mark.parametrize("is_async", [False, True])
def test_profiler(rank: int, is_async: bool, tmp_path: Path) -> None:
    for number, (name, (call, *expected)) in enumerate(profiled(rank).items()):

        def body(call: Call = call) -> None:
            work = call(is_async)
            if hasattr(work, "wait"):
                work.wait()

        events = traced(tmp_path / f"{number}-{rank}", body)
        assert len([e for e in events if e.get("name") == f"ringcomm:{name.strip()}"]) == 1, name
        (event,) = (e["args"] for e in events if e.get("name") == "record_param_comms")
        fields = ("Collective name", "In msg nelems", "Out msg nelems", "dtype", "Group size")
        assert [event[field] for field in fields] == [*expected, 2], name
    # Without a profiler nothing is recorded, nor afterwards.
    dist.all_reduce(torch.ones(3))
    events = traced(tmp_path / f"none{rank}", lambda: None)
    assert not [e for e in events if "comms" in e.get("name", "")]
