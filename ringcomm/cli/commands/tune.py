"""Measures the algorithms of all_reduce on this machine and writes what groups may be made with.

Per number of ranks: the cost model (alpha per hand-over, beta per MiB) and the size up to which
one_shot is the faster one. The machine should have nothing else to do meanwhile.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ringcomm.measure.ranks import joined_world_size
from ringcomm.measure.screen import (
    as_option,
    byte_count,
    byte_counts,
    factor,
    make_console,
    make_table,
    microseconds,
    whole_numbers,
)
from ringcomm.tuning import MAX_WORLD_SIZE, Tuning, World, save

HELP = "measure where all_reduce's algorithms cross, and write it to a file"
DEFAULT_SIZES = "1k,4k,16k,32k,64k,128k,256k,512k,1m,4m"
# As many as the cost model has coefficients, counting both algorithms of each size.
MIN_SIZES = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which numbers of ranks and sizes, how long, and where to."""
    add = parser.add_argument
    numbers, sizes = as_option(whole_numbers), as_option(byte_counts)
    path = Path("ringcomm-tuning.json")
    add(
        "--world-sizes",
        type=numbers,
        default="2,4",
        help="numbers of ranks, 2 to 64 (default: %(default)s)",
    )
    add(
        "--sizes",
        type=sizes,
        default=DEFAULT_SIZES,
        help="bytes of the buffers (default: %(default)s)",
    )
    add(
        "--seconds",
        type=float,
        default=0.6,
        help="per size and number of ranks (default: %(default)s)",
    )
    add(
        "--repeats",
        type=int,
        default=2,
        help="of a size, while the machine is disturbed (default: %(default)s)",
    )
    add(
        "--json",
        type=Path,
        metavar="FILE",
        default=path,
        help="written anew (default: %(default)s)",
    )


def _check(options: argparse.Namespace) -> None:
    error = options.parser.error
    for world_size in options.world_sizes:
        if not 2 <= world_size <= MAX_WORLD_SIZE:
            error(f"--world-sizes are 2 to {MAX_WORLD_SIZE}, got {world_size}")
    if len(set(options.sizes)) < MIN_SIZES:
        error(f"--sizes: {MIN_SIZES} different ones at least make a model")
    if options.seconds < 0 or options.repeats < 0:
        error("--seconds and --repeats are not negative")
    if not options.json.absolute().parent.is_dir():
        error(f"--json: there is no folder {str(options.json.absolute().parent)!r}")
    if joined_world_size() is not None:
        error("it starts its own ranks: run it without torchrun")


def _table(world: World, times: list[Any]) -> Any:
    chosen = f"one_shot up to {byte_count(world.one_shot_max_bytes)}"
    if world.one_shot_max_bytes == 1:
        chosen = "one_shot never wins"
    names = [point.algorithm for point in times[0].points]
    table = make_table(
        ["bytes", *(f"{name} µs" for name in names), "two_shot / one_shot", "others %"],
        f"{chosen}. alpha {world.alpha_us:.3g} µs per"
        f" hand-over, beta {world.beta_us_per_mib:.3g} µs per MiB, {world.overhead_us:.3g} µs per"
        f" call; the model is off by a factor of {world.worst_fit:.2f} at worst.",
    )
    for size in times:
        medians = [microseconds(point.p50_us) for point in size.points]
        ratio, others = factor(size.ratio), f"{size.others_percent:.0f}"
        table.add_row(byte_count(size.points[0].bytes), *medians, ratio, others)
    return table


def run(options: argparse.Namespace) -> int:
    """Measures every number of ranks and writes the file."""
    _check(options)
    import torch

    import ringcomm
    from ringcomm.measure.algorithms import measure_algorithms, world_of
    from ringcomm.measure.machine import identity, utc_now

    console = make_console()
    worlds = []
    for world_size in sorted(set(options.world_sizes)):
        sizes = sorted(set(options.sizes))
        times = measure_algorithms(world_size, sizes, options.seconds, options.repeats)
        worlds.append(world_of(world_size, times))
        console.print(f"{world_size} ranks, float32; medians, the slowest rank counts")
        console.print(_table(worlds[-1], times))
    date, versions = utc_now().isoformat(), (torch.__version__, ringcomm.__version__)
    save(Tuning(date, identity(), *versions, tuple(worlds)), options.json)
    if not all(world.quiet for world in worlds):
        console.print("other programs disturbed this: tune again on a quiet machine")
    console.print(f"written: {options.json}")
    return 0
