"""A weight's gradient when it arrives: a tensor, or the factors from a layer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ringcomm.parallel.clip import over_all_ranks, power_of
from ringcomm.parallel.model.cut import Axes, Sharding
from ringcomm.torch_names import version_of

# Rows of a product's smaller matrix per block when only the sum of squares is needed.
_BLOCK_BYTES = 32 << 20


class Gradient:
    """One weight's gradient, or a part of its sum, in one or more tensors that it keeps."""

    def __init__(self, *parts: Tensor) -> None:
        self.parts = parts
        self._versions = [version_of(part) for part in parts]

    @property
    def nbytes(self) -> int:
        """The bytes that it keeps in memory."""
        return sum(part.nbytes for part in self.parts)

    def check_unmodified(self, name: str) -> None:
        """Raises RuntimeError if its tensors, which users may have too, were modified since."""
        if self._versions != [version_of(part) for part in self.parts]:
            raise RuntimeError(
                f"the input of the layer of {name}, or its output's gradient, was modified in place"
                " between the layer's backward and the update of the weight, which needs it:"
                " modify a copy, or call step() before"
            )

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """The gradient as a tensor, in `dtype` if computed here; default: the weight's dtype."""
        return self.parts[0]

    def norms(self) -> list[Tensor]:
        """2-norms of shape (), whose squares add up to the square of its own."""
        return [_norm(self.parts[0])]

    def extremes(self) -> list[Tensor]:
        """The least and largest elements, shape (); NaN where there is one."""
        parts = (part for part in self.parts if part.is_floating_point() and part.numel())
        return [extreme for part in parts for extreme in torch.aminmax(part)]

    def is_finite(self) -> Tensor:
        """Whether its parts have neither Inf nor NaN, bool, shape ()."""
        return _stacked(self.extremes(), self.parts[0].device).isfinite().all()


