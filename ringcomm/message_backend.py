"""The backend of torch.distributed that carries a group's messages: transport "p2p".

It is made for one group and used by nobody else, so that its tags and its order are ringcomm's.
Gloo connects over the network interface of the host's name; the environment variable
GLOO_SOCKET_IFNAME, Gloo's own, names another one.
"""

import datetime
from typing import Any

import torch.distributed as dist

from ringcomm.options import Options

__all__ = ["checked", "make"]


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
        name: as checked() returns it.
        store: the group's.
        rank: of this process in the group.
        size: ranks of the group.
        timeout: of making it; messages have none.
        group_name: torch's.
        global_ranks: the group's, by rank.

    Returns:
        A c10d Backend.
    """
    # A part of the store that no earlier group over it has written to: programs destroy and make
    # groups over one store, and backends leave their addresses there. Each rank counts how often it
    # came; the ranks of a group come equally often.
    generation = store.add(f"ringcomm/message_backend/{rank}", 1)
    store = dist.PrefixStore(f"ringcomm/message_backend/{generation}", store)
    if name == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
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
