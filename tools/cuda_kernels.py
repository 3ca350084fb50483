"""Compiles csrc/device/cuda/*.cu into images that the extension carries (device/cuda/image.cc).

Standard library only, as buildconfig.py. Run by setup.py; by itself it compiles for what
RINGCOMM_CUDA_ARCHS says or every architecture that is served, and says so where there is no nvcc:

    python tools/cuda_kernels.py [--arch 90] [--check]
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import buildconfig
from buildconfig import CSRC, ROOT, BuildProblem

# Has what was compiled within, which no compiler tells ninja.
EMBEDDER = CSRC / "device" / "cuda" / "image.cc"
ARCHITECTURES = ("80", "90", "100")
# Sums round the same way as on the CPU: nothing is contracted.
FLAGS = ("-std=c++20", "--expt-relaxed-constexpr", "-fmad=false")


def sources() -> list[Path]:
    """Returns the files of kernels."""
    return sorted((CSRC / "device" / "cuda").glob("*.cu"))


def default_archs() -> tuple[str, ...]:
    """Returns those of RINGCOMM_CUDA_ARCHS ("80;90"), or all that are served."""
    asked = os.environ.get("RINGCOMM_CUDA_ARCHS", "").replace(";", " ").split()
    return tuple(asked) or ARCHITECTURES


def compile_all(
    nvcc: Path, folder: Path, archs: tuple[str, ...] = (), *, is_check: bool = False
) -> Path:
    """Compiles what has changed; one image for each file, of all architectures.

    The file that embeds the images is touched where it is older than one of them.

    Args:
        nvcc: the compiler.
        folder: where images go, as NAME.fatbin.
        archs: default_archs() where empty; the last one also as PTX, for GPUs to come.
        is_check: whether only to find out whether they compile: without the assembler's optimiser,
            and with PTX of the first architecture for all.

    Returns:
        The folder.

    Raises:
        BuildProblem: a file does not compile.
    """
    archs = archs or default_archs()
    flags = [*FLAGS, *(["-Xptxas", "-O0"] if is_check else ["-O3"])]
    if is_check:
        codes = ",".join(f"sm_{arch}" for arch in archs)
        flags += ["-gencode", f"arch=compute_{archs[0]},code=[{codes}]"]
    else:
        for arch in archs:
            flags += ["-gencode", f"arch=compute_{arch},code=sm_{arch}"]
        flags += ["-gencode", f"arch=compute_{archs[-1]},code=compute_{archs[-1]}"]
    folder.mkdir(parents=True, exist_ok=True)
    release = release_of(nvcc)
    paths, num_jobs = sources(), buildconfig.num_jobs()
    # What is left of the jobs compiles a file's architectures side by side.
    num_threads = max(1, num_jobs // len(paths))
    with concurrent.futures.ThreadPoolExecutor(num_jobs) as pool:
        more = ["--threads", str(num_threads)]
        list(pool.map(lambda path: _compile(nvcc, release, path, folder, flags, more), paths))
    if not is_check:
        _touch_embedder([folder / f"{path.stem}.fatbin" for path in paths])
    return folder


def _touch_embedder(images: list[Path]) -> None:
    newest = max(path.stat().st_mtime_ns for path in images)
    if EMBEDDER.stat().st_mtime_ns < newest:
        os.utime(EMBEDDER, ns=(newest, newest))


def release_of(nvcc: Path) -> str:
    """Which nvcc it is, wherever it stands: "release 13.0"."""
    done = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"release [\d.]+", done.stdout)
    return found.group(0) if found else str(nvcc)


def _compile(
    nvcc: Path, release: str, source: Path, folder: Path, flags: list[str], more: list[str]
) -> None:
    """`more`: flags of which what comes out is no other. Images may be compiled elsewhere."""
    image = folder / f"{source.stem}.fatbin"
    stamp = folder / f"{source.stem}.stamp"
    state = _digest([source, *buildconfig.headers()], [release, *flags])
    if image.exists() and stamp.exists() and stamp.read_text() == state:
        return
    began = time.monotonic()
    where = ["-I", str(CSRC), "-fatbin", str(source), "-o", str(image)]
    command = [str(nvcc), *flags, *more, *where]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildProblem(f"{source.relative_to(ROOT)} does not compile:\n{done.stderr[-4000:]}")
    stamp.write_text(state)
    print(
        f"[cuda] {source.name}: {image.stat().st_size >> 10} KiB"
        f" in {time.monotonic() - began:.0f} s",
        flush=True,
    )


def _digest(paths: list[Path], words: list[str]) -> str:
    digest = hashlib.sha256("\0".join(words).encode())
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def main() -> int:
    """Compiles for the architectures of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", action="append", default=[], help="such as 90")
    parser.add_argument("--check", action="store_true", help="do they compile? kept apart")
    options = parser.parse_args()
    nvcc = buildconfig.find_nvcc()
    if nvcc is None:
        print("[cuda] no nvcc here: kernels for GPUs were NOT compiled")
        return 0
    folder = ROOT / "build" / ("cuda-check" if options.check else "cuda")
    try:
        compile_all(nvcc, folder, tuple(options.arch), is_check=options.check)
    except BuildProblem as problem:
        print(problem)
        return 1
    archs = ", ".join(f"sm_{arch}" for arch in options.arch or default_archs())
    print(f"[cuda] kernels compile for {archs}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
