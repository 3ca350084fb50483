"""What a weight's gradient is when it arrives: a tensor, or what a layer makes it of."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


def _mix(value: int) -> int:
    """splitmix64 (Steele, Lea and Flood 2014): one to one on 64 bits."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def rounding_seed(seed: int, weight_idx: int, step: int) -> int:
    """The seed of a weight's random bits in a step: the same on all ranks, and after a resume."""
    return _mix(_mix((seed << 32 | weight_idx) & _MASK) ^ step) >> 1


# Rows of the smaller matrix of a product at a time, where only the squares of the whole count.
_BLOCK_BYTES = 32 << 20


class Gradient(Protocol):
    """One weight's gradient, complete or a part of the sum."""

    @property
    def nbytes(self) -> int:
        """What it keeps in memory."""

    def dense(self) -> Tensor:
        """As a tensor of the weight's shape; float32 if several were added, else its dtype."""

    def square_sum(self) -> Tensor:
        """The sum of its squares, float64, shape ()."""

    def is_finite(self) -> Tensor:
        """Whether it has neither Inf nor NaN, bool, shape ()."""


def square_sum(tensor: Tensor) -> Tensor:
    """The sum of a tensor's squares, float64, shape ()."""
    return torch.linalg.vector_norm(tensor, dtype=torch.float32).double().square()


def is_finite(tensor: Tensor) -> Tensor:
    """Whether a tensor has neither Inf nor NaN, bool, shape ()."""
    if tensor.numel() == 0:
        return torch.ones([], dtype=torch.bool, device=tensor.device)
    low, high = torch.aminmax(tensor)  # both NaN where there is one
    return torch.isfinite(low) & torch.isfinite(high)


def _blocks(num_rows: int, row_elems: int) -> list[slice]:
    """Rows of an fp32 matrix in parts of about _BLOCK_BYTES."""
    step = max(1, _BLOCK_BYTES // (4 * max(1, row_elems)))
    return [slice(begin, begin + step) for begin in range(0, num_rows, step)]


class DenseGradient:
    """A tensor; see `Gradient`."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @property
    def nbytes(self) -> int:
        """See `Gradient`."""
        return self.tensor.nbytes

    def dense(self) -> Tensor:
        """See `Gradient`."""
        return self.tensor

    def square_sum(self) -> Tensor:
        """See `Gradient`."""
        return square_sum(self.tensor)

    def is_finite(self) -> Tensor:
        """See `Gradient`."""
        return is_finite(self.tensor)


class LinearGradient:
    """grad_out^T x of a linear layer; see `Gradient`.

    Attributes:
        x: shape (T, in), the layer's input.
        grad_out: shape (T, out), the gradient of its output, of x's dtype.
    """

    def __init__(self, x: Tensor, grad_out: Tensor, dtype: torch.dtype) -> None:
        """With the weight's dtype."""
        self.x, self.grad_out = x, grad_out
        self._dtype = dtype

    @classmethod
    def of_uses(cls, uses: list[tuple[Tensor, Tensor]], dtype: torch.dtype) -> LinearGradient:
        """The sum over every use of the layer, of pairs (x, grad_out)."""
        if len(uses) == 1:
            return cls(*uses[0], dtype)
        x, grad_out = (torch.cat(parts) for parts in zip(*uses, strict=True))
        return cls(x, grad_out, dtype)

    @property
    def nbytes(self) -> int:
        """See `Gradient`."""
        return self.x.nbytes + self.grad_out.nbytes

    def dense(self) -> Tensor:
        """See `Gradient`."""
        return (self.grad_out.t() @ self.x).to(self._dtype)

    def square_sum(self) -> Tensor:
        """See `Gradient`; by whichever way has fewer operations, never all of the product at once.

        With few tokens by the Gram identity |dY^T X|^2 = sum(X X^T * dY dY^T).
        """
        num_tokens, num_in = self.x.shape
        num_out = self.grad_out.shape[1]
        x = self.x.float()
        total = torch.zeros([], dtype=torch.float64, device=x.device)
        if num_tokens * (num_in + num_out) < num_in * num_out:
            grad_out = self.grad_out.float()
            for rows in _blocks(num_tokens, num_tokens):
                gram = (x[rows] @ x.t()) * (grad_out[rows] @ grad_out.t())
                total += gram.sum(dtype=torch.float64)
        else:
            for columns in _blocks(num_out, num_in):
                total += square_sum(self.grad_out[:, columns].float().t() @ x)
        return total

    def is_finite(self) -> Tensor:
        """See `Gradient`; of what it is made of, which is stricter."""
        return is_finite(self.x) & is_finite(self.grad_out)


class EmbeddingGradient:
    """Rows of grad_out that belong to rows of a table; see `Gradient`.

    Attributes:
        indices: shape (T,), int64 or int32.
        grad_out: shape (T, width).
        padding_idx: the row that has no gradient, -1 for none.
    """

    def __init__(self, indices: Tensor, grad_out: Tensor, weight: Tensor, padding_idx: int) -> None:
        self.indices, self.grad_out, self.padding_idx = indices, grad_out, padding_idx
        self._shape, self._dtype = weight.shape, weight.dtype

    @classmethod
    def of_uses(
        cls, uses: list[tuple[Tensor, Tensor]], weight: Tensor, padding_idx: int
    ) -> EmbeddingGradient:
        """The sum over every use of the table, of pairs (indices, grad_out)."""
        if len(uses) == 1:
            return cls(*uses[0], weight, padding_idx)
        indices, grad_out = (torch.cat(parts) for parts in zip(*uses, strict=True))
        return cls(indices, grad_out, weight, padding_idx)

    @property
    def nbytes(self) -> int:
        """See `Gradient`."""
        return self.indices.nbytes + self.grad_out.nbytes

    def _row_sums(self) -> tuple[Tensor, Tensor]:
        """The rows that are touched, and the gradient of each in fp32."""
        is_real = self.indices != self.padding_idx
        rows, places = torch.unique(self.indices[is_real], return_inverse=True)
        sums = self.grad_out.new_zeros([len(rows), self._shape[1]], dtype=torch.float32)
        return rows, sums.index_add_(0, places, self.grad_out[is_real].float())

    def dense(self) -> Tensor:
        """See `Gradient`."""
        rows, sums = self._row_sums()
        result = sums.new_zeros(self._shape, dtype=self._dtype)
        result[rows] = sums.to(self._dtype)
        return result

    def square_sum(self) -> Tensor:
        """See `Gradient`."""
        return square_sum(self._row_sums()[1])

    def is_finite(self) -> Tensor:
        """See `Gradient`."""
        return is_finite(self.grad_out)
