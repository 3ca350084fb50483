"""Translates PTX into C++ for machine.h: a function per kernel, which each fiber of a block runs.

    python translate.py FILE.ptx FOLDER [KERNEL...]

writes FOLDER/KERNEL.cc for all kernels or those that are named, and prints their names. A file
whose text has not changed is kept. Registers become local variables, labels become labels. What is
not known by its full name is an error.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import arithmetic  # noqa: F401  (registers its opcodes)
import instructions  # noqa: F401
from function import STORAGE, Function, cpp_name
from opcodes import emit
from parse import WIDTH, Kernel, Module, Statement, UnknownPtx, parse, split

NEWEST_VERSION = (9, 1)  # of PTX, whose instructions are known


def translate(function: Function) -> None:
    """Translates all statements of the function's kernel.

    Raises:
        UnknownPtx: with the line and the statement that is not known.
    """
    for statement in function.kernel.statements:
        function.line = statement.line
        try:
            _translate_statement(function, statement)
        except (UnknownPtx, KeyError, IndexError) as error:
            where = f"{function.kernel.name}, line {statement.line}: {statement.text}"
            raise UnknownPtx(f"{where}: not known: {error}") from None


def _translate_statement(function: Function, statement: Statement) -> None:
    kind, text, _ = statement
    if kind == "{":
        function.enter()
    elif kind == "}":
        function.leave()
    elif kind == "label":
        function.label(text)
    elif kind == "directive":
        function.declare(text)
    else:
        _translate_instruction(function, text)


def _translate_instruction(function: Function, text: str) -> None:
    guard = re.match(r"@(!?)([%\w$]+)\s+(.*)", text)
    first = len(function.lines)
    opcode, _, operands = (guard[3] if guard else text).partition(" ")
    emit(function, opcode, split(operands))
    if guard:
        condition = f"{guard[1]}{function.value(guard[2])}"
        lines = function.lines
        lines[first:] = [f"  if ({condition}) {{", *lines[first:], "  }"]


def kernel_text(kernel: Kernel, module: Module) -> str:
    """The C++ file of a kernel."""
    function = Function(kernel, module)
    translate(function)
    name = cpp_name(kernel.name)
    arrays = [
        f"alignas(16) {STORAGE[WIDTH[array.type]]} {array.name}_memory[{array.num_elements}]"
        f" = {{{re.sub('0[fFdD](?=[0-9a-fA-F]{8})', '0x', array.values)}}};"
        for array in module.arrays
    ]
    return "\n".join(
        [
            '#include "ptx/bits.h"',
            '#include "ptx/machine.h"',
            '#include "ptx/numbers.h"',
            "namespace ringcomm::ptx {",
            "namespace {",
            *arrays,
            function.text(),
            "}  // namespace",
            f"extern const Kernel kernel_{name};",
            f'const Kernel kernel_{name} = {{"{kernel.name}", {kernel.param_bytes}, '
            f"{function.static_shared_bytes}, run}};",
            f"const Registration registration_{name}(kernel_{name});",
            "}  // namespace ringcomm::ptx",
            "",
        ]
    )


def _say_if_newer(path: Path, text: str) -> None:
    """An instruction that means something else in a newer PTX would not be noticed."""
    found = re.search(r"^\.version\s+(\d+)\.(\d+)", text, re.MULTILINE)
    if found is None or (int(found[1]), int(found[2])) > NEWEST_VERSION:
        version = "of no version" if found is None else f"{found[1]}.{found[2]}"
        known = "{}.{}".format(*NEWEST_VERSION)
        print(f"{path}: PTX {version}; what runs it was written for {known}", file=sys.stderr)


def translate_file(path: Path, folder: Path, names: list[str]) -> list[str]:
    """Translates the file's kernels, or those of the names; returns which."""
    text = path.read_text()
    _say_if_newer(path, text)
    module = parse(text)
    folder.mkdir(parents=True, exist_ok=True)
    kernels = [kernel for kernel in module.kernels if not names or kernel.name in names]
    for kernel in kernels:
        code = kernel_text(kernel, module)
        to = folder / f"{cpp_name(kernel.name)}.cc"
        if not to.exists() or to.read_text() != code:
            to.write_text(code)
    return [kernel.name for kernel in kernels]


def main() -> int:
    """Translates one file."""
    path, folder, *names = sys.argv[1:]
    try:
        done = translate_file(Path(path), Path(folder), names)
    except UnknownPtx as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 1
    if missing := sorted(set(names) - set(done)):
        print(f"{path}: no kernel {', '.join(missing)}", file=sys.stderr)
        return 1
    print("\n".join(done))
    return 0


if __name__ == "__main__":
    sys.exit(main())
