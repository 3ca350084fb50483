"""The backend of torch.distributed that sends a group's messages: transport "messages".

CPU tensors use the backend that the options name. Device tensors use the same backend if it
supports them, else torch's default for the device. Each backend object is used by one group only,
so ringcomm controls its tags and call order. Gloo connects over the network interface of the host's
name; its environment variable GLOO_SOCKET_IFNAME selects another one.
"""

import datetime
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch.distributed as dist

from ringcomm import _C
from ringcomm.options import Options
from ringcomm.torch_names import BACKEND_PLUGINS, new_backend_options, set_timeout

# What a rank writes to the store after it has made its backend; any other text is an error.
_MADE = "made"
_DEATH_GRACE_S = 1.0

_Answer = TypeVar("_Answer")


def checked(name: str) -> str:
    """The name in lower case: "gloo", or one of register_backend that takes shorter messages.

    Raises ValueError for others.
    """
    known = {other.lower() for other in BACKEND_PLUGINS}
    if dist.is_gloo_available():
        known.add("gloo")
    if name.lower() not in known:
        raise ValueError(
            "message_backend of ringcomm.Options, or RINGCOMM_MESSAGE_BACKEND, must be one of"
            f" {', '.join(sorted(known))} here, got {name!r}"
        )
    if name.lower() == "ringcomm" and os.environ.get("RINGCOMM_AS_GLOO") != "1":
        raise ValueError(
            "message_backend of ringcomm.Options must take messages that are shorter than their"
            " receive, as 'ringcomm' does with RINGCOMM_AS_GLOO=1 only"
        )
    return name.lower()


def for_device(asked: str, device_type: str) -> str:
    """The backend for a device's tensors: `asked` if it supports them, else torch's own ("nccl").

    Raises ValueError if there is none.
    """
    default = dist.Backend.default_device_backend_map.get(device_type, "")
    for name in (asked.lower(), default):
        # ringcomm itself is excluded: it sends device tensors through the backend chosen here.
        if device_type not in dist.Backend.backend_capability.get(name, []) or name == "ringcomm":
            continue
        if name.upper() in BACKEND_PLUGINS or (name == "nccl" and dist.is_nccl_available()):
            return name
    raise ValueError(
        f"ringcomm: torch.distributed has no backend here that can send tensors on {device_type} "
        'between ranks. Use "cpu:ringcomm,cuda:nccl" as the backend, or name one that '
        "is registered for them as message_backend of ringcomm.Options"
    )


