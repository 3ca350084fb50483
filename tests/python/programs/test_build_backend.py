"""tools/build_backend.py: a plain `pip install .` builds for the torch that is installed."""

from __future__ import annotations

import functools
import http.server
import os
import re
import subprocess
import sys
import threading
import venv
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import buildconfig
import pytest
import torch
from cases import slow

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
backend.buildconfig.num_jobs = lambda: 2
for name in ("get_requires_for_build_wheel", "get_requires_for_build_editable"):
    print(*getattr(backend, name)())
print(backend.prepare_metadata_for_build_wheel("folder"))
print(backend.build_wheel("folder", None, "folder"))
print(backend.build_editable("folder"))
"""


def run_hooks(python: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """In an interpreter isolated as pip does it: PYTHONPATH, and none of its own packages."""
    (folder / "folder").mkdir()
    (folder / "setuptools").mkdir()
    (folder / "setuptools" / "__init__.py").write_text("")
    (folder / "setuptools" / "build_meta.py").write_text(BUILD_META)
    tools = buildconfig.ROOT / "tools"
    env = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{tools}", "PYTHONNOUSERSITE": "1"}
    command = [python, "-S", "-c", HOOKS]
    return subprocess.run(
        command, env=env, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def said_by_hooks(python: str, folder: Path) -> list[str]:
    done = run_hooks(python, folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_torch_is_that_of_the_environment(tmp_path: Path) -> None:
    assert said_by_hooks(sys.executable, tmp_path) == [*["ninja"] * 2, *["torch"] * 3]


def test_torch_is_required_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # whose packages might have one
    venv.create(tmp_path / "env", symlinks=True)
    python = str(tmp_path / "env" / "bin" / "python")
    wanted = f"ninja {buildconfig.TORCH}"
    assert said_by_hooks(python, tmp_path) == [*[wanted] * 2, *["no torch"] * 3]


INFO = f"ringcomm-{buildconfig.public_version()}.dist-info"
WHEEL = f"ringcomm-{buildconfig.public_version()}-py3-none-any.whl"
THIS_TORCH = ".".join(torch.__version__.split(".")[:2])


def write_wheel(folder: Path, minor: str = THIS_TORCH, name: str = WHEEL) -> Path:
    """A wheel for one version of torch, without a program."""
    _, version, *tags = name.removesuffix(".whl").split("-")
    info = f"ringcomm-{version}.dist-info"
    texts = {
        f"ringcomm/torch_{minor.replace('.', '_')}/_C.so": "an extension" * 1000,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: ringcomm\nVersion: {version}\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {'-'.join(tags)}\n",
    }
    texts[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in (*texts, f"{info}/RECORD"))
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / name, "w") as archive:
        for file, text in texts.items():
            archive.writestr(file, text)
    return folder / name


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Lists a folder and serves its files, without a log."""

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def wheels(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A folder of wheels; RINGCOMM_WHEELS is the folder or the address of a server that has it."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    if getattr(request, "param", "url") == "folder":
        monkeypatch.setenv("RINGCOMM_WHEELS", str(folder))
        yield folder
        return
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        monkeypatch.setenv("RINGCOMM_WHEELS", f"http://127.0.0.1:{server.server_port}/")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield folder
        finally:
            server.shutdown()
            thread.join(TIMEOUT_S)


@pytest.mark.parametrize("wheels", ["folder", slow("url")], indirect=True)
def test_a_wheel_is_taken_from_a_folder_or_a_url(wheels: Path, tmp_path: Path) -> None:
    write_wheel(wheels)
    # No requirement, and what comes from the wheel; editable installs are always compiled.
    assert said_by_hooks(sys.executable, tmp_path) == ["", "ninja", INFO, WHEEL, "torch"]
    assert (tmp_path / "folder" / INFO / "METADATA").exists()
    assert (tmp_path / "folder" / WHEEL).exists()


def test_a_wheel_of_pip_fits_the_torch_that_it_names(wheels: Path, tmp_path: Path) -> None:
    name = WHEEL.replace("-py3", f"+torch{THIS_TORCH}-py3")
    write_wheel(wheels, "9.9", name)
    done = run_hooks(sys.executable, tmp_path)
    assert name in done.stdout.splitlines(), done.stderr


OTHER_PYTHON = WHEEL.replace("py3-none-any", "cp36-cp36m-manylinux1_x86_64")


@pytest.mark.parametrize(
    ("minor", "name", "reason"),
    [
        ("2.9", WHEEL, f"{WHEEL} of .* is for torch 2.9, and this is torch {THIS_TORCH}"),
        slow(THIS_TORCH, OTHER_PYTHON, f"no wheel of .* it has {OTHER_PYTHON}"),
        slow(None, "", "no wheel of ringcomm .* it has no wheel of ringcomm"),
    ],
    ids=["another torch", "another Python", "empty"],
)
def test_without_a_wheel_that_fits_it_compiles(
    minor: str | None, name: str, reason: str, wheels: Path, tmp_path: Path
) -> None:
    if minor:
        write_wheel(wheels, minor, name)
    done = run_hooks(sys.executable, tmp_path)
    assert done.stdout.splitlines() == [*["ninja"] * 2, *["torch"] * 3], done.stderr
    assert not list((tmp_path / "folder").iterdir())
    (line,) = done.stderr.splitlines()
    assert re.search(f"{reason}.*: compiling, about 2 min with 2 compilers at a time", line), line


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("/nonexistent/wheels", "is ignored"),
        slow("http://127.0.0.1:1/wheels/", "Could not fetch URL"),
    ],
)
def test_a_source_that_cannot_be_read_does_no_harm(
    source: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGCOMM_WHEELS", source)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    done = run_hooks(sys.executable, tmp_path)
    assert done.stdout.splitlines() == [*["ninja"] * 2, *["torch"] * 3], done.stderr
    assert re.fullmatch(
        f"RINGCOMM_WHEELS={source} has no wheel .*{reason}.*: compiling, .*\n", done.stderr
    )


def test_a_url_is_encrypted_or_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGCOMM_WHEELS", "http://wheels.invalid/")
    done = run_hooks(sys.executable, tmp_path)
    assert done.returncode == 1
    assert "http://wheels.invalid/ is not safe to install from: use an https URL" in done.stderr


def test_the_links_of_a_release_are_on_another_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGCOMM_WHEELS", "https://github.com/o/r/releases/tag/v0.1.0")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")  # nothing leaves this machine
    done = run_hooks(sys.executable, tmp_path)
    assert re.search(r"Could not fetch URL .*/r/releases/expanded_assets/v0\.1\.0: ", done.stderr)


def cut(wheel: Path) -> None:
    wheel.write_bytes(wheel.read_bytes()[:-30])


def change_a_byte(wheel: Path) -> None:
    data = bytearray(wheel.read_bytes())
    data[data.index(b"an extension")] ^= 1
    wheel.write_bytes(data)


def pip_install(target: Path) -> subprocess.CompletedProcess[str]:
    """`pip install .` of the checkout; compiling instead of taking a wheel would fail."""
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation"]
    return subprocess.run(
        [*command, "--target", str(target), str(buildconfig.ROOT)],
        env={**os.environ, "CXX": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.mark.parametrize(
    ("damage", "said"),
    [slow(cut, "pip cannot take a wheel from there: .*invalid"), (change_a_byte, "is damaged")],
    ids=["cut", "changed"],
)
def test_a_damaged_wheel_is_not_installed(
    damage: Callable[[Path], None], said: str, wheels: Path, tmp_path: Path
) -> None:
    wheel = write_wheel(wheels)
    damage(wheel)
    done = pip_install(tmp_path / "target")
    assert done.returncode != 0
    assert re.search(
        f"RINGCOMM_WHEELS={os.environ['RINGCOMM_WHEELS']}.*{said}", done.stdout + done.stderr
    )
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("wheels", [slow("folder"), "url"], indirect=True)
def test_pip_installs_the_wheel(wheels: Path, tmp_path: Path) -> None:
    write_wheel(wheels)
    done = pip_install(tmp_path / "target")
    assert done.returncode == 0, done.stderr
    folder = f"torch_{THIS_TORCH.replace('.', '_')}"
    assert [path.name for path in (tmp_path / "target" / "ringcomm").iterdir()] == [folder]


@pytest.mark.slow
def test_without_a_wheel_or_a_compiler_the_error_names_both(wheels: Path, tmp_path: Path) -> None:
    write_wheel(wheels, "2.9")
    done = pip_install(tmp_path / "target")
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert "ringcomm cannot be built: no C++ compiler: '/nonexistent' is not on PATH" in said
    assert "RINGCOMM_WHEELS=FOLDER pip install ." in said
    assert f"{WHEEL} of RINGCOMM_WHEELS={os.environ['RINGCOMM_WHEELS']} is for torch 2.9" in said
