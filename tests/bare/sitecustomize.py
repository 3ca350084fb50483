"""Hides the packages that ringcomm goes without: PYTHONPATH=tests/bare (.ci/run bare)."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

HIDDEN = (
    *("accelerate", "liger_kernel", "matplotlib", "mpi4py", "quack", "rich"),
    *("transformers", "triton", "vllm"),
)


class Hider(PathFinder):
    """Finds what Python finds, but for some packages."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] in HIDDEN:
            return None
        return PathFinder.find_spec(fullname, path, target)


sys.meta_path = [Hider if finder is PathFinder else finder for finder in sys.meta_path]
