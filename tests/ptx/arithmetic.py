"""The C++ of arithmetic, comparisons, moves and conversions: operators and calls of functions."""

from __future__ import annotations

import re

from function import CPP, Function
from opcodes import Opcode, opcode
from parse import WIDTH, UnknownPtx

INTEGER = re.compile(r"[sub]\d+")
# The function object of the C++ library, and the operator.
COMPARE = {
    "eq": ("equal_to", "=="),
    "ne": ("not_equal_to", "!="),
    "lt": ("less", "<"),
    "gt": ("greater", ">"),
    "le": ("less_equal", "<="),
    "ge": ("greater_equal", ">="),
}
COMPARE |= {"lo": COMPARE["lt"], "ls": COMPARE["le"], "hi": COMPARE["gt"], "hs": COMPARE["ge"]}
# Function of numbers.h or bits.h, operands ("t" of the instruction's type, "u" of u32), modifiers.
ROUNDED = ("rn", "ftz")
APPROXIMATE = ("approx", "full", "rn", "ftz")
APPROXIMATED = ("rcp", "sqrt", "rsqrt", "ex2", "lg2", "tanh", "sin", "cos")
ARITHMETIC: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "add": ("add", "tt", ROUNDED),
    "sub": ("sub", "tt", ROUNDED),
    "fma": ("fma", "ttt", ROUNDED),
    "div": ("div", "tt", APPROXIMATE),
    "rem": ("rem", "tt", ()),
    "copysign": ("copysign", "tt", ()),
    "not": ("bit_not", "t", ()),
    "shl": ("shl", "tu", ()),
    "shr": ("shr", "tu", ()),
    "bfi": ("bfi", "ttuu", ()),
    "bfe": ("bfe", "tuu", ()),
    **{name: (name, "t", ("ftz",)) for name in ("neg", "abs")},
    **{name: (name, "t", APPROXIMATE) for name in APPROXIMATED},
    **{name: (f"bit_{name}", "tt", ()) for name in ("and", "or", "xor")},
    **{name: (name, "t", ()) for name in ("popc", "clz", "brev")},
}
UNTYPED = ("sin", "cos")  # of float only


# ---- arithmetic


def _flushes(op: Opcode) -> bool:
    return op.has("ftz") and op.type == "f32"


def _call(f: Function, op: Opcode, function: str, operands: list[str]) -> str:
    if _flushes(op):
        operands = [f"flush({operand})" for operand in operands]
        return f"flush({function}({', '.join(operands)}))"
    return f"{function}({', '.join(operands)})"


SIGNS = {"add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^"}


def _integers(f: Function, op: Opcode, args: list[str]) -> bool:
    """Emits the frequent operations on integers and predicates as operators: they compile faster.

    At least 32 bits wide, so that products of u16 do not overflow int.
    """
    is_integer = op.type == "pred" or INTEGER.fullmatch(op.type)
    if op.base not in SIGNS or not is_integer or {"cc", "hi", "wide"} & set(op.modifiers):
        return False
    op.only("lo")
    width = "bool" if op.type == "pred" else f"u{max(32, WIDTH[op.type])}"
    left, right = (f"({width}){f.integer(op.type, arg)}" for arg in args[1:])
    f.set_integer(args[0], f"({CPP[op.type]})({left} {SIGNS[op.base]} {right})")
    return True


@opcode(*ARITHMETIC)
def _arithmetic(f: Function, op: Opcode, args: list[str]) -> None:
    if _integers(f, op, args):
        return None
    function, kinds, known = ARITHMETIC[op.base]
    if op.base == "add" and op.has("cc"):
        op.only("cc")
        left, right = (f.get(op.type, arg) for arg in args[1:])
        f.emit(f"{{ const auto a = {left}; const auto sum = add(a, {right}); carry = sum < a;")
        f.set(args[0], "sum")
        return f.emit("}")
    op.only(*known)
    if op.base not in UNTYPED:
        function = f"{function}<{CPP[op.type]}>"
    types = [{"t": op.type, "u": "u32"}[kind] for kind in kinds]
    operands = [f.get(type_, arg) for type_, arg in zip(types, args[1:], strict=True)]
    return f.set(args[0], _call(f, op, function, operands))


