"""Bytes of a FileStore that are not what was written: an error that names them."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from steps import train_step
from torch import Tensor, nn

import ringcomm
from ringcomm.parallel import offload, zero
from ringcomm.parallel.offload import FileStore, file_store
from ringcomm.parallel.offload.store_index import Index

BLOCK = 8192
SIZES = [1, 513, 4096, BLOCK, BLOCK + 1, 3 * BLOCK + 5]


def values(num_elems: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_elems,), generator=generator).to(torch.uint8)


def read(store: FileStore, key: str) -> Tensor:
    dtype, shape = store.spec(key)
    return store.get(key, torch.empty(shape, dtype=dtype)).wait()


def make(folder: Path, **options: Any) -> dict[str, int]:
    """A store of SIZES with two commits; where the last value of each is in its file."""
    store = FileStore(folder, block_bytes=BLOCK, **options)
    for seed in range(2):
        for size in SIZES:
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
    for size in SIZES:
        if key != f"size {size}":
            assert torch.equal(read(store, f"size {size}"), values(size, 1))
    store.close()


@pytest.mark.parametrize("direct", [True, False])
def test_a_flipped_bit_is_found(direct: bool, tmp_path: Path) -> None:
    """https://github.com/ClickHouse/ClickHouse/issues/18135"""
    offsets = make(tmp_path, direct=direct)
    for size in SIZES:
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
    assert all(torch.equal(read(store, f"size {size}"), values(size, 1)) for size in SIZES)


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
