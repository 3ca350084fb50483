#!/usr/bin/env python3
"""Makes the records behind docs/benchmarks.md, and the plots, one after another.

    python benchmarks/run_all.py [--only floor steps] [--seconds 1] [--write]

Records go to benchmarks/results, of which the site makes its tables. Then it prints these tables
and draws the plots beside the records; --write draws those in docs/design. MPI takes part in
all_reduce and libraries where mpi4py and mpiexec are installed. The machine should be idle.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import harness
import plot
import table
from groups import MPI_ENVIRONMENT

from _ringcomm.status import EXIT_FAILED, EXIT_OK, run_main

# Each takes some minutes, and up to four times as long while it is disturbed.
LIMIT_S = 900.0
CURVE = "1k,4k,16k,64k,256k,1m,4m,16m,64m"
APART = "reduce_scatter,all_gather,all_to_all,broadcast,round_trip,barrier"
LONG = "--seconds 4 --repeats 3"
FLOOR = "all_reduce,all_reduce_shared --peers none --sizes 256k,4m,64m"
MUON = "muon ddp;muon zero-1;muon zero-2;muon zero-3"
LOMO = "lomo;lomo, overlapped;lomo, clip deferred;lomo, clip two_pass;adalomo;sgd;sgd, clip;ddp"
TENSOR = "tensor;tensor, tokens shared;tensor by DTensor;tensor by DTensor, inputs joined"
# Scripts, or the command ringcomm, with their arguments by name, in order.
JOBS: dict[str, list[str]] = {
    "all_reduce": [
        f"ringcomm bench all_reduce,all_reduce_apart --world-size 2 --sizes {CURVE} {LONG}",
        f"ringcomm bench all_reduce --world-size 4 --sizes {CURVE} {LONG}",
    ],
    "libraries": ["libraries.py --runs 3"],
    "operations": [f"ringcomm bench {APART} --world-size 2 {LONG}"],
    "hosts": ["hosts.py"],
    "floor": [
        f"ringcomm bench {FLOOR} --world-size 2 {LONG}",
        f"ringcomm bench {FLOOR} --world-size 4 {LONG}",
    ],
    "algorithms": ["ringcomm tune --world-sizes 2,4,8,16,32"],
    "fused_update": ["fused_update.py"],
    "cross_entropy": [
        "ringcomm bench cross_entropy --peers torch,compile",
        "ringcomm bench cross_entropy --world-size 2 --vocabularies 32000",
    ],
    "systems": [
        "ringcomm bench systems --over gloo,fake --width 256 --layers 5 --seconds 120",
        "ringcomm bench systems --over gloo,fake --width 256 --layers 5 --rows 4 --tokens 128"
        " --seconds 180",
        f"ringcomm bench systems --systems '{MUON}' --width 128 --rows 4 --seconds 60 --repeats 0",
        # Each with rows of its own, by which pages tell their tables apart.
        f"ringcomm bench systems --systems '{LOMO}' --width 256 --layers 6 --rows 2 --tokens 128"
        " --seconds 60",
        f"ringcomm bench systems --systems '{LOMO.replace(' overlapped;lomo,', '')}' --world-size 1"
        " --width 256 --layers 6 --rows 4 --tokens 128 --seconds 60",
        f"ringcomm bench systems --systems '{TENSOR}' --over fake --width 256 --layers 6 --rows 2"
        " --seconds 60",
    ],
    "inference": ["inference.py", "inference.py --dtype float32"],
    "planner": [
        "ringcomm bench systems --tuning NEWEST --over fake --width 256 --layers 6"
        " --tokens 128 --seconds 60",
    ],
    "offload": ["offload.py"],
}
ALONE = ("cross_entropy", "systems")
WITH_MPI = ("all_reduce", "libraries")


def find_mpiexec() -> str | None:
    """The mpiexec beside this Python or on PATH, if mpi4py is there as well."""
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return shutil.which("mpiexec", path=folders) if importlib.util.find_spec("mpi4py") else None


def command_of(job: str, mpiexec: str | None) -> list[str]:
    """The command of one line of ``JOBS``; under ``mpiexec`` with MPI as a peer."""
    tuned = str(max(harness.RESULTS.glob("*-tuning.json")))
    script, *arguments = shlex.split(job.replace("NEWEST", tuned))
    if script != "ringcomm":
        peers = ["--mpi", sys.executable] if mpiexec else []
        return [sys.executable, str(harness.ROOT / "benchmarks" / script), *arguments, *peers]
    op = arguments[1]
    if arguments[0] == "tune":
        path = harness.default_path("tuning").with_suffix(".json")
        return [sys.executable, "-m", script, *arguments, "--json", str(path)]
    world = arguments[arguments.index("--world-size") + 1] if "--world-size" in arguments else ""
    stem = "collectives" if "," in op else op
    path = harness.default_path(f"{stem}-w{world}" if op not in ALONE else stem)
    command = [sys.executable, "-m", script, *arguments, "--json", str(path)]
    if mpiexec is None:
        return command
    return [mpiexec, "-n", world, *command, "--peers", "gloo,mpi4py"]


def run(command: list[str]) -> bool:
    """Runs a command with a heading; returns whether it succeeded in time."""
    shown = [Path(word).name if os.path.isabs(word) else word for word in command]
    print(f"\n== {shlex.join(shown)}", flush=True)
    begin = time.monotonic()
    environment = {**os.environ, **MPI_ENVIRONMENT}
    try:
        status = subprocess.run(command, env=environment, check=False, timeout=LIMIT_S).returncode
    except subprocess.TimeoutExpired:
        print(f"stopped after {LIMIT_S:.0f} s")
        return False
    print(f"{time.monotonic() - begin:.0f} s, status {status}", flush=True)
    return status == EXIT_OK


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the command line; exits with a message for invalid options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--only", nargs="+", choices=list(JOBS), default=list(JOBS), metavar="NAME")
    add("--seconds", type=float, help="passed on; each script has its own default and meaning")
    add("--write", action="store_true", help="renew the plots in docs/design")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Runs everything, also after something has failed; returns the exit code."""
    options = parse(argv)
    mpiexec = find_mpiexec()
    more = [] if options.seconds is None else ["--seconds", str(options.seconds)]
    if mpiexec is None and set(WITH_MPI) & set(options.only):
        print("without MPI as a peer; for Intel's: pip install impi-rt mpi4py")
    failed = []
    for name in options.only:
        for job in JOBS[name]:
            if not run([*command_of(job, mpiexec if name in WITH_MPI else None), *more]):
                failed.append(job)
    print("\n== tables and plots\n", flush=True)
    table.main([])
    plot.main(["--out", str(plot.DESIGN)] if options.write else [])
    for job in failed:
        print(f"failed: {job}")
    return EXIT_FAILED if failed else EXIT_OK


if __name__ == "__main__":
    sys.exit(run_main("run_all.py", main))
