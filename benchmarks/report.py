"""Records: one JSON object a line, from a measurement to a file and to the screen."""

from __future__ import annotations

import json
import platform
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from cells import CHECKOUT, RECORDS_FOLDER, RESULTS, Columns, Record, column_of, facts_line
from html_report import write_html
from rich.console import Console
from rich.table import Table
from torch.utils import collect_env

import ringcomm
from _ringcomm.status import EXIT_OK, EXIT_WRONG_RESULTS, RankError
from ringcomm.measure.machine import identity, rounded, utc_now, variables
from ringcomm.measure.timing import Timings

GIT_TIMEOUT_S = 60.0
CPU_FACTS = (
    r"^(Model|CPU family|Core.* per socket|Thread.* per core|Socket.*|NUMA node.s."
    r"|Hypervisor vendor|L\d.? cache): +(.+)$"
)
# Columns of a table that is not written to a terminal.
FILE_COLUMNS = 200
TEXT_COLUMNS = ("op", "backend", "algorithm", "state", "system", "type", "mode", "redop")


def default_path(name: str) -> Path:
    """``benchmarks/results/<UTC date>-<name>.jsonl``."""
    return RESULTS / f"{utc_now().date()}-{name}.jsonl"


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(CHECKOUT), *arguments]
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=GIT_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip()


def _commit_facts() -> dict[str, Any]:
    """The current commit, and whether it is modified; None for both in an installed package."""
    top = _git("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != CHECKOUT:  # another repository
        return {"commit": None, "dirty": None}
    changes = _git("status", "--porcelain", "--", ".", f":!{RECORDS_FOLDER}")
    return {
        "commit": _git("rev-parse", "HEAD"),
        "dirty": None if changes is None else changes != "",
    }


def _cpu() -> dict[str, str]:
    """What a CPU's times depend on besides its model, in lscpu's words, as far as it is there."""
    return dict(re.findall(CPU_FACTS, collect_env.get_cpu_info(collect_env.run) or "", re.M))


def facts() -> dict[str, Any]:
    """What every record begins with. `date` is the run's, `dirty` leaves the records out."""
    return {
        "date": utc_now().isoformat(),
        **_commit_facts(),
        "machine": {**identity(), "lscpu": _cpu()},
        "torch": torch.__version__,
        "ringcomm": ringcomm.__version__,
        "python": platform.python_version(),
        "threads_per_rank": 1,
        "environment": variables("RINGCOMM_", "GLOO_"),
    }


def records_of(
    timings: dict[str, Timings], subject: str, wrong: dict[str, int], name: str = "backend"
) -> list[dict[str, Any]]:
    """A record per contender: its times, and how they compare with the subject's.

    ``wrong`` has elements by contender; without any it is verified, and only such are compared.
    ``name`` is the field that holds the contender.
    """
    records = []
    for label, timing in timings.items():
        ratio = None
        if label != subject and not (wrong[label] or wrong[subject]):
            ratio = {"over": subject, **timing.ratio_over(timings[subject])}
        records.append(
            {
                name: label,
                **timing.summary_us(),
                "num_calls": timing.num_calls(),
                "ratio": ratio,
                "wrong_elems": wrong[label],
                "verified": wrong[label] == 0,
            }
        )
    return records


class Report:
    """Collects records, each with the same facts in front. Raises OSError where it cannot write.

    Attributes:
        console: of rich, which this needs and communicating does not.
        facts: the kind, those of the machine, and the run's dimensions.
        records: without the facts, in order.
    """

    def __init__(
        self, kind: str, path: Path | None, html: Path | None = None, **dimensions: Any
    ) -> None:
        """``path``: the file that gets the records, if any; ``html``: a page of them."""
        self.console = make_console()
        self.facts = {"kind": kind, **facts(), **dimensions}
        self.records: list[dict[str, Any]] = []
        self._path = path
        self._html = html
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a", encoding="utf-8").close()

    def _whole(self, records: list[Record]) -> list[Record]:
        return [{**self.facts, **rounded(record)} for record in records]

    def _write_html(self, is_partial: bool) -> None:
        if self._html is not None:
            write_html(self._whole(self.records), self._html, is_partial=is_partial)

    def add(self, records: list[dict[str, Any]]) -> None:
        """Adds records and appends a line for each to the file, for readers during the run."""
        if self._path is not None:
            lines = [json.dumps(one, allow_nan=False) + "\n" for one in self._whole(records)]
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(lines)
        self.records += records
        self._write_html(is_partial=True)

    def whole(self) -> list[Record]:
        """The records as the file has them."""
        return self._whole(self.records)

    @contextmanager
    def measuring(self, show: Callable[[], Sequence[Any]]) -> Iterator[None]:
        """A context for adding records: after Ctrl-C, or where ranks fail, records are shown.

        ``show`` makes what ``finish`` prints of the records.
        """
        try:
            yield
        except (KeyboardInterrupt, RankError):
            if self.records:
                self._print(f"interrupted after {len(self.records)} records:", *show())
            raise

    def _print(self, *shown: Any) -> None:
        lines = (facts_line(self.facts), *(fitted(self.console, one) for one in shown))
        how: Any = {"no_wrap": True, "overflow": "ignore", "crop": False}
        self.console.print(*lines, sep="\n", **how)
        if self._path is not None:
            self.console.print(f"records: {self._path}")

    def finish(self, *shown: Any) -> int:
        """Prints where the records are from, and ``shown``, unless another rank has them.

        Returns:
            The exit code: EXIT_WRONG_RESULTS when any record is not verified.
        """
        if not self.records:  # a launcher's other rank prints
            return EXIT_OK
        self._print(*shown)
        self._write_html(is_partial=False)
        if self._html is not None:
            self.console.print(f"page: {self._html}")
        is_right = all(record["verified"] for record in self.records)
        return EXIT_OK if is_right else EXIT_WRONG_RESULTS


class _Console(Console):
    """Passes on that the reader of a pipe has gone, for run_main; rich's own exits with 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def make_console() -> Console:
    """A console on stdout; wide enough for the tables when that is a file."""
    console = _Console(highlight=False)
    if not console.is_terminal:
        console.width = FILE_COLUMNS
    return console


def fitted(console: Console, shown: Any) -> Any:
    """``shown``; of a table that is wider than the console, a line for each of its figures."""
    if not isinstance(shown, Table):
        return shown
    unlimited = console.options.update(width=1000)
    if console.measure(shown, options=unlimited).maximum <= console.width:
        return shown
    headers = [str(column.header) for column in shown.columns]
    width = max(map(len, headers))
    rows = zip(*(list(column.cells) for column in shown.columns), strict=True)
    lines = []
    for row in rows:
        lines += [f"{h.ljust(width)}  {cell}" for h, cell in zip(headers, row, strict=True) if cell]
        lines.append("")
    return "\n".join([*lines, str(shown.caption or "")])


def make_table(headers: list[str], caption: str) -> Table:
    """An empty table: words to the left, numbers to the right, a caption below."""
    table = Table(caption=caption or None, caption_justify="left")
    for header in headers:
        justify = "left" if header in TEXT_COLUMNS else "right"
        table.add_column(header, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    return table


def table_of(
    columns: Columns, caption: str, records: list[Record], section: tuple[str, ...] = ()
) -> Table:
    """A row per record, with a rule where a field of ``section`` changes."""
    headers, cells = zip(*map(column_of, columns), strict=True)
    table = make_table(list(headers), caption)
    for _, together in groupby(records, key=lambda record: [record[name] for name in section]):
        for record in together:
            table.add_row(*(cell(record) for cell in cells))
        table.add_section()
    return table
