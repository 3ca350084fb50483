"""Wheels: one for several versions of torch made of one for each, and a trial without a compiler.

A binary fits one minor version of torch. A wheel of `make wheels` has extensions for each version
in a folder of its own, ringcomm/torch_2_13, of which ringcomm/_extension.py loads the fitting one.
"""

from __future__ import annotations

import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from buildconfig import parse_version, public_version

USE_S = 300
# One of two ranks. `import torch` alone makes the backend known: ringcomm is not imported before.
PROGRAM = """
import datetime, os, sys, torch, torch.distributed as dist
assert "ringcomm" not in sys.modules
store = "file://" + os.path.abspath("store")
timeout = datetime.timedelta(seconds=60)
dist.init_process_group(
    "ringcomm", init_method=store, rank=int(sys.argv[1]), world_size=2, timeout=timeout
)
ones = torch.ones(5)
dist.all_reduce(ones)
assert ones.tolist() == [2.0] * 5
dist.destroy_process_group()

import importlib.metadata as metadata, importlib.util as util
import ringcomm, ringcomm.kernels
for module in (ringcomm, ringcomm.kernels):
    assert module.__path__[0].startswith(sys.prefix), module.__path__
assert util.find_spec("kernels") is None, "kernels is importable as a package of its own"
points = metadata.distribution("ringcomm").entry_points
groups = ("torch.backends", "console_scripts", "vllm.general_plugins")
expected = {(group, "ringcomm") for group in groups}
assert {(p.group, p.name) for p in points} == expected, points
"""


def minor_of(version: str) -> str:
    """Returns "2.13" of "2.13.0"."""
    return ".".join(map(str, parse_version(version)))


def merge(parts: dict[str, Path]) -> Path:
    """Gives the first of the unpacked wheels the extensions of all; returns it.

    Args:
        parts: by minor version of torch, in order, the unpacked wheel that was built for it.
    """
    first = next(iter(parts.values()))
    for minor, part in parts.items():
        own = first / "ringcomm" / f"torch_{minor.replace('.', '_')}"
        own.mkdir()
        for extension in (part / "ringcomm").glob("*.so"):
            extension.rename(own / extension.name)
    (info,) = first.glob("*.dist-info")
    text = (info / "METADATA").read_text(encoding="utf-8")
    text = re.sub(r"(?m)^Version: .*$", f"Version: {public_version()}", text, count=1)
    text = re.sub(r"(?m)^Requires-Dist: torch==.*$", requirement(list(parts)), text, count=1)
    (info / "METADATA").write_text(text, encoding="utf-8")
    info.rename(first / f"ringcomm-{public_version()}.dist-info")
    return first


def requirement(minors: list[str]) -> str:
    """The line of METADATA that allows these minor versions of torch, and none between them."""
    versions = [parse_version(minor) for minor in minors]
    (major, low), (_, high) = min(versions), max(versions)
    missing = {(major, minor) for minor in range(low, high)} - {*versions}
    bounds = [f">={major}.{low}", f"<{major}.{high + 1}"]
    bounds += [f"!={major}.{minor}.*" for _, minor in sorted(missing)]
    return f"Requires-Dist: torch{','.join(bounds)}"


def try_wheel(python: str, wheel: Path, beside: list[str], folder: Path) -> None:
    """Installs a wheel into an environment that is made in a folder, and uses it there.

    Its packages are found after those of folders with torch and numpy. A folder named in a .pth
    file does not have its own obeyed: an editable install there is not seen.
    """
    env = folder / "env"
    subprocess.run([python, "-m", "venv", "--without-pip", str(env)], check=True)
    own, command = str(env / "bin" / "python"), str(env / "bin" / "ringcomm")
    # Nothing that compiles is on this PATH.
    nowhere = {"PATH": str(env / "bin"), "CC": "/nonexistent", "CXX": "/nonexistent"}
    variables = {**os.environ, **nowhere}

    def run(*one: str) -> None:
        quiet = subprocess.DEVNULL
        subprocess.run(one, cwd=folder, env=variables, check=True, timeout=USE_S, stdout=quiet)

    pip = ("-m", "pip", "--python", own, "install", "-q", "--no-deps", "--no-index")
    run(python, *pip, str(wheel))
    (site,) = env.glob("lib/python*/site-packages")
    (site / "torch_of_the_caller.pth").write_text("\n".join([*beside, ""]), encoding="utf-8")
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda rank: run(own, "-c", PROGRAM, rank), "01"))
    run(command, "doctor", "--json", "--seconds", "0")
    run(command, "bench", "--world-size", "2", "--seconds", "0")
