"""What the build says on a machine that lacks something (more: test_mistakes.py); kernels."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import buildconfig
import cuda_kernels
import pytest
import stand_ins


@pytest.mark.parametrize(
    ("target", "value", "check", "message"),
    [
        ("sys.platform", "darwin", "check_platform", "needs Linux"),
        ("platform.machine", lambda: "ppc64le", "check_platform", "x86_64 and aarch64; .* ppc64le"),
        ("MAX_JOBS", "many", "num_jobs", "MAX_JOBS must be a positive integer"),
    ],
)
def test_what_a_machine_lacks_is_named(
    target: str, value: Any, check: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RINGCOMM_MAX_JOBS", raising=False)
    if target.isupper():
        monkeypatch.setenv(target, value)
    else:
        monkeypatch.setattr(target, value)
    with pytest.raises(buildconfig.BuildProblem, match=message):
        getattr(buildconfig, check)()


def test_every_source_is_in_one_unit_of_the_extensions(tmp_path: Path) -> None:
    compiled = []
    for parts in buildconfig.EXTENSIONS:
        for unit in buildconfig.units(parts, tmp_path / parts.name):
            names = re.findall('^#include "(.*)"$', unit.read_text(encoding="utf-8"), re.M)
            compiled += [Path(name) for name in names] if unit.is_relative_to(tmp_path) else [unit]
    assert sorted(compiled) == sorted(buildconfig.CSRC.rglob("*.cc"))


def test_every_source_is_in_one_unit_of_the_cpp_tests() -> None:
    folder = buildconfig.ROOT / "tests" / "cpp"
    make = ["make", "-s", "--no-print-directory", "-C", str(folder), "list"]
    said = subprocess.run(make, capture_output=True, text=True, check=True, timeout=60).stdout
    wanted = [*folder.glob("*.cc"), buildconfig.ROOT / "tests" / "emulator" / "kernels.cc"]
    for name in ("core", "reduce", "host", "collectives", "transport", "communicator", "kernels"):
        wanted += buildconfig.sources(name)
    wanted += buildconfig.sources("cuda/kernels", "cuda/driver", "cuda/collectives")
    assert sorted(said.split()) == sorted(map(str, wanted))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with two files of kernels, and the file that embeds what becomes of them."""
    for name in ("one.cu", "two.cu"):
        (tmp_path / name).write_text(name)
    (tmp_path / "image.cc").write_text("embeds")
    monkeypatch.setattr(cuda_kernels, "ROOT", tmp_path)
    monkeypatch.setattr(cuda_kernels, "EMBEDDER", tmp_path / "image.cc")
    monkeypatch.setattr(cuda_kernels, "sources", lambda: [tmp_path / "one.cu", tmp_path / "two.cu"])
    return tmp_path


def nvcc_in(folder: Path, does: str) -> Path:
    nvcc = folder / "nvcc"
    nvcc.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "release 1.2, V" && exit\n{does}\n')
    nvcc.chmod(0o755)
    return nvcc


COMPILES = 'while [ "$1" != -o ]; do shift || exit; done; echo code > "$2"'


def test_new_kernels_are_embedded_anew(kernels: Path) -> None:
    """What embeds them is older than they are by no rule that ninja knows: it is touched."""
    nvcc = nvcc_in(kernels, COMPILES)
    embedder = kernels / "image.cc"

    def is_touched() -> bool:
        os.utime(embedder, (1e9, 1e9))
        cuda_kernels.compile_all(nvcc, kernels / "out", ("90",))
        newest = max(path.stat().st_mtime for path in (kernels / "out").glob("*.fatbin"))
        assert embedder.stat().st_mtime in (1e9, newest)
        return embedder.stat().st_mtime == newest

    assert is_touched()
    now = embedder.stat().st_mtime
    cuda_kernels.compile_all(nvcc, kernels / "out", ("90",))
    assert embedder.stat().st_mtime == now  # nothing was compiled
    (kernels / "two.cu").write_text("another")
    assert is_touched()
    assert is_touched()  # a build that ended before it got there leaves fatbins that are newer


