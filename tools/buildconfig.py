"""Common definitions of setup.py and of tools: sources, flags, checks.

Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
# The lists that make reads too, by name.
BUILD_LISTS = {
    name: tuple(words.split())
    for name, words in re.findall(
        r"(?m)^(\w+) := ([^$\n]+)$", (ROOT / "csrc" / "build.mk").read_text(encoding="utf-8")
    )
}
# The folders of C++ and CUDA, and where their includes begin: "kernels/..." at ROOT.
CPP = ("csrc", "kernels")
INCLUDED = tuple(ROOT / folder for folder in BUILD_LISTS["INCLUDED"])

MIN_PYTHON = (3, 10)
MIN_TORCH = (2, 11)
# What is installed where there is no torch.
TORCH = "torch==2.13.0"
MACHINES = ("x86_64", "aarch64")


class Extension(NamedTuple):
    """A module of ringcomm: the sources that it consists of, as patterns of paths from ROOT.

    Attributes:
        alone: compiled one by one: those of the SIMD levels cannot be joined.
        joined: joined into NUM_JOINED units: they share most of their headers.
        with_torch: these become one unit, because torch's headers take most of the time of one.
    """

    name: str
    alone: tuple[str, ...]
    joined: tuple[str, ...]
    with_torch: tuple[str, ...]


def _patterns(name: str) -> tuple[str, ...]:
    """The patterns of a list of folders and files."""
    return tuple(one if one.endswith(".cc") else f"{one}/**/*.cc" for one in BUILD_LISTS[name])


# Each links those before it. What kernels/ has with torch's headers is named torch_* or cuda_*.
EXTENSIONS = (
    Extension("_kernels", _patterns("KERNELS_ALONE"), (), ("kernels/**/torch_*.cc",)),
    Extension("_C", (), _patterns("ENGINE"), ("csrc/bindings/*.cc",)),
    Extension(
        "_cuda",
        _patterns("GPU"),
        (),
        ("csrc/cuda/bindings/*.cc", "kernels/**/cuda_*.cc"),
    ),
)

CXX_FLAGS = (
    *BUILD_LISTS["CXX_COMMON"],
    "-O3",
    "-g0",
    # Extensions use each other's functions: these are visible, pybind11's templates are not.
    "-fno-semantic-interposition",
    "-fvisibility-inlines-hidden",
    "-Wno-attributes",
)
LINK_FLAGS = ("-pthread", "-Wl,-Bsymbolic-functions", "-Wl,-rpath,$ORIGIN")

# A translation unit with torch headers takes about this much memory to compile.
BYTES_PER_JOB = 2 << 30

# Into how many units an extension's sources without torch's headers are joined.
NUM_JOINED = 2

_CXX20_PROBE = """
#include <atomic>
#include <concepts>
#include <span>
template <std::integral T> consteval T twice(T x) { return 2 * x; }
static_assert(twice(21) == 42);
int main() { std::atomic<int> word{0}; word.notify_all(); return int(std::span<int>().size()); }
"""


class BuildProblem(Exception):
    """The machine lacks a requirement; the message says what to run."""


def parse_version(text: str) -> tuple[int, int]:
    """Returns (major, minor) of a version such as "2.13.0+cpu"."""
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        raise ValueError(f"not a version: {text!r}")
    return int(match.group(1)), int(match.group(2))


def public_version() -> str:
    """Returns the version in ringcomm/version.py, the only place where it is written."""
    text = (ROOT / "ringcomm" / "version.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'(?m)^__version__ = "(.+)"$', text)
    return version


def address(text: str | None = None) -> str:
    """Returns the project's address, or "" while it has none, from a text of pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8") if text is None else text
    found = re.search(r'(?m)^\[tool\.ringcomm\]\nurl = "(.*)"$', text)
    if found is None:
        raise BuildProblem("pyproject.toml has no url in [tool.ringcomm]")
    return found[1]


def requirements(group: str) -> list[str]:
    """Returns a group of [dependency-groups] in pyproject.toml; Python 3.10 has no tomllib."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(rf"(?ms)^\[dependency-groups\]$.*?^{group} = \[$(.*?)^\]$", text)
    if found is None:
        raise BuildProblem(f"pyproject.toml has no group {group!r} of dependencies")
    return re.findall(r'(?m)^ +"(.*)"', found[1])


def sources(*patterns: str) -> list[Path]:
    """Returns the files that match each of the patterns in turn, sorted."""
    return [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]


def units(parts: Extension, folder: Path) -> list[Path]:
    """Returns what to compile for an extension; writes the joined sources to the folder.

    Their names make the longest the first to be compiled. Files that are as they should be are left
    alone, for ninja.
    """
    plain = sources(*parts.joined)
    joined = {"1_torch": sources(*parts.with_torch)}
    joined |= {f"{2 + idx}_plain": plain[idx::NUM_JOINED] for idx in range(NUM_JOINED)}
    folder.mkdir(parents=True, exist_ok=True)
    result = sources(*parts.alone)
    for name, paths in joined.items():
        path = folder / f"{name}.cc"
        text = "".join(f'#include "{source}"\n' for source in paths)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
        if paths:
            result.append(path)
    return result


def cpp_files(*suffixes: str) -> list[Path]:
    """Returns the files of C++ and CUDA with these suffixes, or all of them."""
    kinds = suffixes or (".h", ".cuh", ".cc", ".cu")
    return sources(*(f"{folder}/**/*{kind}" for folder in CPP for kind in kinds))


def compiler() -> list[str]:
    """Returns the C++ compiler as torch's cpp_extension picks it: $CXX, else c++."""
    return shlex.split(os.environ.get("CXX") or "c++")


