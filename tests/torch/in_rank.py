"""What a rank does for one of torch's tests: puts the backend in place, and runs the test.

The tests name "gloo" or "mpi"; here that means the backend under test. Some of torch's functions
and lists go by the name and leave out every plug-in: those are told about ours.
"""

from __future__ import annotations

import datetime
import os
import unittest
from pathlib import Path
from typing import Any

import suites

__all__ = ["run_test"]

# They compare what a group says of its backend with BACKEND, so that must be the true name.
COMPARE_NAMES = ("test_get_backend", "test_Backend_enum_class")
# Where the tests look up which backends record profiler events.
PROFILED_LISTS = ("PROFILING_SUPPORTED_BACKENDS", "SEND_RECV_PROFILING_SUPPORTED_BACKENDS")


def run_test(rank: int, mode: suites.Mode, name: str, backend: str, folder: str) -> str | None:
    """Runs one test on this rank; returns the reason if it was skipped.

    Args:
        folder: an empty one, the same for all ranks.

    Raises:
        BaseException: whatever the test raises.
    """
    from torch.testing._internal.common_distributed import TEST_SKIPS

    _make_folders(Path(folder))
    _substitute(mode.pretend, backend)
    if not mode.is_rpc:
        _set_module(mode, name, backend, folder)
    prefix, _, method = name.rpartition(".")
    tests: Any = suites.test_classes(mode)[prefix]
    try:
        tests._run(rank, method, f"{folder}/store", None)
    except unittest.SkipTest as skip:
        return str(skip)
    except SystemExit as end:
        skips = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
        if end.code in skips:
            return skips[end.code]
        if end.code:
            raise
    return None


def _make_folders(folder: Path) -> None:
    """What torch's tests meet in: a barrier of files, for one."""
    for name in ("barrier", "test_dir", "init_dir"):
        (folder / name).mkdir(exist_ok=True)
    os.environ["TEMP_DIR"] = str(folder)
    os.environ["INIT_METHOD"] = f"file://{folder}/init_dir/shared_init_file"


def _set_module(mode: suites.Mode, name: str, backend: str, folder: str) -> None:
    from torch.testing._internal.distributed import distributed_test

    module: Any = distributed_test
    module.INIT_METHOD = os.environ["INIT_METHOD"]
    module.BACKEND = backend if name in COMPARE_NAMES else mode.pretend
    for profiled in PROFILED_LISTS:
        if backend not in getattr(module, profiled):
            getattr(module, profiled).append(backend)


def _substitute(pretend: str, backend: str) -> None:
    """Groups asked for by the pretended name, or by "gloo", are made with `backend`."""
    import torch.distributed as dist

    names = {pretend, "gloo"}

    def replaced(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("backend") in names:
                kwargs["backend"] = backend
            if args and args[0] in ("gloo", "mpi"):
                args = (backend, *args[1:])
            return function(*args, **kwargs)

        return call

    module: Any = dist
    module.init_process_group = replaced(dist.init_process_group)
    module.new_group = replaced(dist.new_group)
    if backend != "gloo":
        module.monitored_barrier = _monitored_barrier


def _monitored_barrier(
    group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
) -> None:
    """What dist.monitored_barrier does once it has refused every backend but "gloo" by name."""
    import torch.distributed as dist
    from torch.distributed.constants import default_pg_timeout

    if isinstance(timeout, float):
        timeout = datetime.timedelta(seconds=timeout)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return
    members: Any = group or dist.group.WORLD
    members.monitored_barrier(timeout or default_pg_timeout, wait_all_ranks=wait_all_ranks)
