"""Phase 2, after the ranks have ended: `ringcomm bench systems` races the two backends."""

from __future__ import annotations

import sys
from pathlib import Path

from ringcomm import cli
from ringcomm.measure.ranks import RankError
from training.launch import EXIT_FAILED
from training.model import PRESETS
from training.options import RACE_TOKENS, Options

SYSTEMS = ("ddp", "zero-1", "lomo")
HEAD_WIDTH = 32


def race(options: Options, run_dir: Path) -> int:
    """Races the systems over ringcomm and the other backend; the exit status, 3 for wrong losses.

    Records go to ``run_dir/race.jsonl``.
    """
    config = PRESETS[options.race_size]
    rows, context = RACE_TOKENS[options.tokens]
    splits = config.dim // HEAD_WIDTH >= options.world_size and context % options.world_size == 0
    systems = [*SYSTEMS, *(["tensor"] if splits else [])]
    (other,) = set(options.backends) - {"ringcomm"}
    words = {
        "--systems": ",".join(systems),
        "--over": other,
        "--world-size": options.world_size,
        "--width": config.dim,
        "--layers": config.num_layers,
        "--rows": rows,
        "--tokens": context,
        "--seconds": options.race_seconds,
        "--repeats": 0,
        "--json": run_dir / "race.jsonl",
    }
    print(f"\n2  races of {', '.join(systems)}, {rows} × {context} tokens per rank", flush=True)
    try:
        return cli.run(["bench", "systems", *(str(w) for pair in words.items() for w in pair)])
    except RankError as error:
        print(f"train: {error}", file=sys.stderr)
        return EXIT_FAILED
