"""Collectives of ordinary tensors on GPUs, which peers access in place once they have mapped the
allocations that the tensors are in; among them those of FSDP2 and DDP.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import emugpu
import emulated_gpu
import pytest
import ranks
import torch
import torch.distributed as dist
from cases import covering, name_of
from emulated_gpu import driver_calls, in_emulated_ranks, run_on_gpus, with_kernels
from gpu_ranks import meet, stderr_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ringcomm
from ringcomm.torch_names import all_gather_single, reduce_scatter_single

pytestmark = emulated_gpu.needs_emulated_gpu

GPU = "emugpu"
NUM_BYTES = 8 << 20  # of an allocation of its own, unlike any other
NUM_ELEMS = NUM_BYTES // 4
MEMORY = 64 << 20  # of a GPU on which it is scarce
in_two = in_emulated_ranks(2, fresh=True)
FEW_CALLS = 4  # announced in the second, mapped in the third, used by then or in the fourth


def new_tensor() -> Tensor:
    """In an allocation of its own."""
    return torch.empty(NUM_ELEMS, dtype=torch.int32, device=GPU)


def bytes_read_of_peers(*mine: Tensor) -> int:
    """How much of peers' allocations of NUM_BYTES this process has ever accessed, in its mappings
    of them. `mine` are this process's own.
    """
    num_bytes, is_peers = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        field, *values = line.split()
        if "-" in field:
            begin, end = (int(part, 16) for part in field.split("-"))
            is_peers = "emulated-gpu" in line and end - begin == NUM_BYTES
            is_peers = is_peers and all(begin != own.data_ptr() for own in mine)
        elif field == "Rss:" and is_peers:
            num_bytes += 1024 * int(values[0])
    return num_bytes


def used_bytes() -> int:
    """Of this process on the device."""
    driver = ctypes.CDLL(os.environ["RINGCOMM_CUDA_DRIVER"])
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
    return total.value - free.value


def few_calls() -> None:
    """In which ranks find out what all have dropped, unmap it, and free their own."""
    for _ in range(4):
        dist.all_reduce(torch.ones(10, device=GPU))
        emugpu.synchronize()
        dist.all_reduce(torch.ones(1))  # of the host: nobody goes on before all are here


def num_mapped() -> int:
    calls = driver_calls()
    return calls["cuIpcOpenMemHandle_v2"] - calls["cuIpcCloseMemHandle"]


def check_sum(tensor: Tensor, turn: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Exact, of different values at each place and turn."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own = (torch.arange(tensor.numel()) % 1001 + turn).to(tensor.dtype)
    # One piece after the other: a copy holds as much on the GPU, which may be scarce there.
    for part, piece in zip(tensor.split(1 << 20), own.split(1 << 20), strict=True):
        part.copy_(piece * (rank + 1))
        emugpu.synchronize()
    dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor.cpu(), own * (world_size * (world_size + 1) // 2))


def check_sums(tensor: Tensor, num: int = FEW_CALLS, first: int = 0, group: Any = None) -> None:
    for turn in range(num):
        check_sum(tensor, first + turn, group)


def long_calls(op: str = "all_reduce") -> tuple[int, int]:
    """The calls on the device so far that used this rank's buffers in place, and others."""
    return counted(op, "num_in_place"), counted(op, "num_staged")


def counted(op: str, key: str) -> int:
    return sum(each[key] for (name, _), each in ringcomm.stats().items() if name == op)


