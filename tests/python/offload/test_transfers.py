"""Transfer: reads and writes of files in blocks, by threads."""

from __future__ import annotations

import errno
import gc
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ringcomm.parallel.offload import transfers
from ringcomm.parallel.offload.file_store import FileStore
from ringcomm.parallel.offload.transfers import Transfer, checksum, empty_row

BLOCK = 4096


@pytest.fixture
def fd() -> Iterator[int]:
    with tempfile.TemporaryFile() as file:
        yield file.fileno()


def pattern(num_bytes: int, seed: int) -> Tensor:
    i = torch.arange(num_bytes)
    return (i * 131 + i // 251 + seed).to(torch.uint8)


def checksums(data: Tensor) -> list[int]:
    return [checksum(memoryview(part.numpy())) for part in data.split(BLOCK) if part.numel()]


def start(fd: int, data: Tensor, offset: int = 0, expected: list[int] | None = None) -> Transfer:
    return Transfer("moving x", data, fd, data.numel(), offset, BLOCK, expected)


def write(fd: int, data: Tensor, offset: int = 0) -> None:
    start(fd, data, offset).wait()


def read(fd: int, like: Tensor, offset: int = 0) -> Tensor:
    return start(fd, torch.zeros_like(like), offset, checksums(like)).wait()


def test_what_was_written_is_read_whatever_the_size_and_the_place(fd: int) -> None:
    offset = 3
    for size in (0, 1, 511, 513, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 7 * BLOCK + 13):
        written = pattern(size, size)
        write(fd, written, offset)
        assert torch.equal(read(fd, written, offset), written)
        offset += size


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 4097])
def test_a_checksum_is_the_sum_of_words(size: int) -> None:
    data = bytes(255 - i * i % 251 for i in range(size))
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, size, 8)]
    assert checksum(memoryview(data)) == sum(words) % 2**64


def test_transfers_of_many_threads_end_and_touch_nothing_else(fd: int) -> None:
    num_threads, num_transfers, size = 4, 25, 3 * BLOCK + 5
    good = [0] * num_threads

    def work(thread: int) -> None:
        written = [pattern(size, 1000 * thread + i) for i in range(num_transfers)]
        places = [size * (thread * num_transfers + i) for i in range(num_transfers)]
        pairs = [*zip(written, places, strict=True)]
        for transfer in [start(fd, row, place) for row, place in pairs]:
            transfer.wait()
        found = [start(fd, torch.zeros_like(row), at, checksums(row)) for row, at in pairs]
        good[thread] = sum(map(torch.equal, written, [each.wait() for each in found]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert good == [num_transfers] * num_threads
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("ringcomm-file") == 4  # of the process, for all of its files


def test_errors_are_reported_and_end_nothing_else(fd: int) -> None:
    data = pattern(10 * BLOCK, 1)
    with open("/proc/self/exe", "rb") as exe, open("/dev/full", "r+b", buffering=0) as full:
        cases: list[tuple[Callable[[], object], int]] = [
            (partial(write, -1, data), errno.EBADF),
            (partial(read, fd, data), errno.EIO),
            (partial(write, exe.fileno(), data), errno.EBADF),
            (partial(write, full.fileno(), data), errno.ENOSPC),
        ]
        for call, code in cases:
            with pytest.raises(OSError, match="moving x: ") as caught:
                call()
            assert caught.value.errno == code
    write(fd, data)
    with pytest.raises(OSError, match=f"block at byte {BLOCK} of its file is not what was"):
        start(fd, torch.zeros_like(data), 0, [*checksums(data)[:1], 7, *checksums(data)[2:]]).wait()
    os.ftruncate(fd, 9 * BLOCK + 1)
    with pytest.raises(OSError, match="the file is too short"):
        read(fd, data)
    write(fd, data, 5)


def test_blocks_that_are_transferred_in_pieces(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may transfer less than requested; a write of nothing is a full disk."""
    real = {"preadv": os.preadv, "pwritev": os.pwritev}
    for name, move in real.items():

        def some(
            fd: int, views: list[memoryview], offset: int, move: Callable[..., int] = move
        ) -> int:
            return move(fd, [views[0][:1000]], offset)

        monkeypatch.setattr(os, name, some)
    data = pattern(3 * BLOCK + 7, 4)
    write(fd, data)
    assert torch.equal(read(fd, data), data)
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(OSError, match="the disk is full"):
        write(fd, data)


def test_several_may_wait_for_one_transfer(fd: int) -> None:
    data = pattern(64 * BLOCK, 2)
    transfer = start(fd, data)
    found: list[Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(transfer.wait())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert [each is data for each in found] == [True] * 3
    assert transfer.is_done()


def test_fewer_threads_are_enough_and_none_are_not(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, num_left = threading.Thread.start, 0

    def start_some(thread: threading.Thread) -> None:
        nonlocal num_left
        if num_left == 0:
            raise RuntimeError("can't start new thread")
        num_left -= 1
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    monkeypatch.setattr(transfers, "_queue_of", transfers._queue_of.__wrapped__)
    with pytest.raises(RuntimeError, match="thread ringcomm-file could not be started: can't"):
        write(fd, pattern(10 * BLOCK, 5))
    num_left = 1
    write(fd, pattern(10 * BLOCK, 5))


def test_threads_are_small_and_take_no_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[set[signal.Signals]] = []
    sizes: list[int] = []
    real = threading.Thread.start

    def start_thread(thread: threading.Thread) -> None:
        sizes.append(threading.stack_size(1 << 20))
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start_thread)
    before = threading.stack_size()
    queue, has_run = transfers._queue_of.__wrapped__(-1), threading.Event()

    def look() -> None:
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))  # type: ignore[arg-type]
        has_run.set()

    queue.put(look)
    assert has_run.wait(60)
    assert sizes == [1 << 20] * 4
    assert threading.stack_size() == before
    assert {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1} <= masks[0]


def test_a_store_may_be_collected_in_a_thread_that_moves_blocks(tmp_path: Path) -> None:
    """A garbage collection there neither waits for its own block nor closes the file too early."""
    parts = [FileStore(tmp_path, block_bytes=BLOCK)]
    row = empty_row(1000 * BLOCK, torch.uint8).copy_(pattern(1000 * BLOCK, 1))
    transfer, fd, has_run = parts[0].put("a", row), parts[0]._fd, threading.Event()

    def drop() -> None:
        """Drops the last reference to the store."""
        parts.clear()
        gc.collect()
        has_run.set()

    transfers._queue_of(os.getpid()).put(drop)
    assert has_run.wait(60)
    transfer.wait()
    for _ in range(3000):
        if not os.path.exists(f"/proc/self/fd/{fd}"):
            break
        time.sleep(0.01)
    else:
        pytest.fail("the file is still open")
    FileStore(tmp_path).close()


def test_a_forked_child_has_threads_of_its_own_and_is_told_of_the_parents(fd: int) -> None:
    data = pattern(BLOCK, 6)
    ended, waits = start(fd, data), threading.Event()
    ended.wait()
    for _ in range(4):  # no thread is free
        transfers._queue_of(os.getpid()).put(waits.wait)
    in_progress = start(fd, data)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(20)
            with pytest.raises(RuntimeError, match="in progress when the process was forked"):
                in_progress.wait()
            assert not in_progress.is_done()
            assert ended.wait() is data
            write(fd, data)
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert status == 0
    waits.set()
    assert in_progress.wait() is data
