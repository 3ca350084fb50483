"""Cases for weight updates, on the CPU and by the Triton kernels, compared with update_oracle.py.

Run as a script with TRITON_INTERPRET=1 it works through them by the kernels on CPU tensors, and
prints what is wrong with each as JSON; test_triton.py runs them on a GPU as well.
"""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import update_oracle as oracle
from torch import Tensor
from triton_scripts import interpret
from update_oracle import BF16, FP16, FP32, Step

import ringcomm.ops.updates.weight_update_cuda as launchers
from ringcomm.ops import triton_kernels as plans

CANONICAL_NAN = 0x7FC0  # of bfloat16
# Powers of two and their sums: of integers every sum and product is exact.
PLAIN = Step(lr=0.5, weight_decay=0.5, scale=2.0)

RANDOM = dataclasses.replace(PLAIN, rounding_seed=(7 << 35) + 123)
CLIPPED = dataclasses.replace(PLAIN, clip_value=3.0)
RANDOM_CLIPPED = dataclasses.replace(RANDOM, clip_value=3.0)


@dataclass(frozen=True)
class Case:
    """A weight of some shape, its gradient or what that is made of, and a step."""

    name: str
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype = BF16
    grad_dtype: torch.dtype = BF16
    step: Step = PLAIN
    is_split: bool = False
    shift: int = 0  # elements between a 16-byte boundary and the weight
    num_tokens: int = 0
    strided: bool = False  # operands are parts of wider rows; a gradient has other strides
    is_special: bool = False  # every pair of infinities, NaN and numbers at the ends of types
    machine: plans.Machine = field(default=plans.Machine(True, 132))
    padding_idx: int = -1
    index_dtype: torch.dtype = torch.int64


def named(op: str, shape: tuple[int, ...], **more: Any) -> Iterator[Case]:
    """Every kind of numbers."""
    size = "x".join(map(str, shape)) + "".join(f"-{key}" for key in more)
    for dtype, grad_dtype, step, is_split in (
        (FP32, FP32, CLIPPED, False),
        (FP32, BF16, PLAIN, False),
        (FP16, FP16, CLIPPED, False),
        (BF16, FP16, CLIPPED, False),
        (BF16, BF16, PLAIN, False),
        (BF16, BF16, RANDOM, False),
        (BF16, FP32, RANDOM_CLIPPED, False),
        (BF16, BF16, CLIPPED, True),
        (BF16, FP32, PLAIN, True),
    ):
        said = "split" if is_split else "random" if step.rounding_seed >= 0 else "nearest"
        clipped = "-clipped" if step.clip_value else ""
        name = f"{op}-{size}-{str(dtype)[6:]}-{str(grad_dtype)[6:]}-{said}{clipped}"
        yield Case(name, op, shape, dtype, grad_dtype, step, is_split, **more)


