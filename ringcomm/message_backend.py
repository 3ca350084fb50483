"""The backend of torch.distributed that carries a group's messages: transport "p2p".

It is made for one group and used by nobody else, so that its tags and its order are ringcomm's. Gloo
connects over the network interface of the host's name; the environment variable GLOO_SOCKET_IFNAME,
Gloo's own, names another one.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ringcomm.options import Options

__all__ = ["maker"]


def maker(name: str, dist_backend_opts: Any) -> Callable[[], Any]:
    """A function that makes this rank's end of the backend.

    Args:
        name: "gloo", or a backend registered with dist.Backend.register_backend.
        dist_backend_opts: torch's options of the group that the messages are for.

    Returns:
        A function without arguments, collective over the group, that returns a c10d Backend.

    Raises:
        ValueError: there is no such backend, or it cannot carry messages.
    """
    name = name.lower()
    if name == "gloo":
        return lambda: _make_gloo(dist_backend_opts)
    plugin = dist.Backend._plugins.get(name.upper())
    if plugin is None:
        known = sorted({"gloo", *(other.lower() for other in dist.Backend._plugins)})
        raise ValueError(
            f"p2p_backend of ringcomm.Options is one of {', '.join(known)} here, got {name!r}"
        )
    return lambda: _make_plugin(plugin, name, dist_backend_opts)


def _store_of(opts: Any) -> dist.Store:
    """A part of the group's store that no earlier group over it has written to.

    Programs destroy and make groups over one store, and backends leave their addresses in it. So
    each rank counts there how often it came; the ranks of a group come equally often.
    """
    generation = opts.store.add(f"ringcomm/message_backend/{opts.group_rank}", 1)
    return dist.PrefixStore(f"ringcomm/message_backend/{generation}", opts.store)


def _make_gloo(opts: Any) -> Any:
    if not dist.is_gloo_available():
        raise ValueError("p2p_backend of ringcomm.Options is gloo, which this torch lacks")
    return dist.ProcessGroupGloo(
        _store_of(opts), opts.group_rank, opts.group_size, timeout=opts.timeout
    )


def _make_plugin(plugin: Any, name: str, opts: Any) -> Any:
    store = _store_of(opts)
    if not plugin.extended_api:
        return plugin.creator_fn(store, opts.group_rank, opts.group_size, opts.timeout)
    inner = dist.distributed_c10d._DistributedBackendOptions()
    inner.store = store
    inner.group_rank = opts.group_rank
    inner.group_size = opts.group_size
    inner.timeout = opts.timeout
    inner.group_id = f"{opts.group_id}/{name}"
    inner.global_ranks_in_group = opts.global_ranks_in_group
    # Over itself, shared memory: the environment may say p2p for all groups.
    return plugin.creator_fn(inner, Options(transport="shm") if name == "ringcomm" else None)
