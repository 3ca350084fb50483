"""The program's forward passes, backward passes and optimizer steps, for a trace.

They label what a rank does between its calls. While a process records, nn.Module.__call__,
torch.autograd.backward and torch.autograd.grad are wrapped, and optimizers have hooks. Of phases
inside each other the outermost is recorded: a model, and not its modules; a backward pass, and not
the forward passes that it repeats. An optimizer step whose closure runs the model ends there.
What ringcomm itself runs, as for the shapes of a stage, is no phase of the program: `unrecorded`.

NAME.program is a ring of records in a mapped file, which survives if the process is killed.
"""

import contextlib
import functools
import itertools
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim import optimizer

from ringcomm.backward_pass import in_backward
from ringcomm.process import standard_taken

PHASES = ("forward", "backward", "optimizer")
_FORWARD, _BACKWARD, _OPTIMIZER = range(len(PHASES))
# Number in the process from 1 on, begin and end in ns of CLOCK_MONOTONIC (0: it has not ended),
# thread, phase.
_RECORD = struct.Struct("=QQQII")


class Open(NamedTuple):
    """A phase that has begun."""

    number: int
    phase: int
    owner: int  # of an optimizer step, the optimizer's id: steps may be inside each other


class Recorder:
    """Writes the phases of a process to a file, the newest `num_records` of them."""

    def __init__(self, file: int, num_records: int) -> None:
        os.posix_fallocate(file, 0, num_records * _RECORD.size)
        with standard_taken():  # mmap keeps the file open, at the lowest descriptor that is free
            self._memory = mmap.mmap(file, num_records * _RECORD.size)
        self._num_records = num_records
        self._numbers = itertools.count(1)

    def begin(self, phase: int, owner: int) -> Open:
        """Records that this thread begins a phase now."""
        number, thread = next(self._numbers), threading.get_native_id()
        offset = number % self._num_records * _RECORD.size
        _RECORD.pack_into(self._memory, offset, number, time.monotonic_ns(), 0, thread, phase)
        return Open(number, phase, owner)

    def end(self, phase: Open) -> None:
        """Records its end, unless newer phases have taken its place."""
        offset = phase.number % self._num_records * _RECORD.size
        if _RECORD.unpack_from(self._memory, offset)[0] == phase.number:
            struct.pack_into("=Q", self._memory, offset + 16, time.monotonic_ns())


class Phase(NamedTuple):
    """A phase as it is read; `end_ns` is 0 if it has not ended."""

    number: int
    begin_ns: int
    end_ns: int
    thread: int
    name: str


def read(path: Path) -> list[Phase]:
    """The phases in a file, by their begin. One that is just being replaced is left out."""
    first, again = path.read_bytes(), path.read_bytes()
    found = {number: rest for number, *rest in _RECORD.iter_unpack(first)}
    later = {number: rest for number, *rest in _RECORD.iter_unpack(again)}
    phases = [
        Phase(number, begin, end, thread, PHASES[phase])
        for number, (begin, end, thread, phase) in found.items()
        if number and later.get(number, [0])[0] == begin
    ]
    return sorted(phases)


_recorder: Recorder | None = None  # of this process, and none of a forked child's
_OWN = Open(0, _BACKWARD, 0)  # in which no phase begins
_here = threading.local()  # `open`: the phase that this thread is in, or None


def start(file: int, num_records: int) -> None:
    """Records this process's phases from now on."""
    global _recorder
    recorder = Recorder(file, num_records)
    _install()
    _here.open, _recorder = None, recorder


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """This thread's passes and steps are ringcomm's own, and no phases. Also a decorator."""
    outer = getattr(_here, "open", None)
    _here.open = _OWN
    try:
        yield
    finally:
        _here.open = outer


def _forget() -> None:
    global _recorder
    _here.open, _recorder = None, None


@functools.cache
def _install() -> None:
    torch.nn.Module.__call__ = _recorded(_FORWARD, torch.nn.Module.__call__)  # type: ignore[method-assign]
    for name in ("backward", "grad"):
        setattr(torch.autograd, name, _recorded(_BACKWARD, getattr(torch.autograd, name)))
    optimizer.register_optimizer_step_pre_hook(_begin_step)
    optimizer.register_optimizer_step_post_hook(_end_step)
    os.register_at_fork(after_in_child=_forget)


def _recorded(phase: int, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        opened = _begin(phase)
        if opened is None:
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        finally:
            _end(opened)

    return call


# Of a function that makes one phase of several passes, such as half a backward pass of a pipeline.
as_backward = functools.partial(_recorded, _BACKWARD)


def _begin(phase: int, owner: int = 0) -> Open | None:
    """Begins a phase of this thread; None where it is inside another, or nothing is recorded."""
    recorder, outer = _recorder, getattr(_here, "open", None)
    # The engine of a GPU repeats forward passes and updates weights in a thread of its own.
    if recorder is None or (outer is None and in_backward()):
        return None
    if outer is not None:
        # No optimizer calls its hook after an error: its own next step, or the model's next phase,
        # ends the step.
        is_inside = phase == _OPTIMIZER and owner != outer.owner
        if outer.phase != _OPTIMIZER or is_inside:
            return None
        recorder.end(outer)
    _here.open = opened = recorder.begin(phase, owner)
    return opened


def _end(opened: Open) -> None:
    if _recorder is not None and _here.open == opened:
        _recorder.end(opened)
        _here.open = None


def _begin_step(stepped: torch.optim.Optimizer, *_: Any) -> None:
    if not torch.compiler.is_compiling():
        _begin(_OPTIMIZER, id(stepped))


def _end_step(stepped: torch.optim.Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return
    outer = getattr(_here, "open", None)
    if outer is not None and outer.owner == id(stepped):
        _end(outer)
