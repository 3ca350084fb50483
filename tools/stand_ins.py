"""Stand-ins for the CUDA libraries that torch's wheel links, in an environment without them.

torch for CUDA cannot be imported without gigabytes of packages, although nothing of them runs
without a GPU. One small library has the symbols that torch's own libraries ask for, under the name
of each library that is missing. Functions return cudaErrorNoDevice, and those that name an error a
text. It needs a C compiler and readelf.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

NO_DEVICE = 100  # cudaErrorNoDevice
LIBRARY = re.compile(r"\(NEEDED\).*\[(lib(?:cu|nccl|nv)[\w-]*\.so\.\d+)\]")
DRIVER = "libcuda.so.1"  # torch loads it only where it is
DEFINED = re.compile(r"DEFAULT +\d+ +(\w+)")
UNDEFINED = re.compile(r"GLOBAL +DEFAULT +UND +(_*(?:cu|CU|nccl|nv)\w+)")
TEXT = re.compile(r"\w+(Error|Status)(String|Name)|ncclGetLastError")
# The loader takes symbols without a version for those of any, from a library that has the
# versions of what it needs.
CODE = f"""
int puts(const char*);
int (*const of_libc)(const char*) = puts;
static int number(void) {{ return {NO_DEVICE}; }}
static const char* text(void) {{ return "a stand-in without a device"; }}
"""


def make(folder: Path) -> list[str]:
    """Makes the missing libraries in torch's folder of libraries; returns their names.

    Raises:
        OSError, subprocess.CalledProcessError: readelf or the compiler is missing or fails.
    """
    own = [str(path) for path in sorted(folder.glob("lib*.so"))]
    command = ["readelf", "-W", "--dynamic", "--dyn-syms", *own]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    needed = {*LIBRARY.findall(said)} - {DRIVER}
    missing = sorted(name for name in needed if not (folder / name).exists())
    if missing:
        code = [CODE]
        for name in sorted({*UNDEFINED.findall(said)} - {*DEFINED.findall(said)}):
            kind, result = ("text", "const char*") if TEXT.fullmatch(name) else ("number", "int")
            code.append(f'{result} {name}(void) __attribute__((alias("{kind}")));')
        stand_in = folder / missing[0]
        build = ["cc", "-shared", "-fPIC", "-w", "-fno-builtin", "-xc", "-", "-o", str(stand_in)]
        subprocess.run(build, input="\n".join(code), text=True, check=True)
        for name in missing[1:]:
            (folder / name).symlink_to(stand_in.name)
    return missing
