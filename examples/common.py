"""Common code of the examples: options, this rank's rows of a text, and printed losses.

Tokens are bytes. The rows of a step depend on its number alone: losses of different systems, and of
different numbers of ranks, can be compared.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

HELD_OUT = 0.05  # of the text, its end


def make_parser(doc: str | None, *, steps: int = 100, lr: float = 3e-3) -> argparse.ArgumentParser:
    """The options that all examples have; the first line of `doc` describes the program."""
    parser = argparse.ArgumentParser(
        description=(doc or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=int, default=steps)
    add("--lr", type=float, default=lr, help="learning rate")
    add("--rows", type=int, default=16, help="of a step's batch, on all ranks together")
    add("--context", type=int, default=128, help="bytes of a row")
    add("--text", type=Path, help="a file to learn; default: pydoc_data.topics, Python's manual")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    return parser


def run(main: Callable[[argparse.Namespace], Any], parser: argparse.ArgumentParser) -> None:
    """Runs an example as one of the ranks that torchrun has started."""
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error(f"start it with: torchrun --nproc-per-node 2 {sys.argv[0]}")
    dist.init_process_group("ringcomm")
    main(options)
    dist.destroy_process_group()


def read_text(path: Path | None, context: int) -> Tensor:
    """The bytes of a file, or of Python's manual, uint8; ValueError if there are too few."""
    if path is None:
        from pydoc_data.topics import topics

        data = "\n".join(topics[name] for name in sorted(topics)).encode()
    else:
        data = path.read_bytes()
    if HELD_OUT * len(data) < context + 2:
        least = int((context + 2) / HELD_OUT) + 1
        raise ValueError(f"--text has {len(data)} bytes, but rows of {context} need {least}")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class Job:
    """A rank's place, its device, its rows, and `losses`, those logged, in nats per byte."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device(options.device)
        if options.device == "cuda":
            local = int(os.environ.get("LOCAL_RANK", self.rank)) % torch.cuda.device_count()
            self.device = torch.device("cuda", local)
            torch.cuda.set_device(self.device)
        text = read_text(options.text, options.context)
        split = round(len(text) * (1 - HELD_OUT))
        self._text = {"learned": text[:split], "held out": text[split:]}
        self.losses: list[float] = []

    def batch(
        self, step: int, part: int | None = None, of: int | None = None, *, text: str = "learned"
    ) -> tuple[Tensor, Tensor]:
        """A part of the rows of a step: bytes, and the bytes that follow; int64 (rows, context).

        By default the parts are those of all ranks; `part` 0 `of` 1 is the whole batch.
        """
        of, part = of or self.world_size, self.rank if part is None else part
        num_rows, context, data = self.options.rows, self.options.context, self._text[text]
        if num_rows % of:
            raise ValueError(f"--rows must be a multiple of {of}, got {num_rows}")
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(data) - context, (num_rows, 1), generator=generator)
        mine = starts.view(of, -1, 1)[part]
        rows = data[mine + torch.arange(context + 1)].long().to(self.device)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def mean(self, loss: Tensor) -> float:
        """Of all ranks' losses. Collective."""
        total = loss.detach().double().reshape(1).clone()
        dist.all_reduce(total)
        return float(total) / self.world_size

    def log(self, step: int, loss: Tensor) -> None:
        """Prints the ranks' mean loss, ten times a run. Collective."""
        if step % max(1, self.options.steps // 10) == 0:
            self.losses.append(self.mean(loss))
            self.say(f"step {step:5}  loss {self.losses[-1]:.4f}")

    def say(self, text: str) -> None:
        """Prints on rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    @torch.no_grad()
    def finish(self, loss_of: Callable[[Tensor, Tensor], Tensor], *part: int) -> list[float]:
        """Prints the loss of text that no step saw; all losses. Collective."""
        batches = [self.batch(i, *part, text="held out") for i in range(4)]
        self.losses.append(sum(self.mean(loss_of(*batch)) for batch in batches) / len(batches))
        self.say(f"held out    loss {self.losses[-1]:.4f} nats per byte")
        return self.losses
