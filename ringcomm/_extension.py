"""Loads the compiled extensions when imported; an error says what to do.

ringcomm._C is communication on CPUs, ringcomm._kernels has the other operators. ringcomm._cuda is
only in builds for GPUs.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parent
BUILD = "pip install --no-build-isolation"
# Whether this build has what GPUs need.
HAS_CUDA = find_spec("ringcomm._cuda") is not None
# A sentence in the extension (csrc/bindings/module.cc), found even if it cannot be loaded.
BUILT_FOR = re.compile(rb"ringcomm is built for torch (\d+\.\d+)")


def _load() -> None:
    """Imports the extensions.

    Raises:
        ImportError: one is missing, built for another Python, or built for another torch.
    """
    try:
        from ringcomm import _C, _kernels  # noqa: F401

        if HAS_CUDA:
            from ringcomm import _cuda  # noqa: F401
    except ImportError as error:
        raise ImportError(_reason(str(error))) from None
    if why := _other_torch(_C.BUILT_FOR.encode()):
        # Loading may succeed by chance: the layout of c10d's classes changes between minor
        # versions.
        raise ImportError(why)
    # Not before: another torch may lack its names.
    from ringcomm.torch_names import NEWEST_TRIED, TORCH_VERSION

    if TORCH_VERSION > NEWEST_TRIED and os.environ.get("RANK", "0") == "0":
        tried = ".".join(map(str, NEWEST_TRIED))
        warnings.warn(
            f"ringcomm is tried with torch up to {tried}, and this is torch {torch.__version__}."
            f" Compare a run's losses with those of one process, or install torch {tried} and"
            f" build ringcomm again: {BUILD} .",
            stacklevel=2,
        )


def _reason(error: str) -> str:
    """Why the import failed with `error`."""
    names = [f"_C{suffix}" for suffix in EXTENSION_SUFFIXES]
    found = next((FOLDER / name for name in names if (FOLDER / name).exists()), None)
    if found is not None:
        return _other_torch(found.read_bytes()) or (
            f"ringcomm: the extension cannot be loaded ({error}). Build it again: {BUILD} ."
        )
    others = sorted(path.name for path in FOLDER.glob("_C*.so"))
    if others:
        return (
            f"ringcomm: the extension is built for another Python ({', '.join(others)}); this is"
            f" {sys.implementation.cache_tag}. Build it with this one: {BUILD} ."
        )
    if (FOLDER.parent / "setup.py").exists():
        return (
            f"ringcomm: Python has found the source folder {FOLDER}, which has no compiled"
            f" extension. If ringcomm is installed, start Python in another folder than"
            f" {FOLDER.parent}; or build it there: {BUILD} -e ."
        )
    return f"ringcomm: {FOLDER} has no compiled extension. Install ringcomm again: {BUILD} ."


def _other_torch(extension: bytes) -> str:
    """The advice for an extension built for another torch than this one; empty for this torch."""
    built_for = BUILT_FOR.search(extension)
    minor = ".".join(torch.__version__.split(".")[:2])
    if built_for is None or built_for[1].decode() == minor:
        return ""
    return (
        f"ringcomm: the extension is built for torch {built_for[1].decode()}, and this is torch"
        f" {torch.__version__}. Build it again with this torch, in a checkout: {BUILD} ."
    )


_load()
