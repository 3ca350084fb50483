"""The command `ringcomm tune`: measures, prints and writes a tuning file."""

from pathlib import Path

import torch

from ringcomm import __version__, tuning
from ringcomm.measure.algorithms import SizeTimes, measure_algorithms, world_of
from ringcomm.measure.machine import MAX_OTHERS_PERCENT, identity, utc_now
from ringcomm.measure.screen import Progress, byte_count, columns, factor, in_seconds


def run(world_sizes: list[int], sizes: list[int], seconds: float, repeats: int, path: Path) -> int:
    """Tunes for each number of ranks, and returns the exit status.

    After Ctrl-C the numbers of ranks that were measured are in PATH.interrupted.
    """
    worlds: list[tuning.World] = []

    def save(file: Path) -> None:
        date, versions = utc_now().isoformat(), (torch.__version__, __version__)
        tuning.save(tuning.Tuning(date, identity(), *versions, tuple(worlds)), file)

    sizes, world_sizes = sorted(set(sizes)), sorted(set(world_sizes))
    progress = Progress([f"{byte_count(size)} on {n} ranks" for n in world_sizes for size in sizes])
    try:
        for world_size in world_sizes:
            progress.show()
            times = measure_algorithms(world_size, sizes, seconds, repeats, progress.step)
            worlds.append(world_of(world_size, times))
            progress.clear()
            print(f"all_reduce on {world_size} ranks, float32: medians of the slowest rank")
            print(_table(worlds[-1], times), flush=True)
    except KeyboardInterrupt:
        progress.clear()
        if worlds:  # not over a whole file of an earlier run
            partial = path.with_name(f"{path.name}.interrupted")
            save(partial)
            print(f"interrupted: {partial} has only the numbers of ranks above")
        raise
    save(path)
    if not all(world.quiet for world in worlds):
        print("other programs disturbed the measurement: tune again on an idle machine")
    print(f"written: {path}")
    return 0


def _table(world: tuning.World, times: list[SizeTimes]) -> str:
    chosen = f"one_shot up to {byte_count(world.one_shot_max_bytes)}"
    if world.one_shot_max_bytes == 1:
        chosen = "one_shot never wins"
    names = [point.algorithm for point in times[0].points]
    rows = [["bytes", *names, "two_shot / one_shot", "other programs"]]
    for size in times:
        medians = [in_seconds(point.p50_us / 1e6) for point in size.points]
        ratio, others = factor(size.ratio), f"{size.others_percent:.0f} %"
        rows.append([byte_count(size.points[0].bytes), *medians, ratio, others])
    return (
        f"{columns(rows, '')}\n"
        "other programs: their share of this machine, which should be at most"
        f" {MAX_OTHERS_PERCENT:.0f} %\n"
        f"{chosen}. Cost model: {world.alpha_us:.3g} µs per transfer (alpha),"
        f" {world.beta_us_per_mib:.3g} µs per MiB (beta), {world.overhead_us:.3g} µs per call;"
        f" its largest error is a factor of {factor(world.worst_fit)}."
    )
