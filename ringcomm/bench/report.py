"""A run's records on their way to a file, and to the screen at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ringcomm.bench import machine
from ringcomm.bench.exit_codes import EXIT_OK, EXIT_WRONG_RESULTS
from ringcomm.bench.records import Recorder
from ringcomm.bench.wording import facts_line


class Report:
    """Collects records, each with the same facts in front. Raises OSError where it cannot write.

    Attributes:
        console: of rich, which this needs and communicating does not.
        facts: the kind, those of the machine, and the run's dimensions.
        records: without the facts, in order.
    """

    def __init__(self, kind: str, path: Path | None, **dimensions: Any) -> None:
        """``path``: the file that gets the records, if any."""
        from ringcomm.bench.screen import make_console

        self.console = make_console()
        self.facts = {"kind": kind, **machine.facts(), **dimensions}
        self.records: list[dict[str, Any]] = []
        self._recorder = Recorder(path, self.facts) if path else None

    def add(self, records: list[dict[str, Any]]) -> None:
        """Takes what a rank has reported; it is on disk when this returns."""
        if self._recorder is not None:
            for record in records:
                self._recorder.write(record)
        self.records += records

    def finish(self, *shown: Any) -> int:
        """Prints where the records are from, and ``shown``, unless another rank has them.

        Returns:
            The exit code: EXIT_WRONG_RESULTS when any record is not verified.
        """
        if not self.records:  # a launcher's other rank prints
            return EXIT_OK
        self.console.print(facts_line(self.facts), *shown, sep="\n")
        if self._recorder is not None:
            self.console.print(f"records: {self._recorder.path}")
        is_right = all(record["verified"] for record in self.records)
        return EXIT_OK if is_right else EXIT_WRONG_RESULTS
