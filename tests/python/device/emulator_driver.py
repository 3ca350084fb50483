"""CUDA's driver as the emulator has it, called without torch, with toy kernels.

Tests of the emulator itself call run() with functions that get a Driver in each rank. What they
rely on: toy kernels (tests/emulator/toy_kernels.cc), and results by CUDA's numbers. Rules of CUDA
are tested with its own driver as well, on a GPU, with those kernels that toy_kernels.cu has.
"""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import buildconfig
import cuda_kernels
import emulated_gpu
import ranks
import torch.distributed as dist

SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, INVALID_CONTEXT = 0, 1, 2, 201
MAP_FAILED, NO_PEER, INVALID_HANDLE, NOT_FOUND, NOT_READY = 205, 217, 400, 500, 600
NOT_SUPPORTED, CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, CAPTURE_MERGE = 801, 900, 901, 902
CAPTURE_UNJOINED, CAPTURE_ISOLATION, CAPTURED_EVENT, WRONG_THREAD = 904, 905, 907, 908
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
PIECE = 2 << 20  # what memory is cut in
TOYS_OF_CUDA = ("add", "scale", "signal", "await")
TOYS = (*TOYS_OF_CUDA, "meet", "threads", "pass", "take")
LIMIT_MS = 30_000
SHORT_MS = 300  # of waits that must not succeed


class Handle(ctypes.Structure):
    """Of memory or of an event, for other processes."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


class Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class AllocationProp(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_char * 8),
    )


class Access(ctypes.Structure):
    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class Driver:
    """The driver's functions without their "cu", on one device; `Driver.call` returns results."""

    def __init__(self, device: int = 0) -> None:
        self.library = ctypes.CDLL(os.environ["RINGCOMM_CUDA_DRIVER"])
        self.check("Init", 0)
        self.use(device)

    def call(self, name: str, *arguments: Any) -> int:
        function = getattr(self.library, f"cu{name}")
        return int(function(*(ctypes.c_uint64(a) if isinstance(a, int) else a for a in arguments)))

    def check(self, name: str, *arguments: Any) -> None:
        assert self.call(name, *arguments) == SUCCESS, name

    def made(self, name: str, *arguments: Any) -> int:
        """What a function writes to its first argument."""
        made = ctypes.c_uint64(0)
        self.check(name, ctypes.byref(made), *arguments)
        return made.value

    def use(self, device: int) -> None:
        self.device = device
        self.check("CtxSetCurrent", self.made("DevicePrimaryCtxRetain", device))
        image = Path(os.environ["RINGCOMM_TEST_TOYS"]).read_bytes()
        module = self.made("ModuleLoadData", ctypes.c_char_p(image))
        self.toys = {
            toy: self.made("ModuleGetFunction", module, ctypes.c_char_p(f"toy_{toy}".encode()))
            for toy in os.environ["RINGCOMM_TEST_TOY_NAMES"].split()
        }

    def stream(self) -> int:
        return self.made("StreamCreate", 1)

    def event(self, shared: bool = False) -> int:
        return self.made("EventCreate", 6 if shared else 2)

    def zeros(self, num_bytes: int = 4096) -> int:
        """Memory of the host that kernels use by the same address."""
        address = self.made("MemHostAlloc", num_bytes, 0)
        ctypes.memset(address, 0, num_bytes)
        return address

    def memory(self, num_bytes: int = 4096) -> int:
        """Memory of the device, which only an emulated one lets the host read."""
        return self.made("MemAlloc_v2", num_bytes)

    def launch(
        self,
        toy: str,
        parameter: bytes,
        stream: int,
        blocks: int = 1,
        threads: int = 64,
        shared: int = 0,
    ) -> int:
        memory = ctypes.create_string_buffer(parameter, len(parameter))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(memory))
        return self.call(
            "LaunchKernel",
            self.toys[toy],
            blocks,
            1,
            1,
            threads,
            1,
            1,
            shared,
            stream,
            pointers,
            None,
        )

    def add(self, data: int, number: int, stream: int, num_elems: int = 1, **options: Any) -> int:
        return self.launch(
            "add", struct.pack("QqiI", data, num_elems, number, 0), stream, **options
        )

    def scale(self, data: int, number: int, stream: int) -> int:
        return self.launch("scale", struct.pack("QqiI", data, 1, number, 0), stream)

    def signal(self, flag: int, stream: int, **options: Any) -> int:
        return self.launch("signal", struct.pack("QII", flag, 1, 0), stream, **options)

    def wait_for(self, flag: int, stream: int, limit_ms: int = LIMIT_MS, **options: Any) -> int:
        """Blocks that spin until the flag is 1: num_running is behind it, then num_gave_up."""
        counts = (flag + 4, flag + 8)
        return self.launch(
            "await", struct.pack("QIIQQ", flag, 1, limit_ms, *counts), stream, **options
        )

    def synchronize(self, stream: int) -> None:
        self.check("StreamSynchronize", stream)


