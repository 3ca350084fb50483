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
KERNELS = ROOT / "kernels"

# A file in csrc/X may include X and what stands left of it, and all of kernels.
LAYERS = (
    "core",
    "reduce",
    "host",
    "collectives",
    "transport",
    "communicator",
    "bindings",
    "cuda",
)
# What kernels may include of csrc (docs/design/architecture.md says why).
SHARED_WITH_KERNELS = {"core/annotations.h", "cuda/driver/driver.h"}
# A transport's folder in csrc/transport, and whose it may include besides. The interfaces beside
# the folders know none.
TRANSPORTS = {"shm": {"shm"}, "messages": {"messages", "shm"}}
KNOW_TORCH = re.compile(
    r"csrc/(cuda/)?bindings/|csrc/cuda/messages/|kernels/(\w+/)?(torch_\w+\.(h|cc)"
    r"|cuda_cross_entropy\.(h|cc)|cuda_device\.h)$"
)
TORCH_FOLDERS = {"torch", "ATen", "c10", "caffe2", "pybind11"}
PYTHON_HEADERS = {"Python.h", "structmember.h"}
# What core may take from outside C++'s standard library: the compiler's own, no library behind it.
INTRINSICS = {"immintrin.h", "emmintrin.h", "xmmintrin.h", "arm_neon.h", "arm_acle.h"}

INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)
CPP_FILES = sorted(
    path
    for folder in (CSRC, KERNELS)
    for path in folder.rglob("*")
    if path.suffix in {".h", ".cuh", ".cc", ".cu"}
)


