"""docs/how-to/mistakes.md: each mistake is made, and says what the page has.

Others are in test_errors.py (arguments and options), test_cli.py (command lines) and
test_without_optional.py (missing packages).
"""

from __future__ import annotations

import datetime
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, NoReturn

import buildconfig
import pytest
import torch
import torch.distributed as dist
from rank_programs import run_command
from ranks import run_ranks

from ringcomm import _C, _extension, backend
from ringcomm.options import warn_of_unknown_variables

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "how-to" / "mistakes.md"
ROW = re.compile(r"^\| (?!mistake|---)(.+?) \| (.+?) \| .+ \|$", re.M)
TABLES = re.findall(r"(?m)^\| mistake .*\n(?:\|.*\n)+", PAGE.read_text(encoding="utf-8"))
ROWS: dict[str, str] = dict(ROW.findall("".join(TABLES)))
TIMEOUT_S = 60
TORCH_SAYS = "torch: "
# Extensions of this Python and of another.
OWN, OTHER_PYTHON = f"_C{EXTENSION_SUFFIXES[0]}", "_C.cpython-39-x86_64-linux-gnu.so"
NO_EXTENSION = shutil.ignore_patterns("*.so", "__pycache__")


def assert_said(mistake: str, message: str) -> None:
    """The page's words are in the message; ringcomm's own is one line, torch's has a note."""
    row = ROWS[mistake]
    (words,) = re.findall(r"`(.+)`", row)
    parts = [re.escape(part.strip()) for part in words.split("…")]
    if not row.startswith(TORCH_SAYS):
        assert "\n" not in message
    if "ringcomm:" in row and sys.version_info < (3, 11):
        parts.pop()
    assert re.search(".*".join(parts), message, re.S), message


def all_said(error: Exception) -> str:
    """The message and its notes, as a traceback ends."""
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


# ---- mistakes of one process: each returns what is said


def said_by(*command: str, **env: str) -> str:
    """The last line of a program that fails."""
    done = run_command(*command, env=env, timeout_s=TIMEOUT_S)
    assert done.returncode != 0
    return done.stderr.strip().splitlines()[-1]


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


def package(folder: Path, extension: str = "", built_for: str = "") -> Path:
    """ringcomm beside a torch that has a version and nothing else; its extension cannot run."""
    package = folder / "ringcomm"
    package.mkdir(parents=True)
    for name in ("__init__.py", "_extension.py", "version.py"):
        shutil.copy(ROOT / "ringcomm" / name, package)
    shutil.copytree(ROOT / "_ringcomm", folder / "_ringcomm")
    (folder / "torch.py").write_text('__version__ = "2.13.0+cpu"\n')
    if extension:
        text = f"\x7fELF... ringcomm is built for torch {built_for} ..."
        (package / extension).write_text(text, encoding="latin-1")
    return package


def import_of(*folders: Path) -> str:
    """What `import ringcomm` of a package in a folder says; nothing else is on its path."""
    path = [str(folder) for folder in folders]
    code = f"import sys; sys.path[:0] = {path}; import ringcomm"
    return said_by(sys.executable, "-IS", "-c", code).removeprefix("ImportError: ")


def import_with(folder: Path, extension: str, built_for: str) -> str:
    package(folder, extension, built_for)
    return import_of(folder)


def wheel_for(folder: Path, torch_folder: str, extension: str) -> str:
    """What a wheel with one folder of extensions says where it does not fit."""
    own = package(folder) / torch_folder
    own.mkdir()
    (own / extension).write_text("")
    return import_of(folder)


def in_checkout(patch: pytest.MonkeyPatch, folder: Path) -> str:
    package(folder)
    (folder / "setup.py").write_text("")
    return import_of(folder)


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
        Path(name).chmod(0o555)
        return said_by(*drop, python, str(Path(name, "tools", "bootstrap.py")))


def no_torchrun(patch: pytest.MonkeyPatch, folder: Path) -> str:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        patch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="RANK") as error:
        dist.init_process_group("ringcomm")
    return all_said(error.value)


