"""Builds, tests and measures on a machine with a GPU, and records the results.

Usage: python tools/verify_gpu.py [--only NAME,... | --from NAME] [--budget-s S] [--out FOLDER]
       python tools/verify_gpu.py --layout NAME,... [-- PYTEST ARGS...]
       python tools/verify_gpu.py --take FOLDER

The rows of docs/gpu-verification.md run one after the other, each within its limit and what is left
of the budget. The last lines printed are the commands that run what remains. The active Python and
its torch are used. The folder, $OUT by default, gets verify.log, records and plots. Records are
compared with the page's aims (gpu_aims.py): each is printed as met, or by how much it is missed.
The page gets each row's "last run" and the driver's answers (gpu_page.py), and so do rows.jsonl and
probe.jsonl in the folder: --take writes those into the page of another checkout, also of a run that
was cut off.

With --layout, the GPU tests (or the given ones) run with so many ranks on one GPU or on all, under
NVIDIA's Multi-Process Service or without. The status is 1 when something failed, or when there is a
GPU and no nvidia-smi that works, and 0 without a GPU, where nothing runs.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "gpu-verification.md"
sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu_aims import Records, Verdict, judge, read_aims, summary  # noqa: E402
from gpu_page import ROWS, Row, note, read_rows, take, write_answers, write_row  # noqa: E402
from mps import FOLDERS, Mps, find_control, find_program  # noqa: E402
from placement import count_devices  # noqa: E402

BUDGET_S = 540.0  # for machines whose commands end after ten minutes
MIN_SHARE = 0.5  # of a row's limit: with less time left, the next command runs it
LAYOUT_S = 420.0  # of a layout, if no row says another limit
MIN_DRIVER = 580  # of CUDA 13, for which torch and the kernels are built
MIN_FREE_MIB = 8 << 10
GO_ON = "python tools/verify_gpu.py --only build,"
END_S = 45.0  # for a program to end its children, including MPS
MAX_FAILED = 3  # tests of a command: 25 that time out would be a whole row
NO_TESTS = 5  # pytest's status where no test was selected
# Ranks (0: tests that start none; None: one for each GPU, two under MPS), the GPUs, and MPS.
LAYOUTS: dict[str, tuple[int | None, str, bool]] = {
    "kernels": (0, "one", False),
    "one-2-mps": (2, "one", True),
    "one-4-mps": (4, "one", True),
    "one-8-mps": (8, "one", True),
    "one-2": (2, "one", False),
    "one-4": (4, "one", False),
    "all": (None, "all", False),
    "all-twice-mps": (None, "all", True),
}


def lacks(needs: tuple[str, ...], num_gpus: int) -> str | None:
    """What a machine with so many GPUs lacks; None if it has everything."""
    if num_gpus == 0:
        return "no GPU here"
    if "2 GPUs" in needs and num_gpus < 2:
        return "one GPU here"
    if "MPS" in needs and find_control() is None:
        return "MPS is missing: no nvidia-cuda-mps-control; it comes with the driver's programs"
    for name in needs:
        if "/" in name:
            if not (ROOT / name).exists():
                held = re.match(r"build/gpu-(\d+)/", name)
                return f"no {name}: make kernel-sweep" + (f" HELD={held[1]}" if held else "")
        elif name not in ("2 GPUs", "MPS") and not (
            importlib.util.find_spec(name) or shutil.which(name)
        ):
            return f"{name} is not installed"
    return None


def run(command: list[str], limit_s: float, **options: Any) -> int | None:
    """Runs a command; returns its status, or None if it reached the limit. Its children end too.

    At the limit it is interrupted first: pytest says what has failed, and programs end their MPS.
    """
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, start_new_session=True, **options
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_layout(name: str, num_gpus: int, arguments: list[str], limit_s: float) -> str:
    """Runs pytest in a layout: "passed", "failed", "stopped", or "not run" and why."""
    num_ranks, where, with_mps = LAYOUTS[name]
    needs = [*(["2 GPUs"] if where == "all" else []), *(["MPS"] if with_mps else [])]
    reason = lacks(tuple(needs), num_gpus)
    if reason is not None:
        return f"not run: {reason}"
    if num_ranks is None:
        num_ranks = num_gpus * (2 if with_mps else 1)
    groups = sorted((ROOT / "tests/python/device").glob("test_gpu_*.py"))
    if num_ranks == 0:
        arguments = ["tests/python", *(f"--ignore={path}" for path in groups), *arguments]
    elif not any((ROOT / word.partition("::")[0]).exists() for word in arguments):
        arguments = [*map(str, groups), *arguments]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-q",
        f"--maxfail={MAX_FAILED}",
        *arguments,
    ]
    print(f"== {name}: {num_ranks} ranks", flush=True)
    with Mps() if with_mps else contextlib.nullcontext():
        ranks = {"GPU_TEST_RANKS": str(num_ranks or 2), "GPU_TEST_LAYOUT": where}
        status = run(command, limit_s, env={**os.environ, **ranks})
    if status is None:
        return f"stopped after {limit_s:.0f} s"
    return {0: "passed", NO_TESTS: "not run: no such tests"}.get(status, "failed")


def run_layouts(names: list[str], arguments: list[str]) -> int:
    """Runs the layouts in turn, within $LAYOUTS_S together; the exit code."""
    num_gpus = count_devices("cuda")
    limit_s = float(os.environ.get("LAYOUTS_S", LAYOUT_S * len(names))) / len(names)
    found = {}
    for name in names:
        try:
            found[name] = run_layout(name, num_gpus, arguments, limit_s)
        except RuntimeError as error:  # MPS that does not start
            found[name] = f"failed: {error}"
    print("\n".join(f"{name:<13}  {text}" for name, text in found.items()))
    if num_gpus and all(text.startswith("not run") for text in found.values()):
        return NO_TESTS
    return int(any(text.startswith(("failed", "stopped")) for text in found.values()))


def gpu_archs() -> list[str]:
    """The architecture of each GPU, such as "90"; none where there is no GPU.

    Raises:
        RuntimeError: the driver's nvidia-smi is missing, or fails.
    """
    if find_program("nvidia-smi") is None:
        if count_devices("cuda") == 0:
            return []
        raise RuntimeError(
            f"torch finds a GPU, and nvidia-smi is neither on PATH nor in {', '.join(FOLDERS)}: add"
            " the folder of the driver's programs to PATH"
        )
    return [cap.replace(".", "") for (cap,) in query_gpus("compute_cap")]


def query_gpus(*names: str) -> list[list[str]]:
    """What nvidia-smi says of each GPU. Raises RuntimeError where it fails."""
    tool = find_program("nvidia-smi")
    query = [str(tool), "--format=csv,noheader,nounits", f"--query-gpu={','.join(names)}"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{tool} fails: {(done.stdout + done.stderr).strip()}")
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]


def complaints() -> list[str]:
    """What is wrong with the GPUs for rows of several ranks, each with the way on."""
    found = []
    names = ("index", "driver_version", "compute_mode", "mig.mode.current", "memory.free")
    for gpu, driver, mode, mig, free in query_gpus(*names):
        if int(driver.partition(".")[0] or 0) < MIN_DRIVER:
            found.append(
                f"GPU {gpu}: driver {driver} is older than CUDA 13, which needs {MIN_DRIVER}: "
                "install a newer driver, or its cuda-compat package"
            )
        if mode == "Exclusive_Process":
            found.append(
                f"GPU {gpu} is in exclusive mode: without MPS a second rank gets no context; "
                f"nvidia-smi -i {gpu} -c DEFAULT, or --only rows that need MPS"
            )
        elif mode == "Prohibited":
            found.append(f"GPU {gpu} takes no programs: nvidia-smi -i {gpu} -c DEFAULT")
        if mig == "Enabled":
            found.append(
                f"GPU {gpu} is cut by MIG: ranks of one group need one slice, named by "
                "CUDA_VISIBLE_DEVICES=MIG-..., and each has its own MPS"
            )
        if free.isdigit() and int(free) < MIN_FREE_MIB:
            found.append(
                f"GPU {gpu} has {int(free) / 1024:.1f} GiB free: the large sizes need "
                f"{MIN_FREE_MIB >> 10}; nvidia-smi lists who has the rest"
            )
    return found


def environment(archs: list[str], out: Path) -> dict[str, str]:
    """For the rows: kernels for the GPUs that are here alone, and where results go."""
    return {
        "GLOO_SOCKET_IFNAME": "lo",
        "RINGCOMM_CUDA": "1",
        "RINGCOMM_CUDA_ARCHS": " ".join(sorted(set(archs))),
        **os.environ,
        "PYTHON": sys.executable,
        "PYTHONUNBUFFERED": "1",
        "PYTEST_ADDOPTS": f"--maxfail={MAX_FAILED}",
        "RINGCOMM_USE_ENV": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).strip(":"),
        "OUT": str(out),
        "GPUS": str(len(archs)),
    }


def verify(
    rows: list[Row], out: Path, budget_s: float, page: Path
) -> tuple[dict[str, str], list[str]]:
    """Runs rows in turn; what became of each, and the rows that are left for another command.

    Those had no time, or were stopped by the budget. At least one row is run, besides the build.
    """
    archs, today = gpu_archs(), datetime.datetime.now(datetime.timezone.utc).date()
    env, deadline = environment(archs, out), time.monotonic() + budget_s
    aims = read_aims(page)
    found: dict[str, str] = {}
    left: list[str] = []
    num_run = 0
    for complaint in complaints() if find_program("nvidia-smi") else ():
        print(complaint, flush=True)
    for row in rows:
        left_s = deadline - time.monotonic()
        reason = lacks(row.needs, len(archs)) if row.command else row.how
        if reason is None and num_run > 0 and left_s < MIN_SHARE * row.limit_s:
            reason = "the budget is spent"
            left.append(row.name)
        status = f"not run: {reason}"
        if reason is None:
            records = Records(out)
            note(out, row.name, f"stopped, {today}")  # unless something else follows
            status = run_row(row, min(row.limit_s, left_s), out / "verify.log", env)
            verdicts = [] if status == "not run" else judge(aims, row.name, records.new())
            tell(verdicts, out / "verify.log")
            if status == "stopped" and left_s < row.limit_s and num_run > 0:
                left.append(row.name)
            elif status != "not run":
                write_row(page, row.name, f"{status}, {today}{summary(verdicts)}")
            note(out, row.name, f"{status}, {today}{summary(verdicts)}")
            if row.name == "probe":
                write_answers(page, out)
            num_run += row.name != "build"
        found[row.name] = status
        print(f"{row.name}: {status}", flush=True)
        if row.name == "build" and status in ("failed", "stopped"):
            break
    return found, left


def tell(verdicts: list[Verdict], log: Path) -> None:
    """Prints what became of a row's aims, and keeps it."""
    text = "".join(f"  {verdict.text}\n" for verdict in verdicts)
    print(text, end="", flush=True)
    with log.open("a", encoding="utf-8") as output:
        output.write(text)


