"""Draws faults of the C++ for CPUs by rules on its text, and prints their rows.

    python -m tests.judge.draw_cpp KIND [--count 40] [--seed 68]

KIND is engine (all of csrc that the CPU build compiles, but for the following) or operators
(kernels without what is for GPUs). Each place of each rule has the same chance.
Left out are comments, texts, lines of the preprocessor and static_asserts. What is printed goes to
the end of faults/KIND.toml, and stays there, unless the judge says that it does not compile: then
the next one takes its place (a higher --count).
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Iterator
from pathlib import Path

from tests.judge.table import ROOT, Fault, drawn_fault, row

_FOLDERS = {
    "engine": tuple(
        f"csrc/{folder}"
        for folder in ("bindings", "collectives", "communicator", "core", "host", "transport")
    ),
    "operators": ("kernels",),
}
# The tests that must notice a fault, by the beginning of the file's path; the longest counts.
_RECORDS = ("cpp", "python/backend/test_flight_dumps.py", "python/backend/test_job_doctor.py")
_TESTS: dict[str, tuple[str, ...]] = {
    "csrc/": ("cpp",),
    "csrc/bindings/": (
        "python/backend/test_collectives.py",
        "python/backend/test_works.py",
        "python/backend/test_ops.py",
        "python/backend",
    ),
    "csrc/collectives/long_waits": _RECORDS,
    "csrc/collectives/record": _RECORDS,
    "csrc/collectives/trace": _RECORDS,
    "csrc/host/peer_process": _RECORDS,
    "csrc/host/rank_record": _RECORDS,
    "kernels/": ("cpp", "python/ops"),
    **{
        f"kernels/{folder}torch_": ("python/ops", "python/optim")
        for folder in ("", "losses/", "norms/", "updates/")
    },
}
_FOR_GPUS = re.compile(r"kernels/.*(\.py|\.cu|/(cuda|loss)_\w+\.\w+|/elements\.h)$")
_HIDDEN = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|^[ \t]*#(?:\\\n|[^\n])*'
    r"|\bstatic_assert\b[^;]*;|\btemplate <[^{;]*?>\s*$|\boperator\W+|\)[\w\s]*= 0;",
    re.MULTILINE | re.DOTALL,
)
# Name, place, replacement.
_RULES: tuple[tuple[str, str, str], ...] = (
    ("Lt_Le", r"(?<= )<(?= )", "<="),
    ("Le_Lt", r"(?<= )<=(?= )", "<"),
    ("Gt_Ge", r"(?<= )>(?= )", ">="),
    ("Ge_Gt", r"(?<= )>=(?= )", ">"),
    ("Eq_Ne", r"(?<= )==(?= )", "!="),
    ("Ne_Eq", r"(?<= )!=(?= )", "=="),
    ("Add_Sub", r"(?<= )\+(?= )", "-"),
    ("Sub_Add", r"(?<= )-(?= )", "+"),
    ("Mul_Add", r"(?<=\w )\*(?= \w)", "+"),
    ("And_Or", r"(?<= )&&(?= )", "||"),
    ("Or_And", r"(?<= )\|\|(?= )", "&&"),
    ("Plus", r"(?<= )\+=(?= )", "-="),
    ("Minus", r"(?<= )-=(?= )", "+="),
    ("Increment", r"\+\+(?=\w+;)", "--"),
    ("Number", r"(?<![\w.'])\d+(?![\w.'])", "{number}"),
    ("True_False", r"\btrue\b", "false"),
    ("False_True", r"\bfalse\b", "true"),
    ("Condition", r"(?<=\bif )(?=\((?!const |auto )(?:[^;{}()]|\([^;{}()]*\))*\))", "(!"),
    ("Not", r"(?<=[(& ])!(?=\w)", ""),
    ("Call", r"(?<=[;{})]\n)[ ]+(?!return\b|throw\b|delete\b)[\w.:>-]+\([^;{}\n]*\);(?=\n)", ";"),
    ("Min_Max", r"\bstd::min\b", "std::max"),
    ("Max_Min", r"\bstd::max\b", "std::min"),
    ("Order", r"\b(?:load_acquire|store_release|memory_order_(?:acquire|release))\b", "{order}"),
    ("Return", r"(?<=\breturn )(?!true;|false;|0;|nullptr;|\w+\(\);)\w[^;{}]*(?=;)", "{}"),
)  # fmt: skip


def places(kind: str, root: Path) -> list[tuple[str, str, int, int, str]]:
    """Rule, file, begin and end of the text, and what replaces it."""
    found = []
    for folder in _FOLDERS[kind]:
        for path in sorted((root / folder).rglob("*.*")):
            if _FOR_GPUS.search(str(path.relative_to(root))):
                continue
            text = path.read_text("utf-8")
            shown = _HIDDEN.sub(lambda match: "\0" * len(match[0]), text)
            for name, pattern, new in _RULES:
                for match in re.finditer(pattern, shown):
                    begin, end = match.span()
                    changed = _changed(new, match[0])
                    if name == "Condition":  # the whole of it
                        end = _closing(shown, begin)
                        changed = f"(!{text[begin:end]})"
                    found.append((name, str(path.relative_to(root)), begin, end, changed))
    return found


def _changed(new: str, old: str) -> str:
    if new == "{number}":
        return str(int(old) + 1)
    if new == "{order}":
        return old[: -len(old.rsplit("_", 1)[1])] + "relaxed"
    return new


def _closing(text: str, begin: int) -> int:
    """The end of what begins with a parenthesis."""
    depth = 0
    for idx in range(begin, len(text)):
        depth += (text[idx] == "(") - (text[idx] == ")")
        if depth == 0:
            return idx + 1
    raise AssertionError(text[begin:])


def _lines(text: str, begin: int, end: int, new: str) -> tuple[str, str]:
    """The lines of the place, with as many above and below as make them unique."""
    first = text.rfind("\n", 0, begin) + 1
    last = text.find("\n", end) + 1
    while text.count(text[first:last]) != 1:
        first = text.rfind("\n", 0, first - 1) + 1
        if text.count(text[first:last]) != 1:
            last = text.find("\n", last) + 1
    return text[first:last], text[first:begin] + new + text[end:last]


def draw(kind: str, root: Path, count: int, seed: int) -> Iterator[Fault]:
    """The faults, in the order in which they are drawn."""
    found = places(kind, root)
    drawn = random.Random(seed)
    drawn.shuffle(found)
    for number, (name, file, begin, end, new) in enumerate(found[:count], 1):
        text = (root / file).read_text("utf-8")
        old, changed = _lines(text, begin, end, new)
        id_ = f"{kind}-drawn-{number:02}-{Path(file).stem}-{name}"
        yield drawn_fault(id_, (root, file), (old, changed), _TESTS)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.judge.draw_cpp", description=__doc__)
    parser.add_argument("kind", choices=_FOLDERS)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=68)
    parser.add_argument("--root", type=Path, default=ROOT)
    options = parser.parse_args()
    for fault in draw(options.kind, options.root, options.count, options.seed):
        print(row(fault), end="", flush=True)


if __name__ == "__main__":
    main()
