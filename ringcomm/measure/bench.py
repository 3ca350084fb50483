"""`ringcomm bench` without an operation: this machine's Gloo beside ringcomm, in half a minute.

Both backends run in the same processes and take turns block by block (`measure.timing`). Sums are
verified with whole numbers before and after.
"""

import argparse
import html
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ringcomm import __version__
from ringcomm.measure import ranks, timing
from ringcomm.measure.machine import MAX_OTHERS_PERCENT, identity, utc_now
from ringcomm.measure.ranks import Team
from ringcomm.measure.timing import US, check_sums
from ringcomm.screen import (
    EXIT_OK,
    EXIT_WRONG_RESULTS,
    byte_count,
    check_writable,
    columns,
    factor,
    in_seconds,
)

SIZES = (1 << 10, 64 << 10, 1 << 20, 16 << 20)
# A step of a small transformer takes several times an all_reduce, and warms up longer.
STEP_SHARE = 0.4
WIDTH, HEADS, LAYERS, TOKENS, BATCH = 256, 4, 4, 128, 4
STEP_TITLE = f"DDP training step, {BATCH} × {TOKENS} tokens per rank"


@dataclass(frozen=True)
class Row:
    """Both backends in one call: the times of the slowest rank."""

    title: str
    times_us: dict[str, dict[str, float]]  # by backend, as of Timings.summary_us()
    ratio: float  # Gloo's time over ringcomm's, the speed-up: the median of neighbouring blocks
    others_percent: float  # share of the machine that other programs used


def run(options: argparse.Namespace) -> int:
    """Measures, prints a table and one sentence, writes the page; returns the exit status."""
    error = options.parser.error
    if not 2 <= options.world_size <= 64:
        error(f"--world-size must be 2 to 64, got {options.world_size}")
    if options.seconds < 0:
        error("--seconds must not be negative")
    if ranks.joined_world_size() is not None:
        error("it starts its own ranks: run it without torchrun")
    if not dist.is_gloo_available():
        error("this torch has no Gloo to compare with")
    try:
        check_writable(options.html)
    except ValueError as problem:
        error(f"--html: {problem}")
    machine = identity()
    print(
        f"{options.world_size} ranks on {machine['cores']} cores of {machine['cpu']},"
        f" torch {torch.__version__}, ringcomm {__version__}; about {options.seconds + 8:.0f} s"
    )
    rows: list[Row] = []
    main = partial(_run_rank, seconds=options.seconds)
    try:
        ranks.run_ranks(options.world_size, main, rows.append)
    except ranks.RankError as problem:
        if "wrong elements" not in str(problem):
            raise
        print(f"ringcomm bench: {problem}")
        return EXIT_WRONG_RESULTS
    print(_table(rows))
    print(sentence(rows, options.world_size))
    disturbed = max(row.others_percent for row in rows)
    if disturbed > MAX_OTHERS_PERCENT:
        print(f"Other programs used up to {disturbed:.0f} % of this machine meanwhile.")
    if options.html is not None:
        options.html.write_text(page(rows, options.world_size, machine), encoding="utf-8")
        print(f"written: {options.html}")
    return EXIT_OK


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
        title = f"all_reduce, {byte_count(num_bytes)}"
        _report(team, groups, sums, title, seconds * (1 - STEP_SHARE) / len(SIZES))
        check_sums(team, groups, buffer)
    steps = {name: _training_step(team, group) for name, group in groups.items()}
    _report(team, groups, steps, STEP_TITLE, seconds * STEP_SHARE)
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
    title: str,
    seconds: float,
) -> None:
    """Times the calls in turn and reports a row. Collective."""
    percent, timings = timing.measure_beside_others(team, groups, calls, seconds)
    if timings is None:
        return
    times_us = {name: found.summary_us() for name, found in timings.items()}
    ratio = timings["gloo"].ratio_over(timings["ringcomm"])["p50"]
    team.report(Row(title, times_us, ratio, percent))


def _table(rows: list[Row]) -> str:
    lines = [["", "ringcomm", "p99", "Gloo", "p99", "speed-up"]]
    for row in rows:
        times = [row.times_us[n][p] for n in ("ringcomm", "gloo") for p in ("p50_us", "p99_us")]
        lines.append([row.title, *(in_seconds(us / US) for us in times), f"{factor(row.ratio)}×"])
    return columns(lines, "<")


def sentence(rows: list[Row], world_size: int) -> str:
    """What the rows say, for collectives and for a whole step."""
    ratios = [row.ratio for row in rows if row.title != STEP_TITLE]
    steps = [row.ratio for row in rows if row.title == STEP_TITLE]
    return (
        f"With {world_size} ranks on this machine, ringcomm's all_reduce is {factor(min(ratios))}×"
        f" to {factor(max(ratios))}× as fast as Gloo's, and a training step of a small transformer"
        f" {factor(steps[0])}× as fast."
    )


def page(rows: list[Row], world_size: int, machine: dict[str, Any]) -> str:
    """One HTML page: the sentence, and a bar for each backend and row; shorter is better."""
    bars = []
    for row in rows:
        medians = [row.times_us[name]["p50_us"] / US for name in ("ringcomm", "gloo")]
        bars.append(f"<h2>{html.escape(row.title)}</h2>")
        for name, seconds in zip(("ringcomm", "Gloo"), medians, strict=True):
            percent = max(0.3, 100 * seconds / max(medians))
            bars.append(
                f'<div class="row"><span>{name}</span><div><i class="{name}" style="width:'
                f'{percent:.1f}%"></i></div><b>{in_seconds(seconds)}</b></div>'
            )
    versions = f"torch {torch.__version__}, ringcomm {__version__}"
    return _PAGE.format(
        sentence=html.escape(sentence(rows, world_size)),
        machine=html.escape(f"{machine['cores']} cores of {machine['cpu']}, {versions}"),
        date=utc_now().date().isoformat(),
        bars="\n".join(bars),
    )


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>ringcomm and Gloo: time of all_reduce and of a training step</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ margin: 2rem auto; max-width: 46rem; font: 16px/1.5 system-ui, sans-serif; }}
h1 {{ font-size: 1.3rem; }} h2 {{ font-size: 1rem; margin: 1.2rem 0 .3rem; }}
p {{ opacity: .7; }}
.row {{ display: grid; grid-template-columns: 6rem 1fr 5.5rem; gap: .7rem; align-items: center; }}
.row b {{ font-variant-numeric: tabular-nums; text-align: right; font-weight: 600; }}
i {{ display: block; height: 1.1rem; border-radius: .2rem; }}
i.ringcomm {{ background: #2563eb; }} i.Gloo {{ background: #858d99; }}
</style>
<h1>{sentence}</h1>
<p>Median time of a call, of the slowest rank; a shorter bar is faster.
The two take turns in one run.</p>
{bars}
<p>{machine}; {date}.</p>
</html>
"""
