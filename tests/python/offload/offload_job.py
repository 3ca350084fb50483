"""A small training job in a process of its own, for tests that limit its memory or kill it.

Prints a line of JSON per step: {"step": 1, "loss": 0.5}; with --digest one of the weights at last.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import signal
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch imports it at first use: not a part of training's memory
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ringcomm.parallel import get_state_dict, offload, zero
from ringcomm.parallel.offload import file_store


class SeededLinear(nn.Linear):
    """Its first values are those of its number, in whatever order layers are made."""

    def __init__(self, number: int, width: int) -> None:
        self.number = number
        super().__init__(width, width, bias=False)

    def reset_parameters(self) -> None:
        generator = torch.Generator().manual_seed(self.number)
        with torch.no_grad():
            self.weight.normal_(0, 0.5 / self.in_features**0.5, generator=generator)


class Stack(nn.Module):
    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.ModuleList(SeededLinear(i, width) for i in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(checkpoint(layer, x, use_reentrant=False))
        return x


def data_bytes() -> int:
    """What the kernel counts against RLIMIT_DATA."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    line = next(line for line in text.splitlines() if line.startswith("VmData"))
    return int(line.split()[1]) << 10


def make(args: argparse.Namespace) -> tuple[nn.Module, Any]:
    if args.to is None:
        model: nn.Module = Stack(args.layers, args.width)
        return model, torch.optim.AdamW(model.parameters(), 1e-3)
    with torch.device("meta"):
        model = Stack(args.layers, args.width)
    own = offload.AdamW(model.parameters(), 1e-3, to=args.to, path=args.path, chunk_elems=1 << 18)
    return model, zero.shard(model, own, 3, offload_weights=True, resume=args.resume)


def digest_of(model: nn.Module, optimizer: Any) -> str:
    is_sharded = isinstance(optimizer, zero.ZeroInfinity)
    whole = get_state_dict(model, full=True)[0] if is_sharded else model.state_dict()
    digest = hashlib.sha256()
    for value in whole.values():
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--to", choices=["cpu", "nvme"])
    parser.add_argument("--path", type=Path)
    parser.add_argument("--engine", default="auto", help="of files, in place of what there is")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--limit-bytes", type=int)
    parser.add_argument("--digest", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    signal.alarm(100)
    if args.limit_bytes is not None:
        limit = data_bytes() + args.limit_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    store = dist.FileStore(str(args.store), args.world_size)
    dist.init_process_group("ringcomm", store=store, rank=args.rank, world_size=args.world_size)
    find = file_store.find_engine
    file_store.find_engine = lambda _, *sizes: find(args.engine, *sizes)
    model, optimizer = make(args)
    first = optimizer.num_steps if isinstance(optimizer, zero.ZeroInfinity) else 0
    for step in range(first, args.steps):
        x = torch.randn(4, args.width, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(json.dumps({"step": step + 1, "loss": float(loss.detach())}), flush=True)
    if args.digest:
        print(json.dumps({"digest": digest_of(model, optimizer)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
