"""The C++ function that a kernel becomes: names, operands and lines."""

from __future__ import annotations

import re
from collections.abc import Callable

from parse import WIDTH, Kernel, Module, UnknownPtx, split

STORAGE = {1: "bool", 8: "u8", 16: "u16", 32: "u32", 64: "u64"}
CPP = {
    **{name: name for name in WIDTH if name not in ("b128", "pred")},
    **{f"b{width}": f"u{width}" for width in (8, 16, 32, 64)},
    "pred": "bool",
    "f32": "float",
    "f64": "double",
}
SPECIAL = {
    "%laneid": "t.lane()",
    "%warpid": "(t.linear / 32)",
    "%smid": "t.launch().ctaid.x",
    "%globaltimer": "take_ns()",
    "%globaltimer_lo": "(u32)take_ns()",
    "%clock": "(u32)take_ns()",
    "%clock64": "take_ns()",
    "%cluster_ctarank": "t.launch().cluster_rank",
    "%cluster_nctarank": "t.launch().cluster_blocks",
    "%clusterid.x": "(t.launch().ctaid.x / t.launch().cluster_blocks)",
    "%nclusterid.x": "(t.launch().nctaid.x / t.launch().cluster_blocks)",
    "%lanemask_eq": "(1u << t.lane())",
    "%lanemask_lt": "((1u << t.lane()) - 1)",
    "%lanemask_le": "((2u << t.lane()) - 1)",
    "%lanemask_gt": "~((2u << t.lane()) - 1)",
    "%lanemask_ge": "~((1u << t.lane()) - 1)",
    **{f"%tid.{axis}": f"t.tid.{axis}" for axis in "xyz"},
    **{
        f"%{name}.{axis}": f"t.launch().{name}.{axis}"
        for name in ("ntid", "ctaid", "nctaid")
        for axis in "xyz"
    },
}


