"""Ranks on GPUs, real and emulated, for tests of which each runs on both.

A test marked with `on_gpus` gets `gpus`, on which it calls functions as ranks.run_ranks() does;
in_gpu_ranks() makes a test of a function that asserts by itself. On CUDA's devices it carries the
marker gpu; how many ranks there are and where is told by the environment, which `make test-gpu`
sets for each layout that the box allows:

    GPU_TEST_RANKS    2 by default
    GPU_TEST_LAYOUT   "all": rank i on device i mod their number; "one": all on the first

On emulated devices it runs everywhere: with two ranks on one, with three on two, and with three
over messages.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import emulated_gpu
import pytest
import ranks
import torch
import torch.distributed as dist
from cases import slow
from torch import Tensor

CUDA, EMULATED = "cuda", "emugpu"
NUM_RANKS = int(os.environ.get("GPU_TEST_RANKS", "2"))
LAYOUT = os.environ.get("GPU_TEST_LAYOUT", "all")
CUDA_TIMEOUT_S = 180.0
# For the kernels of the others to give up after a rank's error: a process that is killed in a
# kernel would end MPS, and with it all later tests.
GRACE_S = 8.0


@dataclass(frozen=True)
class Gpus:
    """Ranks of one kind of device.

    Emulated ones are on `num_devices`; without `kernels`, or file descriptors (`fds`), they
    exchange data over "emup2p", whose messages and collectives behave as NCCL's.
    """

    kind: str
    world_size: int
    num_devices: int = 1
    kernels: bool = True
    fds: bool = True

    @property
    def is_cuda(self) -> bool:
        return self.kind == CUDA

    @property
    def num_cuda(self) -> int:
        """Of CUDA's devices, those with ranks."""
        return 1 if LAYOUT == "one" else torch.cuda.device_count()

    @property
    def backend(self) -> str:
        """Of groups that take tensors of the host as well."""
        return f"cpu:ringcomm,{self.kind}:ringcomm"

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        backend: str | None = "",
        env: dict[str, str] | None = None,
        fresh: bool = False,
        may_die: Collection[int] = (),
        **options: Any,
    ) -> list[Any]:
        """fn(rank, *args) on every rank, whose current device is its own; results by rank.

        `backend`: of the default group; "" for this kind's; None for no group.
        `options`: the others of run_on_gpus(); timeout_s is of emulated GPUs.
        """
        __tracebackhide__ = True
        rank_env: dict[str, str] = {}
        if self.is_cuda:
            options |= {"libraries": (), "timeout_s": CUDA_TIMEOUT_S}
        else:
            rank_env["RINGCOMM_EMULATOR_VMM"] = str(int(self.fds))
            if self.world_size > 2:  # room for messages with several peers
                rank_env["RINGCOMM_EMULATOR_SMS"] = "48"
            if self.kernels:
                rank_env |= emulated_gpu.with_kernels()
            else:
                rank_env["RINGCOMM_EMULATOR_DELAY_US"] = "100"
        return emulated_gpu.run_on_gpus(
            self.world_size,
            _call,
            fn,
            args,
            backend=self.backend if backend == "" else backend,
            num_devices=self.num_cuda if self.is_cuda else self.num_devices,
            env={**rank_env, **(env or {})},
            fresh=fresh or bool(may_die),
            may_die=may_die,
            grace_s=GRACE_S,
            module=fn.__module__,
            **options,
        )


def _call(rank: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return fn(rank, *args)
    except BaseException:
        _end_kernels()
        raise


def _end_kernels() -> None:
    """Aborts all groups, so that no rank's kernels wait for this rank, and waits for its own."""
    for group in list(dist.distributed_c10d._world.pg_map):
        with contextlib.suppress(Exception):  # the test's own error is the one to be told
            group.abort()
    with contextlib.suppress(Exception):
        module().synchronize()


cuda_marks = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
_real = pytest.param(Gpus(CUDA, NUM_RANKS), marks=cuda_marks, id=f"cuda{NUM_RANKS}")
_two_on_one, _three_on_two, _messages, _messages_and_kernels = (
    pytest.param(gpus, marks=emulated_gpu.needs_emulated_gpu, id=name)
    for gpus, name in (
        (Gpus(EMULATED, 2), "emu2on1"),
        (Gpus(EMULATED, 3, 2), "emu3on2"),
        (Gpus(EMULATED, 3, kernels=False), "emu3on1-messages"),
        (Gpus(EMULATED, 3, fds=False), "emu3on1-messages-kernels"),
    )
)
_most = [_real, _two_on_one, slow(_three_on_two)]
on_cuda = pytest.mark.parametrize("gpus", [_real])
on_gpus = pytest.mark.parametrize("gpus", _most)
# Every kind is quick in test_gpu_collectives.py; elsewhere two of them are.
on_all_gpus = pytest.mark.parametrize("gpus", [*_most, _messages])
on_each_kind = pytest.mark.parametrize("gpus", [_real, _two_on_one, _three_on_two, _messages])
on_gpus_with_kernels = pytest.mark.parametrize("gpus", [*_most, _messages_and_kernels])
# Of what takes its time and does not depend on the number of ranks.
on_some_gpus = pytest.mark.parametrize("gpus", [_real, _two_on_one, _messages])
on_one_gpu = pytest.mark.parametrize("gpus", [_real, _two_on_one])


def in_gpu_ranks(where: Any, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Makes a test of a function that every rank runs, as ranks.in_ranks() does.

    Args:
        where: on_gpus, or another of those.
        options: Gpus.run()'s.
    """

    def run(body: ranks.Body, *args: Any, gpus: Gpus) -> None:
        __tracebackhide__ = True
        gpus.run(body, *args, **options)

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        test: Callable[..., None] = where(ranks.make_test(body, run, ["gpus"]))
        return test

    return decorate


# ---- in ranks


def stderr_of(call: Callable[[], object]) -> str:
    """What this process writes to its standard error in a call, from C++ as well."""
    before = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            call()
        finally:
            os.dup2(before, 2)
            os.close(before)
        file.seek(0)
        return file.read().decode()


def meet() -> None:
    """Past this all ranks have ended their calls, which a rank that goes would end otherwise."""
    store = dist.distributed_c10d._get_default_store()
    num_meetings = -(-store.add("ranks that meet", 1) // dist.get_world_size())
    while store.add("ranks that meet", 0) < num_meetings * dist.get_world_size():
        time.sleep(0.001)


def kind() -> str:
    """Of this rank's device."""
    return EMULATED if hasattr(torch, EMULATED) else CUDA


def module() -> Any:
    """torch.cuda, or what stands for it."""
    return getattr(torch, kind())


def device() -> torch.device:
    """This rank's."""
    return torch.device(kind(), module().current_device())


def on_gpu(tensor: Tensor) -> Tensor:
    """A copy on this rank's device."""
    return tensor.to(device())


@contextmanager
def held(stream: Any = None, *, for_a_second: bool = False) -> Iterator[None]:
    """A stream that does not get on: on emulated devices until the end, on CUDA's for a second.

    `for_a_second`: on emulated devices too, for what may wait for the stream on the host.
    """
    stream = stream or module().current_stream()
    if kind() == EMULATED:
        hold = module().hold(stream)
        timer = threading.Timer(1.0, hold.release)
        if for_a_second:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()
            hold.release()
        return
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2_000_000_000)  # cycles of a clock of less than 2 GHz
    yield
