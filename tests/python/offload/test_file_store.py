"""FileStore: tensors in files; commits, crashes, disks that fail, and bytes that have changed."""

from __future__ import annotations

import errno
import gc
import os
import re
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from steps import train_step
from torch import Tensor, nn

import ringcomm
from ringcomm.parallel import offload, zero
from ringcomm.parallel.offload import FileStore, file_store, store_index
from ringcomm.parallel.offload.store_index import Index
from ringcomm.parallel.offload.transfers import BufferPool, empty_aligned, empty_row, is_aligned

BLOCK = 8192
SIZES = [0, 1, 511, 513, 4095, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 3]


def values(num_elems: int, seed: int = 0, dtype: torch.dtype = torch.uint8) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_elems,), generator=generator).to(dtype)


def read(store: FileStore, key: str) -> Tensor:
    dtype, shape = store.spec(key)
    return store.get(key, torch.empty(shape, dtype=dtype)).wait()


# ---- tensors


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("direct", [True, False])
def test_what_was_put_is_got(direct: bool, keep: bool, tmp_path: Path) -> None:
    store = FileStore(tmp_path, keep=keep, direct=direct, block_bytes=BLOCK, queue_depth=3)
    assert store.is_direct == direct
    for size in SIZES:
        for seed in range(3):  # written over
            store.put(f"size {size}", values(size, seed))
        assert torch.equal(read(store, f"size {size}"), values(size, 2))
    for size in SIZES:
        assert torch.equal(read(store, f"size {size}"), values(size, 2))
    store.close()
    assert (tmp_path / "data").exists() == keep


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
    assert not list(tmp_path.rglob("ringcomm-*"))
    store.put("x", values(3 * BLOCK))
    assert torch.equal(read(store, "x"), values(3 * BLOCK))
    store.close()


def test_shapes_dtypes_and_strides(tmp_path: Path) -> None:
    tensors = [
        torch.tensor(3.5),
        torch.randn(3, 0, 2),
        torch.randn(5, 7, dtype=torch.bfloat16),
        torch.randn(9, 4, dtype=torch.complex64),
        torch.randn(6, 8).t(),
        torch.randn(40)[::3],
        torch.arange(5) > 2,
    ]
    store = FileStore(tmp_path)
    for i, tensor in enumerate(tensors):
        store.put(f"{i}", tensor)
        assert torch.equal(read(store, f"{i}"), tensor)


def test_aligned_memory_is_used_as_it_is(tmp_path: Path) -> None:
    store = FileStore(tmp_path, direct=True)
    row = empty_row(5000, torch.float32)
    assert is_aligned(row)
    assert not is_aligned(row[1:])
    row.copy_(torch.arange(5000.0))
    store.put("x", row[1:]).wait()  # through a copy
    assert torch.equal(store.get("x", row[:4999]).wait(), torch.arange(1.0, 5000.0))
    assert empty_aligned(0).numel() == 4096


def test_a_free_buffer_is_used_again_and_a_busy_one_is_not() -> None:
    pool = BufferPool()
    free, busy = pool.take(5000, torch.float32), pool.take(5000, torch.float32)
    busy_one: Any = SimpleNamespace(handle=SimpleNamespace(is_done=lambda: False))
    pool.give(busy, busy_one)
    assert pool.take(5000, torch.float32).data_ptr() not in (busy.data_ptr(), free.data_ptr())
    pool = BufferPool()
    pool.give(free, None)
    assert pool.take(4999, torch.float32).data_ptr() == free.data_ptr()
    assert pool.num_bytes == 0


def test_transfers_of_one_name_come_in_order(tmp_path: Path) -> None:
    store = FileStore(tmp_path, block_bytes=4096)
    for i in range(50):
        store.put("x", torch.full([3000], i))
    out = torch.empty(3000, dtype=torch.int64)
    transfer = store.get("x", out)
    store.put("x", torch.full([3000], 99))
    assert torch.equal(transfer.wait(), torch.full([3000], 49))
    assert torch.equal(read(store, "x"), torch.full([3000], 99))


def test_a_store_that_is_dropped_ends_well(tmp_path: Path) -> None:
    num_threads = len(os.listdir("/proc/self/task"))
    for _ in range(3):
        store = FileStore(tmp_path, block_bytes=4096)
        for i in range(8):
            store.put(f"{i}", values(1 << 20, i))
        del store
        gc.collect()
    assert len(os.listdir("/proc/self/task")) <= num_threads
    with pytest.raises(KeyError):
        read(FileStore(tmp_path), "0")  # nothing was committed


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 3), st.integers(0, 255)),
        st.sampled_from([("commit",), ("reopen",), ("roll_back",), ("clear",)]),
    ),
    max_size=25,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(operations=OPERATIONS)
