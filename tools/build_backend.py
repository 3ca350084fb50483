"""The build backend: setuptools, compiled against the torch of the environment installed into.

pip builds in an isolated environment, which hides the packages of the one that it installs into,
but runs the same interpreter. The backend asks that interpreter for its own search path and appends
it. Where it finds no torch, as in the environments of other front ends, the build requires one.
RINGCOMM_WHEELS, a folder or URL, has wheels that are taken if they fit: nothing is compiled then.
Standard library and setuptools only.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from setuptools import build_meta

sys.path.insert(0, str(Path(__file__).resolve().parent))

import buildconfig

# What pip sets to isolate a build.
ISOLATION = ("PYTHONPATH", "PYTHONNOUSERSITE")


def _run_outside(*arguments: str) -> str:
    """Runs Python in the environment that is installed into, and returns its output."""
    env = {name: value for name, value in os.environ.items() if name not in ISOLATION}
    return subprocess.check_output([sys.executable, *arguments], env=env, text=True)


def see_torch() -> bool:
    """Makes the installed torch importable if it is not; returns whether one is."""
    if importlib.util.find_spec("torch") is None:
        said = _run_outside("-c", "import json, sys; print(json.dumps(sys.path[1:]))")
        # Last: what the build itself requires comes from the isolated environment.
        sys.path += [path for path in json.loads(said) if path not in sys.path]
        importlib.invalidate_caches()
    return importlib.util.find_spec("torch") is not None


def take_wheel(folder: str) -> str | None:
    """Puts a wheel of RINGCOMM_WHEELS into a folder; returns its name, or None if none fits.

    It fits if it has this version of ringcomm and serves this Python and the installed torch.
    """
    source = os.environ.get("RINGCOMM_WHEELS")
    if not source:
        return None
    wanted = f"ringcomm=={buildconfig.public_version()}"
    options = ("--quiet", "--no-deps", "--no-index", "--only-binary=:all:", "--find-links", source)
    with tempfile.TemporaryDirectory() as name:
        try:
            _run_outside("-m", "pip", "download", *options, "-d", name, wanted)
        except subprocess.CalledProcessError as error:
            print(f"RINGCOMM_WHEELS={source} has no wheel that fits: {error}", file=sys.stderr)
            return None
        (wheel,) = Path(name).glob("*.whl")
        if see_torch():
            major, minor = buildconfig.parse_version(importlib.metadata.version("torch"))
            with zipfile.ZipFile(wheel) as archive:
                files = archive.namelist()
            if not any(file.startswith(f"ringcomm/torch_{major}_{minor}/") for file in files):
                print(f"{wheel.name} is not for torch {major}.{minor}: compiling", file=sys.stderr)
                return None
        shutil.copy(wheel, folder)
        return wheel.name


def _required(requirements: list[str]) -> list[str]:
    """The requirements of a build, with torch where none is installed."""
    return requirements if see_torch() else [*requirements, buildconfig.TORCH]


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """See PEP 517."""
    with tempfile.TemporaryDirectory() as folder:
        if take_wheel(folder):
            return []
    return _required(build_meta.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    """See PEP 660."""
    return _required(build_meta.get_requires_for_build_editable(config_settings))


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Any = None) -> str:
    """See PEP 517."""
    with tempfile.TemporaryDirectory() as folder:
        if name := take_wheel(folder):
            with zipfile.ZipFile(Path(folder, name)) as archive:
                files = [file for file in archive.namelist() if ".dist-info/" in file]
                archive.extractall(metadata_directory, files)
            return files[0].partition("/")[0]
    see_torch()
    return build_meta.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def build_wheel(
    wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    """See PEP 517."""
    if name := take_wheel(wheel_directory):
        return name
    see_torch()
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def _seeing_torch(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook of setuptools that runs where torch can be imported."""

    def run(*args: Any, **kwargs: Any) -> Any:
        see_torch()
        return hook(*args, **kwargs)

    return run


prepare_metadata_for_build_editable = _seeing_torch(build_meta.prepare_metadata_for_build_editable)
build_editable = _seeing_torch(build_meta.build_editable)
get_requires_for_build_sdist = build_meta.get_requires_for_build_sdist
build_sdist = build_meta.build_sdist
