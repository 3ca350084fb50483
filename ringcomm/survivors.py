"""Going on after a rank has died: who lives, and a new group of those ranks.

docs/design/shrink.md.
"""

import contextlib
import datetime
import logging
import weakref
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from ringcomm import _C, torch_names
from ringcomm.backend import resolve_group
from ringcomm.errors import RingcommError
from ringcomm.process import path_of

_log = logging.getLogger("ringcomm")


@dataclass(frozen=True)
class Health:
    """What this rank knows of a group: see health()."""

    ranks: tuple[Literal["alive", "dead", "left", "stopped"], ...]
    failure: str | None


def health(group: dist.ProcessGroup | None = None) -> Health:
    """Returns what this rank knows of the group's ranks. Not collective, exchanges nothing.

    The answer is local and may be late: a death is usually known within a millisecond. Of ranks on
    other machines it knows nothing before a call has failed, and reports them as alive. A rank that
    hangs in its own code is alive.

    Args:
        group: the group; None is the default group.

    Returns:
        `ranks`: for each rank of the group "alive", "dead" (its process has ended), "left" (it has
        destroyed the group) or "stopped" (by SIGSTOP or a debugger). `failure`: why the group has
        failed, or None. A group that has failed serves no further call.

    Raises:
        ValueError: the group has another backend for CPU tensors, was destroyed, or this rank is
            not in it.
    """
    known = _C.health(torch_names.backend_of(resolve_group(group), torch.device("cpu")))
    return Health(tuple(known["ranks"]), known["failure"])


def shrink(
    group: dist.ProcessGroup | None = None, *, timeout: datetime.timedelta | None = None
) -> dist.ProcessGroup:
    """Replaces a group by one of the ranks that are left. Collective over these ranks.

    Call it on every rank that has caught a RingcommError of the group, or that gives up a
    collective because of an error of its own: the waits of the others in the group then end with
    an error. A rank whose process has ended or that has destroyed the group is left out. So is a
    rank that does not call shrink() within the timeout; when it calls shrink() later, that raises.
    If no rank is lost, the new group has all of them.

    The ranks of the new group have the order of the old one. It has the same options and timeout,
    and a store of its own, which depends on no process. The old group is destroyed; its pending
    operations raise. The new group of the default group becomes the default group: global ranks
    are numbered anew, also in the other groups that exist. Those with a lost rank have failed, and
    may be shrunk or destroyed. docs/how-to/mistakes.md has what else must be made again, and from
    which state to go on.

    Args:
        group: the group; None is the default group.
        timeout: how long to wait for a rank that lives, in each attempt; None is the timeout of
            the group. Another attempt follows if a further rank is lost meanwhile.

    Returns:
        The new group.

    Raises:
        RingcommError: the other ranks have gone on without this one, or 8 attempts have failed.
        NotImplementedError: the ranks of the group do not all share memory; it stays as it was.
        ValueError: the group has one rank only, has another backend for CPU tensors, was
            destroyed, or this rank is not in it.
    """
    old = resolve_group(group)
    if old.size() < 2:
        raise ValueError("a group of one rank has no rank to lose: shrink() needs two at least")
    backend = torch_names.backend_of(old, torch.device("cpu"))
    own_timeout = torch_names.timeout_of(backend)
    limit = own_timeout if timeout is None else timeout
    if limit <= datetime.timedelta(0):
        raise ValueError(f"timeout of shrink must be positive, got {limit}")
    agreement = _C.begin_shrink(backend, limit)
    error: Exception | None = None  # of the last attempt on this rank
    while True:
        try:
            survivors = agreement.agree()
        except RingcommError as failure:
            if error is not None:
                failure.args = (f"{failure}; the last attempt failed on this rank: {error}",)
            raise failure from error
        new = error = None
        try:
            new = _make(old, backend, survivors, agreement, min(limit, own_timeout))
        except (RingcommError, RuntimeError, ValueError, OSError) as failure:
            error = failure  # the others hear of it, and all try again
        except BaseException:
            agreement.confirm(False)
            raise
        if agreement.confirm(new is not None):
            assert new is not None  # the verdict is that all ranks have made it
            break
        _log.info("shrink: attempt %d failed: %s", agreement.attempt, error or "on another rank")
        if new is not None:
            _destroy(new)
    torch_names.set_timeout(torch_names.backend_of(new, torch.device("cpu")).options, own_timeout)
    if old is dist.group.WORLD:
        torch_names.renumber_groups(survivors, {old, new})
        torch_names.replace_default_group(new)
    _destroy(old)
    _log.info("shrink: ranks %s of %d go on", survivors, old.size())
    return new


def _make(
    old: dist.ProcessGroup,
    backend: Any,
    survivors: list[int],
    agreement: _C.Survivors,
    timeout: datetime.timedelta,
) -> dist.ProcessGroup:
    """The new group, which torch knows; collective over the survivors."""
    # The descriptor is never closed: a FileStore opens its path for each access, also when it is
    # destroyed, which may be when the process exits.
    store = dist.FileStore(path_of(agreement.take_store()), -1)
    numbers = torch_names.global_ranks_of(old)
    is_default = old is dist.group.WORLD
    global_ranks = [idx if is_default else numbers[rank] for idx, rank in enumerate(survivors)]
    # If one of them ends before it has arrived, the others know it.
    known = weakref.ref(agreement)

    def is_over() -> bool:
        its = known()
        return its is not None and its.is_over()

    backend.register_peers(store, survivors, global_ranks, is_over)
    return torch_names.new_process_group(
        like=old,
        rank=survivors.index(old.rank()),
        global_ranks=global_ranks,
        store=store,
        name=f"{old.group_name}.{agreement.attempt + 1}",
        options=backend.options,
        timeout=timeout,
    )


def _destroy(group: dist.ProcessGroup) -> None:
    """Destroys one group; that it has failed is no error here."""
    with contextlib.suppress(RingcommError):
        dist.destroy_process_group(group)
