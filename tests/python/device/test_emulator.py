"""The emulator of CUDA's driver: the rules of CUDA that tests of GPU code rely on."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import emulated_gpu
import emulator_driver as cuda
import pytest
from cases import name_of
from emulator_driver import PIECE, Driver, Handle, Peer, number, put, run

pytestmark = emulated_gpu.needs_emulated_gpu


# ---- streams and events


def streams(gpu: Driver, peer: Peer) -> None:
    """A stream keeps its order; another one waits for the record that was last when it asked."""
    first, second, idle = (gpu.stream() for _ in range(3))
    # In the device's memory: CUDA's driver fills memory of the host before its call returns.
    data, copied, flag, event = gpu.memory(), gpu.zeros(), gpu.zeros(), gpu.event()
    assert gpu.call("EventQuery", event) == cuda.SUCCESS  # never recorded
    assert gpu.call("StreamWaitEvent", second, event, 0) == cuda.SUCCESS
    gpu.wait_for(flag, first)
    gpu.fill(data, 2, first)
    gpu.copy(data + 4, data, first)
    gpu.check("EventRecord", event, first)
    gpu.check("StreamWaitEvent", second, event, 0)
    gpu.copy(copied, data + 4, second)
    assert gpu.call("EventQuery", event) == cuda.NOT_READY
    gpu.check("EventRecord", event, idle)  # again: what waits, waits for the old record
    gpu.check("EventSynchronize", event)
    assert gpu.call("StreamQuery", second) == cuda.NOT_READY
    gpu.check("EventDestroy_v2", event)
    put(flag, 1)
    gpu.synchronize(second)
    assert number(copied) & 0xFF == 2  # one byte was filled
    assert gpu.call("EventQuery", event) == cuda.INVALID_HANDLE


def freeing_waits(gpu: Driver, peer: Peer) -> None:
    stream, data, flag = gpu.stream(), gpu.memory(), gpu.zeros()
    gpu.wait_for(flag, stream)
    gpu.fill(data, 1, stream)
    timer = threading.Timer(0.02, put, (flag, 1))
    timer.start()
    gpu.check("MemFree_v2", data)
    assert gpu.call("StreamQuery", stream) == cuda.SUCCESS
    timer.join()


# ---- captures


def begin(gpu: Driver, stream: int, mode: int = cuda.GLOBAL) -> None:
    gpu.check("StreamBeginCapture_v2", stream, mode)


def end(gpu: Driver, stream: int) -> int:
    graph = ctypes.c_uint64()
    return gpu.call("StreamEndCapture", stream, ctypes.byref(graph))


def ended(gpu: Driver, stream: int) -> int:
    """What can be launched."""
    graph = ctypes.c_uint64()
    gpu.check("StreamEndCapture", stream, ctypes.byref(graph))
    return gpu.made("GraphInstantiateWithFlags", graph, 0)


def graphs(gpu: Driver, peer: Peer) -> None:
    """Nothing runs before a launch; branches of a capture run at once, in the order of events."""
    stream, side, data, flag = gpu.stream(), gpu.stream(), gpu.zeros(), gpu.zeros()
    fork, join = gpu.event(), gpu.event()
    begin(gpu, stream)
    gpu.fill(data, 7, stream)
    gpu.check("EventRecord", fork, stream)
    gpu.check("StreamWaitEvent", side, fork, 0)
    gpu.wait_for(flag, stream)  # for the other branch
    gpu.copy(data + 4, data, side)
    gpu.fill(flag, 1, side)
    gpu.copy(data + 8, data + 4, side)
    gpu.check("EventRecord", join, side)
    gpu.check("StreamWaitEvent", stream, join, 0)
    gpu.copy(data + 12, data + 8, stream)
    graph = ended(gpu, stream)
    for _ in range(3):
        assert number(data, 3) == 0
        gpu.check("GraphLaunch", graph, stream)
        gpu.synchronize(stream)
        assert number(data, 3) == 7
        ctypes.memset(data, 0, 16)
        put(flag, 0)
    assert number(flag, 2) == 0  # none gave up
    begin(gpu, stream)
    gpu.check("EventRecord", fork, stream)
    gpu.check("StreamWaitEvent", side, fork, 0)
    gpu.fill(data, 1, side)
    assert end(gpu, stream) == cuda.CAPTURE_UNJOINED


def spoilt_captures(gpu: Driver, peer: Peer) -> None:
    """What ends a capture with an error, and leaves the stream usable."""
    stream, other, data = gpu.stream(), gpu.stream(), gpu.memory()
    event, host = gpu.event(), ctypes.c_uint64()

    def after(expected: int, *spoil: Callable[[], int]) -> None:
        begin(gpu, stream)
        for step in spoil[:-1]:
            assert step() == cuda.SUCCESS
        assert spoil[-1]() == expected
        assert gpu.fill(data, 1, stream) == cuda.CAPTURE_INVALIDATED
        assert end(gpu, stream) == cuda.CAPTURE_INVALIDATED
        gpu.synchronize(stream)

    for name, argument in (
        ("StreamSynchronize", stream),
        ("StreamSynchronize", other),
        ("StreamQuery", stream),
        ("MemFree_v2", data),
    ):
        after(cuda.CAPTURE_UNSUPPORTED, partial(gpu.call, name, argument))
    after(cuda.CAPTURE_UNSUPPORTED, partial(gpu.call, "MemAlloc_v2", ctypes.byref(host), 16))
    record = partial(gpu.call, "EventRecord", event, stream)
    after(cuda.CAPTURED_EVENT, record, partial(gpu.call, "EventQuery", event))
    gpu.check("EventRecord", event, other)
    after(cuda.CAPTURE_ISOLATION, partial(gpu.call, "StreamWaitEvent", stream, event, 0))
    begin(gpu, stream)
    begin(gpu, other)
    gpu.check("EventRecord", event, other)
    assert gpu.call("StreamWaitEvent", stream, event, 0) == cuda.CAPTURE_MERGE
    assert [end(gpu, other), end(gpu, stream)] == [cuda.CAPTURE_INVALIDATED] * 2


def modes(gpu: Driver, peer: Peer) -> None:
    """A capture keeps threads from what might wait for the device, unless one of both relaxes."""
    stream, event = gpu.stream(), gpu.event()

    def asks(mode: int) -> int:
        exchanged = ctypes.c_int(mode)
        gpu.check("ThreadExchangeStreamCaptureMode", ctypes.byref(exchanged))
        result = gpu.call("EventQuery", event)
        gpu.check("ThreadExchangeStreamCaptureMode", ctypes.byref(exchanged))
        return result

    for mode in (cuda.GLOBAL, cuda.RELAXED):
        for asking, elsewhere in product((cuda.GLOBAL, cuda.RELAXED), (False, True)):
            allowed = cuda.RELAXED in (mode, asking)
            begin(gpu, stream, mode)
            if elsewhere:
                with ThreadPoolExecutor(1) as others:
                    result = others.submit(asks, asking).result()
            else:
                result = asks(asking)
            assert result == (cuda.SUCCESS if allowed else cuda.CAPTURE_UNSUPPORTED)
            assert end(gpu, stream) == (cuda.SUCCESS if allowed else cuda.CAPTURE_INVALIDATED)


# ---- kernels


def blocks(gpu: Driver, peer: Peer) -> None:
    """Each block runs once; as many as fit run at once, of all streams of a GPU together."""
    stream, other, ran = gpu.stream(), gpu.stream(), list[int]()
    for num_blocks in (1, 3, 5, 64):
        gpu.launch(partial(ran.append, num_blocks), stream, num_blocks)
    gpu.synchronize(stream)
    assert sorted(ran) == [1] + [3] * 3 + [5] * 5 + [64] * 64
    for num_blocks, limit_ms in ((4, cuda.LIMIT_MS), (5, cuda.SHORT_MS)):
        flag = gpu.zeros()
        gpu.wait_for(flag, stream, limit_ms, blocks=num_blocks)
        end = time.monotonic() + limit_ms / 2000
        while number(flag, 1) < num_blocks and time.monotonic() < end:
            time.sleep(0.001)
        put(flag, int(num_blocks == 4))
        assert number(flag, 1) == 4
        gpu.synchronize(stream)
        assert (number(flag, 1), number(flag, 2)) == (num_blocks, 5 * (num_blocks - 4))
    # One that fills a multiprocessor waits until one is empty.
    for num_waiting in (1, 2, 4):
        flag = gpu.zeros()
        gpu.wait_for(flag, stream, cuda.SHORT_MS, blocks=num_waiting)
        while number(flag, 1) < num_waiting:
            time.sleep(0.001)
        gpu.signal(flag, other, shared=227 << 10)
        gpu.synchronize(other)
        gpu.synchronize(stream)
        assert (number(flag, 2) > 0) == (num_waiting > 1)


def shared_queue(gpu: Driver, peer: Peer, is_in_vain: bool) -> None:
    """What cannot start yet keeps back what comes later in its hardware queue."""
    first, second, flag, data = gpu.stream(), gpu.stream(), gpu.zeros(), gpu.zeros()
    gpu.wait_for(flag, first, cuda.SHORT_MS if is_in_vain else cuda.LIMIT_MS)
    gpu.fill(data, 1, first)  # behind the one that spins
    gpu.signal(flag, second)
    gpu.synchronize(first)
    gpu.synchronize(second)
    assert number(flag, 2) == int(is_in_vain)


def lazy_loading(gpu: Driver, peer: Peer) -> None:
    """To ask for a kernel for the first time waits for all that the device does."""
    stream, flag = gpu.stream(), gpu.zeros()
    module = gpu.made("ModuleLoadData", ctypes.c_char_p(cuda.IMAGE))
    gpu.wait_for(flag, stream, cuda.SHORT_MS)
    gpu.made("ModuleGetFunction", module, ctypes.c_char_p(b"emulator_function"))
    assert number(flag, 2) == 1  # it has given up meanwhile
    gpu.wait_for(flag, stream, cuda.SHORT_MS)
    gpu.made("ModuleGetFunction", module, ctypes.c_char_p(b"emulator_function"))
    assert number(flag, 2) == 1


def spins_for_another(gpu: Driver, peer: Peer, limit_ms: int) -> int:
    """Rank 0's kernel spins for one of rank 1 on the same GPU; whether in vain."""
    stream = gpu.stream()
    if peer.rank == 1:
        handle = Handle.from_buffer_copy(peer.hear(0))
        gpu.signal(gpu.made("IpcOpenMemHandle_v2", handle, 1), stream)
        gpu.synchronize(stream)
        return 0
    flag = gpu.memory(PIECE)
    gpu.wait_for(flag, stream, limit_ms)
    while number(flag, 1) == 0:
        time.sleep(0.001)
    peer.tell(1, bytes(handle_of(gpu, flag)))
    gpu.synchronize(stream)
    return number(flag, 2)


