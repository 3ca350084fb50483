"""Every operation with every type and reduction over each transport, against exact arithmetic.

A table covers operations, types and reductions with sizes at which paths change, groups, layouts,
kinds of tensors and roots. Its calls and their model are in sequence_calls.py and sequence_side.py;
Gloo gives what the model says. Combinations of more are drawn in test_random_sequences.py.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import threading
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from calls import CALLS, Random
from cases import quick, slow
from failures import ENVS, TRANSPORTS
from oracle import num_threads
from rank_programs import run_command, run_program
from ranks import in_ranks, init_group, run_ranks
from sequence_calls import COLLECTIVES, KINDS, REDUCTIONS
from sequence_side import MOVED, REDUCED, Call, ops_of
from sequences import FAMILY, POOLS, WAIT_S, WORLD, Case, make_marks, run_calls, run_cases
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import ringcomm
from ringcomm import Options

SMALL = (0, 1, 3, 4, 5, 67)
# Where paths change: an envelope of messages, direct paths, one_shot, a slot of a link, a piece.
EDGES = (4 << 10, 8 << 10, 48 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10)
LARGE_BYTES, LARGEST = 1_200_001, 700_001  # several pieces and slices, odd; elements
CALLS_OF_A_CASE = 30

serials = itertools.count(1, 100)


@pytest.fixture(scope="module")
def marks(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_marks(tmp_path_factory.mktemp("collectives") / "marks")


def check_calls(pool: str, calls: list[Call], marks: str) -> None:
    cases = [
        Case(tuple(calls[i : i + CALLS_OF_A_CASE]), pool=pool)
        for i in range(0, len(calls), CALLS_OF_A_CASE)
    ]
    options: dict[str, Any] = {"env": POOLS[pool], "group_timeout_s": WAIT_S}
    assert run_ranks(WORLD, run_cases, cases, next(serials), marks, **options) == [[]] * WORLD


def covering_calls(kind: str) -> list[Call]:
    """Each type with each reduction, in small and at an edge; every eighth also in large."""
    calls = []
    pairs = [
        (dtype, op)
        for dtype in (REDUCED if kind in REDUCTIONS else MOVED)
        for op in (ops_of(dtype) if kind in REDUCTIONS else ("sum",))
    ]
    for number, (dtype, op) in enumerate(pairs):
        itemsize = getattr(torch, dtype).itemsize
        sizes = [SMALL[number % 6], EDGES[number % 7] // itemsize + number % 3 - 1]
        sizes += [min(LARGE_BYTES // itemsize, LARGEST)] * (number % 8 == 0)
        for turn, size in enumerate(sizes):
            draw = random.Random(f"{kind} {number} {turn}")
            uneven, variety = draw.choice([0, draw.randint(1, 99)]), draw.randint(0, 99)
            group, wait = (number * 5 + turn) % len(FAMILY), draw.choice([0, 0, 2])
            calls.append(
                Call(kind, group, dtype, op, size, uneven, draw.randint(0, 3), wait, variety)
            )
    return calls


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pool", POOLS)
def test_every_operation_and_type(pool: str, kind: str, marks: str) -> None:
    """All of them in shared memory; over messages a share, for reductions are the same code.

    Among them is what others got wrong: a reduce_scatter of a transposed tensor
    (https://github.com/pytorch/pytorch/issues/128066), a broadcast of a column that wrote its
    neighbours (https://github.com/pytorch/pytorch/issues/192920), other strided tensors
    (https://github.com/pytorch/pytorch/issues/159548 https://github.com/pytorch/pytorch/issues/74809
    https://github.com/pytorch/pytorch/issues/20421), ranks that send nothing in an
    all_to_all (https://github.com/pytorch/pytorch/issues/146468), and one in place
    (https://github.com/NVIDIA/nccl-tests/issues/357), which Gloo gets wrong; messages by their tags
    (https://github.com/pytorch/pytorch/issues/94819 https://github.com/pytorch/pytorch/issues/125079).
    """
    stride = 1 if pool == "shm" or kind not in REDUCTIONS else 4
    check_calls(pool, covering_calls(kind)[list(POOLS).index(pool) :: stride], marks)


# The data of an envelope, in a send and in a collective; and what has a tag of its size.
SEND_EAGER, EAGER, SIZED = 4080, 1 << 16, 1 << 20
AT_LIMITS = [
    Call(kind, dtype="uint8", size=limit + more, uneven=uneven)
    for kind in ("all_to_all", "all_gather", "all_reduce", "broadcast", "send_and_receive")
    for limit in (0, 1, SEND_EAGER, EAGER, SIZED)
    for more, uneven in ((0, 0), (1, 0), (0, 5), (0, 6))
]


@in_ranks(3, {name: env for name, env in ENVS.items() if name != "shm"})
def test_messages_at_a_limit(rank: int) -> None:
    """What an envelope carries and one byte more, of shares that are empty or a byte apart.

    Gloo ended processes where two ranks of an alltoallv were a few bytes apart
    (https://github.com/pytorch/gloo/issues/334), and in an all_gather of nothing
    (https://github.com/pytorch/pytorch/issues/85234).
    """
    assert run_calls(AT_LIMITS) == []


# What Gloo has.
GLOO_TYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
GLOO_OPS = ("sum", "product", "min", "max")


@in_ranks(4, backend="gloo")
def test_gloo_gives_what_the_model_says(rank: int) -> None:
    """Of contiguous tensors and equal shares, none of which is empty."""
    kinds = KINDS.keys() - {"reduce", "all_to_all", "barrier", "coalesced", "operators"}
    calls = [
        replace(call, uneven=0, variety=0, size=min(1 + call.size, 20_000))
        for kind in sorted(kinds)
        for call in covering_calls(kind)[::3]
        if call.dtype in GLOO_TYPES and call.op in GLOO_OPS
    ]
    assert len(calls) > 40
    assert run_calls(calls) == []


@in_ranks(3, backend=None, fresh=True)
def test_below_torchs_checks(rank: int, tmp_path: Path) -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # the variable is read when torch is imported
    init_group(rank, 3, tmp_path / "store")
    kinds = [kind for kind in COLLECTIVES if kind != "barrier"]
    calls = [call for kind in kinds for call in covering_calls(kind)[::9]]
    assert run_calls([replace(call, uneven=0, variety=0) for call in calls]) == []


@pytest.mark.parametrize("pool", POOLS)
def test_a_call_behind_an_asynchronous_one(pool: str, marks: str) -> None:
    """It finds another one in the queue, and comes after it."""
    large = Call("all_reduce", size=300_000, wait=2)
    check_calls(pool, [each for kind in KINDS for each in (large, Call(kind, size=2))], marks)


# ---- other worlds


# Each letter is the host of its rank; with - all goes over messages.
PLACES = ("a", "aaaaa", "aaaaaaaa", "abab", "abbccc", "-----")


@in_ranks(fresh=True)
@pytest.mark.parametrize("env", quick(PLACES, "a", "aaaaaaaa", "abbccc"))
def test_worlds_and_placements(rank: int, env: str) -> None:
    """Some of the calls that cover all on the default group; all_reduce by each algorithm."""
    kinds = list(COLLECTIVES if len(env) == 1 else KINDS)
    kinds.remove("barrier")
    calls = [call for kind in kinds for call in covering_calls(kind)[:: 12 if len(env) < 6 else 25]]
    # As many elements as the model has for eight ranks.
    wrong = run_calls([replace(call, size=min(call.size, 300_007)) for call in calls])
    for algorithm in ("one_shot", "two_shot", "ring"):
        group = group_with(algorithm, None)
        sizes = (0, 3, len(env) + 1, 8192, 8193, 300_007)
        wrong += run_calls([Call("all_reduce", size=size) for size in sizes], group=group)
    assert wrong == []


# ---- values


@in_ranks(2)
def test_premul_sum(rank: int) -> None:
    """The product is rounded in the tensor's type; factors may be tensors."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        inputs = [oracle.floats(r, 501, dtype) for r in range(2)]
        tensor = inputs[rank].clone()
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(1 / 3))
        products = [value * (1 / 3) for value in inputs]
        oracle.assert_equal(tensor, (products[0].float() + products[1].float()).to(dtype))
    scaled = torch.full((6,), 4.0)
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(torch.tensor([0.25], dtype=torch.float64)))
    assert (scaled == 2).all()
    refused: list[tuple[torch.dtype, Any, str]] = [
        (torch.int32, 0.5, "whole number"),
        (torch.int64, float("nan"), "whole number"),
        (torch.int64, 2.0**63, "whole number"),
        (torch.bool, 2.0, "not defined for Bool"),
        (torch.float8_e5m2, 2.0, "cannot reduce Float8_e5m2"),
        (torch.float32, torch.tensor([1j]), "real factor"),
    ]
    for dtype, factor, words in refused:
        with pytest.raises(TypeError, match=words):
            dist.all_reduce(torch.zeros(4, dtype=dtype), dist._make_nccl_premul_sum(factor))
    dist.barrier()


# ---- deterministic="rank_order": every reduction is the left-to-right one, to the last bit


@cache
def group_with(algorithm: Any, deterministic: Any = "rank_order") -> Any:
    options = Options(algorithm=algorithm, deterministic=deterministic)
    return dist.new_group(backend="ringcomm", pg_options=options)


@in_ranks(3, ENVS)
def test_order(rank: int) -> None:
    """Rounded once. Sizes: nothing; fewer than ranks; many; several slots of the ring."""
    calls = [("auto", op) for op in oracle.NUMBER_OPS]
    calls += [(algorithm, "sum") for algorithm in ("one_shot", "two_shot", "ring")]
    for (algorithm, op), dtype in itertools.product(calls, (torch.float32, torch.bfloat16)):
        group, reduce_op = group_with(algorithm), oracle.OPS[op]
        for num_elems in (0, 1, 2, 129, 5003, *([300_007] if algorithm == "ring" else [])):
            inputs = [oracle.floats(r, num_elems, dtype) for r in range(3)]
            expected = oracle.left_to_right(inputs, op)
            tensor = inputs[rank].clone()
            dist.all_reduce(tensor, reduce_op, group=group)
            oracle.assert_equal(tensor, expected)
            if algorithm != "auto":
                continue
            tensor = inputs[rank].clone()
            dist.reduce(tensor, 0, reduce_op, group=group)
            oracle.assert_equal(tensor, expected if rank == 0 else inputs[rank])
            sizes = [num_elems // 4, num_elems // 4, num_elems - 2 * (num_elems // 4)]
            output = torch.empty(sizes[rank], dtype=dtype)
            dist.reduce_scatter(output, list(inputs[rank].split(sizes)), reduce_op, group=group)
            oracle.assert_equal(output, expected.split(sizes)[rank])


@in_ranks(4)
def test_a_ring_has_another_order(rank: int) -> None:
    """In rank order two_shot runs instead, with the same bytes; and the test would see another."""
    inputs = [oracle.floats(r, 1000, torch.float32) for r in range(4)]
    for deterministic, algorithm in (("rank_order", "two_shot"), (None, "ring")):
        group = group_with("ring", deterministic)
        tensor = inputs[rank].clone()
        dist.all_reduce(tensor, group=group)
        is_ordered = oracle.bits(tensor) == oracle.bits(oracle.left_to_right(inputs, "sum"))
        assert is_ordered == (deterministic is not None)
        assert ringcomm.stats(group)["all_reduce", algorithm]["sent_bytes"] == 6000


@in_ranks(2)
def test_calls_that_choose_the_algorithm(rank: int) -> None:
    """While rank 0 measures both, at sizes near their limit; also in asynchronous calls.

    https://github.com/flashinfer-ai/flashinfer/issues/3186: each rank chose by its own times.
    """
    group = dist.new_group(backend="ringcomm")
    num_calls = 0
    for dtype in (torch.int32, torch.int16):
        for num_bytes in (200 << 10, 300 << 10, 900 << 10):
            for index in range(24):
                values = torch.arange(num_bytes // dtype.itemsize).remainder(97).to(dtype) + index
                tensor = values.clone()
                work = dist.all_reduce(tensor, group=group, async_op=index % 3 == 0)
                if index % 5 == 0:
                    dist.all_gather_into_tensor(torch.empty(8), torch.ones(4), group=group)
                if work is not None:
                    work.wait()
                assert torch.equal(tensor, 2 * values)
                num_calls += 1
    counts = ringcomm.stats(group)
    algorithms = [counts[key]["num_calls"] for key in counts if key[0] == "all_reduce"]
    assert sum(algorithms) == num_calls


@in_ranks(3)
def test_bits_do_not_depend_on_the_algorithm_that_calls_choose(rank: int) -> None:
    """https://github.com/ROCm/rocm-systems/issues/11661: another algorithm had another order."""
    groups = [group_with(algorithm, None) for algorithm in ("one_shot", "two_shot")]
    for op, dtype in itertools.product(oracle.NUMBER_OPS, (torch.float32, torch.bfloat16)):
        inputs = [oracle.floats(r, 5003, dtype) for r in range(3)]
        for group in groups:
            tensor = inputs[rank].clone()
            dist.all_reduce(tensor, oracle.OPS[op], group=group)
            oracle.assert_equal(tensor, oracle.left_to_right(inputs, op))


@in_ranks(2)
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "ring"])
def test_denormal_sums_where_one_rank_flushes_them(rank: int, algorithm: Any) -> None:
    """https://github.com/OpenMathLib/OpenBLAS/issues/1237: it is a mode of one thread."""
    group = group_with(algorithm, None)
    torch.set_flush_denormal(rank == 0)
    try:
        for (dtype, bits), num_elems in itertools.product(
            ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)), (1000, 300_001)
        ):
            tensor = torch.full((num_elems,), 1, dtype=bits).view(dtype)
            work = dist.all_reduce(tensor, group=group, async_op=num_elems > 1000)
            if work is not None:
                work.wait()
            assert tensor.view(bits).eq(2).all(), (dtype, num_elems)
        assert torch.tensor([1e-40]).add(0).item() == (0 if rank == 0 else pytest.approx(1e-40))
    finally:
        torch.set_flush_denormal(False)


# ---- threads of a rank

NUM_THREADS = 3


@in_ranks(3)
@pytest.mark.parametrize("algorithm", [slow("auto"), "ring"])
def test_results_have_the_same_bits_with_any_number_of_threads(rank: int, algorithm: Any) -> None:
    names = list(CALLS) if algorithm == "auto" else ["all_reduce", "fused update, momentum"]
    groups = [
        dist.new_group(pg_options=Options(max_threads=number, algorithm=algorithm))
        for number in range(1, NUM_THREADS + 1)
    ]
    with num_threads(NUM_THREADS):
        for name, num_elems in itertools.product(names, (70_001, 1_000_003)):
            found = []
            for group in groups:
                tensors = Random(rank)
                result = CALLS[name](tensors, num_elems, group)
                own = [oracle.bits(result)] if isinstance(result, torch.Tensor) else []
                found.append(tensors.bits() + own)
            assert found == [found[0]] * NUM_THREADS, (name, num_elems)


@in_ranks(2, TRANSPORTS)
def test_groups_in_several_threads(rank: int) -> None:
    """Synchronous calls; the ranks start their threads in opposite orders.

    As teams that several threads had begun hung: https://github.com/joblib/threadpoolctl/issues/40
    """
    options = (Options(algorithm="two_shot"), Options(algorithm="ring"), Options(max_threads=3))
    groups = [dist.new_group(pg_options=each) for each in options]
    kinds = [kind for kind in COLLECTIVES if kind != "barrier"]
    calls = [Call(kind, size=size) for kind in kinds for size in (3, 50_000)] * 5
    calls += [Call("all_reduce", dtype="int64", size=1_000_003)] * 4
    wrong: list[str] = []

    def use(group: Any) -> None:
        wrong.extend(run_calls(calls, group=group))
        wrong.append("the end")

    threads = [threading.Thread(target=use, args=(group,)) for group in groups[:: 1 - 2 * rank]]
    with num_threads(NUM_THREADS):
        for thread in threads:
            thread.start()
        product = torch.full((256, 256), 2.0) @ torch.full((256, 256), 3.0)
        for thread in threads:
            thread.join(60)
    assert wrong == ["the end"] * len(groups)
    assert product.eq(6 * 256).all()


FORKED = """
import datetime, os, sys
import numpy as np, torch, torch.distributed as dist

torch.set_num_threads(2)
torch.ones(10_000_000).add_(1)  # torch has its threads now
rank = int(os.fork() == 0)
store = dist.FileStore(sys.argv[1], 2)
dist.init_process_group("ringcomm", store=store, rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=20))
for n in (1000, 100_000, 1_000_000):
    x = np.full(n, rank + 1.0, dtype=np.float32)
    dist.all_reduce(torch.from_numpy(x))
    assert x.min() == x.max() == 3
dist.destroy_process_group()
if rank == 0:
    assert os.wait()[1] == 0
"""


@pytest.mark.parametrize("max_threads", ["2", slow("")])
def test_a_rank_that_was_forked_when_torch_had_its_threads(
    max_threads: str, tmp_path: Path
) -> None:
    """As in a notebook: https://github.com/pytorch/pytorch/issues/17199."""
    env = {"RINGCOMM_MAX_THREADS": max_threads, "OMP_NUM_THREADS": "2"}
    done = run_command(sys.executable, "-c", FORKED, tmp_path / "store", env=env)
    assert done.returncode == 0, done.stderr


# ---- what users reported of threads and cores of a process, as programs with collectives of 8 MB

NUM_ELEMS = 1_000_003
LIMIT_S = 60


def check_sum(group: dist.ProcessGroup | None = None) -> None:
    assert run_calls([Call("all_reduce", dtype="int64", size=NUM_ELEMS)], group=group) == []


@in_ranks(2)
def test_the_number_of_threads_changes_between_calls(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/19213: a new number of threads was ignored.

    https://github.com/tenstorrent/tt-metal/pull/37673: a library set one thread in some ranks.
    """
    for most in (None, 4):
        group = dist.new_group([0, 1], pg_options=ringcomm.Options(max_threads=most))
        for numbers in ((1, 3), (3, 1), (2, 2), (1, 4), (4, 1), (1, 1)):
            with num_threads(numbers[rank]):
                for _ in range(3):
                    check_sum(group)
                assert torch.get_num_threads() == numbers[rank]
        dist.destroy_process_group(group)


ENVIRONMENTS: dict[str, Any] = {
    "unset": {"OMP_NUM_THREADS": ""},
    "zero": {"OMP_NUM_THREADS": "0"},
    "wrong": {"OMP_NUM_THREADS": "all"},
    "more than cores": {"OMP_NUM_THREADS": "24", "OMP_WAIT_POLICY": "ACTIVE"},
}


@in_ranks(2, ENVIRONMENTS, fresh=True)
def test_any_number_in_the_environment(rank: int) -> None:
    """https://github.com/FlashML-org/FreeToken/issues/371: ranks with too many threads spun."""
    for _ in range(4):
        check_sum()
        (torch.ones(300, 300) @ torch.ones(300, 300)).sum().item()  # the threads begin, and spin


@in_ranks(3)
def test_ranks_with_fewer_cores_than_threads(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/125547: 30 times slower on bound cores.

    All ranks move to one core and back, between calls of one group and of groups made meanwhile.
    """
    allowed = os.sched_getaffinity(0)
    wide = dist.new_group(list(range(3)))
    try:
        with num_threads(3):
            for cores in ({min(allowed)}, allowed, {max(allowed)}, allowed):
                os.sched_setaffinity(0, cores)
                narrow = dist.new_group(list(range(3)))
                check_sum(wide)
                check_sum(narrow)
                dist.destroy_process_group(narrow)
    finally:
        os.sched_setaffinity(0, allowed)
        dist.destroy_process_group(wide)


COUNTED = """
import os, sys
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist, ringcomm
torch.set_num_threads((os.cpu_count() or 1) + 3)
def begun(store):
    before = {*os.listdir("/proc/self/task")}
    dist.init_process_group("ringcomm", store=dist.FileStore(store, 2), rank=int(sys.argv[1]),
                            world_size=2, timeout=timedelta(seconds=60))
    dist.barrier()
    tasks = {*os.listdir("/proc/self/task")} - before
    names = [Path(f"/proc/self/task/{task}/comm").read_text() for task in tasks]
    dist.destroy_process_group()
    return [name for name in names if not name.startswith("ringcomm-")]
assert begun(sys.argv[2]) == []
os.environ["OMP_PROC_BIND"] = "close"  # now only the threads know their cores
assert begun(sys.argv[2] + "-pinned") != []
"""


def test_making_a_group_begins_no_threads_of_openmp(tmp_path: Path) -> None:
    """https://github.com/pytorch/pytorch/issues/193859: libgomp got none and ended a process."""
    for ended in run_program(COUNTED, tmp_path / "store"):
        assert ended.returncode == 0, ended.err


PINNED = """
import os, sys
from datetime import timedelta
import torch, torch.distributed as dist, ringcomm
rank, store = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(4)
for most in (None, 4):
    dist.init_process_group("ringcomm", store=dist.FileStore(f"{store}{most}", 2), rank=rank,
                            world_size=2, timeout=timedelta(seconds=60),
                            pg_options=ringcomm.Options(max_threads=most))
    ramp = torch.arange(1_000_003)
    for salt in range(8):
        data = ramp * (rank + 1) + salt
        dist.all_reduce(data)
        assert torch.equal(data, 3 * ramp + 2 * salt)
    dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "env",
    [
        {"OMP_DYNAMIC": "true", "OMP_THREAD_LIMIT": "2"},
        {"OMP_PROC_BIND": "close", "OMP_WAIT_POLICY": "active"},
    ],
    ids="-".join,
)
def test_fewer_threads_than_asked_for_and_pinned_ones(env: dict[str, str], tmp_path: Path) -> None:
    """https://github.com/DIPlib/diplib/issues/191: parts of the work had no thread.

    https://github.com/pytorch/pytorch/issues/49971: all processes are moved to the first core.
    """
    for ended in run_program(PINNED, tmp_path / "store", env=env):
        assert ended.returncode == 0, ended.err


class Squares(Dataset[Tensor]):
    """Computed by kernels that use a process's threads."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((400_000,), index, dtype=torch.int64).square()


@in_ranks(2, fresh=True)
def test_forked_workers_load_data_between_calls(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/17199: a child hung in threads of its parent.

    https://github.com/pytorch/pytorch/issues/75147: workers of a DataLoader hung.
    """
    group = dist.new_group([0, 1], pg_options=ringcomm.Options(max_threads=3))
    with num_threads(3):
        check_sum(group)  # the parent's threads have begun
        loader = DataLoader(
            Squares(), batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=LIMIT_S
        )
        found = []
        for batch in loader:
            check_sum(group)
            found += batch[:, -1].tolist()
        assert found == [0, 1, 4, 9, 16, 25]
    dist.destroy_process_group(group)