class LinearGradient(Gradient):
    """grad_out^T x of a linear layer.

    Args:
        x: shape (T, in), the layer's input.
        grad_out: shape (T, out), the gradient of its output, of x's dtype.
        dtype: of the weight.
    """

    def __init__(self, x: Tensor, grad_out: Tensor, dtype: torch.dtype) -> None:
        super().__init__(x, grad_out)
        self.x, self.grad_out, self._dtype = x, grad_out, dtype

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """The product. In float32 it is never rounded to less."""
        if dtype is None or dtype == self.x.dtype:
            product = self.grad_out.t() @ self.x
            return product.to(self._dtype if dtype is None else dtype)
        x, grad_out = self._factors(dtype)
        return _product(grad_out.t(), x, dtype)

    def norms(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Of blocks of the product in `dtype`, which are in memory one at a time."""
        x, grad_out = self._factors(dtype)
        blocks = _blocks(grad_out.shape[1], x.shape[1])
        return [_norm(_product(grad_out[:, columns].t(), x, dtype)) for columns in blocks]

    def _factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """For products in `dtype`: 16-bit ones stay, where the device can multiply them so."""
        if self.x.is_cuda and self.x.itemsize == 2 and dtype == torch.float32:
            return self.x, self.grad_out
        return self.x.to(dtype), self.grad_out.to(dtype)

    @property
    def has_few_tokens(self) -> bool:
        """Whether gram_sums() takes fewer operations than norms()."""
        (num_tokens, num_in), num_out = self.x.shape, self.grad_out.shape[1]
        return num_tokens * (num_in + num_out) < num_in * num_out

    def gram_sums(self) -> Tensor:
        """|dY^T X|^2 as sum(X X^T * dY dY^T), and the sum of the tokens' own norms, float64 [2].

        Errors are relative to the square of the second.
        """
        x, grad_out = self._factors(torch.float32)
        sums = torch.zeros(2, dtype=torch.float64, device=x.device)
        for rows in _blocks(len(x), len(x)):
            gram = _product(x[rows], x.t(), torch.float32)
            gram *= _product(grad_out[rows], grad_out.t(), torch.float32)
            norms = gram.diagonal(rows.start).sqrt()
            sums += torch.stack([gram.sum(dtype=sums.dtype), norms.sum(dtype=sums.dtype)])
        return sums


class EmbeddingGradient(Gradient):
    """Rows of grad_out that belong to rows of a table.

    Args:
        indices: shape (T,), int64 or int32.
        grad_out: shape (T, width).
        weight: the table.
        padding_idx: the row that has no gradient, -1 for none.
    """

    def __init__(self, indices: Tensor, grad_out: Tensor, weight: Tensor, padding_idx: int) -> None:
        super().__init__(indices, grad_out)
        self.indices, self.grad_out, self.padding_idx = indices, grad_out, padding_idx
        self._shape, self._dtype = weight.shape, weight.dtype

    def _row_sums(self) -> tuple[Tensor, Tensor]:
        """The rows that are touched, and the gradient of each in fp32."""
        is_real = self.indices != self.padding_idx
        rows, places = torch.unique(self.indices[is_real], return_inverse=True)
        sums = self.grad_out.new_zeros([len(rows), self._shape[1]], dtype=torch.float32)
        return rows, sums.index_add_(0, places, self.grad_out[is_real].float())

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """The whole table's gradient."""
        rows, sums = self._row_sums()
        result = sums.new_zeros(self._shape, dtype=dtype or self._dtype)
        result[rows] = sums.to(result.dtype)
        return result

    def norms(self) -> list[Tensor]:
        """Of the rows with gradients."""
        return [_norm(self._row_sums()[1])]


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b in `dtype`; CUDA's for 16-bit factors adds up products that it does not round."""
    return a @ b if a.dtype == dtype else torch.mm(a, b, out_dtype=dtype)


def _norm(tensor: Tensor) -> Tensor:
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return torch.linalg.vector_norm(tensor, dtype=wide)


def _stacked(scalars: Sequence[Tensor], device: torch.device) -> Tensor:
    """float64 [n], of scalars of any dtypes and devices."""
    kinds = dict.fromkeys((scalar.dtype, scalar.device) for scalar in scalars)
    rows = [torch.stack([x for x in scalars if (x.dtype, x.device) == kind]) for kind in kinds]
    empty = torch.empty(0, dtype=torch.float64, device=device)
    return torch.cat([empty, *(row.to(device, torch.float64) for row in rows)])


def _blocks(num_rows: int, row_elems: int) -> list[slice]:
    """Rows of an fp32 matrix in parts of about _BLOCK_BYTES."""
    step = max(1, _BLOCK_BYTES // (4 * max(1, row_elems)))
    return [slice(begin, begin + step) for begin in range(0, num_rows, step)]


_Grams = list[tuple[LinearGradient, Tensor]]


@dataclass
class _Facts:
    """Facts of the gradients of one sharding: scalars, which are added up at the end."""

    kept: list[Tensor] = field(default_factory=list)  # gradients, until the end
    norms: list[Tensor] = field(default_factory=list)
    extremes: list[Tensor] = field(default_factory=list)
    grams: _Grams = field(default_factory=list)

    def row(self, device: torch.device, *, with_norm: bool, is_exact: bool) -> Tensor:
        """The square of the norm, and the numbers of not finite values and of wrong Gram sums."""
        kept = power_of(self.kept, 2.0 if with_norm else math.inf, device)
        square = _stacked(self.norms, device).square().sum() + kept
        num_not_finite = (~_stacked([*self.extremes, kept], device).isfinite()).sum()
        num_wrong = torch.zeros_like(num_not_finite)
        if self.grams:
            squares, num_wrong = _squares_of(self.grams, is_exact=is_exact)
            square = square + squares.sum().to(device)
        return torch.stack([square, num_not_finite, num_wrong.to(device)])


def _squares_of(grams: _Grams, *, is_exact: bool) -> tuple[Tensor, Tensor]:
    """Squares by the Gram identity, and how many are wrong, where tokens cancel.

    `is_exact`: those become squares of the product; waits for the device.
    """
    # With less than fp32 in products, as with TF32, cancelling tokens are more often noise.
    least = 1e-4 if torch.get_float32_matmul_precision() == "highest" else 0.1
    device = grams[0][1].device
    squares, norms = torch.stack([sums.to(device) for _, sums in grams]).unbind(1)
    is_right = squares >= least * norms**2  # not if one is NaN
    if is_exact:  # in float64: a product in fp32 would be noise where tokens cancel
        for idx, keeps in enumerate(is_right.tolist()):
            if not keeps:
                norms_of = grams[idx][0].norms(torch.float64)
                squares[idx] = _stacked(norms_of, squares.device).square().sum()
        return squares, torch.zeros_like(squares[0])
    return squares, (~is_right).sum()


class StepFacts:
    """Facts needed before a step is made, of gradients as they arrive."""

    def __init__(self, *, with_norm: bool) -> None:
        self._facts: dict[Sharding, _Facts] = {}
        self._with_norm = with_norm  # which is finite only if all elements are

    def measure(self, gradient: Gradient, sharding: Sharding, *, is_kept: bool) -> None:
        """Adds a weight's gradient, or this rank's part; `sharding`: the ranks with the rest.

        A gradient that `is_kept` until finish() costs no synchronization before.
        """
        facts = self._facts.setdefault(sharding, _Facts())
        if is_kept and type(gradient) is Gradient:
            facts.kept += gradient.parts
        elif not self._with_norm:
            facts.extremes += gradient.extremes()
        elif isinstance(gradient, LinearGradient) and gradient.has_few_tokens:
            gram = (gradient, gradient.gram_sums())
            if is_kept:
                facts.grams.append(gram)
            else:
                squares, _ = _squares_of([gram], is_exact=True)
                facts.norms.append(squares[0].sqrt())
        else:
            facts.norms += gradient.norms()

    def finish(self, axes: Axes, device: torch.device) -> tuple[float, bool]:
        """The norm of all gradients, and whether they are finite. Collective over the axes.

        Waits for the device once, and again if tokens cancel on any rank.
        """
        zeros = torch.zeros(3, dtype=torch.float64, device=device)
        for is_exact in (False, True):
            how = {"with_norm": self._with_norm, "is_exact": is_exact}
            own = {of: facts.row(device, **how) for of, facts in self._facts.items()}
            square, num_not_finite, num_wrong = over_all_ranks(axes, own, zeros, 3).tolist()
            if num_wrong == 0:
                break
        return float(square) ** 0.5, num_not_finite == 0
