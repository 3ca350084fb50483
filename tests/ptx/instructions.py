"""The C++ of control, memory, barriers, copies and warps: calls of memory.h and machine.h."""

from __future__ import annotations

import re

from function import CPP, Function
from opcodes import Opcode, opcode
from parse import WIDTH, UnknownPtx

ORDERS = {
    name: f"k{name.title()}" for name in ("weak", "relaxed", "acquire", "release", "volatile")
}
ORDERS |= {"acq_rel": "kAcqRel", "sc": "kSeqCst"}
SCOPES = {"cta": "kCta", "cluster": "kCluster", "gpu": "kGpu", "sys": "kSys"}
# Hints of caches, which change no result.
HINTS = re.compile(r"nc|ca|cg|cs|cv|lu|wb|wt|(L1|L2)::\w+")
SPACES = ("param", "global", "shared", "const", "local")


# ---- control


@opcode("bra")
def _bra(f: Function, op: Opcode, args: list[str]) -> None:
    op.only("uni")
    f.emit(f.jump(args[0]))


@opcode("brx")
def _brx(f: Function, op: Opcode, args: list[str]) -> None:
    op.only("idx", "uni")
    f.emit(f"switch ((u32){f.value(args[0])}) {{ @TABLE {args[1]}@ }}")


@opcode("ret", "exit")
def _ret(f: Function, op: Opcode, args: list[str]) -> None:
    op.only("uni")
    f.emit("return;")


@opcode("trap")
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


def _begin_values(f: Function, type_: str, registers: list[str]) -> None:
    """Opens a scope in which v has the registers' values."""
    values = ", ".join(f.get(f"b{WIDTH[type_]}", register) for register in registers)
    f.emit(f"{{ const u{WIDTH[type_]} v[] = {{{values}}};")


def _set_from_values(f: Function, registers: list[str]) -> None:
    """Closes a scope in which v has what the registers get."""
    for i, register in enumerate(registers):
        f.set(register, f"v[{i}]")
    f.emit("}")


@opcode("ld", "ldu")
def _ld(f: Function, op: Opcode, args: list[str]) -> None:
    _check_access(op)
    registers, space = f.vector(args[0]), _space(op)
    num, type_, address = len(registers), _storage(op.type), f.address(args[1])
    f.emit(f"{{ {type_} v[{num}];")
    if space == "shared":
        f.note_line()
        f.emit(f"t.load_shared((u32){address}, v, {num}{_shared_order(op)});")
    elif space in ("global", "generic"):
        f.emit(f"t.memory().load(t, {address}, v, {_access(f, op, num)});")
    else:
        f.emit(f"std::memcpy(v, (const void*){address}, sizeof v);")
    _set_from_values(f, registers)
    if space in ("global", "generic") and _may_poll(op):
        f.note_line()
        f.emit("t.poll();")


@opcode("st")
def _st(f: Function, op: Opcode, args: list[str]) -> None:
    is_async = op.has("async")
    _check_access(op, *(("async", "mbarrier::complete_tx::bytes") if is_async else ()))
    registers, space, address = f.vector(args[1]), _space(op), f.address(args[0])
    num = len(registers)
    _begin_values(f, op.type, registers)
    if space == "shared":
        f.note_line()
    if is_async:
        size, barrier = WIDTH[op.type] // 8, f.address(args[2])
        f.emit(f"t.store_async((u32){address}, v, {size}, {num}, (u32){barrier}); }}")
    elif space == "shared":
        f.emit(f"t.store_shared((u32){address}, v, {num}{_shared_order(op)}); }}")
    elif space in ("global", "generic"):
        f.emit(f"t.memory().store(t, {address}, v, {_access(f, op, num)}); }}")
    else:
        f.emit(f"std::memcpy((void*){address}, v, sizeof v); }}")


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
    f.emit(f"const u64 old = t.memory().atomic(t, {address}, {_access(f, op, 1)}, update);")
    f.set(to, f"get<{type_}>(old)")
    f.emit("}")
    f.note_line()
    f.emit("t.poll();")


@opcode("atom")
def _atom(f: Function, op: Opcode, args: list[str]) -> None:
    _atomic(f, op, args[1:], args[0])


@opcode("red")
def _red(f: Function, op: Opcode, args: list[str]) -> None:
    _atomic(f, op, args, "_")


