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


def traced(path: Path, body: Callable[[], Any]) -> list[dict[str, Any]]:
    """The events of `body`, as a trace file has them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        body()
    profiler.export_chrome_trace(str(path))
    return list(json.loads(path.read_text())["traceEvents"])


@in_ranks(2)
@pytest.mark.parametrize("is_async", [False, True])
def test_profiler(rank: int, is_async: bool, tmp_path: Path) -> None:
    """ringcomm's event, for which torch's own tests look, and record_param_comms."""
    own, large, whole = torch.ones(10), torch.ones(200_000), torch.ones(20, dtype=torch.bfloat16)
    one, parts = whole[:10].clone(), [torch.ones(1), torch.ones(2)]
    fields = ("Collective name", "In msg nelems", "Out msg nelems", "dtype", "Group size")
    message = (dist.recv, (own, 0)) if rank else (dist.send, (own, 1))
    at_root = [torch.ones(10), torch.ones(10)] if rank == 0 else None
    cases: list[tuple[Any, tuple[Any, ...], str, int, int]] = [
        (dist.all_reduce, (own,), "all_reduce/one_shot", 10, 10),
        (dist.all_reduce, (large,), "all_reduce/two_shot", 200_000, 200_000),
        (dist.all_gather, (parts, parts[rank].clone()), "all_gather", rank + 1, 3),
        (dist.reduce_scatter_tensor, (one, whole), "_reduce_scatter_base", 20, 10),
        (dist.gather, (own, at_root, 0), "gather", 10, 20 * (1 - rank)),
        (*message, "recv" if rank else "send", 10 * (1 - rank), 10 * rank),
    ]
    for number, (call, args, name, *elems) in enumerate(cases):
        options = {} if call in (dist.send, dist.recv) else {"async_op": is_async}

        def body(call: Any = call, args: Any = args, options: Any = options) -> None:
            work = call(*args, **options)
            if hasattr(work, "wait"):
                work.wait()

        events = traced(tmp_path / f"{number}-{rank}", body)
        event_name = f"ringcomm:{name.partition('/')[0]}"
        assert len([e for e in events if e.get("name") == event_name]) == 1, name
        (event,) = (e["args"] for e in events if e.get("name") == "record_param_comms")
        dtype = "BFloat16" if name == "_reduce_scatter_base" else "Float"
        assert [event[field] for field in fields] == [name, *elems, dtype, 2], name
    # Without a profiler nothing is recorded, nor afterwards.
    dist.all_reduce(torch.ones(3))
    events = traced(tmp_path / f"none{rank}", lambda: None)
    assert not [e for e in events if "comms" in e.get("name", "")]
