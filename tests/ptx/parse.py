"""Parses PTX as far as translate.py needs it: kernels, their parameters and instructions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

WIDTH = {
    **dict.fromkeys(("b8", "u8", "s8"), 8),
    **dict.fromkeys(("b16", "u16", "s16", "f16", "bf16"), 16),
    **dict.fromkeys(("b32", "u32", "s32", "f32", "f16x2", "bf16x2", "s16x2", "u16x2"), 32),
    **dict.fromkeys(("b64", "u64", "s64", "f64", "f32x2"), 64),
    "pred": 1,
    "b128": 128,
}


class UnknownPtx(Exception):
    """Something that the translator does not know."""


class Statement(NamedTuple):
    """Kinds: "{", "}", "label", "directive" and "instruction".

    Lines count from the kernel's .entry, so that a change of one kernel moves none of another.
    """

    kind: str
    text: str
    line: int


class Array(NamedTuple):
    """A variable of a module: .global or .const."""

    name: str
    type: str
    num_elements: int
    values: str


@dataclass
class Kernel:
    """An .entry; params has the offset of each parameter."""

    name: str
    params: dict[str, int]
    param_bytes: int
    statements: list[Statement]


@dataclass
class Module:
    """A PTX file; `dynamic` has the names of .extern .shared arrays."""

    kernels: list[Kernel] = field(default_factory=list)
    arrays: list[Array] = field(default_factory=list)
    dynamic: list[str] = field(default_factory=list)


def split(text: str) -> list[str]:
    """Splits at commas outside of brackets."""
    parts, depth, part = [], 0, ""
    for char in text:
        depth += (char in "{[(") - (char in "}])")
        if char == "," and depth == 0:
            parts.append(part.strip())
            part = ""
        else:
            part += char
    return [*parts, part.strip()] if part.strip() else parts


def parse(text: str) -> Module:
    """Returns the module of a file's text."""
    text = _without_comments(text)
    module = Module()
    head = r"\.(?:align\s+\d+\s+\.)?(\w+)\s+([\w$]+)"
    for found in re.finditer(rf"\.extern\s+\.shared\s+{head}\s*\[\d*\]", text):
        module.dynamic.append(found[2])
    variable = rf"(?m)^\s*(?:\.visible\s+|\.weak\s+)?\.(?:global|const)\s+{head}"
    for found in re.finditer(rf"{variable}(?:\[(\d*)\])?(?:\s*=\s*([^;]*))?;", text):
        values = (found[4] or "").strip().strip("{}")
        module.arrays.append(Array(found[2], found[1], int(found[3] or 1), values))
    if func := re.search(r"(?m)^\s*(?:\.\w+\s+)*\.func\b[^\n]*", text):
        raise UnknownPtx(f"line {_line_at(text, func.start())}: {func[0].strip()}")
    for found in re.finditer(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)[^{]*\{", text):
        end = _end_of_body(text, found.end())
        params, num_bytes = _layout(found[2])
        body = list(_statements(text[found.start() : end], found.end() - found.start()))
        module.kernels.append(Kernel(found[1], params, num_bytes, body))
    return module


def _line_at(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def _without_comments(text: str) -> str:
    """Without comments, debug information and .loc; lines keep their numbers."""

    def blank(found: re.Match[str]) -> str:
        return " " + "\n" * found[0].count("\n")

    text = re.sub(r"//[^\n]*|/\*.*?\*/", blank, text, flags=re.DOTALL)
    text = re.sub(r"(?m)^\s*\.(loc|file)\b[^\n]*$", "", text)
    return re.sub(r"\.section\s+\S+\s*\{[^}]*\}", blank, text)


def _end_of_body(text: str, at: int) -> int:
    depth = 1
    while depth:
        depth += (text[at] == "{") - (text[at] == "}")
        at += 1
    return at - 1


def _layout(params: str) -> tuple[dict[str, int], int]:
    """The offset of each parameter, and the bytes of all."""
    offsets, end = {}, 0
    for param in split(params):
        found = re.search(r"\.(b8|[usbf]\d+)\b.*?([\w$]+)(?:\[(\d+)\])?$", param)
        if found is None:
            raise UnknownPtx(param)
        size = WIDTH[found[1]] // 8
        # The alignment of a pointer parameter (.ptr .align 16) is that of what it points to.
        aligned = None if ".ptr" in param else re.search(r"\.align\s+(\d+)", param)
        align = int(aligned[1]) if aligned else size
        end = (end + align - 1) // align * align
        offsets[found[2]] = end
        end += size * int(found[3] or 1)
    return offsets, end


def _statements(text: str, at: int) -> Iterator[Statement]:
    label = re.compile(r"([$\w%]+)\s*:(?!:)")
    line, counted = _line_at(text, at), at
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        line += text.count("\n", counted, at)
        counted = at
        if text[at] in "{}":
            yield Statement(text[at], "", line)
            at += 1
        elif found := label.match(text, at):
            yield Statement("label", found[1], line)
            at = found.end()
        else:
            stop = text.index(";", at)
            words = " ".join(text[at:stop].split())
            yield Statement("directive" if words[0] == "." else "instruction", words, line)
            at = stop + 1
