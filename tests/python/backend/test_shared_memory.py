"""Tensors in shared memory: like any others, and what becomes of their memory."""

from __future__ import annotations

import gc
import io
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from shared_tensors import num_peer_regions
from torch import Tensor, nn

import ringcomm
from ringcomm import _C

# ---- the tensors


@pytest.mark.parametrize("dtype", [*oracle.FLOATS, *oracle.INTS, torch.bool, torch.complex64])
def test_like_empty(dtype: torch.dtype) -> None:
    size: Any
    shape: Any
    for size in [(), (0,), (3,), (2, 0, 5), (4, 5, 6)]:
        for shape in [size, (size,), (list(size),)] if size else [((),)]:
            tensor = ringcomm.empty_shared(*shape, dtype=dtype)
            plain = torch.empty(*shape, dtype=dtype)
            assert tensor.shape == plain.shape
            assert tensor.stride() == plain.stride()
            assert (tensor.dtype, tensor.device) == (dtype, plain.device)
            assert tensor.is_leaf
            assert not tensor.requires_grad
            assert ringcomm.is_shared(tensor) == (tensor.numel() > 0)
            assert not ringcomm.is_shared(plain)


def test_defaults_and_gradients() -> None:
    assert ringcomm.empty_shared(2).dtype == torch.get_default_dtype()
    weight = ringcomm.empty_shared(3, 4, requires_grad=True)
    with torch.no_grad():
        weight.fill_(2)
    (weight * weight).sum().backward()
    assert weight.grad is not None
    oracle.assert_equal(weight.grad, torch.full((3, 4), 4.0))
    assert not ringcomm.is_shared(weight.grad)
    assert ringcomm.is_shared(nn.Parameter(weight.detach())[1, 2:])
    with torch.inference_mode():
        assert ringcomm.empty_shared(3).is_inference()


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="-1"):
        ringcomm.empty_shared(3, -1)
    wrong: Any
    for wrong in (2.5, "3", None):
        with pytest.raises(TypeError, match="whole numbers"):
            ringcomm.empty_shared(wrong)
    wrong_dtype: Any = float
    with pytest.raises(TypeError, match="size"):
        ringcomm.empty_shared()
    with pytest.raises(TypeError):
        ringcomm.empty_shared(3, dtype=wrong_dtype)
    with pytest.raises(ValueError, match="there is no default group"):
        ringcomm.empty_shared(3, device="cuda:0")  # of whose ranks?
    with pytest.raises(torch.OutOfMemoryError, match=f"{1 << 50} bytes"):
        ringcomm.empty_shared(1 << 50, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="overflow"):
        ringcomm.empty_shared(1 << 62, 1 << 62)


def test_memory_lives_as_long_as_a_tensor_on_it() -> None:
    gc.collect()
    before = _C.shared_memory_usage()["num_blocks"]
    tensor = ringcomm.empty_shared(100, 100).fill_(5)
    view = tensor[50:, ::2].t()
    storage = view.untyped_storage()
    del tensor
    assert _C.shared_memory_usage()["num_blocks"] == before + 1
    assert (view == 5).all()
    del view
    assert _C.shared_memory_usage()["num_blocks"] == before + 1
    del storage
    assert _C.shared_memory_usage()["num_blocks"] == before


def test_resizing_stays_in_shared_memory() -> None:
    tensor = ringcomm.empty_shared(10).fill_(3)
    tensor.resize_(100_000)
    assert ringcomm.is_shared(tensor)
    assert (tensor[:10] == 3).all()
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(400_000)
    assert ringcomm.is_shared(tensor)


def test_copies_are_ordinary_tensors() -> None:
    tensor = ringcomm.empty_shared(1000).copy_(torch.arange(1000.0))
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    for copy in (torch.load(file), pickle.loads(pickle.dumps(tensor)), tensor.clone()):
        oracle.assert_equal(copy, tensor)
        assert not ringcomm.is_shared(copy)


