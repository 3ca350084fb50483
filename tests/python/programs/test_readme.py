"""The README does what it says."""

import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[3] / "README.md"


def _block(language: str, containing: str) -> str:
    """The fenced block of the README that contains a text."""
    blocks = re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), re.S)
    found = [block for block in blocks if containing in block]
    assert len(found) == 1
    return str(found[0])


def test_the_example_runs_under_torchrun(tmp_path: Path) -> None:
    if not any(point.name == "ringcomm" for point in entry_points(group="torch.backends")):
        pytest.skip("ringcomm is not installed (built in place only), so torch does not know it")
    script = tmp_path / "script.py"
    script.write_text(_block("python", "init_process_group"), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(script)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # The ranks share one pipe, and their words may mix.
    assert done.stdout.count("tensor([3., 3., 3., 3.])") == 2


def test_its_two_commands_are_targets_of_the_makefile() -> None:
    makefile = (README.parent / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"make (\w+)", _block("sh", "make train"))
    assert targets == ["train", "test"]
    for target in targets:
        assert re.search(rf"^{target}:.*##", makefile, re.M)


def test_it_lists_the_environment_variables_that_are_read() -> None:
    listed = set(re.findall(r"^\| `(RINGCOMM_\w+)`", README.read_text(encoding="utf-8"), re.M))
    read: set[str] = set()
    read_by_build: set[str] = set()
    for folder in ("csrc", "ringcomm"):
        for path in (README.parent / folder).rglob("*"):
            if path.suffix in (".cc", ".h"):
                text = path.read_text(encoding="utf-8")
                read |= set(re.findall(r'getenv\("(RINGCOMM_\w+)"', text))
    env = (README.parent / "ringcomm" / "env.py").read_text(encoding="utf-8")
    read |= set(re.findall(r'"(RINGCOMM_\w+)"', env))
    for path in (README.parent / "setup.py", *(README.parent / "tools").glob("*.py")):
        read_by_build |= set(re.findall(r'"(RINGCOMM_\w+)"', path.read_text(encoding="utf-8")))
    assert read
    assert read_by_build
    assert listed == read | read_by_build
