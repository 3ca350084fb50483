"""Prepares the requirements of a make target, then runs a command with the prepared Python.

Usage: python3 tools/bootstrap.py [--need GROUP]... [--extension | --no-torch] [-- SCRIPT ARGS...]

GROUP is one of pyproject.toml's dependency groups, of which nvcc is left out where CUDA's compiler
is here already; with --no-torch, neither torch nor what compiles the extension is installed. By
default everything goes to .venv, which is made here, but for torch with RINGCOMM_TORCH=active:
.venv then uses that of the active environment. With RINGCOMM_USE_ENV=1, or where nothing can be
downloaded but the active environment has all that is needed, only the extension is installed, into
the active environment. What is up to date is skipped. VERBOSE=1 shows what pip and the compilers
say. Standard library only.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import buildconfig
import cuda_kernels
from buildconfig import ROOT, TORCH, BuildProblem, requirements

VENV = ROOT / ".venv"
EXTENSION_STATE = ROOT / "build" / "extension.txt"
EXIT_INTERRUPTED = 130

# Optional packages: without them there are no plots, builds do not use ninja, and tests of Triton
# kernels, PyTorch's own tests, tests with models of transformers and PEFT and of pages in a browser
# are skipped; Python tests run one file at a time. wheel has been a part of setuptools since 70.1.
OPTIONAL = (
    *("accelerate", "expecttest", "matplotlib", "ninja", "peft"),
    *("playwright", "pytest-xdist", "transformers", "triton", "wheel"),
)

# Settings of pip and Python that would redirect an install to another environment.
HARMFUL_VARIABLES = ("PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_REQUIRE_VIRTUALENV", "PYTHONHOME")
TELLING = re.compile(r"cannot be built:|:\d+: (fatal )?error: |undefined (reference|symbol)|ERROR:")

# All versions by name, the suffix of extensions, the folder that an editable ringcomm is in, the
# folder of packages, and all that packages are found in.
_PROBE = """
import importlib.metadata as metadata, json, sys, sysconfig
found, url = {}, ""
for one in metadata.distributions():
    name = str(one.metadata["Name"]).lower()
    if name in found:  # hidden by one that comes earlier on the path
        continue
    found[name] = one.version
    link = one.read_text("direct_url.json") or "" if name == "ringcomm" else ""
    url = json.loads(link)["url"] if "editable" in link else url
own = sysconfig.get_path("purelib")
print(json.dumps([found, sysconfig.get_config_var("EXT_SUFFIX"), url, own, sys.path]))
"""


class StepFailed(BuildProblem):
    """A command of a step failed; the message ends with the relevant lines of its log."""


def say(step: str, text: str) -> None:
    """Prints the one line of a step."""
    print(f"[{step}] {text}", flush=True)


def is_written(path: Path, text: str) -> bool:
    """Whether a file has this text."""
    return path.exists() and path.read_text(encoding="utf-8") == text


def run_step(step: str, *command: str) -> None:
    """Runs a command with its output in build/logs (on the terminal with VERBOSE=1)."""
    env = {k: v for k, v in os.environ.items() if k not in HARMFUL_VARIABLES}
    env |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_PROGRESS_BAR": "off"}
    log = ROOT / "build" / "logs" / f"{step}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        output = None if buildconfig.is_set("VERBOSE") else file
        status = subprocess.call(
            command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    if status != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        cause = [line.strip()[:300] for line in lines if TELLING.search(line)][:12] or lines[-25:]
        text = "\n".join(f"    {line}" for line in cause)
        raise StepFailed(f"{step} failed; from {log.relative_to(ROOT)}:\n{text}")


class Python:
    """What a Python has installed, without importing any of it; see _PROBE."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            said = subprocess.check_output([path, "-c", _PROBE], cwd="/", text=True)
        except (OSError, subprocess.SubprocessError) as error:
            raise StepFailed(f"{path} does not run: {error}") from None
        self.found, self.suffix, self.editable, self.packages, self.search_path = json.loads(said)

    def has_torch(self) -> bool:
        """Whether ringcomm can be built against its torch."""
        version = buildconfig.parse_version(self.found.get("torch", "0.0"))
        return version >= buildconfig.MIN_TORCH


def make_venv() -> str:
    """The Python of .venv, which is made where it is missing or no longer runs."""
    python = VENV / "bin" / "python"
    check = [str(python), "-c", "import pip"]
    if not python.exists() or subprocess.call(check, stderr=subprocess.DEVNULL) != 0:
        say("python", f"making .venv with {sys.executable}")
        run_step("python", sys.executable, "-m", "venv", "--clear", str(VENV))
    return str(python)


