"""What groups on GPUs build upon, as CUDA's driver says it, without MPS and under it.

Usage: python tools/gpu_facts.py

Two processes on the first GPU: one says versions and memory, and what of it the other maps, by file
descriptor and by IPC handle. It needs neither torch nor ringcomm's extension, and takes seconds.
The status is 1 when something fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint64, c_void_p
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 30.0
MARK = 77  # in every byte of what is shared
# Of cuda.h's CUdevice_attribute.
ATTRIBUTES = {"MPS": 133, "virtual memory": 102, "file descriptors": 103, "multiprocessors": 16}
PINNED, ON_DEVICE, POSIX_FD, READ_WRITE, LAZY_PEER_ACCESS = 1, 1, 1, 3, 1


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class AllocationProp(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("win32", c_void_p),
        ("flags", c_ubyte * 8),
    )


class AccessDesc(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", c_int))


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("bytes", c_ubyte * 64),)


failures: list[str] = []  # of this process
PROP = AllocationProp(PINNED, POSIX_FD, Location(ON_DEVICE, 0))


class Driver:
    """libcuda with the first GPU's context; a call that fails raises RuntimeError."""

    def __init__(self) -> None:
        name = os.environ.get("RINGCOMM_CUDA_DRIVER") or "libcuda.so.1"
        self._library = ctypes.CDLL(name)
        self.call("cuInit", c_int(0))
        context = c_void_p()
        self.call("cuDevicePrimaryCtxRetain", byref(context), c_int(0))
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: Any) -> None:
        """Of the function with this name."""
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(c_int(status), byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'?').decode()} ({status})")

    def map(self, handle: c_uint64, num_bytes: c_size_t) -> c_uint64:
        """The address of memory that cuMemCreate or an import has given a handle of."""
        address, access = c_uint64(), AccessDesc(Location(ON_DEVICE, 0), READ_WRITE)
        no_hint, no_flags = c_uint64(0), c_uint64(0)
        reserve = (byref(address), num_bytes, c_size_t(0), no_hint, no_flags)
        self.call("cuMemAddressReserve", *reserve)
        self.call("cuMemMap", address, num_bytes, c_size_t(0), handle, no_flags)
        self.call("cuMemSetAccess", address, num_bytes, byref(access), c_size_t(1))
        return address

    def fill(self, address: c_uint64, num_bytes: c_size_t) -> None:
        """Puts the mark into every byte."""
        self.call("cuMemsetD8Async", address, c_ubyte(MARK), num_bytes, None)
        self.call("cuCtxSynchronize")

    def first_byte(self, address: c_uint64) -> int:
        """As a copy to the host brings it."""
        byte = c_ubyte(0)
        host = c_uint64(ctypes.addressof(byte))
        self.call("cuMemcpyAsync", host, address, c_size_t(1), None)
        self.call("cuCtxSynchronize")
        return byte.value


