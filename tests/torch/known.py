"""What is known of single tests of torch's: those that fail on ringcomm, with the reason, and those
with a race of their own.

An entry of FAILING whose test passes is an error, and so is a failure without an entry.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

__all__ = ["is_racy", "why_failing"]

Entry = tuple[str, str, str]  # patterns of the mode and of the test, and the reason

FAILING: tuple[Entry, ...] = (
    (
        "gloo-*",
        "test_ddp_logging_data_cpu",
        "asserts that DDP's logging names the backend; torch writes `custom` for every plug-in",
    ),
    (
        "gloo-*",
        "test_monitored_barrier_gloo*",
        "asserts Gloo's words; ringcomm says that a rank did not come within so many ms",
    ),
)

RACY: tuple[Entry, ...] = (
    (
        "rpc",
        "DdpUnderDistAutogradTest.test_backward_ddp_inside",
        "one rank asks others by RPC to use a group that they may not have made yet",
    ),
)


def _find(entries: tuple[Entry, ...], mode: str, test: str) -> str | None:
    for mode_pattern, test_pattern, reason in entries:
        if fnmatchcase(mode, mode_pattern) and fnmatchcase(test, test_pattern):
            return reason
    return None


def why_failing(mode: str, test: str) -> str | None:
    """Why the test is known to fail in the mode; None where it is expected to pass."""
    return _find(FAILING, mode, test)


def is_racy(mode: str, test: str) -> bool:
    """Whether the test may fail by chance, whatever the backend."""
    return _find(RACY, mode, test) is not None