SPECIAL = [0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan, 3e38, -6e4, 1e-40, 65519.0]
FAR = dataclasses.replace(RANDOM, first_elem=(5 << 32) - 7)
ADDRESSED = plans.Machine(False, 132)
CASES = [
    *named("sgd", (2500,)),
    *named("sgd", (len(SPECIAL) ** 2,), is_special=True),
    *(Case(f"sgd-{n}", "sgd", (n,), step=RANDOM, shift=n % 5) for n in (0, 1, 7, 2048, 2051)),
    Case("sgd-scalar", "sgd", (), FP32),
    Case("sgd-4d", "sgd", (4, 6, 5, 3), strided=True, is_split=True),
    Case("sgd-shift-split", "sgd", (300, 7), is_split=True, shift=3),
    Case("sgd-transposed", "sgd", (40, 70), FP32, step=PLAIN, strided=True),
    Case("sgd-far", "sgd", (2050,), step=FAR, shift=1),
    *named("linear", (70, 72), num_tokens=33),
    *list(named("linear", (70, 72), num_tokens=70, machine=ADDRESSED))[::3],
    *(
        Case(f"linear-{kind}-tile-{sms}", "linear", (140, 270), step=RANDOM, num_tokens=37,
             machine=plans.Machine(kind == "described", sms))
        for kind in ("described", "addressed") for sms in (1, 4)
    ),
    Case("linear-ragged", "linear", (5, 7), FP32, step=CLIPPED, num_tokens=3),
    Case("linear-one", "linear", (1, 1), step=RANDOM, num_tokens=1),
    Case("linear-no-tokens", "linear", (9, 16), step=RANDOM),
    Case("linear-no-tokens-plain", "linear", (9, 16)),
    Case("linear-strided", "linear", (24, 40), step=RANDOM, num_tokens=20, strided=True),
    Case("linear-empty", "linear", (0, 8), step=RANDOM, num_tokens=3),
    *named("embedding", (11, 1030), num_tokens=60),
    Case("embedding-undecayed", "embedding", (50, 33), step=Step(lr=0.5), num_tokens=70,
         padding_idx=4),
    Case("embedding-undecayed-random", "embedding", (50, 33), num_tokens=20, padding_idx=0,
         step=dataclasses.replace(RANDOM_CLIPPED, weight_decay=0.0), index_dtype=torch.int32),
    Case("embedding-padded", "embedding", (9, 16), step=CLIPPED, num_tokens=70, padding_idx=4,
         index_dtype=torch.int32, is_split=True),
    Case("embedding-no-tokens", "embedding", (9, 16), step=RANDOM),
    *named("adalomo", (70, 300)),
    Case("adalomo-row", "adalomo", (1, 1001), step=FAR, strided=True),
    Case("adalomo-empty", "adalomo", (0, 5)),
]  # fmt: skip


# ---- what a case is made of


def numbers(seed: int, shape: tuple[int, ...], dtype: torch.dtype, is_whole: bool) -> Tensor:
    """Integers, or what is normally distributed with an infinity and a NaN in it."""
    generator = torch.Generator().manual_seed(seed)
    if is_whole:
        return torch.randint(-3, 4, shape, generator=generator).to(dtype)
    values = torch.randn(shape, generator=generator)
    if values.numel() > 50:
        for i, value in enumerate((torch.inf, -torch.inf, torch.nan, 0.0)):
            values.view(-1)[seed + 7 * i] = value
    return values.to(dtype)


def in_wider_rows(rows: Tensor) -> Tensor:
    """The same values as the middle of rows that have 16 elements more."""
    wide = torch.full([rows.shape[0], rows.shape[1] + 16], torch.nan, dtype=rows.dtype)
    wide[:, 8:-8] = rows
    return wide[:, 8:-8]


class Placed:
    """A weight, and its low, in buffers with something before and behind."""

    def __init__(self, case: Case, device: str) -> None:
        values = numbers(1, case.shape, case.dtype, is_whole=case.op == "linear")
        if case.is_special:
            values = torch.tensor(SPECIAL).repeat_interleave(len(SPECIAL)).to(case.dtype)
        if case.op in ("embedding", "adalomo"):
            values = values.nan_to_num(1.0, 2.0, 3.0)
        low = None
        if case.is_split:
            low = torch.randint(-(2**15), 2**15, case.shape).to(torch.int16)
        self.weight = self._place(values, case, device, 77)
        self.low = None if low is None else self._place(low, case, device, 77)
        self.outside: list[Tensor]

    def _place(self, values: Tensor, case: Case, device: str, filler: int) -> Tensor:
        num_elems = values.numel()
        buffer = torch.full([num_elems + case.shift + 9], filler, dtype=values.dtype).to(device)
        self.outside = [*getattr(self, "outside", []), buffer[: case.shift], buffer[-9:]]
        flat = buffer[case.shift : case.shift + num_elems]
        flat.copy_(values.reshape(-1))
        shape = case.shape
        if case.strided and case.op == "sgd":
            return flat.view(shape[::-1]).permute(*reversed(range(len(shape))))
        return flat.view(shape)

    def check(self, wanted: tuple[Tensor, Tensor | None]) -> None:
        """The bits that are wanted, and the same as ever outside."""
        for found, new in zip((self.weight, self.low), wanted, strict=True):
            if found is None or new is None:
                assert found is new is None
                continue
            torch.testing.assert_close(found.cpu(), new, rtol=0, atol=0, equal_nan=True)
            if found.dtype == BF16:
                is_nan = found.isnan().cpu()
                assert bool((found.cpu().view(torch.int16)[is_nan] == CANONICAL_NAN).all())
        assert all(bool((outside == 77).all()) for outside in self.outside)


