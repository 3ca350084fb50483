"""Stand-ins for the CUDA libraries that torch's wheel links, in an environment without them.

torch for CUDA cannot be imported without gigabytes of packages, although nothing of them runs
without a GPU. Each library that is missing becomes a small one with the symbols that torch's own
libraries ask for; functions return cudaErrorNoDevice, and those that name an error a text. It needs
a C compiler and readelf.

Usage: python tools/stand_ins.py FOLDER     (torch/lib of an environment)
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

NO_DEVICE = 100  # cudaErrorNoDevice
LIBRARY = re.compile(r"lib(cu|nccl|nv)[\w-]*\.so\.\d+")
DRIVER = "libcuda.so.1"  # torch loads it only where it is
TEXT = re.compile(r"\w+(Error|Status)(String|Name)|ncclGetLastError")
SYMBOL = re.compile(r"_*(cu|CU|nccl|nv)\w+")


def _read(path: Path, option: str) -> list[str]:
    command = ["readelf", "-W", option, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def _needed(path: Path) -> Iterator[str]:
    """The CUDA libraries that a library links."""
    for line in _read(path, "--dynamic"):
        found = re.search(r"\(NEEDED\).*\[(.*)\]", line)
        if found and LIBRARY.fullmatch(found[1]) and found[1] != DRIVER:
            yield found[1]


def _versions(path: Path) -> dict[str, str]:
    """By version of symbols the library that has it."""
    found, library = {}, ""
    for line in _read(path, "--version-info"):
        if named := re.search(r"File: (\S+)", line):
            library = named[1]
        elif named := re.search(r"Name: (\S+)", line):
            found[named[1]] = library
    return found


def _symbols(path: Path) -> Iterator[tuple[bool, str, str]]:
    """(whether it is defined there, name, version) of each symbol."""
    for line in _read(path, "--dyn-syms"):
        words = line.split()
        if len(words) > 7 and words[0].endswith(":") and (words[4], words[6]) != ("WEAK", "UND"):
            name, _, version = words[7].partition("@")
            yield words[6] != "UND", name, version.lstrip("@")


def make(folder: Path) -> list[str]:
    """Makes the missing libraries in torch's folder of libraries; returns their names.

    Raises:
        OSError, subprocess.CalledProcessError: readelf or the compiler is missing or fails.
    """
    own = sorted(folder.glob("lib*.so"))
    missing = sorted({name for path in own for name in _needed(path)})
    missing = [name for name in missing if not (folder / name).exists()]
    wanted: dict[str, dict[str, set[str]]] = {name: {} for name in missing}
    defined, without_version = set[str](), set[str]()
    for path in own if missing else ():
        versions = _versions(path)
        for is_here, name, version in _symbols(path):
            if is_here:
                defined.add(name)
            elif (library := versions.get(version, "")) in wanted:
                wanted[library].setdefault(version, set()).add(name)
            elif not version and SYMBOL.fullmatch(name):
                without_version.add(name)
    if missing:  # any library will do for them
        wanted[missing[0]].setdefault("", set()).update(without_version - defined)
    for name in missing:
        _compile(folder / name, wanted[name])
    return missing


def _compile(path: Path, symbols: dict[str, set[str]]) -> None:
    names = sorted(name for some in symbols.values() for name in some)
    code = [
        f"static int number(void) {{ return {NO_DEVICE}; }}",
        'static const char* text(void) { return "a stand-in without a device"; }',
    ]
    for name in names:
        kind, result = ("text", "const char*") if TEXT.fullmatch(name) else ("number", "int")
        code.append(f'{result} {name}(void) __attribute__((alias("{kind}")));')
    script = [
        f"{version} {{ global: {'; '.join(sorted(some))}; }};"
        for version, some in symbols.items()
        if version
    ]
    with tempfile.TemporaryDirectory() as scratch:
        source, versions = Path(scratch, "stand_in.c"), Path(scratch, "versions")
        source.write_text("\n".join(code), encoding="utf-8")
        versions.write_text("\n".join(script), encoding="utf-8")
        command = ["cc", "-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{path.name}"]
        command += [f"-Wl,--version-script,{versions}"] if script else []
        subprocess.run([*command, "-o", str(path), str(source)], check=True)


if __name__ == "__main__":
    print(*make(Path(sys.argv[1])))
