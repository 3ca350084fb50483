"""Tensors in shared memory: like any others, used directly by collectives, and freed.

Results with any tensors shared or not: test_collectives.py and test_random_sequences.py.
"""

from __future__ import annotations

import gc
import io
import itertools
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from curves import DIM, NUM_OUTPUTS, train
from machines import comes_true
from rank_programs import run_command
from ranks import in_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import ringcomm
from ringcomm import _C
from ringcomm.measure.machine import mapped_memory

DTYPES = (torch.float32, torch.bfloat16)


def shared_copy(values: Tensor) -> Tensor:
    return ringcomm.empty_shared(values.shape, dtype=values.dtype).copy_(values)


def direct() -> int:
    """How often this process has run all_reduce directly."""
    return ringcomm.stats().get(("all_reduce", "direct"), {}).get("num_calls", 0)


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
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    machine_bytes = sum(int(fields[name].split()[0]) << 10 for name in ("MemTotal", "SwapTotal"))
    wrong: list[tuple[tuple[Any, ...], dict[str, Any], Any, str]] = [
        ((3, -1), {}, ValueError, "-1"),
        ((2.5,), {}, TypeError, "whole numbers"),
        ((None,), {}, TypeError, "whole numbers"),
        ((), {}, TypeError, "size"),
        ((3,), {"dtype": float}, TypeError, "dtype"),
        ((3,), {"device": "cuda:0"}, ValueError, "there is no default group"),  # of whose ranks?
        ((1 << 50,), {"dtype": torch.uint8}, torch.OutOfMemoryError, rf"{1 << 20} GiB\) of"),
        # The file itself may be as large; what fills it is killed.
        ((machine_bytes + 1,), {"dtype": torch.uint8}, torch.OutOfMemoryError, "this machine has"),
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


# ---- collectives run directly on them


@in_ranks((2, 3))
def test_large_calls_are_direct(rank: int) -> None:
    """From 8 or 64 KiB on, with the bits of two_shot; views too, of one piece."""
    world_size = dist.get_world_size()
    for num_elems, dtype in itertools.product((100, 20_000, 120_000), DTYPES):
        values = oracle.floats(rank, num_elems, dtype)
        tensor, staged = shared_copy(values), values.clone()
        num_calls = direct()
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        is_large = tensor.nbytes >= (8 if world_size == 2 else 64) << 10
        assert direct() - num_calls == is_large
        if is_large:
            dist.all_reduce(staged, dist.ReduceOp.AVG)
            oracle.assert_equal(tensor, staged)
    for is_turned in (False, True):
        view = ringcomm.empty_shared(100_000)[7:40_007].view(200, 200).fill_(rank)
        view = view.t() if is_turned else view
        num_calls = direct()
        dist.all_reduce(view)
        assert (view == sum(range(world_size))).all()
        assert direct() - num_calls == (not is_turned)


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


# ---- c10d's allocator


@in_ranks(2, fresh=True)
def test_allocator(rank: int) -> None:
    cpu = torch.device("cpu")
    backend: Any = dist.group.WORLD._get_backend(cpu)  # type: ignore[union-attr]
    assert backend.supports_tensor_alloc(cpu)
    cuda = torch.device("cuda", 0)
    # Of a torch for GPUs, the accelerator is CUDA also where there is no GPU.
    assert backend.supports_tensor_alloc(cuda) == (torch.version.cuda is not None)
    tensor = backend.allocate_tensor(1000, dtype=torch.bfloat16, device=cpu)
    assert (tensor.shape, tensor.dtype) == ((1000,), torch.bfloat16)
    assert ringcomm.is_shared(tensor)
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match=r"CUDA|NVIDIA"):
            backend.allocate_tensor(10, dtype=torch.float32, device=cuda)
    with pytest.raises(RuntimeError, match="-5"):
        backend.allocate_tensor(-5, dtype=torch.float32, device=cpu)
    model: Any = nn.Sequential(nn.Linear(DIM, 512), nn.Tanh(), nn.Linear(512, NUM_OUTPUTS))
    for module in (model[0], model[2], model):
        fully_shard(module)
        module.set_allocate_memory_from_process_group_for_comm(True)
    train(model, rank, dist.get_world_size())
    assert num_peer_regions() > 0  # so its collectives were direct


# ---- where the kernel may refuse a page at its first access

