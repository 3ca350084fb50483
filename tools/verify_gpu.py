"""Builds, tests and measures on a machine with a GPU, and records the results.

Usage: python tools/verify_gpu.py [--only NAME,... | --rows NUMBER,... | --from NAME] [--small]
                                  [--budget-s S] [--out FOLDER]
       python tools/verify_gpu.py --layout NAME,... [-- PYTEST ARGS...]
       python tools/verify_gpu.py --take FOLDER

The checks of benchmarks/gpu/checks.toml run one after the other, each within its limit and what is
left of the budget; with --rows those that have these numbers there, or "all" of them. With --small
they run on small sizes, on the device that $DEVICE names. The last line printed is the command that
runs what remains. The active Python and its torch are used. The folder, $OUT by default, gets
verify.log, records and plots. Records are compared with the file's aims: each is printed as met, or
by how much it is missed. The file gets each check's last run and the driver's answers, and so do
checks.jsonl and probe.jsonl in the folder: --take writes those into the file of another checkout,
also of a run that was cut off.

With --layout, the GPU tests (or the given ones) run with so many ranks on one GPU or on all, under
NVIDIA's Multi-Process Service or without. The status is 1 when something failed, or when there is a
GPU and no nvidia-smi that works, and 0 without a GPU, where nothing runs.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import operator
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest requires it there

ROOT = Path(__file__).resolve().parent.parent
CHECKS = ROOT / "benchmarks" / "gpu" / "checks.toml"
sys.path.insert(0, str(ROOT / "benchmarks"))

from mps import FOLDERS, Mps, find_control, find_program  # noqa: E402
from placement import count_devices  # noqa: E402

BUDGET_S = 540.0  # for machines whose commands end after ten minutes
MIN_SHARE = 0.5  # of a check's limit: with less time left, the next command runs it
LAYOUT_S = 420.0  # of a layout, if no check says another limit
MIN_DRIVER = 580  # of CUDA 13, for which torch and the kernels are built
MIN_FREE_MIB = 8 << 10
GO_ON = "python tools/verify_gpu.py --only build,"
END_S = 5.0  # before its limit a check is interrupted: to write what it has, and end MPS
SPARE_S = 3.0  # before that, programs end that know their limit
MAX_FAILED = 3  # tests of a command: 25 that time out would be a whole check
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

Record = dict[str, Any]
Verdict = tuple[str, str]  # "met", "missed" or "without a record", and what is printed
CONDITION = re.compile(r"([\w.]+) ?(<=|>=|=) ?(.+)")
COMPARISONS = {"<=": operator.le, ">=": operator.ge, "=": operator.eq}
UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
# Records that agree in these fields, where they have them, are of one point.
POINT = ("op", "bytes", "dtype", "mode", "case", "shape", "vocab_size", "world_size", "optimizer")


class Check(NamedTuple):
    """A shell command, or why there is none; seconds; what it needs; its row; its small sizes.

    It needs "MPS", "2 GPUs", a module, a program, or a file that `make` has built.
    """

    name: str
    command: str
    limit_s: float
    needs: tuple[str, ...]
    not_scripted: str = ""
    row: int = 0
    small: str = ""


class Aim(NamedTuple):
    """Which records of which checks, a figure, and its limit.

    The figure is a field, or `FIELD / key=value`: the field divided by that of the record that has
    this value of `key` and is of the same point. Numbers may end in k, m or g (powers of 1024).
    """

    checks: list[str]
    records: str
    figure: str
    limit: str


def tables_of(path: Path) -> dict[str, list[dict[str, Any]]]:
    """What a file has: `check`, `aim` and `question`."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def load(path: Path) -> tuple[list[Check], list[Aim]]:
    """The checks and the aims of a file."""
    tables = tables_of(path)
    return (
        [
            Check(
                table["name"],
                table.get("command", "").strip(),
                float(table.get("limit_s", 0)),
                tuple(table.get("needs", ())),
                table.get("not_scripted", ""),
                table.get("row", 0),
                table.get("small", ""),
            )
            for table in tables.get("check", ())
        ],
        [Aim(**table) for table in tables.get("aim", ())],
    )


def write(path: Path, name: str, key: str, text: str) -> None:
    """Replaces the value of a key, `last_run` or `answer`, in the table of that name."""
    line = f"{key} = {json.dumps(text, ensure_ascii=False)}"
    pattern = rf'^(name = "{re.escape(name)}"\n(?:(?!\[\[).*\n)*?){key} = .*$'
    old = path.read_text(encoding="utf-8")
    new = re.sub(pattern, lambda found: found[1] + line, old, count=1, flags=re.M)
    path.write_text(new, encoding="utf-8")


