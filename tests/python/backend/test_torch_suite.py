"""Some of PyTorch's own tests, through the runner that `make test-torch` calls for all of them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

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
