"""`ringcomm bench` without an operation: this machine's Gloo beside ringcomm.

Both backends run in the same processes and take turns block by block (`measure.timing`). Sums are
verified with whole numbers before and after.
"""

import argparse
import html
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from _ringcomm.status import EXIT_OK
from _ringcomm.values import MAX_OTHERS_PERCENT, MAX_WORLD_SIZE
from ringcomm import __version__
from ringcomm.measure import ranks, timing
from ringcomm.measure.machine import identity, usable_cores, utc_now
from ringcomm.measure.ranks import Team
from ringcomm.measure.timing import US, check_sums
from ringcomm.screen import (
    COLORS,
    Progress,
    byte_count,
    columns,
    counted,
    factor,
    in_seconds,
    write_text,
)

MAX_FACTOR = 3  # a loaded machine takes longer than announced; then the largest are left out
SIZES = (1 << 10, 64 << 10, 1 << 20, 16 << 20)
# A step of a small transformer takes several times an all_reduce, and warms up longer.
STEP_SHARE = 0.4
WIDTH, HEADS, LAYERS, TOKENS, BATCH = 256, 4, 4, 128, 4
STEP_TITLE = f"DDP training step, {BATCH} × {TOKENS} tokens per rank"

SPEED_UP = "speed-up: median of the ratios of neighbouring blocks (10–90 %), not of the medians"


@dataclass(frozen=True)
class Row:
    """Both backends in one call: the times of the slowest rank."""

    title: str
    world_size: int
    num_bytes: int  # of an all_reduce; 0: a training step
    times_us: dict[str, dict[str, float]]  # by backend, as of Timings.summary_us()
    ratio: dict[str, float]  # Gloo's time over ringcomm's, the speed-up: Timings.ratio_over()
    others_percent: float  # share of the machine that other programs used

    def speed_up(self, form: str = "{1}× ({0}–{2})") -> str:
        """Its 10, 50 and 90 % points over neighbouring blocks."""
        return form.format(*(factor(self.ratio[name]) for name in ("p10", "p50", "p90")))

    def cells(self, backend: str) -> tuple[str, str, str]:
        """Median, 99th percentile, and GB/s of the bus: of 2(N − 1)/N buffers."""
        p50_us, p99_us = (self.times_us[backend][p] for p in ("p50_us", "p99_us"))
        moved = 2 * (self.world_size - 1) / self.world_size * self.num_bytes
        rate = f"{moved / p50_us / 1e3:.3g}" if moved else ""
        return in_seconds(p50_us / US), in_seconds(p99_us / US), rate

    @property
    def is_even(self) -> bool:
        """Whether the backends' times cannot be told apart."""
        return self.ratio["p10"] <= 1 <= self.ratio["p90"]


def run(options: argparse.Namespace) -> int:
    """Measures, prints a table and one sentence, writes the page; returns the exit status.

    After Ctrl-C the table has what was measured.
    """
    if not dist.is_gloo_available():
        options.parser.error("this torch has no Gloo to compare with")
    machine = identity()
    worlds = [options.world_size] if options.world_size else world_sizes(usable_cores())
    print(
        f"{_numbers(worlds)} ranks on {counted(machine['cores'], 'core')} of {machine['cpu']},"
        f" torch {torch.__version__}, ringcomm {__version__};"
        f" about {options.seconds + 8 * len(worlds):.0f} s"
    )
    rows: list[Row] = []
    try:
        left_out = _measure(worlds, options.seconds, rows)
    finally:
        if rows:
            print(f"{_table(rows)}\n{SPEED_UP}", flush=True)
    print(sentence(rows))
    if said := caveat(rows, left_out):
        print(said)
    content = {
        "world_sizes": [world for world in worlds if world not in left_out],
        "left_out": left_out,
        "machine": machine,
        "rows": [*map(asdict, rows)],
        "torch": torch.__version__,
        "ringcomm": __version__,
    }
    for path, text in (
        (options.html, lambda: page(rows, machine, left_out)),
        (options.json, lambda: json.dumps(content, allow_nan=False)),
    ):
        if path is not None:
            write_text(path, text())
            print(f"written: {path}")
    return EXIT_OK


