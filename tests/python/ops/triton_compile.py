"""Triton kernels compiled for GPUs that are not here: what the scripts of variants share."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


# ---- from types


def compile_kernel(
    kernel: Any,
    types: dict[str, str],
    fixed: dict[str, Any],
    arch: int,
    divisible: tuple[str, ...] = (),
    **options: int,
) -> Any:
    """With pointers, and the integers that are named, of a multiple of 16."""
    positions = {name: (i,) for i, name in enumerate(types)}
    source = ASTSource(
        fn=kernel,
        signature=types,
        constexprs={positions[name]: value for name, value in fixed.items()},
        attrs={
            positions[name]: [["tt.divisibility", 16]]
            for name, kind in types.items()
            if kind.startswith("*") or name in divisible
        },
    )
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def report(compiled: Any) -> dict[str, Any]:
    """Widths of global accesses, registers per thread, bytes of stack (spills) and of memory."""
    return {
        "loads": accesses("ld", compiled.asm["ptx"]),
        "stores": accesses("st", compiled.asm["ptx"]),
        **_resources(compiled.asm["cubin"]),
    }


def accesses(kind: str, ptx: str) -> list[str]:
    """The widths of global accesses: b16, v4.b32."""
    found = re.findall(rf"\b{kind}\.global[\w.:]*?\.((?:v\d\.)?[a-z]\d+)\b", ptx)
    return sorted(set(found))


def _resources(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", said)
    assert found, said
    names = ("registers", "stack_bytes", "shared_bytes")
    return dict(zip(names, map(int, found.groups()), strict=True))


def print_reports(doc: str | None, reports: Callable[[int], dict[str, dict[str, Any]]]) -> None:
    """A script's main: ARCH as an argument, JSON or a table as output."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("arch", type=int, help="80, 90 or 100")
    parser.add_argument("--table", action="store_true", help="as text")
    arguments = parser.parse_args()
    found = reports(arguments.arch)
    if not arguments.table:
        print(json.dumps(found))
        return
    for name, entry in found.items():
        used = [f"{entry[key]:6}" for key in ("registers", "stack_bytes", "shared_bytes")]
        print(f"{name:50} {entry['warps']:2} warps", *used, *entry["loads"], "|", *entry["stores"])


# ---- from launches


class _Driver:
    """What Triton asks a driver before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def compile_instead_of_launching(seen: Callable[[str, str], None]) -> None:
    """From now on a launch compiles for an H200, and tells `seen` the kernel's name and its PTX."""
    triton.runtime.driver.set_active(_Driver())

    def compile_only(kernel: Any, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            compiled = kernel.run(*args, grid=grid, warmup=True, **options)
            seen(kernel.fn.__name__, compiled.asm["ptx"])

        return launch

    JITFunction.__getitem__ = compile_only
