"""Clients: their files, which are read without being imported, and what they need."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import urllib.request
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results"
CACHE = FOLDER.parents[1] / ".cache" / "clients"
ARCHIVE = "https://github.com/{repository}/archive/{commit}.tar.gz"
FETCH_LIMIT_S = 60.0
INSTALL_LIMIT_S = 900.0


class Unavailable(Exception):
    """Why a client cannot run here: its packages or its source are missing."""


@dataclass(frozen=True)
class Client:
    """A program and the constants of its file.

    Attributes:
        what: the first line of the file's docstring.
        requirements: of pip, beside torch and ringcomm, such as "lightning==2.6.6".
        unwanted: of what pip installs with them, packages whose builds need CUDA.
        also_on: another number of ranks, and the tolerance there: sums of more than two numbers
            depend on their order. A client of its own, whose name ends in that number.
        ranks: the number of its processes.
        is_short: whether CI runs it.
        source: a public repository and the commit whose files it runs.
        tolerance: the largest difference of a value, relative to Gloo's, and its reason.
        fails_on_gloo: words of the error with which Gloo does not run it.
        limit_s: seconds after which a run is killed.
    """

    path: Path
    what: str
    requirements: tuple[str, ...]
    ranks: int
    is_short: bool
    source: tuple[str, str] | None = None
    tolerance: tuple[float, str] = (0.0, "")
    fails_on_gloo: str = ""
    limit_s: float = 240.0
    unwanted: tuple[str, ...] = ()

    also_on: tuple[int, float] | None = None
    suffix: str = ""

    @property
    def name(self) -> str:
        return self.path.stem + self.suffix

    def on_more_ranks(self) -> list[Client]:
        """The client of also_on."""
        if self.also_on is None:
            return []
        ranks, limit = self.also_on
        tolerance = (limit, "sums are in another order")
        more = replace(self, ranks=ranks, tolerance=tolerance, suffix=f"_{ranks}", is_short=False)
        return [replace(more, also_on=None)]


def read(path: Path) -> Client | None:
    """The client in a file; None if the file has no REQUIREMENTS."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    found: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name.lower() in Client.__dataclass_fields__:
                found[name.lower()] = ast.literal_eval(node.value)
    if "requirements" not in found:
        return None
    what = (ast.get_docstring(tree) or "").split("\n")[0].rstrip(".")
    return Client(path=path, what=what, **found)


def read_all(folder: Path = FOLDER) -> list[Client]:
    """All clients of a folder, by name."""
    clients = [read(path) for path in sorted(folder.glob("*.py"))]
    return [more for client in clients if client for more in (client, *client.on_more_ranks())]


def said(versions: dict[str, str]) -> str:
    """Versions, in words."""
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def table() -> str:
    """The kept results as a table, for docs/how-to/migrate.md on the site."""
    lines = ["| program | ranks | versions | result | date |", "|---|---|---|---|---|"]
    for client in read_all():
        path = RESULTS / f"{client.name}.json"
        if not path.exists():
            continue
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        result = kept["status"]
        if result == "close":
            limit, reason = client.tolerance
            found = kept["text"].partition(" (")[0]
            result = f"{found}, of {limit:.0e} allowed: {reason}"
        elif result == "only ringcomm":
            result = f"only over ringcomm; Gloo: `{client.fails_on_gloo}`"
        what = f"`{client.name}`: {client.what}"
        cells = (what, str(kept["ranks"]), said(kept["versions"]), result, kept["date"])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def is_installed(client: Client) -> bool:
    """Whether this process has all requirements of a client, in the same versions."""
    try:
        return all(
            metadata.version(line.split("==")[0]) == line.partition("==")[2]
            for line in client.requirements
        )
    except metadata.PackageNotFoundError:
        return False


def environment(client: Client) -> Path:
    """A Python with the client's requirements, made where it is missing.

    The environment is a layer over that of this process: pip installs only what is not there, and
    keeps its torch. Raises Unavailable with the last line of pip.
    """
    if is_installed(client):
        return Path(sys.executable)
    words = "\n".join(
        (*sorted(client.requirements), *client.unwanted, sys.prefix, metadata.version("torch"))
    )
    folder = CACHE / "environments" / hashlib.sha256(words.encode()).hexdigest()[:12]
    python = folder / "bin" / "python"
    if (folder / "complete").exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    (own,) = (folder / "lib").glob("python*/site-packages")
    base = sysconfig.get_path("purelib")
    # addsitedir() also reads the .pth files there: an editable ringcomm has one.
    (own / "layer.pth").write_text(f"import site; site.addsitedir({base!r})\n", encoding="utf-8")
    kept = folder / "constraints.txt"
    kept.write_text(f"torch=={metadata.version('torch')}\n", encoding="utf-8")
    command: list[str | Path] = [python, "-m", "pip", "install", "-q", "-c", kept]
    command += client.requirements
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=INSTALL_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"pip did not end in {INSTALL_LIMIT_S:g} s") from None
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise Unavailable(f"pip: {(said or ['failed'])[-1]}")
    if client.unwanted:
        remove: list[str | Path] = [python, "-m", "pip", "uninstall", "-q", "-y"]
        remove += client.unwanted
        subprocess.run(remove, check=True, capture_output=True)
    (folder / "complete").touch()
    return python


def versions(client: Client, python: Path) -> dict[str, str]:
    """The versions of the client's requirements and of torch in an environment."""
    names = [re.split(r"[\[<>=!~; @]", line)[0] for line in client.requirements]
    code = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]))"
    said = subprocess.check_output([python, "-c", code, *names, "torch"], text=True)
    return dict(zip([*names, "torch"], said.split(), strict=True))


def source(client: Client, given: dict[str, Path]) -> Path | None:
    """The folder of the client's source: a given one, one kept from before, or a fetched one.

    Raises Unavailable if it cannot be fetched.
    """
    if client.source is None:
        return None
    repository, commit = client.source
    name = repository.split("/")[-1]
    if name in given:
        return given[name]
    folder = CACHE / "sources" / f"{name}-{commit}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    url = ARCHIVE.format(repository=repository, commit=commit)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        try:
            archive = Path(scratch) / "archive.tar.gz"
            _fetch(url, archive)
            with tarfile.open(archive) as file:
                file.extractall(scratch, filter="data")
        except (OSError, tarfile.TarError) as error:
            raise Unavailable(
                f"no source: {url}: {error}; --source {name}=FOLDER names a checkout of it"
            ) from None
        (top,) = (path for path in Path(scratch).iterdir() if path.is_dir())
        os.replace(top, folder)
    return folder


def _fetch(url: str, path: Path) -> None:
    """Writes what a URL has to a file; raises OSError, also after FETCH_LIMIT_S."""
    deadline = time.monotonic() + FETCH_LIMIT_S
    with urllib.request.urlopen(url, timeout=FETCH_LIMIT_S) as answer, path.open("wb") as file:
        while block := answer.read(1 << 20):
            file.write(block)
            if time.monotonic() > deadline:
                raise OSError(f"not complete after {FETCH_LIMIT_S:g} s")
