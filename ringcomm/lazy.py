"""What ringcomm imports at first use: its subpackages, and the Python part of its operators.

Also what it says of public names that are gone.
"""

import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

# Public names that are gone, and what to use in place of each. A row stays for one version.
GONE = {
    "ringcomm.integrations.deepspeed": "the recipe of docs/how-to/serve.md",
    "ringcomm.integrations.sglang": "the recipe of docs/how-to/serve.md",
    "ringcomm.integrations.vllm.register": "VLLM_PLUGINS=ringcomm",
    "ringcomm.Health": "the result of ringcomm.health()",
    "ringcomm.on_death": "ringcomm.health()",
    "ringcomm.ops.broadcast": "torch.ops.ringcomm.broadcast(tensor, src, group.group_name)",
    "ringcomm.ops.reduce": "torch.ops.ringcomm.reduce(tensor, dst, reduce_op, group.group_name)",
    "ringcomm.ops.new_shard_state": "torch.zeros(end - begin) for each state of the optimizer, with"
    " begin and end of ringcomm.ops.shard_range()",
    "ringcomm.parallel.WeightShards": "torch.distributed.fsdp.fully_shard, or zero.shard(stage=3)",
    "ringcomm.parallel.offload.AdamW": "offload.Offloaded(torch.optim.AdamW(...))",
    "ringcomm.parallel.offload.SGD": "offload.Offloaded(torch.optim.SGD(...))",
    "ringcomm.parallel.offload.FileStore": "torch.save(), or torch.distributed.checkpoint for"
    " tensors that outlive the process",
}


def attributes(
    package: str, *modules: str, **where: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package that imports some of its attributes at first use.

    They are `modules` of the package, and in `where` attributes of its module of that name. For a
    name of GONE the error tells what to use.
    """

    def get(name: str) -> Any:
        if name in modules:
            return import_module(f"{package}.{name}")
        if name in where:
            return getattr(import_module(f"{package}.{where[name]}"), name)
        if used := GONE.get(f"{package}.{name}"):
            # `from package import name` asks by hasattr(), and would hide an AttributeError.
            frame = inspect.currentframe()
            caller = None if frame is None else frame.f_back
            name_of_caller = "" if caller is None else str(caller.f_globals.get("__name__"))
            error = ImportError if name_of_caller.startswith("importlib.") else AttributeError
            raise error(f"{package}.{name} is gone; use {used}")
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
