"""What mkdocs adds to the pages of docs/, for which it needs no torch.

- The table of other projects' programs, in docs/how-to/migrate.md at `<!-- clients -->`.
- The page torch-tests.md, of the results that tests/torch keeps.
- The project's address.
- README's parts on the home page, so that both say the same: in docs/index.md `<!-- README -->` is
  README's text before its first section, and `<!-- README: Status -->` the section of that title.
- What `ringcomm plan --collectives` prints, behind a line that is this command.
- The tables of records, in a line that begins with `<!-- table: NAME -->`; the names are those of
  benchmarks/table.py. The rest of the line, for readers of the source, is left out.
- The judge's tables, in docs/design/judge.md at `<!-- judge -->`.
- The tables of features that work together, in docs/reference/pairs.md at `<!-- pairs: TITLE -->`.
- The pages of `ringcomm show`. Links in docs/ lead to their rows of docs/reference/command.md,
  which a code host has, too; on the site they open the pages.
"""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT), str(ROOT / "tests" / "python" / "training")]

import buildconfig  # noqa: E402
import pair_tables  # noqa: E402

from _ringcomm.command import PAGES  # noqa: E402

# The data that takes torch to compute; tools/show_pictures.py writes it.
MEMORY = ROOT / "docs" / "show" / "memory.json"
SHOWN = sorted(PAGES.keys() - {"trace"})  # which is of a user's own file
SHOW_ROW = re.compile(rf'<a id="({"|".join(SHOWN)})"></a>(`\1`)')
SHOW_LINK = re.compile(rf"reference/command\.md#({'|'.join(SHOWN)})\)")
PAIRS = re.compile(r"(?m)^<!-- pairs: (.+) -->$")
TIMES = re.compile(r"(?m)^`ringcomm plan --collectives --tuning (\S+)`$")
TABLE = re.compile(r"(?m)^<!-- table: (\w+) -->.*$")
PART = re.compile(r"(?m)^<!-- README(?:: (.+))? -->$")


def on_config(config: Any) -> Any:
    """Called by mkdocs: the version, and the link to the repository where there is an address."""
    config["copyright"] = f"ringcomm {buildconfig.public_version()}"
    config["repo_url"] = buildconfig.address() or None
    return config


def on_files(files: Any, config: Any) -> Any:
    """Called by mkdocs with the files of docs/, to which this adds the pages of `ringcomm show`."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "torch-tests.md", content=torch_tests()))
    for name in SHOWN:
        files.append(File.generated(config, f"show/{name}.html", content=show_page(name)))
    return files


def torch_tests() -> str:
    """The page of PyTorch's own tests."""
    sys.path.append(str(ROOT / "tests" / "torch"))
    return str(import_module("page").render())


def module_of(name: str) -> ModuleType:
    """A module of ringcomm, without the package's own __init__, which imports torch."""
    if "ringcomm" not in sys.modules:
        package = ModuleType("ringcomm")
        package.__path__ = [str(ROOT / "ringcomm")]
        sys.modules["ringcomm"] = package
    return import_module(f"ringcomm.{name}")


def times_of(command: re.Match[str]) -> str:
    """A command, and the tables that it prints."""
    tuning = module_of("tuning")
    return f"{command[0]}\n\n```text\n{tuning.tables(tuning.load(ROOT / command[1]))}\n```"


@cache
def record_tables() -> dict[str, str]:
    """The tables that benchmarks/table.py makes of benchmarks/results, by name."""
    module_of("screen")  # what it imports of ringcomm needs no torch
    if (folder := str(ROOT / "benchmarks")) not in sys.path:
        sys.path.append(folder)
    table = import_module("table")
    return dict(table.page_tables(table.read_results([])))


def show_page(name: str) -> str:
    """A page of `ringcomm show` as the command writes it without options."""
    show = module_of("show")
    if name == "memory":
        data = json.loads(MEMORY.read_text(encoding="utf-8"))
    else:
        data = getattr(show, name)(*PAGES[name].values())
    return str(show.page_of(name, data))


def on_page_markdown(markdown: str, page: Any, **unused: Any) -> str:
    """Called by mkdocs with the text of a page."""
    markdown = TIMES.sub(times_of, SHOW_LINK.sub(r"show/\1.html)", markdown))
    markdown = TABLE.sub(lambda match: record_tables()[match[1]], markdown)
    if page.file.src_uri == "reference/command.md":
        return SHOW_ROW.sub(r"[\2](../show/\1.html)", markdown)
    if page.file.src_uri == "reference/pairs.md":
        return PAIRS.sub(lambda match: pair_tables.section(match[1]), markdown)
    if page.file.src_uri == "design/judge.md":
        # It has no tomllib in Python 3.10, nor pytest's.
        return markdown.replace("<!-- judge -->", import_module("tests.judge.run").tables())
    if page.file.src_uri == "how-to/migrate.md":
        table = import_module("tests.clients.client_files").table()
        return markdown.replace("<!-- clients -->", table)
    if page.file.src_uri != "index.md":
        return markdown
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return PART.sub(lambda match: part_of(readme, match[1]), markdown)


def part_of(readme: str, title: str | None) -> str:
    """A part of README, as a page of docs/ has it. Raises KeyError for an unknown section."""
    first, *sections = re.split(r"(?m)^## ", readme)
    named = {section.partition("\n")[0]: f"## {section}" for section in sections}
    text = first.partition("\n")[2] if title is None else named[title]
    return text.replace("](docs/", "](")
