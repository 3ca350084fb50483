"""Some of PyTorch's own tests, through the runner that `make test-torch` calls for all of them."""

from __future__ import annotations

import importlib.util
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RUNNER = Path(__file__).parents[2] / "torch" / "run.py"
needs_expecttest = pytest.mark.skipif(
    importlib.util.find_spec("expecttest") is None, reason="PyTorch's tests import expecttest"
)
# A test for each kind of thing that torch asks of a backend and the other files here do not: what
# profilers see, DDP's hooks and its uneven inputs, groups made and destroyed, time-outs.
CHOSEN = {
    "gloo-2": [
        "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
        "test_all_gather_coalesced_with_empty",
        "test_all_gather_complex",
        "test_all_reduce_coalesced_full_group_sum",
        "test_all_reduce_sum_async",
        "test_barrier_timeout_global",
        "test_batch_isend_irecv_gloo_tags",
        "test_ddp_create_graph",
        "test_destroy_full_group",
        "test_get_backend",
        "test_get_future",
        "test_isend_autograd_profiler",
        "test_reduce_product",
        "test_send_recv_any_source_torch_profiler",
        "test_static_graph_api_cpu",
    ],
    "rpc": ["DdpComparisonTest.test_ddp_comparison_uneven_inputs"],
}


@pytest.mark.slow
@needs_expecttest
@pytest.mark.parametrize("mode", CHOSEN)
def test_chosen_tests_of_torch_pass(mode: str) -> None:
    names = [argument for name in CHOSEN[mode] for argument in ("--test", name)]
    command = [sys.executable, str(RUNNER), "--mode", mode, "--verbose", *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{mode}: {len(CHOSEN[mode])} pass 0 skip 0 fail" in done.stdout


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names at the top of the runner."""
    monkeypatch.syspath_prepend(str(RUNNER.parent))
    return runpy.run_path(str(RUNNER))


KNOWN_FAILURE = "test_ddp_logging_data_cpu"


@pytest.mark.parametrize(
    ("test", "status", "says"),
    [
        ("test_barrier", "pass", []),
        ("test_barrier", "fail", ["gloo-2 test_barrier fails, and passes on Gloo"]),
        ("test_barrier", "skip", ["gloo-2 test_barrier is skipped, and passes on Gloo: why"]),
        ("test_new", "skip", []),
        ("test_new", "fail", ["gloo-2 test_new fails"]),
        (KNOWN_FAILURE, "fail", []),
        (KNOWN_FAILURE, "pass", [f"gloo-2 {KNOWN_FAILURE} passes: take it out of known.py"]),
    ],
)
def test_the_runner_judges(runner: dict[str, Any], test: str, status: str, says: list[str]) -> None:
    gloo = {("gloo-2", "test_barrier"): ("pass", "")}
    assert runner["judge"]([runner["Outcome"]("gloo-2", test, status, "why")], gloo) == says
