"""Prepares the requirements of a make target, then runs a command with the prepared Python.

Usage: python3 tools/bootstrap.py [--need GROUP]... [--extension | --no-torch] [-- SCRIPT ARGS...]

GROUP names a file tools/requirements-GROUP.txt; with --no-torch, neither torch nor what compiles
the extension is installed. By default everything goes to .venv, which is made here, but for torch
with RINGCOMM_TORCH=active: .venv then uses that of the active environment. With RINGCOMM_USE_ENV=1,
or where nothing can be downloaded but the active environment has all that is needed, only the
extension is installed, into the active environment. What is up to date is skipped. VERBOSE=1 shows
what pip and the compilers say. Standard library only.
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
from collections.abc import Iterable
from pathlib import Path

import buildconfig
import cuda_kernels
from buildconfig import ROOT, TORCH, BuildProblem

VENV = ROOT / ".venv"
STAMPS = VENV / "ringcomm-stamps.json"
EXTENSION_STATE = ROOT / "build" / "extension.json"
EXIT_INTERRUPTED = 130
GROUPS = ("build", "train", "test", "lint", "docs", "coverage", "wheels")

# Optional packages: without them there are no plots, builds do not use ninja, and tests of Triton
# kernels, PyTorch's own tests, tests with models of transformers and PEFT and of pages in a browser
# are skipped; Python tests run one file at a time. wheel has been a part of setuptools since 70.1.
OPTIONAL = (
    *("accelerate", "expecttest", "matplotlib", "ninja", "peft", "playwright"),
    *("pytest-xdist", "transformers", "triton", "wheel"),
)

# Files whose change needs a new install; a change of sources needs only a build.
INSTALL_INPUTS = ("setup.py", "pyproject.toml", "tools/buildconfig.py", "ringcomm/version.py")
# Settings of pip and Python that would redirect an install to another environment.
HARMFUL_VARIABLES = ("PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_REQUIRE_VIRTUALENV", "PYTHONHOME")
TELLING = re.compile(r"cannot be built:|:\d+: (fatal )?error: |undefined (reference|symbol)|ERROR:")

# All versions by name, the suffix of extensions, and the folder that an editable ringcomm is in.
_PROBE = """
import importlib.metadata as metadata, json, sysconfig
found, url = {}, ""
for one in metadata.distributions():
    name = str(one.metadata["Name"]).lower()
    if name in found:  # hidden by one that comes earlier on the path
        continue
    found[name] = one.version
    link = one.read_text("direct_url.json") or "" if name == "ringcomm" else ""
    url = json.loads(link)["url"] if "editable" in link else url
print(json.dumps([found, sysconfig.get_config_var("EXT_SUFFIX"), url]))
"""


class StepFailed(BuildProblem):
    """A command of a step failed; the message ends with the relevant lines of its log."""


def say(step: str, text: str) -> None:
    """Prints the one line of a step."""
    print(f"[{step}] {text}", flush=True)


def digest(paths: Iterable[Path], *words: str) -> str:
    """A hash over the names and contents of files, and over words."""
    state = hashlib.sha256("\0".join(words).encode())
    for path in sorted(paths):
        state.update(f"{path.relative_to(ROOT)}\0".encode())
        state.update(hashlib.sha256(path.read_bytes()).digest())
    return state.hexdigest()


def read_json(path: Path) -> dict[str, str]:
    """The stamps in a file; none where it is missing or damaged."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def requirement_names(group: str) -> list[str]:
    """The package names in tools/requirements-GROUP.txt, without versions or markers."""
    text = (ROOT / "tools" / f"requirements-{group}.txt").read_text(encoding="utf-8")
    return sorted(re.findall(r"^([\w-]+)", text, re.M))


def run_step(step: str, *command: str) -> None:
    """Runs a command with its output in build/logs (on the terminal with VERBOSE=1)."""
    env = {k: v for k, v in os.environ.items() if k not in HARMFUL_VARIABLES}
    env |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
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


