"""FileEngine: reads and writes of files in blocks, by threads."""

from __future__ import annotations

import errno
import gc
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ringcomm.parallel.offload import transfers
from ringcomm.parallel.offload.file_store import FileStore
from ringcomm.parallel.offload.transfers import END_OF_FILE, FileEngine, FileTransfer, empty_row

BLOCK = 4096


@pytest.fixture
def fd() -> Iterator[int]:
    with tempfile.TemporaryFile() as file:
        yield file.fileno()


def pattern(num_bytes: int, seed: int) -> Tensor:
    i = torch.arange(num_bytes)
    return (i * 131 + i // 251 + seed).to(torch.uint8)


def write(engine: FileEngine, fd: int, data: Tensor, offset: int = 0) -> int:
    return engine.start(True, fd, data, data.numel(), offset).wait()


def read(engine: FileEngine, fd: int, data: Tensor, offset: int = 0) -> int:
    return engine.start(False, fd, data, data.numel(), offset).wait()


def test_what_was_written_is_read_whatever_the_size_and_the_place(fd: int) -> None:
    engine = FileEngine(BLOCK)
    offset = 3
    for size in (0, 1, 511, 513, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 7 * BLOCK + 13):
        written, found = pattern(size, size), torch.zeros(size, dtype=torch.uint8)
        assert write(engine, fd, written, offset) == 0
        assert read(engine, fd, found, offset) == 0
        assert torch.equal(found, written)
        offset += size


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 4097])
def test_a_checksum_is_the_sum_of_words(size: int) -> None:
    data = bytes(255 - i * i % 251 for i in range(size))
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, size, 8)]
    assert transfers.checksum(memoryview(data)) == sum(words) % 2**64


def test_transfers_of_many_threads_end_and_touch_nothing_else(fd: int) -> None:
    num_threads, num_transfers, size = 4, 25, 3 * BLOCK + 5
    engine = FileEngine(BLOCK)
    good = [0] * num_threads

    def work(thread: int) -> None:
        written = [pattern(size, 1000 * thread + i) for i in range(num_transfers)]
        found = [torch.zeros(size, dtype=torch.uint8) for _ in written]
        places = [size * (thread * num_transfers + i) for i in range(num_transfers)]
        for is_write, rows in ((True, written), (False, found)):
            transfers = [
                engine.start(is_write, fd, row, size, place)
                for row, place in zip(rows, places, strict=True)
            ]
            good[thread] += sum(transfer.wait() == 0 for transfer in transfers)
        good[thread] += sum(map(torch.equal, written, found))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert good == [3 * num_transfers] * num_threads


def test_errors_are_reported_and_end_nothing_else(fd: int) -> None:
    engine = FileEngine(BLOCK)
    data = pattern(10 * BLOCK, 1)
    assert write(engine, -1, data) == errno.EBADF
    assert read(engine, fd, data) == END_OF_FILE
    assert write(engine, fd, data) == 0
    assert read(engine, fd, data, 1) == END_OF_FILE
    with open("/proc/self/exe", "rb") as read_only:
        assert write(engine, read_only.fileno(), data) == errno.EBADF
    with open("/dev/full", "r+b", buffering=0) as full:
        assert write(engine, full.fileno(), data) == errno.ENOSPC
    assert write(engine, fd, data, 5) == 0


