"""Where ringcomm cannot be built, imported or started: what is said leads to what is missing.

Mistakes of ranks that have a group: test_errors.py, test_faults.py and test_leaving.py of backend.
"""

from __future__ import annotations

import datetime
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import buildconfig
import pytest
import torch
import torch.distributed as dist
from rank_programs import run_command
from ranks import run_ranks

from ringcomm import _C, _extension, backend

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 60
# Extensions of this Python and of another.
OWN, OTHER_PYTHON = f"_C{EXTENSION_SUFFIXES[0]}", "_C.cpython-39-x86_64-linux-gnu.so"
NO_EXTENSION = shutil.ignore_patterns("*.so", "__pycache__")


def all_said(error: Exception) -> str:
    """The message and its notes, as a traceback ends."""
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def assert_said(message: str, words: str) -> None:
    """The words, with anything in place of .*"""
    assert re.search(re.escape(words).replace(r"\.\*", ".*"), message, re.S), message


# ---- the import of a package


def said_by(*command: str, **env: str) -> str:
    """The last line of a program that fails."""
    done = run_command(*command, env=env, timeout_s=TIMEOUT_S)
    assert done.returncode != 0
    return done.stderr.strip().splitlines()[-1]


# A file of the package, the torch for which it is built, and what is said.
IMPORTS: dict[str, tuple[str, str, str]] = {
    "another torch": (OWN, "2.10.1", "has one built for torch 2.10. Build it: "),
    "another Python": (
        OTHER_PYTHON,
        "2.13.0",
        f"has one for another Python ({OTHER_PYTHON}). Build",
    ),
    "wheel for another torch": (f"torch_2_14/{OWN}", "", "torch 2.14 .*install 'torch==2.14.*'"),
    "wheel for another Python": (f"torch_2_13/{OTHER_PYTHON}", "", "torch 2.13 (.cpython-39-x86"),
    "not built": ("../setup.py", "", "has none. Build it: pip install"),
    # Of an installed one, behind a checkout without any. The first is tried, and is no library.
    "installed, damaged": (OWN, "2.13.0", "cannot be loaded"),
    "installed, another torch": (OWN, "2.12.0", "has one built for torch 2.12"),
    "installed, another version": (OWN, "2.13.0", "has one of another version of ringcomm"),
}


def package(folder: Path, file: str, built_for: str) -> Path:
    """ringcomm beside a torch that has a version and nothing else; its extension cannot run."""
    package = folder / "ringcomm"
    package.mkdir(parents=True)
    for name in ("__init__.py", "_extension.py", "version.py"):
        shutil.copy(ROOT / "ringcomm" / name, package)
    shutil.copytree(ROOT / "_ringcomm", folder / "_ringcomm")
    (folder / "torch.py").write_text('__version__ = "2.13.0+cpu"\n')
    (package / file).parent.mkdir(exist_ok=True)
    text = f"\x7fELF... ringcomm is built for torch {built_for} ..." if built_for else ""
    (package / file).write_text(text, encoding="latin-1")
    return package


@pytest.mark.parametrize("mistake", IMPORTS)
def test_an_import_without_its_extension(mistake: str, tmp_path: Path) -> None:
    """Nothing else is on the path."""
    file, built_for, words = IMPORTS[mistake]
    checkout, packages = tmp_path / "checkout", tmp_path / "site-packages"
    path, is_installed = [str(checkout)], mistake.startswith("installed")
    if is_installed:
        package(checkout, "../setup.py", "")
        found = package(packages, file, built_for)
        path.append(str(packages))
    else:
        package(checkout, file, built_for)
    if mistake.endswith("version"):
        (found / "version.py").write_text('__version__ = "0.0.1"\n')
    code = f"import sys; sys.path[:0] = {path}; import ringcomm"
    said = said_by(sys.executable, "-IS", "-c", code)
    assert said.startswith("ImportError: ")
    assert_said(said, words)
    assert "pip install" in said
    if is_installed:
        assert str(found) in said
        assert said.endswith(f"pip install {checkout}")


# ---- mistakes of one process: each returns what is said


def said_of_build(check: Callable[[], Any]) -> str:
    with pytest.raises(buildconfig.BuildProblem) as problem:
        check()
    return str(problem.value)


def no_compiler(patch: pytest.MonkeyPatch, folder: Path) -> str:
    patch.delenv("CXX", raising=False)
    patch.setenv("PATH", str(folder))
    return said_of_build(buildconfig.check_compiler)