def probe(python: str) -> tuple[dict[str, str], str, str]:
    """What a Python has installed, without importing any of it; see _PROBE."""
    try:
        said = subprocess.check_output([python, "-c", _PROBE], cwd="/", text=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise StepFailed(f"{python} does not run: {error}") from None
    found, suffix, url = json.loads(said)
    return found, suffix, url


def has_torch(found: dict[str, str]) -> bool:
    """Whether the versions found include a torch that ringcomm can be built against."""
    return buildconfig.parse_version(found.get("torch", "0.0")) >= buildconfig.MIN_TORCH


def make_venv() -> str:
    """The Python of .venv, which is made where it is missing or no longer runs."""
    python = VENV / "bin" / "python"
    check = [str(python), "-c", "import pip"]
    if python.exists() and subprocess.call(check, stderr=subprocess.DEVNULL) == 0:
        return str(python)
    say("python", f"making .venv with {sys.executable}")
    run_step("python", sys.executable, "-m", "venv", "--clear", str(VENV))
    return str(python)


def install_torch(python: str) -> None:
    """Installs torch into .venv, after it has said what comes with it."""
    index = os.environ.get("RINGCOMM_TORCH_INDEX", "")
    source = ("--index-url", index) if index else ()
    pip = (python, "-m", "pip", "install", "--progress-bar", "off")
    say("torch", f"asking pip what {TORCH} needs")
    ask = (*pip, "--dry-run", "--quiet", "--report", "-", TORCH, *source)
    asked = subprocess.run(ask, cwd=ROOT, capture_output=True, text=True, check=False)
    if asked.returncode == 0:
        report = json.loads(asked.stdout)
        say("torch", described([one["metadata"]["name"] for one in report["install"]]))
    else:  # an old pip, or the next call fails too and says why
        say("torch", f"installing {TORCH}")
    run_step("torch", *pip, TORCH, *source)


def described(packages: list[str]) -> str:
    """What installing torch with these packages fetches, and how to fetch less."""
    is_cuda = [re.match("nvidia|cuda", name) is not None for name in packages]
    if not any(is_cuda):
        return f"fetching {TORCH}, a build for CPUs, and {len(packages) - 1} packages: about 0.2 GB"
    text = f"fetching {TORCH} for CUDA and {len(packages) - 1} packages: about 5 GB"
    if not cuda_kernels.has_driver():
        text += (
            ". This machine has no NVIDIA driver: for the build for CPUs, about 0.2 GB, stop with"
            " Ctrl-C and set RINGCOMM_TORCH_INDEX=URL, the package index of PyTorch's CPU builds"
        )
    found = probe(sys.executable)[0]
    if has_torch(found):
        text += f". RINGCOMM_TORCH=active takes torch {found['torch']} of {sys.executable}"
    return text


def use_active_torch(python: str) -> None:
    """Puts the packages of the active environment behind those of .venv."""
    ask = "import json, sys, sysconfig as s; print(json.dumps([s.get_path('purelib'), sys.path]))"
    (own, _), (_, active) = (
        json.loads(subprocess.check_output([one, "-c", ask], cwd="/", text=True))
        for one in (python, sys.executable)
    )
    found, suffix, editable = probe(sys.executable)
    if probe(python)[1] != suffix or Path(own, "torch").exists():
        raise BuildProblem(
            f"RINGCOMM_TORCH=active, but {VENV} has another Python or a torch of its own: remove it"
            " with make distclean"
        )
    if not has_torch(found):
        raise BuildProblem(
            f"RINGCOMM_TORCH=active, but {sys.executable} has no torch >= 2.11: install it there,"
            " activate another environment, or name its Python: make PYTHON=..."
        )
    if "ringcomm" in found and not editable:
        raise BuildProblem(
            f"RINGCOMM_TORCH=active, but the ringcomm of {sys.executable} would hide this checkout:"
            " uninstall it there, or build into that environment with RINGCOMM_USE_ENV=1"
        )
    paths = [path for path in active if path.endswith("-packages") and path != own]
    Path(own, "torch_of_active.pth").write_text("\n".join([*paths, ""]), encoding="utf-8")


def install_requirements(python: str, groups: Iterable[str], needs_torch: bool) -> None:
    """Installs into .venv what the groups pin, and torch where it is needed and none would do."""
    wanted_torch = os.environ.get("RINGCOMM_TORCH", "")
    if wanted_torch not in ("", "active"):
        raise BuildProblem(f"RINGCOMM_TORCH must be 'active' or unset, got {wanted_torch!r}")
    if needs_torch and wanted_torch:
        use_active_torch(python)
    elif needs_torch and not has_torch(probe(python)[0]):
        install_torch(python)
    stamps = read_json(STAMPS)
    wanted = {g: digest([ROOT / "tools" / f"requirements-{g}.txt"]) for g in groups}
    stale = [group for group, stamp in wanted.items() if stamps.get(group) != stamp]
    if stale:
        say("packages", f"installing into .venv: {', '.join(stale)}")
        files = [arg for group in stale for arg in ("-r", f"tools/requirements-{group}.txt")]
        pip = (python, "-m", "pip", "install", "--progress-bar", "off")
        run_step("packages", *pip, *files)
        STAMPS.write_text(json.dumps({**stamps, **wanted}), encoding="utf-8")


def use_active(groups: Iterable[str], needs_torch: bool, reason: str) -> str:
    """The active Python, after a look at its torch and at the packages of the groups."""
    found = probe(sys.executable)[0]
    names = dict.fromkeys(name for group in groups for name in requirement_names(group))
    missing = [name for name in names if name not in found]
    needed = [name for name in missing if name not in OPTIONAL]
    if needs_torch and not has_torch(found):
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


def build_extension(python: str, for_tests: bool) -> None:
    """Builds the extensions in place and links the package into the environment, where needed.

    Tests need ringcomm._cuda on every machine, for the emulator of GPUs.
    """
    if buildconfig.is_set("RINGCOMM_PREBUILT"):  # a kit's, made for this Python and torch
        run_step("import", python, "-c", "import torch, ringcomm")
        return
    found, suffix, url = probe(python)
    if for_tests or (ROOT / "ringcomm" / f"_cuda{suffix}").exists():
        os.environ.setdefault("RINGCOMM_CUDA", "test")
    state = read_json(EXTENSION_STATE)
    inputs = [path for one in buildconfig.EXTENSIONS for path in one.sources()]
    inputs += buildconfig.headers()
    inputs += buildconfig.sources("cuda/kernels", suffix=".cu")
    inputs.append(ROOT / "tools" / "cuda_kernels.py")
    install = digest([ROOT / name for name in INSTALL_INPUTS], python, found.get("torch", ""))
    # What a build has for GPUs, and what compiles it.
    kernels = [os.environ.get(name, "") for name in ("RINGCOMM_CUDA", "RINGCOMM_CUDA_ARCHS")]
    build = digest(inputs, install, str(buildconfig.find_nvcc()), *kernels)
    names = ["_C", "_kernels"] + (["_cuda"] if buildconfig.is_set("RINGCOMM_CUDA") else [])
    is_there = all((ROOT / "ringcomm" / f"{name}{suffix}").exists() for name in names)
    is_linked = url == ROOT.as_uri() and state.get("install") == install
    if is_linked and state.get("build") == build and is_there:
        return
    buildconfig.check_all()
    num_files = sum(path.suffix in (".cc", ".cu") for path in inputs)
    jobs = buildconfig.num_jobs()
    say("extension", f"compiling what changed of {num_files} files, {jobs} at a time")
    EXTENSION_STATE.unlink(missing_ok=True)
    if is_linked:
        run_step("extension", python, "setup.py", "-q", "build_ext", "--inplace")
    else:
        options = ("-v", "--no-build-isolation", "--no-deps", "--editable", ".")
        run_step("extension", python, "-m", "pip", "install", *options)
    run_step("import", python, "-c", "import torch, ringcomm")
    EXTENSION_STATE.write_text(json.dumps({"install": install, "build": build}), encoding="utf-8")


def main() -> None:
    """Prepares, then becomes the command; a problem ends in one message and status 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--need", action="append", default=[], choices=GROUPS, metavar="GROUP")
    depth = parser.add_mutually_exclusive_group()
    depth.add_argument("--extension", action="store_true", help="build and link the extensions")
    depth.add_argument(
        "--no-torch", action="store_true", help="install only the requirement groups"
    )
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