@contextmanager
def told(what: str) -> Iterator[None]:
    """An error becomes a line, and the process's status."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        failures.append(what)
        print(f"  {what}: {error}", flush=True)


def own(peer: socket.socket) -> None:
    """Of the process that has the memory: facts, then both kinds of handle."""
    with told("driver"):
        driver = Driver()
        version, free, total = c_int(), c_size_t(), c_size_t()
        driver.call("cuDriverGetVersion", byref(version))
        driver.call("cuMemGetInfo_v2", byref(free), byref(total))
        print(f"  CUDA {version.value // 1000}.{version.value % 1000 // 10} of the driver")
        print(f"  {free.value >> 20} of {total.value >> 20} MiB free", flush=True)
        for name, number in ATTRIBUTES.items():
            with told(f"attribute {number}"):
                value = c_int()
                driver.call("cuDeviceGetAttribute", byref(value), c_int(number), c_int(0))
                print(f"  {name}: {value.value} (attribute {number})", flush=True)
        num_bytes, handle, fd = c_size_t(), c_uint64(), c_int(-1)
        with told("memory with a file descriptor"):
            driver.call("cuMemGetAllocationGranularity", byref(num_bytes), byref(PROP), c_int(0))
            driver.call("cuMemCreate", byref(handle), num_bytes, byref(PROP), c_uint64(0))
            driver.fill(driver.map(handle, num_bytes), num_bytes)
            export = (byref(fd), handle, c_int(POSIX_FD), c_uint64(0))
            driver.call("cuMemExportToShareableHandle", *export)
        fds = [fd.value] if fd.value >= 0 else []
        socket.send_fds(peer, [str(num_bytes.value).encode()], fds)
        address, ipc = c_uint64(), IpcHandle()
        with told("memory with an IPC handle"):
            driver.call("cuMemAlloc_v2", byref(address), c_size_t(1 << 21))
            driver.fill(address, c_size_t(1 << 21))
            driver.call("cuIpcGetMemHandle", byref(ipc), address)
            peer.send(bytes(ipc.bytes))
        peer.shutdown(socket.SHUT_WR)
        peer.recv(1)  # until the other has looked


def look(peer: socket.socket) -> None:
    """Of the process that maps the other's memory."""
    with told("driver"):
        driver = Driver()
        with told("importing by file descriptor"):
            said, fds, _, _ = socket.recv_fds(peer, 20, 1)
            if not fds:
                raise RuntimeError("there is nothing to import")
            handle, num_bytes = c_uint64(), c_size_t(int(said))
            fd = c_void_p(fds[0])
            driver.call("cuMemImportFromShareableHandle", byref(handle), fd, c_int(POSIX_FD))
            show("file descriptor", driver.first_byte(driver.map(handle, num_bytes)))
        with told("importing by IPC handle"):
            data = peer.recv(64)
            if not data:
                raise RuntimeError("there is nothing to import")
            ipc, address = IpcHandle.from_buffer_copy(data), c_uint64()
            flags = c_int(LAZY_PEER_ACCESS)
            driver.call("cuIpcOpenMemHandle_v2", byref(address), ipc, flags)
            show("IPC handle", driver.first_byte(address))


def show(how: str, value: int) -> None:
    """Says that memory of the other process is there."""
    if value != MARK:
        raise RuntimeError(f"it has {value} instead of {MARK}")
    print(f"  a process imports another's memory by {how}: yes", flush=True)


def run_role(
    role: Callable[[socket.socket], None], mine: socket.socket, other: socket.socket
) -> None:
    """A process's whole life."""
    other.close()
    mine.settimeout(TIMEOUT_S)
    role(mine)
    mine.close()
    sys.exit(int(bool(failures)))


def run_pair() -> bool:
    """Whether both processes found all they looked for."""
    context = multiprocessing.get_context("fork")
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pair = [
        context.Process(target=run_role, args=(own, first, second)),
        context.Process(target=run_role, args=(look, second, first)),
    ]
    for process in pair:
        process.start()
    first.close()
    second.close()
    for process in pair:
        process.join(TIMEOUT_S)
        if process.is_alive():
            print(f"  stopped after {TIMEOUT_S:.0f} s", flush=True)
            process.kill()
            process.join()
    return all(process.exitcode == 0 for process in pair)


def load_mps() -> Any:
    """benchmarks/mps.py by its path: that folder has modules of common names."""
    path = ROOT / "benchmarks" / "mps.py"
    spec = importlib.util.spec_from_file_location("mps", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> int:
    """Prints all; returns the exit code."""
    mps = load_mps()
    print("without MPS:", flush=True)
    is_fine = run_pair()
    if mps.find_control() is None:
        print("MPS is missing: there is no nvidia-cuda-mps-control")
        return int(not is_fine)
    print("under MPS:", flush=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(mps.Mps())
        except RuntimeError as error:
            print(f"  {error}")
            return 1
        is_fine &= run_pair()
    return int(not is_fine)


if __name__ == "__main__":
    sys.exit(main())
