"""Checks layout and types: ruff and clang-format, mypy with --types; --fix rewrites files.

Usage: python tools/lint.py [--fix | --types]
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON_FOLDERS = ("ringcomm", "kernels", "examples", "benchmarks", "tools", "tests")
CPP_FOLDERS = ("csrc", "tests/cpp", "tests/emulator")
CPP_SUFFIXES = (".h", ".cc", ".cu", ".cuh")


def find_tool(name: str) -> str:
    """Returns the path of a tool that stands beside the running Python, or on PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        sys.exit(f"{name} is not installed: pip install -r tools/requirements-lint.txt")
    return found


def cpp_files() -> list[str]:
    """Returns our C++ and CUDA files; third_party stays as it came."""
    found = [path for folder in CPP_FOLDERS for path in (ROOT / folder).rglob("*")]
    ours = [p for p in found if p.suffix in CPP_SUFFIXES and "third_party" not in p.parts]
    return sorted(str(path.relative_to(ROOT)) for path in ours)


def check_cpp_layout() -> int:
    """Names the C++ files that clang-format would change; returns how many there are."""
    tool = find_tool("clang-format")
    command = [tool, "--dry-run", "-Werror", "-ferror-limit=1"]
    print(f"+ clang-format --dry-run on {len(cpp_files())} files", flush=True)
    num_jobs = len(os.sched_getaffinity(0))
    with concurrent.futures.ThreadPoolExecutor(num_jobs) as pool:
        done = pool.map(
            lambda name: subprocess.run(
                [*command, name], cwd=ROOT, capture_output=True, text=True, check=False
            ),
            cpp_files(),
        )
        wrong = [run for run in done if run.returncode != 0]
    for run in wrong:
        print((run.stderr.strip().splitlines() or ["clang-format failed"])[0])
    if wrong:
        print(f"clang-format would change {len(wrong)} files: make format")
    return len(wrong)


def commands(fix: bool, types: bool) -> list[list[str]]:
    """Returns the commands to run, in order."""
    if types:
        # Apart: examples and benchmarks have scripts of the same names.
        rest = [name for name in PYTHON_FOLDERS if name != "examples"]
        return [
            [find_tool("mypy"), *rest, "_ringcomm_autoload.py"],
            [find_tool("mypy"), "examples"],
        ]
    ruff = find_tool("ruff")
    if fix:
        rewrite_cpp = [find_tool("clang-format"), "-i", *cpp_files()]
        return [[ruff, "check", "--fix", "."], [ruff, "format", "."], rewrite_cpp]
    return [[ruff, "check", "."], [ruff, "format", "--check", "-q", "."]]


def main() -> int:
    """Runs every check, also after one has failed; returns 1 if any did."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--fix", action="store_true", help="rewrite files instead of complaining")
    group.add_argument("--types", action="store_true", help="run mypy instead")
    options = parser.parse_args()
    num_failed = 0
    for command in commands(options.fix, options.types):
        print("+", " ".join([Path(command[0]).name, *command[1:4]]), flush=True)
        num_failed += subprocess.run(command, cwd=ROOT, check=False).returncode != 0
    if not options.fix and not options.types:
        num_failed += check_cpp_layout() > 0
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
