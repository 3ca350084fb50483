"""run_script(): a test script that Accelerate brings, and what it printed and computed."""

from __future__ import annotations

import contextlib
import importlib
import io
import zlib
from functools import partial
from typing import Any

from parameters import checksum, checksums
from torch import Tensor

COLLECTIVES = ("broadcast", "gather", "gather_object", "pad_across_processes", "reduce")


def run_script(name: str) -> dict[str, list[float]]:
    """Runs a script of accelerate.test_utils; it asserts what it computes.

    Rows of RegressionDataset, which test_sync draws anew in each process, get a seed.

    Returns checksums: of each line that this rank printed, of the result of each of COLLECTIVES
    that the script calls, and of the parameters after each optimizer step.
    """
    from accelerate.utils import set_seed

    set_seed(0)
    script: Any = importlib.import_module(f"accelerate.test_utils.scripts.{name}")
    results: list[float] = []

    def recorded(call: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            results.append(_checksum_of(result))
            return result

        return run

    if hasattr(script, "RegressionDataset"):
        script.RegressionDataset = partial(script.RegressionDataset, seed=0)
    for collective in COLLECTIVES:
        if hasattr(script, collective):
            setattr(script, collective, recorded(getattr(script, collective)))
    printed = io.StringIO()
    try:
        with checksums() as parameters, contextlib.redirect_stdout(printed):
            script.main()
    finally:
        print(printed.getvalue())
    lines = [float(zlib.crc32(line.encode())) for line in printed.getvalue().splitlines()]
    return {"lines": lines, "results": results, "parameters": parameters}


def _checksum_of(result: Any) -> float:
    if isinstance(result, Tensor):
        return checksum([result.contiguous()])
    return float(zlib.crc32(repr(result).encode()))
