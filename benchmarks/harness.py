"""The harness: ranks, flags, records and the printed table of a benchmark.

A benchmark is a ``Program``: what it measures on a rank, which flags it has, and what its table
shows. `race` times contenders in turn, `report` has records and tables.

Import this before torch and ``model``, the examples' model, which it puts on the path: it allows
one thread per rank.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

# Last: programs there have the same names as scripts here.
sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

import placement  # noqa: E402
import torch.distributed as dist  # noqa: E402
from cells import CHECKOUT as ROOT  # noqa: E402
from cells import RESULTS, Columns, Record  # noqa: E402
from front_door import CommandLine, flag  # noqa: E402
from groups import run_ranks  # noqa: E402
from layouts import LAYOUTS  # noqa: E402
from race import Bench, make_bench  # noqa: E402
from report import Report, default_path, table_of  # noqa: E402
from table import tables  # noqa: E402

from _ringcomm.status import run_main  # noqa: E402
from ringcomm.measure.ranks import Team  # noqa: E402

__all__ = ["RESULTS", "ROOT", "Bench", "Program", "Report", "default_path", "flag"]

Options = argparse.Namespace


@dataclass(frozen=True, kw_only=True)
class Program(CommandLine):
    """A benchmark: what differs from the others, besides its options.

    Attributes:
        kind: of its records.
        columns: of the printed table.
        rank: measures on one of the forked ranks, where rank 0 reports records. Collective.
        measure: for one that forks ranks itself or has none; by default ``run_worlds``.
        world: the number of ranks, unless there is --worlds, --world or --world-size.
        check: raises ValueError for options that cannot be measured here; may complete them.
        file: the file of the records, without date and ending, unless --json names one; by
            default the kind.
        facts: fields of all records besides device and number of ranks; also another ``kind``.
        named: options that are fields of all records.
        section: fields where the table has a rule when they change.
        caption: below the table.
        title: above it.
        show: what is printed of the records, instead of title and table. Without columns it is what
            pages show of them.
    """

    kind: str
    columns: Columns = ()
    rank: Callable[[Bench, Options], None] = lambda bench, options: None
    measure: Callable[[Options, Report], None] | None = None
    world: int = 1
    check: Callable[[Options], None] = lambda options: None
    file: Callable[[Options], str] | None = None
    facts: Callable[[Options], Mapping[str, Any]] = lambda options: {}
    named: Sequence[str] = ()
    section: tuple[str, ...] = ()
    caption: str = ""
    title: Callable[[Options], str] | None = None
    show: Callable[[Options, list[Record]], list[Any]] | None = None

    def parse(self, argv: list[str]) -> Options:
        """Parses a script's command line; exits with a message for invalid options."""
        parser = argparse.ArgumentParser(
            description=(self.doc or "").splitlines()[0],
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        self.add_arguments(parser, " (default: benchmarks/results/DATE-...)")
        options = parser.parse_args(argv)
        self._complete(options)
        file = self.file(options) if self.file else self.kind
        options.json = options.json or default_path(file)
        return options

    def _complete(self, options: Options) -> None:
        try:
            if library := vars(options).get("nccl_library"):
                placement.preload(library)  # starts the program again
            options.placement = placement.placement_of(options)
            self.check(options)
        except ValueError as error:
            options.parser.error(str(error))

    def run(self, options: Options) -> int:
        """Checks options and measures: an operation of ``ringcomm bench``."""
        self._complete(options)
        return self._measure(options)

    def main(self, argv: list[str]) -> int:
        """Measures, prints and appends records; returns the exit code, 3 when any was wrong."""
        return self._measure(self.parse(argv))

    def run_script(self) -> NoReturn:
        """Runs a script with the process's command line, and ends the process."""
        sys.exit(run_main(Path(sys.argv[0]).name, self.main))

    def _measure(self, options: Options) -> int:
        given, worlds = vars(options), self._worlds(options)
        facts = {"kind": self.kind, "html": given.get("html"), "path": options.json}
        facts |= {"world_size": worlds[0]} if len(worlds) == 1 else {}
        facts |= placement.facts(options.placement)
        facts |= {name: given[name] for name in self.named}
        report = Report(**{**facts, **self.facts(options)})

        def show() -> list[Any]:
            if self.show is not None:
                return self.show(options, report.records)
            if not self.columns:
                return tables(report.whole(), LAYOUTS[self.kind])
            title = [self.title(options)] if self.title else []
            return [*title, table_of(self.columns, self.caption, report.records, self.section)]

        mps = given.get("mps", False)
        sharing = placement.shared(mps, options.placement, max(worlds))
        with sharing, report.measuring(show):
            (self.measure or self.run_worlds)(options, report)
        return report.finish(*show())

    def run_worlds(self, options: Options, report: Report) -> None:
        """Runs ``rank`` on each number of ranks in turn, and adds what rank 0 reports."""
        for world_size in self._worlds(options):

            def add(records: list[Record], world_size: int = world_size) -> None:
                report.add([{"world_size": world_size, **record} for record in records])

            run_ranks(world_size, partial(self.run_rank, options=options), add)

    def _worlds(self, options: Options) -> list[int]:
        given = vars(options)
        one = given.get("world", given.get("world_size", self.world))
        return given.get("worlds") or [one]

    def run_rank(self, team: Team, options: Options) -> None:
        """Runs ``rank`` on a rank, and ends its default group. Collective."""
        self.rank(make_bench(team, options), options)
        if dist.is_initialized():
            dist.destroy_process_group()