def write_answers(path: Path, out: Path) -> None:
    """Writes the driver's answers that a run has found, under MPS and without, into the file."""
    said: dict[str, dict[str, str]] = {}
    found = out / "probe.jsonl"
    for line in parsed(found.read_text(encoding="utf-8") if found.exists() else ""):
        mode = "MPS" if line["mps"] else "no MPS"
        said.setdefault(line["question"], {})[mode] = line["answer"]
    for question, modes in said.items():
        text = "; ".join(f"{mode}: {answer}" for mode, answer in modes.items())
        write(path, question, "answer", text)


def take(out: Path, path: Path) -> int:
    """Writes the results of a run, possibly interrupted, into the file; the exit code."""
    results = out / "checks.jsonl"
    if not results.exists():
        print(f"there is no checks.jsonl in {out}: it is no folder of results")
        return 1
    found = {line["check"]: line["found"] for line in parsed(results.read_text(encoding="utf-8"))}
    for name, text in found.items():
        write(path, name, "last_run", text)
        print(f"{name}: {text}")
    write_answers(path, out)
    return 0


def parsed(text: str) -> Iterator[Record]:
    """The lines of JSON of a text, without those that were cut off."""
    for line in text.splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)


def records_in(folder: Path, before: dict[Path, str]) -> tuple[list[Record], dict[Path, str]]:
    """What a folder's files have beyond those of an earlier call; and the files, for a later one.

    Of a file that was written anew that is all of it.
    """
    paths = sorted(folder.glob("*.jsonl"))
    files = {path: path.read_text(encoding="utf-8") for path in paths}
    texts = [text.removeprefix(before.get(path, "")) for path, text in files.items()]
    return [record for text in texts for record in parsed(text)], files


def value_of(record: Record, field: str) -> Any:
    """Of a field, "ratio.p50" of a dictionary's; None where there is none."""
    value: Any = record
    for name in field.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def condition_of(text: str) -> tuple[str, str, str]:
    """Its field, operator, and what the field is compared with."""
    found = CONDITION.fullmatch(text)
    if found is None:
        raise ValueError(f"no condition on a record: {text!r}")
    return found[1], found[2], found[3]


def number_of(text: str) -> float | None:
    """1024.0 of "1k"; None of what is no number."""
    found = re.fullmatch(r"(-?[0-9.]+)([kmg]?)", text)
    return float(found[1]) * UNITS.get(found[2], 1) if found else None


def holds(record: Record, condition: str) -> bool:
    """Whether a record fulfils a condition."""
    field, comparison, wanted = condition_of(condition)
    value, limit = value_of(record, field), number_of(wanted)
    if limit is None:
        return str(value).lower() == wanted.lower()
    return value is not None and COMPARISONS[comparison](float(value), limit)


def figure_of(record: Record, figure: str, records: list[Record]) -> Any:
    """The figure of an aim; None where the record has none."""
    field, _, over = figure.partition(" / ")
    value = value_of(record, field)
    if not over or value is None:
        return value
    same = [name for name in POINT if name != condition_of(over)[0]]
    others = [
        value_of(other, field)
        for other in records
        if holds(other, over) and all(other.get(name) == record.get(name) for name in same)
    ]
    return value / others[-1] if others and others[-1] else None


def judge(aim: Aim, records: list[Record]) -> Verdict:
    """How the worst of the records that an aim is for compares with it."""
    right = [record for record in records if record.get("verified", True)]
    chosen = [
        record for record in right if all(holds(record, one) for one in aim.records.split(", "))
    ]
    figures = [(figure_of(record, aim.figure, right), record) for record in chosen]
    found = [(value, record) for value, record in figures if value is not None]
    text = f"{aim.figure} of {aim.records}: aim {aim.limit}"
    if not found:
        return "without a record", f"no record: {text}"
    _, comparison, wanted = condition_of(f"figure {aim.limit}")
    limit = number_of(wanted) or 0.0
    worst = max if comparison == "<=" else min
    value, record = worst(found, key=lambda pair: pair[0])
    is_met = COMPARISONS[comparison](value, limit)
    verdict = "met" if is_met else f"missed by {abs(value - limit) / limit:.1%}"
    where = ", ".join(f"{name} {record[name]}" for name in POINT if record.get(name) is not None)
    return verdict.partition(" ")[0], f"{verdict}: {text}, found {value:.5g} ({where})"


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
    """Runs a command; returns its status, or None if it was interrupted. Its children end too.

    It is interrupted before the limit: pytest says what has failed, and programs end their MPS.
    """
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, start_new_session=True, **options
    )
    try:
        return process.wait(max(limit_s / 2, limit_s - END_S))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(min(limit_s / 2, END_S))
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
    pytest = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", f"--maxfail={MAX_FAILED}"]
    print(f"== {name}: {num_ranks} ranks", flush=True)
    with Mps() if with_mps else contextlib.nullcontext():
        ranks = {"GPU_TEST_RANKS": str(num_ranks or 2), "GPU_TEST_LAYOUT": where}
        status = run([*pytest, *arguments], limit_s, env={**os.environ, **ranks})
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