def old_compiler(patch: pytest.MonkeyPatch, folder: Path) -> str:
    old = folder / "g++-9"
    old.write_text('#!/bin/sh\necho "error: unrecognized option -std=c++20" >&2\nexit 1\n')
    old.chmod(0o755)
    patch.setenv("CXX", str(old))
    return said_of_build(buildconfig.check_compiler)


def no_headers(patch: pytest.MonkeyPatch, folder: Path) -> str:
    patch.setattr("sysconfig.get_path", lambda _: str(folder))
    return said_of_build(buildconfig.check_python_headers)


def build_without_torch(patch: pytest.MonkeyPatch, folder: Path) -> str:
    (folder / "torch.py").write_text("raise ImportError('hidden')\n")
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); sys.argv = ['setup.py', 'build']\n"
    code += f"import runpy; runpy.run_path({str(ROOT / 'setup.py')!r}, run_name='__main__')\n"
    return said_by(sys.executable, "-c", code)


def no_permission(patch: pytest.MonkeyPatch, folder: Path) -> str:
    """Of a user to whom permissions apply, with a Python that this one may start."""
    python: str = sys.executable
    drop: tuple[str, ...] = ()
    if os.geteuid() == 0:
        python = shutil.which("python3", path="/usr/bin") or ""
        drop = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
        if not python or shutil.which("setpriv") is None:
            pytest.skip("root needs setpriv and a Python that others may start")
    with tempfile.TemporaryDirectory() as name:  # pytest's own are closed to others
        shutil.copytree(ROOT / "tools", Path(name, "tools"))
        Path(name, "csrc").mkdir()
        shutil.copy(ROOT / "csrc" / "build.mk", Path(name, "csrc"))
        Path(name).chmod(0o555)
        return said_by(*drop, python, str(Path(name, "tools", "bootstrap.py")))


def no_torchrun(patch: pytest.MonkeyPatch, folder: Path) -> str:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        patch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="RANK") as error:
        dist.init_process_group("ringcomm")
    return all_said(error.value)


def too_few_without_torchrun(patch: pytest.MonkeyPatch, folder: Path) -> str:
    with pytest.raises(dist.DistStoreError) as error:
        dist.init_process_group(
            "ringcomm",
            "tcp://127.0.0.1:0",  # a free port
            rank=0,
            world_size=2,
            timeout=datetime.timedelta(seconds=1),
        )
    return all_said(error.value)


def said_of_backend(name: str) -> str:
    with pytest.raises(Exception, match="Unknown") as error:
        dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1)
    return all_said(error.value)


def old_extension(patch: pytest.MonkeyPatch, folder: Path) -> str:
    """Its signature lacks an option that the Python files give."""

    class Old:
        def __init__(self, *, algorithm: str) -> None:
            """__init__(self, *, algorithm: str) -> None"""

    patch.setattr(_C, "GroupOptions", Old)
    with pytest.raises(RuntimeError, match="older") as error:
        backend._engine_options(None, 2)
    return str(error.value)


# torch's own errors, to which ringcomm adds a note.
NOTED = {"no torchrun", "too few without torchrun"}
Mistake = Callable[[pytest.MonkeyPatch, Path], str]
ALONE: dict[str, tuple[Mistake, str]] = {
    "no compiler": (no_compiler, "no C++ compiler: .*: apt-get install g++"),
    "old compiler": (old_compiler, "cannot compile C++20: .*g++ >= 11 or clang >= 14"),
    "no headers": (no_headers, "no Python headers: .*apt-get install python3-dev"),
    "no torch": (build_without_torch, "Install torch >= 2.11, or let pip bring torch=="),
    "old extension": (old_extension, "older than ringcomm's Python files: build it again"),
    "no permission": (no_permission, "Permission denied; use a checkout that you can write"),
    "no torchrun": (no_torchrun, "RANK expected.*torchrun --nproc-per-node 2 SCRIPT"),
    "too few without torchrun": (too_few_without_torchrun, "not all ranks have called"),
}


