"""Finds the Pythons of a machine that wheels can be built with: on PATH, and those of pyenv.

Standard library only.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from buildconfig import MIN_PYTHON, BuildProblem

NAME = re.compile(r"python3\.(\d+)")
TIMEOUT_S = 20

# What a Python says of itself: its version, and what it lacks to build wheels.
_PROBE = """
import importlib.util, json, os, sys, sysconfig
header = os.path.join(sysconfig.get_path("include"), "Python.h")
version = "%d.%d" % sys.version_info[:2]
lacks = ""
if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
    lacks = "it is not CPython with a global lock, which torch's wheels are for"
elif not os.path.exists(header):
    lacks = "no headers, %s: install python%s-dev" % (header, version)
elif not importlib.util.find_spec("ensurepip"):
    lacks = "no ensurepip: install python%s-venv" % version
print(json.dumps([version, lacks]))
"""


@dataclass(frozen=True)
class Python:
    """An interpreter: its version, such as "3.12", and its file."""

    minor: str
    path: str


def candidates() -> Iterator[Python]:
    """Files that are named as Pythons: the running one, those on PATH, those of pyenv."""
    yield Python(f"3.{sys.version_info.minor}", sys.executable)
    folders = [Path(name) for name in os.environ.get("PATH", "").split(os.pathsep) if name]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    folders += sorted(pyenv.glob("versions/*/bin"), reverse=True)
    for folder in folders:
        for path in sorted(folder.glob("python3.*")):
            named = NAME.fullmatch(path.name)
            if named and int(named[1]) >= MIN_PYTHON[1]:
                yield Python(f"3.{named[1]}", str(path))


def fault_of(python: Python) -> str:
    """Why wheels cannot be built with a file; empty if they can."""
    command = [python.path, "-c", _PROBE]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        version, lacks = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError):  # such as pyenv's for a version unused
        return "it does not run"
    return lacks if version == python.minor else f"it is Python {version}"


def find(wanted: list[str] | None = None) -> tuple[list[Python], list[str]]:
    """The first good Python of each version, in order, and why versions have none.

    Args:
        wanted: versions such as "3.12"; every one that is here if None.

    Raises:
        BuildProblem: a wanted version has no good Python.
    """
    good: dict[str, Python] = {}
    faults: dict[str, str] = {}
    for python in candidates():
        if python.minor in good or (wanted is not None and python.minor not in wanted):
            continue
        if fault := fault_of(python):
            faults.setdefault(python.minor, f"Python {python.minor}: {python.path}: {fault}")
        else:
            good[python.minor] = python
    for minor in wanted or ():
        if minor not in good:
            raise BuildProblem(
                faults.get(minor, f"no python{minor} on PATH or of pyenv")
                + "; without --python, wheels are built for the Pythons that are here"
            )
    bad = [text for minor, text in faults.items() if minor not in good]
    return sorted(good.values(), key=lambda python: int(python.minor[2:])), bad
