"""The build: what it says of a machine that lacks something (more: test_mistakes.py), kernels, pip,
tools/bootstrap.py and wheels.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import address
import bootstrap
import buildconfig
import cuda_kernels
import pytest
import stand_ins
import torch
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


def test_every_source_is_in_one_unit_of_the_cpp_tests() -> None:
    folder = buildconfig.ROOT / "tests" / "cpp"
    make = ["make", "-s", "--no-print-directory", "-C", str(folder), "list"]
    said = subprocess.run(make, capture_output=True, text=True, check=True, timeout=60).stdout
    wanted = [*folder.glob("*.cc"), buildconfig.ROOT / "tests" / "emulator" / "kernels.cc"]
    for parts in buildconfig.EXTENSIONS:
        wanted += buildconfig.sources(*parts.alone, *parts.joined)
    assert sorted(said.split()) == sorted(map(str, wanted))


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

FOR_CPUS = ["torch", "filelock", "sympy"]
FOR_CUDA = [*FOR_CPUS, "nvidia-cublas", "cuda-bindings"]


def test_what_comes_with_torch_is_said_before_it_is_fetched(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A stand-in of pip, which fetches nothing, reports packages and is then asked to install."""
    pip = tmp_path / "python"
    report = json.dumps({"install": [{"metadata": {"name": name}} for name in FOR_CUDA]})
    pip.write_text(f"#!/bin/sh\necho \"$@\" >> {tmp_path}/calls\necho '{report}'\n")
    pip.chmod(0o755)
    monkeypatch.setattr(cuda_kernels, "has_driver", lambda: False)
    monkeypatch.setattr(bootstrap, "run_step", lambda _, *command: subprocess.check_call(command))
    monkeypatch.setenv("RINGCOMM_TORCH_INDEX", "https://index.example/cpu")
    bootstrap.install_torch(str(pip))
    said = capfd.readouterr().out.partition("\n{")[0]
    assert f"fetching {buildconfig.TORCH} for CUDA and 4 packages: about 5 GB" in said
    assert "set RINGCOMM_TORCH_INDEX=URL" in said
    asked, installed = (tmp_path / "calls").read_text().splitlines()
    assert "--dry-run" in asked
    assert "--dry-run" not in installed
    for call in (asked, installed):
        assert call.endswith(f"{buildconfig.TORCH} --index-url https://index.example/cpu")


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


def test_a_build_for_cpus_needs_no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "RINGCOMM_TORCH_INDEX" not in bootstrap.described(FOR_CPUS)
    monkeypatch.setattr(cuda_kernels, "has_driver", lambda: True)
    assert "RINGCOMM_TORCH_INDEX" not in bootstrap.described(FOR_CUDA)
    assert "RINGCOMM_TORCH=active takes torch 2." in bootstrap.described(FOR_CUDA)


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


# ---- wheels for several versions of torch: which are built, and which extension is loaded

MINOR = ".".join(torch.__version__.split(".")[:2])


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


def test_the_extension_of_this_torch_is_loaded(tmp_path: Path) -> None:
    """Without one: test_mistakes.py."""
    package = tmp_path / "ringcomm"
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(buildconfig.ROOT / "ringcomm", package, ignore=ignored)
    own = f"torch_{MINOR.replace('.', '_')}"
    for name in ("torch_2_9", own):
        (package / name).mkdir()
        for extension in (buildconfig.ROOT / "ringcomm").glob("*.so"):
            shutil.copy(extension, package / name)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport torch, ringcomm\n"
    code += "print(ringcomm._C.__file__, ringcomm._kernels.__file__)"
    said = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=TIMEOUT_S)
    assert {Path(name).parent for name in said.split()} == {package / own}


def test_a_wheel_is_tried_with_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[Sequence[str], dict[str, str]]] = []

    def run(command: Sequence[str], **options: Any) -> None:
        if command[2] == "venv":
            (tmp_path / "env" / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
        else:
            ran.append((command, options["env"]))

    monkeypatch.setattr(wheels.subprocess, "run", run)
    wheels.try_wheel(sys.executable, tmp_path / "a.whl", ["/packages"], tmp_path)
    (path,) = tmp_path.glob("env/lib/python*/site-packages/*.pth")
    assert path.read_text() == "/packages\n"
    assert [command[1] for command, _ in ran] == ["-m", "-c", "-c", "doctor", "bench"]
    assert {command[3] for command, _ in ran if command[1] == "-c"} == {"0", "1"}
    for _, env in ran:
        assert all(shutil.which(name, path=env["PATH"]) is None for name in ("cc", "g++", "ninja"))
        monkeypatch.setenv("CXX", env["CXX"])
        with pytest.raises(buildconfig.BuildProblem, match="no C\\+\\+ compiler: '/nonexistent'"):
            buildconfig.check_compiler()


def test_a_release_builds_a_wheel_for_each_python() -> None:
    yaml = pytest.importorskip("yaml")
    text = (buildconfig.ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    workflow = yaml.safe_load(text)
    job = workflow["jobs"]["wheels"]
    metadata = (buildconfig.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    named = re.findall(r'Programming Language :: Python :: (3\.\d+)"', metadata)
    assert job["strategy"]["matrix"]["python"] == named
    (made, *_) = [step["run"] for step in job["steps"] if "run" in step]
    assert made == 'make wheels PYTHON=python ARGS="--python ${{ matrix.python }}"'
    text = (buildconfig.ROOT / "noxfile.py").read_text(encoding="utf-8")
    assert f"PYTHONS = {named}".replace("'", '"') in text
    assert all("timeout-minutes" in one for one in workflow["jobs"].values())
    assert "URL" in workflow["env"]


def test_all_that_names_the_project_has_the_address_of_pyproject(tmp_path: Path) -> None:
    """In a copy, without an address, with one, and as it was."""
    url = "https://example.org/owner/project"
    names = [*address.FILES, Path("pyproject.toml")]
    before = {name: (buildconfig.ROOT / name).read_text(encoding="utf-8") for name in names}
    for name, text in before.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    own = address.write(buildconfig.ROOT, is_check=True)
    assert own == buildconfig.address()

    def renew(url: str) -> dict[Path, str]:
        text = re.sub('(?m)^url = ".*"$', f'url = "{url}"', before[Path("pyproject.toml")])
        (tmp_path / "pyproject.toml").write_text(text, encoding="utf-8")
        if url:
            with pytest.raises(SystemExit, match=r"does not fit url"):
                address.write(tmp_path, is_check=True)
        assert address.write(tmp_path) == url
        return {name: (tmp_path / name).read_text(encoding="utf-8") for name in address.FILES}

    bare = renew("")
    found = renew(url)
    assert f"[![ci]({url}/actions/workflows/ci.yml/badge.svg)]" in found[Path("README.md")]
    assert f"  url = {{{url}}}," in found[Path("README.md")]
    assert f'repository-code: "{url}"' in found[Path("CITATION.cff")]
    assert url in found[address.CONFIG]
    assert renew("") == bare
    assert all(before[name] == text for name, text in renew(own).items())


def test_the_metadata_has_the_address(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "egg_info", "-e", str(tmp_path)]
    subprocess.check_output(command, cwd=buildconfig.ROOT, timeout=TIMEOUT_S)
    text = (tmp_path / "ringcomm.egg-info" / "PKG-INFO").read_text(encoding="utf-8")
    url = buildconfig.address()
    expected = [f"Project-URL: Source, {url}"] if url else []
    assert re.findall("(?m)^Project-URL.*$", text) == expected
