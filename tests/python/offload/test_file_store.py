"""FileStore: tensors in a file; disks that fail, and bytes that have changed."""

from __future__ import annotations

import errno
import gc
import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import in_ranks
from steps import train_step
from torch import Tensor, nn

import ringcomm
from ringcomm.parallel import offload, zero
from ringcomm.parallel.offload import file_store
from ringcomm.parallel.offload.file_store import FileStore
from ringcomm.parallel.offload.transfers import BufferPool, Transfer, empty_row, is_aligned

BLOCK = 8192
SIZES = [0, 1, 511, 513, 4095, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 3]


def values(num_elems: int, seed: int = 0, dtype: torch.dtype = torch.uint8) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_elems,), generator=generator).to(dtype)


def read(store: FileStore, key: str) -> Tensor:
    return store.get(key, empty_row(*store.spec(key))).wait()


def put(store: FileStore, key: str, value: Tensor) -> Transfer:
    row = empty_row(value.numel(), value.dtype)
    return store.put(key, row.copy_(value))


# ---- tensors


@pytest.fixture(params=[True, False], ids=["direct", "cached"])
def direct(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the file system takes O_DIRECT."""
    real, takes_direct = os.open, bool(request.param)

    def refuse(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT and not takes_direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)
    return takes_direct


def test_what_was_put_is_got(direct: bool, tmp_path: Path) -> None:
    store = FileStore(tmp_path, block_bytes=BLOCK)
    assert store.is_direct == direct
    for size in SIZES:
        for seed in range(3):  # written over
            put(store, f"size {size}", values(size, seed))
        assert torch.equal(read(store, f"size {size}"), values(size, 2))
    for size in SIZES:
        assert torch.equal(read(store, f"size {size}"), values(size, 2))
    assert not list(tmp_path.iterdir())
    store.close()


@pytest.mark.parametrize("refusal", [errno.EOPNOTSUPP, errno.EISDIR])
@pytest.mark.parametrize("refuses_direct", [False, True])
def test_a_file_system_without_unnamed_files(
    refusal: int, refuses_direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS and FUSE are: https://github.com/maxkuminov/obsidian-mcp/issues/103"""
    real = os.open

    def refuse(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(refusal, os.strerror(refusal))
        fd = real(path, flags, *mode)
        if refuses_direct and flags & os.O_DIRECT:  # after it has made the file, as Linux does
            os.close(fd)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return fd

    monkeypatch.setattr(os, "open", refuse)
    store = FileStore(tmp_path, block_bytes=BLOCK)
    assert store.is_direct != refuses_direct
    assert not list(tmp_path.iterdir())
    put(store, "x", values(3 * BLOCK))
    assert torch.equal(read(store, "x"), values(3 * BLOCK))
    store.close()


def test_dtypes(tmp_path: Path) -> None:
    tensors = [
        torch.randn(35, dtype=torch.bfloat16),
        torch.randn(36, dtype=torch.complex64),
        torch.arange(5) > 2,
    ]
    store = FileStore(tmp_path)
    for i, tensor in enumerate(tensors):
        put(store, f"{i}", tensor)
        assert torch.equal(read(store, f"{i}"), tensor)
    row = empty_row(5000, torch.float32)
    assert is_aligned(row)
    assert not is_aligned(row[1:])


def test_a_free_buffer_is_used_again_and_a_busy_one_is_not() -> None:
    pool = BufferPool()
    free, busy = pool.take(5000, torch.float32), pool.take(5000, torch.float32)
    busy_one: Any = SimpleNamespace(is_done=lambda: False)
    pool.give(busy, busy_one)
    assert pool.take(5000, torch.float32).data_ptr() not in (busy.data_ptr(), free.data_ptr())
    pool = BufferPool()
    pool.give(free, None)
    assert pool.take(4999, torch.float32).data_ptr() == free.data_ptr()
    assert pool.num_bytes == 0


def test_transfers_of_one_name_come_in_order(tmp_path: Path) -> None:
    store = FileStore(tmp_path, block_bytes=4096)
    for i in range(50):
        put(store, "x", torch.full([3000], i))
    transfer = store.get("x", empty_row(3000, torch.int64))
    put(store, "x", torch.full([3000], 99))
    assert torch.equal(transfer.wait(), torch.full([3000], 49))
    assert torch.equal(read(store, "x"), torch.full([3000], 99))


def test_a_store_that_is_dropped_ends_well(tmp_path: Path) -> None:
    put(FileStore(tmp_path), "a", values(1)).wait()
    num_threads = threading.active_count()
    for _ in range(3):
        store = FileStore(tmp_path, block_bytes=4096)
        for i in range(8):
            put(store, f"{i}", values(1 << 20, i))
        del store
        gc.collect()
    assert threading.active_count() == num_threads  # those of the process
    with pytest.raises(KeyError):
        read(FileStore(tmp_path), "0")  # a store of its own


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(puts=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 255)), max_size=25))
def test_it_is_a_dict(puts: list[Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("store")
    # Two stores in a folder share nothing.
    stores, expected = [FileStore(folder), FileStore(folder)], [dict[str, int](), dict[str, int]()]
    for number, value in puts:
        for store, now, byte in zip(stores, expected, (value, 255 - value), strict=True):
            put(store, f"{number}", torch.full([700 * number], byte, dtype=torch.uint8))
            now[f"{number}"] = byte
            assert all((read(store, key) == value).all() for key, value in now.items())
    for store in stores:
        store.close()
        store.close()


# ---- what fails


def test_a_file_that_is_cut_while_it_is_open(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    put(store, "a", values(100_000, 1)).wait()
    os.ftruncate(store._fd, 4096)
    with pytest.raises(OSError, match=r"reading a at .*truncated") as caught:
        read(store, "a")
    assert caught.value.errno == errno.EIO


def test_a_forked_child_neither_uses_the_store_nor_holds_its_file(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    put(store, "a", values(10, 1)).wait()
    fd = store._fd
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with pytest.raises(ValueError, match="closed, or was opened before a fork"):
                put(store, "a", values(10, 2))
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(fd)
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert torch.equal(read(store, "a"), values(10, 1))
    store.close()
    with pytest.raises(ValueError, match="is closed"):
        put(store, "a", values(10, 2))


def test_a_dropped_store_waits_before_its_file_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, found, may_end = FileStore(tmp_path), list[int](), threading.Event()
    fd, real = store._fd, os.pwritev

    def late(fd: int, *given: Any) -> int:
        may_end.wait(60)
        found.append(os.fstat(fd).st_size)  # the file is open
        return real(fd, *given)

    monkeypatch.setattr(os, "pwritev", late)
    put(store, "a", values(100))
    put(store, "b", values(100))
    assert not found
    threading.Timer(0.2, may_end.set).start()
    del store
    gc.collect()
    assert len(found) == 2
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize(
    ("code", "words"), [(errno.EIO, "Input/output error"), (errno.ENOSPC, "disk is full")]
)
def test_a_disk_that_fails(
    code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path)
    put(store, "a", values(100, 1)).wait()

    def fail(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail)
        with pytest.raises(OSError, match=f"writing a at .*{words}") as caught:
            put(store, "a", values(100, 2)).wait()
        assert caught.value.errno == code
        put(store, "b", values(100, 3)).wait_for_end()  # nobody asks for its error
    for key in ("a", "b"):
        for _ in range(2):  # still
            with pytest.raises(OSError, match=f"writing {key} at .*{words}"):
                read(store, key)
    put(store, "a", values(100, 4))
    assert torch.equal(read(store, "a"), values(100, 4))


def test_a_limit_of_the_files_size(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
        store = FileStore(tmp_path)
        with pytest.raises(OSError, match="no disk space for a"):
            put(store, "a", values(1 << 17))
        put(store, "a", values(1 << 10)).wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_wrong_arguments(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        FileStore(tmp_path / "file")
    store = FileStore(tmp_path / "new" / "folder")
    put(store, "a", torch.zeros(3))
    with pytest.raises(KeyError, match="'b'"):
        store.get("b", empty_row(3, torch.float32))
    for other in (torch.zeros(4), torch.zeros(3, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"a must be a row of 3 torch.float32, aligned"):
            put(store, "a", other)
    with pytest.raises(ValueError, match="aligned"):
        store.get("a", empty_row(4, torch.float32)[1:])
    with pytest.raises(AttributeError, match=r"FileStore is gone; use torch\.save"):
        offload.FileStore  # noqa: B018


# ---- bytes that are not what was written: an error that names them

CHECKED = [1, 513, 4096, BLOCK, BLOCK + 1, 3 * BLOCK + 5]


def make(folder: Path) -> FileStore:
    """A store of CHECKED, each of them written twice."""
    store = FileStore(folder, block_bytes=BLOCK)
    for seed in range(2):
        for size in CHECKED:
            put(store, f"size {size}", values(size, seed)).wait()
    return store


@contextmanager
def changed(store: FileStore, offset: int, found: bytes | None = None) -> Iterator[None]:
    """A context in which the file has other bytes; by default one bit of one byte is flipped."""
    with open(f"/proc/self/fd/{store._fd}", "r+b", buffering=0) as file:
        file.seek(offset)
        before = file.read(len(found) if found else 1)
        file.seek(offset)
        file.write(found or bytes([before[0] ^ 4]))
        yield
        file.seek(offset)
        file.write(before)


def check_only_one_is_damaged(store: FileStore, key: str, offset: int) -> None:
    with pytest.raises(
        OSError, match=rf"reading {key} at .*block at byte {offset} of its file"
    ) as e:
        read(store, key)
    assert e.value.errno == errno.EIO
    for size in CHECKED:
        if key != f"size {size}":
            assert torch.equal(read(store, f"size {size}"), values(size, 1))


def test_a_flipped_bit_is_found(direct: bool, tmp_path: Path) -> None:
    """https://github.com/ClickHouse/ClickHouse/issues/18135"""
    store = make(tmp_path)
    for size in CHECKED:
        key = f"size {size}"
        begin = store._entries[key].offset
        for at in {0, size // 2, size - 1}:
            with changed(store, begin + at):
                check_only_one_is_damaged(store, key, begin + at // BLOCK * BLOCK)
        assert torch.equal(read(store, key), values(size, 1))
        with changed(store, begin):
            put(store, key, values(size, 2)).wait()  # which is whole again
            assert torch.equal(read(store, key), values(size, 2))
        put(store, key, values(size, 1))


def test_bytes_behind_a_tensor_do_not_matter(tmp_path: Path) -> None:
    store = make(tmp_path)
    assert store.is_direct
    with changed(store, store._entries["size 513"].offset + 513):
        assert torch.equal(read(store, "size 513"), values(513, 1))


def test_blocks_from_elsewhere_are_found(tmp_path: Path) -> None:
    """Of another place, of the write before, or of nothing that was written."""
    store = make(tmp_path)
    key, longest = f"size {BLOCK}", values(3 * BLOCK + 5, 1)
    offset, before = store._entries[key].offset, bytes(values(BLOCK, 0).tolist())
    for found in (
        bytes(longest[BLOCK : 2 * BLOCK].tolist()),
        before,
        bytes(values(BLOCK, 7).tolist()),
        bytes(BLOCK),
    ):
        with changed(store, offset, found):
            check_only_one_is_damaged(store, key, offset)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(130, 130), nn.Tanh(), nn.Linear(130, 130))


def step(model: nn.Module, optimizer: Any) -> None:
    train_step(model(torch.ones(4, 130)).square().mean(), optimizer)


def test_a_state_of_offload(tmp_path: Path) -> None:
    model = network()
    optimizer = offload.Offloaded(torch.optim.AdamW(model.parameters()), to="nvme", path=tmp_path)
    step(model, optimizer)
    before = {name: value.clone() for name, value in model.named_parameters()}
    for store in file_store._stores:
        for key in [*store._pending]:
            store._settle(key)  # writes may be under way
    for descriptor in os.listdir("/proc/self/fd"):
        path = Path("/proc/self/fd") / descriptor
        if not os.path.exists(path) or str(tmp_path) not in os.readlink(path):
            continue
        with path.open("r+b", buffering=0) as file:
            file.seek(4)
            byte = file.read(1)[0]
            file.seek(4)
            file.write(bytes([byte ^ 64]))
    with pytest.raises(OSError, match="block at byte 0 of its file"):
        step(model, optimizer)
    large = [name for name, value in before.items() if value.dim() == 2]
    assert torch.equal(dict(model.named_parameters())[large[0]], before[large[0]])


@in_ranks(2)
def test_a_weight_of_infinity(rank: int, tmp_path: Path) -> None:
    model = network()
    own = offload.Offloaded(torch.optim.AdamW(model.parameters()), to="nvme", path=tmp_path)
    optimizer: Any = zero.shard(model, own, 3, offload_weights=True)
    step(model, optimizer)
    store, words = optimizer._tier.store, "rank 1"
    store._settle("weight.0")  # its write may be under way
    offset = store._entries["weight.0"].offset
    if rank == 1:
        words = rf"weight.0 at .*block at byte {offset} of its file"
    kind = OSError if rank == 1 else ringcomm.RingcommError
    with (
        changed(store, offset + 3) if rank == 1 else nullcontext(),
        pytest.raises(kind, match=words),
    ):
        step(model, optimizer)
    dist.destroy_process_group()
