"""Compiles the bindings against the headers of the oldest and the newest supported torch.

c10d's classes change from minor to minor, and its headers are the only place that says how. Nothing
is linked or run: a wheel of torch is downloaded without its dependencies (about 0.5 GB), its
include folder is kept under .cache/torch-headers/VERSION, and the wheel is deleted.

Usage: python tools/compat.py [VERSION...]     (default: 2.11 and the newest that pip offers)
"""

from __future__ import annotations

import concurrent.futures
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

import buildconfig
from buildconfig import ROOT, BuildProblem

CACHE = ROOT / ".cache" / "torch-headers"
OLDEST = "2.11"
# Whose wheels are taken: headers hardly depend on the Python.
WHEELS_PYTHON = "3.12"
# Full compiles without the optimizer: only whether the code compiles matters.
FLAGS = (buildconfig.CXX_STANDARD, "-O0", "-g0", "-fPIC", "-w")
DEFINES = ("-DTORCH_EXTENSION_NAME=_C", "-DTORCH_API_INCLUDE_EXTENSION_H")


class Offline(Exception):
    """pip could not find or download a version."""


def pip(*arguments: str) -> str:
    """Runs pip and returns its output; raises Offline with its last line where it fails."""
    command = [sys.executable, "-m", "pip", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Offline((done.stderr.strip().splitlines() or ["pip failed"])[-1])
    return done.stdout


def cached(prefix: str) -> str | None:
    """Returns the newest version in the cache that begins with a prefix, if there is one."""
    have = [path.parent.name for path in CACHE.glob("*/include")]
    fitting = [name for name in have if not prefix or f"{name}.".startswith(f"{prefix}.")]
    return max(fitting, key=lambda name: [int(part) for part in name.split(".")], default=None)


def fetch(spec: str) -> str:
    """Downloads the headers of torch==SPEC; returns their version."""
    CACHE.mkdir(parents=True, exist_ok=True)
    print(f"[compat] downloading torch=={spec} (about 0.5 GB, for its headers)", flush=True)
    options = ["--no-deps", "--no-cache-dir", "--progress-bar", "off", "--only-binary=:all:"]
    options += ["--python-version", WHEELS_PYTHON]
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="wheel-") as folder:
        pip("download", *options, "-d", folder, f"torch=={spec}")
        wheel = next(Path(folder).glob("torch-*.whl"))
        version = wheel.name.split("-")[1].split("+")[0]
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith("torch/include/")]
            archive.extractall(folder, names)
        (CACHE / version).mkdir(exist_ok=True)
        (Path(folder) / "torch" / "include").rename(CACHE / version / "include")
    return version


def find_version(prefix: str) -> str:
    """Returns a version to compile against, now in the cache: the newest for an empty prefix."""
    try:
        if not prefix:
            output = pip("index", "versions", "torch")
            match = re.match(r"torch \(([0-9.]+)", output)
            if match is None:
                raise Offline(f"pip index printed no version: {output[:80]!r}")
            prefix = match.group(1)
        # A downloaded release represents its minor version.
        return cached(prefix) or fetch(prefix if prefix.count(".") == 2 else f"{prefix}.*")
    except Offline as error:
        have = cached(prefix)
        if have is None:
            raise
        print(f"[compat] {error}; taking torch {have} from the cache", flush=True)
        return have


def check(version: str, source: Path) -> bool:
    """Compiles a file against a version's headers; whether that passes."""
    include = CACHE / version / "include"
    places = [include, include / "torch" / "csrc" / "api" / "include"]
    system = [f"-isystem{place}" for place in (*places, sysconfig.get_path("include"))]
    command = [*buildconfig.compiler(), *FLAGS, *DEFINES, f"-I{buildconfig.CSRC}", *system]
    command += ["-c", str(source), "-o", str(source.with_suffix(f".{version}.o"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = "\n".join(["fails", *done.stderr.splitlines()[:30]]) if done.returncode else "compiles"
    print(f"[compat] torch {version}: {said}", flush=True)
    return done.returncode == 0


def main() -> int:
    """Returns 0 if all compiles pass, or if offline outside CI with nothing cached."""
    try:
        buildconfig.check_all()
        prefixes = sys.argv[1:] or [OLDEST, ""]
        versions = dict.fromkeys(find_version(prefix) for prefix in prefixes)
    except BuildProblem as problem:
        print(f"compat: {problem}", file=sys.stderr)
        return 1
    except Offline as error:
        is_ci = os.environ.get("CI", "") not in ("", "0", "false")
        print(f"compat: {'FAILED' if is_ci else 'SKIPPED'}, no headers of torch to be had: {error}")
        return int(is_ci)
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ThreadPoolExecutor(buildconfig.num_jobs()) as pool,
    ):
        # As one file: what they include of torch, nearly the whole work, is parsed once.
        sources = buildconfig.sources(buildconfig.BINDINGS_FOLDER)
        together = Path(folder) / "all.cc"
        together.write_text("".join(f'#include "{path}"\n' for path in sources), encoding="utf-8")
        return int(not all(list(pool.map(lambda version: check(version, together), versions))))


if __name__ == "__main__":
    sys.exit(main())