class Function:
    """The C++ function of a kernel, as far as it has been translated: scopes, operands, lines."""

    def __init__(self, kernel: Kernel, module: Module) -> None:
        self.kernel = kernel
        self.line = 0  # of the statement
        self.lines: list[str] = []
        self.variables: list[str] = []
        self.static_shared_bytes = 0
        self._num_names = 0
        self._storage: dict[str, str] = {}  # of each register
        self._label = ""
        self._tables: dict[str, list[str]] = {}
        # Names of PTX and their C++, by scope; the outermost is the module's.
        self._scopes: list[dict[str, str]] = [
            dict.fromkeys(module.dynamic, "t.launch().dynamic_at")
            | {array.name: f"(u64){array.name}_memory" for array in module.arrays}
            | {name: f"((u64)t.launch().params + {at})" for name, at in kernel.params.items()}
        ]

    # ---- scopes, labels and declarations

    def enter(self) -> None:
        """Begins a scope of names."""
        self._scopes.append({})

    def leave(self) -> None:
        """Ends the innermost scope."""
        self._scopes.pop()

    def label(self, name: str) -> None:
        """Adds a label; .branchtargets that follow belong to it."""
        self._label = name
        self.lines.append(f"{_label(name)}:;")

    def declare(self, text: str) -> None:
        """Adds what a directive declares."""
        if found := re.match(r"\.reg\s*\.(\w+)\s+(.*)", text):
            for name in split(found[2]):
                self._declare_registers(STORAGE[WIDTH[found[1]]], name)
        elif found := re.match(
            r"\.(shared|local)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?", text
        ):
            size = WIDTH[found[3]] // 8 * int(found[5] or 1)
            align = int(found[2] or WIDTH[found[3]] // 8)
            name = found[4]
            if found[1] == "shared":
                at = (self.static_shared_bytes + align - 1) // align * align
                self.static_shared_bytes = at + size
                self._scopes[0][name] = f"{at}u"
            else:
                self.variables.append(f"alignas({max(align, 16)}) std::byte {name}_memory[{size}];")
                self._scopes[0][name] = f"(u64){name}_memory"
        elif found := re.match(r"\.branchtargets\s+(.*)", text):
            self._tables[self._label] = split(found[1])
        elif not text.startswith(".pragma"):
            raise UnknownPtx(text)

    def _declare_registers(self, storage: str, name: str) -> None:
        many = re.fullmatch(r"([%\w$]+)<(\d+)>", name)
        names = [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]
        for each in names:
            self._num_names += 1
            self._scopes[-1][each] = f"{cpp_name(each)}_{self._num_names}"
            self._storage[self._scopes[-1][each]] = storage
            self.variables.append(f"{storage} {self._scopes[-1][each]} = 0;")

    # ---- operands

    def value(self, text: str) -> str:
        """The C++ of a register, a name or a literal, untyped."""
        text = text.strip()
        if text.startswith("!"):
            return f"!{self.value(text[1:])}"
        for names in reversed(self._scopes):
            if text in names:
                return names[text]
        if text in SPECIAL:
            return SPECIAL[text]
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
            return f"0x{text[2:]}u"
        if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
            return f"0x{text[2:]}ull"
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
            number = int(text.rstrip("U"), 0)
            is_signed = -(1 << 63) < number < (1 << 63)
            return f"(s64){number}ll" if is_signed else f"{number % (1 << 64)}ull"
        raise UnknownPtx(f"operand {text}")

    def get(self, type_: str, text: str) -> str:
        """An operand as a C++ value of the type."""
        return f"get<{CPP[type_]}>({self.value(text)})"

    def integer(self, type_: str, text: str) -> str:
        """An operand of an integer type or a predicate, without a template: these are most."""
        return f"({CPP[type_]}){self.value(text)}"

    def address(self, text: str) -> str:
        """The address of [register+offset]."""
        inner = text.strip().removeprefix("[").removesuffix("]").strip()
        found = re.fullmatch(r"(.+?)\s*\+\s*(-?\w+)", inner)
        if found:
            return f"({self.value(found[1])} + (s64){int(found[2], 0)})"
        return f"(u64)({self.value(inner)})"

    @staticmethod
    def vector(text: str) -> list[str]:
        """The elements of {a, b}, or the operand itself."""
        text = text.strip()
        return split(text[1:-1]) if text.startswith("{") else [text]

    # ---- statements

    def emit(self, line: str) -> None:
        """Adds a statement."""
        self.lines.append(f"  {line}")

    def set(self, to: str, expression: str) -> None:
        """Assigns to a register; "_" takes nothing."""
        if to == "_":
            self.emit(f"(void)({expression});")
        else:
            self.emit(f"set({self.value(to)}, {expression});")

    def set_integer(self, to: str, expression: str) -> None:
        """Assigns an integer, which is extended as its type says."""
        register = self.value(to)
        self.emit(f"{register} = ({self._storage[register]})({expression});")

    def note_line(self) -> None:
        """For what the machine says when the next call fails."""
        self.emit(f"t.line = {self.line};")

    def jump(self, label: str) -> str:
        """A jump to a label."""
        return f"goto {_label(label)};"

    def table(self, name: str) -> Callable[[], str]:
        """The cases of a table of labels, which may follow its use."""
        return lambda: " ".join(
            f"case {i}: {self.jump(label)}" for i, label in enumerate(self._tables[name])
        )

    def text(self) -> str:
        """The function."""
        lines = [
            re.sub(r"@TABLE (\S+)@", lambda found: self.table(found[1])(), line)
            for line in self.lines
        ]
        body = [f"  {variable}" for variable in self.variables] + lines
        return "\n".join(["void run(Thread& t) {", "  bool carry = false;", *body, "}"])


def cpp_name(name: str) -> str:
    return re.sub(r"\W", "_", name)


def _label(name: str) -> str:
    # nvcc numbers the kernels of a file: a label must not change with the others.
    return f"label_{cpp_name(re.sub(r'BB[0-9]+_', 'BB_', name))}"
