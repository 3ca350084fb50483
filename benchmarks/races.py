#!/usr/bin/env python3
"""Records the races of the main job: whole training steps over ringcomm and Gloo, in turn.

    python benchmarks/races.py --tokens default,small

Runs examples/train.py once per --tokens, after no more learning than its checks need. One JSON
line per race is appended to benchmarks/results; `table.py --kind races` makes a table of them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# isort: off
import harness  # before torch: it sets the number of threads

# isort: on
from report import Report, comparison, read_records
from training.cli import make_parser
from training.launch import EXIT_CHECK_FAILED
from training.model import PRESETS
from training.options import RACE_TOKENS

from ringcomm.measure.ranks import EXIT_OK, run_main
from ringcomm.measure.screen import as_option, table_of, words

# The 20 steps that the job replays over the other backend and in one process, and one more.
LEARN_STEPS = 21
# Beside the races: learning, replays, evaluation, and the pairs of steps that they take at least.
OTHER_SECONDS = 600.0
# Of a race as the job logs it; see RaceResult in examples/training/race.py. Lists of two are by
# backend, in the order of "backends".
RACE_FIELDS = (
    *("step_s", "comm_s", "blocking_step_s", "sent_bytes", "formula_bytes"),
    *("params_bytes", "grads_bytes", "states_bytes", "others_share", "no_claim"),
)


def records_of(log: list[dict[str, Any]], is_verified: bool) -> list[dict[str, Any]]:
    """One record per race in a run's ``train.jsonl``."""
    options = next(entry["options"] for entry in log if entry["kind"] == "run")
    rows_per_rank, context = RACE_TOKENS[options["tokens"]]
    common = {
        "world_size": options["world_size"],
        "device": options["device"],
        "backends": options["backends"],
        "size": options["race_size"],
        "num_params": PRESETS[options["race_size"]].num_params,
        "tokens": options["tokens"],
        "rows_per_rank": rows_per_rank,
        "tokens_per_row": context,
        "race_seconds": options["race_seconds"],
    }
    records = []
    for race in (entry for entry in log if entry["kind"] == "race"):
        middle, low, high = race["ratio"]
        ratio = {"over": options["backends"][0], "p50": middle, "p10": low, "p90": high}
        records.append(
            {
                **common,
                "system": race["name"],
                "num_pairs": race["num_pairs"],
                "ratio": ratio if is_verified else None,  # a wrong result is not a fast one
                **{field: race[field] for field in RACE_FIELDS},
                "formula_bytes": round(race["formula_bytes"]),  # records would round a float
                "verified": is_verified,
                "quiet": race["no_claim"] is None,
            }
        )
    return records


def run_job(tokens: str, race_seconds: float) -> list[dict[str, Any]]:
    """Runs the main job and returns its races. Raises ValueError when it fails."""
    with tempfile.TemporaryDirectory(prefix="ringcomm-bench-") as folder:
        command = [sys.executable, str(harness.ROOT / "examples" / "train.py")]
        command += ["--steps", str(LEARN_STEPS), "--tokens", tokens]
        command += ["--race-seconds", str(race_seconds), "--out", folder]
        limit = OTHER_SECONDS + 2 * race_seconds
        try:
            # Its ranks die with it, whatever ends it.
            run = subprocess.run(
                command, check=False, capture_output=True, text=True, timeout=limit
            )
        except subprocess.TimeoutExpired:
            raise ValueError(f"train.py did not end in {limit:.0f} s") from None
        if run.returncode not in (EXIT_OK, EXIT_CHECK_FAILED):
            said = (run.stdout + run.stderr)[-2000:]
            raise ValueError(f"train.py ended with exit code {run.returncode}:\n{said}")
        if run.returncode == EXIT_CHECK_FAILED:
            print(run.stdout, run.stderr, sep="", file=sys.stderr)
        log = read_records(Path(folder).glob("*/train.jsonl"))
    return records_of(log, run.returncode == EXIT_OK)


def row_of(record: dict[str, Any]) -> list[str]:
    """A record for people."""
    others = record["others_share"]
    return [
        *(record["tokens"], record["system"], str(record["num_pairs"])),
        *(" / ".join(f"{1e3 * s:.1f}" for s in record[key]) for key in ("step_s", "comm_s")),
        comparison(record),
        "?" if others is None else f"{100 * others:.1f}",
    ]


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line; ends the process with a message when it makes no sense."""
    budget = make_parser().get_default("race_seconds")
    parser = harness.make_parser(__doc__)
    add = parser.add_argument
    add(
        "--tokens",
        type=as_option(words),
        default=",".join(RACE_TOKENS),
        help="a run of the job for each",
    )
    add("--seconds", type=float, default=budget, help="per run, for all its races")
    options = parser.parse_args(argv)
    for name in set(options.tokens) - set(RACE_TOKENS):
        parser.error(f"--tokens: {name!r} is not one of {', '.join(RACE_TOKENS)}")
    options.json = options.json or harness.default_path("races-w2")
    return options


def main(argv: list[str]) -> int:
    """Runs the job for each of --tokens; returns the exit code, 3 when a check of it failed."""
    options = parse(argv)
    report = Report("races", options.json)
    for tokens in options.tokens:
        report.add(run_job(tokens, options.seconds))
    headers = ["tokens", "system", "pairs", "step ms", "comm ms", "time over", "others %"]
    caption = "Times: ringcomm / Gloo. * no ratio is claimed; the record says why."
    return report.finish(table_of(headers, caption, report.records, row_of, ("tokens",)))


if __name__ == "__main__":
    sys.exit(run_main("races.py", main))