def unknown_backend(patch: pytest.MonkeyPatch, folder: Path) -> str:
    code = "import torch.distributed as dist\n"
    code += "dist.init_process_group('ringcomm', store=dist.HashStore(), rank=0, world_size=1)"
    return said_by(sys.executable, "-c", code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")


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


def mistyped_variable(patch: pytest.MonkeyPatch, folder: Path) -> str:
    patch.setenv("RINGCOMM_TRANSPRT", "shm")
    with pytest.warns(UserWarning, match="RINGCOMM_TRANSPRT") as warned:
        warn_of_unknown_variables.__wrapped__()
    return str(warned[0].message)


def old_extension(patch: pytest.MonkeyPatch, folder: Path) -> str:
    """Its signature lacks an option that the Python files give."""

    class Old:
        def __init__(self, *, algorithm: str) -> None:
            """__init__(self, *, algorithm: str) -> None"""

    patch.setattr(_C, "GroupOptions", Old)
    with pytest.raises(RuntimeError, match="older") as error:
        backend._engine_options(None, 2)
    return str(error.value)


ALONE: dict[str, Callable[[pytest.MonkeyPatch, Path], str]] = {
    "no compiler": no_compiler,
    "new Python files in a checkout whose extension is not built again": old_extension,
    "a compiler that is too old": old_compiler,
    "no Python headers": no_headers,
    "no torch, and pip without build isolation": build_without_torch,
    "another torch than at build time": lambda _, at: import_with(at, OWN, "2.10.1"),
    "another Python than at build time": lambda _, at: import_with(at, OTHER_PYTHON, "2.13.0"),
    "a wheel for another torch": lambda _, at: wheel_for(at, "torch_2_14", OWN),
    "a wheel for another Python": lambda _, at: wheel_for(at, "torch_2_13", OTHER_PYTHON),
    "a checkout that has not been built": in_checkout,
    "a checkout without write permission": no_permission,
    "started without torchrun": no_torchrun,
    "the backend is unknown to torch": unknown_backend,
    "fewer ranks than the world size, without torchrun": too_few_without_torchrun,
    "a mistyped backend": lambda _, at: said_of_backend("ringcom"),
    "a mistyped environment variable": mistyped_variable,
}


@pytest.mark.filterwarnings("ignore:Device capability of")
@pytest.mark.parametrize("mistake", ALONE)
def test_a_mistake_alone(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_said(mistake, ALONE[mistake](monkeypatch, tmp_path))


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


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (None, "cannot be loaded"),  # it is tried, and is no library
        ("built_for", "has one built for torch 2.12"),
        ("version", "has one of another version of ringcomm"),
    ],
)
def test_an_installed_extension_that_fits(change: str | None, fault: str, tmp_path: Path) -> None:
    checkout, installed = tmp_path / "checkout", tmp_path / "site-packages"
    package(checkout)
    (checkout / "setup.py").write_text("")
    built_for = "2.12.0" if change == "built_for" else "2.13.0"
    found = package(installed, OWN, built_for)
    if change == "version":
        (found / "version.py").write_text('__version__ = "0.0.1"\n')
    said = import_of(checkout, installed)
    assert fault in said
    assert str(found) in said
    assert said.endswith(f"pip install {checkout}")


def test_a_checkout_runs_with_the_extension_of_an_installed_package(tmp_path: Path) -> None:
    """Its own Python files come first, and what it lacks comes from the installed package."""
    checkout, installed = tmp_path / "checkout", tmp_path / "site-packages"
    for folder in (checkout, installed):
        shutil.copytree(ROOT / "ringcomm", folder / "ringcomm", ignore=NO_EXTENSION)
    for extension in (ROOT / "ringcomm").glob("*.so"):
        shutil.copy(extension, installed / "ringcomm")
    (installed / "ringcomm" / "only_installed.py").write_text("")
    (checkout / "setup.py").write_text("")
    code = f"import sys; sys.path[:0] = {[str(checkout), str(installed)]}\n"
    code += "import torch, ringcomm, ringcomm.only_installed\n"
    code += "print(*(m.__file__ for m in (ringcomm._C, ringcomm._kernels, ringcomm.backend)))"
    command = [sys.executable, "-c", code]
    said = subprocess.check_output(command, text=True, timeout=TIMEOUT_S).split()
    assert [Path(name).parents[1] for name in said] == [installed, installed, checkout]


# ---- mistakes of ranks: each takes the rank and a folder, and may raise


def init(
    rank: int, world_size: int, folder: Path, backend: str = "ringcomm", timeout_s: float = 20.0
) -> None:
    store = dist.FileStore(str(folder / "store"), world_size)
    timeout = datetime.timedelta(seconds=timeout_s)
    place: dict[str, Any] = {"rank": rank, "world_size": world_size, "timeout": timeout}
    dist.init_process_group(backend, store=store, **place)


def all_reduce(num_elems: int = 4, group: Any = None) -> None:
    dist.all_reduce(torch.ones(num_elems), group=group)


def end_uncaught() -> NoReturn:
    """As the interpreter ends a program."""
    try:
        raise ValueError("no row 7\nof the data set")
    except ValueError as error:
        sys.excepthook(ValueError, error, error.__traceback__)
    os._exit(1)


