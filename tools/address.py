#!/usr/bin/env python3
"""Writes the project's address into README.md, CITATION.cff and .github; prints it.

    python tools/address.py [--check]

The address is `url` of [tool.ringcomm] in pyproject.toml. While it is empty, no file names one.
With --check nothing is written, and a file that differs is an error.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import buildconfig

BEGIN, END = "<!-- address: begin -->", "<!-- address: end -->"
CONFIG = Path(".github", "ISSUE_TEMPLATE", "config.yml")


def _readme(text: str, url: str) -> str:
    """README with the badge of CI and links below its title, and the address in its BibTeX."""
    ci = f"{url}/actions/workflows/ci.yml"
    links = f"[Releases]({url}/releases) · [Issues]({url}/issues) · `git clone {url}`"
    badge = f"[![ci]({ci}/badge.svg)]({ci}) {links}\n" if url else ""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"README.md needs a line {BEGIN} and after it a line {END}")
    tail = re.sub(r"(?m)^  url = .*\n", "", tail)
    if url:
        tail = re.sub(r"(?m)^(@software\{.*)$", rf"\1\n  url = {{{url}}},", tail)
    return f"{head}{begin}\n{badge}{end}{tail}"


def _citation(text: str, url: str) -> str:
    """CITATION.cff with its `repository-code`."""
    text = re.sub(r"(?m)^repository-code: .*\n", "", text)
    return f'{text}repository-code: "{url}"\n' if url else text


def _config(text: str, url: str) -> str:
    """The settings of issue templates, with a link to the documentation."""
    kept, _, _ = text.partition("contact_links:")
    if not url:
        return kept
    about = "Tutorial, how-to pages, and the limits that are known"
    link = f"  - name: Documentation\n    url: {url}#readme\n    about: {about}\n"
    return f"{kept}contact_links:\n{link}"


FILES = {Path("README.md"): _readme, Path("CITATION.cff"): _citation, CONFIG: _config}


def write(root: Path, *, is_check: bool = False) -> str:
    """Renews the files of a checkout and returns the address.

    Raises SystemExit if a file is incomplete, or with `is_check` if one would change.
    """
    url = buildconfig.address((root / "pyproject.toml").read_text(encoding="utf-8"))
    if url.endswith("/"):
        raise SystemExit(f"url in pyproject.toml must not end in a slash: {url}")
    for name, make in FILES.items():
        old = (root / name).read_text(encoding="utf-8")
        new = make(old, url)
        if new != old and is_check:
            raise SystemExit(f"{name} does not fit url in pyproject.toml: run tools/address.py")
        if new != old:
            (root / name).write_text(new, encoding="utf-8")
    return url


if __name__ == "__main__":
    print(write(buildconfig.ROOT, is_check="--check" in sys.argv[1:]))