def _compiled(program: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [*compiler(), "-x", "c++", "-", *options]
    return subprocess.run(command, input=program, capture_output=True, text=True, check=False)


def is_set(name: str) -> bool:
    """Tells whether an environment variable is set to anything but "0"."""
    return os.environ.get(name, "") not in ("", "0")


def cxx_flags() -> list[str]:
    """Returns the extension's flags; RINGCOMM_WERROR makes warnings errors."""
    werror = ["-Werror"] if is_set("RINGCOMM_WERROR") else []
    version = f'-DRINGCOMM_VERSION="{public_version()}"'
    return [*CXX_FLAGS, version, *gcc_flags(), *werror]


def write_commands(of_torch: list[str]) -> None:
    """Writes build/compile_commands.json, by which an editor compiles each source by itself."""
    folders = [*map(str, INCLUDED), *of_torch, sysconfig.get_path("include")]
    command = [*compiler(), *cxx_flags(), *(f"-I{folder}" for folder in folders), "-c"]
    entries = [
        {"directory": str(ROOT), "file": str(source), "arguments": [*command, str(source)]}
        for source in cpp_files(".cc")
    ]
    path = ROOT / "build" / "compile_commands.json"
    path.write_text(json.dumps(entries, indent=1), encoding="utf-8")


def gcc_flags() -> list[str]:
    """Returns the flags that only GCC has: nothing for clang.

    at::parallel_for, a template of OpenMP's pragmas, needs -fopenmp to have threads: for compiling
    only, since the runtime is the one that torch has loaded, whose threads torch counts. clang
    needs another runtime: there the operators run in one thread.
    """
    if "__clang__" in _compiled("", "-dM", "-E").stdout:
        return []
    return ["-fopenmp", *BUILD_LISTS["GCC_ALONE"]]


def find_nvcc() -> Path | None:
    """Returns CUDA's compiler: of $CUDA_HOME, else on PATH, in the usual place, or pip's."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        nvcc = Path(home, "bin", "nvcc")
        return nvcc if nvcc.exists() else None
    packages = [Path(sysconfig.get_path("purelib")), *ROOT.glob(".venv/lib/python*/site-packages")]
    folders = ["/usr/local/cuda/bin", *(str(one / "nvidia/cu13/bin") for one in packages)]
    found = shutil.which("nvcc", path=os.pathsep.join([os.environ.get("PATH", ""), *folders]))
    return Path(found) if found else None


def num_jobs() -> int:
    """Returns how many compilers to run at once: $RINGCOMM_MAX_JOBS, $MAX_JOBS, else as fits."""
    for name in ("RINGCOMM_MAX_JOBS", "MAX_JOBS"):
        text = os.environ.get(name, "").strip()
        if text:
            if not text.isdigit() or int(text) < 1:
                raise BuildProblem(f"{name} must be a positive integer, got {text!r}")
            return int(text)
    text = Path("/proc/meminfo").read_text(encoding="ascii")
    available = int(text.partition("MemAvailable:")[2].split()[0]) << 10
    return max(1, min(len(os.sched_getaffinity(0)), available // BYTES_PER_JOB))


def check_platform() -> None:
    """Raises BuildProblem unless this is Linux on x86-64 or arm64 with a Python new enough."""
    if sys.platform != "linux":
        raise BuildProblem(
            f"ringcomm needs Linux (memfd, futex, pidfd); this is {platform.system()}. "
            "On other systems use a Linux container or virtual machine."
        )
    if platform.machine() not in MACHINES:
        raise BuildProblem(
            f"ringcomm supports {' and '.join(MACHINES)}; this machine is {platform.machine()}."
        )
    if sys.version_info[:2] < MIN_PYTHON:
        raise BuildProblem(
            f"ringcomm needs Python >= 3.10; {sys.executable} is {platform.python_version()}."
            " Install a newer one and select it: make PYTHON=python3.12 ..."
        )


def check_compiler() -> None:
    """Raises BuildProblem unless there is a C++ compiler that knows C++20."""
    command = compiler()
    if shutil.which(command[0]) is None:
        raise BuildProblem(
            f"no C++ compiler: {command[0]!r} is not on PATH. Install one: "
            "apt-get install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora); or set CXX. "
            "Without one, take a wheel that `make wheels` built on another machine: "
            "pip install FILE, or, where numpy is installed, pip install --no-index "
            "--find-links FOLDER ringcomm."
        )
    done = _compiled(_CXX20_PROBE, *BUILD_LISTS["CXX_COMMON"], "-fsyntax-only")
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[0]
        raise BuildProblem(
            f"{' '.join(command)} cannot compile C++20: {reason}. g++ >= 11 or clang >= 14 can: "
            "apt-get install g++-12, then CXX=g++-12."
        )


def check_python_headers() -> None:
    """Raises BuildProblem unless the running Python's headers are installed."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise BuildProblem(
            f"no Python headers: {header} does not exist. Install them: "
            f"apt-get install python3-dev (or python{version}-dev), dnf install python3-devel."
        )