def number(address: int, index: int = 0) -> int:
    """Of 32 bits, in memory that the host can read."""
    return ctypes.c_int32.from_address(address + 4 * index).value


def put(address: int, value: int) -> None:
    ctypes.c_int32.from_address(address).value = value


class Peer:
    """Messages to the other ranks of a test, in order."""

    def __init__(self, store: str, rank: int, world_size: int) -> None:
        # It takes bytes, which its stub denies.
        self.store: Any = dist.FileStore(store, world_size)
        self.rank = rank
        self.counts: dict[tuple[int, int], int] = {}

    def _key(self, source: int, to: int) -> str:
        self.counts[source, to] = self.counts.get((source, to), 0) + 1
        return f"{source}>{to}/{self.counts[source, to]}"

    def tell(self, to: int, message: bytes = b"go") -> None:
        self.store.set(self._key(self.rank, to), message)

    def hear(self, source: int) -> bytes:
        return self.store.get(self._key(source, self.rank))


def _in_rank(
    rank: int, fn: Callable[..., Any], args: tuple[Any, ...], store: str, size: int
) -> Any:
    return fn(Driver(), Peer(store, rank, size), *args)


def compile_toys(image: Path) -> None:
    """Compiles the toy kernels for GPUs. Raises RuntimeError that says why they do not compile."""
    nvcc = buildconfig.find_nvcc()
    if nvcc is None:
        raise RuntimeError("there is no nvcc to compile tests/emulator/toy_kernels.cu with")
    archs = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in cuda_kernels.default_archs()]
    source = emulated_gpu.TESTS / "emulator" / "toy_kernels.cu"
    flags = ["-std=c++20", f"-I{emulated_gpu.TESTS}", "-fatbin", "-o", str(image)]
    done = subprocess.run(
        [str(nvcc), *archs, *flags, str(source)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=emulated_gpu.BUILD_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{source} does not compile:\n{done.stdout[-4000:]}")


def run(
    fn: Callable[..., Any],
    *args: Any,
    world_size: int = 1,
    folder: Path,
    is_cuda: bool = False,
    env: dict[str, str] | Sequence[dict[str, str]] | None = None,
    may_die: Sequence[int] = (),
) -> list[Any]:
    """fn(driver, peer, *args) in processes of their own; results by rank.

    `is_cuda`: with CUDA's driver and a GPU instead of the emulator.
    """
    toys = folder / "toys"
    if is_cuda:
        compile_toys(toys)
    else:
        toys.write_bytes(b"RINGCOMM-EMULATED")
    settings = {
        "RINGCOMM_CUDA_DRIVER": "libcuda.so.1" if is_cuda else str(emulated_gpu.build_toys()),
        "RINGCOMM_TEST_TOYS": str(toys),
        "RINGCOMM_TEST_TOY_NAMES": " ".join(TOYS_OF_CUDA if is_cuda else TOYS),
        "RINGCOMM_EMULATOR_DEVICES": "2",
        "RINGCOMM_EMULATOR_SMS": "2",
        "RINGCOMM_EMULATOR_BOX": str(folder),
    }
    own = [env or {}] * world_size if isinstance(env, dict | None) else env
    return ranks.run_ranks(
        world_size,
        _in_rank,
        *(fn, args, str(folder / "store"), world_size),
        backend=None,
        env=[{**settings, **mine} for mine in own],
        fresh=True,
        may_die=may_die,
        module=fn.__module__,
    )
