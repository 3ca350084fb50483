"""Runs of a client over Gloo and over ringcomm, and their comparison."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import client_files
from client_files import Client

BACKENDS = ("gloo", "ringcomm")
MARK = "RINGCOMM_CLIENT_RUN"  # in the environment of all processes of a run
STOP_S = 10.0
EQUAL, CLOSE, DIFFERENT, FAILED = "equal", "close", "different", "failed"
ONLY_HERE = "only ringcomm"


class RunFailed(Exception):
    """A run ended with an error, or did not end; the message has the end of its output."""


@dataclass
class Result:
    """What came of a client.

    Attributes:
        status: EQUAL; CLOSE, within the client's tolerance; ONLY_HERE, where Gloo fails as the
            client says; DIFFERENT; FAILED, also where its packages or its source are missing.
        text: the largest difference, or why it failed.
        seconds: of the run over each backend, with the start of Python.
    """

    status: str
    text: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def is_wrong(self) -> bool:
        return self.status in (DIFFERENT, FAILED)


def compare(client: Client, given: dict[str, Path]) -> Result:
    """Runs a client over both backends, one after the other."""
    try:
        source = client_files.source(client, given)
        python = client_files.environment(client)
    except client_files.Unavailable as reason:
        return Result(FAILED, str(reason))
    result = Result(FAILED, versions=client_files.versions(client, python))
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="ringcomm-client-") as scratch:
        for backend in BACKENDS:
            folder = Path(scratch) / backend
            folder.mkdir()
            started = time.monotonic()
            try:
                found[backend] = run(client, python, source, folder, backend)
            except RunFailed as failure:
                text = str(failure)
                is_expected = client.fails_on_gloo and client.fails_on_gloo in text
                if backend != "gloo" or not is_expected:
                    result.text = f"over {backend}: {text}"
                    return result
            result.seconds[backend] = round(time.monotonic() - started, 1)
    result.status, result.text = judge(client, found)
    return result


def judge(client: Client, found: dict[str, list[dict[str, Any]]]) -> tuple[str, str]:
    """The status of a client, and its text, from what the ranks have written over each backend."""
    for backend, reports in found.items():
        if any(report["real"] != backend for report in reports):
            return FAILED, f"the run over {backend} used {[one['real'] for one in reports]}"
        values = [x for one in reports for series in one["series"].values() for x in series]
        if not values or not all(math.isfinite(value) for value in values):
            return (
                FAILED,
                f"over {backend} the series are empty, or have values that are not finite",
            )
    if "gloo" not in found:
        return ONLY_HERE, f"Gloo: {client.fails_on_gloo}"
    if client.fails_on_gloo:
        return FAILED, f"it runs over Gloo, but FAILS_ON_GLOO says {client.fails_on_gloo!r}"
    theirs, ours = ([report["series"] for report in found[backend]] for backend in BACKENDS)
    if theirs == ours:
        return EQUAL, ""
    limit, reason = client.tolerance
    largest, where = 0.0, ""
    for rank, (expected, got) in enumerate(zip(theirs, ours, strict=True)):
        if {name: len(one) for name, one in expected.items()} != {
            name: len(one) for name, one in got.items()
        }:
            return DIFFERENT, f"rank {rank} has series of other names or lengths than over Gloo"
        for name, one in expected.items():
            for idx, (want, have) in enumerate(zip(one, got[name], strict=True)):
                difference = abs(have - want) / (abs(want) or 1.0)
                if difference > largest:
                    largest, where = difference, f"{name}[{idx}] of rank {rank}: {have}, not {want}"
    text = f"differs by up to {largest:.1e} ({where})"
    return (CLOSE, f"{text}; {reason}") if largest <= limit else (DIFFERENT, text)


def run(
    client: Client, python: Path, source: Path | None, folder: Path, backend: str
) -> list[dict[str, Any]]:
    """What each rank of a client has written over a backend; raises RunFailed."""
    program: list[str | Path] = [client.path, folder]
    program += ["--source", source] if source is not None else []
    as_gloo = str(int(backend == "ringcomm"))
    return launch(python, program, client.ranks, folder, client.limit_s, RINGCOMM_AS_GLOO=as_gloo)


def launch(
    python: Path, program: list[str | Path], ranks: int, folder: Path, limit_s: float, **env: str
) -> list[dict[str, Any]]:
    """Runs a program with its arguments under torchrun; returns rank{N}.json of each rank.

    Raises RunFailed. No process is left at the end.
    """
    mark = uuid.uuid4().hex
    launcher: list[str | Path] = [python, "-m", "torch.distributed.run", "--standalone"]
    # torch compiles extensions there. A run that was killed while it did so leaves its lock.
    extensions = client_files.CACHE / "extensions"
    for lock in extensions.glob("*/lock"):
        lock.unlink()
    # Of the environment, which has ninja, and of the one below it.
    programs = [str(python.parent), str(Path(sys.executable).parent), os.environ["PATH"]]
    common = {
        "PATH": os.pathsep.join(programs),
        "TORCH_EXTENSIONS_DIR": str(extensions),
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        MARK: mark,
    }
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*launcher, "--nproc-per-node", str(ranks), *program],
            env={**os.environ, **common, **env},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=folder,
        )
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            stop(process, mark)
    tail = log.read_text(encoding="utf-8", errors="replace")[-6000:]
    if status is None:
        raise RunFailed(f"it did not end in {limit_s:g} s\n{tail}")
    if status != 0:
        raise RunFailed(f"exit status {status}\n{tail}")
    paths = [folder / f"rank{rank}.json" for rank in range(ranks)]
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        raise RunFailed(f"it ended without {missing}\n{tail}")
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def stop(process: subprocess.Popen[bytes], mark: str) -> None:
    """Ends a launcher that still runs, and kills what is left of its run.

    The launcher makes a session for each rank: killing its process group would leave them.
    """
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
    for pid in marked(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def marked(mark: str) -> list[int]:
    """The processes that have a run's mark in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found
