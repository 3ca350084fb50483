"""The build backend: setuptools, compiled against the torch of the environment installed into.

pip builds in an isolated environment, which hides the packages of the one that it installs into,
but runs the same interpreter. The backend asks that interpreter for its own search path and appends
it. Where it finds no torch, as in the environments of other front ends, the build requires one.
RINGCOMM_WHEELS, a folder or URL, has wheels that are taken if they fit: nothing is compiled then.
pip looks for them, as for those of its --find-links. A URL may be that of a release on GitHub.
Standard library and setuptools only.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from setuptools import build_meta

sys.path.insert(0, str(Path(__file__).resolve().parent))

import buildconfig

# What pip sets to isolate a build.
ISOLATION = ("PYTHONPATH", "PYTHONNOUSERSITE")
# Without encryption wheels are taken from this machine only.
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
WHEEL_NAME = re.compile(r"ringcomm-[\w.+%]+(?:-[\w.]+){3}\.whl")
# What a wheel that pip built names its torch by.
OWN_TORCH = re.compile(r"\+torch(\d+\.\d+)-")
# A release's page of GitHub loads its links by a script, which pip does not run; another has them.
RELEASE = re.compile(r"(https://github\.com/[^/]+/[^/]+/releases)/tag/([^/]+)/?")
# What pip says of a page or folder that it could not read.
UNREAD = re.compile("Could not fetch URL|is ignored")
# What a wheel of tools/wheels.py has for each torch.
TORCH_FOLDER = re.compile(r"ringcomm/torch_(\d+_\d+)/")


def _run_outside(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in the environment that is installed into."""
    env = {name: value for name, value in os.environ.items() if name not in ISOLATION}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def see_torch() -> bool:
    """Makes the installed torch importable if it is not; returns whether one is."""
    if importlib.util.find_spec("torch") is None:
        said = _run_outside("-c", "import json, sys; print(json.dumps(sys.path[1:]))").stdout
        # Last: what the build itself requires comes from the isolated environment.
        sys.path += [path for path in json.loads(said) if path not in sys.path]
        importlib.invalidate_caches()
    return importlib.util.find_spec("torch") is not None


class NoWheel(Exception):
    """RINGCOMM_WHEELS is not set or has no wheel that fits; the text says why, if it is set."""


def _download(source: str, folder: str) -> Path:
    """Has pip put the wheel for this version of ringcomm and this Python into a folder.

    Raises:
        NoWheel: the source has none.
        SystemExit: the source is unsafe, or what it has is damaged or cannot be fetched.
    """
    url = urlsplit(source)
    page = RELEASE.sub(r"\1/expanded_assets/\2", source)
    if url.scheme == "http" and url.hostname not in LOCAL_HOSTS:
        sys.exit(
            f"RINGCOMM_WHEELS={source} is not safe to install from: use an https URL or a folder"
        )
    wanted = f"ringcomm=={buildconfig.public_version()}"
    # Twice verbose: pip names the wheels that it saw and left.
    pip = ("-m", "pip", "-vv", "--disable-pip-version-check", "--retries", "1", "download")
    options = ("--no-deps", "--no-index", "--only-binary=:all:", "--find-links", page)
    done = _run_outside(*pip, *options, "-d", folder, wanted)
    if done.returncode == 0:
        (wheel,) = Path(folder).glob("*.whl")
        return wheel
    log = done.stdout + done.stderr
    if "No module named pip" in log:  # of other front ends
        raise NoWheel(f"RINGCOMM_WHEELS={source} needs pip, which {sys.executable} does not have")
    if "No matching distribution" not in log:
        reasons = [line for line in log.splitlines() if line.startswith("ERROR:")]
        reason = reasons[-1] if reasons else log[-300:].strip()
        sys.exit(f"RINGCOMM_WHEELS={source}: pip cannot take a wheel from there: {reason}")
    unread = [line for line in log.splitlines() if page in line and UNREAD.search(line)]
    has = ", ".join(sorted(set(WHEEL_NAME.findall(log)))) or "no wheel of ringcomm"
    raise NoWheel(
        f"RINGCOMM_WHEELS={source} has no wheel of ringcomm {buildconfig.public_version()} for"
        f" {sys.implementation.cache_tag}: {unread[0] if unread else f'it has {has}'}"
    )


def take_wheel(folder: str) -> str:
    """Puts a wheel of RINGCOMM_WHEELS into a folder; returns its name.

    It fits if it has this version of ringcomm and serves this Python and the installed torch.

    Raises:
        NoWheel: there is none that fits.
        SystemExit: there is one, but it is damaged; or see _download.
    """
    source = os.environ.get("RINGCOMM_WHEELS")
    if not source:
        raise NoWheel
    with tempfile.TemporaryDirectory() as name:
        wheel = _download(source, name)
        try:
            with zipfile.ZipFile(wheel) as archive:
                files = archive.namelist()
                damaged = archive.testzip()
        except (zipfile.BadZipFile, zlib.error) as error:
            damaged = str(error)
        if damaged:
            sys.exit(
                f"RINGCOMM_WHEELS={source}: {wheel.name} is damaged ({damaged}): copy it again"
            )
        found = [TORCH_FOLDER.match(file) for file in files]
        torches = {match[1].replace("_", ".") for match in found if match}
        torches.update(OWN_TORCH.findall(wheel.name))
        if see_torch():
            torch = importlib.metadata.version("torch")
            minor = ".".join(map(str, buildconfig.parse_version(torch)))
            if minor not in torches:
                raise NoWheel(
                    f"{wheel.name} of RINGCOMM_WHEELS={source} is for torch"
                    f" {', '.join(sorted(torches)) or 'unknown'}, and this is torch {torch}"
                )
        shutil.copy(wheel, folder)
        return wheel.name


def _say_compiling(reason: NoWheel) -> None:
    """One line, if RINGCOMM_WHEELS was set in vain."""
    if reason.args:
        print(f"{reason}: compiling, {buildconfig.time_to_compile()}", file=sys.stderr, flush=True)


def _required(requirements: list[str]) -> list[str]:
    """The requirements of a build, with torch where none is installed."""
    return requirements if see_torch() else [*requirements, buildconfig.TORCH]


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """See PEP 517."""
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(NoWheel):
        take_wheel(folder)
        return []
    return _required(build_meta.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    """See PEP 660."""
    return _required(build_meta.get_requires_for_build_editable(config_settings))


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Any = None) -> str:
    """See PEP 517."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            with zipfile.ZipFile(Path(folder, take_wheel(folder))) as archive:
                files = [file for file in archive.namelist() if ".dist-info/" in file]
                archive.extractall(metadata_directory, files)
            return files[0].partition("/")[0]
    except NoWheel as reason:
        _say_compiling(reason)
    see_torch()
    return build_meta.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def build_wheel(
    wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    """See PEP 517."""
    try:
        return take_wheel(wheel_directory)
    except NoWheel as reason:
        if metadata_directory is None:  # the hook of the metadata has said it
            _say_compiling(reason)
    see_torch()
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def _seeing_torch(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook of setuptools that runs where torch can be imported."""

    def run(*args: Any, **kwargs: Any) -> Any:
        see_torch()
        return hook(*args, **kwargs)

    return run


prepare_metadata_for_build_editable = _seeing_torch(build_meta.prepare_metadata_for_build_editable)
build_editable = _seeing_torch(build_meta.build_editable)
get_requires_for_build_sdist = build_meta.get_requires_for_build_sdist
build_sdist = build_meta.build_sdist