@pytest.mark.parametrize(
    ("does", "archs"),
    [("echo 9.0; echo 9.0; echo 8.6", ("90", "86")), ("echo no devices were found; exit 6", ())],
)
def test_kernels_are_for_the_gpus_that_are_here(
    does: str, archs: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{does}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cuda_kernels.archs_here() == archs
    monkeypatch.setenv("PATH", "")
    assert cuda_kernels.archs_here() == ()


@pytest.mark.parametrize(
    ("asked", "cuda", "has_driver", "wants"),
    [
        (None, "13.0", True, True),
        (None, "13.0", False, False),
        (None, None, True, False),
        ("1", None, False, True),
        ("test", None, False, True),
        ("0", "13.0", True, False),
    ],
)
def test_which_builds_have_the_part_of_gpus(
    asked: str | None,
    cuda: str | None,
    has_driver: bool,
    wants: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Kernels are compiled only with RINGCOMM_CUDA=1, in the build step."""
    spec = importlib.util.spec_from_file_location("ringcomm_setup", buildconfig.ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    setup = importlib.util.module_from_spec(spec)
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # which setup.py sets
    spec.loader.exec_module(setup)
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.setattr(cuda_kernels, "has_driver", lambda: has_driver)
    monkeypatch.setattr(buildconfig, "find_nvcc", lambda: tmp_path / "nvcc")
    monkeypatch.setattr(cuda_kernels, "compile_all", lambda *_: tmp_path / "cuda")
    if asked is None:
        monkeypatch.delenv("RINGCOMM_CUDA", raising=False)
    else:
        monkeypatch.setenv("RINGCOMM_CUDA", asked)
    assert setup.wants_cuda() == wants
    assert bool(setup.compile_kernels()) == (asked == "1")


def test_missing_libraries_of_cuda_get_stand_ins(tmp_path: Path) -> None:
    """One with versions of symbols and one without, linked by a library of torch's name."""
    code = {
        "libcudart.so.13": "int cudaGetDeviceCount(void) { return 0; } "
        "const char* cudaGetErrorString(int code) { return 0; }",
        "libnccl.so.2": "int ncclGetVersion(void) { return 0; }",
        "libtorch_cuda.so": "int cudaGetDeviceCount(void), ncclGetVersion(void);"
        "int sum(void) { return cudaGetDeviceCount() + ncclGetVersion(); }"
        "const char* cudaGetErrorString(int);"
        "const char* name(void) { return cudaGetErrorString(1); }",
    }
    script = tmp_path / "versions"
    script.write_text("libcudart.so.13 { global: cudaGetDeviceCount; cudaGetErrorString; };")
    linked: list[str] = []
    for name, text in code.items():
        options = [f"-Wl,-soname,{name}", f"-Wl,-rpath,{tmp_path}"]
        options += [f"-Wl,--version-script,{script}"] if "cudart" in name else []
        command = ["cc", "-shared", "-fPIC", *options, "-o", str(tmp_path / name), "-xc", "-"]
        command += ["-xnone", *linked]
        subprocess.run(command, input=text, text=True, check=True)
        linked.append(str(tmp_path / name))
    for path in linked[:2]:
        os.unlink(path)
    assert stand_ins.make(tmp_path) == ["libcudart.so.13", "libnccl.so.2"]
    # In a process of its own: this one may have libraries of these names.
    program = (
        "import ctypes, os, sys; loaded = ctypes.CDLL(sys.argv[1], os.RTLD_NOW);"
        "loaded.name.restype = ctypes.c_char_p; print(loaded.sum(), loaded.name().decode())"
    )
    said = subprocess.check_output([sys.executable, "-c", program, linked[2]], text=True)
    assert said == f"{2 * stand_ins.NO_DEVICE} a stand-in without a device\n"
    assert stand_ins.make(tmp_path) == []


def test_groups_of_requirements_are_those_of_pip() -> None:
    tomllib = pytest.importorskip("tomllib")
    text = (buildconfig.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for group, names in tomllib.loads(text)["dependency-groups"].items():
        assert buildconfig.requirements(group) == names
    with pytest.raises(buildconfig.BuildProblem, match="no group 'other'"):
        buildconfig.requirements("other")
