"""Emulated GPUs as a device of torch, "emugpu": built once, loaded in ranks.

A test of what runs on GPUs calls run_on_gpus() instead of ranks.run_ranks(). The device belongs to
the process that loads it and cannot be unloaded, so it is loaded in ranks and never in pytest.
Libraries are kept under build/emulated_gpu.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist

TESTS = Path(__file__).resolve().parents[2]

import buildconfig  # noqa: E402

import ringcomm  # noqa: E402
from ringcomm._extension import HAS_CUDA  # noqa: E402
from ringcomm.ops import weight_update_cuda  # noqa: E402

EXTENSION = "ringcomm_emulated_gpu"
_OPERATORS: list[torch.library.Library] = []  # which last as long as these
FATBIN = b"\x50\xed\x55\xba"  # nvcc's images begin so
# A first build takes one to two minutes of a core; another test run may be at it.
BUILD_TIMEOUT_S = 900.0
# "short" or "all": kernels of nvcc's PTX instead of those of g++ (tests/ptx/Makefile).
PTX_FORM = os.environ.get("RINGCOMM_TEST_PTX", "")

SKIP_REASON = next(
    (
        f"no {name} to build the emulated GPU with"
        for name in (buildconfig.compiler()[0], "make")
        if shutil.which(name) is None
    ),
    None if HAS_CUDA else "this build has no GPU part (ringcomm._cuda)",
)
needs_emulated_gpu = pytest.mark.skipif(SKIP_REASON is not None, reason=str(SKIP_REASON))
needs_build_without_kernels = pytest.mark.skipif(
    any(FATBIN in path.read_bytes() for path in Path(ringcomm.__file__).parent.glob("_cuda.*.so")),
    reason="the emulator cannot run this build's kernels",
)


@functools.cache
def build() -> tuple[Path, Path]:
    """Returns the emulator of CUDA's driver and the torch extension, up to date.

    Raises:
        RuntimeError: they do not compile; the message has what the compiler says.
    """
    from torch.utils import cpp_extension  # takes a second, which ranks do not need

    tag = f"{sys.implementation.cache_tag}-torch{torch.__version__}"
    out = TESTS.parent / "build" / "emulated_gpu" / tag
    out.mkdir(parents=True, exist_ok=True)
    includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    flags = " ".join(f"-isystem {folder}" for folder in includes)
    names = ("c10", "torch", "torch_cpu", "torch_python")
    libs = " ".join(f"-L{path}" for path in cpp_extension.library_paths())
    libs += "".join(f" -l{name}" for name in names)
    driver = build_driver()
    # It is linked with the driver whose GPUs it uses.
    extension = out / f"{EXTENSION}{f'-ptx-{PTX_FORM}' if PTX_FORM else ''}.so"
    with _locked():
        _make(
            TESTS / "emulator" / "torch",
            f"OUT={out}",
            f"LIBRARY={extension}",
            f"EMULATOR={driver}",
            f"TORCH_FLAGS={flags}",
            f"TORCH_LIBS={libs}",
        )
    return driver, extension


@functools.cache
def build_driver() -> Path:
    """Returns the emulator of CUDA's driver, up to date."""
    if PTX_FORM:
        with _locked():
            _make(TESTS / "ptx", "library", f"FORM={PTX_FORM}", f"PYTHON={sys.executable}")
        return TESTS.parent / "build" / "ptx" / PTX_FORM / "libcuda_emulator.so"
    with _locked():
        _make(TESTS / "emulator", "library")
    return TESTS.parent / "build" / "emulator" / "plain" / "libcuda_emulator.so"


