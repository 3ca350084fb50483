"""Record files, common options, and setup that must run before scripts import torch.

Import this before torch and ``model``, the examples' model, which it puts on the path: it allows
one thread per rank. Ranks and timing are in ``ringcomm.measure``.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

# Last: programs there have the same names as scripts here.
sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

from report import CHECKOUT as ROOT  # noqa: E402
from report import RESULTS, default_path  # noqa: E402

__all__ = ["RESULTS", "ROOT", "default_path", "make_parser"]


def make_parser(
    doc: str | None, seconds: float | None = None, per: str = ""
) -> argparse.ArgumentParser:
    """A parser with the scripts' common options.

    The first line of ``doc``, the script's, describes it. ``seconds`` is the default of --seconds,
    which each ``per`` is given; without it there are neither --seconds nor --repeats.
    """
    parser = argparse.ArgumentParser(
        description=(doc or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    if seconds is not None:
        add("--seconds", type=float, default=seconds, help=f"per {per}")
        add("--repeats", type=int, default=3, help="at most, while others disturb the machine")
    add("--json", type=Path, help="append records here (default: benchmarks/results/DATE-...)")
    return parser