def test_blocks_that_are_transferred_in_pieces(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may transfer less than requested; a write of nothing is a full disk."""
    real = {"preadv": os.preadv, "pwritev": os.pwritev}
    for name, move in real.items():

        def some(
            fd: int, views: list[memoryview], offset: int, move: Callable[..., int] = move
        ) -> int:
            return move(fd, [views[0][:1000]], offset)

        monkeypatch.setattr(os, name, some)
    engine = FileEngine(BLOCK)
    data, found = pattern(3 * BLOCK + 7, 4), torch.zeros(3 * BLOCK + 7, dtype=torch.uint8)
    assert write(engine, fd, data) == read(engine, fd, found) == 0
    assert torch.equal(data, found)
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    assert write(engine, fd, data) == errno.ENOSPC


def test_several_may_wait_for_one_transfer(fd: int) -> None:
    engine = FileEngine(BLOCK)
    data = pattern(64 * BLOCK, 2)
    transfer = engine.start(True, fd, data, data.numel(), 0)
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(transfer.wait())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found == [0, 0, 0]
    assert transfer.is_done()


def test_an_engine_ends_when_its_transfers_have(fd: int) -> None:
    engine = FileEngine(BLOCK)
    transfer = engine.start(True, fd, pattern(200 * BLOCK, 3), 200 * BLOCK, 0)  # keeps its memory
    del engine
    gc.collect()
    assert transfer.is_done()
    assert transfer.wait() == 0
    assert not any(thread.name == "ringcomm-file" for thread in threading.enumerate())


def test_fewer_threads_are_enough_and_none_are_not(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, num_left = threading.Thread.start, 0

    def start(thread: threading.Thread) -> None:
        nonlocal num_left
        if num_left == 0:
            raise RuntimeError("can't start new thread")
        num_left -= 1
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="thread ringcomm-file could not be started: can't"):
        FileEngine(BLOCK)
    num_left = 1
    engine = FileEngine(BLOCK)
    assert write(engine, fd, pattern(10 * BLOCK, 5)) == 0


def test_threads_are_small_and_take_no_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[set[signal.Signals]] = []
    sizes: list[int] = []
    real = transfers._work_on

    def work_on(queue: transfers._Queue) -> None:
        real(queue)
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))  # type: ignore[arg-type]

    def start(thread: threading.Thread, real: Callable[..., None] = threading.Thread.start) -> None:
        sizes.append(threading.stack_size(1 << 20))
        real(thread)

    monkeypatch.setattr(transfers, "_work_on", work_on)
    monkeypatch.setattr(threading.Thread, "start", start)
    before = threading.stack_size()
    engine = FileEngine(BLOCK)
    del engine
    gc.collect()
    assert sizes == [1 << 20] * 4
    assert threading.stack_size() == before
    assert {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1} <= masks[0]


def test_a_store_may_be_collected_in_a_thread_of_its_engine(tmp_path: Path) -> None:
    """A garbage collection there neither waits for its own block nor closes the file too early."""
    parts = [FileStore(tmp_path, block_bytes=BLOCK)]
    row = empty_row(1000 * BLOCK, torch.uint8).copy_(pattern(1000 * BLOCK, 1))
    transfer, fd = parts[0].put("a", row), parts[0]._fd
    queue = parts[0]._engine._queue

    class Dropper:
        """In place of a block: drops the last reference to the store and its engine."""

        offset = 0

        def __init__(self) -> None:
            self.store, self.transfer = parts, FileTransfer(1)

        def run(self) -> int:
            self.store.clear()
            gc.collect()
            return 0

    dropper = Dropper()
    queue.put(dropper)  # type: ignore[arg-type]
    assert dropper.transfer.wait() == 0
    transfer.wait()
    for _ in range(3000):
        if not os.path.exists(f"/proc/self/fd/{fd}"):
            break
        time.sleep(0.01)
    else:
        pytest.fail("the file is still open")
    FileStore(tmp_path).close()


def test_a_forked_child_ends_uses_its_own_engines_and_is_told_of_the_parents(fd: int) -> None:
    engine = FileEngine(BLOCK)
    data = pattern(BLOCK, 6)
    assert write(engine, fd, data) == 0
    in_progress, ended = FileTransfer(1), engine.start(True, fd, data, BLOCK, 0)
    ended.wait()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(20)
            with pytest.raises(RuntimeError, match="was forked from the one that opened"):
                engine.start(True, fd, data, BLOCK, 0)
            with pytest.raises(RuntimeError, match="in progress when the process was forked"):
                in_progress.wait()
            assert not in_progress.is_done()
            assert ended.wait() == 0
            del engine
            gc.collect()
            assert write(FileEngine(BLOCK), fd, data) == 0
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert write(engine, fd, data) == 0