def world_sizes(num_cores: int) -> list[int]:
    """The numbers of ranks to measure: the powers of two, and last one rank for each core."""
    most = max(2, min(MAX_WORLD_SIZE, num_cores))
    return [*(1 << k for k in range(1, most.bit_length()) if 1 << k < most), most]


def _measure(worlds: list[int], seconds: float, rows: list[Row]) -> list[int]:
    """Appends the rows of each number of ranks; returns those it left out, for lack of time."""
    names = [
        f"{world} ranks: {name}" for world in worlds for name in (*map(_title, SIZES), STEP_TITLE)
    ]
    progress = Progress(names)
    progress.show()

    def add(row: Row) -> None:
        rows.append(row)
        progress.step()

    deadline = time.monotonic() + MAX_FACTOR * (seconds + 8 * len(worlds))
    try:
        for at, world_size in enumerate(worlds):
            if rows and time.monotonic() > deadline:
                return worlds[at:]
            ranks.run_ranks(world_size, partial(_run_rank, seconds=seconds / len(worlds)), add)
    finally:
        progress.clear()
    return []


def _numbers(worlds: list[int]) -> str:
    *firsts, last = map(str, worlds)
    return f"{', '.join(firsts)} and {last}" if firsts else last


def _title(num_bytes: int) -> str:
    return f"all_reduce, {byte_count(num_bytes)}"


def caveat(rows: list[Row], left_out: list[int]) -> str:
    """What else used the machine, if it was much, and which numbers of ranks were not measured."""
    said, disturbed = [], max(row.others_percent for row in rows)
    if disturbed > MAX_OTHERS_PERCENT:
        said.append(f"Other programs used up to {disturbed:.0f} % of this machine meanwhile.")
    if left_out:
        said.append(f"Not measured, because it takes too long: {_numbers(left_out)} ranks.")
    return " ".join(said)


