"""The interpreter that ringcomm starts for what runs in a process of its own."""

import os
import re
import sys


def interpreter() -> str | None:
    """sys.executable; None where it is another program, which would be started once more.

    In a program of PyInstaller, cx_Freeze or Nuitka, or with an embedded interpreter, it is that
    program, empty or None.
    """
    path = sys.executable or ""
    is_named = re.fullmatch(r"python[\d.]*[a-z]{0,2}(-dbg)?", os.path.basename(path))
    main = sys.modules.get("__main__")
    is_frozen = getattr(sys, "frozen", False) or hasattr(main, "__compiled__")
    return path if is_named and not is_frozen and os.access(path, os.X_OK) else None
