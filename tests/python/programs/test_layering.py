"""Includes and imports go one way only: the layers of csrc, and what is public in Python."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CSRC = ROOT / "csrc"

# A file in csrc/X may include X and what stands left of it.
LAYERS = ("core", "device", "transport", "storage", "collectives", "bindings")
# A carrier's folder in csrc/collectives, and whose it may include besides; of the files beside the
# folders only the registry knows what carriers there are.
CARRIERS = {"shm": {"shm"}, "messages": {"messages"}, "hosts": {"hosts", "messages", "shm"}}
REGISTRY = "carrier_registry.cc"
TORCH_FOLDERS = {"torch", "ATen", "c10", "caffe2", "pybind11"}
PYTHON_HEADERS = {"Python.h", "structmember.h"}
# What core may take from outside C++'s standard library: the compiler's own, no library behind it.
INTRINSICS = {"immintrin.h", "emmintrin.h", "xmmintrin.h", "arm_neon.h", "arm_acle.h"}

INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)
CPP_FILES = sorted(p for p in CSRC.rglob("*") if p.suffix in {".h", ".cuh", ".cc", ".cu"})


def includes_of(path: Path) -> tuple[list[str], list[str]]:
    """Returns the names that a file includes in quotes, and those in angle brackets."""
    pairs = INCLUDE.findall(path.read_text(encoding="utf-8"))
    return [quoted for quoted, _ in pairs if quoted], [angled for _, angled in pairs if angled]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imports_of(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yields (module, names taken from it) of every absolute import, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or "", [alias.name for alias in node.names]


@pytest.mark.parametrize("path", CPP_FILES, ids=name_of)
def test_includes_point_left(path: Path) -> None:
    layer = path.relative_to(CSRC).parts[0]
    assert layer in LAYERS, f"csrc/{layer} is not one of the layers {LAYERS}"
    allowed = LAYERS[: LAYERS.index(layer) + 1]
    quoted, angled = includes_of(path)
    for name in quoted:
        assert (CSRC / name).is_file(), f'"{name}" is not a path from csrc/'
        assert name.split("/")[0] in allowed, f'"{name}" stands above csrc/{layer}'
    for name in angled:
        assert not (CSRC / name).is_file(), f"<{name}> is ours: in quotes"
        if layer != "bindings":
            is_torch = name.split("/")[0] in TORCH_FOLDERS or name in PYTHON_HEADERS
            assert not is_torch, f"<{name}>: only csrc/bindings knows torch and Python"
        if layer == "core":
            is_standard = re.fullmatch(r"[a-z_0-9]+", name) or name in INTRINSICS
            assert is_standard, f"<{name}>: csrc/core needs the standard library alone"


def test_carriers_know_no_other() -> None:
    collectives = CSRC / "collectives"
    for path in (p for p in CPP_FILES if p.is_relative_to(collectives) and p.name != REGISTRY):
        allowed = CARRIERS.get(path.relative_to(collectives).parts[0], set())
        for name in includes_of(path)[0]:
            folder = name.removeprefix("collectives/").split("/")[0]
            if name.startswith("collectives/") and folder in CARRIERS:
                assert folder in allowed, f'{name_of(path)}: "{name}"'


@pytest.mark.parametrize("path", [p for p in CPP_FILES if p.suffix in {".h", ".cuh"}], ids=name_of)
def test_headers_are_guarded(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines.count("#pragma once") == 1
    assert not re.search(r"#ifndef\s+\w*_H_*\s*$", lines[0]), "#pragma once is the only guard"


def test_includes_make_no_circle() -> None:
    graph = {path.relative_to(CSRC).as_posix(): includes_of(path)[0] for path in CPP_FILES}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name not in done:
            for other in graph.get(name, []):
                visit(other, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_cpp_tests_know_no_torch() -> None:
    for path in sorted((ROOT / "tests" / "cpp").rglob("*")):
        if path.suffix in {".h", ".cc"} and "third_party" not in path.parts:
            for name in includes_of(path)[1]:
                assert name.split("/")[0] not in TORCH_FOLDERS, f"{name_of(path)}: <{name}>"


def test_examples_use_the_public_interface() -> None:
    for path in python_files("examples", "benchmarks"):
        for module, names in imports_of(path):
            parts = module.split(".")
            if parts[0] == "ringcomm":
                private = [part for part in (*parts, *names) if part.startswith("_")]
                assert not private, f"{name_of(path)} imports {private} of ringcomm"


def test_package_imports_none_of_its_users() -> None:
    outside = {"examples", "tests", "benchmarks", "tools"}
    for path in [*python_files("ringcomm", "kernels"), ROOT / "_ringcomm_autoload.py"]:
        for module, _ in imports_of(path):
            assert module.split(".")[0] not in outside, f"{name_of(path)} imports {module}"


def test_kernels_are_no_package_of_their_own() -> None:
    """Another distribution owns the name `kernels`; ours is ringcomm.kernels."""
    for path in python_files("ringcomm", "kernels", "examples", "benchmarks", "tests/python"):
        for module, _ in imports_of(path):
            assert module.split(".")[0] != "kernels", f"{name_of(path)} imports {module}"
