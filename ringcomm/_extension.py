"""Loads the compiled extensions when imported; an error says what to do.

ringcomm._C is communication on CPUs, ringcomm._kernels has the other operators. ringcomm._cuda is
only in builds for GPUs. A checkout in which they are not built uses those of the installed package.
A wheel for several versions of torch has a folder of extensions for each (tools/wheels.py).
"""

import os
import re
import sys
import warnings
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parent
MINOR = ".".join(torch.__version__.split(".")[:2])
IS_CHECKOUT = (FOLDER.parent / "setup.py").exists()
# What builds ringcomm for this Python and this torch, and installs it.
INSTALL = f"pip install {FOLDER.parent}" if IS_CHECKOUT else "pip install . (in a checkout)"
# A sentence in the extension (csrc/bindings/module.cc). It is searched for in the file, because an
# extension for another torch may fail to load, or load by chance: the layout of c10d's classes
# changes between minor versions.
BUILT_FOR = re.compile(rb"ringcomm is built for torch (\d+\.\d+)")


def _load() -> None:
    """Imports the extensions; raises ImportError where none fits or one cannot be loaded."""
    folder = _find()
    # First while the extensions are imported, and then last, for what the checkout lacks.
    search_path = sys.modules["ringcomm"].__path__
    search_path.insert(0, str(folder))
    try:
        from ringcomm import _C, _kernels  # noqa: F401

        if find_spec("ringcomm._cuda") is not None:
            from ringcomm import _cuda  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"ringcomm: the extension in {folder} cannot be loaded ({error}). Build it again:"
            f" {INSTALL}"
        ) from None
    finally:
        del search_path[0]
    if str(folder) not in search_path:
        search_path.append(str(folder))
    # Not before: another torch may lack its names.
    from ringcomm.torch_names import NEWEST_TRIED, TORCH_VERSION

    if TORCH_VERSION > NEWEST_TRIED and os.environ.get("RANK", "0") == "0":
        tried = ".".join(map(str, NEWEST_TRIED))
        warnings.warn(
            f"ringcomm is tried with torch up to {tried}, and this is torch {torch.__version__}."
            f" Compare a run's losses with those of one process, or install torch {tried} and"
            f" build ringcomm again: {INSTALL}",
            stacklevel=2,
        )


def _find() -> Path:
    """The folder to load from: of this package, or in a checkout of the installed one."""
    installed = [Path(entry, "ringcomm").resolve() for entry in sys.path] if IS_CHECKOUT else []
    packages = dict.fromkeys(path for path in (FOLDER, *installed) if path.is_dir())
    own = [package / f"torch_{MINOR.replace('.', '_')}" for package in packages]
    folders = [*(folder for folder in own if folder.is_dir()), *packages]
    faults = {folder: _fault_of(folder) for folder in folders}
    if fitting := [folder for folder, fault in faults.items() if not fault]:
        return fitting[0]
    found = "; ".join(f"{folder} {fault}" for folder, fault in faults.items())
    message = (
        f"ringcomm: there is no extension for {sys.implementation.cache_tag} and torch"
        f" {torch.__version__}: {found}. Build it: {INSTALL}"
    )
    if served := _torches(FOLDER, EXTENSION_SUFFIXES[0]):
        message += f". Or install a torch that is served: pip install 'torch=={served[-1]}.*'"
    raise ImportError(message)


def _torches(package: Path, suffix: str) -> list[str]:
    """The versions of torch with a folder of extensions for a Python, such as 2.13."""
    names = [path.parent.name for path in package.glob(f"torch_*/_C{suffix}")]
    versions = sorted({tuple(map(int, name[len("torch_") :].split("_"))) for name in names})
    return [".".join(map(str, version)) for version in versions]


def _fault_of(folder: Path) -> str:
    """Why the extension in a folder cannot be used; empty if it can."""
    names = [f"_C{suffix}" for suffix in EXTENSION_SUFFIXES]
    found = next((folder / name for name in names if (folder / name).exists()), None)
    if found is None:
        others = [path.name for path in sorted(folder.glob("_C*.so"))]
        if others:
            return f"has one for another Python ({', '.join(others)})"
        pythons = sorted({path.name[len("_C") :] for path in folder.glob("torch_*/_C*.so")})
        own = [f"torch {', '.join(_torches(folder, suffix))} ({suffix})" for suffix in pythons]
        return f"has those for {' and '.join(own)}" if own else "has none"
    built_for = BUILT_FOR.search(found.read_bytes())
    if built_for is not None and built_for[1].decode() != MINOR:
        return f"has one built for torch {built_for[1].decode()}"
    package = folder.parent if folder.name.startswith("torch_") else folder
    version, own_version = (path / "version.py" for path in (package, FOLDER))
    if package != FOLDER and version.read_bytes() != own_version.read_bytes():
        return "has one of another version of ringcomm"
    return ""


_load()
# Whether this build has what GPUs need.
HAS_CUDA = "ringcomm._cuda" in sys.modules
