"""The build backend: setuptools, compiled against the torch of the environment installed into.

pip builds in an isolated environment, which hides the packages of the one that it installs into,
but runs the same interpreter. The backend asks that interpreter for its own search path and appends
it. Where it finds no torch, as in the environments of other front ends, the build requires one.
Standard library and setuptools only.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from setuptools import build_meta

sys.path.insert(0, str(Path(__file__).resolve().parent))

from buildconfig import TORCH

# What pip sets to isolate a build.
ISOLATION = ("PYTHONPATH", "PYTHONNOUSERSITE")


def _see_torch() -> bool:
    """Makes the installed torch importable if it is not; returns whether one is."""
    if importlib.util.find_spec("torch") is None:
        env = {name: value for name, value in os.environ.items() if name not in ISOLATION}
        ask = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.path[1:]))"]
        said = subprocess.run(ask, env=env, stdout=subprocess.PIPE, check=True).stdout
        # Last: what the build itself requires comes from the isolated environment.
        sys.path += [path for path in json.loads(said) if path not in sys.path]
        importlib.invalidate_caches()
    return importlib.util.find_spec("torch") is not None


def _seeing_torch(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook of setuptools that runs where torch can be imported."""

    def run(*args: Any, **kwargs: Any) -> Any:
        _see_torch()
        return hook(*args, **kwargs)

    return run


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """See PEP 517: with torch where none is installed."""
    needs = build_meta.get_requires_for_build_wheel(config_settings)
    return needs if _see_torch() else [*needs, TORCH]


get_requires_for_build_editable = get_requires_for_build_wheel
get_requires_for_build_sdist = build_meta.get_requires_for_build_sdist
build_sdist = build_meta.build_sdist
prepare_metadata_for_build_wheel = _seeing_torch(build_meta.prepare_metadata_for_build_wheel)
prepare_metadata_for_build_editable = _seeing_torch(build_meta.prepare_metadata_for_build_editable)
build_wheel = _seeing_torch(build_meta.build_wheel)
build_editable = _seeing_torch(build_meta.build_editable)
