"""Jobs for README's pictures: one whose ring is recorded, and three with a rank that goes wrong."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from ringcomm.show import Ring, ring_of

LIMIT_S = 120
HANG_S = 25  # longer than the doctor takes to start
RANKS = 4
RING_CALLS = 20
RING = f"""\
import torch
import torch.distributed as dist

import ringcomm

dist.init_process_group("ringcomm", pg_options=ringcomm.Options(algorithm="ring"))
for _ in range({RING_CALLS}):
    dist.all_reduce(torch.ones(4 << 14))
dist.destroy_process_group()
"""
TRAIN = """\
import time

import torch
import torch.distributed as dist

dist.init_process_group("ringcomm")
rank = dist.get_rank()


def load_batch(number):
    {fault}
    return torch.ones(1 << 18)


for number in range({num_batches}):
    gradients = load_batch(number)
    dist.all_reduce(gradients)
dist.barrier()
"""
AT = "if rank == 2 and number == 3:\n        "
# By what happens: what the loader does, and the number of batches.
FAULTS = {
    "A rank has fewer batches than the others:": ("pass", "3 if rank == 2 else 5"),
    "A rank fails:": (f'{AT}raise ValueError("no row 7")', "5"),
}
HANG = "A rank hangs; ringcomm doctor --job PID says which, and where:"
COLUMNS = 116
PICTURES = {"errors": COLUMNS, "errors-narrow": 52}  # the latter for phones


def _torchrun(folder: Path, script: str) -> list[str]:
    (folder / "train.py").write_text(script, encoding="utf-8")
    module = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*module, f"--nproc-per-node={RANKS}", "train.py"]


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def fastest_ring(folder: Path) -> Ring:
    """A ring all_reduce of four ranks as `ringcomm trace` records it, the fastest of some."""
    command = [sys.executable, "-m", "ringcomm", "trace", "-o", "ring.json", "--"]
    subprocess.run(
        [*command, *_torchrun(folder, RING)],
        cwd=folder,
        env=_environment(),
        timeout=LIMIT_S,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    rings = [ring_of(folder / "ring.json", seq) for seq in range(RING_CALLS)]
    return min(rings, key=lambda ring: sum(step["dur"] for step in ring.steps))


def what_is_said(folder: Path) -> list[tuple[str, str]]:
    """What happens, and the error of a rank; last a hang, and the doctor's answer."""
    found = []
    for title, (fault, num_batches) in FAULTS.items():
        done = subprocess.run(
            _torchrun(folder, TRAIN.format(fault=fault, num_batches=num_batches)),
            cwd=folder,
            env=_environment(),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        error = r"^\[rank\d+\]: (?:ringcomm\.errors\.)?(\w+Error: ringcomm rank.*)$"
        lines = [line for line in re.findall(error, done.stderr, re.M) if " failed: " not in line]
        found.append((title, min(lines)))
    script = TRAIN.format(fault=f"{AT}time.sleep({HANG_S})", num_batches="5")
    job = _torchrun(folder, script)
    with subprocess.Popen(job, cwd=folder, env=_environment(), stderr=subprocess.DEVNULL) as run:
        time.sleep(HANG_S / 2)
        command = [sys.executable, "-m", "ringcomm", "doctor", "--job", str(run.pid)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
        run.wait(LIMIT_S)
    said = done.stdout.replace(f"{folder}/", "").partition("\n(asked")[0]
    return [*found, (HANG, said.strip())]


def wrapped(line: str, columns: int = COLUMNS) -> list[str]:
    """Lines of a terminal, broken after a sentence, a colon or a comma rather than at any blank."""
    lines = []
    while len(line) > columns:
        for mark in (r"\. ", "[:;] ", ", ", " "):
            ends = [found.end() for found in re.finditer(mark, line[: columns + 1])]
            if ends and ends[-1] > columns // 3:
                break
        end = ends[-1] if ends else columns
        lines.append(line[:end].rstrip())
        line = line[end:]
    return [*lines, line]


def as_text(said: list[tuple[str, str]]) -> str:
    """The same in Markdown, of the doctor only its last paragraph."""
    lines = []
    for title, text in said:
        lines += ["", title, *wrapped(text.split("\n\n")[-1])]
    return "\n".join(["```", *lines[1:], "```"])


def terminal(said: list[tuple[str, str]], columns: int) -> str:
    """The picture of a dark terminal with titles and lines, in SVG."""
    from rich.console import Console
    from rich.terminal_theme import DIMMED_MONOKAI
    from rich.text import Text

    console = Console(record=True, width=columns, file=io.StringIO())
    for idx, (title, lines) in enumerate(said):
        if idx:
            console.print()
        console.print(Text(title, style="bold cyan"))
        body = Text(
            "\n".join(part for line in lines.split("\n") for part in wrapped(line, columns))
        )
        body.highlight_regex(
            r"(?m)^\w+Error|rank 2 \(pid.*|rank 2 called.*|^rank 2 is.*", "bold #ff8a80"
        )
        console.print(body)
    console.print()  # the clip of the last line cuts what a larger font has below it
    drawn = console.export_svg(title="ringcomm", theme=DIMMED_MONOKAI)
    # The fonts that rich names are on another server; the viewer's own are used instead.
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.S)
    return drawn.replace("Fira Code, monospace", "monospace")
