"""Training that memory does not hold: a quarter of what its states take is enough with files."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import in_ranks, run_ranks
from steps import train_step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ringcomm.parallel import offload, zero

LAYERS, WIDTH, STEPS = 24, 640, 3
STATE_BYTES = 16 * LAYERS * WIDTH * WIDTH  # weights, gradients, two moments
M_MMAP_THRESHOLD = -3


class SeededLinear(nn.Linear):
    """Its first values are those of its number, in whatever order layers are made."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(WIDTH, WIDTH, bias=False)

    def reset_parameters(self) -> None:
        generator = torch.Generator().manual_seed(self.number)
        with torch.no_grad():
            self.weight.normal_(0, 0.5 / WIDTH**0.5, generator=generator)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(SeededLinear, range(LAYERS)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(checkpoint(layer, x, use_reentrant=False))
        return x


def limit_memory(num_bytes: int) -> None:
    """Allows so many bytes more than there are now, by the kernel's count."""

    # glibc would keep what is freed, by a threshold that grows, and count it against the limit.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    text = Path("/proc/self/status").read_text(encoding="ascii")
    line = next(line for line in text.splitlines() if line.startswith("VmData"))
    limit = (int(line.split()[1]) << 10) + num_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def train(rank: int, folder: Path | None, is_limited: bool) -> list[float]:
    if is_limited:
        limit_memory(STATE_BYTES // 4)
    with torch.device("cpu" if folder is None else "meta"):
        model = Stack()
    optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-3)
    if folder is not None:
        own = offload.Offloaded(
            torch.optim.AdamW(model.parameters(), 1e-3), to="nvme", path=folder, chunk_elems=1 << 18
        )
        optimizer = zero.shard(model, own, 3, offload_weights=True)
    losses = []
    for step in range(STEPS):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        losses.append(train_step(model(x).square().mean(), optimizer))
    return losses


def test_four_times_the_memory_trains_to_the_same_losses(tmp_path: Path) -> None:
    (plain,) = run_ranks(1, train, None, False, fresh=True)
    (limited,) = run_ranks(1, train, tmp_path, True, fresh=True)
    assert limited == pytest.approx(plain, rel=1e-5)


@in_ranks(1, fresh=True)
def test_the_same_without_offload_dies_of_it(rank: int) -> None:
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        train(rank, None, True)