@opcode("addc")
def _addc(f: Function, op: Opcode, args: list[str]) -> None:
    op.only()
    left, right = (f.get(op.type, arg) for arg in args[1:])
    type_ = CPP[op.type]
    f.set(args[0], f"add<{type_}>(add<{type_}>({left}, {right}), carry)")


@opcode("mul")
def _mul(f: Function, op: Opcode, args: list[str]) -> None:
    if _integers(f, op, args):
        return None
    op.only(*ROUNDED, "lo", "hi", "wide")
    if op.has("wide"):
        left, right = (
            f"({op.type[0]}{2 * WIDTH[op.type]}){f.integer(op.type, arg)}" for arg in args[1:]
        )
        return f.set_integer(args[0], f"{left} * {right}")
    function = {"wide": "mul_wide", "hi": "mul_hi"}.get(op.one_of(("wide", "hi"), ""), "mul")
    operands = [f.get(op.type, arg) for arg in args[1:]]
    f.set(args[0], _call(f, op, f"{function}<{CPP[op.type]}>", operands))
    return None


@opcode("mad")
def _mad(f: Function, op: Opcode, args: list[str]) -> None:
    if op.type[0] == "f":
        op.only(*ROUNDED)
        operands = [f.get(op.type, arg) for arg in args[1:]]
        return f.set(args[0], _call(f, op, f"fma<{CPP[op.type]}>", operands))
    op.only("lo", "hi", "wide")
    part, type_ = op.one_of(("lo", "hi", "wide"), ""), CPP[op.type]
    sum_type = f"{op.type[0]}{2 * WIDTH[op.type]}" if part == "wide" else op.type
    function = {"lo": "mul", "hi": "mul_hi", "wide": "mul_wide"}[part]
    left, right = (f.get(op.type, arg) for arg in args[1:3])
    product = f"{function}<{type_}>({left}, {right})"
    return f.set(args[0], f"add<{CPP[sum_type]}>({product}, {f.get(sum_type, args[3])})")


@opcode("min", "max")
def _min_max(f: Function, op: Opcode, args: list[str]) -> None:
    op.only("ftz", "NaN")
    function = f"{op.base}_nan" if op.has("NaN") else op.base
    result, *others = (f.get(op.type, arg) for arg in args[1:])
    for other in others:  # two from sm_100 on, for numbers of 32 bits
        result = _call(f, op, f"{function}<{CPP[op.type]}>", [result, other])
    f.set(args[0], result)


@opcode("shf")
def _shf(f: Function, op: Opcode, args: list[str]) -> None:
    op.only("l", "r", "wrap", "clamp")
    low, high, num_bits = (f.get("u32", arg) for arg in args[1:])
    limit = op.one_of(("wrap", "clamp"), "")
    side = op.one_of(("l", "r"), "")
    f.set(args[0], f"shf_{side}({low}, {high}, {limit}({num_bits}))")


@opcode("prmt", "lop3")
def _bytes_or_bits(f: Function, op: Opcode, args: list[str]) -> None:
    op.only()
    operands = ", ".join(f.get("u32", arg) for arg in args[1:])
    f.set(args[0], f"{op.base}({operands})")


# ---- moves, comparisons and conversions


@opcode("mov")
def _mov(f: Function, op: Opcode, args: list[str]) -> None:
    op.only()
    to, source, width = args[0], args[1], WIDTH[op.type]
    if source.startswith("{"):
        parts = f.vector(source)
        each = width // len(parts)
        shifted = (
            f"u64{{{f.get(f'b{each}', part)}}} << {i * each}" for i, part in enumerate(parts)
        )
        f.set(to, f"(u{width})({' | '.join(shifted)})")
    elif to.startswith("{"):
        parts = f.vector(to)
        each = width // len(parts)
        f.emit(f"{{ const u{width} v = {f.get(f'b{width}', source)};")
        for i, part in enumerate(parts):
            f.set(part, f"(u{each})(v >> {i * each})")
        f.emit("}")
    elif op.type == "pred":
        f.set_integer(to, f.value(source))
    else:
        f.set_integer(to, f.integer(f"b{width}", source))


@opcode("selp")
def _selp(f: Function, op: Opcode, args: list[str]) -> None:
    op.only()
    yes, no = (f.integer(f"b{WIDTH[op.type]}", arg) for arg in args[1:3])
    f.set_integer(args[0], f"{f.value(args[3])} ? {yes} : {no}")