def handle_of(gpu: Driver, address: int) -> Handle:
    handle = Handle()
    gpu.check("IpcGetMemHandle", ctypes.byref(handle), address)
    return handle


def dies_in_a_kernel(gpu: Driver, peer: Peer) -> None:
    """Its turn on the GPU goes to the other."""
    stream, flag = gpu.stream(), gpu.zeros()
    if peer.rank == 1:
        peer.hear(0)
        gpu.signal(flag, stream)
        gpu.synchronize(stream)
        return
    gpu.wait_for(flag, stream)
    while number(flag, 1) == 0:
        time.sleep(0.001)
    peer.tell(1)
    os.kill(os.getpid(), signal.SIGKILL)


# ---- memory


def little_memory(gpu: Driver, peer: Peer) -> None:
    address = ctypes.c_uint64()
    assert gpu.call("MemAlloc_v2", ctypes.byref(address), PIECE + 1) == cuda.OUT_OF_MEMORY
    first = gpu.memory(PIECE)
    assert number(first, 100) == 0
    assert gpu.call("MemAlloc_v2", ctypes.byref(address), 1) == cuda.OUT_OF_MEMORY
    gpu.check("MemFree_v2", first)
    gpu.memory(PIECE)


def opened(gpu: Driver, peer: Peer, is_closed: bool) -> None:
    """Memory by a handle; what its owner has freed stays until it is closed."""
    if peer.rank == 0:
        data = gpu.memory(PIECE)
        small = Handle()  # it would hand out what others have in the same piece
        assert gpu.call("IpcGetMemHandle", ctypes.byref(small), gpu.memory()) == cuda.INVALID_VALUE
        put(data, 9)
        peer.tell(1, bytes(handle_of(gpu, data)))
        peer.hear(1)
        assert number(data, 1) == 9
        gpu.check("MemFree_v2", data)
        peer.tell(1)
        return
    stream = gpu.stream()
    data = gpu.made("IpcOpenMemHandle_v2", Handle.from_buffer_copy(peer.hear(0)), 1)
    gpu.copy(data + 4, data, stream)
    gpu.synchronize(stream)
    assert gpu.call("MemFree_v2", data) == cuda.INVALID_VALUE  # it is another's
    if is_closed:
        gpu.check("IpcCloseMemHandle", data)
    peer.tell(0)
    peer.hear(0)
    assert is_closed or number(data) == 9