def test_it_is_a_dict_with_commits(
    operations: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("store")
    store = FileStore(folder)
    now: dict[str, int] = {}
    commits: list[dict[str, int]] = [{}]
    has_previous = False
    for name, *arguments in operations:
        if name == "put":
            key, value = f"{arguments[0]}", arguments[1]
            store.put(key, torch.full([700 * arguments[0]], value, dtype=torch.uint8))
            now[key], has_previous = value, False
        elif name == "commit":
            commits.append(dict(now))
            store.commit({"number": len(commits) - 1})
            has_previous = len(commits) > 2
        elif name == "clear":
            store.clear()
            now, commits, has_previous = {}, [{}], False
        elif name == "roll_back" and has_previous:
            store.roll_back()
            commits.pop()
            now, has_previous = dict(commits[-1]), False
        elif name == "roll_back":
            with pytest.raises(ValueError, match="no longer has the commit before"):
                store.roll_back()
        else:
            store.close()
            store.close()
            store, now = FileStore(folder), dict(commits[-1])
        assert store.generation == store.info.get("number", 0) == len(commits) - 1
        assert sorted(store.keys()) == sorted(now)
        for key, value in now.items():
            assert (read(store, key) == value).all()
    store.close()


# ---- what fails


def test_damaged_files_are_named(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put("a", values(10_000, 1))
    store.commit()
    store.close()
    os.truncate(tmp_path / "data", 5000)
    with pytest.raises(
        ValueError, match=r"data has 5000 bytes, but its index expects 24576: .*truncated"
    ):
        FileStore(tmp_path)
    for text in ("{", "[]", '{"format": 7}', '{"format": 2}'):
        (tmp_path / "index.1.json").write_text(text)
        with pytest.raises(ValueError, match=r"index.1.json is damaged .* empty folder"):
            FileStore(tmp_path)


def test_a_file_that_is_cut_while_it_is_open(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put("a", values(100_000, 1)).wait()
    os.truncate(tmp_path / "data", 4096)
    with pytest.raises(OSError, match=r"reading a at .*truncated") as caught:
        read(store, "a")
    assert caught.value.errno == errno.EIO


def test_two_stores_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_index, "_LOCK_WAIT_S", 0.1)
    store = FileStore(tmp_path)
    with pytest.raises(OSError, match=r"in use by another FileStore"):
        FileStore(tmp_path)
    FileStore(tmp_path, keep=False).close()  # a file of its own
    store.close()
    FileStore(tmp_path).close()


def test_a_store_waits_for_the_writes_of_the_one_before(tmp_path: Path) -> None:
    """As the kernel lets go of a killed process's file: after its parent has waited for it."""
    store = FileStore(tmp_path)
    store.put("a", values(10, 1))
    store.commit({"step": 1})
    closing = threading.Timer(0.3, store.close)
    closing.start()
    again = FileStore(tmp_path)
    closing.join(timeout=30)
    assert again.info == {"step": 1}
    again.close()


def test_a_forked_child_neither_uses_the_store_nor_holds_its_folder(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put("a", values(10, 1)).wait()
    store.commit({"step": 1})
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with pytest.raises(ValueError, match="closed, or was opened before a fork"):
                store.put("a", values(10, 2))
            os.close(tell)
            os.read(told, 1)  # until the parent has seen that the folder is free
            status = 0
        finally:
            os._exit(status)
    try:
        store.close()
        with pytest.raises(ValueError, match="is closed"):
            store.put("a", values(10, 2))
        again = FileStore(tmp_path)
        assert torch.equal(read(again, "a"), values(10, 1))
        again.close()
    finally:
        os.close(tell)
        os.close(told)
        _, status = os.waitpid(child, 0)
    assert status == 0


class FakeEngine:
    """Its own transfers, which end late without an error, or at once with one."""

    checksums = ()

    def __init__(self, code: int = 0) -> None:
        self.code, self.found = code, list[int]()

    def start(self, is_write: bool, fd: int, *_: Any, **__: Any) -> FakeEngine:
        self.fd = fd
        return self

    def is_done(self) -> bool:
        return self.code != 0

    def wait(self) -> int:
        self.found.append(os.fstat(self.fd).st_size)  # the file is open
        return self.code


def test_a_dropped_store_waits_before_its_file_is_closed(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    engine = FakeEngine()
    store._engine = engine  # type: ignore[assignment]
    fd = store._fd
    store.put("a", values(100))
    store.put("b", values(100))
    assert not engine.found
    del store
    gc.collect()
    assert len(engine.found) == 2
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize(
    ("code", "words"), [(errno.EIO, "Input/output error"), (errno.ENOSPC, "disk is full")]
)
def test_a_disk_that_fails(code: int, words: str, tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put("a", values(100, 1))
    store.commit({"step": 1})
    engine, store._engine = store._engine, FakeEngine(code)  # type: ignore[assignment]
    with pytest.raises(OSError, match=f"writing a at .*{words}") as caught:
        store.put("a", values(100, 2)).wait()
    assert caught.value.errno == code
    store.put("b", values(100, 3))  # nobody waits for it
    with pytest.raises(OSError, match=f"writing . at .*{words}"):
        store.commit({"step": 2})
    store._engine = engine
    with pytest.raises(OSError, match="writing"):  # still
        store.commit({"step": 2})
    with pytest.raises(OSError, match="writing a"):
        read(store, "a")
    assert store.info == {"step": 1}
    store.put("a", values(100, 4))
    store.put("b", values(100, 5))
    store.commit({"step": 2})
    store.close()
    store = FileStore(tmp_path)
    assert torch.equal(read(store, "a"), values(100, 4))


def test_a_limit_of_the_files_size(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
        store = FileStore(tmp_path)
        with pytest.raises(OSError, match="no disk space for a"):
            store.put("a", values(1 << 17))
        store.put("a", values(1 << 10)).wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_wrong_arguments(tmp_path: Path) -> None:
    for options in ({"queue_depth": 0}, {"block_bytes": 0}, {"block_bytes": 5000}):
        with pytest.raises(ValueError, match="positive multiple of 4096"):
            FileStore(tmp_path, **options)  # type: ignore[arg-type]
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        FileStore(tmp_path / "file")
    store = FileStore(tmp_path / "new" / "folder")
    store.put("a", torch.zeros(3))
    with pytest.raises(KeyError, match="no tensor 'b'"):
        store.get("b", torch.zeros(3))
    for other in (torch.zeros(4), torch.zeros(3, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"torch.float32 of shape \(3,\) in the file, got"):
            store.put("a", other)
        with pytest.raises(ValueError, match=r"torch.float32 of shape \(3,\) in the file, got"):
            store.get("a", other)
    with pytest.raises(ValueError, match="contiguous CPU tensor"):
        store.get("a", torch.zeros(6)[::2])
    with pytest.raises(ValueError, match="needs CPU tensors"):
        store.put("c", torch.zeros(3, device="meta"))
    scratch = FileStore(tmp_path, keep=False)
    with pytest.raises(ValueError, match="not support commit"):
        scratch.commit()


# ---- bytes that are not what was written: an error that names them

CHECKED = [1, 513, 4096, BLOCK, BLOCK + 1, 3 * BLOCK + 5]


def make(folder: Path, **options: Any) -> dict[str, int]:
    """A store of CHECKED with two commits; where the last value of each is in its file."""
    store = FileStore(folder, block_bytes=BLOCK, **options)
    for seed in range(2):
        for size in CHECKED:
            store.put(f"size {size}", values(size, seed))
        store.commit()
    store.close()
    index = Index.from_json((folder / "index.0.json").read_text())
    return {
        key: entry.places[entry.current].offset
        for key, entry in index.entries.items()
        if entry.current is not None
    }


@contextmanager
def changed(path: Path, offset: int, found: bytes | None = None) -> Iterator[None]:
    """A context in which a file has other bytes; by default one bit of one byte is flipped."""
    with path.open("r+b") as file:
        file.seek(offset)
        before = file.read(len(found) if found else 1)
        file.seek(offset)
        file.write(found or bytes([before[0] ^ 4]))
    yield
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(before)


def check_only_one_is_damaged(folder: Path, key: str, offset: int, **options: Any) -> None:
    store = FileStore(folder, **options)
    with pytest.raises(OSError, match=rf"reading {key} at .*block at byte {offset} of its file"):
        read(store, key)
    for size in CHECKED:
        if key != f"size {size}":
            assert torch.equal(read(store, f"size {size}"), values(size, 1))
    store.close()


@pytest.mark.parametrize("direct", [True, False])
def test_a_flipped_bit_is_found(direct: bool, tmp_path: Path) -> None:
    """https://github.com/ClickHouse/ClickHouse/issues/18135"""
    offsets = make(tmp_path, direct=direct)
    for size in CHECKED:
        key = f"size {size}"
        for at in {0, size // 2, size - 1}:
            with changed(tmp_path / "data", offsets[key] + at):
                begin = offsets[key] + at // BLOCK * BLOCK
                # Blocks are those of the write, whatever those of the reader are.
                for reader in (BLOCK, 4096, 1 << 20):
                    check_only_one_is_damaged(
                        tmp_path, key, begin, direct=not direct, block_bytes=reader
                    )
    store = FileStore(tmp_path)
    assert all(torch.equal(read(store, f"size {size}"), values(size, 1)) for size in CHECKED)


def test_bytes_behind_a_tensor_do_not_matter(tmp_path: Path) -> None:
    offsets = make(tmp_path, direct=True)
    with changed(tmp_path / "data", offsets["size 513"] + 513):
        assert torch.equal(read(FileStore(tmp_path), "size 513"), values(513, 1))


def test_blocks_from_elsewhere_are_found(tmp_path: Path) -> None:
    """Of another place or another file, of the commit before, or of nothing that was written."""
    offsets = make(tmp_path)
    data = (tmp_path / "data").read_bytes()
    key, longest = f"size {BLOCK}", offsets[f"size {3 * BLOCK + 5}"]
    before = bytes(values(BLOCK, 0).tolist())
    assert before in data
    for found in (data[longest + BLOCK :][:BLOCK], before, bytes(values(BLOCK, 7)), bytes(BLOCK)):
        with changed(tmp_path / "data", offsets[key], found):
            check_only_one_is_damaged(tmp_path, key, offsets[key])


def test_any_changed_byte_of_an_index_is_found(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put("a", values(100))
    store.commit({"step": 1})
    store.close()
    path = tmp_path / "index.1.json"
    for at in range(path.stat().st_size):
        with changed(path, at), pytest.raises(ValueError, match=r"index\.1\.json is damaged"):
            FileStore(tmp_path)
    assert torch.equal(read(FileStore(tmp_path), "a"), values(100))


def test_a_store_that_is_not_kept_has_them_too(tmp_path: Path) -> None:
    store = FileStore(tmp_path, keep=False)
    store.put("a", values(10_000)).wait()
    with open(f"/proc/self/fd/{store._fd}", "r+b", buffering=0) as file:
        file.seek(9_999)
        file.write(b"\0" if values(10_000)[-1] else b"\1")
    with pytest.raises(OSError, match="block at byte 0 of its file") as caught:
        read(store, "a")
    assert caught.value.errno == errno.EIO
    store.put("a", values(10_000, 1))  # which is whole again
    assert torch.equal(read(store, "a"), values(10_000, 1))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(130, 130), nn.Tanh(), nn.Linear(130, 130))


def step(model: nn.Module, optimizer: Any) -> None:
    train_step(model(torch.ones(4, 130)).square().mean(), optimizer)


def test_a_state_of_offload(tmp_path: Path) -> None:
    model = network()
    optimizer = offload.AdamW(model.parameters(), to="nvme", path=tmp_path)
    step(model, optimizer)
    before = {name: value.clone() for name, value in model.named_parameters()}
    for store in file_store._stores:
        store._settle_all()  # writes may be under way
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


def train_on(rank: int, folder: Path, resume: bool) -> str:
    model = network()
    own = offload.AdamW(model.parameters(), to="nvme", path=folder)
    optimizer: Any = zero.shard(model, own, 3, offload_weights=True, resume=resume)
    text = ""
    try:
        step(model, optimizer)
    except (OSError, ringcomm.RingcommError) as error:
        text = f"{type(error).__name__}: {error}"
        torch.distributed.destroy_process_group()
        return text
    optimizer.close()
    return text


def test_a_weight_of_infinity(tmp_path: Path) -> None:
    assert run_ranks(2, train_on, tmp_path, False) == ["", ""]
    folder = tmp_path / "rank1of2"
    index = max(
        (Index.from_json(path.read_text()) for path in folder.glob("index.?.json")),
        key=lambda index: index.generation,
    )
    entry = index.entries["weight.0"]
    assert entry.current is not None
    offset = entry.places[entry.current].offset
    with changed(folder / "data", offset + 3):
        of_peer, own = run_ranks(2, train_on, tmp_path, True)
    assert re.search(rf"^OSError: .*weight.0 at .*block at byte {offset} of its file", own), own
    assert "rank 1" in of_peer, of_peer
