"""What other threads do with groups while a stream is captured, on emulated GPUs."""

from __future__ import annotations

import datetime
import threading
from typing import Any

import emugpu
import pytest
import torch
import torch.distributed as dist
from emulated_gpu import needs_emulated_gpu, run_on_gpus, with_kernels

pytestmark = needs_emulated_gpu

GPU = "emugpu"


def check_capture(rank: int) -> None:
    """Queries, waits, works that are dropped, and a group that goes, while this thread captures."""
    world_size = dist.get_world_size()
    other, gone = dist.new_group(), dist.new_group()
    x, y, z = (torch.ones(1000, device=GPU) for _ in range(3))
    for group in (None, other, gone):
        dist.all_reduce(x, group=group)
    x.fill_(1.0)
    emugpu.synchronize()
    errors: list[BaseException] = []

    def use_groups() -> None:
        try:
            emugpu.set_device(0)
            with emugpu.stream(side):
                for _ in range(5):
                    dist.all_reduce(y, group=other, async_op=True)
                work = dist.all_reduce(y, group=other, async_op=True)
                assert work is not None
                work.wait(datetime.timedelta(seconds=20))
                while not work.is_completed():
                    pass
                dist.all_reduce(z, group=gone)
            dist.destroy_process_group(gone)
        except BaseException as error:
            errors.append(error)

    side = emugpu.Stream()
    graph = emugpu.CUDAGraph()
    with emugpu.graph(graph):
        thread = threading.Thread(target=use_groups)
        thread.start()
        dist.all_reduce(x)
        thread.join()
        dist.all_reduce(x)
    assert not errors, errors
    graph.replay()
    assert x.tolist() == [float(world_size) ** 2] * 1000
    assert y.tolist() == [float(world_size) ** 6] * 1000
    assert z.tolist() == [float(world_size)] * 1000


@pytest.mark.parametrize("vmm", ["1", "0"], ids=["fds", "ipc"])
def test_calls_of_another_thread_leave_a_capture_whole(vmm: str) -> None:
    env: dict[str, Any] = {**with_kernels(), "RINGCOMM_EMULATOR_VMM": vmm}
    run_on_gpus(2, check_capture, env=env, fresh=True)
