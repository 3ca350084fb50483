"""A weight's gradient when it arrives: a tensor, or the factors from a layer."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ringcomm.parallel.clip import over_all_ranks
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

    def square_sum(self) -> Tensor:
        """The sum of its squares, float64, shape ()."""
        return _square_sum(self.parts[0])

    def is_finite(self) -> Tensor:
        """Whether its parts have neither Inf nor NaN, bool, shape ()."""
        return torch.stack([_is_finite(p) for p in self.parts if p.is_floating_point()]).all()


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
        x, grad_out = self.x, self.grad_out.t()
        if dtype is None or dtype == x.dtype:
            return (grad_out @ x).to(self._dtype if dtype is None else dtype)
        if x.is_cuda:  # torch has it for CUDA alone
            return torch.mm(grad_out, x, out_dtype=dtype)
        return grad_out.to(dtype) @ x.to(dtype)

    def square_sum(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Materializes only blocks of the product, in `dtype`."""
        x = self.x.to(dtype)
        total = torch.zeros([], dtype=torch.float64, device=x.device)
        for columns in _blocks(self.grad_out.shape[1], x.shape[1]):
            total += _square_sum(self.grad_out[:, columns].to(dtype).t() @ x)
        return total

    @property
    def has_few_tokens(self) -> bool:
        """Whether gram_sums() takes fewer operations than square_sum()."""
        (num_tokens, num_in), num_out = self.x.shape, self.grad_out.shape[1]
        return num_tokens * (num_in + num_out) < num_in * num_out

    def gram_sums(self) -> Tensor:
        """|dY^T X|^2 as sum(X X^T * dY dY^T), and the sum of the tokens' own norms, float64 [2].

        Errors are relative to the square of the second.
        """
        x, grad_out = self.x.float(), self.grad_out.float()
        sums = torch.zeros(2, dtype=torch.float64, device=x.device)
        for rows in _blocks(len(x), len(x)):
            gram = (x[rows] @ x.t()) * (grad_out[rows] @ grad_out.t())
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

    def square_sum(self) -> Tensor:
        """The sum over the rows with gradients."""
        return _square_sum(self._row_sums()[1])


def _square_sum(tensor: Tensor) -> Tensor:
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return torch.linalg.vector_norm(tensor, dtype=wide).double().square()


def _is_finite(tensor: Tensor) -> Tensor:
    if tensor.numel() == 0:
        return torch.ones([], dtype=torch.bool, device=tensor.device)
    low, high = torch.aminmax(tensor)  # both NaN where there is one
    return torch.isfinite(low) & torch.isfinite(high)


def _blocks(num_rows: int, row_elems: int) -> list[slice]:
    """Rows of an fp32 matrix in parts of about _BLOCK_BYTES."""
    step = max(1, _BLOCK_BYTES // (4 * max(1, row_elems)))
    return [slice(begin, begin + step) for begin in range(0, num_rows, step)]


class StepFacts:
    """Facts needed before a step is made, summed over gradients as they arrive."""

    def __init__(self) -> None:
        # (squares, gradients that are not finite, sums that were wrong), float64
        self._sums: dict[Sharding, Tensor] = {}
        self._grams: list[tuple[Sharding, LinearGradient, Tensor]] = []

    def add(
        self, gradient: Gradient, sharding: Sharding, *, with_norm: bool, is_kept: bool
    ) -> None:
        """Adds a weight's gradient, or this rank's part; `sharding`: the ranks with the rest.

        A gradient that `is_kept` until finish() costs no synchronization before.
        """
        not_finite = (~gradient.is_finite()).double()
        square = torch.zeros_like(not_finite)
        if with_norm and isinstance(gradient, LinearGradient) and gradient.has_few_tokens:
            self._grams.append((sharding, gradient, gradient.gram_sums()))
        elif with_norm:
            square = gradient.square_sum()
        sums = torch.stack([square, not_finite, torch.zeros_like(square)])
        self._sums[sharding] = self._sums[sharding] + sums if sharding in self._sums else sums
        if not is_kept:
            self._add_grams(is_exact=True)
            self._grams = []

    def _add_grams(self, *, is_exact: bool) -> None:
        """Adds squares by the Gram identity, and notes those that are wrong, where tokens cancel.

        `is_exact`: adds the square of the product there, and waits for the device.
        """
        # With less than fp32 in products, as with TF32, cancelling tokens are more often noise.
        least = 1e-4 if torch.get_float32_matmul_precision() == "highest" else 0.1
        for sharding in dict.fromkeys(sharding for sharding, *_ in self._grams):
            own = self._sums[sharding]
            grams = [(gradient, sums) for of, gradient, sums in self._grams if of == sharding]
            squares, norms = torch.stack([sums.to(own.device) for _, sums in grams]).unbind(1)
            is_right = squares >= least * norms**2  # not if one is NaN
            if not is_exact:
                own[2] += (~is_right).sum()
            else:  # in float64: a product in fp32 would be noise where tokens cancel
                for idx, keeps in enumerate(is_right.tolist()):
                    if not keeps:
                        squares[idx] = grams[idx][0].square_sum(torch.float64)
            own[0] += squares.sum()

    def finish(self, axes: Axes, device: torch.device) -> tuple[float, bool]:
        """The norm of all gradients, and whether they are finite. Collective over the axes.

        Waits for the device once, and again if tokens cancel on any rank.
        """
        without_grams = {sharding: sums.clone() for sharding, sums in self._sums.items()}
        zeros = torch.zeros(3, dtype=torch.float64, device=device)
        for is_exact in (False, True):
            self._add_grams(is_exact=is_exact)
            own = {sharding: sums.to(device) for sharding, sums in self._sums.items()}
            square, num_not_finite, num_wrong = over_all_ranks(axes, own, zeros, 3).tolist()
            if num_wrong == 0:
                break
            self._sums = without_grams
        return float(square) ** 0.5, num_not_finite == 0


@contextmanager
def exact(device: torch.device) -> Iterator[None]:
    """Disables gradients and autocast, which would round fp32 sums."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield
