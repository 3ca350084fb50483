"""Checks layout and names with ruff and clang-format; with --types, runs mypy instead.

Usage: python tools/lint.py [--fix | --types]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Apart from examples, which have scripts of the same names as benchmarks.
TYPED = ("ringcomm", "kernels", "benchmarks", "tools", "tests", "_ringcomm_autoload.py")


def run(*command: str) -> bool:
    """Runs a tool from this Python's folder or PATH; returns whether it succeeded."""
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    tool = shutil.which(command[0], path=places)
    if tool is None:
        sys.exit(f"{command[0]} is not installed: pip install -r tools/requirements-lint.txt")
    print("+", *command[:4], flush=True)
    return subprocess.call([tool, *command[1:]], cwd=ROOT) == 0


def cpp_files() -> list[str]:
    """Our C++ and CUDA files; third_party is left as it came."""
    folders = ("csrc", "tests/cpp", "tests/emulator", "tests/ptx", "benchmarks/gpu")
    paths = [p for name in folders for p in (ROOT / name).rglob("*")]
    kinds = (".h", ".cc", ".cu", ".cuh")
    return [str(p) for p in paths if p.suffix in kinds and "third_party" not in p.parts]


def main() -> int:
    """Runs every check, also after one has failed; returns 1 if any did."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--fix", action="store_true", help="rewrite files instead of reporting")
    group.add_argument("--types", action="store_true", help="run mypy instead")
    options = parser.parse_args()
    if options.types:
        results = [run("mypy", *TYPED), run("mypy", "examples")]
    else:
        results = [run("ruff", "check", *["--fix"] * options.fix, ".")]
        results.append(run("ruff", "format", "-q", *["--check"] * (not options.fix), "."))
        how = ["-i"] if options.fix else ["--dry-run", "-Werror", "-ferror-limit=1"]
        results.append(run("clang-format", *how, *cpp_files()))
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