@opcode("fence")
def _fence(f: Function, op: Opcode, args: list[str]) -> None:
    if op.has("mbarrier_init") or op.has("proxy"):
        op.only("mbarrier_init", "release", "cluster", "proxy", "async", "shared::cta", "global")
        name = "fence_mbarrier_init" if op.has("mbarrier_init") else "fence_proxy"
        f.emit(f"t.memory().{name}(t, {f.line});")
        return
    op.only(*ORDERS, *SCOPES)
    order, scope = ORDERS[op.one_of(ORDERS, "acq_rel")], SCOPES[op.one_of(SCOPES, "sys")]
    f.emit(f"t.memory().fence(t, Order::{order}, Scope::{scope}, {f.line});")


@opcode("membar")
def _membar(f: Function, op: Opcode, args: list[str]) -> None:
    op.only("cta", "gl", "sys")
    scope = {"cta": "kCta", "gl": "kGpu", "sys": "kSys"}[op.type]
    f.emit(f"t.memory().fence(t, Order::kSeqCst, Scope::{scope}, {f.line});")


@opcode("cvta")
def _cvta(f: Function, op: Opcode, args: list[str]) -> None:
    op.only("to", *SPACES, "shared::cta", "shared::cluster")
    value = f.value(args[1])
    if _space(op) != "shared":  # addresses of the host
        f.set(args[0], f"(u64)({value})")
    elif op.has("to"):
        f.set(args[0], f"t.generic_to_shared({value})")
    else:
        f.set(args[0], f"t.shared_to_generic((u32){value})")


@opcode("prefetch", "prefetchu", "discard", "applypriority", "griddepcontrol", "setmaxnreg")
def _hint(f: Function, op: Opcode, args: list[str]) -> None:
    pass


@opcode("nanosleep")
def _nanosleep(f: Function, op: Opcode, args: list[str]) -> None:
    f.note_line()
    f.emit("t.poll();")


@opcode("createpolicy")
def _createpolicy(f: Function, op: Opcode, args: list[str]) -> None:
    f.set(args[0], "u64{0}")


# ---- barriers and asynchronous copies


@opcode("bar", "barrier")
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


@opcode("mbarrier")
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


@opcode("cp")
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


@opcode("mapa")
def _mapa(f: Function, op: Opcode, args: list[str]) -> None:
    op.only("shared::cluster")
    f.set(args[0], f"t.mapa((u32){f.value(args[1])}, (u32){f.value(args[2])})")


# ---- warps


@opcode("shfl")
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


@opcode("vote")
def _vote(f: Function, op: Opcode, args: list[str]) -> None:
    op.only("sync", "ballot", "any", "all", "pred", "b32")
    kind = op.one_of(("ballot", "any", "all"), "")
    function = "ballot" if kind == "ballot" else f"vote_{kind}"
    f.note_line()
    f.set(args[0], f"t.{function}({f.value(args[1])}, (u32){f.value(args[2])})")


@opcode("redux")
def _redux(f: Function, op: Opcode, args: list[str]) -> None:
    functions = {"add": "add", "min": "min", "max": "max"}
    functions |= {name: f"bit_{name}" for name in ("and", "or", "xor")}
    op.only("sync", *functions)
    function, type_ = functions[op.one_of(functions, "")], CPP[op.type]
    f.note_line()
    value, mask = f.get(op.type, args[1]), f.value(args[2])
    f.set(args[0], f"t.redux<{type_}>(&{function}<{type_}>, {value}, (u32){mask})")


@opcode("activemask")
def _activemask(f: Function, op: Opcode, args: list[str]) -> None:
    f.set(args[0], "~0u")


@opcode("ldmatrix", "stmatrix")
def _matrix(f: Function, op: Opcode, args: list[str]) -> None:
    op.only("sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta")
    is_load = op.base == "ldmatrix"
    to, source = args
    registers, address = f.vector(to if is_load else source), f.address(source if is_load else to)
    transposed = "true" if op.has("trans") else "false"
    f.note_line()
    if is_load:
        f.emit(f"{{ u32 v[{len(registers)}];")
    else:
        _begin_values(f, "b32", registers)
    f.emit(f"t.{op.base}((u32){address}, {transposed}, {len(registers)}, v);")
    _set_from_values(f, registers if is_load else [])
