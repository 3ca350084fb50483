"""The model of a collective's time: what it counts, and that it needs no torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks

import ringcomm
from ringcomm import cost_model
from ringcomm.cost_model import (
    FITTED,
    KIB,
    MIB,
    OPERATIONS,
    Costs,
    Machine,
    all_reduce_algorithm,
    work_of,
)

NOTHING: dict[str, Any] = dict.fromkeys((*FITTED, "join_us"), 0.0)
FREE = Costs(**NOTHING, cache_bytes=0, node_gb_per_s=inf, between_gb_per_s=inf)


def test_the_model_imports_the_standard_library_alone() -> None:
    code = (
        "import sys, importlib.util as u; s = u.spec_from_file_location('m', sys.argv[1]);"
        "m = sys.modules['m'] = u.module_from_spec(s); s.loader.exec_module(m);"
        "print(m.Machine(2).microseconds('all_reduce', 1024, 2) > 0, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(Path(cost_model.__file__))]
    assert subprocess.check_output(command, text=True, timeout=60) == "True False\n"


def test_rounds_and_bytes_are_those_of_the_design() -> None:
    """docs/design/collectives.md, with S of the larger buffer: 8 MiB, 4 ranks."""
    found = {op: work_of(op, 8 * MIB, 4) for op in (*OPERATIONS[1:], "one_shot", "two_shot")}
    rounds = {op: work.num_rounds for op, work in found.items()}
    assert rounds == {
        "one_shot": 8,
        "two_shot": 16,
        "all_gather": 2,
        "reduce_scatter": 6,
        "all_to_all": 6,
        "broadcast": 16,
    }
    copied = {op: sum(n * size for n, size in work.copies) / MIB for op, work in found.items()}
    assert copied == {
        "one_shot": 8,
        "two_shot": 6 + 6,  # its sum writes the result twice
        "all_gather": 2 + 8,
        "reduce_scatter": 6,
        "all_to_all": 6 + 8,
        "broadcast": 8 + 0.5,  # one piece for the root, before the others
    }
    with pytest.raises(ValueError, match="'scan'"):
        work_of("scan", 1, 2)


@in_ranks(4)
def test_all_reduce_takes_the_algorithm_that_the_model_counts(rank: int) -> None:
    for size in (2, 3, 4):
        group = dist.new_group(list(range(size)))
        limits = (48 * KIB, 64 * KIB, 256 * KIB, 256 * KIB + 4) if rank < size else ()
        for num_bytes in limits:
            before = {key: value["num_calls"] for key, value in ringcomm.stats(group).items()}
            dist.all_reduce(torch.ones(num_bytes // 4), group=group)
            after = {key: value["num_calls"] for key, value in ringcomm.stats(group).items()}
            (ran,) = [key[1] for key in after if after[key] != before.get(key, 0)]
            assert ran == all_reduce_algorithm(num_bytes, size), (size, num_bytes)


def test_each_cost_is_counted_where_it_is_paid() -> None:
    """By hand: two_shot of 4 MiB; 4 pieces and 8 rounds, with 2 ranks."""
    two, size = Machine(2, 1, FREE), 4 * MIB

    def us(
        machine: Machine,
        world_size: int = 2,
        threads: int = 1,
        ranks_of_host: int | None = None,
        **costs: Any,
    ) -> float:
        changed = replace(machine, costs=replace(FREE, **costs))
        return changed.microseconds("two_shot", size, world_size, threads, ranks_of_host)

    assert us(two, call_us=3.0) == 3
    assert us(two, round_us=1.0) == 8
    assert us(two, copy_us=10.0) == 10 * 4
    assert us(two, sum_us=10.0) == 10 * 4
    assert us(two, memory_us=10.0) == 10 * 8
    assert us(two, memory_us=10.0, cache_bytes=2 * (4 + 1) * MIB) == 0  # tensors and boards
    # Four ranks take turns on two cores, and pay at each round and for each other's data.
    assert us(two, 4, switch_us=5.0) == 8 * 5
    assert us(two, 4, sum_us=10.0) == 2 * 10 * 4
    assert us(two, 4, shared_us=10.0) == 10 * (6 + 4)
    assert us(two, 8, cold_us=5.0) == 0
    assert us(two, 10, cold_us=5.0) == 5
    assert us(two, ranks_of_host=4, switch_us=5.0) == 8 * 5  # two such groups
    # A step of 512 KiB has room for 8 threads.
    many = Machine(128, 2, FREE)
    assert us(many, threads=64, copy_us=10.0) == pytest.approx(10 * 4 / 8)
    assert us(many, threads=64, join_us=1.0) == 4 * (2 + 1)
    # Between sockets: each of two ranks reads 4 MiB of the other's.
    assert us(many, between_gb_per_s=1.0) == pytest.approx(4 * MIB / 1e3)
    assert us(many, 1) == 0
    # A broadcast's root is read by all ranks of the other node.
    far = replace(many, costs=replace(FREE, between_gb_per_s=1.0))
    assert far.microseconds("broadcast", size, 8) == pytest.approx(4 * size / 1e3)


def test_all_reduce_has_the_tuned_limit_of_its_number_of_ranks() -> None:
    tuned = Machine(8, 1, replace(FREE, round_us=1.0), {4: 1})
    assert tuned.microseconds("all_reduce", KIB, 4) == 2  # two_shot
    assert tuned.microseconds("all_reduce", KIB, 3) == 1
