"""What mkdocs adds to the pages: the project's address, and README's parts on the home page.

In docs/index.md `<!-- README -->` is README's text before its first section, and
`<!-- README: Status -->` the section of that title. So both say the same.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import buildconfig  # noqa: E402

PART = re.compile(r"(?m)^<!-- README(?:: (.+))? -->$")
PICTURE = re.compile(
    r'<picture>\s*<source [^>]*srcset="docs/([^"]+)">\s*<img alt="([^"]*)" src="docs/([^"]+)">\s*'
    r"</picture>"
)


def on_config(config: Any) -> Any:
    """Called by mkdocs: the link to the repository, where the project has an address."""
    config["repo_url"] = buildconfig.address() or None
    return config


def on_page_markdown(markdown: str, page: Any, **unused: Any) -> str:
    """Called by mkdocs with the text of a page."""
    if page.file.src_uri != "index.md":
        return markdown
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return PART.sub(lambda match: part_of(readme, match[1]), markdown)


def part_of(readme: str, title: str | None) -> str:
    """A part of README, as a page of docs/ has it. Raises KeyError for an unknown section."""
    first, *sections = re.split(r"(?m)^## ", readme)
    named = {section.partition("\n")[0]: f"## {section}" for section in sections}
    text = first.partition("\n")[2] if title is None else named[title]
    # The site's own switch between light and dark decides, not the browser's.
    text = PICTURE.sub(r"![\2](\3#only-light)\n![\2](\1#only-dark)", text)
    text = text.replace("<details>", "<details markdown>")
    return text.replace("](docs/", "](")
