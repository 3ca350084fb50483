"""Collectives where all ranks, some or none pass a tensor of ringcomm.empty_shared on a GPU."""

from __future__ import annotations

from typing import Any

import emugpu
import emulated_gpu
import pytest
import torch
import torch.distributed as dist
from cases import slow
from emulated_gpu import in_emulated_ranks
from torch import Tensor

import ringcomm
from ringcomm.torch_names import all_gather_single, reduce_scatter_single

pytestmark = emulated_gpu.needs_emulated_gpu

GPU = "emugpu"
NUM_ELEMS = 1 << 20


@in_emulated_ranks(2)
def test_a_graph_from_before_any_shared_tensor(rank: int) -> None:
    """A graph from before the first shared tensor meets a peer's eager call of one."""
    dist.all_reduce(torch.ones(10, device=GPU))
    given = torch.full((NUM_ELEMS,), rank + 1.0, device=GPU)
    graph = emugpu.CUDAGraph()
    with emugpu.graph(graph):
        dist.all_reduce(given)
    shared = ringcomm.empty_shared(NUM_ELEMS, device=GPU).fill_(rank + 1.0)
    emugpu.synchronize()
    if rank == 0:
        graph.replay()
    else:
        dist.all_reduce(shared)
    emugpu.synchronize()
    assert (given if rank == 0 else shared).unique().tolist() == [3.0]


SHARE_ELEMS = 150_001  # of a share: several slices for each block
ROOT = 1


def values(rank: int, share: int, turn: int, num_elems: int = SHARE_ELEMS) -> Tensor:
    """What a rank has for another, on the host: exact in every type and sum."""
    return (torch.arange(num_elems) % 97 + 13 * rank + 7 * share + turn).to(torch.int32)


class Buffers:
    """Tensors on this rank's GPU, shared with the other ranks or not."""

    def __init__(self, is_shared: bool) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.is_shared = is_shared

    def empty(self, num_elems: int) -> Tensor:
        """All ranks make it, whether they use it or not."""
        shared = ringcomm.empty_shared(num_elems + 4, dtype=torch.int32, device=GPU)
        # Ranks' tensors begin at different places of theirs.
        mine = shared if self.is_shared else torch.empty_like(shared)
        return mine[self.rank % 4 :][:num_elems].fill_(-1)

    def inputs(self, turn: int) -> list[Tensor]:
        """One for each rank, each in a piece of its own."""
        tensors = [self.empty(SHARE_ELEMS) for _ in range(self.world_size)]
        for share, tensor in enumerate(tensors):
            tensor.copy_(values(self.rank, share, turn).to(GPU))
        return tensors

    def together(self, turn: int) -> Tensor:
        """The same in one tensor."""
        tensor = self.empty(SHARE_ELEMS * self.world_size)
        whole = [values(self.rank, share, turn) for share in range(self.world_size)]
        return tensor.copy_(torch.cat(whole).to(GPU))


def total(world_size: int, share: int, turn: int) -> Tensor:
    return sum(values(r, share, turn) for r in range(world_size))  # type: ignore[return-value]


def check_all_reduce(buffers: Buffers, turn: int) -> None:
    """Also the same call of memory that is not shared."""
    rank, expected = buffers.rank, total(buffers.world_size, 0, turn)
    tensor = buffers.empty(SHARE_ELEMS).copy_(values(rank, 0, turn).to(GPU))
    dist.all_reduce(tensor)
    work: Any = dist.all_reduce(tensor, dist.ReduceOp.MAX, async_op=True)
    work.wait()
    alone = values(rank, 0, turn).to(GPU)
    dist.all_reduce(alone)
    for summed in (tensor, alone):
        assert torch.equal(summed.cpu(), expected)