def install_torch(python: str) -> None:
    """Installs torch into .venv, after it has said what comes with it."""
    index = os.environ.get("RINGCOMM_TORCH_INDEX", "")
    wanted = (TORCH, "--index-url", index) if index else (TORCH,)
    pip = (python, "-m", "pip", "install")
    say("torch", f"asking pip what {TORCH} needs")
    ask = (*pip, "--dry-run", "--quiet", "--report", "-", *wanted)
    asked = subprocess.run(ask, cwd=ROOT, capture_output=True, text=True, check=False)
    if asked.returncode == 0:
        report = json.loads(asked.stdout)
        say("torch", described([one["metadata"]["name"] for one in report["install"]]))
    else:  # pip < 22.2 has no --report; or the next call fails too, and says why
        say("torch", f"installing {TORCH}")
    run_step("torch", *pip, *wanted)


def described(packages: list[str]) -> str:
    """What installing torch with these packages fetches, and how to fetch less."""
    num_others = len(packages) - 1
    if not any(re.match("nvidia|cuda", name) for name in packages):
        return f"fetching {TORCH}, a build for CPUs, and {num_others} packages: about 0.2 GB"
    text = f"fetching {TORCH} for CUDA and {num_others} packages: about 5 GB"
    if not cuda_kernels.has_driver():
        text += (
            ". This machine has no NVIDIA driver: for the build for CPUs, about 0.2 GB, stop with"
            " Ctrl-C and set RINGCOMM_TORCH_INDEX=URL, the package index of PyTorch's CPU builds"
        )
    active = Python(sys.executable)
    if active.has_torch():
        text += f". RINGCOMM_TORCH=active takes torch {active.found['torch']} of {sys.executable}"
    return text


def use_active_torch(python: Python) -> None:
    """Puts the packages of the active environment behind those of .venv."""
    active = Python(sys.executable)
    problem = ""
    if python.suffix != active.suffix or Path(python.packages, "torch").exists():
        problem = (
            f"{VENV} has another Python or a torch of its own: remove it with make clean ALL=1"
        )
    elif not active.has_torch():
        problem = (
            f"{active.path} has no torch >= 2.11: install it there, activate another environment,"
            " or name its Python: make PYTHON=..."
        )
    elif "ringcomm" in active.found and not active.editable:
        problem = (
            f"the ringcomm of {active.path} would hide this checkout: uninstall it there, or build"
            " into that environment with RINGCOMM_USE_ENV=1"
        )
    if problem:
        raise BuildProblem(f"RINGCOMM_TORCH=active, but {problem}")
    own = python.packages
    paths = [one for one in active.search_path if one.endswith("-packages") and one != own]
    Path(own, "torch_of_active.pth").write_text("\n".join([*paths, ""]), encoding="utf-8")


def install_requirements(path: str, groups: list[str], needs_torch: bool) -> None:
    """Installs into .venv what the groups pin, and torch where it is needed and none would do."""
    wanted_torch = os.environ.get("RINGCOMM_TORCH", "")
    if wanted_torch not in ("", "active"):
        raise BuildProblem(f"RINGCOMM_TORCH must be 'active' or unset, got {wanted_torch!r}")
    if needs_torch:
        python = Python(path)
        if wanted_torch:
            use_active_torch(python)
        elif not python.has_torch():
            install_torch(path)
    stamps = {VENV / f"ringcomm-{group}": "\n".join(requirements(group)) for group in groups}
    stale = {stamp: text for stamp, text in stamps.items() if not is_written(stamp, text)}
    if stale:
        say("packages", f"installing into .venv: {', '.join(stamp.name[9:] for stamp in stale)}")
        run_step("packages", path, "-m", "pip", "install", *"\n".join(stale.values()).splitlines())
        for stamp, text in stale.items():
            stamp.write_text(text, encoding="utf-8")


def use_active(groups: list[str], needs_torch: bool, reason: str) -> str:
    """The active Python, after a look at its torch and at the packages of the groups."""
    active = Python(sys.executable)
    names = [re.split(r"[=\[]", name)[0] for group in groups for name in requirements(group)]
    missing = [name for name in dict.fromkeys(names) if name not in active.found]
    needed = [name for name in missing if name not in OPTIONAL]
    if needs_torch and not active.has_torch():
        needed.append("'torch>=2.11'")
    if needed:
        raise BuildProblem(
            f"{reason}, but {sys.executable} lacks {', '.join(needed)}: "
            f"{sys.executable} -m pip install {' '.join(needed)}"
        )
    say("python", f"{reason}: using {sys.executable}")
    if missing:
        say("python", f"goes without what is not installed there: {', '.join(missing)}")
    return sys.executable


