"""The build: what it says of a machine that lacks something (more: test_mistakes.py), kernels, pip,
tools/bootstrap.py and wheels.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bootstrap
import buildconfig
import cuda_kernels
import pytest
import wheels
from rank_programs import run_command


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
    assert sorted(compiled) == sorted(buildconfig.cpp_files(".cc"))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with two files of kernels, and the file that embeds what becomes of them."""
    for name in ("one.cu", "two.cu"):
        (tmp_path / name).write_text(name)
    (tmp_path / "image.cc").write_text("embeds")
    monkeypatch.setattr(cuda_kernels, "ROOT", tmp_path)
    monkeypatch.setattr(cuda_kernels, "EMBEDDERS", (tmp_path / "image.cc",))
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


# ---- tools/build_backend.py: a plain `pip install .` builds for the torch that is installed

TIMEOUT_S = 120
# In place of setuptools: its hooks say whether they could import torch.
BUILD_META = """
import importlib.util
def _found(*_): return "torch" if importlib.util.find_spec("torch") else "no torch"
def get_requires_for_build_wheel(settings=None): return ["ninja"]
get_requires_for_build_editable = get_requires_for_build_sdist = get_requires_for_build_wheel
prepare_metadata_for_build_wheel = prepare_metadata_for_build_editable = _found
build_wheel = build_editable = build_sdist = _found
"""
HOOKS = """
import build_backend as backend
for name in ("get_requires_for_build_wheel", "get_requires_for_build_editable"):
    print(*getattr(backend, name)())
print(backend.prepare_metadata_for_build_wheel("folder"))
print(backend.build_wheel("folder", None, "folder"))
print(backend.build_editable("folder"))
"""


