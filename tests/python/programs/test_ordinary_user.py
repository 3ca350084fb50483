"""The account as which CI runs some tests: tools/ordinary_user."""

from __future__ import annotations

import os
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
