"""Libraries made of PTX: translated, compiled, kept by digest, and loaded into this process."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import buildconfig
import translate

HERE = Path(__file__).resolve().parent
KEPT = HERE.parents[1] / "build" / "ptx" / "triton"
TRANSLATOR = tuple(
    f"{name}.py"
    for name in ("translate", "function", "opcodes", "arithmetic", "instructions", "parse")
)
MACHINE = tuple(f"{name}.cc" for name in ("machine", "warp", "async", "memory", "triton_memory"))
FLAGS = ("-std=c++20", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", f"-I{HERE.parent}")
# Compiling a kernel takes longer than running it, and reading the headers as long as the rest of
# compiling it: they are precompiled.
MACHINE_FLAGS, KERNEL_FLAGS = ("-O2", "-Wall", "-Wextra"), ("-O1", "-w")
HEADERS = ("ptx/bits.h", "ptx/machine.h", "ptx/numbers.h")
COMPILE_TIMEOUT_S = 600.0


class TensorMemory(ctypes.Structure):
    """As triton_memory.cc has it."""

    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("begin", "num_rows", "row_stride_bytes", "row_bytes")
    )


class Library:
    """A translated kernel, and the machine that runs it."""

    def __init__(self, path: Path, name: str) -> None:
        symbol = f"kernel_{name}"
        mangled = f"_ZN8ringcomm3ptx{len(symbol)}{symbol}E"
        self._machine = machine()
        self._kernel = ctypes.addressof(ctypes.c_char.in_dll(ctypes.CDLL(str(path)), mangled))

    def launch(
        self,
        params: bytes,
        tensors: Sequence[TensorMemory],
        grid: tuple[int, int, int],
        num_threads: int,
        shared_bytes: int,
    ) -> None:
        """Runs all blocks; ends the process with a message where the kernel breaks a rule."""
        memory = (TensorMemory * len(tensors))(*tensors)
        block = ctypes.create_string_buffer(params, len(params))
        sizes = [ctypes.c_uint(size) for size in (len(tensors), *grid, num_threads, shared_bytes)]
        self._machine.ringcomm_ptx_launch(ctypes.c_void_p(self._kernel), block, memory, *sizes)


def digest(*made_of: str | bytes) -> str:
    """The name of what is made of texts, by this compiler."""
    state = hashlib.sha256()
    for part in (*buildconfig.compiler(), *FLAGS, *MACHINE_FLAGS, *KERNEL_FLAGS, *made_of):
        state.update(part.encode() if isinstance(part, str) else part)
        state.update(b"\0")
    return state.hexdigest()[:20]


@functools.cache
def sources(*names: str) -> bytes:
    """The headers, and files of this folder: a change of them makes new libraries."""
    files = sorted([*HERE.glob("*.h"), *(HERE / name for name in names)])
    return b"\0".join(path.read_bytes() for path in files)


def kept(name: str, make: Callable[[Path], None]) -> Path:
    """A file of KEPT, made where it is missing. Processes that want the same wait for the first."""
    KEPT.mkdir(parents=True, exist_ok=True)
    path = KEPT / name
    with (KEPT / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            part = path.with_name(f"{name}-part")
            make(part)
            part.rename(path)
    return path


def compile_to(to: Path, files: Iterable[Path], flags: Iterable[str]) -> None:
    """Makes a library of C++ files.

    Raises:
        RuntimeError: they do not compile; the message has what the compiler says.
    """
    command = [*buildconfig.compiler(), *FLAGS, *flags, *map(str, files), "-o", str(to)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stderr[-4000:]}")


@functools.cache
def machine() -> ctypes.CDLL:
    """The machine; kernels that are loaded later use its symbols."""

    def make(to: Path) -> None:
        compile_to(to, [HERE / name for name in MACHINE], MACHINE_FLAGS)

    path = kept(f"machine-{digest(sources(*MACHINE))}.so", make)
    return ctypes.CDLL(str(path), mode=os.RTLD_GLOBAL | os.RTLD_NOW)


@functools.cache
def headers() -> Path:
    """The file that kernels include first, beside what the compiler has made of it."""

    def make(to: Path) -> None:
        to.write_text("".join(f'#include "{name}"\n' for name in HEADERS))
        # Named as the compiler will look for it.
        precompiled = to.with_name(to.name.removesuffix("-part") + ".gch")
        compile_to(precompiled, [to], [*KERNEL_FLAGS, "-x", "c++-header"])

    return kept(f"headers-{digest(sources())}.h", make)


@functools.cache
def load(name: str, ptx: str) -> Library:
    """The kernel of that name in a PTX text.

    Raises:
        translate.UnknownPtx: an instruction is not known; the message names it.
        RuntimeError: what it was translated to does not compile.
    """
    key = f"{name}-{digest(sources(*TRANSLATOR), ptx)}"

    def make(to: Path) -> None:
        folder = KEPT / key
        folder.mkdir(exist_ok=True)
        (folder / "kernel.ptx").write_text(ptx)
        translate.translate_file(folder / "kernel.ptx", folder, [name])
        flags = [*KERNEL_FLAGS, "-include", str(headers())]
        compile_to(to, [folder / f"{name}.cc"], flags)

    return Library(kept(f"{key}.so", make), name)
