"""The kit for a machine with a GPU: what is compiled, so that nothing has to be compiled there.

gpu-kit has the extensions, kernel_sweep, probe, `run`, and where pip has them an NCCL that serves
ranks of one GPU, and wheels of libraries to compare with. A session of noxfile.py builds it.
"""

from __future__ import annotations

import lzma
import re
import shutil
import struct
import subprocess
from collections.abc import Iterable
from pathlib import Path

from buildconfig import ROOT

KIT = ROOT / "gpu-kit"
KIT_MIB = 54
TRANSFER_MIB = 64  # of the kit and the checkout together
# Libraries that rows are compared with, in Python alone.
COMPARED = ("liger-kernel", "quack-kernels", "lomo-optim")


def with_code_of(arch: int, library: Path) -> bytes:
    """A library with zeros in the place of kernels for other architectures, which pack well.

    Containers of its section .nv_fatbin have a magic number, the sizes of their header and of what
    follows; entries in them a kind (2: machine code), those sizes, and the architecture.
    """
    data = bytearray(library.read_bytes())
    command = ["readelf", "-SW", str(library)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"\] (\S+) +\S+ +[0-9a-f]+ ([0-9a-f]+) ([0-9a-f]+) ", said)
    sections = {name: (int(offset, 16), int(size, 16)) for name, offset, size in found}
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
    begin, size = sections.get("__nv_relfatbin", (0, 0))  # for linkers alone
    data[begin : begin + size] = bytes(size)
    return bytes(data)


def fill(
    built: Iterable[Path],
    nccl: Path | None,
    arch: int,
    wheels: Iterable[Path],
    sources: Iterable[Path],
) -> str:
    """Fills gpu-kit with what was built and pip's; says how large it is, and returns a fault."""
    shutil.rmtree(KIT, ignore_errors=True)
    KIT.mkdir()
    for path in built:
        subprocess.run(["strip", "--strip-debug", "-o", KIT / path.name, path], check=True)
        shutil.copymode(path, KIT / path.name)
    if nccl is not None:
        with lzma.open(KIT / "libnccl.so.2.xz", "wb", preset=6) as packed:
            packed.write(with_code_of(arch, nccl))
    for path in (*wheels, ROOT / "tools" / "gpu_kit_run"):
        shutil.copy2(path, KIT / ("run" if path.name == "gpu_kit_run" else path.name))
    return fault_of_size(KIT, sources)


def fault_of_size(kit: Path, sources: Iterable[Path]) -> str:
    """Says how large the kit is; returns what is too large of it, or of it and the sources."""
    mib = {path.name: path.stat().st_size / (1 << 20) for path in sorted(kit.iterdir())}
    print("\n".join(f"[gpu-kit] {name}: {size:.1f} MiB" for name, size in mib.items()))
    kit_mib = sum(mib.values())
    all_mib = kit_mib + sum(path.stat().st_size for path in sources) / (1 << 20)
    size = f"{kit_mib:.1f} MiB of {KIT_MIB}, with the checkout {all_mib:.1f} of {TRANSFER_MIB}"
    print(f"[gpu-kit] {size}", flush=True)
    return f"it is too large: {size}" if kit_mib > KIT_MIB or all_mib > TRANSFER_MIB else ""
