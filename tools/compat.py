"""Builds ringcomm with the oldest and the newest torch, and runs a short set of tests with each.

torch's private names and c10d's classes change from minor to minor version. The environment of each
version is kept in .cache/compat/VERSION (2 GB), with a copy of the files that git knows or does not
ignore. The wheel of torch is installed without the CUDA packages that it names, which have
gigabytes: tools/stand_ins.py makes what takes their place. RINGCOMM_TORCH_INDEX names an index of
wheels for CPUs instead.

With the newest torch, the kernels' PTX that the newest Triton of pip makes runs, too.

Usage: python tools/compat.py [VERSION...]   (default: 2.11 and "newest", the newest of pip)
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import buildconfig
import stand_ins
from buildconfig import ROOT, BuildProblem
from gpu_machine import copy_sources

HOME = ROOT / ".cache" / "compat"
OLDEST = "2.11"
NEWEST = "newest"
# Each system once, features in pairs, schedules of pipelines, meshes, and torch's private names.
TESTS = (
    "programs/test_torch_names.py",
    "pairs/test_pairs.py::test_equals_one_process",
    "pipeline/test_pipeline.py",
    "mesh/test_parallelize.py",
    "tensor/test_whole_loop.py",
    "zero/test_zero_unused.py",
    "zero/test_zero_dtensor.py",
)
TRITON = "ops/test_triton_ptx.py::test_some_cases"
SYSTEMS = "programs/test_benchmark_scripts.py::test_losses_bytes_and_memory_of_systems"
GROUPS = ("build", "train", "test")
# Large, and not needed for these tests: but the newest Triton, see get_triton().
LEFT_OUT = ("playwright", "triton")
# They name torch: pip would install what this torch names.
WITHOUT_DEPENDENCIES = ("accelerate",)


class Offline(Exception):
    """pip could not find or download something."""


def pip(python: str | Path, *arguments: str) -> str:
    """Runs pip and returns its output; raises Offline with the reason where it fails."""
    command = [str(python), "-m", "pip", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["pip failed"]
        if "ResolutionImpossible" in lines[-1]:  # the reason is in an earlier line
            lines = [line for line in lines if line.startswith("ERROR: Cannot")] or lines
            lines[-1] += " Does a constraint of `pip config list` exclude it?"
        raise Offline(lines[-1])
    return done.stdout


def requirements(groups: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """What groups need besides torch, and what of it is installed without its dependencies."""
    found = []
    for group in groups:
        text = (ROOT / "tools" / f"requirements-{group}.txt").read_text(encoding="utf-8")
        lines = [line.split("#")[0].strip() for line in text.splitlines()]
        found += [line for line in lines if line and not line.startswith(LEFT_OUT)]
    alone = [line for line in found if line.startswith(WITHOUT_DEPENDENCIES)]
    return [line for line in found if line not in alone], alone


def of_torch(python: Path) -> list[str]:
    """What the installed torch needs to be imported: what it names but CUDA's packages."""
    code = "import importlib.metadata as m, json; print(json.dumps(m.requires('torch')))"
    named = json.loads(subprocess.check_output([str(python), "-c", code], text=True))
    is_cuda = re.compile(r"nvidia|cuda|triton")
    return [line for line in named if "extra ==" not in line and not is_cuda.match(line)]


