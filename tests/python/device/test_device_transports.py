"""Collectives of device tensors in each way in which ranks may share memory and devices.

On emulated GPUs: by kernels in memory that all ranks map, or over messages and collectives that
behave as NCCL's ("messages over emup2p"). More of both: test_gpu_*.py.
"""

from __future__ import annotations

import datetime
import logging
import threading
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import emugpu
import oracle
import pytest
import torch
import torch.distributed as dist
from cases import quick, slow
from emulated_gpu import build, in_emulated_ranks, needs_emulated_gpu, run_on_gpus, with_kernels
from rank_programs import run_program
from sequence_side import Call
from sequences import run_calls
from test_gpu_collectives import check_every_operation, check_operators, send_and_receive, transport

import ringcomm
from ringcomm import Options
from ringcomm.torch_names import reduce_scatter_single

pytestmark = needs_emulated_gpu

GPU = "emugpu"


@dataclass(frozen=True)
class Box:
    """Where three ranks are, and what their driver can do."""

    name: str
    said: tuple[str, ...]
    num_devices: int = 1
    env: dict[str, str] = field(default_factory=dict)


BOXES = [
    Box("one GPU under MPS", ("cuda_ipc", "file descriptors", "3 ranks on a GPU")),
    Box("one GPU without MPS", ("messages over emup2p",), env={"RINGCOMM_EMULATOR_MPS": "0"}),
    Box("two GPUs", ("2 ranks on a GPU",), num_devices=2),
    Box("a GPU for each", ("1 ranks on a GPU",), num_devices=3),
    Box("no file descriptors", ("messages over emup2p",), env={"RINGCOMM_EMULATOR_VMM": "0"}),
    Box(
        "no peer access",  # as over some PCIe, and between instances of MIG
        ("messages over emup2p",),
        num_devices=3,
        env={"RINGCOMM_EMULATOR_PEER_ACCESS": "0"},
    ),
    Box(
        "writes to other GPUs are lost",
        ("messages over emup2p",),
        num_devices=3,
        env={"RINGCOMM_EMULATOR_LOSES_PEER_WRITES": "1"},
    ),
    Box("threads of blocks", ("cuda_ipc",), env={"RINGCOMM_EMULATOR_THREADS": "3"}),
    Box(
        "lazy loading, eight queues",
        ("cuda_ipc",),
        env={"RINGCOMM_EMULATOR_LAZY": "1", "RINGCOMM_EMULATOR_QUEUES": "8"},
    ),
]


def check_box(rank: int) -> str:
    """What cannot be in this box is refused, and the group works on."""
    name = transport()
    if name.startswith("cuda_ipc"):  # CUDA_DEVICE_MAX_CONNECTIONS is not set
        assert "2 hardware queues" in name
    else:
        with pytest.raises(NotImplementedError, match=r"share no memory.*use torch\.empty instead"):
            ringcomm.empty_shared(4, device=GPU)
    check_every_operation(25)
    check_operators(rank, 1003)
    send_and_receive(rank, 1003)
    return name


QUICK = [box for box in BOXES if box.num_devices < 3 and "threads" not in box.name]


@pytest.mark.parametrize("box", quick(BOXES, *QUICK), ids=lambda box: box.name.replace(" ", "-"))
def test_boxes(box: Box) -> None:
    # With room for messages of all pairs of ranks beside collectives.
    env = {**with_kernels(), "RINGCOMM_EMULATOR_SMS": "48", **box.env}
    results = run_on_gpus(3, check_box, num_devices=box.num_devices, env=env)
    assert len(set(results)) == 1
    assert all(text in results[0] for text in box.said), results[0]


WAYS = [
    ({"RINGCOMM_EMULATOR_MPS": "0"}, 1, "processes that share a GPU need MPS"),
    ({"RINGCOMM_EMULATOR_PEER_ACCESS": "0"}, 2, "give the GPU access to the memory of a rank"),
    ({"RINGCOMM_EMULATOR_LOSES_PEER_WRITES": "1"}, 2, "may need NCCL_P2P_DISABLE=1"),
]


@pytest.mark.parametrize(("env", "num_devices", "reason"), WAYS)
def test_a_slower_way_is_said_once(env: dict[str, str], num_devices: int, reason: str) -> None:
    """https://github.com/vllm-project/vllm/issues/51513: writes to another GPU are lost where the
    driver says that it can be reached, and programs hang or compute with what is there.
    """
    env = {**with_kernels(), **env}
    for said in run_on_gpus(2, warnings_of_groups, num_devices=num_devices, env=env, fresh=True):
        assert len(said) == 1, said
        assert reason in said[0]


