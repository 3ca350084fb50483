"""Runs the tests for GPUs in every layout that this box allows; says which ran and which did not.

Usage: python tools/gpu_layouts.py [--only NAME,...] [--limit-s S] [--json FILE] [-- PYTEST ARGS...]

A layout is how many ranks there are and on which GPUs, with NVIDIA's Multi-Process Service or
without; the service is started for its layout, and stopped. `kernels` are the tests that need no
ranks. The status is 1 when a test failed, and 0 without a GPU, where nothing runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from mps import Mps, find_control  # noqa: E402
from placement import count_devices  # noqa: E402

# Of a layout, all its tests; more where processes take turns on a GPU.
LIMIT_S = 420.0
# For pytest to end its ranks and to tell of its failures.
INTERRUPT_S = 15.0
NO_GPU = "no GPU here"
SUMMARY = re.compile(r"\d+ (?:passed|failed|skipped|error|deselected).* in [\d.]+s")
NO_TESTS = 5  # pytest's status where none was selected


@dataclass(frozen=True)
class Layout:
    """Where the ranks of the tests are.

    Attributes:
        num_ranks: 0 for the tests that have none; None for as many as there are GPUs.
        where: "one" GPU or "all", as tests/python/device/gpu_ranks.py has it.
    """

    name: str
    num_ranks: int | None
    where: str = "one"
    mps: bool = False

    def why_not(self, num_gpus: int) -> str | None:
        """The reason why it cannot run with so many GPUs, or None."""
        if num_gpus == 0:
            return NO_GPU
        if self.where == "all" and num_gpus < 2:
            return "one GPU here"
        if self.mps and find_control() is None:
            return "MPS is missing: there is no nvidia-cuda-mps-control"
        return None


@dataclass(frozen=True)
class Outcome:
    """What became of a layout: "passed", "failed" or "not run", and why or with what tests."""

    layout: str
    status: str
    text: str
    seconds: float = 0.0


LAYOUTS = (
    Layout("kernels", 0),
    Layout("one-2-mps", 2, mps=True),
    Layout("one-4-mps", 4, mps=True),
    Layout("one-8-mps", 8, mps=True),
    Layout("one-2", 2),
    Layout("one-4", 4),
    Layout("all", None, "all"),
    Layout("all-twice-mps", None, "all", mps=True),
)
# Said in the table, so that nobody takes it for done.
NEVER_RUN = Outcome("threads", "not run", "the tests have no ranks that are threads of one process")


def num_ranks_of(layout: Layout, num_gpus: int) -> int:
    """On `num_gpus` GPUs."""
    if layout.num_ranks is not None:
        return layout.num_ranks
    return num_gpus * (2 if layout.mps else 1)


def run_bounded(command: list[str], env: dict[str, str], limit_s: float) -> tuple[int | None, str]:
    """The status, None when it was stopped at the limit, and what it wrote, shown as it came.

    At the limit it is interrupted first, so that pytest says what has failed until then. However
    this ends, all that the command has started ends too.
    """
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that all it has started can be stopped
    )
    said: list[str] = []

    def show() -> None:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            said.append(line)

    reader = threading.Thread(target=show)
    reader.start()
    status = None
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(INTERRUPT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join()
    return status, "".join(said)


def run_layout(layout: Layout, num_gpus: int, limit_s: float, arguments: list[str]) -> Outcome:
    """Runs pytest once; the outcome with its closing line."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--maxfail=25"]
    paths = [
        str(path.relative_to(ROOT)) for path in (ROOT / "tests/python/device").glob("test_gpu_*.py")
    ]
    if layout.num_ranks == 0:
        command += ["tests/python", *(f"--ignore={path}" for path in paths)]
    elif not any(argument.endswith(".py") for argument in arguments):
        command += sorted(paths)
    num_ranks = num_ranks_of(layout, num_gpus)
    env = {
        **os.environ,
        "GPU_TEST_RANKS": str(num_ranks or 2),
        "GPU_TEST_LAYOUT": layout.where,
    }
    mps = Mps() if layout.mps else contextlib.nullcontext()
    print(f"== {layout.name}: {num_ranks} ranks", flush=True)
    begin = time.monotonic()
    with mps:
        names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
        env |= {name: os.environ[name] for name in names if name in os.environ}
        status, said = run_bounded([*command, *arguments], env, limit_s)
    seconds = time.monotonic() - begin
    found = SUMMARY.findall(said)
    text = found[-1] if found else f"status {status}"
    if status is None:
        text = f"stopped after {limit_s:.0f} s" + (f": {found[-1]}" if found else "")
        return Outcome(layout.name, "failed", text, seconds)
    if status == NO_TESTS:
        return Outcome(layout.name, "not run", "no such tests", seconds)
    return Outcome(layout.name, "passed" if status == 0 else "failed", text, seconds)


def table_of(outcomes: list[Outcome]) -> str:
    """A line for each layout."""
    width = max(len(outcome.layout) for outcome in outcomes)
    return "\n".join(
        f"{o.layout:<{width}}  {o.status:<7}  {o.seconds:5.0f} s  {o.text}" for o in outcomes
    )


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line; ends the process with a message when it makes no sense."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    known = [layout.name for layout in LAYOUTS]
    add("--only", default=",".join(known), help="of " + ", ".join(known))
    add("--limit-s", type=float, default=LIMIT_S, help="of a layout")
    add("--json", type=Path, metavar="FILE", help="write the outcomes here")
    add("arguments", nargs="*", metavar="PYTEST ARGS")
    options = parser.parse_args(argv)
    options.only = options.only.split(",")
    unknown = set(options.only) - set(known)
    if unknown:
        parser.error(f"--only: there is no layout {', '.join(sorted(unknown))}")
    return options


def exit_on_term(number: int, frame: object) -> None:
    """SIGTERM ends what was started, and MPS, as an error does; a second one changes nothing."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + number)


def main(argv: list[str]) -> int:
    """Runs the layouts in turn; returns the exit code."""
    options = parse(argv)
    num_gpus = count_devices("cuda")
    outcomes = []
    for layout in LAYOUTS:
        reason = layout.why_not(num_gpus)
        if layout.name not in options.only:
            reason = reason or "not asked for"
        if reason is not None:
            outcomes.append(Outcome(layout.name, "not run", reason))
            continue
        try:
            outcome = run_layout(layout, num_gpus, options.limit_s, options.arguments)
        except RuntimeError as error:  # MPS that does not start
            outcome = Outcome(layout.name, "failed", str(error))
        outcomes.append(outcome)
    outcomes.append(NEVER_RUN)
    print(f"\nlayouts, with {num_gpus} GPU(s):\n{table_of(outcomes)}")
    if num_gpus == 0:
        print(f"{NO_GPU}: nothing ran")
    if options.json is not None:
        text = json.dumps([asdict(outcome) for outcome in outcomes], indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")
    return int(any(outcome.status == "failed" for outcome in outcomes))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, exit_on_term)
    sys.exit(main(sys.argv[1:]))
