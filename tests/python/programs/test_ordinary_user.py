"""The account as which CI runs some tests: tools/ordinary_user."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(os.environ.get("USER") != "nobody", reason="only in that account")
def test_it_is_an_ordinary_account() -> None:
    assert os.geteuid() != 0
    assert os.environ["PATH"] == "/usr/local/bin:/usr/bin:/bin"
    assert os.access(os.environ["HOME"], os.W_OK)
    assert not Path("/proc/1").exists()  # root's
    with pytest.raises(PermissionError):
        os.kill(1, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="others run the tests as they are")
def test_it_fails_where_it_can_run_no_test(tmp_path: Path) -> None:
    for name in ("bash", "dirname", "env", "id", "mount", "setpriv"):
        (tmp_path / name).symlink_to(shutil.which(name) or name)
    tool = Path(__file__).resolve().parents[3] / "tools" / "ordinary_user"
    done = subprocess.run(
        [tool, sys.executable, "-q"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert "no test ran as an ordinary user: unshare is not installed" in done.stdout
