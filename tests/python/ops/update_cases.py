"""Cases for weight updates, on the CPU and by the Triton kernels, compared with update_oracle.py.

Run as a script it works through them by the kernels' PTX on CPU tensors, and prints what is wrong
with each as JSON (triton_scripts.py); test_triton.py runs them on a GPU as well.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import update_oracle as oracle
from torch import Tensor
from triton_scripts import work_through
from update_oracle import BF16, FP16, FP32, Step

import ringcomm.ops.weight_update_cuda as launchers
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
    rows_at_a_time: int = 0  # of a product; 0: as the plan says
    padding_idx: int = -1
    index_dtype: torch.dtype = torch.int64

    @property
    def num_elems(self) -> int:
        """Of the weight."""
        return math.prod(self.shape)


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
CASES = [
    *named("sgd", (2500,)),
    *named("sgd", (len(SPECIAL) ** 2,), is_special=True),
    *(Case(f"sgd-{n}", "sgd", (n,), step=RANDOM, shift=n % 5) for n in (0, 1, 7, 2048, 2051)),
    Case("sgd-scalar", "sgd", (), FP32),
    Case("sgd-4d", "sgd", (4, 6, 5, 3), strided=True, is_split=True),
    # A whole block of a kernel between two partial ones, its gradient at other vectors' places.
    Case("sgd-far-from-a-vector", "sgd", (5000,), shift=3),
    Case("sgd-shift-split", "sgd", (300, 7), is_split=True, shift=3),
    Case("sgd-transposed", "sgd", (40, 70), FP32, step=PLAIN, strided=True),
    Case("sgd-far", "sgd", (2050,), step=FAR, shift=1),
    *named("linear", (70, 72), num_tokens=33),
    *named("linear", (70, 72), num_tokens=33, rows_at_a_time=16),
    *(
        Case(f"linear-odd-{rows}", "linear", (140, 271), step=RANDOM, num_tokens=37,
             rows_at_a_time=rows)
        for rows in (1, 139, 200)
    ),
    Case("linear-odd-split", "linear", (37, 7), is_split=True, num_tokens=5, rows_at_a_time=8,
         shift=3),
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
    Case("adalomo-bands", "adalomo", (300, 260), step=FAR),
    Case("adalomo-long", "adalomo", (1, 1_100_000), step=FAR),
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


def placed(values: Tensor, case: Case, device: str) -> tuple[Tensor, Tensor]:
    """Values of a weight in a buffer of 77s, and the buffer."""
    num_elems, shape = values.numel(), case.shape
    buffer = torch.full([num_elems + case.shift + 9], 77, dtype=values.dtype).to(device)
    flat = buffer[case.shift : case.shift + num_elems]
    flat.copy_(values.reshape(-1))
    if case.strided and case.op == "sgd":
        return flat.view(shape[::-1]).permute(*reversed(range(len(shape)))), buffer
    return flat.view(shape), buffer


def weight_of(case: Case) -> Tensor:
    values = numbers(1, case.shape, case.dtype, is_whole=case.op == "linear")
    if case.is_special:
        values = torch.tensor(SPECIAL).repeat_interleave(len(SPECIAL)).to(case.dtype)
    if case.op in ("embedding", "adalomo"):
        values = values.nan_to_num(1.0, 2.0, 3.0)
    return values


def check_written(found: Tensor, new: Tensor, buffer: Tensor) -> None:
    """The bits that are wanted, and nothing else in the buffer."""
    torch.testing.assert_close(found.cpu(), new, rtol=0, atol=0, equal_nan=True)
    if found.dtype == BF16:
        is_nan = found.isnan().cpu()
        assert bool((found.cpu().view(torch.int16)[is_nan] == CANONICAL_NAN).all())
    found.fill_(77)
    assert bool((buffer == 77).all())


# ---- the operators

Wanted = tuple[Tensor, Tensor | None]


def run(case: Case, ops: Any, device: str) -> None:
    """AssertionError where the case's result is another than the oracle's."""
    weight, buffer = placed(weight_of(case), case, device)
    low = low_buffer = None
    if case.is_split:
        bits = torch.randint(-(2**15), 2**15, case.shape).to(torch.int16)
        low, low_buffer = placed(bits, case, device)
    before = weight.cpu().clone(), None if low is None else low.cpu().clone()
    version = weight._version
    update = {"sgd": run_sgd, "linear": run_linear, "embedding": run_embedding}.get(case.op)
    step = case.step
    if update is None:
        new, new_low = run_adalomo(case, ops, weight, low)
    else:
        given = (step.lr, step.weight_decay, step.scale, step.rounding_seed)
        options = {"low": low, "clip_value": step.clip_value}
        grad = update(case, ops, weight, given, options)
        new, new_low = oracle.sgd(before[0], grad, step, before[1])
    assert weight._version > version
    check_written(weight, new, buffer)
    if low is not None and new_low is not None and low_buffer is not None:
        check_written(low, new_low, low_buffer)


def run_sgd(case: Case, ops: Any, weight: Tensor, given: Any, options: dict[str, Any]) -> Tensor:
    """This and the others return the gradient that they have used."""
    grad = numbers(2, case.shape, case.grad_dtype, is_whole=False)
    if case.is_special:
        grad = torch.tensor(SPECIAL).repeat(len(SPECIAL)).to(case.grad_dtype)
    first_elem = case.step.first_elem
    ops.sgd_update_(weight, grad.to(weight.device), *given, first_elem=first_elem, **options)
    return grad


def run_linear(case: Case, ops: Any, weight: Tensor, given: Any, options: dict[str, Any]) -> Tensor:
    num_out, num_in = case.shape
    x = numbers(3, (case.num_tokens, num_in), case.grad_dtype, is_whole=True)
    grad_out = numbers(4, (case.num_tokens, num_out), case.grad_dtype, is_whole=True)
    grad = oracle.linear_gradient(x, grad_out).float()
    if case.strided:
        x, grad_out = in_wider_rows(x), in_wider_rows(grad_out)
    with pytest.MonkeyPatch.context() as patch:
        if case.rows_at_a_time:
            patch.setattr(plans, "rows_per_product", lambda *shape: case.rows_at_a_time)
            patch.setattr(plans, "WHOLE_BYTES", -1)
        there = (x.to(weight.device), grad_out.to(weight.device))
        ops.linear_sgd_update_(weight, *there, *given, **options)
    return grad


def run_embedding(
    case: Case, ops: Any, weight: Tensor, given: Any, options: dict[str, Any]
) -> Tensor:
    """Some rows by many tokens, some by none."""
    num_rows, width = case.shape
    torch.manual_seed(5)
    ids = (torch.rand(2, case.num_tokens // 2) ** 2 * num_rows).to(case.index_dtype)
    grad_out = torch.randn(*ids.shape, width).to(case.grad_dtype)
    there = (ids.to(weight.device), grad_out.to(weight.device))
    options["padding_idx"] = case.padding_idx
    ops.embedding_sgd_update_(weight, *there, *given, **options)
    return oracle.embedding_gradient(num_rows, ids, grad_out, case.padding_idx)


def run_adalomo(case: Case, ops: Any, weight: Tensor, low: Tensor | None) -> Wanted:
    """The sums and moments within 1e-6, the update to the last bit."""
    step, (num_rows, num_cols) = case.step, case.shape
    torch.manual_seed(6)
    grad = torch.randn(num_cols, num_rows).t() if case.strided else torch.randn(case.shape)
    row, factor = torch.rand(num_rows) + 0.1, torch.rand(num_cols)
    mean = torch.tensor([0.25, 0.5, 0.1], dtype=torch.float64)
    values = oracle.to_fp32(weight, low).copy()
    grad = grad.to(case.grad_dtype)
    g = step.gradient(grad.float().numpy())
    scales = 1 / np.sqrt(row.numpy() / np.float32(mean.sum().item()))
    has_rows = num_rows != 1
    u = (g * scales[:, None] if has_rows else g) * factor.numpy()
    device = weight.device
    own = (grad, row if has_rows else None, factor, mean)
    there = [None if tensor is None else tensor.to(device) for tensor in own]
    options: dict[str, Any] = {"clip_value": step.clip_value}
    sums = ops.square_sums(there[0], step.scale, **options)
    options["low"] = low
    squares = ops.adalomo_squares(weight, *there, step.scale, **options)
    wide = g.astype(np.float64) ** 2
    both = np.array([(v.astype(np.float64) ** 2).sum() for v in (u, values)])
    wanted = [(sums[0].sum(0), wide.sum(1)), (sums[1].sum(0), wide.sum(0)), (squares.sum(1), both)]
    wanted += run_moments(case, ops, sums, has_rows=has_rows)
    for found, exact in wanted:
        np.testing.assert_allclose(found.cpu().double().numpy(), exact, rtol=1e-6)
    # Decided in fp32: RMS of 2 and 0.5, or the least and no clipping.
    is_small = step.clip_value is None
    parts = torch.zeros(2, max(3, squares.shape[1]), dtype=torch.float64)
    parts[:, :2] = torch.tensor([[0.75, 1.0], [0.0625, 0.03125]])
    parts[:, -1] = torch.tensor([0.25, 0.03125])
    numbers = (0.3, 0.2, 0.75 if is_small else 0.1, 4.0 if is_small else 0.75)
    given = (*there, (parts * 2 * case.num_elems).to(device), case.num_elems, *numbers, step.scale)
    options["first_elem"] = step.first_elem
    ops.adalomo_update_(weight, *given, step.rounding_seed, **options)
    lr, weight_decay, least, threshold = (np.float32(number) for number in numbers)
    size = np.array([lr * max(np.float32(0.5), least)], np.float32)
    sizes = size / max(np.float32(2) / threshold, np.float32(1))
    decay = oracle.exact_fma(-size, np.array([weight_decay]), np.ones(1, np.float32))
    new = oracle.exact_fma(u.reshape(-1), np.repeat(-sizes, u.size), values * decay)
    seed, first = step.rounding_seed, step.first_elem
    high, rest = oracle.rounded(
        new, case.dtype, seed=seed, is_split=case.is_split, first_elem=first
    )
    return high.view(case.shape), None if rest is None else rest.view(case.shape)


def run_moments(
    case: Case, ops: Any, sums: tuple[Tensor, Tensor], *, has_rows: bool
) -> list[tuple[Tensor, np.ndarray]]:
    """What is found of moments, factors and the mean, and what they are in float64."""
    share = 0.7 if case.step.clip_value is None else 0.3
    moments = [torch.rand(size) for size in case.shape]
    wanted = []
    for moment, part, num_each in zip(moments, sums, reversed(case.shape), strict=True):
        mean = part.cpu().double().sum(0) / num_each + 1e-3
        wanted.append((moment.double() * (1 - share) + share * mean).numpy())
    row, col = (moment.to(sums[0].device) for moment in moments)
    factor, mean = ops.adalomo_moments_(row if has_rows else None, col, *sums, share, 1e-3)
    found = [(col, wanted[1]), (factor, wanted[1] ** -0.5)]
    if has_rows and case.shape[0]:
        found += [(row, wanted[0]), (mean.sum(), wanted[0].mean())]
    return found


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


def product_under_autocast(ops: Any, device: str) -> None:
    """It stays in the weight's dtype: float16 has infinity for it."""
    weight = torch.zeros(40, 48, dtype=BF16, device=device)
    x, grad_out = (torch.full([3, n], 1024.0, dtype=BF16, device=device) for n in (48, 40))
    with torch.autocast(device, FP16):
        ops.linear_sgd_update_(weight, x, grad_out, 1.0, 0.0, 1.0, 7)
    assert bool((weight == -3 * 2.0**20).all())


BESIDES = (beyond_32_bits, ids_out_of_range, product_under_autocast)
NAMES = [*(case.name for case in CASES), *(check.__name__ for check in BESIDES)]


def check(name: str, ops: Any, device: str) -> None:
    """One case of the table, or one check beside it, by its name."""
    for case in CASES:
        if case.name == name:
            return run(case, ops, device)
    return {beside.__name__: beside for beside in BESIDES}[name](ops, device)


def check_by_name(name: str) -> None:
    """A case on CPU tensors, by the launchers of GPUs."""
    check(name, launchers, "cpu")


def main() -> None:
    work_through(check_by_name, NAMES)


if __name__ == "__main__":
    main()
