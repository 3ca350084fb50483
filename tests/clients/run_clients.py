"""Runs programs of other projects over Gloo and over ringcomm, and compares what they compute.

Usage: python tests/clients/run_clients.py [NAME...] [--short] [--source NAME=FOLDER] [--record]

A client is a file of this folder with REQUIREMENTS; client_files.py has its constants. Each run is
bounded, and its environment and source are kept in .cache/clients. Ends with status 1 if a client
differs or fails. --record keeps the results in results/, of which the site's table is made.
"""

from __future__ import annotations

import argparse
import datetime
import json
import signal
import sys
from pathlib import Path

import client_files
import client_runs
from client_files import RESULTS, Client, said
from client_runs import BACKENDS, Result
from rich.console import Console
from rich.table import Table

STYLES = {"equal": "green", "close": "green", "only ringcomm": "green"}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python tests/clients/run_clients.py", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="files that begin so (default: all)")
    add("--short", action="store_true", help="those that CI runs")
    add("--source", action="append", default=[], metavar="NAME=FOLDER", help="a client's source")
    add("--record", action="store_true", help="keep the results in tests/clients/results")
    return parser.parse_args(argv)


def choose(clients: list[Client], names: list[str], is_short: bool) -> list[Client]:
    """The clients that begin with one of the names; raises SystemExit where a name has none."""
    for name in names:
        if not any(client.name.startswith(name) for client in clients):
            known = ", ".join(client.name for client in clients)
            raise SystemExit(f"no client begins with {name}; there are {known}")
    chosen = [one for one in clients if not names or one.name.startswith(tuple(names))]
    return [client for client in chosen if client.is_short or not is_short]


def show(console: Console, results: dict[str, Result]) -> None:
    """Prints the table of results."""
    table = Table("client", "versions", "result", "gloo s", "ringcomm s", title="Clients")
    for name, result in results.items():
        seconds = [f"{result.seconds[b]:.1f}" if b in result.seconds else "" for b in BACKENDS]
        style = STYLES.get(result.status, "red")
        table.add_row(name, said(result.versions), f"[{style}]{result.status}", *seconds)
    console.print(table)
    for name, result in results.items():
        if result.text:
            console.print(f"{name}: {result.status}: {result.text}", markup=False, highlight=False)


def record(clients: list[Client], results: dict[str, Result]) -> None:
    """Writes results/NAME.json of all that ran and passed."""
    RESULTS.mkdir(exist_ok=True)
    for client in clients:
        result = results[client.name]
        if result.is_wrong:
            continue
        kept = {
            "date": datetime.date.today().isoformat(),
            "ranks": client.ranks,
            "versions": result.versions,
            "status": result.status,
            "text": result.text,
        }
        path = RESULTS / f"{client.name}.json"
        path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Runs, prints, compares; returns the exit status."""
    options = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the run under way as well
    given = {}
    for pair in options.source:
        name, _, folder = pair.partition("=")
        if not Path(folder).is_dir():
            raise SystemExit(f"--source {pair}: there is no folder {folder or '(NAME=FOLDER)'}")
        given[name] = Path(folder).resolve()
    clients = choose(client_files.read_all(), options.names, options.short)
    console = Console()
    results: dict[str, Result] = {}
    for client in clients:
        console.print(f"{client.name}: {client.what}", markup=False, highlight=False)
        results[client.name] = client_runs.compare(client, given)
        # A run that a time limit ends has no table.
        console.print(f"  {results[client.name].status}", markup=False, highlight=False)
    show(console, results)
    if options.record:
        record(clients, results)
    return int(any(result.is_wrong for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
