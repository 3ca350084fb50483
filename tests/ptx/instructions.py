"""The C++ of each PTX instruction: calls of numbers.h, memory.h and machine.h.

An instruction is known by its opcode and all of its modifiers. A modifier that no line here names
is an error, as is an opcode.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from parse import WIDTH, UnknownPtx

if TYPE_CHECKING:
    from translate import Function

CPP = {
    **{name: name for name in WIDTH if name not in ("b128", "pred")},
    **{f"b{width}": f"u{width}" for width in (8, 16, 32, 64)},
    "pred": "bool",
    "f32": "float",
    "f64": "double",
}
ORDERS = {
    "weak": "kWeak",
    "relaxed": "kRelaxed",
    "acquire": "kAcquire",
    "release": "kRelease",
    "acq_rel": "kAcqRel",
    "sc": "kSeqCst",
    "volatile": "kVolatile",
}
SCOPES = {"cta": "kCta", "cluster": "kCluster", "gpu": "kGpu", "sys": "kSys"}
# Hints of caches, which change no result.
HINTS = re.compile(r"nc|ca|cg|cs|cv|lu|wb|wt|(L1|L2)::\w+")
INTEGER = re.compile(r"[sub]\d+")
SPACES = ("param", "global", "shared", "const", "local")
COMPARE = {
    "eq": "std::equal_to",
    "ne": "std::not_equal_to",
    "lt": "std::less",
    "gt": "std::greater",
    "le": "std::less_equal",
    "ge": "std::greater_equal",
    "lo": "std::less",
    "ls": "std::less_equal",
    "hi": "std::greater",
    "hs": "std::greater_equal",
}
# Function of numbers.h, its operands ("t" of the instruction's type, "u" of u32), modifiers.
ROUNDED = ("rn", "ftz")
APPROXIMATE = ("approx", "full", "rn", "ftz")
ARITHMETIC: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "add": ("add", "tt", ROUNDED),
    "sub": ("sub", "tt", ROUNDED),
    "fma": ("fma", "ttt", ROUNDED),
    "div": ("div", "tt", APPROXIMATE),
    "rem": ("rem", "tt", ()),
    "neg": ("neg", "t", ("ftz",)),
    "abs": ("abs", "t", ("ftz",)),
    "copysign": ("copysign", "tt", ()),
    "rcp": ("rcp", "t", APPROXIMATE),
    "sqrt": ("sqrt", "t", APPROXIMATE),
    "rsqrt": ("rsqrt", "t", APPROXIMATE),
    "ex2": ("ex2", "t", APPROXIMATE),
    "lg2": ("lg2", "t", APPROXIMATE),
    "tanh": ("tanh", "t", APPROXIMATE),
    "sin": ("sin", "t", APPROXIMATE),
    "cos": ("cos", "t", APPROXIMATE),
    "and": ("bit_and", "tt", ()),
    "or": ("bit_or", "tt", ()),
    "xor": ("bit_xor", "tt", ()),
    "not": ("bit_not", "t", ()),
    "shl": ("shl", "tu", ()),
    "shr": ("shr", "tu", ()),
    "bfi": ("bfi", "ttuu", ()),
    "bfe": ("bfe", "tuu", ()),
    "popc": ("popc", "t", ()),
    "clz": ("clz", "t", ()),
    "brev": ("brev", "t", ()),
}
UNTYPED = ("sin", "cos")  # of float only


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


Emit = Callable[["Function", Opcode, list[str]], None]
_EMIT: dict[str, Emit] = {}


def _opcode(*names: str) -> Callable[[Emit], Emit]:
    def register(function: Emit) -> Emit:
        _EMIT.update(dict.fromkeys(names, function))
        return function

    return register


def emit(f: Function, text: str, args: list[str]) -> None:
    """Adds the C++ of an instruction to the function.

    Raises:
        UnknownPtx: the instruction, by its full name.
    """
    opcode = Opcode(text)
    if opcode.base in _EMIT:
        _EMIT[opcode.base](f, opcode, args)
    elif opcode.base in ARITHMETIC:
        _arithmetic(f, opcode, args)
    else:
        raise UnknownPtx(text)


# ---- control


@_opcode("bra")
def _bra(f: Function, op: Opcode, args: list[str]) -> None:
    op.only("uni")
    f.emit(f.jump(args[0]))


@_opcode("brx")
def _brx(f: Function, op: Opcode, args: list[str]) -> None:
    op.only("idx", "uni")
    f.emit(f"switch ((u32){f.value(args[0])}) {{ @TABLE {args[1]}@ }}")


@_opcode("ret", "exit")
def _ret(f: Function, op: Opcode, args: list[str]) -> None:
    op.only("uni")
    f.emit("return;")


@_opcode("trap")
def _trap(f: Function, op: Opcode, args: list[str]) -> None:
    op.only()
    f.emit(f'fail(t, {f.line}, "trap");')


# ---- memory


def _space(op: Opcode) -> str:
    names = (modifier.partition("::")[0] for modifier in op.modifiers)
    return next((name for name in names if name in SPACES), "generic")


def _check_access(op: Opcode, *more: str) -> None:
    known = {*ORDERS, *SCOPES, *SPACES, "v2", "v4", "v8", "shared::cta", "shared::cluster"}
    known |= {"param::entry", *more}
    op.only(*(m for m in op.modifiers if m in known or HINTS.fullmatch(m)))


def _access(f: Function, op: Opcode, num_elements: int) -> str:
    order = ORDERS[op.one_of(ORDERS, "relaxed" if op.base in ("atom", "red") else "weak")]
    default = "gpu" if op.base in ("atom", "red") else "sys"
    scope = SCOPES[op.one_of(SCOPES, default)]
    size = WIDTH[op.type] // 8
    return f"{{{f.line}, {size}, {num_elements}, Order::{order}, Scope::{scope}}}"


def _shared_order(op: Opcode) -> str:
    order = ORDERS[op.one_of(ORDERS, "weak")]
    return "" if order == "kWeak" else f", Order::{order}"


def _may_poll(op: Opcode) -> bool:
    """A loop that waits has such an access, after which other threads may run."""
    return any(order in op.modifiers for order in ORDERS if order != "weak")


def _storage(type_: str) -> str:
    """Signed types are sign-extended into wider registers."""
    return CPP[type_] if type_[0] == "s" else f"u{WIDTH[type_]}"


@_opcode("ld", "ldu")
def _ld(f: Function, op: Opcode, args: list[str]) -> None:
    _check_access(op)
    registers, space = f.vector(args[0]), _space(op)
    num, type_, address = len(registers), _storage(op.type), f.address(args[1])
    f.emit(f"{{ {type_} v[{num}];")
    if space == "shared":
        f.note_line()
        f.emit(f"t.load_shared((u32){address}, v, {num}{_shared_order(op)});")
    elif space in ("global", "generic"):
        f.emit(f"load(t, {address}, v, {_access(f, op, num)});")
    else:
        f.emit(f"std::memcpy(v, (const void*){address}, sizeof v);")
    for i, register in enumerate(registers):
        if register != "_":
            f.set(register, f"v[{i}]")
    f.emit("}")
    if space in ("global", "generic") and _may_poll(op):
        f.note_line()
        f.emit("t.poll();")


@_opcode("st")
def _st(f: Function, op: Opcode, args: list[str]) -> None:
    if op.has("async"):
        return _st_async(f, op, args)
    _check_access(op)
    registers, space = f.vector(args[1]), _space(op)
    num, address = len(registers), f.address(args[0])
    values = ", ".join(f.get(f"b{WIDTH[op.type]}", register) for register in registers)
    f.emit(f"{{ const u{WIDTH[op.type]} v[] = {{{values}}};")
    if space == "shared":
        f.note_line()
        f.emit(f"t.store_shared((u32){address}, v, {num}{_shared_order(op)}); }}")
    elif space in ("global", "generic"):
        f.emit(f"store(t, {address}, v, {_access(f, op, num)}); }}")
    else:
        f.emit(f"std::memcpy((void*){address}, v, sizeof v); }}")
    return None


def _st_async(f: Function, op: Opcode, args: list[str]) -> None:
    _check_access(op, "async", "mbarrier::complete_tx::bytes")
    registers, width = f.vector(args[1]), WIDTH[op.type]
    values = ", ".join(f.get(f"b{width}", register) for register in registers)
    f.note_line()
    f.emit(f"{{ const u{width} v[] = {{{values}}};")
    to, barrier = f.address(args[0]), f.address(args[2])
    f.emit(f"t.store_async((u32){to}, v, {width // 8}, {len(registers)}, (u32){barrier}); }}")


UPDATES = {
    "add": "add(old, a)",
    "exch": "a",
    "min": "min(old, a)",
    "max": "max(old, a)",
    "and": "bit_and(old, a)",
    "or": "bit_or(old, a)",
    "xor": "bit_xor(old, a)",
    "inc": "old >= a ? 0 : old + 1",
    "dec": "old == 0 || old > a ? a : old - 1",
    "cas": "old == a ? b : old",
}


def _atomic(f: Function, op: Opcode, args: list[str], to: str) -> None:
    _check_access(op, *UPDATES, "noftz")
    update, type_ = op.one_of(UPDATES, ""), CPP[op.type]
    if WIDTH[op.type] not in (16, 32, 64) or not update:
        raise UnknownPtx(op.text)
    f.emit(f"{{ const auto a = {f.get(op.type, args[1])};")
    if update == "cas":
        f.emit(f"const auto b = {f.get(op.type, args[2])};")
    f.emit("const auto update = [&](u64 word) {")
    f.emit(f"const auto old = get<{type_}>(word);")
    f.emit(f"u64 next; set(next, static_cast<{type_}>({UPDATES[update]})); return next; }};")
    if _space(op) == "shared":
        f.note_line()
        place = f"t.shared_at((u32){f.address(args[0])}, sizeof({type_}))"
        address = f"reinterpret_cast<u64>({place})"
    else:
        address = f.address(args[0])
    f.emit(f"const u64 old = atomic(t, {address}, {_access(f, op, 1)}, update);")
    f.set(to, f"get<{type_}>(old)")
    f.emit("}")
    f.note_line()
    f.emit("t.poll();")


@_opcode("atom")
def _atom(f: Function, op: Opcode, args: list[str]) -> None:
    _atomic(f, op, args[1:], args[0])


@_opcode("red")
def _red(f: Function, op: Opcode, args: list[str]) -> None:
    _atomic(f, op, args, "_")


@_opcode("fence")
def _fence(f: Function, op: Opcode, args: list[str]) -> None:
    if op.has("mbarrier_init") or op.has("proxy"):
        op.only("mbarrier_init", "release", "cluster", "proxy", "async", "shared::cta", "global")
        name = "fence_mbarrier_init" if op.has("mbarrier_init") else "fence_proxy"
        f.emit(f"{name}(t, {f.line});")
        return
    op.only(*ORDERS, *SCOPES)
    order, scope = ORDERS[op.one_of(ORDERS, "acq_rel")], SCOPES[op.one_of(SCOPES, "sys")]
    f.emit(f"fence(t, Order::{order}, Scope::{scope}, {f.line});")


@_opcode("membar")
def _membar(f: Function, op: Opcode, args: list[str]) -> None:
    op.only("cta", "gl", "sys")
    scope = {"cta": "kCta", "gl": "kGpu", "sys": "kSys"}[op.type]
    f.emit(f"fence(t, Order::kSeqCst, Scope::{scope}, {f.line});")


@_opcode("cvta")
def _cvta(f: Function, op: Opcode, args: list[str]) -> None:
    op.only("to", *SPACES, "shared::cta", "shared::cluster")
    value = f.value(args[1])
    if _space(op) != "shared":  # addresses of the host
        f.set(args[0], f"(u64)({value})")
    elif op.has("to"):
        f.set(args[0], f"t.generic_to_shared({value})")
    else:
        f.set(args[0], f"t.shared_to_generic((u32){value})")


@_opcode("prefetch", "prefetchu", "discard", "applypriority", "griddepcontrol", "setmaxnreg")
def _hint(f: Function, op: Opcode, args: list[str]) -> None:
    pass


@_opcode("nanosleep")
def _nanosleep(f: Function, op: Opcode, args: list[str]) -> None:
    f.note_line()
    f.emit("t.poll();")


@_opcode("createpolicy")
def _createpolicy(f: Function, op: Opcode, args: list[str]) -> None:
    f.set(args[0], "u64{0}")


# ---- barriers and asynchronous copies


@_opcode("bar", "barrier")
def _bar(f: Function, op: Opcode, args: list[str]) -> None:
    f.note_line()
    words = [m for m in op.modifiers if m not in ("cta", "aligned", "pred")]
    if words[:1] == ["cluster"]:
        op.only("cluster", "arrive", "wait", "release", "acquire", "relaxed", "aligned")
        default = {"arrive": "release", "wait": "acquire"}[words[1]]
        order = ORDERS[op.one_of(ORDERS, default)]
        return f.emit(f"t.cluster_{words[1]}(Order::{order});")
    if words == ["warp", "sync"]:
        return f.emit(f"t.warp_sync({f.value(args[0])});")
    everyone = "t.launch().ntid.count()"
    if words in (["sync"], ["arrive"]):
        threads = f.value(args[1]) if len(args) > 1 else everyone
        return f.emit(f"t.bar_{words[0]}((u32){f.value(args[0])}, (u32){threads});")
    if words[0] != "red" or words[1] not in ("or", "and", "popc"):
        raise UnknownPtx(op.text)
    to, number, *more = args
    threads = f.value(more[0]) if len(more) > 1 else everyone
    value = f.value(more[-1])
    return f.set(to, f"t.bar_{words[1]}((u32){f.value(number)}, (u32){threads}, {value})")


@_opcode("mbarrier")
def _mbarrier(f: Function, op: Opcode, args: list[str]) -> None:
    known = ("init", "inval", "arrive", "expect_tx", "try_wait", "test_wait", "parity", "acquire")
    op.only(*known, "release", "cta", "cluster", "shared", "shared::cta", "b64")
    f.note_line()
    if op.has("init"):
        f.emit(f"t.mbarrier_init((u32){f.address(args[0])}, (u32){f.value(args[1])});")
    elif op.has("arrive"):
        if args[0] != "_":
            raise UnknownPtx(f"{op.text} with a state")
        expected = f.value(args[2]) if op.has("expect_tx") else "0"
        f.emit(f"t.mbarrier_arrive((u32){f.address(args[1])}, (u32){expected});")
    elif op.has("expect_tx"):
        f.emit(f"t.mbarrier_expect((u32){f.address(args[0])}, (u32){f.value(args[1])});")
    elif op.has("parity"):
        strength = f"Order::kAcquire, Scope::{SCOPES[op.one_of(SCOPES, 'cta')]}"
        barrier, parity = f.address(args[1]), f.value(args[2])
        f.set(args[0], f"t.mbarrier_test((u32){barrier}, (u32){parity}, {strength})")
    elif not op.has("inval"):
        raise UnknownPtx(op.text)


@_opcode("cp")
def _cp(f: Function, op: Opcode, args: list[str]) -> None:
    f.note_line()
    words = ".".join(m for m in op.modifiers if not HINTS.fullmatch(m))
    completes = "mbarrier::complete_tx::bytes"
    if words in (f"async.bulk.shared::{to}.global.{completes}" for to in ("cluster", "cta")):
        to, source, barrier = (f.address(args[i]) for i in (0, 1, 3))
        num_bytes = f.value(args[2])
        f.emit(f"t.bulk_load((u32){to}, {source}, (u32){num_bytes}, (u32){barrier});")
    elif words == "async.bulk.global.shared::cta.bulk_group":
        to, source, num_bytes = f.address(args[0]), f.address(args[1]), f.value(args[2])
        f.emit(f"t.bulk_store({to}, (u32){source}, (u32){num_bytes});")
    elif words == "async.bulk.commit_group":
        f.emit("t.bulk_commit();")
    elif words in ("async.bulk.wait_group", "async.bulk.wait_group.read"):
        f.emit(f"t.bulk_wait((u32){f.value(args[0])});")
    elif words == "async.commit_group":
        f.emit("t.copy_commit();")
    elif words == "async.wait_group":
        f.emit(f"t.copy_wait((u32){f.value(args[0])});")
    elif words == "async.wait_all":
        f.emit("t.copy_wait(0);")
    elif words in ("async.shared.global", "async.shared::cta.global"):
        to, source, num_bytes = f.address(args[0]), f.address(args[1]), f.value(args[2])
        used = f.value(args[3]) if len(args) > 3 else num_bytes
        f.emit(f"t.copy_async((u32){to}, {source}, (u32){num_bytes}, (u32){used});")
    else:
        raise UnknownPtx(op.text)


@_opcode("mapa")
def _mapa(f: Function, op: Opcode, args: list[str]) -> None:
    op.only("shared::cluster")
    f.set(args[0], f"t.mapa((u32){f.value(args[1])}, (u32){f.value(args[2])})")


# ---- warps


@_opcode("shfl")
def _shfl(f: Function, op: Opcode, args: list[str]) -> None:
    op.only("sync", "up", "down", "bfly", "idx")
    to, _, in_range = args[0].partition("|")
    kind = op.one_of(("up", "down", "bfly", "idx"), "").capitalize()
    value, operand, control, mask = (f.get("b32", arg) for arg in args[1:])
    f.note_line()
    f.emit("{ bool is_in_range = false;")
    f.set(to, f"t.shfl(Shuffle::k{kind}, {value}, {operand}, {control}, {mask}, is_in_range)")
    if in_range:
        f.set(in_range, "is_in_range")
    f.emit("}")


@_opcode("vote")
def _vote(f: Function, op: Opcode, args: list[str]) -> None:
    op.only("sync", "ballot", "any", "all", "pred", "b32")
    kind = op.one_of(("ballot", "any", "all"), "")
    function = "ballot" if kind == "ballot" else f"vote_{kind}"
    f.note_line()
    f.set(args[0], f"t.{function}({f.value(args[1])}, (u32){f.value(args[2])})")


@_opcode("redux")
def _redux(f: Function, op: Opcode, args: list[str]) -> None:
    functions = {"add": "add", "min": "min", "max": "max"}
    functions |= {name: f"bit_{name}" for name in ("and", "or", "xor")}
    op.only("sync", *functions)
    function, type_ = functions[op.one_of(functions, "")], CPP[op.type]
    f.note_line()
    value, mask = f.get(op.type, args[1]), f.value(args[2])
    f.set(args[0], f"t.redux<{type_}>(&{function}<{type_}>, {value}, (u32){mask})")


@_opcode("activemask")
def _activemask(f: Function, op: Opcode, args: list[str]) -> None:
    f.set(args[0], "~0u")


@_opcode("ldmatrix")
def _ldmatrix(f: Function, op: Opcode, args: list[str]) -> None:
    op.only("sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta")
    registers, address = f.vector(args[0]), f.address(args[1])
    transposed = "true" if op.has("trans") else "false"
    f.note_line()
    f.emit(f"{{ u32 v[{len(registers)}];")
    f.emit(f"t.ldmatrix((u32){address}, {transposed}, {len(registers)}, v);")
    for i, register in enumerate(registers):
        f.set(register, f"v[{i}]")
    f.emit("}")


@_opcode("stmatrix")
def _stmatrix(f: Function, op: Opcode, args: list[str]) -> None:
    op.only("sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta")
    registers, address = f.vector(args[1]), f.address(args[0])
    transposed = "true" if op.has("trans") else "false"
    values = ", ".join(f.get("b32", register) for register in registers)
    f.note_line()
    f.emit(f"{{ const u32 v[] = {{{values}}};")
    f.emit(f"t.stmatrix((u32){address}, {transposed}, {len(registers)}, v); }}")


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


@_opcode("addc")
def _addc(f: Function, op: Opcode, args: list[str]) -> None:
    op.only()
    left, right = (f.get(op.type, arg) for arg in args[1:])
    type_ = CPP[op.type]
    f.set(args[0], f"add<{type_}>(add<{type_}>({left}, {right}), carry)")


@_opcode("mul")
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


@_opcode("mad")
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


@_opcode("min", "max")
def _min_max(f: Function, op: Opcode, args: list[str]) -> None:
    op.only("ftz", "NaN")
    function = f"{op.base}_nan" if op.has("NaN") else op.base
    operands = [f.get(op.type, arg) for arg in args[1:]]
    f.set(args[0], _call(f, op, f"{function}<{CPP[op.type]}>", operands))


@_opcode("shf")
def _shf(f: Function, op: Opcode, args: list[str]) -> None:
    op.only("l", "r", "wrap", "clamp")
    low, high, num_bits = (f.get("u32", arg) for arg in args[1:])
    limit = op.one_of(("wrap", "clamp"), "")
    side = op.one_of(("l", "r"), "")
    f.set(args[0], f"shf_{side}({low}, {high}, {limit}({num_bits}))")


@_opcode("prmt")
def _prmt(f: Function, op: Opcode, args: list[str]) -> None:
    op.only()
    operands = ", ".join(f.get("u32", arg) for arg in args[1:])
    f.set(args[0], f"prmt({operands})")


@_opcode("lop3")
def _lop3(f: Function, op: Opcode, args: list[str]) -> None:
    op.only()
    operands = ", ".join(f.get("u32", arg) for arg in args[1:])
    f.set(args[0], f"lop3({operands})")


# ---- moves, comparisons and conversions


@_opcode("mov")
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


@_opcode("selp")
def _selp(f: Function, op: Opcode, args: list[str]) -> None:
    op.only()
    yes, no = (f.integer(f"b{WIDTH[op.type]}", arg) for arg in args[1:3])
    f.set_integer(args[0], f"{f.value(args[3])} ? {yes} : {no}")


INTEGER_SIGNS = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "lo": "<",
    "ls": "<=",
    "hi": ">",
    "hs": ">=",
}


def _comparison(f: Function, op: Opcode, left: str, right: str) -> str:
    name = op.modifiers[0]
    if INTEGER.fullmatch(op.type) and name in INTEGER_SIGNS:
        integers = [f.integer(op.type, operand) for operand in (left, right)]
        return f"({f' {INTEGER_SIGNS[name]} '.join(integers)})"
    operands = f"{f.get(op.type, left)}, {f.get(op.type, right)}"
    if _flushes(op):
        operands = f"flush({f.get(op.type, left)}), flush({f.get(op.type, right)})"
    kind = f"ordered<{CPP[op.type]}>"
    if name == "num":
        return f"{kind}(Always(), {operands})"
    if name == "nan":
        return f"un{kind}(Never(), {operands})"
    if name in COMPARE:
        return f"{kind}({COMPARE[name]}<>(), {operands})"
    if name[:-1] in COMPARE and name[-1] == "u":
        return f"un{kind}({COMPARE[name[:-1]]}<>(), {operands})"
    raise UnknownPtx(op.text)


JOINS = {"and": "&", "or": "|", "xor": "^"}


@_opcode("setp")
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


@_opcode("set")
def _set(f: Function, op: Opcode, args: list[str]) -> None:
    op.only(op.modifiers[0], op.modifiers[-2], "ftz")
    ones = {"f32": "0x3f800000u", "u32": "~0u", "s32": "~0u"}[op.modifiers[-2]]
    f.set(args[0], f"({_comparison(f, op, args[1], args[2])} ? {ones} : 0u)")


@_opcode("testp")
def _testp(f: Function, op: Opcode, args: list[str]) -> None:
    functions = {"infinite": "std::isinf", "finite": "std::isfinite", "notanumber": "std::isnan"}
    functions |= {"number": "!std::isnan", "normal": "std::isnormal"}
    op.only(*functions)
    f.set(args[0], f"{functions[op.modifiers[0]]}({f.get(op.type, args[1])})")


INTEGER_ROUNDING = ("rni", "rzi", "rmi", "rpi")


@_opcode("cvt")
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
