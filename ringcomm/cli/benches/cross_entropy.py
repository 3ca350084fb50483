"""Times cross-entropy, forward and backward, beside other libraries, in alternating blocks.

With one rank: ringcomm, ringcomm in place, the peers, and a copy of the logits as a floor. With
more: the vocabulary over the ranks, beside one rank that has it all. Gradients are verified.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ringcomm.bench.wording import as_option, byte_count, comparison, microseconds, words

NAMES = ("cross_entropy",)
HELP = "the loss over a vocabulary, and its gradient"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How many ranks, which sizes, which peers, how long."""
    from ringcomm.bench.wording import whole_numbers

    add = parser.add_argument
    add("--world-size", type=int, default=1, help="ranks that share the vocabulary")
    add("--threads", type=int, help="of each rank; default: the cores, or 1 with several ranks")
    add("--tokens", type=int, default=2048)
    add("--vocabularies", type=as_option(whole_numbers), default="8000,32000,50257,128256")
    add("--dtypes", type=as_option(words), default="float32,bfloat16")
    peers = "of torch, compile, liger, quack; with one rank"
    add("--peers", type=as_option(words), default="torch", help=peers)
    add("--device", default="cpu", help="cpu or cuda")
    add("--seconds", type=float, default=4.0, help="per vocabulary and type, for all ways")
    add("--repeats", type=int, default=2, help="at most, while others disturb the machine")
    add("--json", type=Path, metavar="FILE", help="append one record per way and point here")
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter


def _row(record: dict[str, Any]) -> list[str]:
    return [
        record["dtype"],
        f"{record['vocab_size']:,}",
        record["way"],
        *(microseconds(record[f"{p}_us"]) for p in ("p50", "p99")),
        byte_count(record["extra_bytes"] >> 20 << 20),
        comparison(record),
        f"{record['others_busy_percent']:.1f}",
    ]


def run(options: argparse.Namespace) -> int:
    """Measures; the status is 3 when a gradient was wrong."""
    import os
    from functools import partial

    from ringcomm.bench.losses import Losses, run_rank
    from ringcomm.bench.ranks import run_ranks
    from ringcomm.bench.report import Report
    from ringcomm.bench.screen import table_of

    cores = len(os.sched_getaffinity(0)) if options.world_size == 1 else 1
    losses = Losses(
        world_size=options.world_size,
        device=options.device,
        num_tokens=options.tokens,
        vocab_sizes=options.vocabularies,
        dtypes=options.dtypes,
        peers=options.peers,
        num_threads=options.threads or cores,
        seconds=options.seconds,
        repeats=options.repeats,
    )
    try:
        losses.check()
    except ValueError as error:
        options.parser.error(str(error))
    report = Report(
        "cross_entropy",
        options.json,
        world_size=losses.world_size,
        device=losses.device,
        num_threads=losses.num_threads,
    )
    run_ranks(losses.world_size, partial(run_rank, losses), report.add)
    headers = ["type", "classes", "way", "p50 µs", "p99 µs", "memory", "time over ringcomm's"]
    caption = "Memory: beyond the logits, at most. * others used more than 10 % of the machine."
    table = table_of([*headers, "others %"], caption, report.records, _row, ("dtype", "vocab_size"))
    return report.finish(f"{losses.num_tokens} tokens, {losses.world_size} rank(s)", table)
