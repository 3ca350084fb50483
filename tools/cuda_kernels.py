"""Compiles csrc/cuda/kernels/*.cu and kernels/losses/*.cu into images for the extension.

Standard library only, as buildconfig.py. Run by setup.py; by itself it compiles for what
RINGCOMM_CUDA_ARCHS says or every architecture that is served, and says so where there is no nvcc:

    python tools/cuda_kernels.py [HELD]

With HELD, build/cuda-HELD gets kernels that hold so many vectors per thread, for kernel_sweep.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import buildconfig
from buildconfig import INCLUDED, ROOT, BuildProblem

# Have what was compiled within, which no compiler tells ninja.
EMBEDDERS = (
    ROOT / "csrc" / "cuda" / "collectives" / "launches.cc",
    ROOT / "kernels" / "losses" / "cuda_cross_entropy.cc",
)
ARCHITECTURES = ("80", "90", "100")
HELD = "-DRINGCOMM_HELD_VECTORS"


def sources() -> list[Path]:
    """Returns the files of kernels."""
    return buildconfig.cpp_files(".cu")


def archs_asked() -> tuple[str, ...]:
    """Returns those of RINGCOMM_CUDA_ARCHS ("80;90"); none where it is not set."""
    return tuple(os.environ.get("RINGCOMM_CUDA_ARCHS", "").replace(";", " ").split())


def archs_here() -> tuple[str, ...]:
    """Returns those of the GPUs that nvidia-smi finds, such as "90", each once."""
    tool = shutil.which("nvidia-smi", path=f"{os.environ.get('PATH', '')}:/usr/local/nvidia/bin")
    if tool is None:
        return ()
    query = [tool, "--format=csv,noheader", "--query-gpu=compute_cap"]
    done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=60)
    found = re.findall(r"(?m)^(\d+)\.(\d+)$", done.stdout)
    return tuple(dict.fromkeys(major + minor for major, minor in found))


def has_driver() -> bool:
    """Tells whether the driver for NVIDIA's GPUs is here."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def release_of(nvcc: Path) -> str:
    """The release of an nvcc, independent of its path: "release 13.0"."""
    done = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"release [\d.]+", done.stdout)
    return found.group(0) if found else str(nvcc)


def compile_all(
    nvcc: Path, folder: Path, archs: tuple[str, ...] = (), defines: tuple[str, ...] = ()
) -> Path:
    """Compiles what has changed into the folder: for each file NAME.fatbin, of all architectures.

    The first of `archs`, or of those that are asked for or served, is also there as PTX, for other
    GPUs. The files that embed images are touched where they are older than one of them. Images may
    be compiled elsewhere: a stamp beside each tells what it was made of. Raises BuildProblem.
    """
    archs = archs or archs_asked() or ARCHITECTURES
    flags = [*buildconfig.BUILD_LISTS["NVCC_COMMON"], "-O3", *defines]
    for arch in archs:
        flags += ["-gencode", f"arch=compute_{arch},code=sm_{arch}"]
    # For other GPUs. Code for sm_80 has the fewest barriers, of which some of them have few
    # (cuda/kernels/gpu_block.cuh).
    flags += ["-gencode", f"arch=compute_{archs[0]},code=compute_{archs[0]}"]
    folder.mkdir(parents=True, exist_ok=True)
    common = [release_of(nvcc).encode(), *map(str.encode, flags)]
    common += [path.read_bytes() for path in buildconfig.cpp_files(".h", ".cuh")]
    num_jobs = buildconfig.num_jobs()
    # What is left of the jobs compiles a file's architectures side by side.
    more = ["--threads", str(max(1, num_jobs // len(sources()))), "-fatbin"]
    more += [f"-I{folder}" for folder in INCLUDED]

    def compile_one(source: Path) -> Path:
        image, stamp = (folder / f"{source.stem}.{kind}" for kind in ("fatbin", "stamp"))
        state = hashlib.sha256(b"\0".join([*common, source.read_bytes()])).hexdigest()
        if not (image.exists() and stamp.exists() and stamp.read_text() == state):
            began = time.monotonic()
            command = [str(nvcc), *flags, *more, str(source), "-o", str(image)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                name = source.relative_to(ROOT)
                raise BuildProblem(f"{name} does not compile:\n{done.stderr[-4000:]}")
            stamp.write_text(state)
            seconds, kib = time.monotonic() - began, image.stat().st_size >> 10
            print(f"[cuda] {source.name}: {kib} KiB in {seconds:.0f} s", flush=True)
        return image

    with concurrent.futures.ThreadPoolExecutor(num_jobs) as pool:
        newest = max(image.stat().st_mtime_ns for image in pool.map(compile_one, sources()))
    for embedder in EMBEDDERS:
        if embedder.stat().st_mtime_ns < newest:
            os.utime(embedder, ns=(newest, newest))
    return folder


def main() -> int:
    """Compiles for RINGCOMM_CUDA_ARCHS."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("held", nargs="?", type=int, help="vectors in flight per thread")
    held = parser.parse_args().held
    nvcc = buildconfig.find_nvcc()
    if nvcc is None:
        print("[cuda] no nvcc here: kernels for GPUs were NOT compiled")
        return 0
    try:
        name, defines = ("cuda", ()) if held is None else (f"cuda-{held}", (f"{HELD}={held}",))
        compile_all(nvcc, ROOT / "build" / name, defines=defines)
    except BuildProblem as problem:
        print(problem)
        return 1
    archs = ", ".join(f"sm_{arch}" for arch in archs_asked() or ARCHITECTURES)
    print(f"[cuda] kernels compile for {archs}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
