"""What a rank knows of the other ranks of a group, and functions that are called at a death."""

import atexit
import logging
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from ringcomm import _C
from ringcomm.backend import resolve_group
from ringcomm.descriptors import above_standard
from ringcomm.torch_names import backend_of

_log = logging.getLogger("ringcomm")
_STOP_S = 1.0  # how long the exit of the process waits for a function that runs


@dataclass(frozen=True)
class Health:
    """What this rank knows of a group.

    Attributes:
        ranks: for each rank of the group "alive", "dead" (its process has ended), "left" (it has
            destroyed the group) or "stopped" (by SIGSTOP or a debugger).
        failure: why the group has failed, or None. A group that has failed serves no further call.
    """

    ranks: tuple[Literal["alive", "dead", "left", "stopped"], ...]
    failure: str | None


def health(group: dist.ProcessGroup | None = None) -> Health:
    """Returns what this rank knows of the group's ranks. Not collective, exchanges nothing.

    The answer is local and may be late: a death is usually known within a millisecond. Of ranks on
    other machines it knows nothing before a call has failed, and reports them as alive. A rank that
    hangs in its own code is alive.

    Args:
        group: the group; None is the default group.

    Raises:
        ValueError: the group has another backend for CPU tensors, was destroyed, or this rank is
            not in it.
    """
    known = _C.health(backend_of(resolve_group(group), torch.device("cpu")))
    return Health(tuple(known["ranks"]), known["failure"])


@dataclass
class _Registered:
    group: weakref.ref[dist.ProcessGroup]
    callback: Callable[[int], object]
    reported: set[int] = field(default_factory=set)  # ranks that it was called with


# In the order of the calls; RemovableHandle needs an OrderedDict, and takes entries out.
_registered: OrderedDict[int, _Registered] = OrderedDict()


class _Thread(threading.Thread):
    """Sleeps until a process has ended, and calls the functions of its groups."""

    def __init__(self) -> None:
        super().__init__(name="ringcomm-death", daemon=True)
        self._event = above_standard(os.eventfd(0, os.EFD_CLOEXEC))
        self._is_over = False
        _C.write_deaths_to(self._event)
        atexit.register(self.stop)
        self.start()

    def wake(self) -> None:
        os.eventfd_write(self._event, 1)

    def stop(self) -> None:
        """Before Python is finalized: a thread must not need it then."""
        if self in _threads:
            self._is_over = True
            self.wake()
            self.join(_STOP_S)

    def run(self) -> None:
        while not self._is_over:
            os.eventfd_read(self._event)
            for number, registered in list(_registered.items()):
                self._look(number, registered)

    def _look(self, number: int, registered: _Registered) -> None:
        group = registered.group()
        try:
            ranks = health(group).ranks if group is not None else None
        except ValueError:
            ranks = None
        if ranks is None:  # it was destroyed
            _registered.pop(number, None)
            return
        for rank, state in enumerate(ranks):
            if state != "dead" or rank in registered.reported:
                continue
            registered.reported.add(rank)
            if self._is_over or number not in _registered:
                return
            try:
                registered.callback(rank)
            except Exception:
                _log.exception("on_death: the function that was called for rank %d raised", rank)


_threads: list[_Thread] = []  # one, or none yet
_lock = threading.Lock()  # guards it, also while the process forks


def _forget_in_child() -> None:
    """A forked child has neither the thread nor the groups."""
    _threads.clear()
    _registered.clear()
    _C.write_deaths_to(-1)
    _lock.release()


os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_forget_in_child
)


def on_death(
    callback: Callable[[int], object], group: dist.ProcessGroup | None = None
) -> RemovableHandle:
    """Calls callback(rank) once for each rank of the group whose process ends. Not collective.

    Usually within milliseconds, also while this rank computes, and at once for ranks that are dead
    already. It is called in a thread of its own, which all groups share: it must not wait for long,
    and must not call collectives of the group. It may set a flag, or end the process. An exception
    that it raises is logged. It is not called for ranks that leave the group, for processes on
    other machines, after the group is destroyed, or while the process exits. The group that
    `shrink` returns is another one.

    Args:
        callback: takes a rank in the group's numbering.
        group: the group; None is the default group.

    Returns:
        A handle. After its `remove()` no further call begins.

    Raises:
        ValueError: as health().
    """
    watched = resolve_group(group)
    _C.health(backend_of(watched, torch.device("cpu")))  # raises if there is none
    handle = RemovableHandle(_registered)
    _registered[handle.id] = _Registered(weakref.ref(watched), callback)
    with _lock:
        if not _threads:
            _threads.append(_Thread())
    _threads[0].wake()
    return handle
