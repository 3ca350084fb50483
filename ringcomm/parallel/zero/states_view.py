"""What `optimizer.state` is, without keeping states twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any


class StatesView(Mapping[Any, dict[str, Any]]):
    """The states of the parameters that have been updated; made when they are looked up."""

    def __init__(
        self,
        params: Callable[[], list[Any]],
        has_state: Callable[[Any], bool],
        state_of: Callable[[Any], dict[str, Any]],
    ) -> None:
        self._params, self._has_state, self._state_of = params, has_state, state_of

    def __getitem__(self, param: Any) -> dict[str, Any]:
        """Of any parameter; {} before its first update."""
        return self._state_of(param)

    def __iter__(self) -> Iterator[Any]:
        """The parameters with a state."""
        return (param for param in self._params() if self._has_state(param))

    def __len__(self) -> int:
        """Their number."""
        return sum(1 for _ in self)