@cache
def includes_of(path: Path) -> tuple[list[str], list[str]]:
    """The names that a file includes in quotes, and those in angle brackets."""
    pairs = INCLUDE.findall(path.read_text(encoding="utf-8"))
    return [quoted for quoted, _ in pairs if quoted], [angled for _, angled in pairs if angled]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_name(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


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


def test_the_design_pages_name_files_that_exist() -> None:
    """Files with a folder, from the root, csrc, csrc/cuda, ringcomm, tests or tests/python."""
    roots = ("", "csrc", "csrc/cuda", "ringcomm", "ringcomm/parallel", "tests", "tests/python")
    full = re.compile(r"(?<![\w/.@-])(?:[\w*-]+/)+[\w*-]+\.(?:cc|cu|cuh|h|py|svg|txt)\b")
    # Of a header and its source.
    stem = re.compile(rf"`((?:{'|'.join((*LAYERS, 'kernels'))})/[\w/]*\w)`")
    num_names, missing = 0, []
    for page in sorted((ROOT / "docs" / "design").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        names = {*full.findall(text), *(f"{name}*" for name in stem.findall(text))}
        num_names += len(names)
        for name in sorted(names):
            if not any(any(ROOT.glob(f"{root}/{name}".lstrip("/"))) for root in roots):
                missing.append(f"{page.name}: {name}")
    assert num_names > 100
    assert not missing, "\n".join(missing)


def include_of(name: str) -> Path | None:
    """The file that an include in quotes means: from csrc/, or a path in kernels/."""
    path = (ROOT if name.startswith("kernels/") else CSRC) / name
    return path if path.is_file() else None


def test_includes_point_left() -> None:
    wrong = []
    for path in CPP_FILES:
        if path.is_relative_to(KERNELS):
            continue
        layer = path.relative_to(CSRC).parts[0]
        allowed = LAYERS[: LAYERS.index(layer) + 1]
        folders = (*path.relative_to(CSRC).parts, "")
        is_transport = folders[0] == "transport"
        own = TRANSPORTS.get(folders[1], set()) if is_transport else TRANSPORTS.keys()
        for name in includes_of(path)[0]:
            layers = name.split("/")
            is_foreign = layers[0] == "transport" and layers[1] in TRANSPORTS.keys() - own
            if is_foreign:
                wrong.append(f'{name_of(path)}: "{name}" is of another transport')
            if layers[0] not in (*allowed, "kernels"):
                wrong.append(f'{name_of(path)}: "{name}" is above csrc/{layer}')
    assert not wrong, "\n".join(wrong)


def test_kernels_include_nothing_of_csrc() -> None:
    """What calculates knows nothing of what communicates."""
    taken = {
        name: path
        for path in CPP_FILES
        if path.is_relative_to(KERNELS)
        for name in includes_of(path)[0]
        if not name.startswith("kernels/")
    }
    assert taken.keys() == SHARED_WITH_KERNELS, taken


def test_includes_are_ours_or_known() -> None:
    wrong = []
    for path in CPP_FILES:
        quoted, angled = includes_of(path)
        for name in quoted:
            if include_of(name) is None:
                wrong.append(f'{name_of(path)}: "{name}" is not a path from csrc/, or of kernels/')
        for name in angled:
            is_torch = name.split("/")[0] in TORCH_FOLDERS or name in PYTHON_HEADERS
            is_standard = re.fullmatch(r"[a-z_0-9]+", name) or name in INTRINSICS
            if include_of(name) is not None:
                wrong.append(f"{name_of(path)}: <{name}> is ours: in quotes")
            if is_torch and not KNOW_TORCH.match(name_of(path)):
                wrong.append(f"{name_of(path)}: <{name}>: only {KNOW_TORCH.pattern} know torch")
            if path.parent == CSRC / "core" and not is_standard:
                wrong.append(f"{name_of(path)}: <{name}>: core needs the standard library alone")
    assert not wrong, "\n".join(wrong)


def test_includes_make_no_circle() -> None:
    roots = {path: ROOT if path.is_relative_to(KERNELS) else CSRC for path in CPP_FILES}
    graph = {p.relative_to(root).as_posix(): includes_of(p)[0] for p, root in roots.items()}
    order = [*TopologicalSorter(graph).static_order()]  # raises CycleError, which names the circle
    assert {*order} >= graph.keys()


def test_examples_use_the_public_interface() -> None:
    wrong = [
        f"{name_of(path)} imports {module} {names}"
        for path, module, names in imports_of("examples", "benchmarks")
        if module.split(".")[0] == "ringcomm"
        and any(part.startswith("_") for part in (*module.split("."), *names))
    ]
    assert not wrong, "\n".join(wrong)


def test_package_imports_none_of_its_users() -> None:
    """Another distribution owns the name `kernels`: ours is ringcomm.kernels."""
    outside = {"examples", "tests", "benchmarks", "tools", "kernels"}
    ours = imports_of("ringcomm", "kernels")
    wrong = [(p, m) for p, m, _ in ours if m.split(".")[0] in outside]
    folders = ("examples", "benchmarks", "tests/python")
    users = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    by_name = re.compile(r"^\s*(?:import|from) (kernels\b[\w.]*)", re.MULTILINE)
    wrong += [(p, m) for p in users for m in by_name.findall(p.read_text(encoding="utf-8"))]
    assert not wrong, "\n".join(f"{name_of(path)} imports {module}" for path, module in wrong)


def test_parallel_does_not_import_optim() -> None:
    wrong = [
        f"{name_of(path)} imports {module} {names}"
        for path, module, names in imports_of("ringcomm/parallel")
        if module.startswith("ringcomm.optim") or (module == "ringcomm" and "optim" in names)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("folders", "root"), [(("ringcomm", "_ringcomm"), "."), (("benchmarks",), "benchmarks")]
)
def test_python_imports_make_no_circle(folders: tuple[str, ...], root: str) -> None:
    """Imports inside functions count too: they would hide a circle. Lint forbids relative ones."""
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    names = {path: module_name(path, ROOT / root) for path in paths}
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
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_threads_have_the_names_of_the_architecture_page() -> None:
    """In C++ at most 15 characters: with more the system gives a thread no name."""
    page = (ROOT / "docs" / "design" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| (ringcomm-\w+) \|", page, re.MULTILINE))
    in_cpp, in_python = (
        {w for file in files for w in re.findall(r'"(ringcomm-\w+)"', file.read_text("utf-8"))}
        for files in (CPP_FILES, (ROOT / "ringcomm").rglob("*.py"))
    )
    start = r'start_background_thread\(\s*"(ringcomm-\w+)"'
    started = {w for file in CPP_FILES for w in re.findall(start, file.read_text("utf-8"))}
    assert started == named & in_cpp
    assert len(started) == 6
    assert named - in_cpp - in_python == set()
    assert {name for name in named & in_cpp if len(name) > 15} == set()


# What a module may import of these parts of the package: those left of it.
PARTS_IN_ORDER = ("screen", "trace", "backend", "measure", "planner", "show", "cli")


def test_measurements_stand_on_the_backend_and_not_beside_it() -> None:
    """backend -> trace -> measure -> backend was a circle of folders that no single file shows."""
    place = {part: i for i, part in enumerate(PARTS_IN_ORDER)}
    wrong = []
    for path, module, names in imports_of("ringcomm"):
        part = path.relative_to(ROOT / "ringcomm").with_suffix("").parts[0]
        for name in (module, *(f"{module}.{name}" for name in names)):
            taken = (*name.split("."), "")[1] if name.startswith("ringcomm.") else ""
            if part in place and place.get(taken, 0) > place[part]:
                wrong.append(f"{name_of(path)} imports {name}")
    assert not wrong, "\n".join(wrong)


# How one reads an all_reduce, from c10d's call to the bytes: in each file what is called there, and
# the next one that it calls.
WALK = (
    ("bindings/start_call.cc", "ProcessGroupRingcomm::allreduce(", "run_at_once("),
    ("collectives/call.h", "struct Collective : CallHeader", "is_uneven = "),
    ("bindings/start_call.cc", "ProcessGroupRingcomm::run_at_once(", "communicator()->run("),
    ("communicator/communicator.cc", "Communicator::run(Collective&& call", "queue_.run("),
    ("communicator/ordered_queue.cc", "void OrderedQueue::run(", "try_run(1, task)"),
    ("communicator/communicator.cc", "void Communicator::execute(", "transport_->run("),
    ("transport/shm/context.cc", "Traffic ShmTransport::run(", "entry.run("),
    ("transport/shm/all_reduce.cc", "all_reduce_one_shot(ShmContext&", "context.stage("),
    ("transport/shm/context.h", "void for_each_piece(", "publish()"),
    ("transport/shm/context.cc", "bool ShmContext::publish()", "board_.publish()"),
    ("core/board_protocol.h", "void publish()", "advance("),
    ("core/wait_policy.h", "WaitStatus wait_in_one_thread(", "arch.load_acquire("),
    ("reduce/reduce_kernels.h", "void combine(", "store_bytes("),
)


def test_an_all_reduce_is_read_in_ten_files() -> None:
    paths = {}
    for name, here, following in WALK:
        text = (CSRC / name).read_text(encoding="utf-8")
        assert here in text, f"{name}: {here}"
        assert following in text, f"{name}: {following}"
        paths[name] = len(text.splitlines())
    assert len(paths) <= 10
    assert sum(paths.values()) <= 2_400, paths
    page = (ROOT / "docs" / "design" / "architecture.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `csrc/(\S+\.\w+)` \|", page, re.MULTILINE) == [*paths]
