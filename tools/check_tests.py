#!/usr/bin/env python3
"""Checks that each Python test asserts something, and in each branch that ends it early.

    python tools/check_tests.py

`make lint` runs it. Standard library only.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests" / "python"
# Whose assertions are of ranks and processes, not of what a test asks.
MACHINERY = ("ranks", "rank_server")
# What raises if something is wrong, besides assert_...().
ASSERT = ("AssertionError", "check_call", "check_output", "fail", "opcheck", "raises", "warns")


class Module:
    """What a file of tests defines, and what it takes from others: by its name there."""

    def __init__(self, text: str) -> None:
        self.nodes = [*ast.walk(ast.parse(text))]
        self.defined: dict[str, list[ast.AST]] = {}  # also methods, and tables
        self.taken: dict[str, tuple[str, str]] = {}
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                self.defined.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Name) and target.id.isupper():
                        self.defined.setdefault(target.id, []).append(node.value)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                for each in node.names:
                    source = getattr(node, "module", None) or each.name
                    self.taken[each.asname or each.name] = (source, each.name)


class Reader:
    """Finds tests that pass whatever happens, in modules by name."""

    def __init__(self, modules: dict[str, str]) -> None:
        self.modules = {name: Module(text) for name, text in modules.items()}
        self._found: dict[ast.AST, bool] = {}

    def problems_of(self, name: str) -> Iterator[str]:
        """A line for each problem of a module."""
        module = self.modules[name]
        for node in module.nodes:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                if not self._asserts(module, node, is_test=True):
                    yield f"{node.lineno}: {node.name} asserts nothing"
                for branch in _early_ends(node):
                    if not any(self._asserts(module, each, is_test=True) for each in branch):
                        yield f"{branch[-1].lineno}: {node.name} ends early: skip, or make no case"
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "all":
                given = node.args[0]
                if isinstance(given, ast.Call) and len(given.args) > 2 and name != "oracle":
                    yield f"{node.lineno}: map() ends with the shorter of two: all_equal()"

    def _asserts(self, module: Module, node: ast.AST, *, is_test: bool = False) -> bool:
        """Whether a part of a test, or something that it names, asserts."""
        if node not in self._found:
            self._found[node] = False  # for circles
            nodes = [*ast.walk(node)]
            self._found[node] = any(_is_assertion(each, is_test) for each in nodes) or any(
                self._asserts(*found) for each in nodes for found in self._named(module, each)
            )
        return self._found[node]

    def _named(self, module: Module, node: ast.AST) -> Iterator[tuple[Module, ast.AST]]:
        """What a name or an attribute may stand for, here and in the modules of tests used here."""
        if not isinstance(node, ast.Name | ast.Attribute):
            return
        name = node.id if isinstance(node, ast.Name) else node.attr
        places = [(module, name)]
        for alias, (source, theirs) in module.taken.items():
            if source in self.modules and source not in MACHINERY:
                if isinstance(node, ast.Attribute):
                    places.append((self.modules[source], name))
                elif alias == name:
                    places.append((self.modules[source], theirs))
        for place, known in places:
            yield from ((place, found) for found in place.defined.get(known, []))


def _is_assertion(node: ast.AST, is_test: bool) -> bool:
    if isinstance(node, ast.Assert):  # those of helpers may be for mypy
        words = ast.unparse(node.test)
        return is_test or not (words.startswith("isinstance(") or words.endswith("is not None"))
    if isinstance(node, ast.keyword):  # of subprocess.run()
        return node.arg == "check" and ast.unparse(node.value) == "True"
    name = getattr(node, "id", "") or getattr(node, "attr", "")
    return name in ASSERT or name.startswith("assert_")


def _early_ends(test: ast.FunctionDef) -> Iterator[list[ast.stmt]]:
    """Branches with a return that depend on something other than the rank."""
    waiting: list[ast.AST] = [*test.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "rank" not in ast.unparse(node.test):
            yield from (
                branch
                for branch in (node.body, node.orelse)
                if branch and isinstance(branch[-1], ast.Return)
            )
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def main() -> int:
    """Prints what is wrong; returns the exit status."""
    paths = {path.stem: path for path in sorted(TESTS.rglob("*.py"))}
    reader = Reader({name: path.read_text(encoding="utf-8") for name, path in paths.items()})
    problems = [
        f"{path.relative_to(TESTS.parents[1])}:{problem}"
        for name, path in paths.items()
        for problem in reader.problems_of(name)
    ]
    print("\n".join(problems), end="\n" if problems else "")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
