"""PyTorch's own distributed tests, as they ship in its wheel: which there are, and in which modes.

A mode is what must be fixed before torch's test modules are imported, for their decorators look at
BACKEND and WORLD_SIZE then. The tests of c10d are imported under the name of a backend that they
know ("gloo", or "mpi" for all_to_all), and the groups are made with the one under test instead.
The tests of RPC make groups beside it: barriers, and DDP under distributed autograd.
"""

from __future__ import annotations

import inspect
import os
import re
import unittest
from dataclasses import dataclass
from functools import cache
from typing import Any

__all__ = ["MODES", "Mode", "TorchTest", "find_tests", "test_classes"]

# What says that a test makes a process group; the other tests of RPC have nothing to do with us.
GROUP_CALL = re.compile(r"\b(initialize_pg|init_process_group)\(")
# What is left out elsewhere: all_to_all, and subgroups, for which others than MPI need 8 ranks.
FOR_MPI = re.compile(r"all_to_all|(?<!full)_group(_|$)")
SHOWN_SET = re.compile(r"\{(.*?)\}")
HELPER_CALL = re.compile(r"\bself\.(_\w+)\(")


@dataclass(frozen=True)
class Mode:
    """What torch's test modules see when they are imported."""

    name: str
    pretend: str
    world_size: int | None
    about: str

    @property
    def is_rpc(self) -> bool:
        return self.world_size is None

    def environment(self) -> dict[str, str]:
        return {
            "BACKEND": self.pretend,
            "WORLD_SIZE": str(self.world_size or 0),
            "MASTER_ADDR": "127.0.0.1",
            "INIT_METHOD": "file:///set-for-each-test",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
        }


MODES = {
    mode.name: mode
    for mode in (
        Mode("gloo-2", "gloo", 2, "the tests of c10d and DDP, 2 ranks"),
        Mode("gloo-4", "gloo", 4, "the same, 4 ranks"),
        Mode("mpi-3", "mpi", 3, "those that want MPI: all_to_all and subgroups, 3 ranks"),
        Mode("rpc", "gloo", None, "those of RPC that make a group, 2 to 6 ranks"),
    )
}


@dataclass(frozen=True)
class TorchTest:
    """One test; `skip` is the decorator's reason, known without running it."""

    name: str
    world_size: int
    skip: str | None


@cache
def test_classes(mode: Mode) -> dict[str, type]:
    """Makes the classes that can run, by name; imports torch's modules."""
    if mode.is_rpc:
        return _rpc_classes()
    from torch.testing._internal.distributed import distributed_test

    bases = (_RunsInPlace, distributed_test.TestDistBackend)
    tests = distributed_test.DistributedTest._DistTestBase
    return {"": type("TorchTests", (*bases, tests), {})}


def _rpc_classes() -> dict[str, type]:
    from torch.testing._internal.distributed import rpc_utils
    from torch.testing._internal.distributed.rpc import (
        faulty_rpc_agent_test_fixture,
        tensorpipe_rpc_agent_test_fixture,
    )

    tensorpipe = tensorpipe_rpc_agent_test_fixture.TensorPipeRpcAgentTestFixture
    faulty = faulty_rpc_agent_test_fixture.FaultyRpcAgentTestFixture
    fixtures: dict[type, type] = dict.fromkeys(rpc_utils.FAULTY_AGENT_TESTS, faulty)
    for tests in rpc_utils.GENERIC_TESTS + rpc_utils.TENSORPIPE_TESTS:
        fixtures[tests] = tensorpipe
    process_case = rpc_utils.MultiProcessTestCase
    return {
        tests.__name__: type(tests.__name__, (_RunsInPlace, tests, fixture, process_case), {})
        for tests, fixture in fixtures.items()
    }


class _RunsInPlace:
    """Of torch's way to run a test in a rank what is left where the rank is ours: no pipe."""

    def run_test(self, test_name: str, parent_pipe: Any) -> None:
        from torch.testing._internal import common_utils

        common_utils.set_rng_seed()
        getattr(self, test_name)()


def find_tests(rank: int, mode: Mode) -> list[TorchTest]:
    """Lists the tests of a mode by name. A function of ranks, since it imports torch's modules."""
    found = []
    for prefix, tests in test_classes(mode).items():
        for method in unittest.TestLoader().getTestCaseNames(tests):
            if mode.is_rpc and not _makes_group(tests, method):
                continue
            name = f"{prefix}.{method}" if prefix else method
            world_size = mode.world_size or int(tests(method).world_size)
            found.append(TorchTest(name, world_size, _skip_reason(mode, tests, method)))
    return found


def _makes_group(tests: type, method: str) -> bool:
    """Whether the test, or a helper that it calls, makes a process group."""
    seen: set[str] = set()
    todo = [method]
    while todo:
        name = todo.pop()
        function = getattr(tests, name, None)
        if name in seen or not inspect.isfunction(function):
            continue
        seen.add(name)
        source = inspect.getsource(inspect.unwrap(function))
        if GROUP_CALL.search(source):
            return True
        todo += HELPER_CALL.findall(source)
    return False


def _skip_reason(mode: Mode, tests: type, method: str) -> str | None:
    function = getattr(tests, method)
    if getattr(function, "__unittest_skip__", False):
        # Some reasons show a set, whose order is another in every process.
        why = str(function.__unittest_skip_why__)
        return SHOWN_SET.sub(lambda found: ", ".join(sorted(found[1].split(", "))), why)
    if mode.pretend == "mpi" and not FOR_MPI.search(method):
        return "runs in the gloo modes"
    return None


def import_tests(mode: Mode) -> None:
    """Sets the mode's environment and imports torch's modules and ringcomm: before ranks fork."""
    os.environ.update(mode.environment())
    test_classes(mode)
    import ringcomm  # noqa: F401
