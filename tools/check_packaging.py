"""Builds an sdist and a wheel, installs the wheel into a fresh environment, and uses it there.

The wheel is built from the checkout, so that the objects in build/ serve it; of the sdist we check
that it holds what git tracks and that its setup.py runs. The environment sees the torch of the
running Python, but neither the checkout nor its editable install, and no compiler.
"""

from __future__ import annotations

import fnmatch
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import buildconfig
from buildconfig import ROOT

# What compiles: none of it is on the PATH that the wheel is used with.
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "ninja", "nvcc")
BUILD_S = 1800
USE_S = 120

# What an sdist has and git does not.
GENERATED = ("PKG-INFO", "setup.cfg", "ringcomm.egg-info/")

# One rank of two. `import torch` alone makes the backend known: no module of ringcomm is named.
GROUP_PROGRAM = """
import datetime, sys, torch, torch.distributed as dist
assert "ringcomm" not in sys.modules
store, rank = "file://" + sys.argv[1], int(sys.argv[2])
timeout = datetime.timedelta(seconds=60)
dist.init_process_group(
    "ringcomm", init_method=store, rank=rank, world_size=2, timeout=timeout
)
ones = torch.ones(5)
dist.all_reduce(ones)
assert ones.tolist() == [2.0] * 5
dist.destroy_process_group()
"""
IMPORT_PROGRAM = """
import importlib.metadata as metadata, importlib.util as util, sys
import ringcomm, ringcomm.kernels
for module in (ringcomm, ringcomm.kernels):
    assert module.__path__[0].startswith(sys.prefix), module.__path__
assert util.find_spec("kernels") is None, "kernels is importable as a package of its own"
points = metadata.distribution("ringcomm").entry_points
groups = ("torch.backends", "console_scripts", "vllm.general_plugins", "sglang.srt.plugins")
expected = {(group, "ringcomm") for group in groups}
assert {(p.group, p.name) for p in points} == expected, points
"""


def run(*command: str, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    """Runs a command and returns its output; exits with its last lines if it fails.

    With an environment the command uses what is installed and has USE_S seconds, else BUILD_S.
    """
    limit = BUILD_S if env is None else USE_S
    try:
        done = subprocess.run(
            command, cwd=cwd, env=env, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        sys.exit(f"packaging: {' '.join(command)[:120]} took more than {limit} s")
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-25:])
        sys.exit(f"packaging: {' '.join(command)[:120]} failed:\n{tail}")
    return done.stdout


def demand_same(what: str, found: set[str], wanted: set[str]) -> None:
    """Exits with the differences between two sets of files, if there are any."""
    if found != wanted:
        missing, surplus = sorted(wanted - found), sorted(found - wanted)
        sys.exit(f"packaging: {what} lacks {missing}; it should not have {surplus}")


def check_sdist(folder: Path) -> None:
    """Makes an sdist, compares it with what git tracks, and asks its setup.py for the version."""
    run(sys.executable, "setup.py", "-q", "egg_info", "-e", str(folder), "sdist", "-d", str(folder))
    archive = next(folder.glob("ringcomm-*.tar.gz"))
    with tarfile.open(archive) as tar:
        names = {m.name.split("/", 1)[1] for m in tar.getmembers() if m.isfile()}
        tar.extractall(folder)
    if (ROOT / ".git").exists():
        tracked = set(run("git", "ls-files", "-z").split("\0")) - {"", ".gitignore"}
        untracked = set(run("git", "ls-files", "-z", "-o", "--exclude-standard").split("\0"))
        found = {n for n in names - untracked if not n.startswith(GENERATED)}
        demand_same(archive.name, found, {n for n in tracked if (ROOT / n).exists()})
    unpacked = folder / archive.name.removesuffix(".tar.gz")
    version = run(sys.executable, "setup.py", "--version", cwd=unpacked).strip()
    if version != buildconfig.public_version():
        sys.exit(f"packaging: the sdist's setup.py says version {version}")


def check_wheel(folder: Path) -> Path:
    """Builds a wheel, compares its files with the checkout's, and returns its path."""
    for stale in (ROOT / "build").glob("lib.*"):
        shutil.rmtree(stale)
    options = ("--no-build-isolation", "--no-deps", "--no-index", "-w", str(folder))
    run(sys.executable, "-m", "pip", "wheel", *options, ".")
    shutil.rmtree(ROOT / "ringcomm.egg-info", ignore_errors=True)  # a trace of the build
    wheel = next(folder.glob("ringcomm-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    ours = [path for name in ("ringcomm", "kernels") for path in (ROOT / name).rglob("*.py*")]
    paths = [str(path.relative_to(ROOT)) for path in ours if path.suffix in (".py", ".pyi")]
    wanted = {f"ringcomm/{name}" if name.startswith("kernels/") else name for name in paths}
    wanted |= {"_ringcomm_autoload.py", "ringcomm/py.typed"}
    for one in ("_C", "_kernels"):
        found = fnmatch.filter(names, f"ringcomm/{one}.*.so")
        wanted.update(found or [f"ringcomm/{one}.*.so"])
    demand_same(wheel.name, names, wanted)
    return wheel


def without_compiler(folder: Path) -> dict[str, str]:
    """The variables of an environment in which nothing can be compiled."""
    path = str(folder / "bin")
    if there := [name for name in COMPILERS if shutil.which(name, path=path)]:
        sys.exit(f"packaging: {path} has {', '.join(there)}, which a wheel must do without")
    return {**os.environ, "PATH": path, "CC": "/nonexistent", "CXX": "/nonexistent"}


def check_install(wheel: Path, folder: Path) -> None:
    """Installs a wheel beside the torch of the running Python, and uses it without a compiler."""
    venv.create(folder / "env", with_pip=False, symlinks=True)
    python = str(folder / "env" / "bin" / "python")
    env = without_compiler(folder / "env")
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--no-deps", "--no-index", str(wheel), env=env)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # A folder named in a .pth file does not have its own obeyed: the editable install is not seen.
    beside = [path for path in sys.path if path.endswith("-packages")]
    (Path(site) / "torch_of_the_caller.pth").write_text("\n".join(beside) + "\n", encoding="utf-8")

    program = (python, "-c", GROUP_PROGRAM, str(folder / "store"))
    with ThreadPoolExecutor() as pool:
        ranks = [pool.submit(run, *program, rank, cwd=folder, env=env) for rank in ("0", "1")]
        for one in ranks:
            one.result()
    run(python, "-c", IMPORT_PROGRAM, cwd=folder, env=env)
    command = str(folder / "env" / "bin" / "ringcomm")
    run(command, "doctor", "--json", "--seconds", "0", cwd=folder, env=env)
    run(command, "bench", "--world-size", "2", "--seconds", "0", cwd=folder, env=env)


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    os.environ.pop("RINGCOMM_WHEELS", None)  # a wheel would be taken in place of the one to build
    os.environ["RINGCOMM_CUDA"] = "0"  # what users without a GPU get
    with tempfile.TemporaryDirectory(prefix="ringcomm-packaging-") as name:
        check_sdist(Path(name))
        check_install(check_wheel(Path(name)), Path(name))
    print("[packaging] sdist and wheel are good")
