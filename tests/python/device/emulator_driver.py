"""CUDA's driver as the emulator has it, called without torch.

Tests of the emulator itself call run() with functions that get a Driver in each rank. What they
rely on: functions of the host as kernels, and results by CUDA's numbers. Rules of CUDA are tested
with its own driver as well, on a GPU, where the driver calls those functions by itself.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import emulated_gpu
import ranks
import torch.distributed as dist

SUCCESS, INVALID_VALUE, OUT_OF_MEMORY = 0, 1, 2
ALREADY_MAPPED, NO_PEER, INVALID_HANDLE, NOT_READY = 208, 217, 400, 600
NOT_SUPPORTED, CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, CAPTURE_MERGE = 801, 900, 901, 902
CAPTURE_UNJOINED, CAPTURE_ISOLATION, CAPTURED_EVENT = 904, 905, 907
GLOBAL, RELAXED = 0, 2
PIECE = 2 << 20  # what memory is cut in
LIMIT_MS = 30_000
SHORT_MS = 300  # of waits that must not succeed
IMAGE = b"RINGCOMM-EMULATED"


class HostCall(ctypes.Structure):
    """The parameter of the emulator's kernel that calls a function of the host in each block."""

    _fields_ = (("function", ctypes.CFUNCTYPE(None, ctypes.c_void_p)), ("data", ctypes.c_void_p))


class Handle(ctypes.Structure):
    """Of memory, for other processes."""

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

    def __init__(self, is_cuda: bool) -> None:
        self.library = ctypes.CDLL(os.environ["RINGCOMM_CUDA_DRIVER"])
        self.is_cuda = is_cuda
        self.kept: list[HostCall] = []
        self.lock = threading.Lock()
        self.check("Init", 0)
        self.use(0)

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
        self.check("CtxSetCurrent", self.made("DevicePrimaryCtxRetain", device))
        if not self.is_cuda:
            module = self.made("ModuleLoadData", ctypes.c_char_p(IMAGE))
            name = ctypes.c_char_p(b"emulator_function")
            self.kernel = self.made("ModuleGetFunction", module, name)

    def stream(self) -> int:
        return self.made("StreamCreate", 1)

    def event(self) -> int:
        return self.made("EventCreate", 2)

    def zeros(self, num_bytes: int = 4096) -> int:
        """Memory of the host that a GPU uses by the same address."""
        address = self.made("MemHostAlloc", num_bytes, 0)
        ctypes.memset(address, 0, num_bytes)
        return address

    def memory(self, num_bytes: int = 4096) -> int:
        """Memory of the device, which only an emulated one lets the host read."""
        return self.made("MemAlloc_v2", num_bytes)

    def fill(self, data: int, value: int, stream: int) -> int:
        """The first byte."""
        return self.call("MemsetD8Async", data, value, 1, stream)

    def copy(self, to: int, data: int, stream: int) -> int:
        return self.call("MemcpyAsync", to, data, 4, stream)

    def launch(
        self, function: Callable[[], Any], stream: int, blocks: int = 1, shared: int = 0
    ) -> None:
        """A kernel of which each block calls the function; CUDA's driver calls it once."""
        call = HostCall(HostCall._fields_[0][1](lambda data: function()), None)
        self.kept.append(call)
        if self.is_cuda:
            self.check("LaunchHostFunc", stream, call.function, None)
            return
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(call))
        sizes = (blocks, 1, 1, 64, 1, 1, shared)
        self.check("LaunchKernel", self.kernel, *sizes, stream, pointers, None)

    def signal(self, flag: int, stream: int, **options: Any) -> None:
        self.launch(lambda: put(flag, 1), stream, **options)

    def wait_for(self, flag: int, stream: int, limit_ms: int = LIMIT_MS, **options: Any) -> None:
        """Blocks that wait until the flag is 1: behind it count those that run and gave up."""

        def count(index: int) -> None:
            with self.lock:
                put(flag + 4 * index, number(flag, index) + 1)

        def wait() -> None:
            count(1)
            end = time.monotonic() + limit_ms / 1000
            while number(flag) != 1:
                if time.monotonic() > end:
                    return count(2)
                time.sleep(0.0005)
            return None

        self.launch(wait, stream, **options)

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
    rank: int, fn: Callable[..., Any], args: tuple[Any, ...], store: str, size: int, is_cuda: bool
) -> Any:
    result = fn(Driver(is_cuda), Peer(store, rank, size), *args)
    return "done" if result is None else result


def run(
    fn: Callable[..., Any],
    *args: Any,
    world_size: int = 1,
    folder: Path,
    is_cuda: bool = False,
    env: dict[str, str] | Sequence[dict[str, str]] | None = None,
    may_die: Sequence[int] = (),
) -> list[Any]:
    """fn(driver, peer, *args) in processes of their own; results by rank, None of those that died.

    `is_cuda`: with CUDA's driver and a GPU instead of the emulator.
    """
    settings = {
        "RINGCOMM_CUDA_DRIVER": "libcuda.so.1" if is_cuda else str(emulated_gpu.build_driver()),
        "RINGCOMM_EMULATOR_DEVICES": "2",
        "RINGCOMM_EMULATOR_SMS": "2",
        "RINGCOMM_EMULATOR_QUEUES": "8",  # these programs have more streams than MPS has queues
        "RINGCOMM_EMULATOR_BOX": str(folder),
    }
    own = [env or {}] * world_size if isinstance(env, dict | None) else env
    return ranks.run_ranks(
        world_size,
        _in_rank,
        *(fn, args, str(folder / "store"), world_size, is_cuda),
        backend=None,
        env=[{**settings, **mine} for mine in own],
        fresh=True,
        may_die=may_die,
        module=fn.__module__,
    )
