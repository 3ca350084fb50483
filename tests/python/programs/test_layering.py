"""Includes and imports go one way only: the layers of csrc, and what is public in Python."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CSRC = ROOT / "csrc"
# A file in csrc/X may include X and what stands left of it, and all of kernels.
LAYERS = ("core", "host", "collectives", "transport", "communicator", "bindings", "cuda")
# What kernels may include of csrc (docs/design/architecture.md says why).
SHARED_WITH_KERNELS = {"core/annotations.h", "cuda/driver/driver.h"}
# A transport's folder in csrc/transport, and whose it may include besides.
TRANSPORTS = {"shm": {"shm"}, "messages": {"messages", "shm"}}
KNOW_TORCH = re.compile(
    r"csrc/(cuda/)?bindings/|kernels/(\w+/)?(torch_\w+\.(h|cc)"
    r"|cuda_cross_entropy\.(h|cc)|cuda_device\.h)$"
)
OF_TORCH = re.compile(r"(torch|ATen|c10|caffe2|pybind11)/|(Python|structmember)\.h$")
# What core may take from outside: C++'s standard library, and the compiler's own headers.
OF_CORE = re.compile(r"[a-z_0-9]+$|[eix]mmintrin\.h$|arm_(neon|acle)\.h$")
INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)


def includes() -> Iterator[tuple[str, str, str]]:
    """Of csrc and kernels: a file, and what it includes in quotes, or in angle brackets."""
    for path in sorted(path for top in ("csrc", "kernels") for path in (ROOT / top).rglob("*")):
        if path.suffix in {".h", ".cuh", ".cc", ".cu"}:
            for names in INCLUDE.findall(path.read_text(encoding="utf-8")):
                yield path.relative_to(ROOT).as_posix(), *names


def fault_of(path: str, quoted: str, angled: str) -> str:
    """What is wrong with an include, or nothing."""
    top, layer, *folders = path.split("/")
    if angled:
        if OF_TORCH.match(angled) and not KNOW_TORCH.match(path):
            return "only bindings know torch"
        is_foreign = layer == "core" and not OF_CORE.match(angled)
        return "core needs the standard library alone" if is_foreign else ""
    is_kernel = quoted.startswith("kernels/")
    if not ((ROOT if is_kernel else CSRC) / quoted).is_file():
        return "is not a path from csrc/, or of kernels/"
    if is_kernel or top == "kernels":
        return "" if is_kernel or quoted in SHARED_WITH_KERNELS else "is of csrc"
    theirs, folder, *_ = quoted.split("/")
    if LAYERS.index(theirs) > LAYERS.index(layer):
        return f"is above csrc/{layer}"
    # The interfaces beside the folders of transports know none of them.
    allowed = TRANSPORTS.get(folders[0], set()) if layer == "transport" else TRANSPORTS
    is_foreign = theirs == "transport" and folder in TRANSPORTS and folder not in allowed
    return "is of another transport" if is_foreign else ""


def test_includes_point_left_and_make_no_circle() -> None:
    found = [*includes()]
    wrong = [f"{path}: {a or b} {text}" for path, a, b in found if (text := fault_of(path, a, b))]
    assert not wrong, "\n".join(wrong)
    graph: dict[str, set[str]] = {}
    for path, quoted, _ in found:
        graph.setdefault(path.removeprefix("csrc/"), set()).add(quoted)
    assert len(graph) > 100
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize(
    ("path", "quoted", "angled"),
    [
        ("csrc/core/a.h", "host/shared_memory.h", ""),
        ("csrc/core/a.h", "", "sys/mman.h"),
        ("csrc/transport/shm/a.cc", "transport/messages/exchange.h", ""),
        ("csrc/transport/a.h", "transport/shm/context.h", ""),
        ("csrc/communicator/a.cc", "", "torch/extension.h"),
        ("kernels/a.h", "core/board_protocol.h", ""),
    ],
)
def test_a_wrong_include_is_found(path: str, quoted: str, angled: str) -> None:
    assert not quoted or (CSRC / quoted).is_file()
    assert fault_of(path, quoted, angled)


@cache
def imports_in(path: Path) -> list[tuple[str, list[str]]]:
    """(module, names taken from it) of every absolute import of a file, wherever it is."""
    found: list[tuple[str, list[str]]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            found += [(alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.append((node.module or "", [alias.name for alias in node.names]))
    return found


def imports_of(*folders: str) -> Iterator[tuple[Path, str, list[str]]]:
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        yield from ((path, *taken) for taken in imports_in(path))


@pytest.mark.parametrize(
    ("folders", "root"), [(("ringcomm", "_ringcomm"), "."), (("benchmarks",), "benchmarks")]
)
def test_python_imports_make_no_circle(folders: tuple[str, ...], root: str) -> None:
    """Imports inside functions count too: they would hide a circle. Lint forbids relative ones."""
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    names = {
        path: ".".join(path.relative_to(ROOT / root).with_suffix("").parts).removesuffix(
            ".__init__"
        )
        for path in paths
    }
    modules, compiled = set(names.values()), {"ringcomm._C", "ringcomm._cuda", "ringcomm._kernels"}
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for path, module, taken in imports_of(*folders):
        # What is not a module of its own comes from the package that is named.
        inner = {f"{module}.{name}" for name in taken}
        found = inner & modules
        if len(found) < len(inner - compiled) or not inner:
            found.add(module)
        graph[names[path]] |= found & modules
    assert any(graph.values())
    TopologicalSorter(graph).prepare()


# What a module may import of these parts of the package: those left of it.
PARTS_IN_ORDER = ("screen", "trace", "backend", "measure", "planner", "show", "cli")
OUTSIDE = {"examples", "tests", "benchmarks", "tools", "kernels"}


def test_python_imports_point_left() -> None:
    """`kernels` is another distribution's name: ours is ringcomm.kernels."""
    wrong = []
    for path, module, names in imports_of("ringcomm", "kernels", "examples", "benchmarks"):
        top, *parts = path.relative_to(ROOT).with_suffix("").parts
        for name in (module, *(f"{module}.{name}" for name in names)):
            first, *theirs = name.split(".")
            is_ours = first == "ringcomm" and bool(theirs)
            if top in OUTSIDE - {"kernels"}:
                is_wrong = is_ours and any(part.startswith("_") for part in theirs)
            elif parts[0] in PARTS_IN_ORDER and is_ours and theirs[0] in PARTS_IN_ORDER:
                is_wrong = PARTS_IN_ORDER.index(theirs[0]) > PARTS_IN_ORDER.index(parts[0])
            else:
                is_wrong = parts[0] == "parallel" and is_ours and theirs[0] == "optim"
            if is_wrong or (top in ("ringcomm", "kernels") and first in OUTSIDE):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_no_chain_of_classes_has_more_than_two() -> None:
    """Not counting bases of other libraries. Classes of one name count as one."""
    bases: dict[str, list[str]] = {}
    for path in sorted((ROOT / "ringcomm").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            if isinstance(node, ast.ClassDef):
                named = [base for base in node.bases if isinstance(base, ast.Name | ast.Attribute)]
                names = [ast.unparse(base).rpartition(".")[2] for base in named]
                bases.setdefault(node.name, []).extend({*names} - {node.name})

    def depth(name: str) -> int:
        return 1 + max(map(depth, bases[name]), default=0) if name in bases else 0

    assert len(bases) > 100
    assert depth("Zero3") == 2
    assert {name for name in bases if depth(name) > 2} == set()
