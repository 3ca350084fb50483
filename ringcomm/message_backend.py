"""The backend of torch.distributed that carries a group's messages: transport "p2p".

Those of CPU tensors are asked for by name; those of a device go by what torch.distributed has for
it, unless the name fits it too. Either is made for one group and used by nobody else, so that its
tags and its order are ringcomm's.
Gloo connects over the network interface of the host's name; the environment variable
GLOO_SOCKET_IFNAME, Gloo's own, names another one.
"""

import datetime
import time
from typing import Any

import torch.distributed as dist

from ringcomm.options import Options

__all__ = ["checked", "for_device", "make"]

# What a rank tells in the store that has made its end; any other text is why it could not.
_MADE = "made"


def checked(name: str) -> str:
    """The name in lower case.

    Args:
        name: "gloo", or a backend registered with dist.Backend.register_backend.

    Raises:
        ValueError: there is no such backend, or it cannot carry messages.
    """
    known = {other.lower() for other in dist.Backend._plugins}
    if dist.is_gloo_available():
        known.add("gloo")
    if name.lower() not in known:
        raise ValueError(
            f"p2p_backend of ringcomm.Options is one of {', '.join(sorted(known))} here, "
            f"got {name!r}"
        )
    return name.lower()


def for_device(asked: str, device_type: str) -> str:
    """What carries messages of a device's tensors.

    Args:
        asked: p2p_backend of the group's options, or "".
        device_type: torch's name, such as "cuda".

    Returns:
        `asked` where it is a backend for such tensors, else torch's own: "nccl" for "cuda".

    Raises:
        ValueError: there is none.
    """
    default = dist.Backend.default_device_backend_map.get(device_type, "")
    for name in (asked.lower(), default):
        # ringcomm moves device tensors by the one that is looked for here.
        if device_type not in dist.Backend.backend_capability.get(name, []) or name == "ringcomm":
            continue
        if name.upper() in dist.Backend._plugins or (name == "nccl" and dist.is_nccl_available()):
            return name
    raise ValueError(
        f"ringcomm: nothing here carries tensors on {device_type} between ranks: torch.distributed "
        'has no backend that does. Use "cpu:ringcomm,cuda:nccl" as the backend, or name one that '
        "is registered for them as p2p_backend of ringcomm.Options"
    )


def make(
    name: str,
    store: dist.Store,
    rank: int,
    size: int,
    timeout: datetime.timedelta,
    group_name: str,
    global_ranks: list[int],
) -> Any:
    """Makes this rank's end of the backend; called by the engine, collective over the group.

    Args:
        name: as checked() or for_device() returns it.
        store: the group's.
        rank: of this process in the group.
        size: ranks of the group.
        timeout: of making it; messages have none.
        group_name: torch's.
        global_ranks: the group's, by rank.

    Returns:
        A c10d Backend. All ranks have theirs by then: a rank that leaves the group at once would
        otherwise close connections that others are still making.

    Raises:
        RuntimeError: a rank could not make its end, or has not done so in time.
    """
    # A part of the store that no earlier group over it has written to: programs destroy and make
    # groups over one store, and backends leave their addresses there. Each rank counts how often it
    # came; the ranks of a group come equally often.
    generation = store.add(f"ringcomm/message_backend/{rank}", 1)
    store = dist.PrefixStore(f"ringcomm/message_backend/{generation}", store)
    try:
        backend = _make_own(name, store, rank, size, timeout, group_name, global_ranks)
    except Exception as error:
        store.set(f"made/{rank}", str(error) or type(error).__name__)
        raise
    store.set(f"made/{rank}", _MADE)
    _wait_for_others(store, size, timeout)
    return backend


def _wait_for_others(store: dist.Store, size: int, timeout: datetime.timedelta) -> None:
    deadline = time.monotonic() + timeout.total_seconds()
    for rank in range(size):
        # Not store.wait(), which Ctrl-C does not end.
        while not store.check([f"made/{rank}"]):
            if time.monotonic() > deadline:
                raise RuntimeError(f"rank {rank} has not made its end in {timeout}")
            time.sleep(0.002)
        told = store.get(f"made/{rank}").decode()
        if told != _MADE:
            raise RuntimeError(f"rank {rank}: {told}")


def _make_own(
    name: str,
    store: dist.Store,
    rank: int,
    size: int,
    timeout: datetime.timedelta,
    group_name: str,
    global_ranks: list[int],
) -> Any:
    """This rank's end, for which other ranks may be needed or not."""
    if name == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    if name == "nccl" and name.upper() not in dist.Backend._plugins:
        nccl_opts: Any = dist.ProcessGroupNCCL.Options()
        nccl_opts._timeout = timeout
        nccl_opts.group_name = f"{group_name}/{name}"
        nccl_opts.global_ranks_in_group = global_ranks
        return dist.ProcessGroupNCCL(store, rank, size, nccl_opts)
    plugin = dist.Backend._plugins[name.upper()]
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout)
    opts = dist.distributed_c10d._DistributedBackendOptions()
    opts.store = store
    opts.group_rank = rank
    opts.group_size = size
    opts.timeout = timeout
    opts.group_id = f"{group_name}/{name}"
    opts.global_ranks_in_group = global_ranks
    # Over itself, shared memory: the environment may say p2p for all groups.
    return plugin.creator_fn(opts, Options(transport="shm") if name == "ringcomm" else None)
