"""A process that has imported what tests import, and forks one for each run of pytest.

To import torch takes longer than most of the tests that notice a fault. A line of JSON on the input
says what to run: cwd, env, arguments, output (a file) and limit_s. The answer is a line with the
exit status, null if the run was ended. ringcomm itself is imported by the forked process.

A run has namespaces of its own where the account may make them: what it has started ends with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import runpy
import signal
import subprocess
import sys
import time
from importlib import import_module
from typing import Any, NoReturn

_PACKAGES = (
    *("torch", "pytest", "_pytest.assertion.rewrite", "numpy", "hypothesis", "xdist.plugin"),
    *("torch.testing", "torch.distributed.fsdp", "torch.distributed.tensor"),
    *("torch.distributed.checkpoint", "torch.distributed.pipelining", "torch._dynamo"),
    *("transformers.models.llama.modeling_llama", "transformers.trainer"),
)
_PR_SET_PDEATHSIG = 1
_NEW_MOUNTS, _NEW_IPC, _NEW_PIDS = 0x00020000, 0x08000000, 0x20000000
_libc = ctypes.CDLL(None)


def _import_all() -> None:
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    for name in _PACKAGES:
        with contextlib.suppress(ImportError):
            import_module(name)
    # pytest would write what these log to a file, whose number tests give to others.
    known = logging.Logger.manager.loggerDict
    for name, logger in list(known.items()):
        if isinstance(logger, logging.Logger) and not logger.propagate:
            del known[name]
    del os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"]


def _pytest(request: dict[str, Any]) -> NoReturn:
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[:0] = [request["cwd"]]
    import torch

    torch._import_device_backends()  # as at the end of `import torch`
    sys.argv = ["pytest", *request["arguments"]]
    status: Any = 1
    try:
        runpy.run_module("pytest", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(status or 0))


def _fork_and_wait(run: Any) -> NoReturn:
    """The child runs; this process ends as it does, and reaps what has lost its parent."""
    child = os.fork()
    if child == 0:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        run()
    while True:
        pid, status = os.wait()
        if pid == child:
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _alone(request: dict[str, Any]) -> NoReturn:
    with open(request["output"], "wb", buffering=0) as output, open(os.devnull, "rb") as nothing:
        for stream, number in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(stream.fileno(), number)
    os.setsid()
    if os.getuid() != 0 or _libc.unshare(_NEW_MOUNTS | _NEW_IPC | _NEW_PIDS) != 0:
        _pytest(request)

    def first_of_namespace() -> NoReturn:
        for command in (
            "mount --make-rprivate /",
            "mount -t proc proc /proc",
            "mount -t tmpfs tmpfs /dev/shm",
        ):
            subprocess.run(command.split(), check=True)
        _fork_and_wait(lambda: _pytest(request))

    _fork_and_wait(first_of_namespace)


def _run(request: dict[str, Any]) -> int | None:
    deadline = time.monotonic() + request["limit_s"]
    pid = os.fork()
    if pid == 0:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _alone(request)
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def main() -> None:
    """Until the end of the input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _import_all()
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