def another_raises(rank: int, folder: Path) -> None:
    all_reduce()  # after it, all ranks watch each other
    if rank == 1:
        end_uncaught()
    all_reduce()


def another_is_killed(rank: int, folder: Path) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    all_reduce()


def another_ends(rank: int, folder: Path) -> None:
    for _ in range(2 if rank == 1 else 3):
        all_reduce()
    if rank == 1:
        os._exit(0)


def another_destroys(rank: int, folder: Path) -> None:
    for _ in range(2 if rank == 1 else 3):
        all_reduce()
    dist.destroy_process_group()


def different_shapes(rank: int, folder: Path) -> None:
    all_reduce(4 + rank)


def cpu_tensor(rank: int, folder: Path) -> None:
    all_reduce()


def too_few_ranks(rank: int, folder: Path) -> None:
    init(rank, 3, folder, timeout_s=1.0)


def different_order(rank: int, folder: Path) -> None:
    if rank == 0:
        all_reduce()
    dist.broadcast(torch.ones(4), 0)


def use_after_destroy(rank: int, folder: Path) -> None:
    group = dist.group.WORLD
    dist.destroy_process_group()
    all_reduce(group=group)


def use_in_a_fork(rank: int, folder: Path) -> None:
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, said_in_rank(all_reduce).encode())
        os._exit(0)
    os.wait()
    raise RuntimeError(os.read(reader, 10_000).decode())


def unwritable_store(rank: int, folder: Path) -> None:
    (folder / "closed").mkdir(mode=0o500)
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    place: dict[str, Any] = {"rank": 0, "world_size": 1}
    dist.init_process_group("ringcomm", f"file://{folder}/closed/store", **place)


# A name of the page, how many ranks, the backend of their group if they have one, what they do, and
# which says the line; -1: any of them.
RANKS: dict[str, tuple[int, str, Callable[[int, Path], None], int]] = {
    "another rank raised an exception": (3, "ringcomm", another_raises, 2),
    "another rank was killed": (3, "ringcomm", another_is_killed, 2),
    "another rank ended early": (3, "ringcomm", another_ends, 2),
    "another rank destroyed the group early": (3, "ringcomm", another_destroys, 2),
    "ranks that pass different shapes": (2, "ringcomm", different_shapes, 0),
    "ranks that call in a different order": (2, "ringcomm", different_order, 0),
    "a group used after `destroy_process_group`": (2, "ringcomm", use_after_destroy, 0),
    "a group used in a fork, such as a `DataLoader` worker": (2, "ringcomm", use_in_a_fork, 0),
    "a CPU tensor on a group for `cuda:ringcomm` only": (2, "cuda:ringcomm", cpu_tensor, 0),
    "fewer ranks than the world size": (2, "", too_few_ranks, 1),
    "ranks with different world sizes": (2, "", lambda rank, at: init(rank, 2 + rank, at), 0),
    "two processes with one rank": (2, "", lambda rank, at: init(0, 2, at, timeout_s=1.0), -1),
    "a rank outside of the world size": (1, "", lambda rank, at: init(2, 2, at), 0),
    "a `file://` store that cannot be written": (1, "", unwritable_store, 0),
}


def said_in_rank(call: Callable[..., Any], *args: Any) -> str:
    try:
        call(*args)
    except Exception as error:
        return all_said(error)
    return ""


@pytest.mark.parametrize("mistake", RANKS)
def test_a_mistake_of_ranks(mistake: str, tmp_path: Path) -> None:
    world_size, _, _, teller = RANKS[mistake]
    options: dict[str, Any] = {"backend": None, "fresh": True, "may_die": [1]}
    said = run_ranks(world_size, make_mistake, mistake, tmp_path, **options)
    if teller < 0:  # the rank whose record was replaced knows of it; the other comes later
        said.sort(key=lambda text: "another process" in text)
    assert_said(mistake, said[teller])


def make_mistake(rank: int, mistake: str, folder: Path) -> str:
    world_size, backend, program, _ = RANKS[mistake]
    if backend:
        init(rank, world_size, folder, backend)
    return said_in_rank(program, rank, folder)


def test_every_row_of_the_page_is_tried() -> None:
    elsewhere = {
        "a container with a small `/dev/shm`",  # test_hard_machines.py
        "a CUDA tensor, and a build without kernels",  # needs a GPU
        "no change in speed: Gloo still serves the groups",  # test_as_gloo.py, test_cli.py
        "`new_group()` on some ranks only, for other ranks on each",  # test_failed_init.py
    }
    assert ROWS.keys() == ALONE.keys() | RANKS.keys() | elsewhere