def shape_of(case: Case) -> tuple[int, int]:
    rows, cols = case.shape
    return rows, cols


# ---- the operators


def run(case: Case, ops: Any, device: str) -> None:
    """AssertionError where the case's result is another than the oracle's."""
    placed, step = Placed(case, device), case.step
    given = (step.lr, step.weight_decay, step.scale, step.rounding_seed)
    options = {"low": placed.low, "clip_value": step.clip_value}
    before = [t if t is None else t.cpu() for t in (placed.weight, placed.low)]
    assert before[0] is not None
    version = placed.weight._version
    if case.op == "sgd":
        grad = numbers(2, case.shape, case.grad_dtype, is_whole=False)
        if case.is_special:
            grad = torch.tensor(SPECIAL).repeat(len(SPECIAL)).to(case.grad_dtype)
        wanted = oracle.sgd(before[0], grad, step, before[1])
        there = grad.to(device)
        ops.sgd_update_(placed.weight, there, *given, first_elem=step.first_elem, **options)
    elif case.op == "linear":
        wanted = run_linear(case, ops, device, placed, given, options)
    elif case.op == "embedding":
        wanted = run_embedding(case, ops, device, placed, given, options)
    else:
        wanted = run_adalomo(case, ops, device, placed)
    placed.check(wanted)
    assert placed.weight._version > version