def query_gpus(*names: str) -> list[list[str]]:
    """What nvidia-smi says of each GPU; nothing where there is none.

    Raises:
        RuntimeError: the driver's nvidia-smi is missing, or fails.
    """
    tool = find_program("nvidia-smi")
    if tool is None:
        if count_devices("cuda") == 0:
            return []
        raise RuntimeError(
            f"torch finds a GPU, and nvidia-smi is neither on PATH nor in {', '.join(FOLDERS)}: add"
            " the folder of the driver's programs to PATH"
        )
    query = [tool, "--format=csv,noheader,nounits", f"--query-gpu={','.join(names)}"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{tool} fails: {(done.stdout + done.stderr).strip()}")
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]


def gpu_archs() -> list[str]:
    """The architecture of each GPU, such as "90"; see query_gpus()."""
    return [cap.replace(".", "") for (cap,) in query_gpus("compute_cap")]


def complain() -> None:
    """Prints what is wrong with the GPUs for checks of several ranks, each with the way on."""
    names = ("index", "driver_version", "compute_mode", "mig.mode.current", "memory.free")
    for gpu, driver, mode, mig, free in query_gpus(*names):
        free_mib = int(free) if free.isdigit() else MIN_FREE_MIB
        texts = {
            f"driver {driver} is older than CUDA 13, which needs {MIN_DRIVER}: install a newer"
            " driver, or its cuda-compat package": int(driver.partition(".")[0] or 0) < MIN_DRIVER,
            "it is in exclusive mode, and without MPS a second rank gets no context: nvidia-smi"
            f" -i {gpu} -c DEFAULT, or --only checks that need MPS": mode == "Exclusive_Process",
            f"it takes no programs: nvidia-smi -i {gpu} -c DEFAULT": mode == "Prohibited",
            "it is cut by MIG: ranks of one group need one slice, named by"
            " CUDA_VISIBLE_DEVICES=MIG-..., and each has its own MPS": mig == "Enabled",
            f"{free_mib / 1024:.1f} GiB are free, and the large sizes need {MIN_FREE_MIB >> 10}:"
            " nvidia-smi lists who has the rest": free_mib < MIN_FREE_MIB,
        }
        for text, is_wrong in texts.items():
            if is_wrong:
                print(f"GPU {gpu}: {text}", flush=True)


def environment(archs: list[str], out: Path) -> dict[str, str]:
    """For the checks: kernels for the GPUs that are here alone, and where results go."""
    return {
        "GLOO_SOCKET_IFNAME": "lo",
        "RINGCOMM_CUDA": "1",
        "RINGCOMM_CUDA_ARCHS": " ".join(sorted(set(archs))),
        "DEVICE": "cuda",
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
    checks: list[Check], out: Path, budget_s: float, path: Path, *, is_small: bool = False
) -> tuple[dict[str, str], list[str]]:
    """Runs checks in turn; what became of each, and those that are left for another command.

    Those had no time, or were stopped by the budget. At least one check is run, besides the build.
    Small sizes have no aims, and the file does not get their results.
    """
    archs, deadline = gpu_archs(), time.monotonic() + budget_s
    env, aims = environment(archs, out), [] if is_small else load(path)[1]
    found: dict[str, str] = {}
    left: list[str] = []
    num_run = 0
    if find_program("nvidia-smi"):
        complain()
    for check in checks:
        left_s = deadline - time.monotonic()
        why = f"not scripted: {check.not_scripted}"
        reason = lacks(check.needs, len(archs)) if check.command else why
        if reason is None and num_run > 0 and left_s < MIN_SHARE * check.limit_s:
            reason = "the budget is spent"
            left.append(check.name)
        status = f"not run: {reason}"
        if reason is None:
            files = records_in(out, {})[1]
            keep(out, check.name, "stopped")  # unless something else follows
            env["SMALL"] = check.small if is_small else ""
            status = run_check(check, min(check.limit_s, left_s), out / "verify.log", env)
            records = records_in(out, files)[0]
            own = [aim for aim in aims if check.name in aim.checks and status != "not run"]
            verdicts = [judge(aim, records) for aim in own]
            with (out / "verify.log").open("a", encoding="utf-8") as log:
                for _, line in verdicts:
                    print(f"  {line}", file=log)
                    print(f"  {line}", flush=True)
            counts = Counter(kind for kind, _ in verdicts).items()
            said = ", ".join(f"{count} {kind}" for kind, count in sorted(counts))
            text = keep(out, check.name, status, f", aims: {said}" if said else "")
            if status == "stopped" and left_s < check.limit_s and num_run > 0:
                left.append(check.name)
            elif status != "not run" and not is_small:
                write(path, check.name, "last_run", text)
            if check.name == "probe" and not is_small:
                write_answers(path, out)
            num_run += check.name != "build"
        found[check.name] = status
        print(f"{check.name}: {status}", flush=True)
        if check.name == "build" and status in ("failed", "stopped"):
            break
    return found, left