def _run_rank(team: Team, seconds: float) -> None:
    timing.open_default_group(team, "ringcomm")
    groups: dict[str, Any] = {
        "ringcomm": dist.group.WORLD,
        "gloo": dist.new_group(backend="gloo", timeout=timing.GROUP_TIMEOUT),
    }
    for num_bytes in SIZES:
        buffer = torch.zeros(num_bytes // 4, dtype=torch.float32)
        sums = {
            name: partial(dist.all_reduce, buffer, group=group) for name, group in groups.items()
        }
        check_sums(team, groups, buffer)
        _report(team, groups, sums, num_bytes, seconds * (1 - STEP_SHARE) / len(SIZES))
        check_sums(team, groups, buffer)
    steps = {name: _training_step(team, group) for name, group in groups.items()}
    _report(team, groups, steps, 0, seconds * STEP_SHARE)
    dist.destroy_process_group()


def _training_step(team: Team, group: Any) -> Callable[[], object]:
    """One step of a small transformer under DistributedDataParallel. Collective."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(
        WIDTH, HEADS, dim_feedforward=4 * WIDTH, dropout=0.0, batch_first=True
    )
    layers = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    model = DistributedDataParallel(layers, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(team.rank)
    x = torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.float32, generator=generator)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _report(
    team: Team,
    groups: dict[str, Any],
    calls: Mapping[str, Callable[[], object]],
    num_bytes: int,
    seconds: float,
) -> None:
    """Times the calls in turn and reports a row. Collective."""
    percent, timings = timing.measure_beside_others(team, groups, calls, seconds)
    if timings is None:
        return
    times_us = {name: found.summary_us() for name, found in timings.items()}
    ratio = timings["gloo"].ratio_over(timings["ringcomm"])
    title = _title(num_bytes) if num_bytes else STEP_TITLE
    team.report(Row(title, team.world_size, num_bytes, times_us, ratio, percent))


def _table(rows: list[Row]) -> str:
    lines = [["ranks", "", "ringcomm", "p99", "GB/s", "Gloo", "p99", "GB/s", "speed-up"]]
    for row in rows:
        times = (*row.cells("ringcomm"), *row.cells("gloo"))
        lines.append([str(row.world_size), row.title, *times, row.speed_up()])
    return columns(lines, "><")


def sentence(rows: list[Row]) -> str:
    """What the rows say, for collectives and for a whole step."""
    worlds = [row.world_size for row in rows]
    low, high = min(worlds), max(worlds)
    ratios = [row.ratio["p50"] for row in rows if row.num_bytes]
    steps = [row for row in rows if not row.num_bytes]
    even = [row for row in steps if row.is_even]
    medians = [row.ratio["p50"] for row in steps]
    least, most = (f"{factor(ratio)}×" for ratio in (min(medians), max(medians)))
    said = f"is {least if least == most else f'{least} to {most}'} as fast"
    if len(even) == len(steps):
        form = "median {1}×, 10–90 %: {0} to {2}"
        spreads = "; ".join(row.speed_up(form) for row in steps)
        said = f"has no measurable difference from Gloo ({spreads})"
    elif even:
        alike = _numbers([row.world_size for row in even])
        said += f" (with {alike} ranks there is no measurable difference)"
    return (
        f"With {low if low == high else f'{low} to {high}'} ranks on this machine, ringcomm's"
        f" all_reduce is {factor(min(ratios))}× to {factor(max(ratios))}× as fast as Gloo's, and a"
        f" training step of a small transformer {said}."
    )


def page(rows: list[Row], machine: dict[str, Any], left_out: list[int]) -> str:
    """One HTML page: the sentence, and a bar for each backend and row; shorter is better."""
    bars = []
    for row in rows:
        longest = max(times["p50_us"] for times in row.times_us.values())
        title = f"{row.world_size} ranks, {row.title}: {row.speed_up()}"
        bars.append(f"<h2>{html.escape(title)}</h2>")
        for name, label in (("ringcomm", "ringcomm"), ("gloo", "Gloo")):
            percent = max(0.3, 100 * row.times_us[name]["p50_us"] / longest)
            median, p99, rate = row.cells(name)
            more = f"<small>p99 {p99}{rate and f', {rate} GB/s'}</small>"
            bars.append(
                f'<div class="row"><span>{label}</span><div><i class="{name}"'
                f' style="width:{percent:.1f}%"></i></div><b>{median} {more}</b></div>'
            )
    versions = f"torch {torch.__version__}, ringcomm {__version__}"
    return _PAGE.format(
        sentence=html.escape(sentence(rows)),
        caveat=html.escape(caveat(rows, left_out)),
        machine=html.escape(f"{counted(machine['cores'], 'core')} of {machine['cpu']}, {versions}"),
        date=utc_now().date().isoformat(),
        bars="\n".join(bars),
        ours=COLORS["blue"],
        gloo=COLORS["orange"],
    )


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>ringcomm and Gloo: time of all_reduce and of a training step</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ margin: 1rem auto; padding: 0 1rem; max-width: 48rem; }}
body {{ font: 16px/1.5 system-ui, sans-serif; }}
h1 {{ font-size: 1.3rem; }} h2 {{ font-size: 1rem; margin: 1.2rem 0 .3rem; }}
p {{ opacity: .7; }}
.row {{ display: grid; align-items: center; }}
.row {{ grid-template-columns: 5rem 1fr 9rem; gap: .7rem; }}
.row b {{ font-variant-numeric: tabular-nums; font-weight: 600; }}
small {{ display: block; font-weight: 400; opacity: .7; }}
i {{ display: block; height: 1.1rem; border-radius: .2rem; }}
i.ringcomm {{ background: {ours}; }} i.gloo {{ background: {gloo}; }}
</style>
<h1>{sentence}</h1>
<p>Median time of a call, of the slowest rank; a shorter bar is faster. p99 is the 99th
percentile; GB/s are of the bus: each rank receives 2(N − 1)/N buffers.
The two take turns in one run; a speed-up is the median over turns, with its 10 and 90 % points,
and may differ from the ratio of two bars, which are medians of the whole run.
{caveat}</p>
{bars}
<p>{machine}; {date}.</p>
</html>
"""