@pytest.mark.filterwarnings("ignore:Device capability of")
@pytest.mark.parametrize("mistake", ALONE)
def test_a_mistake_alone(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if mistake in NOTED and sys.version_info < (3, 11):
        pytest.skip("notes of errors are of Python 3.11")
    make, words = ALONE[mistake]
    said = make(monkeypatch, tmp_path)
    assert_said(said, words)
    assert mistake in NOTED or "\n" not in said


@pytest.mark.filterwarnings("ignore:Device capability of")
@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes of errors are of Python 3.11")
def test_the_advice_on_backends_is_for_names_close_to_ringcomm() -> None:
    for name in ("rincomm", "ring", "RingCom", "cpu:ringcom"):
        assert "did you mean the backend 'ringcomm'?" in said_of_backend(name), name
    for name in ("foo", "gloop", "rccl", "cpu:gluo"):
        assert "did you mean" not in said_of_backend(name), name


def test_an_extension_of_another_torch_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it can be loaded."""
    assert _C.BUILT_FOR.rpartition(" ")[2].split(".")[:2] == torch.__version__.split(".")[:2]
    monkeypatch.setattr(_extension, "MINOR", "2.99")
    with pytest.raises(ImportError, match=r"has one built for torch 2\.\d+"):
        _extension._load()


@pytest.mark.parametrize("place", ["installed", "wheel"])
def test_the_extension_of_this_torch_is_loaded(place: str, tmp_path: Path) -> None:
    """Of an installed package behind a checkout, whose own Python files come first, with what it
    lacks; or of several torches in a wheel.
    """
    checkout, installed = tmp_path / "checkout", tmp_path / "site-packages"
    for folder in (checkout, installed):
        shutil.copytree(ROOT / "ringcomm", folder / "ringcomm", ignore=NO_EXTENSION)
    (installed / "ringcomm" / "only_installed.py").write_text("")
    (checkout / "setup.py").write_text("")
    own = f"torch_{'_'.join(torch.__version__.split('.')[:2])}"
    folders = ["."] if place == "installed" else ["torch_2_9", own]
    for name in folders:
        (installed / "ringcomm" / name).mkdir(exist_ok=True)
        for extension in (ROOT / "ringcomm").glob("*.so"):
            shutil.copy(extension, installed / "ringcomm" / name)
    path = [str(checkout), str(installed)] if place == "installed" else [str(installed)]
    code = f"import sys; sys.path[:0] = {path}\n"
    code += "import torch, ringcomm, ringcomm.only_installed\n"
    code += "print(*(m.__file__ for m in (ringcomm._C, ringcomm._kernels, ringcomm.backend)))"
    done = run_command(sys.executable, "-c", code, timeout_s=TIMEOUT_S)
    found = [Path(name).parent for name in done.stdout.split()]
    loaded, files = installed / "ringcomm" / folders[-1], Path(path[0], "ringcomm")
    assert found == [loaded, loaded, files], done.stderr


# ---- mistakes of ranks before they have a group


def init(rank: int, world_size: int, folder: Path, backend: str = "ringcomm") -> None:
    store = dist.FileStore(str(folder / "store"), world_size)
    place: dict[str, Any] = {"rank": rank, "world_size": world_size}
    dist.init_process_group(backend, store=store, timeout=datetime.timedelta(seconds=20), **place)


def unwritable_store(rank: int, folder: Path) -> None:
    (folder / "closed").mkdir(mode=0o500)
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    place: dict[str, Any] = {"rank": 0, "world_size": 1}
    dist.init_process_group("ringcomm", f"file://{folder}/closed/store", **place)


def cpu_tensor(rank: int, folder: Path) -> None:
    init(rank, 2, folder, "cuda:ringcomm")
    dist.all_reduce(torch.ones(4))


RANKS: dict[str, tuple[int, Callable[[int, Path], None], str]] = {
    "different world sizes": (
        2,
        lambda rank, at: init(rank, 2 + rank, at),
        "2 and 3 ranks; start all ranks with the same world size",
    ),
    "outside": (1, lambda rank, at: init(2, 2, at), "2 is not in a group of 2 ranks; .* 0 to 1"),
    "unwritable store": (1, unwritable_store, "Permission denied.*a folder that all ranks can"),
    "for CUDA alone": (2, cpu_tensor, "type cpu.*use init_process_group('ringcomm')"),
}


def make_mistake(rank: int, mistake: str, folder: Path) -> str:
    try:
        RANKS[mistake][1](rank, folder)
    except Exception as error:
        return all_said(error)
    return ""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes of errors are of Python 3.11")
@pytest.mark.parametrize("mistake", RANKS)
def test_a_mistake_of_ranks(mistake: str, tmp_path: Path) -> None:
    world_size, _, words = RANKS[mistake]
    options: dict[str, Any] = {"backend": None, "fresh": True}
    assert_said(run_ranks(world_size, make_mistake, mistake, tmp_path, **options)[0], words)
