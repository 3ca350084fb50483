"""The account as which CI runs some tests: tools/ordinary_user.py."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import ordinary_user
import pytest


@pytest.mark.skipif(os.environ.get("USER") != "ringcomm-user", reason="only in that account")
def test_it_is_an_ordinary_account() -> None:
    user = pwd.getpwuid(os.geteuid())
    assert user.pw_name == ordinary_user.NAME
    assert user.pw_uid != 0
    assert user.pw_dir == os.environ["HOME"]
    assert os.environ["PATH"] == "/usr/local/bin:/usr/bin:/bin"
    assert os.access(user.pw_dir, os.W_OK)
    assert not Path("/proc/1").exists()  # root's
    with pytest.raises(PermissionError):
        os.kill(1, 0)


def test_the_uppermost_folder_that_is_closed_to_others(tmp_path: Path) -> None:
    inner = tmp_path / "closed" / "open"
    inner.mkdir(parents=True)
    inner.parent.chmod(0o700)
    found = ordinary_user.closed_parent(inner)  # pytest closes its own folders, too
    assert found is not None
    assert found in inner.parents
    assert not found.stat().st_mode & 0o001
    assert all(folder.stat().st_mode & 0o001 for folder in found.parents)
    assert ordinary_user.closed_parent(Path("/usr/bin")) is None


def test_where_it_cannot_run_it_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(ordinary_user, "TOOLS", ("mount", "no-such-program"))
    assert ordinary_user.main([]) == 0
    assert "not installed: no-such-program" in capsys.readouterr().out
    monkeypatch.setattr(ordinary_user, "TOOLS", ("mount",))
    monkeypatch.setattr(ordinary_user, "NAMESPACES", ("false",))
    assert ordinary_user.main([]) == 0
    assert "root may not make namespaces here" in capsys.readouterr().out