def opened_twice(gpu: Driver, peer: Peer, refuses: bool) -> None:
    """Rank 1 has one mapping, counted. What comes to the address has another one, or is refused
    until the first is closed.
    """
    if peer.rank == 0:
        data = gpu.memory(PIECE)
        peer.tell(1, bytes(handle_of(gpu, data)))
        peer.hear(1)
        put(data, 9)
        gpu.check("MemFree_v2", data)
        # What fits elsewhere better may come first.
        others = (gpu.memory(PIECE) for _ in range(256))
        new = next(address for address in others if address == data)
        put(new, 8)
        peer.tell(1, bytes(handle_of(gpu, new)))
        peer.hear(1)
        return
    handle = Handle.from_buffer_copy(peer.hear(0))
    address = gpu.made("IpcOpenMemHandle_v2", handle, 1)
    assert gpu.made("IpcOpenMemHandle_v2", handle, 1) == address
    peer.tell(0)
    later = Handle.from_buffer_copy(peer.hear(0))
    opened = ctypes.c_uint64()
    for num_closed in range(3):
        is_refused = refuses and num_closed < 2
        result = gpu.call("IpcOpenMemHandle_v2", ctypes.byref(opened), later, 1)
        assert result == (cuda.ALREADY_MAPPED if is_refused else cuda.SUCCESS)
        if not is_refused:
            assert number(opened.value) == 8
            gpu.check("IpcCloseMemHandle", opened.value)
        if num_closed < 2:
            assert number(address) == 9
            gpu.check("IpcCloseMemHandle", address)
    peer.tell(0)


