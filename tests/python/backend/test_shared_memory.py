"""Tensors in shared memory: like any others, used directly by collectives, and freed.

Results with any tensors shared or not: test_collectives.py and test_random_sequences.py.
"""

from __future__ import annotations

import gc
import io
import itertools
import os
import pickle
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from curves import DIM, NUM_OUTPUTS, train
from ranks import in_ranks, run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import ringcomm
from ringcomm import _C

DTYPES = (torch.float32, torch.bfloat16)


def shared_copy(values: Tensor) -> Tensor:
    return ringcomm.empty_shared(values.shape, dtype=values.dtype).copy_(values)


def direct(field: str = "num_calls") -> int:
    """How often this process has run all_reduce directly, or what it sent so."""
    return ringcomm.stats().get(("all_reduce", "direct"), {}).get(field, 0)


def num_peer_regions() -> int:
    """How many regions of peers' shared memory this process has mapped."""
    maps = Path("/proc/self/maps").read_text()
    return maps.count("memfd:ringcomm-shared") - _C.shared_memory_usage()["num_regions"]


# ---- the tensors


def test_like_empty() -> None:
    shapes: list[tuple[Any, ...]] = [((),), (0,), (3,), (2, 0, 5), ((4, 5, 6),), ([4, 5, 6],)]
    for dtype, shape in itertools.product((torch.float32, torch.bool, torch.complex64), shapes):
        tensor = ringcomm.empty_shared(*shape, dtype=dtype)
        plain = torch.empty(*shape, dtype=dtype)
        assert (tensor.shape, tensor.stride()) == (plain.shape, plain.stride())
        assert (tensor.dtype, tensor.device) == (dtype, plain.device)
        assert ringcomm.is_shared(tensor) == (tensor.numel() > 0)
        assert not ringcomm.is_shared(plain)
    assert ringcomm.empty_shared(2).dtype == torch.get_default_dtype()
    weight = ringcomm.empty_shared(3, 4, requires_grad=True)
    assert weight.is_leaf
    assert weight.requires_grad
    assert ringcomm.is_shared(nn.Parameter(weight.detach())[1, 2:])
    with torch.inference_mode():
        assert ringcomm.empty_shared(3).is_inference()


def test_wrong_arguments() -> None:
    wrong: list[tuple[tuple[Any, ...], dict[str, Any], Any, str]] = [
        ((3, -1), {}, ValueError, "-1"),
        ((2.5,), {}, TypeError, "whole numbers"),
        ((None,), {}, TypeError, "whole numbers"),
        ((), {}, TypeError, "size"),
        ((3,), {"dtype": float}, TypeError, "dtype"),
        ((3,), {"device": "cuda:0"}, ValueError, "there is no default group"),  # of whose ranks?
        ((1 << 50,), {"dtype": torch.uint8}, torch.OutOfMemoryError, f"{1 << 50} bytes"),
        ((1 << 62, 1 << 62), {}, RuntimeError, "overflow"),
    ]
    for size, options, error, words in wrong:
        with pytest.raises(error, match=words):
            ringcomm.empty_shared(*size, **options)


def test_memory_lives_as_long_as_a_tensor_on_it() -> None:
    gc.collect()
    before = _C.shared_memory_usage()["num_blocks"]
    tensor = ringcomm.empty_shared(100, 100).fill_(5)
    view = tensor[50:, ::2].t()
    storage = view.untyped_storage()
    del tensor
    assert (view == 5).all()
    del view
    assert _C.shared_memory_usage()["num_blocks"] == before + 1
    del storage
    assert _C.shared_memory_usage()["num_blocks"] == before


def test_resizing_stays_in_shared_memory_and_copies_do_not() -> None:
    tensor = ringcomm.empty_shared(10).fill_(3)
    tensor.resize_(100_000)
    assert ringcomm.is_shared(tensor)
    assert (tensor[:10] == 3).all()
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(400_000)
    assert ringcomm.is_shared(tensor)
    tensor.fill_(1)
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    for copy in (torch.load(file), pickle.loads(pickle.dumps(tensor)), tensor.clone()):
        oracle.assert_equal(copy, tensor)
        assert not ringcomm.is_shared(copy)


@in_ranks(2)
def test_fork(rank: int) -> None:
    """A child shares what it inherits, and has memory of its own."""
    inherited = ringcomm.empty_shared(1 << 20).fill_(1)
    later = [ringcomm.empty_shared(30_000_000) for _ in range(2)]
    later[0][::1024] = 4
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            assert not ringcomm.is_shared(inherited)  # the parent's
            inherited[0] = 2
            own = ringcomm.empty_shared(1000).fill_(9)
            assert ringcomm.is_shared(own)
            later.clear()  # frees nothing: the blocks are the parent's
            code = int(_C.shared_memory_usage()["num_blocks"] != 1)
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert inherited[0] == 2  # shared with the child
    assert (inherited[1:] == 1).all()
    assert (later[0][::1024] == 4).all()
    dist.all_reduce(inherited)
    assert (inherited[1:] == dist.get_world_size()).all()


# ---- collectives run directly on them


