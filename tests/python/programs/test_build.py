"""What the build says on a machine that lacks something."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import buildconfig
import cuda_kernels
import pytest


@pytest.mark.parametrize(
    ("target", "value", "check", "message"),
    [
        ("sys.platform", "darwin", "check_platform", "needs Linux"),
        ("platform.machine", lambda: "ppc64le", "check_platform", "x86_64 and aarch64; .* ppc64le"),
        ("sysconfig.get_path", lambda _: "/no", "check_python_headers", "apt-get install python3-"),
        ("CXX", "no-such-compiler", "check_compiler", r"'no-such-compiler'.*apt-get install g\+\+"),
        ("CXX", "/bin/false", "check_compiler", r"cannot compile C\+\+20"),
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


def test_setup_without_torch_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('hidden')\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv = ['setup.py', 'build']\n"
    code += "import runpy; runpy.run_path('setup.py', run_name='__main__')\n"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "pip install --no-build-isolation ." in done.stderr


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