def run_linear(
    case: Case, ops: Any, device: str, placed: Placed, given: Any, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    num_out, num_in = shape_of(case)
    x = numbers(3, (case.num_tokens, num_in), case.grad_dtype, is_whole=True)
    grad_out = numbers(4, (case.num_tokens, num_out), case.grad_dtype, is_whole=True)
    before = [t if t is None else t.cpu() for t in (placed.weight, placed.low)]
    assert before[0] is not None
    wanted = oracle.sgd(
        before[0], oracle.linear_gradient(x, grad_out).float(), case.step, before[1]
    )
    if case.strided:
        x, grad_out = in_wider_rows(x), in_wider_rows(grad_out)
    with pytest.MonkeyPatch.context() as patch:
        real = case.machine if device == "cpu" else plans.machine_of(placed.weight.device)
        has_descriptors = case.machine.has_descriptors and real.has_descriptors
        machine = plans.Machine(has_descriptors, case.machine.num_sms)
        patch.setattr(plans, "machine_of", lambda device: machine)
        ops.linear_sgd_update_(placed.weight, x.to(device), grad_out.to(device), *given, **options)
    return wanted


def run_embedding(
    case: Case, ops: Any, device: str, placed: Placed, given: Any, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Some rows by many tokens, some by none."""
    num_rows, width = shape_of(case)
    torch.manual_seed(5)
    ids = (torch.rand(2, case.num_tokens // 2) ** 2 * num_rows).to(case.index_dtype)
    grad_out = torch.randn(*ids.shape, width).to(case.grad_dtype)
    before = [t if t is None else t.cpu() for t in (placed.weight, placed.low)]
    assert before[0] is not None
    dense = oracle.embedding_gradient(num_rows, ids, grad_out, case.padding_idx)
    wanted = oracle.sgd(before[0], dense, case.step, before[1])
    options = {**options, "padding_idx": case.padding_idx}
    there = (ids.to(device), grad_out.to(device))
    ops.embedding_sgd_update_(placed.weight, *there, *given, **options)
    return wanted


def run_adalomo(case: Case, ops: Any, device: str, placed: Placed) -> tuple[Tensor, Tensor | None]:
    """The sums within 1e-6, the update to the last bit."""
    step, (num_rows, num_cols) = case.step, shape_of(case)
    torch.manual_seed(6)
    grad = torch.randn(num_cols, num_rows).t() if case.strided else torch.randn(case.shape)
    grad = grad.to(case.grad_dtype)
    factors = torch.rand(num_rows), torch.rand(num_cols)
    weight = oracle.to_fp32(placed.weight, placed.low).copy()
    g = step.gradient(grad.float().numpy())
    u = g * factors[0].numpy()[:, None] * factors[1].numpy()
    options = {"low": placed.low, "clip_value": step.clip_value}

    sums = ops.square_sums(grad.to(device), step.scale, clip_value=step.clip_value)
    for found, axis in zip(sums, (1, 0), strict=True):
        close_sums(found, (g.astype(np.float64) ** 2).sum(axis))
    there = (grad.to(device), *(factor.to(device) for factor in factors))
    squares = ops.adalomo_squares(placed.weight, *there, step.scale, **options)
    wanted_squares = [(values.astype(np.float64) ** 2).sum() for values in (u, weight)]
    close_sums(squares, np.array(wanted_squares))

    size, decay = 0.3, 0.9
    step_and_decay = torch.tensor([size, decay], device=device)
    options["first_elem"] = step.first_elem
    given = (*there, step_and_decay, step.scale, step.rounding_seed)
    ops.adalomo_update_(placed.weight, *given, **options)
    new = oracle.exact_fma(
        u.reshape(-1), np.full(u.size, -size, np.float32), weight * np.float32(decay)
    )
    values, low = oracle.rounded(
        new,
        case.dtype,
        seed=step.rounding_seed,
        is_split=case.is_split,
        first_elem=step.first_elem,
    )
    return values.view(case.shape), None if low is None else low.view(case.shape)


def close_sums(found: Tensor, wanted: np.ndarray) -> None:
    assert found.dtype == FP32
    np.testing.assert_allclose(found.cpu().double().numpy(), wanted, rtol=1e-6)


# ---- beside the table


def beyond_32_bits(ops: Any, device: str) -> None:
    """A row that begins more than 2 ** 31 elements behind the first."""
    num_rows, width = 2**21 + 3, 1032
    if device == "cpu":  # some pages of it exist
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
        memory = mmap.mmap(-1, 2 * num_rows * width, flags=flags)
        weight = torch.frombuffer(memory, dtype=BF16).view(num_rows, width)
    else:
        weight = torch.zeros(num_rows, width, dtype=BF16, device=device)
    grad_out = numbers(1, (3, width), BF16, is_whole=True)
    ids = torch.tensor([num_rows - 1, 0, num_rows - 1])
    step = Step(lr=0.3, rounding_seed=5)
    given = (step.lr, step.weight_decay, step.scale, step.rounding_seed)
    ops.embedding_sgd_update_(weight, ids.to(device), grad_out.to(device), *given)
    last = dataclasses.replace(step, first_elem=(num_rows - 1) * width)
    for row, grad, of_row in ((0, grad_out[1], step), (-1, grad_out[0] + grad_out[2], last)):
        wanted, _ = oracle.sgd(torch.zeros(width, dtype=BF16), grad, of_row)
        assert torch.equal(weight[row].cpu(), wanted)
    assert not weight[num_rows - 2].any()


def ids_out_of_range(ops: Any, device: str) -> None:
    """They are left out, and write nowhere."""
    buffer = torch.ones(6, 16, device=device)
    ids = torch.tensor([-1, 0, 4, 2**40], device=device)
    grad_out = torch.ones(4, 16, device=device)
    for weight_decay in (0.0, 0.5):
        ops.embedding_sgd_update_(buffer[1:5], ids, grad_out, 1.0, weight_decay, 1.0)
    wanted = torch.ones(6, 16)
    wanted[1:5] *= 0.5
    wanted[1] = -1.0
    assert torch.equal(buffer.cpu(), wanted)


BESIDES = (beyond_32_bits, ids_out_of_range)
NAMES = [*(case.name for case in CASES), *(check.__name__ for check in BESIDES)]
# The interpreter rounds a product before it adds, so that it overflows too early.
INTERPRETED = [name for name in NAMES if "special" not in name]


def check(name: str, ops: Any, device: str) -> None:
    """One case of the table, or one check beside it, by its name."""
    for case in CASES:
        if case.name == name:
            return run(case, ops, device)
    return {beside.__name__: beside for beside in BESIDES}[name](ops, device)


if __name__ == "__main__":
    interpret(INTERPRETED, lambda name: check(name, launchers, "cpu"))