def choose_python(groups: list[str], needs_torch: bool) -> str:
    """The Python to work with: of .venv, or the active one by wish or for want of a network."""
    if buildconfig.is_set("RINGCOMM_USE_ENV"):
        return use_active(groups, needs_torch, "RINGCOMM_USE_ENV=1")
    try:
        python = make_venv()
        install_requirements(python, groups, needs_torch)
    except StepFailed as failure:
        print(failure, flush=True)
        return use_active(groups, needs_torch, ".venv could not be filled (no network?)")
    return python


def build_extension(path: str, for_tests: bool) -> None:
    """Builds the extensions in place and links the package into the environment, where needed.

    Tests need ringcomm._cuda on every machine, for the emulator of GPUs.
    """
    if buildconfig.is_set("RINGCOMM_PREBUILT"):  # a kit's, made for this Python and torch
        run_step("import", path, "-c", "import torch, ringcomm")
        return
    python = Python(path)
    if for_tests or (ROOT / "ringcomm" / f"_cuda{python.suffix}").exists():
        os.environ.setdefault("RINGCOMM_CUDA", "test")
    inputs = buildconfig.cpp_files()
    num_files = sum(one.suffix in (".cc", ".cu") for one in inputs)
    names = ("setup.py", "pyproject.toml", "tools/buildconfig.py", "tools/cuda_kernels.py")
    inputs += [ROOT / name for name in (*names, "ringcomm/version.py")]
    # What the extension is for, and what a build has for GPUs and compiles it.
    kernels = [os.environ.get(name, "") for name in ("RINGCOMM_CUDA", "RINGCOMM_CUDA_ARCHS")]
    nvcc = str(buildconfig.find_nvcc()) if kernels[0] == "1" else ""
    for_what = [path, python.found.get("torch", ""), nvcc, *kernels]
    state = hashlib.sha256("\0".join(for_what).encode())
    for one in inputs:
        state.update(f"{one.relative_to(ROOT)}\0".encode() + one.read_bytes())
    built = ["_C", "_kernels"] + (["_cuda"] if buildconfig.is_set("RINGCOMM_CUDA") else [])
    is_built = is_written(EXTENSION_STATE, state.hexdigest())
    is_there = all((ROOT / "ringcomm" / f"{name}{python.suffix}").exists() for name in built)
    if is_built and is_there and python.editable == ROOT.as_uri():
        return
    jobs = buildconfig.num_jobs()
    say("extension", f"compiling what changed of {num_files} files, {jobs} at a time")
    EXTENSION_STATE.unlink(missing_ok=True)
    options = ("-v", "--no-build-isolation", "--no-deps", "--editable", ".")
    run_step("extension", path, "-m", "pip", "install", *options)
    run_step("import", path, "-c", "import torch, ringcomm")
    EXTENSION_STATE.write_text(state.hexdigest())


def main() -> None:
    """Prepares, then becomes the command; a problem ends in one message and status 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--need", action="append", default=[], metavar="GROUP")
    depth = parser.add_mutually_exclusive_group()
    depth.add_argument("--extension", action="store_true", help="build and link the extensions")
    depth.add_argument("--no-torch", action="store_true", help="install only the groups")
    parser.add_argument("command", nargs="*", metavar="SCRIPT ARGS", help="run with this Python")
    options = parser.parse_args()
    try:
        buildconfig.check_platform()
        if options.extension:  # before minutes of downloads
            buildconfig.check_compiler()
            buildconfig.check_python_headers()
        (ROOT / "build").mkdir(exist_ok=True)
        with (ROOT / "build" / "bootstrap.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two makes in one checkout take turns
            groups = options.need if options.no_torch else ["build", *options.need]
            if "nvcc" in groups and (nvcc := buildconfig.find_nvcc()) and VENV not in nvcc.parents:
                groups.remove("nvcc")
            python = choose_python(groups, not options.no_torch)
            if options.extension:
                build_extension(python, "test" in options.need)
    except BuildProblem as problem:
        sys.exit(f"\nringcomm: {problem}")
    except OSError as error:
        sys.exit(
            f"\nringcomm: {error.filename or 'a file'}: {error.strerror}; use a checkout that you"
            " can write, on a disk with free space"
        )
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    if options.command:
        os.chdir(ROOT)
        os.execv(python, [python, *options.command])


if __name__ == "__main__":
    main()