def warnings_of_groups(rank: int) -> list[str]:
    """Which two groups log on this rank."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ringcomm").addHandler(handler)
    for group in (None, dist.new_group()):
        tensor = torch.ones(300_007, device=GPU)
        dist.all_reduce(tensor, group=group)
        assert tensor.unique().tolist() == [2.0]
    return lines


# ---- over messages


@cache
def group_with(**options: Any) -> Any:
    """A group of all ranks with these options; made once in each pool."""
    return dist.new_group(backend="cpu:ringcomm,emugpu:ringcomm", pg_options=Options(**options))


def check_algorithms(rank: int) -> list[bytes]:
    """Sizes around ranks, slots and groups of slices; the bits of rounded sums."""
    world_size, device = dist.get_world_size(), torch.device(GPU, emugpu.current_device())
    found = []
    for algorithm in ("auto", "one_shot", "two_shot", "ring"):
        group = group_with(algorithm=algorithm)
        # A slot of the ring has 1 Mi elements, and a group of slices two.
        in_slices = [(2 << 20) * world_size + 1] if algorithm == "ring" else []
        sizes = (0, 1, world_size, world_size + 1, 1001)
        calls = [Call("all_reduce", size=size) for size in sizes]
        calls += [Call("all_reduce", op=op, size=5) for op in ("product", "min", "max", "avg")]
        assert run_calls(calls, device, group) == []
        for num_elems in in_slices:  # more than the model has
            tensor = torch.full((num_elems,), rank + 1.0, device=GPU)
            dist.all_reduce(tensor, group=group)
            assert tensor.unique().tolist() == [world_size * (world_size + 1) / 2]
        for dtype, op in product(oracle.FLOATS, (dist.ReduceOp.SUM, dist.ReduceOp.AVG)):
            tensor = oracle.floats(rank, 1001, dtype).to(GPU)
            dist.all_reduce(tensor, op, group=group)
            found.append(oracle.bits(tensor.cpu()))
        ran = {by for op, by in ringcomm.stats(group) if op == "all_reduce"}
        assert ran == {"ring" if algorithm == "ring" else "direct"}  # or the backend's own
    return found


@pytest.mark.parametrize("world_size", [slow(2), 3])
def test_algorithms_over_messages(world_size: int) -> None:
    results = run_on_gpus(world_size, check_algorithms)
    assert all(found == results[0] for found in results)


@pytest.mark.parametrize("num_elems", [1, 1001, slow(1_000_003)])
@in_emulated_ranks(3, kernels=False)
def test_roots_and_places_over_messages(rank: int, num_elems: int) -> None:
    """Every root, in one piece and in many; outputs of all_gather are elsewhere on each rank."""
    calls = [
        Call(kind, size=num_elems, root=root, variety=variety)
        for kind in ("reduce", "broadcast", "all_gather")
        for root, variety in product(range(3), (0, 1, 2))
    ]
    assert run_calls(calls, torch.device(GPU, emugpu.current_device())) == []


SUM, MAX, BAND = dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.BAND


@pytest.mark.parametrize(
    ("dtype", "op", "deterministic"),
    [
        (torch.int16, SUM, None),
        (torch.uint32, MAX, None),
        (torch.int32, BAND, None),
        (torch.float32, SUM, "rank_order"),
    ],
)
@in_emulated_ranks(2, kernels=False)
def test_what_the_backend_cannot_reduce_is_refused(
    rank: int, dtype: torch.dtype, op: Any, deterministic: str | None
) -> None:
    """The group goes on."""
    group = group_with(deterministic=deterministic)
    tensor = torch.arange(6, device=GPU).to(dtype)
    refused = pytest.raises(ValueError, match="emup2p, by which these ranks reach each other")
    with refused:
        dist.all_reduce(tensor, op, group=group)
    with refused:
        dist.reduce(tensor, 0, op, group=group)
    with refused:
        reduce_scatter_single(tensor[:3].clone(), tensor, op, group=group)
    dist.broadcast(tensor, 0, group=group)
    assert tensor.tolist() == list(range(6))


@in_emulated_ranks(2, kernels=False)
def test_a_factor_is_applied_before_the_backend_sums(rank: int) -> None:
    """The backend sees a sum: its own premul_sum is not asked for."""
    inputs = [oracle.floats(r, 501, torch.float16) for r in range(2)]
    tensor = inputs[rank].to(GPU)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(1 / 3))
    products = [value * (1 / 3) for value in inputs]
    oracle.assert_equal(tensor.cpu(), (products[0].float() + products[1].float()).half())


@in_emulated_ranks(2, kernels=False)
def test_what_is_exact_in_any_order_goes_in_rank_order_too(rank: int) -> None:
    group = group_with(deterministic="rank_order")
    for dtype, op, expected in ((torch.float32, MAX, 1), (torch.int32, SUM, 1)):
        tensor = torch.full((5,), rank, dtype=dtype, device=GPU)
        dist.all_reduce(tensor, op, group=group)
        assert tensor.tolist() == [expected] * 5


@in_emulated_ranks(2, kernels=False)
def test_a_refusal_comes_before_the_other_calls_of_its_batch(rank: int) -> None:
    first = torch.full((5,), rank + 1.0, device=GPU)
    second = torch.ones(5, dtype=torch.int16, device=GPU)

    def both() -> None:
        with dist._coalescing_manager():
            dist.all_reduce(first)
            dist.all_reduce(second)

    with pytest.raises(ValueError, match="sum of int16"):
        both()
    assert first.tolist() == [rank + 1.0] * 5


@in_emulated_ranks(2, kernels=False, fresh=True)
def test_a_rank_alone_that_is_refused_is_a_difference_for_the_others(rank: int) -> None:
    """They learn of it before a time-out."""
    store = dist.distributed_c10d._get_default_store()
    dtype = torch.float32 if rank else torch.int16

    def until_it_raises() -> None:
        while True:
            dist.all_reduce(torch.ones(5, dtype=dtype, device=GPU))

    with pytest.raises((ValueError, ringcomm.MismatchError), match="int16"):
        until_it_raises()
    store.set(f"told {rank}", "")
    store.wait([f"told {1 - rank}"])


@in_emulated_ranks(2, kernels=False, num_devices=2)
def test_what_carries_messages(rank: int) -> None:
    assert transport() == "messages over emup2p"


@in_emulated_ranks(2, fresh=True)
def test_calls_of_another_thread_leave_a_capture_whole(rank: int) -> None:
    """Queries, waits, works that are dropped, and a group that goes, while this thread captures."""
    world_size = dist.get_world_size()
    other, gone = dist.new_group(), dist.new_group()
    x, y, z = (torch.ones(1000, device=GPU) for _ in range(3))
    for group in (None, other, gone):
        dist.all_reduce(x, group=group)
    x.fill_(1.0)
    emugpu.synchronize()
    errors: list[BaseException] = []

    def use_groups() -> None:
        try:
            emugpu.set_device(0)
            with emugpu.stream(side):
                for _ in range(5):
                    dist.all_reduce(y, group=other, async_op=True)
                work = dist.all_reduce(y, group=other, async_op=True)
                assert work is not None
                work.wait(datetime.timedelta(seconds=20))
                while not work.is_completed():
                    pass
                dist.all_reduce(z, group=gone)
            dist.destroy_process_group(gone)
        except BaseException as error:
            errors.append(error)

    side = emugpu.Stream()
    graph = emugpu.CUDAGraph()
    with emugpu.graph(graph):
        thread = threading.Thread(target=use_groups)
        thread.start()
        dist.all_reduce(x)
        thread.join()
        dist.all_reduce(x)
    assert not errors, errors
    graph.replay()
    assert x.tolist() == [float(world_size) ** 2] * 1000
    assert y.tolist() == [float(world_size) ** 6] * 1000
    assert z.tolist() == [float(world_size)] * 1000


@in_emulated_ranks(2, fresh=True)
def test_two_threads_with_the_first_calls_on_a_device_make_one_transport(rank: int) -> None:
    group = dist.new_group()
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ringcomm")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    both = threading.Barrier(2)

    def connect() -> None:
        both.wait(20)
        group._get_backend(torch.device(GPU)).eager_connect_single_device(torch.device(GPU, 0))

    threads = [threading.Thread(target=connect) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    x = torch.ones(1000, device=GPU)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [2.0] * 1000
    assert sum("tensors on emugpu:0 go by" in line for line in lines) == 1, lines


PROGRAM = """
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: (
    None if name == "ringcomm._cuda" else find_spec(name, *more))
import torch, torch.distributed as dist
import ringcomm, emulated_gpu
assert "ringcomm._cuda" not in sys.modules
emulated_gpu.load()
store = dist.FileStore(sys.argv[2], 1)
dist.init_process_group("ringcomm", store=store, rank=0, world_size=1)
ours = torch.ones(4)
dist.all_reduce(ours)
assert ours.tolist() == [1, 1, 1, 1]
dist.all_reduce(torch.ones(4, device="emugpu"))
"""


@pytest.mark.slow
@needs_emulated_gpu
def test_a_build_without_gpus_refuses_their_tensors(tmp_path: Path) -> None:
    build()  # in this process, whose time has no limit here
    (ended,) = run_program(PROGRAM, tmp_path / "store", num_ranks=1)
    assert "ValueError: ringcomm: this build has no CUDA support" in ended.err
    assert "RINGCOMM_CUDA=1" in ended.err
