"""The backward pass that runs in this thread, and what objects keep until a pass ends."""

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

from ringcomm import torch_names

State = TypeVar("State")

# Whether the current pass will run a node of its graph. Raises RuntimeError if the engine cannot
# tell: for a leaf in torch.autograd.grad(), and outside of backward passes.
will_run = torch_names.will_run

# Whether the current pass retains its graph.
keeps_graph = torch_names.keeps_graph

# The node that runs in this thread; None without one. At the end of a nested pass it is the node of
# the outer pass that has run it.
running_node = torch_names.running_node


# A backward pass: torch's number of one run of autograd's engine, never used again. A pass inside
# another one is a pass of its own: a reentrant checkpoint runs one for each segment, and a
# torch.autograd.Function may call backward() in its backward.
BackwardPass: TypeAlias = int


def current_pass() -> BackwardPass | None:
    """The backward pass that runs in this thread, the innermost if nested; None without one."""
    graph_task = torch_names.graph_task()
    return None if graph_task == torch_names.NO_GRAPH_TASK else graph_task


def in_backward() -> bool:
    """Whether a backward pass runs in this thread."""
    return current_pass() is not None


def _nothing(*_: Any) -> Any:
    return None


class OpenPasses(Generic[State]):
    """The backward passes that an object has entered and that have not ended, with a state of each.

    The engine does not report that a pass has raised. Such a pass stays open until forget().
    Outside of backward passes, an open pass is therefore one that has raised.
    """

    def __init__(self) -> None:
        self._states: dict[BackwardPass, State] = {}

    def __bool__(self) -> bool:
        """Whether a pass is open."""
        return bool(self._states)

    def enter(
        self, end: Callable[[State], Any] = _nothing, begin: Callable[[], State] = _nothing
    ) -> State:
        """The state of the current pass; the first call in a pass makes it by `begin`.

        When the pass ends, it is no longer open, and `end` gets the state. If `end` raises, the
        pass has raised and is open again. This object holds neither function.
        """
        current = current_pass()
        if current is None:
            raise RuntimeError("no backward pass runs in this thread")
        if current not in self._states:
            # Noted first: hooks of one pass may run in several threads.
            state = self._states[current] = begin()
            try:
                torch_names.queue_callback(partial(self._ended, current, state, end))
            except BaseException:
                self._states.pop(current, None)
                raise
        return self._states[current]

    def _ended(self, ended: BackwardPass, state: State, end: Callable[[State], Any]) -> None:
        self._states.pop(ended, None)
        try:
            end(state)
        except BaseException:
            self._states[ended] = state
            raise

    def forget(self) -> None:
        """Closes all passes. One that still runs is entered again by the next call."""
        self._states.clear()
