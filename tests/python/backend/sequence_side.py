"""A rank's side of a call in a sequence: its tensors, and what they must hold after.

Inputs are integers from a table that all ranks have, so that each rank knows what every rank gave.
The model is numpy's, in 64 bits, and shares no code with what is tested.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import ringcomm

Array = Any  # numpy's, of int64
CPU = torch.device("cpu")

UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
INTS = (*UNSIGNED, "int8", "int16", "int32", "int64")
FLOATS = ("float32", "bfloat16", "float16", "float64")
COMPLEX = ("complex64", "complex128")
REDUCED = (*FLOATS, *INTS, "bool", *COMPLEX)
MOVED = (*REDUCED, "float8_e5m2", "float8_e4m3fn")
NUMBER_OPS = ("sum", "avg", "max", "min", "product", "premul_sum")
BIT_OPS = ("band", "bor", "bxor")

# What a tensor is besides a plain one.
MAKES = ("", "", "parameter", "inference", "subclass", "lazy clone")

# Small enough for products of four and for float8; never 0, which would hide a product's errors.
_TABLE = np.random.default_rng(3).choice(np.array([-2, -1, 1, 2], dtype=np.int8), 3 << 20)
_FUNCTIONS = {
    "sum": np.add,
    "avg": np.add,
    "premul_sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


def ops_of(dtype: str) -> tuple[str, ...]:
    """What ringcomm reduces elements of the type with."""
    if dtype == "bool":
        return ("sum", "max", "min", "product", *BIT_OPS)
    if dtype in COMPLEX:
        return ("sum", "avg", "premul_sum")
    return NUMBER_OPS + BIT_OPS if dtype in INTS else NUMBER_OPS


@dataclass(frozen=True)
class Call:
    """What is equal on all ranks; whatever else a rank chooses, it draws from `variety`.

    Attributes:
        kind: a key of KINDS.
        group: index into the groups of the pool; -1 is the group of the case itself.
        size: elements of a rank's tensor, or of its share.
        uneven: 0 gives every share that size; another number draws sizes from it.
        root: rank in the group, modulo its size: root, or receiver.
        wait: 0 for a synchronous call; else how many more calls are made before the wait.
        variety: 0 for contiguous tensors on the heap and no delays.
    """

    kind: str
    group: int = 0
    dtype: str = "float32"
    op: str = "sum"
    size: int = 1
    uneven: int = 0
    root: int = 0
    wait: int = 0
    variety: int = 0


@dataclass
class Expectation:
    """A tensor with all memory around it, and what it must be when the call is over."""

    base: Tensor
    expected: Tensor


def _layout(name: str, base: Tensor, num_elems: int) -> Tensor:
    if name == "offset":
        return base[1 : num_elems + 1]
    if name == "strided":
        return base[1::2][:num_elems]
    if name == "transposed" and num_elems % 3 == 0:
        return base[:num_elems].view(3, -1).t()
    if name == "columns" and num_elems % 3 == 0:
        return base[: 2 * num_elems].view(-1, 6)[:, :3]
    return base[:num_elems]


class Sub(Tensor):
    """A subclass whose operators are torch's."""