def said_by_hooks(python: str, folder: Path) -> list[str]:
    """In an interpreter isolated as pip does it: PYTHONPATH, and none of its own packages."""
    (folder / "setuptools").mkdir()
    (folder / "setuptools" / "__init__.py").write_text("")
    (folder / "setuptools" / "build_meta.py").write_text(BUILD_META)
    path = os.pathsep.join([str(folder), str(buildconfig.ROOT / "tools")])
    env = {"PYTHONPATH": path, "PYTHONNOUSERSITE": "1"}
    done = run_command(python, "-S", "-c", HOOKS, env=env, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_torch_is_that_of_the_environment(tmp_path: Path) -> None:
    assert said_by_hooks(sys.executable, tmp_path) == [*["ninja"] * 2, *["torch"] * 3]


def test_torch_is_required_where_none_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # whose packages might have one
    venv.create(tmp_path / "env", symlinks=True)
    python = str(tmp_path / "env" / "bin" / "python")
    wanted = f"ninja {buildconfig.TORCH}"
    assert said_by_hooks(python, tmp_path) == [*[wanted] * 2, *["no torch"] * 3]


# ---- tools/bootstrap.py: what it says before it fetches torch, and the active environment's torch


def test_nvcc_of_pip_is_taken_where_there_is_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def which(name: str, path: str) -> str | None:
        """Of the folders below tmp_path, as where /usr/local/cuda is not."""
        found = [Path(folder, name) for folder in path.split(os.pathsep)]
        return next((str(one) for one in found if one.exists() and tmp_path in one.parents), None)

    monkeypatch.setattr(buildconfig.shutil, "which", which)
    monkeypatch.setattr(buildconfig, "ROOT", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert buildconfig.find_nvcc() is None
    of_pip = tmp_path / ".venv/lib/python3.11/site-packages/nvidia/cu13/bin"
    of_pip.mkdir(parents=True)
    assert buildconfig.find_nvcc() is None
    nvcc_in(of_pip, "")
    assert buildconfig.find_nvcc() == of_pip / "nvcc"
    nvcc_in(tmp_path, "")
    assert buildconfig.find_nvcc() == tmp_path / "nvcc"


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The Python of a .venv that is empty."""
    venv.create(tmp_path / ".venv", symlinks=True)
    monkeypatch.setattr(bootstrap, "VENV", tmp_path / ".venv")
    return str(tmp_path / ".venv" / "bin" / "python")


def test_torch_of_the_active_environment(environment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_called(*_: Any) -> None:
        raise AssertionError("pip is not needed")

    monkeypatch.setattr(bootstrap, "run_step", not_called)
    monkeypatch.setenv("RINGCOMM_TORCH", "active")
    for _ in range(2):  # again, as the next make does
        bootstrap.install_requirements(environment, [], needs_torch=True)
    code = "import importlib.util as util; print(util.find_spec('torch').origin)"
    found = subprocess.check_output([environment, "-c", code], text=True, timeout=60)
    expected = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60)
    assert found == expected


def test_wrong_wishes_for_another_torch(environment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGCOMM_TORCH", "2.12")
    with pytest.raises(buildconfig.BuildProblem, match=r"must be 'active' or unset, got '2.12'"):
        bootstrap.install_requirements(environment, [], needs_torch=True)
    monkeypatch.setenv("RINGCOMM_TORCH", "active")
    monkeypatch.setattr(sys, "executable", environment)
    with pytest.raises(buildconfig.BuildProblem, match=r"has no torch >= 2\.11"):
        bootstrap.install_requirements(environment, [], needs_torch=True)
    has_both = bootstrap.Python(environment)
    has_both.found = {"torch": "2.13.0", "ringcomm": "0.1.0"}
    with monkeypatch.context() as patch:
        patch.setattr(bootstrap, "Python", lambda _: has_both)
        with pytest.raises(buildconfig.BuildProblem, match="would hide this checkout"):
            bootstrap.install_requirements(environment, [], needs_torch=True)
    (own,) = (Path(environment).parents[1] / "lib").glob("python*/site-packages")
    (own / "torch").mkdir()
    with pytest.raises(buildconfig.BuildProblem, match=r"a torch of its own.* make clean ALL=1"):
        bootstrap.install_requirements(environment, [], needs_torch=True)


def test_the_active_environment_is_used_by_wish(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what it has; what it needs is named, and what it may lack."""
    monkeypatch.setenv("RINGCOMM_USE_ENV", "1")
    active = bootstrap.Python(sys.executable)
    active.found = {"torch": "2.13.0", "ninja": "1", "setuptools": "90", "numpy": "2", "rich": "1"}
    monkeypatch.setattr(bootstrap, "Python", lambda _: active)
    assert bootstrap.choose_python(["build", "train"], True) == sys.executable
    assert "goes without what is not installed there: wheel, matplotlib" in capsys.readouterr().out
    del active.found["rich"], active.found["torch"]
    lacks = r"lacks rich, 'torch>=2.11': .* install rich"
    with pytest.raises(buildconfig.BuildProblem, match=lacks):
        bootstrap.choose_python(["build", "train"], True)


def steps_of_the_build(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    steps: list[str] = []
    python = SimpleNamespace(suffix=".none", found={}, editable="")
    monkeypatch.setenv("RINGCOMM_CUDA", "0")
    monkeypatch.setattr(bootstrap, "Python", lambda _: python)
    monkeypatch.setattr(bootstrap, "EXTENSION_STATE", folder / "state")
    monkeypatch.setattr(bootstrap, "run_step", lambda name, *_: steps.append(name))
    bootstrap.build_extension("python", False)
    return steps


Does = Callable[[Path, pytest.MonkeyPatch], Any]


@pytest.mark.parametrize(
    ("name", "does", "by_value"),
    [
        ("PREBUILT", steps_of_the_build, {"1": ["import"], "0": ["extension", "import"]}),
        ("MAX_JOBS", lambda *_: buildconfig.num_jobs(), {"3": 3, "5": 5}),
        ("WERROR", lambda *_: "-Werror" in buildconfig.cxx_flags(), {"1": True, "0": False}),
        ("CUDA_ARCHS", lambda *_: cuda_kernels.archs_asked(), {"80;90": ("80", "90"), "": ()}),
    ],
)
def test_variables_of_the_build(
    name: str,
    does: Does,
    by_value: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for value, expected in by_value.items():
        monkeypatch.setenv(f"RINGCOMM_{name}", value)
        assert does(tmp_path, monkeypatch) == expected


# ---- wheels for several versions of torch; which extension is loaded: test_mistakes.py


@pytest.mark.parametrize(
    ("minors", "allowed"),
    [
        (["2.13"], ">=2.13,<2.14"),
        (["2.13", "2.14", "2.15"], ">=2.13,<2.16"),
        (["2.11", "2.13", "2.15"], ">=2.11,<2.16,!=2.12.*,!=2.14.*"),
    ],
)
def test_a_wheel_requires_a_torch_that_it_serves(minors: list[str], allowed: str) -> None:
    assert wheels.requirement(minors) == f"Requires-Dist: torch{allowed}"


def test_wheels_are_merged(tmp_path: Path) -> None:
    parts = {}
    for minor in ("2.13", "2.14"):
        parts[minor] = tmp_path / minor
        (parts[minor] / "ringcomm").mkdir(parents=True)
        (parts[minor] / "ringcomm" / "_C.cpython-311.so").write_text(minor)
        info = parts[minor] / f"ringcomm-0.1.0+torch{minor}.dist-info"
        info.mkdir()
        text = f"Name: ringcomm\nVersion: 0.1.0+torch{minor}\nRequires-Dist: torch=={minor}.*\n"
        (info / "METADATA").write_text(f"{text}Requires-Dist: numpy\n\nVersion: of the readme\n")
    merged = wheels.merge(parts)
    for minor, name in (("2.13", "torch_2_13"), ("2.14", "torch_2_14")):
        assert (merged / "ringcomm" / name / "_C.cpython-311.so").read_text() == minor
    assert not list(merged.glob("ringcomm/*.so"))
    (info,) = merged.glob("*.dist-info")
    version = info.name.removeprefix("ringcomm-").removesuffix(".dist-info")
    lines = (info / "METADATA").read_text().splitlines()
    required = ["Requires-Dist: torch>=2.13,<2.15", "Requires-Dist: numpy"]
    assert lines[1:4] == [f"Version: {version}", *required]
    assert "+" not in version