@contextmanager
def _locked() -> Iterator[None]:
    """Test runs build one after the other; a killed one leaves no lock."""
    path = TESTS.parent / "build" / "emulator" / "lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(folder: Path, *variables: str) -> None:
    jobs = f"-j{min(2, buildconfig.num_jobs())}"
    command = ["make", "-C", str(folder), jobs, f"CXX={' '.join(buildconfig.compiler())}"]
    done = subprocess.run(
        [*command, *variables],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BUILD_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{folder} does not compile:\n{done.stdout[-4000:]}")


def load(libraries: tuple[Path, Path] | None = None) -> ModuleType:
    """Makes "emugpu" a device of this process's torch, and returns torch.emugpu.

    Before the driver is opened, so before anything of CUDA is asked for. Settings of the emulator
    (tests/emulator/settings.h) must be in the environment already.
    Adds the device to those of the backend "ringcomm", and registers "emup2p", whose
    messages and collectives behave as NCCL's.

    Args:
        libraries: what build() has returned to another process.
    """
    import emugpu

    if EXTENSION in sys.modules:
        return emugpu
    driver, extension_path = libraries or build()
    os.environ["RINGCOMM_CUDA_DRIVER"] = str(driver)
    torch.utils.rename_privateuse1_backend("emugpu")
    extension = _import_extension(extension_path)
    torch._register_device_module("emugpu", emugpu)
    merge = torch.ops.ringcomm.merge_softmax_stats
    _OPERATORS.append(torch.library.Library("ringcomm", "IMPL", "PrivateUse1"))
    _OPERATORS[-1].impl(
        "merge_softmax_stats", lambda stats, name: merge(stats.cpu(), name).to(stats.device)
    )
    # Of the CPU's kernels, which make the sums of one part.
    factors = weight_update_cuda._factors
    weight_update_cuda._programs = lambda matrix: (1, 1)
    weight_update_cuda._factors = lambda *args, **_: factors(*args, is_in_parts=False)
    # Module.to() cannot set the data of weights to those of another device, and would untie them.
    # A weight that is there already keeps its hooks.
    torch.__future__.set_swap_module_params_on_conversion(True)
    swap = torch.utils.swap_tensors
    torch.utils.swap_tensors = lambda a, b: (
        None if a.device == b.device and a.data_ptr() == b.data_ptr() else swap(a, b)
    )
    from_dlpack = torch.from_dlpack
    # DLPack has no name for the device.
    torch.from_dlpack = lambda tensor, **options: (
        extension.with_own_storage(tensor)
        if getattr(tensor, "device", None) and tensor.device.type == "emugpu"
        else from_dlpack(tensor, **options)
    )
    dist.Backend.register_backend("emup2p", extension.create_p2p, devices=["emugpu"])
    creator = dist.Backend._plugins["RINGCOMM"].creator_fn
    devices = [*dist.Backend.backend_capability["ringcomm"], "emugpu"]
    dist.Backend.register_backend("ringcomm", creator, extended_api=True, devices=devices)
    return emugpu


def load_named() -> ModuleType:
    """Loads the libraries that loaded_at_start() names."""
    driver, extension = os.environ[ranks.EMULATED].split(":")
    return load((Path(driver), Path(extension)))


def loaded_at_start(folder: Path) -> dict[str, str]:
    """The environment in which each process of Python has the device.

    Python runs what `folder` has first: while torch is imported by ringcomm, it is too early.
    """
    text = "import emulated_gpu\nemulated_gpu.load_named()\n"
    (folder / "sitecustomize.py").write_text(text)
    folders = [str(folder), *sys.path, os.environ.get("PYTHONPATH", "")]
    return {
        **with_kernels(),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        "RINGCOMM_EMULATOR_BOX": str(folder),
        "RINGCOMM_CUDA_DRIVER": str(build_driver()),
        ranks.EMULATED: ":".join(map(str, build())),
    }


def with_kernels() -> dict[str, str]:
    """The environment in which ringcomm's kernels run on emulated GPUs: transport "cuda_ipc"."""
    image = TESTS.parent / "build" / "emulated_gpu" / "kernels"
    if not image.exists():
        image.parent.mkdir(parents=True, exist_ok=True)
        part = image.with_name(f"kernels-{os.getpid()}")  # other tests may read it at any time
        part.write_bytes(b"RINGCOMM-EMULATED")
        part.rename(image)
    return {"RINGCOMM_CUDA_IMAGE": str(image)}


def build_program(name: str) -> Path:
    """Returns a program of benchmarks/gpu, up to date."""
    with _locked():
        _make(TESTS.parent / "benchmarks" / "gpu")
    return TESTS.parent / "build" / "gpu" / name


def program(name: str, box: Path, *arguments: str, **settings: str) -> dict[str, Any]:
    """A program of benchmarks/gpu, and its environment, as subprocess.run() takes them.

    Args:
        name: of its file.
        box: whose GPUs it has.
        arguments: its own.
        settings: the emulator's, without RINGCOMM_EMULATOR_ before their names.
    """
    env = {
        **os.environ,
        **with_kernels(),
        "RINGCOMM_CUDA_DRIVER": str(build_driver()),
        "RINGCOMM_EMULATOR_BOX": str(box),
        **{f"RINGCOMM_EMULATOR_{setting}": value for setting, value in settings.items()},
    }
    return {"args": [str(build_program(name)), *arguments], "env": env, "text": True}


def children_of(pid: int, num: int, timeout_s: float) -> list[int]:
    """The processes that a program has started, once there are that many."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    deadline = time.monotonic() + timeout_s
    while len(pids := children.read_text().split()) < num:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return [int(child) for child in pids]


def driver_calls() -> Counter[str]:
    """How often this process has called each function of CUDA's driver."""
    library, num_calls = ctypes.CDLL(os.environ["RINGCOMM_CUDA_DRIVER"]), ctypes.c_longlong()
    library.emulator_function.restype = ctypes.c_char_p
    calls: Counter[str] = Counter()
    while (name := library.emulator_function(len(calls), ctypes.byref(num_calls))) is not None:
        calls[name.decode()] = num_calls.value
    return calls


def _import_extension(path: Path) -> Any:
    loader = importlib.machinery.ExtensionFileLoader(EXTENSION, str(path))
    spec = importlib.util.spec_from_file_location(EXTENSION, path, loader=loader)
    assert spec is not None
    extension = importlib.util.module_from_spec(spec)
    loader.exec_module(extension)
    sys.modules[EXTENSION] = extension
    return extension


def run_on_gpus(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    backend: str | None = "cpu:ringcomm,emugpu:ringcomm",
    pg_options: Any = None,
    num_devices: int = 1,
    env: dict[str, str] | Sequence[dict[str, str]] | None = None,
    group_timeout_s: float = 30.0,
    libraries: tuple[()] | None = None,
    **options: Any,
) -> list[Any]:
    """Calls fn(rank, *args) on every rank, as ranks.run_ranks(), with emulated GPUs.

    Rank i's current device is i mod num_devices.

    Args:
        backend: of the default group, which is there when fn is called; None makes no group.
        pg_options: of the default group; equal ones have the same repr().
        num_devices: of the box.
        env: more settings, such as {"RINGCOMM_EMULATOR_DELAY_US": "300"}: for all, or each its own.
        group_timeout_s: of the group's collectives.
        libraries: () for CUDA's devices instead of emulated ones.
        options: the others of run_ranks(): timeout_s, fresh, may_die.
    """
    __tracebackhide__ = True
    settings = {
        "RINGCOMM_EMULATOR_DEVICES": str(num_devices),
        # What the ranks of a pool share is its environment: those of another group are others.
        "RINGCOMM_TEST_GROUP": f"{backend} {pg_options!r} {group_timeout_s}",
    }
    own = [env or {}] * world_size if isinstance(env, dict | None) else env
    rank_env = [{**settings, **mine} for mine in own]
    # Used by the first call of a pool only, and then for as long as that lives.
    store = Path(tempfile.mkdtemp(dir=ranks.server().folder)) / "store"
    group = (world_size, backend, str(store), pg_options, group_timeout_s)
    call = (build() if libraries is None else libraries, num_devices, group, fn, args)
    options = {"module": fn.__module__, **options}
    return ranks.run_ranks(world_size, _call_on_gpu, *call, backend=None, env=rank_env, **options)


def in_emulated_ranks(
    world_size: int, *, kernels: bool = True, env: Any = None, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Makes a test of a function that every rank runs, as ranks.in_ranks() does.

    Args:
        world_size: the number of ranks.
        kernels: whether there are ringcomm's; without, groups are over messages.
        env: more settings: for all, or each its own.
        options: run_on_gpus()'s.
    """

    def run(body: ranks.Body, *args: Any) -> None:
        __tracebackhide__ = True
        own = env if isinstance(env, list) else [env or {}] * world_size
        settings = [{**(with_kernels() if kernels else {}), **mine} for mine in own]
        run_on_gpus(world_size, body, *args, env=settings, **options)

    return lambda body: ranks.make_test(body, run, [])


def _call_on_gpu(
    rank: int,
    libraries: tuple[Path, Path] | tuple[()],
    num_devices: int,
    group: Sequence[Any],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    gpu: Any = torch.cuda
    if libraries:
        # The GPUs are those of the ranks that say the same, and of no others.
        os.environ.setdefault("RINGCOMM_EMULATOR_BOX", group[2])
        gpu = load(libraries)
    gpu.set_device(rank % num_devices)
    if group[1] is not None and not dist.is_initialized():
        ranks._init_group(rank, *group)
    return fn(rank, *args)