def make(
    name: str,
    store: dist.Store,
    key: str,
    rank: int,
    size: int,
    timeout: datetime.timedelta,
    group_name: str,
    global_ranks: list[int],
    goes_on: Callable[[list[int]], bool],
) -> Any:
    """Makes this rank's object of the backend; called by the engine, collective over the group.

    `key` is the group's, and that of no other one over this store: programs destroy and make
    groups over one store, and backends leave their addresses there. `timeout` limits the
    construction: messages have no timeout. `goes_on` is called about every 50 ms with the missing
    ranks and returns whether to keep waiting for them. Returns a c10d Backend once all ranks have
    made theirs: otherwise a rank that leaves the group at once would close connections that others
    are still making. Raises RuntimeError if a rank could not make its backend, or did not arrive.
    """
    missing = [(rank + 1 + i) % size for i in range(size)]

    def in_time(ask: Callable[[], _Answer]) -> _Answer:
        """What `ask` returns, in a thread: the store may not answer."""
        outcome: Future[_Answer] = Future()

        def run() -> None:
            try:
                outcome.set_result(ask())
            except Exception as error:
                outcome.set_exception(error)

        asking = threading.Thread(target=run, name="ringcomm-connect", daemon=True)
        asking.start()
        while not outcome.done():
            asking.join(0.05)
            if not outcome.done() and not goes_on(missing):
                raise RuntimeError("the group's store does not answer")
        return outcome.result()

    def new_store() -> dist.Store:
        # A group has a backend for each device on which a rank has tensors, made in one order.
        number = store.add(f"ringcomm/message_backend/{key}/{rank}", 1)
        place = dist.PrefixStore(f"ringcomm/message_backend/{key}/{number}", store)
        place.set(f"here/{rank}", "")
        return place

    own = in_time(new_store)
    # A separate store connection: a blocking wait in one may block other lookups.
    own_store = in_time(lambda: _C.own_connection(own))
    opts = new_backend_options()
    opts.store = own_store
    opts.group_rank = rank
    opts.group_size = size
    opts.timeout = timeout
    opts.group_id = f"{group_name}/{name}"
    opts.global_ranks_in_group = global_ranks
    ends: list[Any] = []  # the backend, or why there is none

    def make_own() -> None:
        status = _MADE
        try:
            ends.append(_make_own(name, opts))
        except Exception as error:
            ends.append(error)
            status = str(error).partition("\n")[0] or type(error).__name__
        own_store.set(f"made/{rank}", status)

    if name == "gloo":
        # Gloo's connect ends only at its own timeout. If this rank fails earlier, the thread is
        # left running until then.
        threading.Thread(target=make_own, name="ringcomm-connect", daemon=True).start()
    else:
        make_own()

    def has_all() -> bool:
        """Rank 0 looks at each rank's end and tells the others, so N ranks ask O(N) questions."""
        if rank != 0 and not (ends and isinstance(ends[0], Exception)):
            if not own.check(["all"]):
                return False
            if (status := own.get("all").decode()) != _MADE:
                raise RuntimeError(status)
            return True
        # Errors of peers take precedence over this rank's.
        for other in tuple(missing):
            if not own.check([f"made/{other}"]):
                continue
            if (status := own.get(f"made/{other}").decode()) != _MADE:
                reason = f"rank {other}: {status}"
                if rank == 0:
                    own.set("all", reason)
                raise ends[0] if other == rank else RuntimeError(reason)
            missing.remove(other)
        if not missing:
            own.set("all", _MADE)
        return not missing

    absent = [*missing]

    def late() -> list[int]:
        """The ranks that are not here. Without them no other rank can make its backend."""
        if rank != 0:
            told = own.get("late").decode() if own.check(["late"]) else "0"
            return [int(other) for other in told.split() if int(other) != rank] or missing
        absent[:] = [other for other in absent if not own.check([f"here/{other}"])]
        own.set("late", " ".join(map(str, absent or missing)))
        return absent or missing

    def has_everyone() -> bool:
        try:
            return in_time(has_all)
        except Exception:
            # A backend may fail because a rank has died, and before that is known.
            deadline = time.monotonic() + _DEATH_GRACE_S
            while goes_on(missing) and time.monotonic() < deadline:
                time.sleep(0.05)
            raise

    pause_s = 0.001
    while not has_everyone():
        # A rank may arrive and then end.
        waits_for = in_time(late)
        if not goes_on(waits_for) and not in_time(has_all):
            raise RuntimeError(f"ranks did not arrive: {waits_for}")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)
    return ends[0]


def _make_own(name: str, opts: Any) -> Any:
    """Makes this rank's backend, which may or may not need the other ranks."""
    place = opts.store, opts.group_rank, opts.group_size
    if name == "gloo":
        return dist.ProcessGroupGloo(*place, timeout=opts.timeout)
    plugin = BACKEND_PLUGINS.get(name.upper())
    if plugin is None:
        nccl_opts: Any = dist.ProcessGroupNCCL.Options()
        set_timeout(nccl_opts, opts.timeout)
        nccl_opts.group_name = opts.group_id
        nccl_opts.global_ranks_in_group = opts.global_ranks_in_group
        return dist.ProcessGroupNCCL(*place, nccl_opts)
    if not plugin.extended_api:
        return plugin.creator_fn(*place, opts.timeout)
    # shm for this group itself: the environment may select messages for all groups.
    return plugin.creator_fn(opts, Options(transport="shm") if name == "ringcomm" else None)
