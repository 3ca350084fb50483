"""One table of cases for cross-entropy's Triton kernels, compared with the CPU operators.

Run as a script with TRITON_INTERPRET=1 it works through the table on CPU tensors, and prints what
is wrong with each case as JSON; test_cross_entropy_triton.py runs the table on a GPU as well.
"""

from __future__ import annotations

import itertools
import json
import mmap
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import loss_oracle
import pytest
import torch
from torch import Tensor

import ringcomm.ops.losses.cross_entropy_cuda as launchers
from ringcomm.ops.losses.token_losses_cuda import merge_gathered

CPU: Any = torch.ops.ringcomm
# What separates two neighbours that round differently, relative to them.
ROUNDING = {torch.float32: 4e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


@dataclass(frozen=True)
class Case:
    """Logits of some tokens, and a loss over them."""

    name: str
    vocab: int
    dtype: torch.dtype = torch.bfloat16
    tokens: int = 4
    padding: int = 0  # columns behind the classes
    gap: int = 0  # elements between rows
    shift: int = 0  # elements before the first row
    values: str = "normal"
    shards: int = 1
    ignored: int | None = 1  # the token that is ignored
    ignore_index: int = -100
    has_weight: bool = False
    smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0
    scale: float = 1.0
    reduction: str = "mean"
    num_items: float | None = None
    wants_more: bool = True

    def logits(self) -> Tensor:
        torch.manual_seed(self.vocab)
        rows = torch.randn(self.tokens, self.vocab + self.padding) * 3
        if self.values == "huge":
            rows *= 3000
        elif self.values == "offset":
            rows += torch.tensor([1e4, -1e4])[torch.arange(self.tokens) % 2][:, None]
        elif self.values == "constant":
            rows[:] = 2.5
        elif self.values == "masked":
            rows[:, self.vocab // 3 :] = -torch.inf
        elif self.values == "infinite":
            rows[0] = -torch.inf
            rows[2, 0] = torch.inf
            rows[3, -1 - self.padding] = torch.nan
        if self.padding:
            rows[:, self.vocab :] = torch.nan  # seen if ever read as a class
        return rows.to(self.dtype)

    def target(self) -> Tensor:
        torch.manual_seed(self.vocab + 1)
        target = torch.randint(max(1, self.vocab // 3), [self.tokens])
        if self.tokens > 2:
            target[0], target[2] = 0, 0 if self.values == "masked" else self.vocab - 1
        if self.ignored is not None and self.tokens:
            target[self.ignored] = self.ignore_index
        return target

    def weight(self) -> Tensor | None:
        torch.manual_seed(self.vocab + 2)
        return torch.rand(self.vocab) + 0.5 if self.has_weight else None


F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
ALL: dict[str, Any] = {
    "has_weight": True,
    "smoothing": 0.1,
    "z_loss": 1e-3,
    "softcap": 7.0,
    "scale": 0.5,
}
CASES = [
    *(
        Case(f"{v}-{str(t)[6:]}", v, t)
        for v in (1, 7, 8, 129, 1000, 1025)
        for t in (F32, F16, BF16)
    ),
    *(Case(f"all-{v}-{str(t)[6:]}", v, t, **ALL) for v in (7, 129, 1025) for t in (F32, BF16)),
    Case("smoothing", 1000, F32, smoothing=0.2),
    Case("weight", 129, F32, has_weight=True),
    Case("weight-sum", 129, F16, has_weight=True, reduction="sum"),
    Case("z_loss", 1025, F32, z_loss=0.01),
    Case("softcap", 1025, F32, softcap=5.0),
    Case("scale", 1025, F32, scale=-2.0),
    Case("none", 129, F32, reduction="none", **ALL),
    Case("num_items", 129, num_items=7.5),
    Case("lean", 1025, wants_more=False),
    Case("padding", 1000, padding=31),
    Case("padding-all", 129, F32, padding=3, **ALL),
    Case("padding-vector", 8, padding=40),
    Case("gap", 129, gap=7),
    Case("gap-shift", 1025, F16, gap=2, shift=3, **ALL),
    Case("shift", 1000, F32, shift=1),
    *(Case(kind, 1025, F32, values=kind) for kind in ("huge", "offset", "constant", "masked")),
    Case("infinite", 129, F32, values="infinite"),
    Case("infinite-wide", 33_000, F32, values="infinite"),
    *(Case(f"two-reads-{str(t)[6:]}", 33_001, t, padding=5, **ALL) for t in (F32, BF16)),
    Case("two-reads-lean", 40_001, BF16, tokens=2, wants_more=False),
    Case("held-widest", 32_768, F16),
    Case("ignored-class", 129, ignore_index=5),
    Case("all-ignored", 129, F32, tokens=1, ignored=0),
    Case("no-tokens", 129, tokens=0),
    *(Case(f"shards-{n}", 1025, F32, tokens=12, shards=n, **ALL) for n in (2, 3)),
    Case("shards-masked", 1025, BF16, shards=3, values="masked"),
    Case("shards-empty", 2, F32, shards=3),
]


def close(found: Tensor, wanted: Tensor, relative: float, scale: float, what: str) -> None:
    """Within some ulp of the values, and of `scale` where they cancel."""
    torch.testing.assert_close(
        found.cpu().double(),
        wanted.double(),
        rtol=relative,
        atol=relative * scale,
        equal_nan=True,
        msg=lambda text: f"{what}: {text}",
    )


def check_stats(found: Tensor, wanted: Tensor, case: Case) -> None:
    """Without rows that have a NaN or +infinity, of which only the loss is told.

    Of merged shards the last entry has the same number of classes, and other sums.
    """
    if case.shards > 1:
        assert found[-1, 2] == wanted[-1, 2] == case.vocab
        found, wanted = found[:-1], wanted[:-1]
    indices = [stats.cpu()[:, 5].contiguous().view(torch.int32) for stats in (found, wanted)]
    is_finite = torch.isfinite(wanted[:, 1]) & ~(wanted[:, 0] == torch.inf)
    largest = wanted[:, 0].abs()
    size = float(largest[torch.isfinite(largest)].max()) if largest.isfinite().any() else 1.0
    scales = (1.0, 1.0, max(1.0, size), case.vocab * max(1.0, size), 1.0)
    for i, name in enumerate(("max", "sum", "target", "weighted", "entropy")):
        # An argument of exp is rounded before exp is taken: an ulp of a large logit is many of it.
        close(found[is_finite, i], wanted[is_finite, i], 4e-6, scales[i], name)
    assert torch.equal(indices[0][is_finite], indices[1][is_finite]), "argmax"


@dataclass
class Placed:
    """Logits in a buffer with something before, between and behind the rows."""

    case: Case
    device: str

    def __post_init__(self) -> None:
        values = self.case.logits()
        tokens, width = values.shape
        stride = width + self.case.gap
        buffer = torch.full([self.case.shift + tokens * stride + 9], 77.0, dtype=values.dtype)
        self.buffer = buffer.to(self.device)
        strides = (stride, 1)
        self.rows = self.buffer.as_strided([tokens, width], strides, self.case.shift)
        self.rows.copy_(values)

    def check_neighbours(self) -> None:
        """Nothing outside of the rows was written."""
        self.rows.fill_(77.0)
        assert bool((self.buffer == 77.0).all()), "wrote outside of the rows"


def run(case: Case, ops: Any, merge: Callable[[Tensor, int], Tensor], device: str) -> None:
    """The case by `ops` on a device and by the CPU operators; AssertionError where they differ."""
    logits, target, weight = case.logits(), case.target(), case.weight()
    numbers = None if case.num_items is None else torch.tensor(case.num_items)
    there = [None if t is None else t.to(device) for t in (target, weight)]

    def stats_of(of: Any, rows: Tensor, begin: int, size: int, given: Any) -> Tensor:
        return of.softmax_stats(
            rows, *given, begin, size, case.ignore_index, case.scale, case.softcap, True, True
        )

    wanted_stats = stats_of(CPU, logits, 0, case.vocab, (target, weight))
    placed = Placed(case, device)
    if case.shards == 1:
        stats = stats_of(ops, placed.rows, 0, case.vocab, there)
    else:
        # Uneven, the later classes first.
        step = -(-case.vocab // (case.shards - 1)) - 1
        begins = [min(i * max(1, step), case.vocab) for i in range(case.shards)] + [case.vocab]
        size = case.vocab if case.has_weight else -1
        parts = [
            stats_of(ops, placed.rows[:, begin:end], begin, size, there)
            for begin, end in reversed(list(itertools.pairwise(begins)))
        ]
        stats = merge(torch.cat(parts), case.shards)
    check_stats(stats, wanted_stats, case)

    terms = (case.vocab, case.ignore_index, case.smoothing, case.z_loss, case.reduction)
    wanted = CPU.cross_entropy_loss(wanted_stats, target, weight, numbers, *terms)
    found = ops.cross_entropy_loss(stats, *there, numbers, *terms)
    largest_lse = max([1.0, *wanted[1][1][torch.isfinite(wanted[1][1])].abs().tolist()])
    for name, a, b in zip(("loss", "tokens", "denominator"), found, wanted, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        close(a, b, 2e-6, largest_lse, name)

    grad_terms = (case.ignore_index, case.scale, case.softcap, case.smoothing, case.z_loss)
    upstreams = [torch.tensor(1.0), torch.tensor(0.25)]
    if case.reduction == "none":
        upstreams = [torch.randn(case.tokens), torch.ones(case.tokens)]
    for upstream in upstreams:
        wanted_grad = CPU.cross_entropy_grad(
            upstream, logits, target, weight, wanted_stats, wanted[2], 0, case.vocab, *grad_terms
        )
        given = (upstream.to(device), placed.rows, *there, stats, found[2])
        grad = ops.cross_entropy_grad(*given, 0, case.vocab, *grad_terms)
        assert grad.is_contiguous()
        check_grad(grad, wanted_grad, case, largest_lse)
    version = placed.rows._version
    ops.cross_entropy_grad_(*given, 0, case.vocab, *grad_terms)
    assert placed.rows._version > version
    check_grad(placed.rows, wanted_grad, case, largest_lse)
    placed.check_neighbours()
    if case.shards == 1 and case.reduction != "none":
        check_in_place(case, ops, device, numbers, largest_lse)


def check_grad(found: Tensor, wanted: Tensor, case: Case, largest_lse: float) -> None:
    """Some ulp of the elements, and of the largest where probabilities cancel."""
    finite = wanted[torch.isfinite(wanted)].float().abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    relative = ROUNDING[case.dtype]
    close(found, wanted, relative, scale * 4e-6 * largest_lse / relative, "gradient")


def check_in_place(
    case: Case, ops: Any, device: str, num_items: Tensor | None, largest_lse: float
) -> None:
    """cross_entropy_and_grad_ and scale_."""
    placed, target, weight = Placed(case, device), case.target(), case.weight()
    there = [None if t is None else t.to(device) for t in (target, weight)]
    options = (
        *(case.vocab, case.ignore_index, case.scale, case.softcap),
        *(case.smoothing, case.z_loss, case.reduction, case.wants_more),
    )
    logits = case.logits()
    wanted = CPU.cross_entropy_and_grad_(logits, target, weight, num_items, *options)
    found = ops.cross_entropy_and_grad_(placed.rows, *there, num_items, *options)
    known = slice(None) if case.wants_more else slice(2)
    close(found[0], wanted[0], 2e-6, largest_lse, "loss in place")
    close(found[1][known], wanted[1][known], 2e-6, largest_lse, "tokens in place")
    close(found[2], wanted[2], 1e-15, 1.0, "denominator in place")
    check_grad(placed.rows, logits, case, largest_lse)
    before = placed.rows.clone()
    ops.scale_(placed.rows, torch.ones([], device=device))
    torch.testing.assert_close(placed.rows, before, rtol=0, atol=0, equal_nan=True)
    ops.scale_(placed.rows, torch.full([], 0.25, dtype=torch.float64, device=device))
    check_grad(placed.rows, (before.float() * 0.25).to(before.dtype).cpu(), case, 1.0)
    placed.check_neighbours()


# ---- beside the table


def beyond_32_bits(ops: Any, device: str) -> None:
    """The last row begins 2 ** 31 elements behind the first."""
    vocab, stride = 129, 2**30
    if device == "cpu":  # three pages of it exist
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
        buffer = torch.frombuffer(mmap.mmap(-1, 5 << 30, flags=flags), dtype=BF16)
    else:
        buffer = torch.empty(5 << 29, dtype=BF16, device=device)
    rows = buffer.as_strided([3, vocab], (stride, 1))
    values = Case("", vocab, tokens=3).logits()
    rows.copy_(values)
    options = (vocab, -100, 1.0, 0.0, 0.0, 0.0, "mean", False)
    target = torch.tensor([1, 2, 3])
    wanted = CPU.cross_entropy_and_grad_(values, target, None, None, *options)
    found = ops.cross_entropy_and_grad_(rows, target.to(device), None, None, *options)
    close(found[0], wanted[0], 2e-6, 1.0, "loss")
    close(rows, values, ROUNDING[BF16], 1e-3, "gradient")


def no_class(ops: Any, device: str) -> None:
    """A target out of range: NaN for its token alone, or an error that names it."""
    logits = torch.randn(3, 20, device=device)
    target = torch.tensor([3, 20, 5], device=device)
    stats = ops.softmax_stats(logits, target, None, 0, 20, -100, 1.0, 0.0, False, False)
    terms = (20, -100, 0.0, 0.0, "none")
    _, by_token, denominator = ops.cross_entropy_loss(stats, target, None, None, *terms)
    assert by_token[0].isnan().tolist() == [False, True, False]
    upstream, options = torch.ones(3, device=device), (0, 20, -100, 1.0, 0.0, 0.0, 0.0)
    grad = ops.cross_entropy_grad(upstream, logits, target, None, stats, denominator, *options)
    assert grad.isnan().tolist() == [[False] * 20, [True] * 20, [False] * 20]
    in_place = (20, -100, 1.0, 0.0, 0.0, 0.0, "sum", False)
    rows = logits.clone()
    loss, by_token, _ = ops.cross_entropy_and_grad_(rows, target, None, None, *in_place)
    assert loss.isnan()
    assert by_token[0].isnan().tolist() == [False, True, False]
    assert rows.isnan().tolist() == grad.isnan().tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RINGCOMM_CHECK_TARGETS", "1")
        with pytest.raises(IndexError, match="target 1 is 20, and there are 20 classes"):
            ops.cross_entropy_loss(stats, target, None, None, *terms)
        with pytest.raises(IndexError, match="target 1 is 20"):
            ops.cross_entropy_and_grad_(rows, target, None, None, *in_place)
        patch.setenv("RINGCOMM_CHECK_TARGETS", "yes")
        with pytest.raises(ValueError, match="RINGCOMM_CHECK_TARGETS wants 0 or 1"):
            ops.cross_entropy_loss(stats, target, None, None, *terms)


def wrong_shards(ops: Any, device: str) -> None:
    """Shards that do not fit together, or not with the vocabulary: NaN, or an error."""
    logits, target = torch.randn(2, 20, device=device), torch.zeros(2, dtype=torch.int64).to(device)
    # First class and softcap of each shard; the size that is asked for; what is said.
    for shards, size, said in (
        (((4, 0.0),), -1, "do not add up"),
        (((0, 0.0), (0, 0.0)), -1, "do not add up"),
        (((0, 0.0), (20, 3.0)), -1, "calls differ"),
        (((0, 0.0), (20, 0.0)), 30, "40 classes of the vocabulary's 30"),
    ):
        parts = [
            ops.softmax_stats(logits, target, None, start, -1, -100, 1.0, softcap, False, False)
            for start, softcap in shards
        ]
        stats = merge_gathered(torch.cat(parts), len(parts))
        terms = (size, -100, 0.0, 0.0, "mean")
        loss, _, denominator = ops.cross_entropy_loss(stats, target, None, None, *terms)
        assert loss.isnan()
        options = (0, size, -100, 1.0, 0.0, 0.0, 0.0)
        grad = ops.cross_entropy_grad(loss, logits, target, None, stats, denominator, *options)
        assert grad.isnan().all()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RINGCOMM_CHECK_TARGETS", "1")
            with pytest.raises(ValueError, match=said):
                ops.cross_entropy_loss(stats, target, None, None, *terms)


def bad_input(ops: Any, device: str) -> None:
    """Refused as on the CPU, before anything is launched."""
    logits, target = torch.randn(2, 5, device=device), torch.zeros(2, dtype=torch.int64).to(device)
    options = (0, 5, -100, 1.0, 0.0, False, False)
    for error, rows, classes, weight in (
        (ValueError, logits.t(), target, None),
        (ValueError, logits, target[:1], None),
        (TypeError, logits, target.int(), None),
        (TypeError, logits.double(), target, None),
        (TypeError, logits, target, torch.ones(5, device=device).double()),
        (ValueError, logits, target, torch.ones(4, device=device)),
    ):
        with pytest.raises(error, match="ringcomm: "):
            ops.softmax_stats(rows, classes, weight, *options)
    stats = ops.softmax_stats(logits, target, None, *options)
    with pytest.raises(ValueError, match="stats for 2 tokens"):
        ops.cross_entropy_loss(stats[:2], target, None, None, 5, -100, 0.0, 0.0, "mean")
    with pytest.raises(ValueError, match="reduction is mean, sum or none"):
        ops.cross_entropy_loss(stats, target, None, None, 5, -100, 0.0, 0.0, "max")
    one = torch.ones([], device=device, dtype=torch.float64)
    with pytest.raises(ValueError, match="one for each of 2 tokens"):
        ops.cross_entropy_grad(
            one.expand(3), logits, target, None, stats, one, 0, 5, -100, 1.0, 0.0, 0.0, 0.0
        )


def saturated(ops: Any, device: str) -> None:
    """A softcap's gradient, also where it is many powers of ten below the largest."""
    for dtype in (F32, BF16):
        values, classes = loss_oracle.saturated_logits(dtype)
        logits, target = values.to(device, copy=True), classes.to(device)
        vocab, cap = values.shape[1], loss_oracle.SATURATED_CAP
        stats = ops.softmax_stats(logits, target, None, 0, vocab, -100, 1.0, cap, False, False)
        terms = (vocab, -100, 0.0, 0.0, "sum")
        denominator = ops.cross_entropy_loss(stats, target, None, None, *terms)[2]
        options = (0, vocab, -100, 1.0, cap, 0.0, 0.0)
        one = torch.ones([], device=device)
        grad = ops.cross_entropy_grad(one, logits, target, None, stats, denominator, *options)
        loss_oracle.assert_saturated(grad, values, classes)
        in_place = (vocab, -100, 1.0, cap, 0.0, 0.0, "sum", False)
        ops.cross_entropy_and_grad_(logits, target, None, None, *in_place)
        loss_oracle.assert_saturated(logits, values, classes)


BESIDES = (saturated, beyond_32_bits, no_class, wrong_shards, bad_input)
NAMES = [*(case.name for case in CASES), *(check.__name__ for check in BESIDES)]


def check(name: str, ops: Any, device: str) -> None:
    """One case of the table, or one check beside it, by its name."""
    for case in CASES:
        if case.name == name:
            return run(case, ops, merge_gathered, device)
    return {beside.__name__: beside for beside in BESIDES}[name](ops, device)


def check_promises() -> None:
    """The interpreter takes multiple_of's word; a GPU that gets a wrong one faults."""
    from triton.runtime.interpreter import TensorHandle

    def set_attr(handle: Any, key: str, values: list[int]) -> None:
        assert key == "tt.divisibility"
        remainders = handle.data.astype("int64") % values[0]
        assert not remainders.any(), f"no multiple of {values[0]}"

    TensorHandle.set_attr = set_attr


def main() -> None:
    """All of them under the interpreter: what is wrong, by name."""
    check_promises()
    said = {}
    for name in NAMES:
        try:
            check(name, launchers, "cpu")
            said[name] = ""
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    json.dump(said, sys.stdout)


if __name__ == "__main__":
    main()
