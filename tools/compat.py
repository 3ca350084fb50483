"""Compiles the bindings against the headers of the oldest and the newest torch that we serve.

c10d's classes change from minor to minor, and its headers are the only place that says how. Nothing
is linked or run: a wheel of torch is downloaded without its dependencies (about 0.5 GB), its
include folder is kept under .cache/torch-headers/VERSION, and the wheel is deleted.

Usage: python tools/compat.py [VERSION...]     (default: 2.11.* and the newest that pip offers)
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from pathlib import Path

import buildconfig
from buildconfig import ROOT, BuildProblem

CACHE = ROOT / ".cache" / "torch-headers"
OLDEST = "2.11"
# Headers hardly depend on the Python of a wheel: where pip has none for ours, another's will do.
OTHER_PYTHONS = ("3.12", "3.11", "3.10")
# Full compiles, but without the optimiser: the question is only whether the code is accepted.
FLAGS = (buildconfig.CXX_STANDARD, "-O0", "-g0", "-fPIC", "-w")
DEFINES = ("-DTORCH_EXTENSION_NAME=_C", "-DTORCH_API_INCLUDE_EXTENSION_H")


class Offline(Exception):
    """pip could not tell or fetch what was asked for."""


def pip(*arguments: str) -> str:
    """Runs pip and returns its output; raises Offline with its last line where it fails."""
    command = [sys.executable, "-m", "pip", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Offline((done.stderr.strip().splitlines() or ["pip failed"])[-1])
    return done.stdout


def newest_version() -> str:
    """Returns the newest release of torch that pip offers to this Python."""
    output = pip("index", "versions", "torch")
    match = re.match(r"torch \(([0-9.]+)", output)
    if match is None:
        raise Offline(f"pip index printed no version: {output[:80]!r}")
    return match.group(1)


def key_of(version: str) -> tuple[int, ...]:
    """Returns a version as numbers, to sort by."""
    return tuple(int(part) for part in version.split("."))


def cached(prefix: str = "") -> str | None:
    """Returns the newest version in the cache that begins with a prefix, if there is one."""
    have = [path.name for path in CACHE.glob("[0-9]*") if (path / "include").is_dir()]
    fitting = [name for name in have if f"{name}.".startswith(f"{prefix}." if prefix else "")]
    return max(fitting, key=key_of, default=None)


def download(spec: str, folder: Path) -> Path:
    """Returns the wheel that pip finds for a specification, for this Python or another one."""
    common = ["download", "--no-deps", "--no-cache-dir", "--progress-bar", "off"]
    common += ["--only-binary=:all:", "-d", str(folder), spec]
    failure = Offline("no wheel")
    for extra in [[], *(["--python-version", version] for version in OTHER_PYTHONS)]:
        try:
            pip(*common, *extra)
        except Offline as error:
            failure = error
            continue
        return next(folder.glob("torch-*.whl"))
    raise failure


def unpack(wheel: Path) -> str:
    """Puts a wheel's headers into the cache; returns the version they are of."""
    version = wheel.name.split("-")[1].split("+")[0]
    draft = CACHE / f"draft-{version}"
    shutil.rmtree(draft, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith("torch/include/"):
                archive.extract(name, draft)
    shutil.rmtree(CACHE / version, ignore_errors=True)
    (CACHE / version).mkdir()
    (draft / "torch" / "include").rename(CACHE / version / "include")
    shutil.rmtree(draft)
    return version


def fetch(spec: str) -> str:
    """Downloads the headers of torch==SPEC; returns their version."""
    CACHE.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    print(f"[compat] downloading torch=={spec} (about 0.5 GB, for its headers)", flush=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="wheel-") as folder:
        wheel = download(f"torch=={spec}", Path(folder))
        megabytes = wheel.stat().st_size / 1e6
        version = unpack(wheel)
    seconds = time.monotonic() - started
    print(f"[compat] torch {version}: wheel of {megabytes:.0f} MB, {seconds:.0f} s", flush=True)
    return version


def find_versions(wanted: list[str]) -> list[str]:
    """Returns the versions to compile against, now all in the cache; fetches what is missing."""
    found = []
    for prefix in wanted or [OLDEST, ""]:
        try:
            # A release once fetched stands for its minor; only "the newest" has to be asked for.
            spec = prefix or newest_version()
            version = cached(spec) or fetch(spec if spec.count(".") == 2 else f"{spec}.*")
        except Offline as error:
            have = cached(prefix)
            if have is None:
                raise
            print(f"[compat] {error}; taking torch {have} from the cache", flush=True)
            version = have
        if version not in found:
            found.append(version)
    return found


def fingerprint(version: str, files: list[Path]) -> str:
    """Returns a hash over all that decides whether the compiles pass."""
    state = hashlib.sha256()
    compiler = subprocess.run(
        [*buildconfig.compiler(), "--version"], capture_output=True, text=True, check=False
    ).stdout
    for word in (version, compiler, sys.version, *FLAGS, *DEFINES):
        state.update(f"{word}\0".encode())
    for path in (*files, *buildconfig.headers()):
        state.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return state.hexdigest()


def compile_one(version: str, source: Path, target: Path) -> str:
    """Compiles one file against a version's headers; returns the errors, empty if none."""
    include = CACHE / version / "include"
    places = [include, include / "torch" / "csrc" / "api" / "include"]
    system = [f"-isystem{place}" for place in (*places, sysconfig.get_path("include"))]
    command = [*buildconfig.compiler(), *FLAGS, *DEFINES, f"-I{buildconfig.CSRC}", *system]
    command += ["-c", str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr or f"exit status {done.returncode}"


def compile_all(version: str, files: list[Path], folder: Path) -> dict[Path, str]:
    """Compiles the files; returns the errors of those that fail.

    At first as one: what they include of torch is parsed once then, which is nearly the whole work
    (15 s instead of 80). It cannot see that one file lacks an include that an earlier one has. Each
    alone where that fails, to name it, and because two may well have a function of the same name.
    """
    together = folder / "all.cc"
    text = "".join(f'#include "{path}"\n' for path in files)
    together.write_text(text, encoding="utf-8")
    if not compile_one(version, together, folder / "all.o"):
        return {}
    print(f"[compat] torch {version}: does not compile as one file, trying one by one", flush=True)
    errors = {
        path: compile_one(version, path, folder / f"{number}.o")
        for number, path in enumerate(files)
    }
    return {path: text for path, text in errors.items() if text}


def check(version: str, files: list[Path]) -> bool:
    """Compiles every file against a version, unless that passed before; whether all do."""
    stamp = CACHE / version / "passed"
    mark = fingerprint(version, files)
    if stamp.exists() and stamp.read_text(encoding="utf-8") == mark:
        print(f"[compat] torch {version}: passed before, nothing has changed since", flush=True)
        return True
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        failed = compile_all(version, files, Path(folder))
    for path, text in failed.items():
        lines = "\n".join(text.splitlines()[:30])
        print(f"[compat] torch {version}: {path.relative_to(ROOT)} fails\n{lines}", flush=True)
    if not failed:
        stamp.write_text(mark, encoding="utf-8")
    verdict = f"{len(failed)} fail" if failed else f"all {len(files)} compile"
    print(f"[compat] torch {version}: {verdict}, {time.monotonic() - started:.0f} s", flush=True)
    return not failed


def main() -> int:
    """Returns 0 if all compiles pass, or if offline outside CI with nothing cached."""
    files = buildconfig.sources(buildconfig.BINDINGS_FOLDER)
    if not files:
        print("compat: csrc/bindings has no source", file=sys.stderr)
        return 1
    try:
        buildconfig.check_all()
        versions = find_versions(sys.argv[1:])
    except BuildProblem as problem:
        print(f"compat: {problem}", file=sys.stderr)
        return 1
    except Offline as error:
        is_ci = os.environ.get("CI", "") not in ("", "0", "false")
        print(f"compat: {'FAILED' if is_ci else 'SKIPPED'}, no headers of torch to be had: {error}")
        return int(is_ci)
    with concurrent.futures.ThreadPoolExecutor(buildconfig.num_jobs()) as pool:
        return int(not all(list(pool.map(lambda version: check(version, files), versions))))


if __name__ == "__main__":
    sys.exit(main())