@in_ranks((2, 3, 4))
def test_large_calls_are_direct(rank: int) -> None:
    """From 8 or 64 KiB on, with the bits and the bytes of two_shot; views too, of one piece."""
    world_size = dist.get_world_size()
    for num_elems, dtype in itertools.product((100, 20_000, 120_000), DTYPES):
        values = oracle.floats(rank, num_elems, dtype)
        tensor, staged = shared_copy(values), values.clone()
        num_calls, sent_bytes = direct(), direct("sent_bytes")
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        is_large = tensor.nbytes >= (8 if world_size == 2 else 64) << 10
        assert direct() - num_calls == is_large
        if num_elems == 120_000:  # which 2, 3 and 4 ranks divide
            expected = 2 * (world_size - 1) * tensor.nbytes // world_size
            assert direct("sent_bytes") - sent_bytes == expected
        if is_large:
            dist.all_reduce(staged, dist.ReduceOp.AVG)
            oracle.assert_equal(tensor, staged)
    views: list[Callable[[Tensor], Tensor]] = [
        lambda base: base[7:40_007].view(200, 200),
        lambda base: base[: 2 * 40_000 : 2].view(200, 200),
        lambda base: base[:40_000].view(200, 200).t(),
    ]
    for view_of in views:
        view = view_of(ringcomm.empty_shared(100_000)).fill_(rank)
        num_calls = direct()
        dist.all_reduce(view)
        assert (view == sum(range(world_size))).all()
        assert direct() - num_calls == view.is_contiguous()


@in_ranks(2, fresh=True)
@pytest.mark.parametrize("op", ["reduce_scatter", "all_gather", "broadcast"])
def test_buffers_are_read_where_they_are(rank: int, op: str) -> None:
    """No rank maps a peer's memory but to read the buffers of this collective."""
    large = ringcomm.empty_shared(120_000).fill_(1)
    output = torch.empty(240_000)
    dist.reduce(large, 0)
    assert num_peer_regions() == 0
    if op == "reduce_scatter":
        dist.reduce_scatter_tensor(output[:60_000], large)
    elif op == "all_gather":
        dist.all_gather_into_tensor(output, large)
    else:
        dist.broadcast(large, 0)
    assert num_peer_regions() == (op != "broadcast" or rank != 0)


# ---- failures


@pytest.mark.parametrize(("world_size", "before_mapping"), [(3, False), (2, True)])
def test_a_peer_dies(world_size: int, before_mapping: bool) -> None:
    run_ranks(world_size, check_death, before_mapping, fresh=True, may_die=[1])


def all_reduce_often(tensor: Tensor) -> None:
    for _ in range(1000):
        dist.all_reduce(tensor)


def check_death(rank: int, before_mapping: bool) -> None:
    """Also of a peer that has died when its memory is first wanted."""
    tensor = ringcomm.empty_shared(50_000).fill_(1)
    if not before_mapping:
        dist.all_reduce(tensor)
    dist.barrier()
    if rank == 1:
        if before_mapping:
            dist.all_reduce(tensor, async_op=True)  # publishes where its tensor is
            time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5 if before_mapping else 0.0)
    with pytest.raises(ringcomm.PeerDiedError) as caught:
        all_reduce_often(tensor)
    assert caught.value.rank == 1
    address = tensor.data_ptr()
    del tensor, caught
    gc.collect()
    # A late peer may write there.
    assert before_mapping or ringcomm.empty_shared(50_000).data_ptr() != address


# ---- what is left behind


@in_ranks(2, fresh=True)
def test_groups(rank: int) -> None:
    """Tensors outlive groups; all groups share what is mapped of a peer."""
    tensor = ringcomm.empty_shared(50_000).fill_(rank + 1)
    dist.all_reduce(tensor)
    for _ in range(3):
        group = dist.new_group([0, 1])
        dist.all_reduce(tensor, group=group)
        dist.destroy_process_group(group)
    assert num_peer_regions() == 1
    assert (tensor == 3 * 8).all()


# ---- c10d's allocator


def losses_of_fsdp2(rank: int, is_shared: bool) -> list[float]:
    """Its communication buffers from the group or not."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(DIM, 512), nn.Tanh(), nn.Linear(512, NUM_OUTPUTS))
    for module in (model[0], model[2], model):
        fully_shard(module)
        module.set_allocate_memory_from_process_group_for_comm(is_shared)
    return train(model, rank, dist.get_world_size())


@in_ranks(2, fresh=True)
def test_allocator(rank: int) -> None:
    cpu = torch.device("cpu")
    backend: Any = dist.group.WORLD._get_backend(cpu)  # type: ignore[union-attr]
    assert backend.supports_tensor_alloc(cpu)
    assert not backend.supports_tensor_alloc(torch.device("cuda", 0))
    tensor = backend.allocate_tensor(1000, dtype=torch.bfloat16, device=cpu)
    assert (tensor.shape, tensor.dtype) == ((1000,), torch.bfloat16)
    assert ringcomm.is_shared(tensor)
    with pytest.raises(NotImplementedError, match="cuda"):
        backend.allocate_tensor(10, dtype=torch.float32, device=torch.device("cuda"))
    with pytest.raises(ValueError, match="-5"):
        backend.allocate_tensor(-5, dtype=torch.float32, device=cpu)
    plain = losses_of_fsdp2(rank, False)
    before = _C.shared_memory_usage()
    assert losses_of_fsdp2(rank, True) == plain
    assert num_peer_regions() > 0  # so its collectives were direct
    assert _C.shared_memory_usage()["num_blocks"] <= before["num_blocks"] + 2