def check_reduce_scatter(buffers: Buffers, turn: int) -> None:
    rank, expected = buffers.rank, total(buffers.world_size, buffers.rank, turn)
    inputs, together = buffers.inputs(turn), buffers.together(turn)
    output = torch.empty(SHARE_ELEMS, dtype=torch.int32, device=GPU)
    dist.reduce_scatter(output, inputs)
    assert torch.equal(output.cpu(), expected)
    work: Any = reduce_scatter_single(output.fill_(0), together, async_op=True)
    work.wait()
    assert torch.equal(output.cpu(), expected)
    for share, tensor in enumerate(inputs):
        assert torch.equal(tensor.cpu(), values(rank, share, turn))
    # In place: the output is this rank's share of the input.
    reduce_scatter_single(together.view(-1, SHARE_ELEMS)[rank], together)
    assert torch.equal(together.view(-1, SHARE_ELEMS)[rank].cpu(), expected)


def check_all_gather(buffers: Buffers, turn: int) -> None:
    rank, world_size = buffers.rank, buffers.world_size
    expected = [values(r, r, turn) for r in range(world_size)]
    own = buffers.empty(SHARE_ELEMS).copy_(expected[rank].to(GPU))
    outputs = [torch.empty_like(own) for _ in range(world_size)]
    dist.all_gather(outputs, own)
    assert all(torch.equal(o.cpu(), e) for o, e in zip(outputs, expected, strict=True))
    together = buffers.empty(world_size * SHARE_ELEMS)
    share = together.view(-1, SHARE_ELEMS)[rank]
    share.copy_(own)
    all_gather_single(together, share)  # in place, as FSDP2's
    assert torch.equal(together.cpu(), torch.cat(expected))


def check_rooted(buffers: Buffers, turn: int) -> None:
    rank, world_size = buffers.rank, buffers.world_size
    tensor = buffers.empty(SHARE_ELEMS).copy_(values(rank, 0, turn).to(GPU))
    dist.reduce(tensor, ROOT)
    mine = total(world_size, 0, turn) if rank == ROOT else values(rank, 0, turn)
    assert torch.equal(tensor.cpu(), mine)
    dist.broadcast(tensor, ROOT)
    assert torch.equal(tensor.cpu(), total(world_size, 0, turn))
    inputs = buffers.inputs(turn)
    outputs = [torch.empty_like(tensor) for _ in range(world_size)] if rank == ROOT else None
    dist.gather(inputs[0], outputs, dst=ROOT)
    for r, output in enumerate(outputs or []):
        assert torch.equal(output.cpu(), values(r, 0, turn))
    dist.scatter(tensor, inputs if rank == ROOT else None, src=ROOT)
    assert torch.equal(tensor.cpu(), values(ROOT, rank, turn))


def check_all_to_all(buffers: Buffers, turn: int) -> None:
    rank, world_size = buffers.rank, buffers.world_size
    expected = [values(r, rank, turn) for r in range(world_size)]
    together = buffers.together(turn)
    output = torch.empty_like(together)
    dist.all_to_all_single(output, together)
    assert torch.equal(output.cpu(), torch.cat(expected))
    # Shares of different sizes, of which some are nothing.
    sizes = [[0 if (r + s) % 3 == 0 else 40_000 * r + 9 * s + 5 for s in range(world_size)]
             for r in range(world_size)]  # fmt: skip
    sent = buffers.empty(sum(sizes[rank]) + 1)[:-1]
    sent.copy_(torch.cat([values(rank, s, turn, n) for s, n in enumerate(sizes[rank])]).to(GPU))
    wanted = [sizes[r][rank] for r in range(world_size)]
    got = torch.empty(sum(wanted), dtype=torch.int32, device=GPU)
    dist.all_to_all_single(got, sent, wanted, sizes[rank])
    whole = [values(r, rank, turn, n) for r, n in enumerate(wanted)]
    assert torch.equal(got.cpu(), torch.cat(whole))


@pytest.mark.parametrize(
    "sharing", [[True] * 3, [False, True, False], slow([True, False, True])], ids=str
)
@in_emulated_ranks(3)
def test_collectives_of_shared_tensors(rank: int, sharing: list[bool]) -> None:
    buffers = Buffers(sharing[rank])
    for turn in (1, 2):
        check_all_reduce(buffers, turn)
        check_reduce_scatter(buffers, turn)
        check_all_gather(buffers, turn)
        check_rooted(buffers, turn)
        check_all_to_all(buffers, turn)