def check_in_place(rank: int) -> None:
    world_size = dist.get_world_size()
    tensor = new_tensor()
    check_sum(tensor)
    assert num_mapped() == 0
    assert long_calls() == (0, 1)
    # What its peers add, and all of the result; parts are multiples of 16 elements.
    copied = counted("all_reduce", "copied_bytes")
    assert copied == pytest.approx((2 - 1 / world_size) * NUM_BYTES, abs=64 * world_size)
    check_sums(tensor)
    assert num_mapped() == world_size - 1
    in_place, staged = long_calls()
    assert in_place > 0
    assert in_place + staged == 1 + FEW_CALLS
    dist.all_reduce(torch.ones(10, device=GPU))  # is too short
    # Its share of the sums, from every peer.
    least = (world_size - 1) * NUM_BYTES // world_size
    assert least <= bytes_read_of_peers(tensor) <= 1.1 * least + (1 << 20)
    # A view somewhere in it, at another place on each rank.
    for turn in range(3):
        check_sum(tensor[1 + rank : NUM_ELEMS // 2 + rank], turn)
    assert num_mapped() == world_size - 1
    assert long_calls() == (in_place + 3, staged)


def check_moves(rank: int) -> None:
    world_size = dist.get_world_size()
    share = NUM_ELEMS // world_size
    for turn in range(FEW_CALLS + 1):
        mine = torch.full((share,), 10 * turn + rank, dtype=torch.int32, device=GPU)
        gathered = torch.empty(world_size * share, dtype=torch.int32, device=GPU)
        all_gather_single(gathered, mine)
        shares = gathered.view(world_size, share)[:, ::997].tolist()
        assert shares == [[10 * turn + r] * len(shares[0]) for r in range(world_size)]
        total = torch.empty_like(mine)
        reduce_scatter_single(total, gathered)
        assert total[::997].unique().tolist() == [(10 * turn + rank) * world_size]
        dist.broadcast(gathered, turn % world_size)
        dist.all_to_all_single(gathered, gathered.clone())
        expected = [10 * turn + rank] * world_size
        assert gathered.view(world_size, share)[:, share // 2].tolist() == expected
    assert num_mapped() > 0


@in_two
def test_reuse_by_the_allocator(rank: int) -> None:
    """Of a block while peers have it mapped: by another tensor on this rank only."""
    for turn in range(3 * FEW_CALLS):
        tensor = new_tensor()
        place = tensor.data_ptr()
        check_sum(tensor, turn)
        if rank == 0:
            emugpu.synchronize()
            del tensor
            other = new_tensor().fill_(-1)
            assert other.data_ptr() == place
            del other
    assert 1 <= num_mapped() <= 2  # rank 1 has two in turn


def reuse_addresses(rank: int, num_calls: int, is_in_place: Callable[[Tensor], bool]) -> Tensor:
    """Of tensors by other memory, while peers have mapped what was there before; the last one.

    Each has that many calls, and then must be in place.
    """
    num_same = 0
    for turn in range(6):
        tensor = new_tensor()
        place = tensor.data_ptr()
        check_sums(tensor, num_calls, first=10 * turn)
        assert is_in_place(tensor)
        meet()  # a rank unmaps what another has freed before its own next call
        if rank == 0 or turn % 2 == 0:
            del tensor
            emugpu.empty_cache()
            tensor = new_tensor()
            num_same += tensor.data_ptr() == place
    assert num_same > 0, "a test of nothing: no address was used again"
    return tensor


def check_reuse_by_the_driver(rank: int) -> None:
    tensor = reuse_addresses(rank, FEW_CALLS, lambda tensor: bytes_read_of_peers(tensor) > 0)
    check_sums(tensor)
    assert num_mapped() == dist.get_world_size() - 1  # those of before are unmapped


@in_two
def test_freed_before_it_is_mapped(rank: int) -> None:
    """Peers cannot open what has been freed since it was announced; what follows is mapped."""
    store = dist.distributed_c10d._get_default_store()
    tensor = new_tensor().fill_(1)
    dist.all_reduce(tensor)
    emugpu.synchronize()
    if rank == 0:
        store.wait(["called"])  # rank 1 maps nothing more in this call
    dist.all_reduce(tensor)
    if rank == 1:
        store.set("called", "")
    emugpu.synchronize()
    if rank == 0:
        del tensor
        emugpu.empty_cache()
        tensor = new_tensor()
    check_sums(tensor, 2 * FEW_CALLS)
    assert num_mapped() == 1 + rank  # counts the one that failed
    assert bytes_read_of_peers(tensor) > 0


@pytest.mark.slow
@in_two
def test_many(rank: int) -> None:
    """Allocations of one rank."""
    tensors = [torch.empty(1 << 19, dtype=torch.int32, device=GPU) for _ in range(200)]
    for turn in range(3):
        for tensor in tensors:
            tensor.fill_(rank + turn)
            dist.all_reduce(tensor)
        for tensor in tensors[::23]:
            assert tensor[:: 1 << 16].unique().tolist() == [1 + 2 * turn]
    assert num_mapped() == len(tensors)
    in_place, staged = long_calls()
    assert in_place >= len(tensors)
    assert in_place + staged == 3 * len(tensors)


@in_two
def test_captured(rank: int) -> None:
    """Calls in a graph map allocations and use them in place as eager ones do, also of the graph's
    own pool. When the graph is gone, its memory is used again.
    """
    world_size = dist.get_world_size()
    x = torch.zeros(NUM_ELEMS, dtype=torch.int32, device=GPU)
    graph = emugpu.CUDAGraph()
    dist.all_reduce(x[:1000])
    with emugpu.graph(graph):
        tensor = x.clone()
        for _ in range(FEW_CALLS):
            dist.all_reduce(tensor)
            meet()
    assert num_mapped() == world_size - 1
    assert bytes_read_of_peers(tensor, x) == 0  # nothing has run
    for turn in range(1, 4):
        x.fill_(turn + rank)
        graph.replay()
        total = (2 * turn + 1) * world_size ** (FEW_CALLS - 1)
        assert tensor[::1000].unique().tolist() == [total]
        least = (world_size - 1) * NUM_BYTES // world_size
        assert bytes_read_of_peers(tensor, x) >= least
        check_sum(torch.empty_like(x), turn)
    del graph, tensor
    emugpu.empty_cache()
    for turn in range(FEW_CALLS):
        check_sum(torch.empty_like(x), turn)


@in_two
def test_captured_where_one_rank_lends(rank: int) -> None:
    """For as long as there is the graph, its call is staged on all ranks."""
    tensor = new_tensor()
    check_sums(tensor)
    x = torch.zeros(NUM_ELEMS, dtype=torch.int32, device=GPU)
    graph = emugpu.CUDAGraph()
    with emugpu.graph(graph):
        total = tensor if rank == 0 else torch.empty_like(tensor)
        total.copy_(x)
        dist.all_reduce(total)
    for turn in range(1, 4):
        x.fill_(turn)
        graph.replay()
        assert total[::1000].unique().tolist() == [turn * dist.get_world_size()]
        check_sum(torch.empty_like(x), turn)


WITHOUT_IPC: list[dict[str, str]] = [{}, {"RINGCOMM_EMULATOR_IPC": "0"}]


@in_emulated_ranks(2, env=WITHOUT_IPC, fresh=True)
def test_one_rank_that_cannot_hand_out_its_memory(rank: int) -> None:
    tensor = new_tensor()
    check_sums(tensor, 2 * FEW_CALLS)
    assert bytes_read_of_peers(tensor) == 0
    if os.environ.get("RINGCOMM_EMULATOR_IPC") == "0":
        assert long_calls() == (0, 2 * FEW_CALLS)


@in_emulated_ranks(2, env={"RINGCOMM_EMULATOR_MEMORY": str(MEMORY)}, fresh=True)
def test_scarce_memory_is_not_held_for_others(rank: int) -> None:
    """Less than a sixteenth of the GPU's memory is free from the second call on."""
    tensor = new_tensor()
    check_sum(tensor)
    small = []
    while 16 * (MEMORY - used_bytes()) >= MEMORY:
        small.append(torch.empty(1 << 20, dtype=torch.uint8, device=GPU))
    said = stderr_of(lambda: check_sums(tensor))
    assert said.count("less than a sixteenth of the GPU's memory is free") == 1
    assert num_mapped() == 0
    assert bytes_read_of_peers(tensor) == 0
    assert long_calls() == (0, 1 + FEW_CALLS)  # all bytes of each were staged


@in_two
def test_long_messages_and_shards_are_counted(rank: int) -> None:
    tensor, shards = new_tensor(), new_tensor()

    def send(num_elems: int) -> None:
        (dist.recv if rank else dist.send)(tensor[:num_elems], 1 - rank)

    def exchange(num_elems: int) -> None:
        dist.all_to_all_single(torch.empty_like(shards[:num_elems]), shards[:num_elems])

    for op, call, num_bytes in (
        ("send", send, NUM_BYTES),
        ("all_to_all", exchange, NUM_BYTES // 2),
    ):
        num = 0 if op == "send" and rank == 1 else 1  # of calls that have something for a peer
        call(NUM_ELEMS)
        emugpu.synchronize()
        meet()
        assert long_calls(op) == (0, num)
        for _ in range(FEW_CALLS):
            call(NUM_ELEMS)
            emugpu.synchronize()
            meet()
        call(100)  # is too short
        in_place, staged = long_calls(op)
        assert in_place + staged == num * (1 + FEW_CALLS)
        assert in_place >= num
        assert counted(op, "copied_bytes") == staged * num_bytes


def test_reuse_by_the_driver() -> None:
    run_on_gpus(2, check_reuse_by_the_driver, env=with_kernels(), fresh=True)


def test_numbers_that_are_used_again_give_wrong_sums() -> None:
    """Control: peers then go on with what was at the address before."""
    used_again = with_kernels() | {"RINGCOMM_EMULATOR_REUSES_IDS": "1"}
    with pytest.raises(ranks.RankFailure, match="in check_sum"):
        run_on_gpus(2, check_reuse_by_the_driver, env=used_again, fresh=True)


IN_PLACE = covering([check_in_place, check_moves], [1, 3])


@pytest.mark.parametrize(("check", "num_devices"), IN_PLACE, ids=name_of)
def test_ordinary_tensors_are_used_in_place(check: Callable[[int], None], num_devices: int) -> None:
    run_on_gpus(3, check, num_devices=num_devices, env=with_kernels(), fresh=True)


# ---- ringcomm.empty_shared


def shared_tensor() -> Tensor:
    return ringcomm.empty_shared(NUM_ELEMS, dtype=torch.int32, device=GPU)


@in_two
def test_a_shared_tensor_is_used_in_place_by_its_first_call(rank: int) -> None:
    """It is memory of torch's, which goes where that goes; an empty one is nothing to map."""
    ringcomm.empty_shared(0, device=GPU)
    assert num_mapped() == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = shared_tensor()
    assert num_mapped() == 1
    assert bytes_read_of_peers(tensor) == 0
    check_sum(tensor)
    assert bytes_read_of_peers(tensor) > 0
    other = shared_tensor()  # of the same allocation again, when the first is gone
    del tensor, other
    emugpu.empty_cache()
    assert ringcomm.release(20)
    meet()
    assert num_mapped() == 0


@in_two
def test_a_graph_uses_a_shared_tensor_in_place_from_its_first_call(rank: int) -> None:
    tensor = shared_tensor().fill_(rank + 1)
    emugpu.synchronize()
    graph = emugpu.CUDAGraph()
    with emugpu.graph(graph):
        dist.all_reduce(tensor)
    graph.replay()
    assert tensor.unique().tolist() == [3]
    assert bytes_read_of_peers(tensor) > 0


@in_emulated_ranks(2, env=WITHOUT_IPC, fresh=True)
def test_a_shared_tensor_that_cannot_be_mapped_says_so(rank: int) -> None:
    """Of one rank, on all."""
    with pytest.warns(UserWarning, match=r"empty_shared: .* are staged"):
        tensor = shared_tensor()
    check_sum(tensor)
    assert bytes_read_of_peers(tensor) == 0


@in_emulated_ranks(2, env={"RINGCOMM_EMULATOR_MEMORY": str(MEMORY)}, fresh=True)
def test_one_rank_without_memory_for_a_shared_tensor(rank: int) -> None:
    """The others do not wait for it."""
    if rank == 0:
        with pytest.raises(RuntimeError, match="cannot allocate memory for a tensor"):
            ringcomm.empty_shared(2 * MEMORY, dtype=torch.uint8, device=GPU)
    else:
        with pytest.warns(UserWarning, match="are staged"):
            ringcomm.empty_shared(MEMORY // 8, dtype=torch.uint8, device=GPU)
    few_calls()


# ---- FSDP2 and DDP, whose buffers are ordinary memory


@in_emulated_ranks(2)
def test_allocate_tensor(rank: int) -> None:
    group: Any = dist.group.WORLD
    backend = group._get_backend(torch.device(GPU, 0))
    for device in (torch.device(GPU), torch.device(GPU, emugpu.current_device())):
        tensor = backend.allocate_tensor(10, dtype=torch.int16, device=device)
        assert (tensor.device.index, tensor.dtype) == (emugpu.current_device(), torch.int16)
        assert tensor.shape == (10,)
    assert backend.supports_tensor_alloc(device)
    with pytest.raises(RuntimeError, match="-5"):
        backend.allocate_tensor(-5, dtype=torch.uint8, device=device)


NUM_STEPS = 8


def trained(rank: int, kind: str) -> tuple[list[Tensor], list[int]]:
    """Weights by FSDP2, which allocates from the group on GPUs, and the memory in use by steps."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(256, 700), nn.Tanh(), nn.Linear(700, 256)).double()
    model = model.to(kind)
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
        if kind == GPU:
            module.set_allocate_memory_from_process_group_for_comm(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    used = []
    for step in range(NUM_STEPS):
        x = torch.arange(4.0 * 256, dtype=torch.float64).reshape(4, 256).sub(500).mul(1e-3)
        optimizer.zero_grad()
        model(x.add(rank + step).to(kind)).square().mean().backward()
        optimizer.step()
        if kind == GPU:
            emugpu.synchronize()
            used.append(used_bytes())
    return [parameter.full_tensor().cpu() for parameter in model.parameters()], used


@in_emulated_ranks(2, fresh=True)
def test_fsdp2_allocates_from_the_group(rank: int) -> None:
    """Its buffers are mapped, and used again: they would take 12 MiB a step. A block that a stream
    has yet to read is not, so a few more may be needed. From torch's memory: test_gpu_models.py.
    """
    few_calls()
    expected, _ = trained(rank, "cpu")
    weights, used = trained(rank, GPU)
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-12)
    assert used[-1] - used[0] < (NUM_STEPS - 1) * (4 << 20), used
    assert num_mapped() > 0


@in_emulated_ranks(2, env={"DDP_DISABLE_COMM_MEM": "0"}, fresh=True)
def test_ddp_allocates_from_the_group(rank: int) -> None:
    """Its reducer asks the group for buckets, as FSDP2 does, where the environment lets it."""
    group: Any = dist.group.WORLD
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)  # as of "ringcomm" alone
    torch.manual_seed(0)
    model = nn.Linear(512, 1024).to(GPU)
    ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

    def hook(_: object, bucket: dist.GradBucket) -> Any:
        work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    hook.__annotations__.clear()  # DDP compares types, and these are strings
    ddp.register_comm_hook(None, hook)
    world_size = dist.get_world_size()
    for step in range(5):
        ddp.zero_grad()
        ddp(torch.full((2, 512), rank + 1.0 + step, device=GPU)).sum().backward()
        expected = sum(2 * (r + 1.0 + step) for r in range(world_size))
        assert model.weight.grad is not None
        assert model.weight.grad[::99].cpu().unique().tolist() == [expected]
    assert num_mapped() >= world_size - 1  # its first buckets and the rebuilt ones
