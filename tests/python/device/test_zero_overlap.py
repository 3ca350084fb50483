"""ZeRO-2 reduces gradients beside the backward pass, on a stream of its own."""

from __future__ import annotations

import time
from typing import Any

import emugpu
import emulated_gpu
import torch
from emulated_gpu import in_emulated_ranks
from rows import Blocks, sgd
from torch import Tensor

from ringcomm.parallel import zero
from ringcomm.parallel.flat_collectives import side_stream

pytestmark = emulated_gpu.needs_emulated_gpu

WAIT_S = 20.0
QUEUES = {"RINGCOMM_EMULATOR_QUEUES": "0"}  # each stream has its own


def trained(device: torch.device, rank: int) -> tuple[Any, Any]:
    model = Blocks().to(device)
    return model, zero.shard(model, sgd(model), 2, bucket_bytes=1 << 11)


def batch(rank: int, device: torch.device) -> Tensor:
    return torch.arange(28.0, device=device).view(4, 7).mul_(0.01 * (rank + 1))


@in_emulated_ranks(2, env=QUEUES)
def test_the_backward_pass_goes_on_while_a_bucket_is_reduced(rank: int) -> None:
    """And one at a time: the next is reduced when it is over."""
    device = torch.device("emugpu", emugpu.current_device())
    model, optimizer = trained(device, rank)
    model(batch(rank, device)).square().mean().backward()  # makes the stream
    optimizer.step()
    emugpu.synchronize()
    side = side_stream(device, "reductions")
    passed: list[bool] = []

    def look(_: Tensor) -> None:
        event = emugpu.current_stream().record_event()
        end = time.monotonic() + WAIT_S
        while not event.query() and time.monotonic() < end:
            time.sleep(0.001)
        passed.append(event.query())

    # The last gradient of the pass, of the second of two buckets.
    handle = model.first.weight.register_hook(look)
    held = emugpu.hold(side)
    model(batch(rank, device)).square().mean().backward()
    assert passed == [True]
    assert not emugpu.current_stream().query()  # which now waits for the reductions
    held.release()
    handle.remove()
    optimizer.step()
    emugpu.synchronize()


@in_emulated_ranks(2, env={**QUEUES, "RINGCOMM_EMULATOR_DELAY_US": "1000"})
def test_late_reductions_give_the_steps_of_the_host(rank: int) -> None:
    device = torch.device("emugpu", emugpu.current_device())
    found = []
    for place in (device, torch.device("cpu")):
        model, optimizer = trained(place, rank)
        for _ in range(3):
            for _ in range(2):  # micro-batches
                model(batch(rank, place)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([param.detach().cpu() for param in model.parameters()])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
