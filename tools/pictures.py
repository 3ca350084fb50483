#!/usr/bin/env python3
"""Draws README's pictures of errors and of a trace from programs that run now.

    python tools/pictures.py [--out docs/design]

Needs rich and matplotlib (`pip install '.[train]'`) and an installed ringcomm.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 120
RANKS = 4
TRAIN = """\
import time

import torch
import torch.distributed as dist

dist.init_process_group("ringcomm")
x = torch.ones(8)
for batch in range(5):
    dist.all_reduce(x)
    if dist.get_rank() == 2 and batch == 3:
        {fault}
"""
FAULTS = {
    "A rank runs another batch than the others:": "dist.barrier()",
    "A rank fails:": 'raise ValueError("no row 7")',
}
HANG = "time.sleep(15)"
RING = """\
import torch
import torch.distributed as dist

import ringcomm

dist.init_process_group("ringcomm", pg_options=ringcomm.Options(algorithm="ring"))
for _ in range(20):
    dist.all_reduce(torch.ones(1 << 18))
dist.destroy_process_group()
"""


def torchrun(script: Path, num_ranks: int) -> list[str]:
    """The command that starts a script."""
    module = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*module, f"--nproc-per-node={num_ranks}", str(script)]


def errors_of(folder: Path) -> list[tuple[str, str]]:
    """A title and the errors of the ranks, for each fault."""
    found = []
    for title, fault in FAULTS.items():
        script = folder / "train.py"
        script.write_text(TRAIN.format(fault=fault), encoding="utf-8")
        done = subprocess.run(
            torchrun(script, RANKS), capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        lines = re.findall(
            r"^\[rank\d+\]: (?:ringcomm\.errors\.)?(\w+Error: .*)$", done.stderr, re.M
        )
        ours = sorted(
            {line for line in lines if "ringcomm rank" in line and " failed: " not in line}
        )
        found.append((title, ours[0]))
    return found


def doctor_of_a_hang(folder: Path) -> str:
    """What `ringcomm doctor --job` says about a job with a rank that sleeps."""
    script = folder / "train.py"
    script.write_text(TRAIN.format(fault=HANG), encoding="utf-8")
    with subprocess.Popen(torchrun(script, RANKS), stderr=subprocess.DEVNULL) as job:
        time.sleep(LIMIT_S / 12)
        command = [sys.executable, "-m", "ringcomm", "doctor", "--job", str(job.pid)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
        job.wait(LIMIT_S)
    return done.stdout.replace(f"{folder}/", "")


def draw_errors(path: Path) -> None:
    """A terminal with the errors, and the doctor's answer."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts = errors_of(folder)
        parts.append(("A rank hangs: ringcomm doctor --job PID", doctor_of_a_hang(folder)))
    console = Console(record=True, width=116, file=io.StringIO())
    for title, text in parts:
        console.print(Text(title, style="bold cyan"))
        body = Text(text.strip())
        body.highlight_regex(r"^\w+Error|rank 2 \(pid.*|rank 2 called.*|^rank 2 is.*", "bold red")
        console.print(body)
        console.print()
    drawn = console.export_svg(title="ringcomm", theme=DIMMED_MONOKAI)
    # The fonts that rich names are on another server: without them the viewer's own is used.
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.S)
    path.write_text(drawn.replace("Fira Code, monospace", "monospace"), encoding="utf-8")


def draw_trace(path: Path, num_ranks: int = 2) -> None:
    """The fastest ring all_reduce as `ringcomm trace` records it: steps and waits of each rank."""
    with tempfile.TemporaryDirectory() as name:
        script, trace = Path(name) / "ring.py", Path(name) / "ring.json"
        script.write_text(RING, encoding="utf-8")
        command = [sys.executable, "-m", "ringcomm", "trace", "-o", str(trace), "--"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [*command, *torchrun(script, num_ranks)],
            env=environment,
            timeout=LIMIT_S,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    calls: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X" and "seq" in event.get("args", {}):
            calls.setdefault(event["args"]["seq"], []).append(event)
    spans = min(calls.values(), key=lambda spans: sum(span["dur"] for span in spans))
    begin = min(span["ts"] for span in spans)
    colours = {"reduce_scatter": "#2563eb", "all_gather": "#0d9488", "wait": "#d97706"}
    mpl.rcParams["svg.hashsalt"] = "ringcomm"
    figure, axes = plt.subplots(figsize=(9, 2.6), layout="constrained")
    for span in sorted(spans, key=lambda span: -span["dur"]):
        kind = next((kind for kind in colours if span["name"].startswith(kind)), None)
        if kind is not None:
            height = 0.35 if kind == "wait" else 0.7
            axes.barh(int(span["pid"]), span["dur"], height, left=span["ts"] - begin,
                      color=colours[kind], edgecolor="white", linewidth=0.5)  # fmt: skip
    for kind, colour in colours.items():
        title = "wait for the previous rank" if kind == "wait" else f"{kind} step"
        axes.barh(0, 0, color=colour, label=title)
    axes.set_yticks(range(num_ranks), [f"rank {rank}" for rank in range(num_ranks)])
    axes.invert_yaxis()
    axes.set_xlabel("µs")
    axes.set_title("One ring all_reduce of 1 MiB", loc="left", fontsize=11)
    axes.legend(ncols=3, loc="upper right", bbox_to_anchor=(1, 1.22), frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Draws both."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "design")
    folder = parser.parse_args().out
    os.environ["OMP_NUM_THREADS"] = "1"
    draw_errors(folder / "errors.svg")
    draw_trace(folder / "trace.svg")


if __name__ == "__main__":
    main()
