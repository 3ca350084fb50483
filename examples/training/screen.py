"""What the user sees while it runs: rank 0 speaks, the others keep silent."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn

REFRESH_S = 0.25
# Without a terminal (a pipe, CI) a line now and then takes the place of the live one.
PLAIN_LINE_S = 5.0


class LiveLine:
    """One line with a bar, redrawn in place by ``show``; it has no thread that could disturb."""

    def __init__(self, console: Console, speaks: bool) -> None:
        self._console = console
        self._speaks = speaks
        self._next = 0.0
        self._last = ""
        self._shown = ""
        self._progress = Progress(
            BarColumn(bar_width=16),
            TextColumn("{task.description}"),
            console=console,
            auto_refresh=False,
        )
        self._task = self._progress.add_task("", total=1.0)

    def __enter__(self) -> LiveLine:
        if self._speaks and self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._speaks and self._console.is_terminal:
            self._progress.refresh()
            self._progress.stop()
        elif self._speaks and self._last != self._shown:
            self._console.print(self._last)

    def due(self) -> bool:
        """Whether it is time for a new line; building one costs as much as drawing it."""
        return self._speaks and time.perf_counter() >= self._next

    def show(self, share_done: float, text: str) -> None:
        """Replaces the line; ``share_done`` in [0, 1]. ``text`` may hold rich markup."""
        self._last = text
        if not self.due():
            return
        terminal = self._console.is_terminal
        self._next = time.perf_counter() + (REFRESH_S if terminal else PLAIN_LINE_S)
        self._progress.update(self._task, completed=share_done, description=text)
        if terminal:
            self._progress.refresh()
        else:
            self._console.print(text)
            self._shown = text


class Screen:
    """Rank 0's console; every method does nothing on other ranks."""

    def __init__(self, speaks: bool) -> None:
        self.console = Console(quiet=not speaks, highlight=False, soft_wrap=True)
        self._speaks = speaks

    def title(self, text: str) -> None:
        """Begins a phase."""
        self.console.print(f"\n[bold]{text}[/bold]")

    def say(self, text: str) -> None:
        """One line of markup."""
        self.console.print(text)

    def quote(self, text: str) -> None:
        """Text that is not ours: no markup, indented."""
        self.console.print(f"  [italic]{escape(text)}[/italic]")

    def failure(self, text: str) -> None:
        """A promise that did not hold; said by whichever rank found it."""
        Console(stderr=True, highlight=False).print(f"[bold red]FAILED[/bold red] {escape(text)}")

    def live(self) -> LiveLine:
        """A line that changes, for use in a ``with``."""
        return LiveLine(self.console, self._speaks)