def cannot_open(gpu: Driver, peer: Peer, expected: int) -> None:
    """Rank 1 may not open what rank 0 has on device 1."""
    if peer.rank == 0:
        gpu.use(1)
        peer.tell(1, bytes(handle_of(gpu, gpu.memory(PIECE))))
        peer.hear(1)
        return
    handle, address = Handle.from_buffer_copy(peer.hear(0)), ctypes.c_uint64()
    assert gpu.call("IpcOpenMemHandle_v2", ctypes.byref(address), handle, 1) == expected
    peer.tell(0)


def mapped(gpu: Driver, handle: int) -> int:
    address = gpu.made("MemAddressReserve", PIECE, 0, 0, 0)
    gpu.check("MemMap", address, PIECE, 0, handle, 0)
    access = cuda.Access(cuda.Location(1, 0), 3)
    gpu.check("MemSetAccess", address, PIECE, ctypes.byref(access), 1)
    return address


def descriptors(gpu: Driver, peer: Peer) -> None:
    """Memory travels as a descriptor, and lives as long as somebody has it mapped."""
    path = os.environ["RINGCOMM_EMULATOR_BOX"] + "/socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
        if peer.rank == 0:
            prop = cuda.AllocationProp(1, 1, cuda.Location(1, 0))
            handle = gpu.made("MemCreate", PIECE, ctypes.byref(prop), 0)
            address = mapped(gpu, handle)
            put(address, 6)
            end.bind(path)
            end.listen()
            peer.tell(1)
            fd = ctypes.c_int()
            gpu.check("MemExportToShareableHandle", ctypes.byref(fd), handle, 1, 0)
            socket.send_fds(end.accept()[0], [b"fd"], [fd.value])
            gpu.check("MemUnmap", address, PIECE)
            gpu.check("MemRelease", handle)
            peer.tell(1)
            return
        peer.hear(0)
        end.connect(path)
        fds = socket.recv_fds(end, 2, 1)[1]
        handle = gpu.made("MemImportFromShareableHandle", ctypes.c_void_p(fds[0]), 1)
        peer.hear(0)
        address = mapped(gpu, handle)
        gpu.check("MemRelease", handle)
        assert number(address) == 6
        gpu.check("MemUnmap", address, PIECE)
        number(address)  # ends this process