RESIDENT = """
import os, re, tempfile
import torch, torch.distributed as dist, ringcomm
store = tempfile.mktemp()
rank = 0 if os.fork() else 1
dist.init_process_group("ringcomm", f"file://{store}", rank=rank, world_size=2)
dist.barrier()
kept = ringcomm.empty_shared(4 << 20, dtype=torch.uint8)
maps = open("/proc/self/smaps").read()
found = re.findall(r"memfd:(ringcomm\\S*) .*\\n(?:\\w+: .*\\n)*?Rss: +(\\d+)", maps)
if rank == 0:
    print(sum(int(kib) for name, kib in found if name == "ringcomm"))
    print(sum(int(kib) for name, kib in found if name == "ringcomm-shared"))
dist.destroy_process_group()
if rank == 1:
    os._exit(0)
assert os.wait()[1] == 0
"""


@pytest.mark.parametrize("policy", [0, 2])
def test_pages_are_taken_early_where_they_may_be_refused(tmp_path: Path, policy: int) -> None:
    """With vm.overcommit_memory=2 (a file in its place); else unused memory costs nothing."""
    (tmp_path / "policy").write_text(f"{policy}\n")
    (tmp_path / "program.py").write_text(RESIDENT)
    mount = f"mount --bind {tmp_path}/policy /proc/sys/vm/overcommit_memory"
    shell = f"{mount} || exit 77; exec {sys.executable} {tmp_path}/program.py"
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", shell]
    done = run_command(*command)
    if done.returncode == 77 or (done.returncode == 1 and not done.stdout):
        pytest.skip("this user may not make namespaces")
    assert done.returncode == 0
    group_kib, shared_kib = map(int, done.stdout.split())
    if policy == 2:
        assert group_kib >= 2048 + 512  # this rank's board, and its link of a ring
        assert shared_kib >= 4096
    else:
        assert group_kib < 128
        assert shared_kib < 128


# ---- what groups take


@in_ranks(2, fresh=True)
def test_idle_groups_open_nothing_and_use_maps_nothing_more(rank: int) -> None:
    def opened() -> list[int]:
        return [len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task")]

    dist.all_reduce(torch.zeros(256))
    mapped = mapped_memory()["mapped_bytes"]
    assert mapped > 0
    for num_elems in (1 << 18, 1 << 22):  # all algorithms, and messages
        buffer = torch.zeros(num_elems)
        dist.all_reduce(buffer)
        dist.broadcast(buffer, 0)
        sending = dist.isend(buffer, 1 - rank)
        dist.recv(torch.empty_like(buffer), 1 - rank)
        assert sending is not None
        sending.wait()
    assert mapped_memory()["mapped_bytes"] == mapped
    before = opened()
    groups = [dist.new_group() for _ in range(3)]
    assert opened() == before
    dist.all_reduce(torch.zeros(256), group=groups[0])
    assert opened() == before


# ---- what they hold of the machine's memory: before their first call, used, and idle

NUM_GROUPS = 4
NUM_ELEMS = 1 << 20


def held_bytes() -> int:
    """By this rank: its share of the pages that ranks share."""
    return mapped_memory()["share_bytes"]


def use(group: Any, rank: int) -> None:
    """Through regions and links."""
    x = torch.arange(NUM_ELEMS, dtype=torch.int32) + rank
    dist.all_reduce(x, group=group)
    assert torch.equal(x, 2 * torch.arange(NUM_ELEMS, dtype=torch.int32) + 1)
    got = torch.zeros(NUM_ELEMS, dtype=torch.int32)
    work = dist.isend(x + rank, 1 - rank, group=group)
    dist.recv(got, 1 - rank, group=group)
    assert work is not None
    work.wait()
    assert torch.equal(got, x + 1 - rank)


@pytest.mark.slow
@in_ranks(2, fresh=True)
def test_idle_groups_return_what_they_used(rank: int) -> None:
    """https://github.com/vllm-project/vllm/pull/46234: idle communicators kept their buffers."""
    groups = [dist.new_group(backend="ringcomm") for _ in range(NUM_GROUPS)]
    at_first = held_bytes()
    for group in groups:
        use(group, rank)
    used = held_bytes() - at_first
    assert used > NUM_GROUPS << 20
    # More shared memory than is kept for the next buffers, and free.
    buffer = ringcomm.empty_shared(96 << 20, dtype=torch.uint8).fill_(1)
    assert held_bytes() - at_first >= buffer.nbytes
    del buffer
    # Pages are returned after 10 to 22 s.
    assert comes_true(lambda: held_bytes() <= at_first + used // 4, 60)
    for group in groups:
        use(group, rank)


@in_ranks(2)
def test_a_group_that_was_not_used_holds_little(rank: int) -> None:
    """https://github.com/NVIDIA/nccl/issues/2363: buffers of 512 MiB before the first message."""
    before = held_bytes()
    groups = [dist.new_group(backend="ringcomm") for _ in range(10)]
    for group in groups:
        dist.barrier(group)
    assert held_bytes() - before < len(groups) * (128 << 10)
    for group in groups:
        dist.destroy_process_group(group)
