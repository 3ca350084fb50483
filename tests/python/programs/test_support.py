"""README's table of calls, cell by cell: over each transport, with each dtype that it claims."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import ringcomm

README = Path(__file__).parents[3] / "README.md"
WORLD_SIZE = 2
NUM_ELEMS = 6

NUMBERS = (
    *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32),
    *(torch.uint64, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    torch.complex64,
)
ANY = (*NUMBERS, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES: dict[str, tuple[torch.dtype | None, ...]] = {"numbers": NUMBERS, "any": ANY, "–": (None,)}


def data(rank: int, dtype: torch.dtype, num_elems: int = NUM_ELEMS) -> torch.Tensor:
    """Small numbers, exact in every dtype, and so are their sums; other ones on each rank."""
    if dtype is torch.bool:
        return (torch.arange(num_elems) + rank) % 3 == 0
    return (torch.arange(num_elems) % 3 + rank + 1).to(dtype)


def total(dtype: torch.dtype, num_elems: int = NUM_ELEMS) -> torch.Tensor:
    parts = [data(rank, dtype, num_elems) for rank in range(WORLD_SIZE)]
    if dtype is torch.bool:
        return torch.stack(parts).any(0)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.stack([part.to(wide) for part in parts]).sum(0).to(dtype)


def empty(dtype: torch.dtype, count: int = 1) -> list[torch.Tensor]:
    return [torch.zeros(NUM_ELEMS).to(dtype) for _ in range(count)]


def both(dtype: torch.dtype) -> list[torch.Tensor]:
    return [data(rank, dtype) for rank in range(WORLD_SIZE)]


Case = tuple[torch.Tensor, torch.Tensor]  # what a call gave, and what it should


def lists(rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [data(rank, dtype), data(rank, dtype)]


def all_reduce(rank: int, dtype: torch.dtype) -> list[Case]:
    tensor = data(rank, dtype)
    dist.all_reduce(tensor)
    return [(tensor, total(dtype))]


def all_reduce_coalesced(rank: int, dtype: torch.dtype) -> list[Case]:
    tensors = [data(rank, dtype), data(rank, dtype, 3)]
    dist.all_reduce_coalesced(tensors)
    return [(tensors[0], total(dtype)), (tensors[1], total(dtype, 3))]


def reduce(rank: int, dtype: torch.dtype) -> list[Case]:
    tensor = data(rank, dtype)
    dist.reduce(tensor, 1)
    return [(tensor, total(dtype))] if rank == 1 else []


def reduce_scatter(rank: int, dtype: torch.dtype) -> list[Case]:
    (output,) = empty(dtype)
    dist.reduce_scatter(output, lists(rank, dtype))
    return [(output, total(dtype))]


def reduce_scatter_tensor(rank: int, dtype: torch.dtype) -> list[Case]:
    output = torch.zeros(NUM_ELEMS // 2).to(dtype)
    dist.reduce_scatter_tensor(output, data(rank, dtype))
    return [(output, total(dtype).chunk(2)[rank].clone())]


def all_gather(rank: int, dtype: torch.dtype) -> list[Case]:
    outputs = empty(dtype, 2)
    dist.all_gather(outputs, data(rank, dtype))
    return list(zip(outputs, both(dtype), strict=True))


def all_gather_into_tensor(rank: int, dtype: torch.dtype) -> list[Case]:
    output = torch.zeros(2 * NUM_ELEMS).to(dtype)
    dist.all_gather_into_tensor(output, data(rank, dtype))
    return [(output, torch.cat(both(dtype)))]


def broadcast(rank: int, dtype: torch.dtype) -> list[Case]:
    tensor = data(rank, dtype)
    dist.broadcast(tensor, 1)
    return [(tensor, data(1, dtype))]


def gather(rank: int, dtype: torch.dtype) -> list[Case]:
    outputs = empty(dtype, 2)
    dist.gather(data(rank, dtype), outputs if rank == 1 else None, dst=1)
    return list(zip(outputs, both(dtype), strict=True)) if rank == 1 else []


def scatter(rank: int, dtype: torch.dtype) -> list[Case]:
    (output,) = empty(dtype)
    dist.scatter(output, both(dtype) if rank == 1 else None, src=1)
    return [(output, data(rank, dtype))]


def all_to_all(rank: int, dtype: torch.dtype) -> list[Case]:
    outputs = empty(dtype, 2)
    dist.all_to_all(outputs, lists(rank, dtype))
    return list(zip(outputs, both(dtype), strict=True))


def all_to_all_single(rank: int, dtype: torch.dtype) -> list[Case]:
    (output,) = empty(dtype)
    dist.all_to_all_single(output, data(rank, dtype))
    return [(output, torch.cat([part.chunk(2)[rank] for part in both(dtype)]))]


def send(rank: int, dtype: torch.dtype) -> list[Case]:
    (tensor,) = empty(dtype)
    if rank == 0:
        dist.send(data(0, dtype), 1, tag=3)
        return []
    assert dist.recv(tensor, tag=3) == 0
    return [(tensor, data(0, dtype))]


def isend(rank: int, dtype: torch.dtype) -> list[Case]:
    (tensor,) = empty(dtype)
    for work in (dist.isend(data(rank, dtype), 1 - rank), dist.irecv(tensor, 1 - rank)):
        assert work is not None
        work.wait()
    return [(tensor, data(1 - rank, dtype))]


def batch_isend_irecv(rank: int, dtype: torch.dtype) -> list[Case]:
    (tensor,) = empty(dtype)
    sent = data(rank, dtype)
    ops = [dist.P2POp(dist.irecv, tensor, 1 - rank), dist.P2POp(dist.isend, sent, 1 - rank)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return [(tensor, data(1 - rank, dtype))]


def barrier(rank: int, dtype: None) -> list[Case]:
    dist.barrier()
    return []


def monitored_barrier(rank: int, dtype: None) -> list[Case]:
    ringcomm.monitored_barrier()
    return []


CALLS: Mapping[str, Callable[[int, Any], list[Case]]] = {
    call.__name__: call
    for call in (
        *(all_reduce, all_reduce_coalesced, reduce, reduce_scatter, reduce_scatter_tensor),
        *(all_gather, all_gather_into_tensor, broadcast, gather, scatter),
        *(all_to_all, all_to_all_single, send, isend, batch_isend_irecv, barrier),
        monitored_barrier,
    )
} | {"recv": send, "irecv": isend}


def claims() -> list[tuple[list[str], list[str], str]]:
    """Of each row: the calls, the transports that have them, the name of the dtypes."""
    text = README.read_text(encoding="utf-8")
    table = text.split("<!-- support: begin -->")[1].split("<!-- support: end -->")[0]
    header, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.split("\n") if line
    ]
    transports = header[1:-1]
    return [
        (
            re.findall(r"`(\w+)`", row[0]),
            [name for name, cell in zip(transports, row[1:-1], strict=True) if cell == "yes"],
            row[-1],
        )
        for row in rows
    ]


def test_the_table_names_every_call_once() -> None:
    named = [name for names, _, _ in claims() for name in names]
    assert sorted(named) == sorted(CALLS)


def make_calls(rank: int, rows: list[tuple[list[str], str]]) -> None:
    for names, dtypes_name in rows:
        for name in names:
            for dtype in DTYPES[dtypes_name]:
                for found, expected in CALLS[name](rank, dtype):
                    # The same bits: float8 has no comparison.
                    assert found.dtype == expected.dtype, name
                    same = torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
                    assert same, (name, dtype)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("transport", ["shm", "p2p"])
def test_what_the_table_claims(transport: str) -> None:
    rows = [(names, dtypes) for names, transports, dtypes in claims() if transport in transports]
    options = ringcomm.Options(transport=transport)  # type: ignore[arg-type]
    run_ranks(WORLD_SIZE, make_calls, rows, pg_options=options)
