"""zero.shard(offload_weights=True) of a model on a device: weights come up, gradients go down."""

from __future__ import annotations

import tempfile
import time
from typing import Any

import emugpu
import emulated_gpu
import pytest
import torch
from emulated_gpu import in_emulated_ranks
from full_states import full_weights
from steps import train_step
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ringcomm.parallel import offload, zero
from ringcomm.parallel.flat_collectives import side_stream

pytestmark = emulated_gpu.needs_emulated_gpu

WAIT_S = 20.0
WIDTH = 192  # a matrix is above the 64 KiB from which pieces are in the tier
QUEUES = {"RINGCOMM_EMULATOR_QUEUES": "0"}  # each stream has its own
LATE = {**QUEUES, "RINGCOMM_EMULATOR_DELAY_US": "1000"}


class Layers(nn.Module):
    """Units, of which the second is frozen, and weights outside of them."""

    def __init__(self, dtype: torch.dtype = torch.float32, num_layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(7, WIDTH, dtype=dtype)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(num_layers))
        self.layers[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.float().square().mean()


def sharded(model: nn.Module, to: str = "cpu", **options: Any) -> Any:
    place: Any = {"to": to, "path": tempfile.gettempdir()} if to == "nvme" else {"to": to}
    trained = [param for param in model.parameters() if param.requires_grad]
    own = offload.Offloaded(torch.optim.SGD(trained, 0.1, momentum=0.9), chunk_elems=9000, **place)
    return zero.shard(model, own, 3, offload_weights=True, **options)


def with_muon(model: nn.Module) -> Any:
    """It needs full matrices, which a rank has one at a time."""
    by_dim: dict[bool, list[Any]] = {False: [], True: []}
    for param in model.parameters():
        by_dim[param.dim() == 2] += [param] if param.requires_grad else []
    given = [torch.optim.SGD(by_dim[False], 0.1), torch.optim.Muon(by_dim[True], 0.01)]
    return zero.shard(model, [*map(offload.Offloaded, given)], 3, offload_weights=True)


def rows_of(rank: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    rows = torch.arange(28.0).view(4, 7).mul_(0.01 * (rank + 1))
    return rows.to(device, dtype)


@pytest.mark.parametrize("to", ["cpu", "nvme"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@in_emulated_ranks(2, env=LATE)
def test_late_copies_give_the_steps_of_the_host(rank: int, dtype: torch.dtype, to: str) -> None:
    """With two micro-batches, whose second gradients are added to the first."""
    found = []
    for device in (torch.device("emugpu", emugpu.current_device()), torch.device("cpu")):
        model = Layers(dtype).to(device)
        optimizer = sharded(model, to, clip_grad_norm=0.5)
        for _ in range(4):
            for part in range(2):
                model(rows_of(rank + part, device, dtype)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(({k: v.cpu() for k, v in full_weights(optimizer).items()}, optimizer))
        optimizer.close()
        for name, param in model.named_parameters():
            assert param.device == device
            assert torch.equal(param.detach().cpu(), found[-1][0][name])
    (ours, on_device), (expected, on_host) = found
    assert on_device.grad_norm == pytest.approx(on_host.grad_norm, rel=1e-3)
    for name, value in expected.items():
        atol = 1e-6 if dtype == torch.float32 else 4e-3
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=atol)


@in_emulated_ranks(2, env=LATE)
def test_steps_on_full_weights(rank: int) -> None:
    found = []
    for device in (torch.device("emugpu", emugpu.current_device()), torch.device("cpu")):
        model = Layers().to(device)
        optimizer = with_muon(model)
        for _ in range(3):
            train_step(model(rows_of(rank, device)), optimizer)
        found.append(full_weights(optimizer))
    for name, value in found[1].items():
        torch.testing.assert_close(found[0][name].cpu(), value, rtol=1e-4, atol=1e-5)


def is_over(event: torch.Event) -> bool:
    """Waits for it, for a while."""
    end = time.monotonic() + WAIT_S
    while not event.query() and time.monotonic() < end:
        time.sleep(0.001)
    return event.query()


@in_emulated_ranks(2, env=QUEUES)
def test_a_unit_computes_while_the_next_weights_come(rank: int) -> None:
    """And the backward pass goes on while its gradients go down."""
    device = torch.device("emugpu", emugpu.current_device())
    model = Layers().to(device)
    optimizer = sharded(model)
    for _ in range(2):  # then the order of units is known
        train_step(model(rows_of(rank, device)), optimizer)
    emugpu.synchronize()
    held: list[Any] = []
    passed: list[bool] = []

    def hold(*_: Any) -> None:
        held.append(emugpu.hold(side_stream(device, "uploads")))

    def look(*_: Any) -> None:
        passed.append(is_over(emugpu.current_stream().record_event()))
        held.pop().release()

    # The weights of layers[1] are on their way when layers[0] has run, those of layers[2] not.
    handles = [model.layers[0].register_forward_hook(hold)]
    handles += [model.layers[1].register_forward_hook(look)]
    loss = model(rows_of(rank, device))
    held.append(emugpu.hold(side_stream(device, "copies")))
    loss.backward()
    passed.append(is_over(emugpu.current_stream().record_event()))
    held.pop().release()
    assert passed == [True, True]
    optimizer.step()
    for handle in handles:
        handle.remove()


class Peak(TorchDispatchMode):
    """The most memory that tensors of the device have had after an operator."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.num_bytes = max(self.num_bytes, emugpu.memory_allocated())
        return found


@in_emulated_ranks(2)
def test_the_device_has_the_weights_of_one_unit(rank: int) -> None:
    """Weights, gradients and states are in host memory; the buffers are as predicted."""
    device = torch.device("emugpu", emugpu.current_device())
    x = rows_of(rank, device)[:1]
    emugpu.synchronize()
    before = emugpu.memory_allocated()
    model: Any = Layers(num_layers=8).to(device)
    place: Any = {"world_size": 2, "rank": rank, "offload_weights": True}
    own = torch.optim.SGD([*model.parameters()], 0.1)
    memory = zero.predict_memory(model, own, 3, **place)
    optimizer = sharded(model)
    for _ in range(2):
        train_step(model(x), optimizer)
    emugpu.synchronize()
    between = emugpu.memory_allocated() - before
    # Two places for a rank's pieces of a layer, beside its packed small ones.
    shard = model.layers[0].weight.nbytes // 2
    assert between <= 2 * (shard + 1024)
    with Peak() as peak:
        train_step(model(x), optimizer)
    activations = 80 * WIDTH * 4
    assert peak.num_bytes - before <= memory.buffers + activations
    assert memory.buffers < sum(param.numel() * param.itemsize for param in model.parameters())


@in_emulated_ranks(2)
def test_a_model_on_the_meta_device_is_made_on_the_default_device(rank: int) -> None:
    device = torch.device("emugpu", emugpu.current_device())
    with torch.device("meta"):
        model = Layers()
    with device:
        optimizer = sharded(model)
    loss = model(rows_of(rank, device))
    assert loss.device == device
    train_step(loss, optimizer)
    assert {value.isfinite().all().item() for value in full_weights(optimizer).values()} == {True}