def run_in_fork(body: Any) -> None:
    """Runs body() in a forked child; fails with what it raises."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        text = "ok"
        try:
            body()
        except BaseException as error:
            text = repr(error)
        os.write(write_end, text.encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as answer:
        said = answer.read()
    os.waitpid(pid, 0)
    assert said == "ok"


def check_fork(rank: int) -> None:
    inherited = ringcomm.empty_shared(1 << 20).fill_(1)
    later = [ringcomm.empty_shared(30_000_000) for _ in range(2)]

    def child() -> None:
        assert not ringcomm.is_shared(inherited)  # the parent's
        inherited[0] = 2
        own = ringcomm.empty_shared(1000).fill_(9)
        assert ringcomm.is_shared(own)
        later.clear()  # frees nothing: the blocks are the parent's
        assert _C.shared_memory_usage()["num_blocks"] == 1

    later[0][::1024] = 4
    run_in_fork(child)
    assert inherited[0] == 2  # shared with the child
    assert (inherited[1:] == 1).all()
    assert (later[0][::1024] == 4).all()
    dist.all_reduce(inherited)
    assert (inherited[1:] == dist.get_world_size()).all()


def test_fork() -> None:
    run_ranks(2, check_fork, fresh=True)


# ---- what is left behind


def check_reuse(rank: int) -> None:
    """Freed and allocated a thousand times: nothing grows, nor what is mapped of peers."""

    generator = torch.Generator().manual_seed(0)

    def turn() -> None:
        num_elems = int(torch.randint(4096, 60_000, (1,), generator=generator))
        tensor = ringcomm.empty_shared(num_elems).fill_(rank + 1)
        dist.all_reduce(tensor)
        assert tensor[0] == tensor[-1] == 3

    for _ in range(20):
        turn()
    gc.collect()
    before = (num_peer_regions(), len(os.listdir("/proc/self/fd")), _C.shared_memory_usage())
    for _ in range(1000):
        turn()
    gc.collect()
    after = (num_peer_regions(), len(os.listdir("/proc/self/fd")), _C.shared_memory_usage())
    for usage in (before[2], after[2]):
        usage.pop("kept_bytes")
    assert after == before
    assert after[0] == 1


def test_nothing_grows() -> None:
    run_ranks(2, check_reuse)


def check_many_regions(rank: int) -> None:
    """Memory that grew region by region; each is fetched by the peers when it is first used."""
    tensors = []
    for i in range(8):
        tensors.append(ringcomm.empty_shared((64 << 20) + i, dtype=torch.uint8))
        part = tensors[-1][-20_000:]
        part.fill_(rank + i)
        dist.all_reduce(part)
        assert (part == 1 + 2 * i).all()
    assert _C.shared_memory_usage()["num_regions"] >= 3
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    num_memfds = sum("memfd:ringcomm" in os.readlink(link) for link in links)
    assert num_memfds == _C.shared_memory_usage()["num_regions"]  # none of peers or groups
    assert num_peer_regions() == num_memfds


def test_many_regions() -> None:
    run_ranks(2, check_many_regions, fresh=True)


def check_groups(rank: int) -> None:
    """Tensors outlive groups; several groups and threads share what is mapped of a peer."""
    tensor = ringcomm.empty_shared(50_000).fill_(rank + 1)
    dist.all_reduce(tensor)
    for _ in range(3):
        group = dist.new_group([0, 1])
        dist.all_reduce(tensor, group=group)
        dist.destroy_process_group(group)
    assert num_peer_regions() == 1
    assert (tensor == 3 * 8).all()
    groups = [dist.new_group([0, 1]) for _ in range(3)]
    tensors = [ringcomm.empty_shared(50_000).fill_(i) for i in range(3)]

    def work(idx: int) -> None:
        for _ in range(20):
            dist.all_reduce(tensors[idx], dist.ReduceOp.AVG, group=groups[idx])

    threads = [threading.Thread(target=work, args=(idx,)) for idx in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for idx, one in enumerate(tensors):
        assert (one == idx).all()


def test_groups_come_and_go() -> None:
    run_ranks(2, check_groups, fresh=True)


# ---- c10d's allocator


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def check_backend_allocator(rank: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    backend = group._get_backend(torch.device("cpu"))
    assert backend.supports_tensor_alloc(torch.device("cpu"))
    assert not backend.supports_tensor_alloc(torch.device("cuda", 0))
    tensor = backend.allocate_tensor(1000, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert (tensor.shape, tensor.dtype) == ((1000,), torch.bfloat16)
    assert ringcomm.is_shared(tensor)
    with pytest.raises(NotImplementedError, match="cuda"):
        backend.allocate_tensor(10, dtype=torch.float32, device=torch.device("cuda"))
    with pytest.raises(ValueError, match="-5"):
        backend.allocate_tensor(-5, dtype=torch.float32, device=torch.device("cpu"))


def test_backend_allocator() -> None:
    run_ranks(2, check_backend_allocator)


def losses_of(rank: int, is_shared: bool) -> list[float]:
    """Losses of FSDP2 over some steps, its communication buffers from the group or not."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    if is_shared:
        for module in (model, *model):
            module.set_allocate_memory_from_process_group_for_comm(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(2 * step + rank))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check_fsdp(rank: int) -> None:
    plain = losses_of(rank, False)
    before = _C.shared_memory_usage()
    assert losses_of(rank, True) == plain
    after = _C.shared_memory_usage()
    assert num_peer_regions() > 0  # so its collectives were direct
    assert after["num_blocks"] <= before["num_blocks"] + 2
    assert plain[-1] < plain[0]


def test_fsdp2_takes_its_buffers_from_the_group() -> None:
    run_ranks(2, check_fsdp, fresh=True)
