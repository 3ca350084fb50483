"""What instructions.py and arithmetic.py know: the C++ of each opcode, by its name.

An instruction is known by its opcode and all of its modifiers. A modifier that nothing names is an
error, as is an opcode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from function import Function
from parse import WIDTH, UnknownPtx


class Opcode:
    """An opcode and its modifiers; the last one is its type."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.base, *self.modifiers = text.split(".")
        self.type = self.modifiers[-1] if self.modifiers else ""

    def only(self, *known: str) -> None:
        """Raises UnknownPtx where there is a modifier but these and the type."""
        for modifier in self.modifiers:
            if modifier not in known and modifier != self.type:
                raise UnknownPtx(self.text)
        if self.modifiers and self.type not in WIDTH and self.type not in known:
            raise UnknownPtx(self.text)

    def has(self, modifier: str) -> bool:
        return modifier in self.modifiers

    def one_of(self, names: Iterable[str], otherwise: str) -> str:
        """The modifier that is one of the names."""
        return next((name for name in self.modifiers if name in names), otherwise)


Emit = Callable[[Function, Opcode, list[str]], None]
_EMIT: dict[str, Emit] = {}


def opcode(*names: str) -> Callable[[Emit], Emit]:
    def register(function: Emit) -> Emit:
        _EMIT.update(dict.fromkeys(names, function))
        return function

    return register


def emit(f: Function, text: str, args: list[str]) -> None:
    """Adds the C++ of an instruction to the function.

    Raises:
        UnknownPtx: the instruction, by its full name.
    """
    op = Opcode(text)
    if op.base not in _EMIT:
        raise UnknownPtx(text)
    _EMIT[op.base](f, op, args)
