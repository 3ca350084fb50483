"""What a step with LOMO keeps in memory, beside AdamW: torch's MemTracker, and its allocator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from allocations import peak_bytes, record_allocations
from oracle import num_threads
from steps import apply_steps
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker

from ringcomm.optim import AdaLomo, InBackwardOptimizer, Lomo

WIDTH, VOCAB = 256, 1024
IDS = torch.arange(64).view(2, 32)


def make() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8))
    return nn.Sequential(nn.Embedding(VOCAB, WIDTH), *layers, nn.LayerNorm(WIDTH))


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), 1e-3, fused=True),
    "lomo": lambda model: Lomo(model, 1e-3),
    "lomo deferred": lambda model: Lomo(model, 1e-3, clip_grad_norm=1.0, clip_mode="deferred"),
    "lomo two_pass": lambda model: Lomo(model, 1e-3, clip_grad_norm=1.0, clip_mode="two_pass"),
    "adalomo": lambda model: AdaLomo(model, 1e-3),
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss = model(IDS).square().mean()
    if isinstance(optimizer, InBackwardOptimizer):
        optimizer.backward(loss)
    else:
        loss.backward()
    apply_steps(optimizer)


def kept_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = (t for state in optimizer.state.values() for t in state.values())
    return sum(t.nbytes for t in tensors if isinstance(t, Tensor) and t.dim())


@num_threads(1)  # the profiler sees what operators allocate in its own thread
def measure(name: str) -> tuple[dict[str, int], int, int]:
    """Parts at the peak by MemTracker, the allocator's peak of a later step, the states kept."""
    model = make()
    optimizer = OPTIMIZERS[name](model)
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        for _ in range(2):
            tracker.reset_mod_stats()
            step(model, optimizer)
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    parts = {str(getattr(part, "value", part)): num_bytes for part, num_bytes in peak.items()}
    model = make()
    optimizer = OPTIMIZERS[name](model)
    step(model, optimizer)
    with record_allocations() as sizes:
        step(model, optimizer)
    return parts, peak_bytes(sizes), kept_bytes(optimizer)


WEIGHTS = sum(param.nbytes for param in make().parameters())


@pytest.mark.parametrize("name", ["lomo", "lomo two_pass", "adalomo"])
def test_no_gradients_and_no_states(name: str) -> None:
    """AdamW keeps weights, gradients and two states: 16 bytes a weight. LOMO keeps the weights."""
    adamw, adamw_transient, adamw_kept = measure("adamw")
    parts, transient, kept = measure(name)
    assert parts["Parameter"] == adamw["Parameter"] == WEIGHTS
    assert adamw["Total"] >= 3.9 * WEIGHTS
    assert adamw_kept == 2 * WEIGHTS
    # The norm's weights are the only ones whose gradient is a tensor.
    assert parts["Gradient"] <= 4 * 2 * WIDTH
    assert kept <= 0.02 * WEIGHTS  # AdaLomo: a row and a column of each weight
    # What a step allocates besides is less by the gradients.
    largest = 4 * VOCAB * WIDTH
    assert adamw_transient >= WEIGHTS
    assert transient <= adamw_transient - WEIGHTS + 2 * largest


def test_deferred_clipping_holds_gradients() -> None:
    """At most all of them; of a layer the pair (input, output's gradient) where that is smaller."""
    _, plain, _ = measure("lomo")
    _, deferred, _ = measure("lomo deferred")
    pairs = 8 * 4 * IDS.numel() * 2 * WIDTH
    assert plain < deferred <= plain + pairs + 8 * IDS.numel() * WIDTH
