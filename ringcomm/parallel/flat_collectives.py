"""Collectives over one flat buffer in uneven shards, for any backend."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm import _C, torch_names
from ringcomm.ops.fused_update import shard_range


def shard_sizes(num_elems: int, world_size: int) -> list[int]:
    """The elements of each rank's shard, by shard_range()."""
    ranges = [shard_range(num_elems, world_size, rank) for rank in range(world_size)]
    return [end - begin for begin, end in ranges]


def takes_uneven(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether shards of different sizes need no padding: over ringcomm."""
    return isinstance(torch_names.backend_of(group, device), _C.ProcessGroupRingcomm)


def fuses_updates(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether reduce_scatter_update_all_gather_ is faster than its parts on a device's tensors.

    The same on all ranks: on CPUs over ringcomm, and where up to four ranks share one GPU
    (docs/decisions.md). Collective before the group's first call on a device.
    """
    if not takes_uneven(group, device):
        return False
    if device.type == "cpu":
        return True
    backend = torch_names.backend_of(group, device)
    return group.size() <= 4 and _C.ranks_per_device(backend, device) == group.size()


def device_of(group: dist.ProcessGroup) -> torch.device:
    """The device for a group's collectives: the CPU if they support it."""
    devices, cpu = torch_names.devices_of(group), torch.device("cpu")
    if cpu in devices:
        return cpu
    return torch.device(devices[0].type, torch.accelerator.current_device_index())


def sent_by(group: dist.ProcessGroup, tensor: Tensor) -> Tensor:
    """The tensor where the group's collectives take it: on its own device if they can."""
    kinds = [device.type for device in torch_names.devices_of(group)]
    return tensor if tensor.device.type in kinds else tensor.to(device_of(group))


def local_of(tensor: Any) -> Tensor:
    """This rank's part of a DTensor or TensorPart; another tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def with_own_storage(part: Tensor) -> Tensor:
    """The memory of a contiguous part of a buffer as a storage of its size.

    Whatever saves or compares storages then sees a tensor like any other: torch.save(), copies,
    and the test for shared weights of safetensors. The buffer lives as long as the part.
    """
    return torch.from_dlpack(part.view(-1)).view(part.shape)


def take_written(master: Tensor, half: Tensor) -> None:
    """Updates a master after 16-bit weights were modified, as by a loaded state_dict."""
    is_written = half != master.to(half.dtype)
    if master.device.type != "cpu":  # without a wait for the device
        torch.where(is_written, half.float(), master, out=master)
    elif is_written.any():
        master[is_written] = half[is_written].float()


def reduce_scatter_mean(
    flat: Tensor, group: dist.ProcessGroup | None, sizes: list[int] | None = None
) -> Tensor:
    """This rank's shard of the mean of the ranks' buffers, as a new tensor.

    `flat` has one dimension, and the same size on all ranks. `sizes` has the elements of each
    rank's shard; by default shard_sizes(). Without a group the rank is alone. Collective, unless
    the buffer is empty.
    """
    if group is None:
        return flat.clone()
    rank, world_size = group.rank(), group.size()
    sizes = shard_sizes(flat.numel(), world_size) if sizes is None else sizes
    is_uneven = takes_uneven(group, flat.device)
    if not is_uneven and _is_lopsided(sizes):
        for owner, shard in enumerate(flat.split(sizes)):
            if shard.numel():
                dist.reduce(shard, group=group, group_dst=owner)
        return flat.split(sizes)[rank].div(world_size)
    output = flat.new_empty(sizes[rank] if is_uneven else max(sizes))
    if flat.numel() == 0:
        return output
    if is_uneven:
        inputs = list(flat.split(sizes))
        dist.reduce_scatter(output, inputs, op=dist.ReduceOp.AVG, group=group)
        return output
    rows = flat
    if min(sizes) < max(sizes):
        rows = flat.new_zeros(world_size, max(sizes))
        for row, shard in zip(rows, flat.split(sizes), strict=True):
            row[: shard.numel()].copy_(shard)
    torch_names.reduce_scatter_single(output, rows.view(-1), group=group)
    return output.div_(world_size)[: sizes[rank]]


def _is_lopsided(sizes: list[int]) -> bool:
    """Whether padding to the largest shard would more than double what is sent."""
    return len(sizes) * max(sizes) > 2 * sum(sizes)


def all_gather_shards(
    flat: Tensor, group: dist.ProcessGroup | None, sizes: list[int] | None = None
) -> None:
    """Fills a buffer with the ranks' shards; this rank's shard is already in place.

    Arguments are those of reduce_scatter_mean(). Collective, unless the buffer is empty.
    """
    if group is None or flat.numel() == 0:
        return
    rank, world_size = group.rank(), group.size()
    sizes = shard_sizes(flat.numel(), world_size) if sizes is None else sizes
    shards = list(flat.split(sizes))
    if takes_uneven(group, flat.device):
        dist.all_gather(shards, shards[rank], group=group)
        return
    if _is_lopsided(sizes):
        for owner, shard in enumerate(shards):
            if shard.numel():
                dist.broadcast(shard, group=group, group_src=owner)
        return
    mine = flat.new_zeros(max(sizes))
    mine[: sizes[rank]] = shards[rank]
    rows = flat.new_empty(world_size, max(sizes))
    torch_names.all_gather_single(rows.view(-1), mine, group=group)
    for row, shard in zip(rows, shards, strict=True):
        shard.copy_(row[: shard.numel()])


@contextmanager
def current_stream_of(device: torch.device, stream: torch.Stream) -> Iterator[None]:
    """Where a stream of a device is the current one; threads may use one stream at once."""
    before = torch.accelerator.current_stream(device)
    index = torch.accelerator.current_device_index()
    torch.accelerator.set_stream(stream)  # which makes its device the current one
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(index)


_side_streams: dict[tuple[torch.device, str], torch.Stream] = {}


def side_stream(device: torch.device, use: str) -> torch.Stream:
    """The stream for one use of a device, beside the program's streams; one for all threads."""
    found = _side_streams.get((device, use))
    return found or _side_streams.setdefault((device, use), torch.Stream(device))


class InFlight:
    """Runs collectives beside the other work of a device, one at a time; on CPUs at once."""

    def __init__(self) -> None:
        self._buffers: dict[torch.device, Tensor] = {}

    def run(self, call: Callable[[], None], buffer: Tensor) -> None:
        """Calls it on a stream of its own, after what the current stream has and the call before.

        `buffer` stays until the current stream has waited for the call.
        """
        device = buffer.device
        self._settle(device)
        if device.type == "cpu":
            call()
            return
        stream = side_stream(device, "reductions")
        stream.wait_stream(torch.accelerator.current_stream(device))
        self._buffers[device] = buffer
        with current_stream_of(device, stream):
            call()

    def settle(self) -> None:
        """The current streams wait for the last call of each device."""
        for device in [*self._buffers]:
            self._settle(device)

    def _settle(self, device: torch.device) -> None:
        if self._buffers.pop(device, None) is not None:
            stream = side_stream(device, "reductions")
            torch.accelerator.current_stream(device).wait_stream(stream)


def place_in(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This rank, and the number of ranks; without a group the rank is alone."""
    return (0, 1) if group is None else (group.rank(), group.size())


def take_from_rank0(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Replaces tensors, except on the meta device, with those of rank 0 of a group.

    Collective, unless there are none.
    """
    given = [tensor.detach() for tensor in tensors if not tensor.is_meta]
    if not given or group.size() == 1:
        return
    sent = [sent_by(group, tensor) for tensor in given]
    torch_names.broadcast_coalesced_(group, sent, torch_names.BUCKET_BYTES, 0)
    for own, value in zip(given, sent, strict=True):
        if value.device != own.device:
            own.copy_(value)


def largest_of(
    values: Sequence[int], groups: Sequence[dist.ProcessGroup], dtype: torch.dtype = torch.int32
) -> list[int]:
    """The elementwise maximum over all ranks of a mesh with these groups. Collective.

    By the host where the groups can, so that it does not wait for a device.
    """
    tensor = torch.tensor(values, dtype=dtype, device="cpu")
    if isinstance(tensor, torch_names.FakeTensor):
        return [*values]
    for group in groups:
        tensor = tensor.to(device_of(group))
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group)
    return tensor.tolist()


def gathered_rows(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All ranks' tensors, (ranks, *shape), on the device of this rank's. Collective."""
    sent = sent_by(group, mine).contiguous()
    rows = sent.new_empty(group.size(), *mine.shape)
    torch_names.all_gather_single(rows.view(-1), sent.view(-1), group=group)
    return rows.to(mine.device)


def all_gathered(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """All ranks' objects; without a group only this rank's. Collective."""
    if group is None:
        return [mine]
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def raise_on_all(problem: object, group: dist.ProcessGroup | None) -> None:
    """Raises ValueError on all ranks if any rank has a problem; None for none. Collective."""
    for rank, text in enumerate(all_gathered(problem and str(problem), group)):
        if text is not None:
            raise ValueError(f"rank {rank}: {text}")


def check_agreement(
    mine: Mapping[str, Any], group: dist.ProcessGroup, problem: Exception | None = None
) -> None:
    """Raises ValueError on all ranks if values differ, or if only some ranks have a problem.

    Ranks that all have one raise their own. Collective.
    """
    own = {"problem of the arguments": None if problem is None else repr(problem), **mine}
    # Lists of weights are long, and rarely differ.
    digests = all_gathered(sha256(repr(own).encode()).digest(), group)
    everyone = [own] if len(set(digests)) == 1 else all_gathered(own, group)
    if problem is not None and all(theirs["problem of the arguments"] for theirs in everyone):
        raise problem
    for rank, theirs in enumerate(everyone):
        for name, value in everyone[0].items():
            if (other := theirs.get(name)) != value:  # none behind a problem
                first, other = _first_difference(value, other)
                raise ValueError(
                    f"ranks disagree on the {name}: rank 0 has {first}, rank {rank} has {other}"
                ) from problem


def _first_difference(a: Any, b: Any) -> tuple[Any, Any]:
    """The first entries that differ in lists, also in nested ones; None after the end of one."""
    while isinstance(a, list) and isinstance(b, list):
        a, b = next((x, y) for x, y in zip_longest(a, b) if x != y)
    return a, b


@contextmanager
def agreeing(group: dist.ProcessGroup) -> Iterator[dict[str, Any]]:
    """A context for checks, after which check_agreement() compares what they put into the dict.

    An exception is this rank's problem. Collective at the end.
    """
    mine, problem = dict[str, Any](), None
    try:
        yield mine
    except Exception as error:
        problem = error
    check_agreement(mine, group, problem)
