"""Prepares what a make target needs, then runs a command with the prepared Python.

Usage: python3 tools/bootstrap.py [--need GROUP]... [--extension | --no-torch] [-- SCRIPT ARGS...]

GROUP names a file tools/requirements-GROUP.txt; with --no-torch, neither torch nor what compiles
the extension is installed. By default everything goes to .venv, which is made here; with
RINGCOMM_USE_ENV=1, or where nothing can be downloaded but the active environment has all that is
needed, only the extension is installed, into the active environment. One line is printed per step
that does something; what is up to date is skipped. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import buildconfig
from buildconfig import ROOT, BuildProblem

TORCH = "torch==2.13.0"
VENV = ROOT / ".venv"
STAMPS = VENV / "ringcomm-stamps.json"
EXTENSION_STATE = ROOT / "build" / "extension.json"
LOGS = ROOT / "build" / "logs"
GROUPS = ("build", "train", "test", "lint")

# What our programs and the build do without, if less well: no picture, compiles without ninja, no
# tests of the kernels where there is no triton, none of PyTorch's own, none with models of
# transformers. wheel has been a part of setuptools since 70.1.
OPTIONAL = ("accelerate", "expecttest", "matplotlib", "ninja", "transformers", "triton", "wheel")

# Files whose change asks for a new install; a change of sources alone asks for a build only.
INSTALL_INPUTS = ("setup.py", "pyproject.toml", "tools/buildconfig.py", "ringcomm/version.py")
# Which kernels for GPUs a build has, besides what is there to compile them.
KERNEL_VARIABLES = ("RINGCOMM_CUDA", "RINGCOMM_CUDA_ARCHS")

# Settings of pip and Python that would lead an install away from the environment we name.
HARMFUL_VARIABLES = ("PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_REQUIRE_VIRTUALENV", "PYTHONHOME")

COMPILER_ERROR = re.compile(r":\d+: (fatal )?error: |undefined (reference|symbol)")

_PROBE = """
import importlib.metadata as metadata, json, sys, sysconfig
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
try:
    url = json.loads(metadata.distribution("ringcomm").read_text("direct_url.json") or "{}")
except metadata.PackageNotFoundError:
    url = {}
editable = url.get("dir_info", {}).get("editable", False)
print(json.dumps({"found": found, "suffix": sysconfig.get_config_var("EXT_SUFFIX"),
                  "editable_url": url.get("url", "") if editable else ""}))
"""


class StepFailed(BuildProblem):
    """A command of a step failed; the message ends with the last lines of its log."""


@dataclass(frozen=True)
class Probe:
    """What a Python has installed: versions by name, and where ringcomm is linked to."""

    found: dict[str, str]
    suffix: str
    editable_url: str


def say(step: str, text: str) -> None:
    """Prints the one line of a step."""
    print(f"[{step}] {text}", flush=True)


def clean_environ() -> dict[str, str]:
    """Returns the environment for child processes, without what would misdirect an install."""
    kept = {k: v for k, v in os.environ.items() if k not in HARMFUL_VARIABLES}
    return {**kept, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}


def digest(paths: Iterable[Path], *words: str) -> str:
    """Returns a hash over the names and contents of files, and over words."""
    state = hashlib.sha256()
    for path in sorted(paths):
        state.update(f"{path.relative_to(ROOT)}\0".encode())
        state.update(hashlib.sha256(path.read_bytes()).digest())
    for word in words:
        state.update(f"{word}\0".encode())
    return state.hexdigest()


def read_json(path: Path) -> dict[str, str]:
    """Returns the stamps in a file; none where it is missing or damaged."""
    try:
        stamps = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamps if isinstance(stamps, dict) else {}


def write_json(path: Path, stamps: dict[str, str]) -> None:
    """Replaces a file of stamps in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(stamps, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)


