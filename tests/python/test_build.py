"""What the build says on a machine that lacks something."""

import platform
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

import buildconfig  # noqa: E402


def test_this_machine_is_complete() -> None:
    buildconfig.check_all()


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    with pytest.raises(buildconfig.BuildProblem, match=r"needs Linux .* this is Darwin"):
        buildconfig.check_platform()


def test_other_processors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "ppc64le")
    with pytest.raises(buildconfig.BuildProblem, match=r"x86_64 and aarch64; .* ppc64le"):
        buildconfig.check_platform()


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        buildconfig.BuildProblem, match=r"'no-such-compiler'.*apt-get install g\+\+"
    ):
        buildconfig.check_compiler()


def test_a_compiler_without_cxx20_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old = tmp_path / "old-compiler"
    old.write_text("#!/bin/sh\necho 'unrecognized option -std=c++20' >&2\nexit 1\n")
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    with pytest.raises(buildconfig.BuildProblem, match=r"cannot compile C\+\+20"):
        buildconfig.check_compiler()


def test_missing_python_headers_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(buildconfig.BuildProblem, match="apt-get install python3-dev"):
        buildconfig.check_python_headers()


def test_a_wrong_number_of_jobs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RINGCOMM_MAX_JOBS", raising=False)
    monkeypatch.setenv("MAX_JOBS", "many")
    with pytest.raises(buildconfig.BuildProblem, match="MAX_JOBS must be a positive integer"):
        buildconfig.num_jobs()


def test_setup_without_torch_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('hidden')\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv = ['setup.py', 'build']\n"
    code += "import runpy; runpy.run_path('setup.py', run_name='__main__')\n"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=TOOLS.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "pip install --no-build-isolation ." in done.stderr
