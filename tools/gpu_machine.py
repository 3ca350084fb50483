"""Builds and tests ringcomm in the environment of a machine with GPUs, as far as one can be had.

That is Python 3.12, torch 2.11 for CUDA 13 and the Triton that it names; the extension has the
kernels' images for sm_90. Nothing runs on a GPU: tests of GPUs run over the emulator, the PTX of
Triton's kernels runs on the CPU, and every command of docs/gpu-verification.md is started, up to
its first look for a GPU.

The environment (8 GB of disk, 3 GB to download) and a copy of the files that git knows or does not
ignore are kept in .cache/gpu-machine, so that another run compiles what changed.

Usage: python tools/gpu_machine.py [PYTEST ARGS...]     (default: tests of devices and operators)
       python tools/gpu_machine.py --rows
       python tools/gpu_machine.py --kit

With --rows it starts the commands alone. With --kit it tests nothing, but fills gpu-kit with what
is built, for checkouts on such a machine: the extensions, kernel_sweep, an NCCL that serves ranks
of one GPU, and `run`.
"""

from __future__ import annotations

import lzma
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import buildconfig
from buildconfig import ROOT

HOME = ROOT / ".cache" / "gpu-machine"
PYTHON = "3.12"
TORCH = "torch==2.11.*"
OF_TORCH = ("triton", "setuptools")  # whose versions torch names
ARCHS = "90"
KIT = ROOT / "gpu-kit"
KIT_MIB = 60  # what fits a transfer
ROW_S = 90  # for a row to come to its first look for a GPU
TIMED_OUT = 124
# What commands say without a GPU, and what none may say.
NO_GPU = re.compile(r"(?i)no gpu|no cuda|nvidia|cuda driver|\bMPS\b|compute-sanitizer|\bncu\b")
BROKEN = re.compile(
    r"No module named|ImportError|unrecognized arguments|invalid choice|No rule to make|SyntaxError"
    r"|cannot be built|no tests ran matching|file or directory not found"
)
NCCL = "nvidia-nccl-cu13>=2.30"
TESTS = ["-m", "not slow", "tests/python/device", "tests/python/ops", "tests/python/backend"]


def find_python() -> str | None:
    """A Python of that version that can make environments; one of pyenv need not be chosen."""
    found = shutil.which(f"python{PYTHON}")
    places = [Path(found)] if found else []
    for path in os.environ["PATH"].split(os.pathsep):
        if Path(path).name == "shims":
            places += sorted(Path(path).parent.glob(f"versions/{PYTHON}*/bin/python"))
    for place in places:
        command = [str(place), "-c", "import ensurepip, venv"]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return str(place)
    return None