@dataclass
class Side:
    """A rank's side of a call.

    Attributes:
        number: of the call; equal on all ranks, and of no other call of the pool.
        rank: in the group.
        members: the global rank of each of the group's.
        group: None is the default group.
        marks: for barriers: one number for each global rank, in memory that all have.
        is_swapped: the model takes the values of ranks 0 and 1 for each other's (a check of it).
        device: of the tensors.
        empty: makes tensors, but those of empty_shared() on CPUs.
    """

    call: Call
    number: int
    rank: int
    members: Sequence[int]
    group: Any
    marks: Array
    is_swapped: bool = False
    device: torch.device = CPU
    empty: Callable[..., Tensor] = torch.empty
    expectations: list[Expectation] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    checks: list[Callable[[], None]] = field(default_factory=list)
    # Of lazy clones: what they share memory with until one is written.
    origins: list[Expectation] = field(default_factory=list)

    def __post_init__(self) -> None:
        call = self.call
        self.n = len(self.members)
        self.root = call.root % self.n
        self.is_root = self.rank == self.root
        self.dtype: torch.dtype = getattr(torch, call.dtype)
        self.is_async = call.wait > 0
        self.common = random.Random(f"{call.variety} {call.uneven}")
        self.own_random = random.Random(f"{call.variety} {self.rank}")
        self.has_layouts = call.variety > 0 and self.common.random() < 0.5
        # All, some or no tensors in memory of empty_shared(): all takes the direct paths.
        self.shared_share = self.common.choice([0.0, 0.5, 1.0]) if call.variety > 0 else 0.0
        self.is_in_place = call.variety > 0 and self.common.random() < 0.3

    # ---- values

    def value(self, rank: int, num_elems: int, slot: int = 0) -> Array:
        """What a rank gives, as it is."""
        span = len(_TABLE) - num_elems
        begin = (self.number * 7919 + rank * 104_729 + slot * 1_299_709) % max(1, span)
        values = _TABLE[begin : begin + num_elems].astype(np.int64)
        if self.call.dtype == "bool":
            return (values > 0).astype(np.int64)
        if self.call.dtype in UNSIGNED:
            return values & 255
        is_float = self.call.dtype in (*FLOATS, *COMPLEX)
        if is_float and self.call.op == "avg":
            return values * self.n
        return values * 2 if is_float and self.call.op == "premul_sum" else values

    def model(self, rank: int, num_elems: int, slot: int = 0) -> Array:
        """What the model thinks that a rank gives."""
        if self.is_swapped and rank < 2:
            rank = 1 - rank
        return self.value(rank, num_elems, slot)

    def factor(self, rank: int) -> float:
        """Of premul_sum. The product of it and a value is whole."""
        is_whole = self.call.dtype in INTS
        return ([3.0, -2.0, 1.0, -1.0] if is_whole else [0.5, 2.0, -1.0, 4.0])[rank % 4]

    def reduced(self, num_elems: int, slot: int = 0) -> Array:
        op = self.call.op
        arrays = [self.model(rank, num_elems, slot) for rank in range(self.n)]
        if op == "premul_sum":
            arrays = [
                (array * self.factor(rank)).astype(np.int64) for rank, array in enumerate(arrays)
            ]
        if self.call.dtype == "bool":
            op = {"sum": "bor", "product": "band"}.get(op, op)
        result = reduce(_FUNCTIONS[op], arrays)
        if op == "avg":  # of integers: in the type, which wraps around, then towards zero
            if self.call.dtype in INTS:
                result = result.astype(self.call.dtype).astype(np.int64)
            result = np.sign(result) * (np.abs(result) // self.n)
        return result

    @property
    def reduce_op(self) -> Any:
        if self.call.op == "premul_sum":
            return dist._make_nccl_premul_sum(self.factor(self.rank))
        return getattr(dist.ReduceOp, self.call.op.upper())

    def sizes(self, row: int = 0) -> list[int]:
        """Of the share of each rank; `row` for tables of one line for each rank."""
        size = self.call.size
        if self.call.uneven == 0:
            return [size] * self.n
        draw = random.Random(f"{self.call.uneven} {row}")
        return [draw.choice([0, 1, size, size, size + 1, size // 2]) for _ in range(self.n)]

    # ---- tensors

    def tensor(
        self, given: Array | int, expected: Array | None = None, is_flat: bool = False
    ) -> Tensor:
        """A tensor of these values, or of a size; None expects that it stays as it is.

        Its layout and its memory are drawn; it has one dimension where `is_flat`.
        """
        num_elems = given if isinstance(given, int) else len(given)
        layout, make = "plain", ""
        if self.has_layouts:
            choices = ["plain", "offset", "strided"]
            choices += [] if is_flat else ["transposed", "columns"]
            layout = self.own_random.choice(choices)
            make = self.own_random.choice(MAKES) if self.device == CPU else ""
        is_spread = layout in ("strided", "columns")
        length = 2 * num_elems + 2 if is_spread else num_elems + 2 * (layout == "offset")
        is_shared = self.own_random.random() < self.shared_share and self.device == CPU
        with torch.inference_mode(make == "inference"):
            if is_shared:
                base = ringcomm.empty_shared(length, dtype=self.dtype)
            else:
                base = self.empty(length, dtype=self.dtype, device=self.device)
            base.copy_(torch.tensor(1))
            if not isinstance(given, int):
                fill(_layout(layout, base, num_elems), given)
        after = base.to(CPU, copy=True)
        if make == "lazy clone" and length > 0 and not is_shared:
            self.origins.append(Expectation(base, base.clone()))
            base = torch._lazy_clone(base)
        if expected is not None:
            fill(_layout(layout, after, num_elems), expected)
        self.expectations.append(Expectation(base, after))
        view = _layout(layout, base, num_elems)
        if make == "parameter":
            return torch.nn.Parameter(view, view.is_floating_point() or view.is_complex())
        return view.as_subclass(Sub) if make == "subclass" else view

    def in_place(self) -> bool:
        """Whether outputs are inputs too: contiguous ones, on CPUs."""
        if self.is_in_place and self.device == CPU:
            self.has_layouts = False
            return True
        return False

    def returned(self, result: Tensor, expected: Array) -> None:
        """A new tensor, of one dimension."""
        after = torch.empty(len(expected), dtype=self.dtype)
        fill(after, expected)
        self.expect(result.shape == after.shape, f"shape {result.shape}")
        self.expectations.append(Expectation(result.as_subclass(Tensor).contiguous(), after))

    def own(self, num_elems: int) -> Tensor:
        return self.tensor(self.value(self.rank, num_elems))

    def wrong(self) -> list[str]:
        """What is not as the model says, when the call is over.

        Then this rank may use its tensors again, so they are overwritten.
        """
        for check in self.checks:
            check()
        with torch.inference_mode():
            self._compare()
        return self.complaints

    def _compare(self) -> None:
        for idx, tensor in enumerate(self.expectations + self.origins):
            actual = _bytes_of(tensor.base.to(CPU, copy=True))
            expected = _bytes_of(tensor.expected)
            tensor.base.view(torch.uint8).fill_(85)
            if np.array_equal(actual, expected):
                continue
            where = np.flatnonzero(actual != expected) // tensor.base.element_size()
            first = int(where[0])
            self.complaints.append(
                f"tensor {idx}, {len(tensor.base)} elements: wrong from {first} to {where[-1]}, "
                f"{_element(actual, first, tensor.base)} instead of {tensor.expected[first].item()}"
            )

    def spoil(self) -> None:
        """Changes one element of what is expected, in every tensor that has any."""
        for expectation in self.expectations:
            _bytes_of(expectation.expected)[-1:] ^= 1

    def expect(self, is_right: bool, what: str) -> None:
        if not is_right:
            self.complaints.append(what)


def fill(view: Tensor, values: Array) -> None:
    numbers = torch.from_numpy(values).view(view.shape)
    view.copy_(numbers * (1 + 2j) if view.is_complex() else numbers)


def _element(data: Array, idx: int, like: Tensor) -> Any:
    return torch.from_numpy(data).view(like.dtype)[idx].item()


def _bytes_of(tensor: Tensor) -> Array:
    return tensor.view(torch.uint8).numpy() if len(tensor) > 0 else np.zeros(0, np.uint8)