def _comparison(f: Function, op: Opcode, left: str, right: str) -> str:
    name = op.modifiers[0]
    if INTEGER.fullmatch(op.type) and name in COMPARE:
        integers = [f.integer(op.type, operand) for operand in (left, right)]
        return f"({f' {COMPARE[name][1]} '.join(integers)})"
    operands = f"{f.get(op.type, left)}, {f.get(op.type, right)}"
    if _flushes(op):
        operands = f"flush({f.get(op.type, left)}), flush({f.get(op.type, right)})"
    kind = f"ordered<{CPP[op.type]}>"
    if name == "num":
        return f"{kind}(Always(), {operands})"
    if name == "nan":
        return f"un{kind}(Never(), {operands})"
    if name in COMPARE:
        return f"{kind}(std::{COMPARE[name][0]}<>(), {operands})"
    if name[:-1] in COMPARE and name[-1] == "u":
        return f"un{kind}(std::{COMPARE[name[:-1]][0]}<>(), {operands})"
    raise UnknownPtx(op.text)


JOINS = {"and": "&", "or": "|", "xor": "^"}


@opcode("setp")
def _setp(f: Function, op: Opcode, args: list[str]) -> None:
    op.only(op.modifiers[0], "ftz", *JOINS)
    to, _, inverse = args[0].partition("|")
    join = op.one_of(JOINS, "")
    tail = f" {JOINS[join]} (bool){f.value(args[3])}" if join else ""
    if not inverse:
        return f.set_integer(to, f"{_comparison(f, op, args[1], args[2])}{tail}")
    f.emit(f"{{ const bool is_true = {_comparison(f, op, args[1], args[2])};")
    if to == inverse:
        raise UnknownPtx(op.text)
    f.emit(f"const bool second = !is_true{tail};")
    f.set(to, f"(bool)(is_true{tail})")
    f.set(inverse, "second")
    return f.emit("}")


@opcode("set")
def _set(f: Function, op: Opcode, args: list[str]) -> None:
    op.only(op.modifiers[0], op.modifiers[-2], "ftz")
    ones = {"f32": "0x3f800000u", "u32": "~0u", "s32": "~0u"}[op.modifiers[-2]]
    f.set(args[0], f"({_comparison(f, op, args[1], args[2])} ? {ones} : 0u)")


@opcode("testp")
def _testp(f: Function, op: Opcode, args: list[str]) -> None:
    functions = {"infinite": "std::isinf", "finite": "std::isfinite", "notanumber": "std::isnan"}
    functions |= {"number": "!std::isnan", "normal": "std::isnormal"}
    op.only(*functions)
    f.set(args[0], f"{functions[op.modifiers[0]]}({f.get(op.type, args[1])})")


INTEGER_ROUNDING = ("rni", "rzi", "rmi", "rpi")


@opcode("cvt")
def _cvt(f: Function, op: Opcode, args: list[str]) -> None:
    to, source = op.modifiers[-2:]
    if to in ("bf16x2", "f16x2"):
        op.only("rn", to)
        high, low = (f.get("f32", arg) for arg in args[1:])
        return f.set(args[0], f"pack<{CPP[to]}>({high}, {low})")
    op.only("rn", "sat", "ftz", *INTEGER_ROUNDING, to)
    value, from_float = f.get(source, args[1]), "f" in source
    if op.has("ftz") and source == "f32":
        value = f"flush({value})"
    rounding = op.one_of(INTEGER_ROUNDING, "")
    if rounding:
        if not from_float or ("f" in to and WIDTH[to] != WIDTH[source]):
            raise UnknownPtx(op.text)
        value = f"{rounding}(wide({value}))"
        function = "cvt" if "f" in to else "to_integer"
        return f.set(args[0], f"{function}<{CPP[to]}>({value})")
    # Rounding twice, by way of float, is not what a GPU does.
    is_exact_float = WIDTH[source] <= 16 or source == "f32"
    if "f" in to and WIDTH[to] == 16 and not is_exact_float:
        raise UnknownPtx(op.text)
    if op.has("sat") and (from_float or "f" in to):
        raise UnknownPtx(op.text)
    if not from_float and "f" not in to and not op.has("sat"):
        return f.set_integer(args[0], f"({CPP[to]}){f.integer(source, args[1])}")
    function = "cvt_sat" if op.has("sat") else "cvt"
    return f.set(args[0], f"{function}<{CPP[to]}>({value})")
