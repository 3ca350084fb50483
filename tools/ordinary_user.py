"""Runs Python tests as an ordinary user: its own HOME, the PATH of a login, and hidden processes.

Usage, as root: python tools/ordinary_user.py ARGS...   (ARGS are those of pytest)

The user works on a copy of the checkout, which it may write, and /proc shows it no process of
another user (hidepid). The account, its home and the copy exist in a mount namespace of their own
and end with the tests: nothing is left, and the machine's accounts do not change. The Python may be
in a folder that is closed to others, as /root is: it is mounted where the user can reach it.

An ordinary user runs the tests as they are. Says why, and exits with 0, where root may not make
namespaces. Standard library only.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAME = "ringcomm-user"
PATH = "/usr/local/bin:/usr/bin:/bin"
TOOLS = ("mount", "setpriv", "unshare")
# What the tests of an account need not have. A user's own make would build the extension.
LEFT_OUT = (".cache", ".git", ".venv", "build", "dist", "gpu-kit", "__pycache__")
NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
INSIDE = "--inside"


def skip(reason: str) -> int:
    """Says why no test ran."""
    print(f"skipped, no test ran as an ordinary user: {reason}", flush=True)
    return 0


def run(*command: str | Path) -> None:
    """Runs a command that must succeed."""
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def closed_parent(path: Path) -> Path | None:
    """The uppermost folder on the way to a path that others may not pass; None if they may."""
    for folder in [*reversed(path.parents), path]:
        if folder.is_dir() and not folder.stat().st_mode & 0o001:
            return folder
    return None


def folders_of_python() -> list[Path]:
    """Those that this Python and its packages are in, apart from the checkout's own code."""
    names = {sys.prefix, sys.base_prefix, *sys.path[1:]}
    folders = sorted({Path(name).resolve() for name in names if Path(name).is_dir()})
    found: list[Path] = []
    for folder in folders:  # a folder comes before what is in it
        if folder != ROOT and not any(one in folder.parents for one in found):
            found.append(folder)
    return found


def open_the_way(folders: Iterable[Path], stage: Path) -> None:
    """Mounts an empty folder over each closed one, and in it the folders that the user needs."""
    closed = {folder: closed_parent(folder) for folder in folders}
    kept: dict[Path, Path] = {}
    for number, folder in enumerate(one for one, parent in closed.items() if parent is not None):
        kept[folder] = stage / f"python-{number}"
        kept[folder].mkdir()
        run("mount", "--bind", folder, kept[folder])
    for parent in {parent for parent in closed.values() if parent is not None}:
        run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", parent)
    for folder, source in kept.items():
        folder.mkdir(parents=True, exist_ok=True)
        run("mount", "--bind", source, folder)


def make_account(stage: Path) -> tuple[int, Path]:
    """Adds a user and its group to this namespace's accounts; its number and its home."""
    taken = {entry.pw_uid for entry in pwd.getpwall()}
    user = next(number for number in range(20_000, 60_000) if number not in taken)
    home = stage / "home"
    home.mkdir()
    lines = {"passwd": f"{NAME}:x:{user}:{user}::{home}:/bin/sh\n", "group": f"{NAME}:x:{user}:\n"}
    for name, line in lines.items():
        accounts = stage / name
        accounts.write_text(Path("/etc", name).read_text().rstrip("\n") + f"\n{line}")
        accounts.chmod(0o644)
        run("mount", "--bind", accounts, Path("/etc", name))
    return user, home


def give(folder: Path, user: int) -> None:
    """Makes a user the owner of a folder and of all that is in it."""
    os.chown(folder, user, user)
    for parent, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            os.chown(Path(parent, name), user, user, follow_symlinks=False)


def run_inside(stage: Path, arguments: list[str]) -> int:
    """In the namespaces, as their first process: becomes the user and runs pytest."""
    os.umask(0o022)
    run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", stage)
    run("mount", "-o", "remount,hidepid=2", "/proc")
    copy, own = stage / "checkout", stage / "tmp"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
    own.mkdir()
    open_the_way(folders_of_python(), stage)
    user, home = make_account(stage)
    for folder in (copy, own, home):
        give(folder, user)
    environment = {
        **{name: os.environ[name] for name in ("CI", "LANG", "TZ") if name in os.environ},
        "HOME": str(home),
        "PATH": PATH,
        "PYTHONPATH": str(copy),
        "TMPDIR": str(own),
        "USER": NAME,
        "LOGNAME": NAME,
    }
    drop = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--"]
    probe = [*drop, sys.executable, "-c", "import pytest, torch, ringcomm"]
    # Of root's environment nothing is left, and none of its files may be needed.
    if subprocess.call(probe, cwd=copy, env=environment) != 0:
        return skip(f"others may not read {sys.executable} or its packages (a umask of 077?)")
    tests = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    child = subprocess.Popen([*drop, *tests], cwd=copy, env=environment)
    while True:  # the first process also has to wait for those that have lost their parents
        pid, status = os.wait()
        if pid == child.pid:
            child.returncode = os.waitstatus_to_exitcode(status)
            return child.returncode


def main(arguments: list[str]) -> int:
    """Runs the tests, or says why not; returns the exit status of pytest."""
    if arguments[:1] == [INSIDE]:
        return run_inside(Path(arguments[1]), arguments[2:])
    if os.geteuid() != 0:
        print("this is an ordinary user already", flush=True)
        return subprocess.call([sys.executable, "-m", "pytest", *arguments], cwd=ROOT)
    if missing := [name for name in TOOLS if shutil.which(name) is None]:
        return skip(f"not installed: {', '.join(missing)} (Debian: util-linux)")
    tried = subprocess.run([*NAMESPACES, "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        return skip(f"root may not make namespaces here: {tried.stderr.strip()}")
    stage = tempfile.mkdtemp(prefix="ringcomm-user-")
    try:
        inside = [sys.executable, str(Path(__file__).resolve()), INSIDE, stage, *arguments]
        return subprocess.call([*NAMESPACES, *inside])
    finally:
        os.rmdir(stage)  # what was mounted on it has gone with the namespace


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