def keep(out: Path, name: str, status: str, aims: str = "") -> str:
    """Appends a check's result with its date to checks.jsonl, for take(); returns it."""
    text = f"{status}, {datetime.datetime.now(datetime.timezone.utc).date()}{aims}"
    with (out / "checks.jsonl").open("a", encoding="utf-8") as output:
        print(json.dumps({"check": name, "found": text}), file=output)
    return text


def run_check(check: Check, limit_s: float, log: Path, env: dict[str, str]) -> str:
    """Runs a check's command; its output goes to the log as it comes."""
    command = re.sub(r"(?<![^\s'])python ", f"{shlex.quote(sys.executable)} ", check.command)
    own_s = limit_s - END_S - SPARE_S
    env = {**env, "LIMIT_S": f"{max(1, own_s):.0f}", "LAYOUTS_S": str(max(1.0, own_s))}
    begin = time.monotonic()
    with log.open("a", encoding="utf-8") as output:
        print(f"\n== {check.name}: {command}", file=output, flush=True)
        status = run(["bash", "-c", command], limit_s, env=env, stdout=output, stderr=output)
        print(f"== {status} after {time.monotonic() - begin:.0f} s", file=output)
    return {None: "stopped", 0: "passed", NO_TESTS: "not run"}.get(status, "failed")


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line, with the checks in `checks`; ends the process when it makes no sense."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    checks = {check.name: check for check in load(CHECKS)[0]}
    out = Path(os.environ.get("OUT") or ROOT / "build" / "gpu-verification")
    add("--only", metavar="NAME,...", help="these checks alone")
    add("--rows", metavar="NUMBER,...", help="the checks of these rows alone, or of all")
    add("--small", action="store_true", help="small sizes: a test of the checks")
    add("--from", dest="first", metavar="NAME", help="the build, this check and those after it")
    add("--layout", metavar="NAME,...", help=f"the tests of {', '.join(LAYOUTS)}; or every")
    add("--take", type=Path, metavar="FOLDER", help="write its results into the file, and run none")
    add("--budget-s", type=float, default=BUDGET_S, help="of all checks")
    add("--out", type=Path, default=out, metavar="FOLDER", help="for results")
    add("--go-on", default=GO_ON, help="the command that the names of checks that are left follow")
    add("arguments", nargs="*", metavar="PYTEST ARGS", help="with --layout")
    options = parser.parse_args(argv)
    names = list(checks)
    if options.first in checks:
        names = ["build", *names[names.index(options.first) :]]
    only = options.only.split(",") if options.only else names
    if options.rows:
        rows = {str(check.row) for check in checks.values() if check.row}
        wanted = rows if options.rows == "all" else {*options.rows.split(",")}
        if not wanted <= rows:
            parser.error(f"unknown rows {', '.join(sorted(wanted - rows))}")
        only = [name for name, check in checks.items() if str(check.row) in wanted]
    layouts = [] if options.layout is None else options.layout.split(",")
    asked = {*only, options.first} - {None}
    unknown = asked - {*checks} | {*layouts} - {*LAYOUTS, "every"}
    if unknown:
        parser.error(f"unknown names {', '.join(sorted(unknown))}")
    options.layout = list(LAYOUTS) if layouts == ["every"] else layouts
    options.checks = [checks[name] for name in only]  # in the order asked for
    return options


def main(argv: list[str]) -> int:
    """Runs what is asked for; returns the exit code."""
    options = parse(argv)
    if options.layout:
        return run_layouts(options.layout, options.arguments)
    if options.take:
        return take(options.take, CHECKS)
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    try:
        found, left = verify(options.checks, out, options.budget_s, CHECKS, is_small=options.small)
    except RuntimeError as error:
        print(error)
        return 1
    print(f"results: {out}")
    if left:
        limits = {check.name: check.limit_s for check in options.checks}
        seconds = sum(limits[name] for name in left)
        print(f"go on with: {options.go_on}{','.join(left)} ({seconds:.0f} s at most)")
    return int(any(status in ("failed", "stopped") for status in found.values()))


def exit_on_term(number: int, frame: object) -> None:
    """SIGTERM ends what was started, and MPS, as an error does; a second one changes nothing."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, exit_on_term)
    # Ignored in a background job of a shell; checks would inherit that, and not end at their limit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
