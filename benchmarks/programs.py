"""Finds programs of the system, also in folders that are not on an ordinary user's PATH."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

# Debian and others have ip, tc and sysctl here, and only root's PATH names these folders.
SYSTEM_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin")


def search_path(folders: Sequence[str]) -> str:
    """PATH, followed by other folders."""
    return os.pathsep.join([os.environ.get("PATH") or os.defpath, *folders])


def find_program(name: str, folders: Sequence[str] | None = None) -> str | None:
    """The path of a program on PATH or in other folders, the system's by default; or None."""
    return shutil.which(name, path=search_path(folders or SYSTEM_FOLDERS))


def missing_programs(*names: str) -> list[str]:
    """Those of these programs that are not installed."""
    return [name for name in names if find_program(name) is None]


def environment() -> dict[str, str]:
    """The environment in which a child finds programs of the system by name."""
    return {**os.environ, "PATH": search_path(SYSTEM_FOLDERS)}