def run_row(row: Row, limit_s: float, log: Path, env: dict[str, str]) -> str:
    """Runs a row's command; its output goes to the log as it comes."""
    command = re.sub(r"(?<!\S)python ", f"{shlex.quote(sys.executable)} ", row.command)
    env = {**env, "LAYOUTS_S": str(max(1.0, limit_s - END_S))}
    begin = time.monotonic()
    with log.open("a", encoding="utf-8") as output:
        print(f"\n== {row.name}: {command}", file=output, flush=True)
        status = run(["bash", "-c", command], limit_s, env=env, stdout=output, stderr=output)
        print(f"== {status} after {time.monotonic() - begin:.0f} s", file=output)
    return {None: "stopped", 0: "passed", NO_TESTS: "not run"}.get(status, "failed")


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line, with the rows in `rows`; ends the process when it makes no sense."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    rows = {row.name: row for row in read_rows(PAGE)}
    out = Path(os.environ.get("OUT") or ROOT / "build" / "gpu-verification")
    add("--only", metavar="NAME,...", help="these rows alone")
    add("--from", dest="first", metavar="NAME", help="the build, this row and those after it")
    add("--layout", metavar="NAME,...", help=f"the tests of {', '.join(LAYOUTS)}; or every")
    add("--take", type=Path, metavar="FOLDER", help="write its rows into the page, and run none")
    add("--budget-s", type=float, default=BUDGET_S, help="of all rows")
    add("--out", type=Path, default=out, metavar="FOLDER", help="for results")
    add("--go-on", default=GO_ON, help="the command that the names of rows that are left follow")
    add("--then", metavar="COMMAND", help="what to run after the rows that are left")
    add("arguments", nargs="*", metavar="PYTEST ARGS", help="with --layout")
    options = parser.parse_args(argv)
    names = list(rows)
    if options.first in rows:
        names = ["build", *names[names.index(options.first) :]]
    only = options.only.split(",") if options.only else names
    layouts = [] if options.layout is None else options.layout.split(",")
    asked = {*only, options.first or "build"}
    unknown = asked - {*rows} | {*layouts} - {*LAYOUTS, "every"}
    if unknown:
        parser.error(f"unknown names {', '.join(sorted(unknown))}")
    options.layout = list(LAYOUTS) if layouts == ["every"] else layouts
    options.rows = [rows[name] for name in only]  # in the order asked for
    return options


def main(argv: list[str]) -> int:
    """Runs what is asked for; returns the exit code."""
    options = parse(argv)
    if options.layout:
        return run_layouts(options.layout, options.arguments)
    if options.take:
        if not (options.take / ROWS).exists():
            print(f"there is no rows.jsonl in {options.take}: it is no folder of results")
            return 1
        for name, text in take(options.take, PAGE).items():
            print(f"{name}: {text}")
        return 0
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    try:
        found, left = verify(options.rows, out, options.budget_s, PAGE)
    except RuntimeError as error:
        print(error)
        return 1
    print(f"results: {out}")
    if left:
        limits = {row.name: row.limit_s for row in options.rows}
        seconds = sum(limits[name] for name in left)
        print(f"go on with: {options.go_on}{','.join(left)} ({seconds:.0f} s at most)")
    if options.then:
        print(f"then: {options.then}")
    return int(any(status in ("failed", "stopped") for status in found.values()))


def exit_on_term(number: int, frame: object) -> None:
    """SIGTERM ends what was started, and MPS, as an error does; a second one changes nothing."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, exit_on_term)
    # Ignored in a background job of a shell; rows would inherit that, and not end at their limit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