def pieces(gpu: Driver, peer: Peer) -> None:
    """Side by side in one range, each known by its handle, which no other has while it is kept."""

    def attribute(number: int, address: int) -> int:
        value = ctypes.c_uint64()
        results = (ctypes.c_void_p * 1)(ctypes.addressof(value))
        numbers = (ctypes.c_int * 1)(number)
        gpu.check("PointerGetAttributes", 1, numbers, results, address)
        return value.value

    def mapping(address: int) -> tuple[int, int]:
        base, num_bytes = ctypes.c_uint64(), ctypes.c_size_t()
        arguments = (ctypes.byref(base), ctypes.byref(num_bytes), address)
        return gpu.call("MemGetAddressRange_v2", *arguments), base.value

    def put_piece(address: int, handle_types: int) -> int:
        prop = cuda.AllocationProp(1, handle_types, cuda.Location(1, 0))
        handle = gpu.made("MemCreate", PIECE, ctypes.byref(prop), 0)
        gpu.check("MemMap", address, PIECE, 0, handle, 0)
        gpu.check("MemRelease", handle)
        return handle

    first = gpu.made("MemAddressReserve", 3 * PIECE, 0, 0, 0)
    second = first + PIECE
    handles = [put_piece(first, 1), put_piece(second, 0)]
    assert [attribute(14, one) for one in (first, second)] == [1, 0]  # what can be exported
    assert [mapping(one + 5) for one in (first, second)] == [(0, first), (0, second)]
    assert [attribute(11, one + 5) for one in (first, second)] == [first, first]
    assert attribute(12, second) == 3 * PIECE
    assert mapping(second + PIECE)[0] != 0  # nothing is there
    kept = [gpu.made("MemRetainAllocationHandle", second + 5) for _ in range(2)]
    assert kept == [handles[1]] * 2
    assert gpu.call("MemMap", second, PIECE, 0, handles[1], 0) != 0
    assert gpu.call("MemAddressFree", first, 3 * PIECE) != 0
    gpu.check("MemUnmap", second, PIECE)
    assert put_piece(second, 1) != handles[1]
    for handle in kept:
        gpu.check("MemRelease", handle)
    assert gpu.call("MemRelease", handles[1]) != 0
    for one in (first, second):
        gpu.check("MemUnmap", one, PIECE)
    gpu.check("MemAddressFree", first, 3 * PIECE)


def counts(gpu: Driver, peer: Peer) -> None:
    """By name, each call once."""
    before = emulated_gpu.driver_calls()
    status, id_ = ctypes.c_int(), ctypes.c_uint64()
    written = ctypes.byref(status), ctypes.byref(id_)
    gpu.check("StreamGetCaptureInfo_v2", gpu.stream(), *written, None, None, None)
    made = emulated_gpu.driver_calls() - before
    assert made == {"cuStreamCreate": 1, "cuStreamGetCaptureInfo_v2": 1}


RULES_OF_CUDA = [streams, freeing_waits, graphs, spoilt_captures, modes]
DELAYED = [{"DELAY_US": "200"}]


# A program, what it gets, the emulator's settings in each rank, and which ranks it ends.
@pytest.mark.parametrize(
    ("program", "args", "settings", "dead"),
    [
        *((rules, [], DELAYED, []) for rules in (*RULES_OF_CUDA, blocks)),
        (little_memory, [], [{"MEMORY": str(PIECE)}], []),
        (shared_queue, [False], [{}], []),
        (shared_queue, [False], [{"QUEUES": "2"}], []),
        (shared_queue, [True], [{"QUEUES": "1"}], []),
        (lazy_loading, [], [{"LAZY": "1"}], []),
        (counts, [], [{}], []),
        (pieces, [], [{}], []),
        (blocks, [], [{"SMS": "two"}], [0]),
        (streams, [], [{"DIE_AT": "20"}], [0]),
        (dies_in_a_kernel, [], [{"MPS": "0"}] * 2, [0]),
        (opened, [True], [{}] * 2, []),
        (opened, [False], [{}] * 2, []),
        (opened_twice, [False], [{}] * 2, []),
        (opened_twice, [True], [{"REFUSES_REUSED": "1"}] * 2, []),
        (cannot_open, [cuda.NOT_SUPPORTED], [{}, {"IPC": "0"}], []),
        (cannot_open, [cuda.NO_PEER], [{}, {"PEER_ACCESS": "0"}], []),
        (descriptors, [], [{}] * 2, [1]),
    ],
    ids=name_of,
)
def test_rules(
    program: Callable[..., None], args: list[int], settings: Any, dead: list[int], tmp_path: Path
) -> None:
    env = [{f"RINGCOMM_EMULATOR_{name}": value for name, value in own.items()} for own in settings]
    found = run(program, *args, world_size=len(env), folder=tmp_path, env=env, may_die=dead)
    assert [rank for rank, ended in enumerate(found) if ended is None] == dead


@pytest.mark.parametrize(
    ("settings", "is_in_vain"),
    [
        ({}, False),
        ({"MPS": "0"}, True),
        ({"SMS": "1", "BLOCKS_PER_SM": "1"}, True),  # blocks of all processes share the GPU
        ({"REAL_SMS": "1", "BLOCKS_PER_SM": "1"}, True),  # whatever it says that it holds
    ],
    ids=str,
)
def test_kernels_of_processes(settings: dict[str, str], is_in_vain: bool, tmp_path: Path) -> None:
    env = {f"RINGCOMM_EMULATOR_{name}": value for name, value in settings.items()}
    limit_ms = cuda.SHORT_MS if is_in_vain else cuda.LIMIT_MS
    found = run(spins_for_another, limit_ms, world_size=2, folder=tmp_path, env=env)
    assert found == [int(is_in_vain), 0]
