"""What ringcomm imports at first use: its subpackages, and the Python part of its operators."""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch


def attributes(
    package: str, *modules: str, **where: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package that imports some of its attributes at first use.

    They are `modules` of the package, and in `where` attributes of its module of that name.
    """

    def get(name: str) -> Any:
        if name in modules:
            return import_module(f"{package}.{name}")
        if name in where:
            return getattr(import_module(f"{package}.{where[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules, *where})

    return get, names


def register_operators_at_first_use() -> None:
    """Makes `torch.ops.ringcomm` import ringcomm.ops when an operator is looked up in it.

    The extensions define the operators. ringcomm.ops registers their fakes and gradients, which the
    backend does not need: for each of them torch goes through all loaded modules.
    """
    namespace = torch.ops.ringcomm
    kind: Any = type(namespace)

    class Operators(kind):
        __module__ = kind.__module__  # torch names operators after it, in files of torch.export too

        def __getattr__(self, name: str) -> Any:
            if not name.startswith("__"):
                import_module("ringcomm.ops")
            return kind.__getattr__(self, name)

    # The namespace stays the same object: other modules may hold it.
    namespace.__class__ = Operators
