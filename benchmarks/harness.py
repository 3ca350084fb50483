"""Where the scripts' records go, and what must happen before they import torch.

Import this before torch and ``training``, the main job's package, which it puts on the path: it
allows one thread per rank. How they measure stands in ``ringcomm.bench``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from ringcomm.bench.machine import RECORDS_FOLDER  # noqa: E402
from ringcomm.bench.records import utc_now  # noqa: E402

RESULTS = ROOT / RECORDS_FOLDER


def default_path(name: str) -> Path:
    """``benchmarks/results/<UTC date>-<name>.jsonl``."""
    return RESULTS / f"{utc_now().date()}-{name}.jsonl"
