"""Draws faults of the Python package with the operators of cosmic-ray, and prints their rows.

    python -m tests.judge.draw [--count 60] [--seed 68] [--first 1]

It needs the group judge of pyproject.toml. A place of the package is drawn, each with the same
chance, then one of the changes that cosmic-ray has for it. Left out: annotations, the texts of
f-strings, what type checkers alone read, and operators of another kind (a product does not become a
shift, which only raises). What is printed goes to the end of faults/python.toml, and stays there.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

from tests.judge.table import ROOT, Fault, drawn_fault, row

_FAMILIES: tuple[set[str], ...] = (
    *({"Add", "Sub"}, {"Mul", "Div", "FloorDiv", "Mod"}),
    *({"RShift", "LShift"}, {"BitOr", "BitAnd", "BitXor"}),
)
_NO_ARGUMENT = ("core/VariableReplacer", "core/VariableInserter")  # these need one
# The quick tests that must notice a fault, by the beginning of the file's path; the longest counts.
_IN_PYTHON = {
    "_ringcomm/": [
        *("programs/test_options.py", "programs/test_cli.py", "programs/test_command.py"),
        *("programs/test_show.py", "planner/test_planner.py", "backend/test_job_doctor.py"),
    ],
    "_ringcomm/autoload.py": ["programs/test_imports.py", "backend"],
    "ringcomm/": ["backend", "programs/test_imports.py", "programs/test_cli.py"],
    "ringcomm/backend.py": ["backend"],
    "ringcomm/cost_model.py": ["programs/test_cost_model.py", "planner"],
    "ringcomm/integrations/": ["mesh", "training/test_zero_calls.py"],
    "ringcomm/measure/": [
        *("backend/test_job_doctor.py", "programs/test_cli.py", "programs/test_tuning.py"),
        *("programs/test_benchmarks.py", "programs/test_command.py", "programs/test_options.py"),
    ],
    "ringcomm/message_backend.py": ["backend"],
    "ringcomm/nn.py": ["ops"],
    "ringcomm/ops/": ["ops"],
    "ringcomm/optim/": ["optim"],
    "ringcomm/parallel/": ["mesh", "training"],
    "ringcomm/parallel/activations/": ["activations"],
    "ringcomm/parallel/expert/": ["expert"],
    "ringcomm/parallel/model/": ["mesh", "pipeline"],
    "ringcomm/parallel/offload/": ["offload", "training"],
    "ringcomm/parallel/optimizer_": ["training", "mesh/test_optimizer_kinds.py", "planner"],
    "ringcomm/parallel/parameter_server/": ["parameter_server"],
    "ringcomm/parallel/pipeline/": ["pipeline"],
    "ringcomm/parallel/state/": ["mesh"],
    "ringcomm/parallel/tensor/": ["tensor", "mesh"],
    "ringcomm/parallel/zero/": ["training", "expert"],
    "ringcomm/planner/": ["planner"],
    "ringcomm/show/": ["programs/test_show.py"],
    "ringcomm/survivors": ["backend/test_shrink.py", "backend"],
    "ringcomm/testing/": ["programs/test_testing.py"],
    "ringcomm/trace/": [
        *("programs/test_trace.py", "programs/test_trace_program.py", "programs/test_show.py"),
        *("backend/test_flight_dumps.py", "backend/test_job_doctor.py", "programs/test_cli.py"),
    ],
}
_TESTS = {begin: [f"python/{name}" for name in names] for begin, names in _IN_PYTHON.items()}
Span = tuple[tuple[int, int], tuple[int, int]]


def operators() -> Iterator[tuple[str, Any]]:
    """Those that are used, by name."""
    for name in operator_names():
        pair = re.fullmatch(r"core/ReplaceBinaryOperator_(\w+)_(\w+)", name)
        if pair and not any({*pair.groups()} <= family for family in _FAMILIES):
            continue
        if name not in _NO_ARGUMENT:
            yield name, get_operator(name)()


def left_out(text: str) -> list[Span]:
    """What no program reads: annotations, f-strings, blocks for type checkers."""
    spans: list[Span] = []
    for node in ast.walk(ast.parse(text)):
        parts: list[ast.AST | None] = []
        if isinstance(node, (ast.arg, ast.AnnAssign)):
            parts = [node.annotation]
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            parts = [node.returns]
        elif isinstance(node, ast.JoinedStr) or (
            isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        ):
            parts = [node]
        for part in parts:
            if isinstance(part, (ast.expr, ast.stmt)):
                end = (part.end_lineno or 0, part.end_col_offset or 0)
                spans.append(((part.lineno, part.col_offset), end))
    return spans


def places(root: Path) -> dict[tuple[str, Span], list[tuple[str, int]]]:
    """By file and place: the operators that change it, each with its occurrence."""
    found: dict[tuple[str, Span], list[tuple[str, int]]] = {}
    files = sorted([*(root / "ringcomm").rglob("*.py"), *root.glob("_ringcomm_*.py")])
    for path in files:
        text = path.read_text("utf-8")
        nodes = list(ast_nodes(get_ast(text)))
        spans = left_out(text)
        for name, operator in operators():
            positions = [span for node in nodes for span in operator.mutation_positions(node)]
            for occurrence, span in enumerate(positions):
                if not any(begin <= span[0] and span[1] <= end for begin, end in spans):
                    key = (str(path.relative_to(root)), span)
                    found.setdefault(key, []).append((name, occurrence))
    return found


def replacement(text: str, changed: str) -> tuple[str, str]:
    """The lines that differ, with as many lines above as make the old ones unique."""
    old, new = text.splitlines(keepends=True), changed.splitlines(keepends=True)
    blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    differ = [block for block in blocks if block[0] != "equal"]
    first, first_new, last, last_new = differ[0][1], differ[0][3], differ[-1][2], differ[-1][4]
    while text.count("".join(old[first:last])) != 1:
        first, first_new = first - 1, first_new - 1
    return "".join(old[first:last]), "".join(new[first_new:last_new])


def draw(root: Path, count: int, seed: int, first: int) -> Iterator[Fault]:
    """The faults, in the order in which they are drawn."""
    found = places(root)
    drawn = random.Random(seed)
    for number, key in enumerate(drawn.sample(sorted(found), count), first):
        name, occurrence = drawn.choice(found[key])
        text = (root / key[0]).read_text("utf-8")
        changed = mutate_code(text, get_operator(name)(), occurrence)
        try:
            compile(changed, key[0], "exec")
        except SyntaxError:  # the `*` of a signature is no product
            continue
        old, new = replacement(text, changed)
        short = re.sub(r"core/(Replace)?(Binary|Comparison|Unary)?(Operator_)?", "", name)
        id_ = f"drawn-{number:02}-{Path(key[0]).stem.strip('_')}-{short}"
        yield drawn_fault(id_, (root, key[0]), (old, new), _TESTS)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.judge.draw", description=__doc__)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=68)
    parser.add_argument("--first", type=int, default=1, help="the number of the first")
    parser.add_argument("--root", type=Path, default=ROOT)
    options = parser.parse_args()
    for fault in draw(options.root, options.count, options.seed, options.first):
        print(row(fault), end="")


if __name__ == "__main__":
    main()