def requirement_names(group: str) -> list[str]:
    """Returns the package names in tools/requirements-GROUP.txt, without versions or markers."""
    lines = (ROOT / "tools" / f"requirements-{group}.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.split("#")[0].strip() for line in lines]
    return sorted({pin.split("==")[0].strip() for pin in pins if pin})


def cause(lines: list[str]) -> list[str]:
    """Returns the lines of a log that tell most: our message, compilers' errors, or the end."""
    for line in lines:
        if "ringcomm cannot be built:" in line:
            return [line.strip()]
    found = [idx for idx, line in enumerate(lines) if COMPILER_ERROR.search(line)]
    if found:
        kept = sorted({at for idx in found[:8] for at in range(idx, min(idx + 4, len(lines)))})
        return [lines[at][:300] for at in kept]
    return lines[-25:]


def run_step(step: str, command: list[str], log_name: str) -> None:
    """Runs a command with its output in build/logs (on the terminal with VERBOSE=1)."""
    if buildconfig.is_set("VERBOSE"):
        if subprocess.run(command, cwd=ROOT, env=clean_environ(), check=False).returncode != 0:
            raise StepFailed(f"{step} failed")
        return
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{log_name}.log"
    with log.open("wb") as output:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=clean_environ(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        text = "\n".join(f"    {line}" for line in cause(lines))
        raise StepFailed(f"{step} failed; from {log.relative_to(ROOT)}:\n{text}")


def probe(python: str) -> Probe:
    """Asks a Python what it has installed, without importing any of it."""
    names = ["torch", "ringcomm", *(n for group in GROUPS for n in requirement_names(group))]
    command = [python, "-c", _PROBE, *names]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise StepFailed(f"{python} does not run: {done.stderr.strip()}")
    answer = json.loads(done.stdout)
    return Probe(answer["found"], answer["suffix"], answer["editable_url"])


def has_torch(found: dict[str, str]) -> bool:
    """Tells whether the versions found include a torch that ringcomm can be built against."""
    return "torch" in found and buildconfig.parse_version(found["torch"]) >= buildconfig.MIN_TORCH


def make_venv() -> str:
    """Returns the Python of .venv, which is made where it is missing or no longer runs."""
    python = VENV / "bin" / "python"
    if python.exists():
        check = [str(python), "-c", "import pip"]
        if subprocess.run(check, capture_output=True, check=False).returncode == 0:
            return str(python)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        raise BuildProblem(
            f"{sys.executable} cannot make virtual environments ({error}). Install the module: "
            f"apt-get install python3-venv (or python{version}-venv)."
        ) from error
    say("python", f"making .venv with {sys.executable} (Python {version})")
    run_step("python", [sys.executable, "-m", "venv", "--clear", str(VENV)], "venv")
    return str(python)


def install_requirements(python: str, groups: Iterable[str], needs_torch: bool) -> None:
    """Installs into .venv what the groups pin, and torch where it is needed and none would do."""
    stamps = read_json(STAMPS)
    wanted = {g: digest([ROOT / "tools" / f"requirements-{g}.txt"]) for g in groups}
    stale = [group for group, stamp in wanted.items() if stamps.get(group) != stamp]
    arguments = [arg for g in stale for arg in ("-r", f"tools/requirements-{g}.txt")]
    pip = [python, "-m", "pip", "install", "--progress-bar", "off"]
    if needs_torch and not has_torch(probe(python).found):
        index = os.environ.get("RINGCOMM_TORCH_INDEX", "")
        source = "from RINGCOMM_TORCH_INDEX" if index else "as pip finds it; a CPU build will do"
        say("torch", f"installing {TORCH} ({source}); this takes a minute or more")
        run_step("torch", [*pip, TORCH, *(["--extra-index-url", index] if index else [])], "torch")
        say("torch", f"installed torch {probe(python).found['torch']}")
    if stale:
        say("packages", f"installing into .venv: {', '.join(f'requirements-{g}' for g in stale)}")
        run_step("packages", [*pip, *arguments], "packages")
        write_json(STAMPS, {**read_json(STAMPS), **wanted})


def use_active(groups: Iterable[str], needs_torch: bool, reason: str) -> str:
    """Returns the active Python, after a look at its torch and at the packages of the groups."""
    found = probe(sys.executable).found
    if needs_torch and not has_torch(found):
        raise BuildProblem(
            f"{reason}, but {sys.executable} has {found.get('torch', 'no torch')}; "
            "ringcomm needs torch >= 2.11 there."
        )
    names = dict.fromkeys(name for group in groups for name in requirement_names(group))
    missing = [name for name in names if name not in found]
    needed = [name for name in missing if name not in OPTIONAL]
    if needed:
        raise BuildProblem(
            f"{reason}, but {sys.executable} lacks {', '.join(needed)}: "
            f"{sys.executable} -m pip install {' '.join(needed)}"
        )
    say("python", f"{reason}: using {sys.executable} with {found.get('torch', 'no torch')}")
    if missing:
        say("python", f"goes without what is not installed there: {', '.join(missing)}")
    return sys.executable


def choose_python(groups: list[str], needs_torch: bool) -> str:
    """Returns the Python to work with: of .venv, or the active one by wish or for want of pip."""
    if buildconfig.is_set("RINGCOMM_USE_ENV"):
        return use_active(groups, needs_torch, "RINGCOMM_USE_ENV=1")
    try:
        python = make_venv()
        install_requirements(python, groups, needs_torch)
    except StepFailed as failure:
        if needs_torch and not has_torch(probe(sys.executable).found):
            raise StepFailed(
                f"{failure}\nNo network? An active environment with a torch >= 2.11 would be used "
                f"instead; {sys.executable} has none."
            ) from failure
        print(failure, flush=True)
        reason = "packages could not be installed into .venv (no network?)"
        return use_active(groups, needs_torch, reason)
    return python


def kernel_choice() -> str:
    """Returns what decides which kernels for GPUs are compiled, and with what."""
    words = [f"{name}={os.environ.get(name, '')}" for name in KERNEL_VARIABLES]
    return " ".join([str(buildconfig.find_nvcc()), *words])


def build_extension(python: str) -> None:
    """Builds ringcomm._C in place and links the package into the environment, where needed."""
    seen = probe(python)
    state = read_json(EXTENSION_STATE)
    folders = (*buildconfig.ENGINE_FOLDERS, buildconfig.BINDINGS_FOLDER)
    inputs = [*buildconfig.sources(*folders), *buildconfig.headers()]
    inputs += buildconfig.sources("device/cuda", suffix=".cu")
    inputs.append(ROOT / "tools" / "cuda_kernels.py")
    install = digest([ROOT / name for name in INSTALL_INPUTS], python)
    install += " " + seen.found.get("torch", "")
    build = digest(inputs, install, kernel_choice())
    extension = ROOT / "ringcomm" / f"_C{seen.suffix}"
    is_linked = seen.editable_url == ROOT.as_uri() and state.get("install") == install
    if is_linked and state.get("build") == build and extension.exists():
        return
    buildconfig.check_all()
    if not buildconfig.has_uring():
        say(
            "extension", "no liburing here (apt-get install liburing-dev): files go through threads"
        )
    num_files = sum(path.suffix in (".cc", ".cu") for path in inputs)
    say(
        "extension",
        f"compiling what changed of {num_files} files, {buildconfig.num_jobs()} at a time",
    )
    started = time.monotonic()
    EXTENSION_STATE.unlink(missing_ok=True)
    if is_linked:
        command = [python, "setup.py", "-q", "build_ext", "--inplace"]
    else:
        command = [python, "-m", "pip", "install", "-v", "--no-build-isolation", "--no-deps"]
        command += ["--editable", "."]
    run_step("extension", command, "extension")
    say("extension", f"built ringcomm/{extension.name} in {time.monotonic() - started:.0f} s")
    run_step("extension", [python, "-c", "import torch, ringcomm._C"], "import")
    write_json(EXTENSION_STATE, {"install": install, "build": build})


@contextlib.contextmanager
def only_one() -> Iterator[None]:
    """Keeps two makes in one checkout from preparing at the same time."""
    (ROOT / "build").mkdir(exist_ok=True)
    with (ROOT / "build" / "bootstrap.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("python", "waiting for another make in this checkout")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> None:
    """Prepares, then becomes the command; a problem ends in one message and status 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--need", action="append", default=[], choices=GROUPS, metavar="GROUP")
    depth = parser.add_mutually_exclusive_group()
    depth.add_argument("--extension", action="store_true", help="build and link ringcomm._C")
    depth.add_argument("--no-torch", action="store_true", help="install the groups alone")
    parser.add_argument("command", nargs="*", metavar="SCRIPT ARGS", help="given to the Python")
    options = parser.parse_args()
    try:
        buildconfig.check_platform()
        if options.extension:  # before minutes of downloads
            buildconfig.check_compiler()
            buildconfig.check_python_headers()
        with only_one():
            groups = options.need if options.no_torch else ["build", *options.need]
            python = choose_python(groups, not options.no_torch)
            if options.extension:
                build_extension(python)
    except BuildProblem as problem:
        sys.exit(f"\nringcomm: {problem}")
    if options.command:
        os.chdir(ROOT)
        os.execv(python, [python, *options.command])


if __name__ == "__main__":
    main()