@dataclass(frozen=True)
class Environments:
    """The environments of one Python, by version of torch.

    Attributes:
        home: the folder that has a folder for each version.
        base: the Python that they are made with; it has pip.
        groups: what is installed besides torch: the names of tools/requirements-GROUP.txt.
    """

    home: Path = HOME
    base: str = sys.executable
    groups: tuple[str, ...] = GROUPS

    def python(self, version: str) -> Path:
        """The Python of the environment of a version."""
        return self.home / version / "venv" / "bin" / "python"

    def find(self, wanted: str) -> str:
        """A version that has an environment now and begins as wanted, or is the newest of pip.

        Raises:
            Offline: there is no such environment, and pip finds no such torch for this Python.
        """
        prefix = "" if wanted == NEWEST else wanted
        try:
            if not prefix:
                # What pip would install, which its configuration may limit.
                options = ("--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report")
                report = json.loads(pip(self.base, "install", *options, "-", "torch"))
                prefix = report["install"][0]["metadata"]["version"].split("+")[0]
            # A downloaded release represents its minor version.
            return self.cached(prefix) or self.make(
                prefix if prefix.count(".") == 2 else f"{prefix}.*"
            )
        except Offline as error:
            have = self.cached(prefix)
            if have is None:
                raise
            print(f"[torch] {error}; taking torch {have} from the cache", flush=True)
            return have

    def cached(self, prefix: str) -> str | None:
        """The newest version with an environment that begins with a prefix, if there is one."""
        have = [path.parent.name for path in self.home.glob("*/complete")]
        fitting = [name for name in have if not prefix or f"{name}.".startswith(f"{prefix}.")]
        return max(fitting, key=lambda name: [int(part) for part in name.split(".")], default=None)

    def make(self, spec: str) -> str:
        """Makes the environment of torch==SPEC; returns the version."""
        print(f"[torch] installing torch=={spec} (a download of about 0.6 GB)", flush=True)
        self.home.mkdir(parents=True, exist_ok=True)
        index = os.environ.get("RINGCOMM_TORCH_INDEX", "")
        source = ["--index-url", index] if index else []
        with tempfile.TemporaryDirectory(dir=self.home, prefix="wheel-") as folder:
            options = ["--no-deps", "--no-cache-dir", "--progress-bar", "off"]
            options += ["--only-binary=:all:", *source, "-d", folder]
            pip(self.base, "download", *options, f"torch=={spec}")
            wheel = next(Path(folder).glob("torch-*.whl"))
            version = wheel.name.split("-")[1].split("+")[0]
            venv = self.home / version / "venv"
            subprocess.run([self.base, "-m", "venv", "--clear", str(venv)], check=True)
            python = self.python(version)
            pip(python, "install", "--no-deps", str(wheel))
        own, alone = requirements(self.groups)
        # torch 2.11 wants an older setuptools.
        for options, names in (([], own), ([], of_torch(python)), (["--no-deps"], alone)):
            if names:
                pip(python, "install", "--no-cache-dir", *options, *names)
        (torch,) = (venv / "lib").glob("python*/site-packages/torch")
        stand_ins.make(torch / "lib")
        (self.home / version / "complete").touch()
        return version


def get_triton(python: Path) -> None:
    """Installs the newest Triton, or says why the one that is there, if any, has to do."""
    options = ("--quiet", "--upgrade", "--no-deps", "--no-cache-dir")
    try:
        pip(python, "install", *options, "triton")
    except Offline as error:
        print(f"[compat] the newest triton: {error}", flush=True)


def runs(version: str, is_newest: bool) -> bool:
    """Builds ringcomm in a version's environment and runs the tests; whether all pass."""
    source, venv = HOME / version / "source", HOME / version / "venv"
    copy_sources(source)
    env = os.environ | {"RINGCOMM_CUDA": "0", "OMP_NUM_THREADS": "1"}
    env["PATH"] = f"{venv / 'bin'}{os.pathsep}{env['PATH']}"
    env.pop("PYTHONPATH", None)
    python = str(Environments().python(version))
    build = ["pip", "install", "-q", "--disable-pip-version-check", "--no-build-isolation"]
    tests = ["pytest", "-q", "-p", "no:cacheprovider", "--durations=5"]
    for what, command in (
        ("builds", [*build, "--no-deps", "-e", "."]),
        ("each system", [*tests, f"tests/python/{SYSTEMS}"]),
        ("short set", [*tests, "-m", "not slow", *(f"tests/python/{name}" for name in TESTS)]),
        ("newest Triton", [*tests, f"tests/python/{TRITON}"]),
    ):
        if what == "newest Triton":
            if not is_newest:
                continue
            get_triton(Path(python))
        begin = time.monotonic()
        done = subprocess.run([python, "-m", *command], cwd=source, env=env, check=False)
        said = "passes" if done.returncode == 0 else "FAILED"
        seconds = time.monotonic() - begin
        print(f"[compat] torch {version}: {what} {said} in {seconds:.0f} s", flush=True)
        if done.returncode != 0:
            return False
    return True


def main() -> int:
    """Returns 0 if all passes, or if offline outside CI with nothing cached."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("versions", nargs="*", metavar="VERSION", default=[OLDEST, NEWEST])
    options = parser.parse_args()
    try:
        buildconfig.check_all()
        # By version, as torch is wanted.
        versions = {Environments().find(wanted): wanted for wanted in options.versions}
    except BuildProblem as problem:
        print(f"compat: {problem}", file=sys.stderr)
        return 1
    except Offline as error:
        is_ci = os.environ.get("CI", "") not in ("", "0", "false")
        print(f"compat: {'FAILED' if is_ci else 'SKIPPED'}, no torch to be had: {error}")
        return int(is_ci)
    passed = [runs(version, wanted == NEWEST) for version, wanted in versions.items()]
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