def copy_sources(target: Path) -> None:
    """Copies what has changed, with its time, and removes what is gone."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
    for name in sorted(names):
        source, copy = ROOT / name, target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if not copy.exists() or copy.stat().st_mtime != source.stat().st_mtime:
            shutil.copy2(source, copy)
    known = target.parent / "copied"
    for name in known.read_text(encoding="utf-8").split("\0") if known.exists() else []:
        if name and name not in names:
            (target / name).unlink(missing_ok=True)
    known.write_text("\0".join(sorted(names)), encoding="utf-8")


def requirements() -> list[str]:
    """What builds and tests ringcomm, with the Triton and setuptools that torch names."""
    found = [TORCH, "setuptools"]
    for name in ("build", "test"):
        text = (ROOT / "tools" / f"requirements-{name}.txt").read_text(encoding="utf-8")
        lines = [line.split("#")[0].strip() for line in text.splitlines()]
        found += [line for line in lines if line and not line.startswith(OF_TORCH)]
    return found


def start_rows(own: str, source: Path, env: dict[str, str]) -> int:
    """Starts the command of each row; 1 if one ends otherwise than for want of a GPU."""
    subprocess.run(["make", "kernel-sweep"], cwd=source, env=env, check=True)
    bad = []
    with tempfile.TemporaryDirectory(prefix="ringcomm_rows_") as out:
        env = env | {"RINGCOMM_PREBUILT": "1", "RINGCOMM_USE_ENV": "1", "PYTHON": own}
        env |= {"OUT": out, "GPUS": "1", "PYTHONPATH": str(source)}
        page = (source / "docs" / "gpu-verification.md").read_text(encoding="utf-8")
        for name, how in re.findall(r"(?m)^\| (\S+) \| .*? \| `([^`]+)` \| \d+ \|", page):
            log = Path(out) / "log"
            command = re.sub(r"(?<!\S)python ", f"{own} ", how)
            with log.open("w", encoding="utf-8") as output:
                found = subprocess.Popen(
                    ["timeout", "-k", "10", str(ROW_S), "bash", "-c", command],
                    cwd=source, env=env, stdout=output, stderr=output, stdin=subprocess.DEVNULL,
                )  # fmt: skip
                status = found.wait()
            said = log.read_text(encoding="utf-8")
            is_started = status in (0, TIMED_OUT) or NO_GPU.search(said)
            if not is_started or BROKEN.search(said):
                bad.append(name)
                print(f"[gpu-machine] {name} does not start:\n{said[-2000:]}", flush=True)
            else:
                print(f"[gpu-machine] {name} starts", flush=True)
    print(f"[gpu-machine] rows that do not start: {', '.join(bad) or 'none'}")
    return int(bool(bad))


def with_code_of(arch: int, library: Path) -> bytes:
    """A library with zeros in the place of kernels for other architectures, which pack well.

    Containers of its section .nv_fatbin have a magic number, the sizes of their header and of what
    follows; entries in them a kind (2: machine code), those sizes, and the architecture.
    """
    data = bytearray(library.read_bytes())
    listed = subprocess.run(
        ["readelf", "-SW", str(library)], capture_output=True, text=True, check=True
    ).stdout
    sections = {
        name: (int(offset, 16), int(size, 16))
        for name, offset, size in re.findall(
            r"\] (\S+) +\S+ +[0-9a-f]+ ([0-9a-f]+) ([0-9a-f]+) ", listed
        )
    }
    begin, size = sections[".nv_fatbin"]
    at = begin
    while at + 16 <= begin + size:
        magic, _, header, body = struct.unpack_from("<IHHQ", data, at)
        if magic != 0xBA55ED50:
            at += 8
            continue
        end = at + header + body
        at += header
        while at < end:
            kind, _, entry, payload = struct.unpack_from("<HHIQ", data, at)
            if (kind, *struct.unpack_from("<I", data, at + 28)) != (2, arch):
                data[at + entry : at + entry + payload] = bytes(payload)
            at += entry + payload
    if "__nv_relfatbin" in sections:  # for linkers alone
        begin, size = sections["__nv_relfatbin"]
        data[begin : begin + size] = bytes(size)
    return bytes(data)


def make_kit(own: str, source: Path, env: dict[str, str]) -> int:
    """Fills gpu-kit from what was built in `source`, and says how large it is; 1 if too large."""
    subprocess.run(["make", "kernel-sweep"], cwd=source, env=env, check=True)
    shutil.rmtree(KIT, ignore_errors=True)
    KIT.mkdir()
    tag = PYTHON.replace(".", "")
    built = [*source.glob(f"ringcomm/_*.cpython-{tag}-*.so"), source / "build/gpu/kernel_sweep"]
    for path in built:
        shutil.copy2(path, KIT)
        subprocess.run(["strip", "--strip-debug", str(KIT / path.name)], check=True)
    pip = [own, "-m", "pip", "install", "-q", "--no-deps", "--disable-pip-version-check"]
    folder = HOME / "nccl"
    if subprocess.run([*pip, "--target", str(folder), NCCL], check=False).returncode == 0:
        library = next(folder.rglob("libnccl.so.2"))
        with lzma.open(KIT / "libnccl.so.2.xz", "wb", preset=6) as packed:
            packed.write(with_code_of(int(ARCHS), library))
    shutil.copy2(ROOT / "tools" / "gpu_kit_run", KIT / "run")
    mib = sum(path.stat().st_size for path in KIT.iterdir()) / (1 << 20)
    for path in sorted(KIT.iterdir()):
        print(f"[gpu-kit] {path.name}: {path.stat().st_size / (1 << 20):.1f} MiB")
    print(f"[gpu-kit] {mib:.0f} MiB of {KIT_MIB}")
    return int(mib > KIT_MIB)


def main() -> int:
    """0 where all passes, or where an environment cannot be had, which the last line says.

    A kit that cannot be made is a failure.
    """
    python, nvcc = find_python(), buildconfig.find_nvcc()
    if python is None or nvcc is None:
        missing = f"Python {PYTHON} with venv" if python is None else "nvcc"
        print(f"[gpu-machine] SKIPPED: there is no {missing} here")
        return int("--kit" in sys.argv)
    venv, source = HOME / "venv", HOME / "source"
    own = str(venv / "bin" / "python")
    if not Path(own).exists():
        subprocess.run([python, "-m", "venv", str(venv)], check=True)
    pip = [own, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    if subprocess.run([*pip, *requirements()], check=False).returncode != 0:
        print("[gpu-machine] SKIPPED: pip could not install torch 2.11")
        return int("--kit" in sys.argv)
    copy_sources(source)
    env = os.environ | {"RINGCOMM_CUDA": "1", "RINGCOMM_CUDA_ARCHS": ARCHS}
    env["PATH"] = f"{venv / 'bin'}{os.pathsep}{env['PATH']}"
    build = [*pip, "--no-build-isolation", "--no-deps", "-e", "."]
    if sys.argv[1:] == ["--rows"]:
        subprocess.run(build, cwd=source, env=env, check=True)
        return start_rows(own, source, env)
    if sys.argv[1:] == ["--kit"]:
        subprocess.run(build, cwd=source, env=env, check=True)
        return make_kit(own, source, env)
    arguments = sys.argv[1:] or TESTS
    for command in (build, [own, "-m", "pytest", "-q", *arguments]):
        print(f"[gpu-machine] {' '.join(command[1:])}", flush=True)
        status = subprocess.run(command, cwd=source, env=env, check=False).returncode
        if status != 0:
            return status
    return start_rows(own, source, env)


if __name__ == "__main__":
    sys.exit(main())
