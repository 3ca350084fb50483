"""Updates of weights in place: fakes, and the operators on CUDA as kernels of ringcomm.kernels.

They match kernels/updates/torch_weight_update.cc, which is for the CPU and whose checks they call.
They do not wait for the device. After its tensors an operator takes `numbers`: lr, weight_decay,
scale and rounding_seed.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ringcomm import _kernels
from ringcomm.ops import triton_kernels as plans
from ringcomm.ops.triton_kernels import add_product, kernels, launch, on_cuda

# The weight's factor, -lr, the gradient's factor and limit, the key of random bits or None.
_Step = tuple[float, float, float, float, int | None]


def _check_devices(*tensors: Any) -> None:
    devices = {str(tensor.device) for tensor in tensors if isinstance(tensor, Tensor)}
    if len(devices) > 1:
        found = " and ".join(sorted(devices))
        raise ValueError(f"ringcomm: a weight update needs tensors on one device, got {found}")


def _fake_update(weight: Tensor, *args: Any, low: Tensor | None = None, **options: Any) -> None:
    _check_devices(weight, low, *args)


for _name in ("sgd", "linear_sgd", "embedding_sgd", "adalomo"):
    torch.library.register_fake(f"ringcomm::{_name}_update_", _fake_update)


@torch.library.register_fake("ringcomm::square_sums")
def _(grad: Tensor, *options: Any, **more: Any) -> tuple[Tensor, Tensor]:
    return _square_sums(grad, *(_programs(grad) if grad.is_cuda else (1, 1)))


@torch.library.register_fake("ringcomm::adalomo_moments_")
def _(row: Tensor | None, col: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    _check_devices(row, col, *args)
    return _factors(row, col, is_in_parts=col.is_cuda)


@torch.library.register_fake("ringcomm::adalomo_squares")
def _(weight: Tensor, *args: Any, low: Tensor | None = None, **options: Any) -> Tensor:
    _check_devices(weight, low, *args)
    num_parts = math.prod(_programs(weight)) if weight.is_cuda else 1
    return weight.new_empty([2, num_parts], dtype=torch.float64)


@on_cuda
def sgd_update_(
    weight: Tensor,
    grad: Tensor,
    *numbers: Any,
    low: Tensor | None = None,
    clip_value: float | None = None,
    first_elem: int = 0,
) -> None:
    """One step by a gradient of the weight's shape."""
    op = "sgd_update_"
    given = (weight, low, False, [grad], first_elem, clip_value)
    step = _kernels.checked_step(op, *given, *numbers)
    ordered = _kernels.ordered_grad(grad, weight, op)
    if weight.numel():
        _update_elements(weight, low, ordered, step, first_elem)
    _kernels.mark_written(weight, low)


def _update_elements(
    weight: Tensor, low: Tensor | None, grad: Tensor, step: _Step, first_elem: int
) -> None:
    """Launches the step for the elements of a weight that start at first_elem."""
    num_elems, lead = weight.numel(), plans.lead_of(weight)
    is_aligned = all(
        (tensor.data_ptr() - lead * tensor.element_size()) % plans.VECTOR_BYTES == 0
        for tensor in (grad, low)
        if tensor is not None
    )
    launch(
        kernels().weight_update.sgd_kernel,
        (-(-(lead + num_elems) // plans.SGD_BLOCK),),
        *(weight, low, grad, lead, num_elems, *step, first_elem),
        BLOCK=plans.SGD_BLOCK,
        IS_ALIGNED=is_aligned,
        num_warps=plans.SGD_WARPS,
    )


@on_cuda
def linear_sgd_update_(
    weight: Tensor,
    x: Tensor,
    grad_out: Tensor,
    *numbers: Any,
    low: Tensor | None = None,
    clip_value: float | None = None,
) -> None:
    """One step by grad_out^T x.

    cuBLAS adds a product to a matrix in 1.02 to 1.03 times a product's own time (H200). This path
    needs one dtype, rounding to nearest and no limit. With stochastic rounding and one dtype the
    gradient is materialized in it, up to 256 MiB. Other cases need a quarter of the gradient in
    float32 as workspace, at most 32 MiB: 1.13 to 1.27 times the product.
    """
    given = (weight, low, True, [x, grad_out], 0, clip_value)
    step = _kernels.checked_step("linear_sgd_update_", *given, *numbers)
    tokens, grads = _kernels.tokens_of(weight, x, grad_out)
    decay, minus_lr, scale, _, key = step
    is_plain = low is None and clip_value is None and key is None
    if is_plain and tokens.dtype == weight.dtype:
        torch.addmm(weight, grads.t(), tokens, beta=decay, alpha=minus_lr * scale, out=weight)
    elif weight.numel():
        _update_by_product(weight, low, tokens, grads, step)
    _kernels.mark_written(weight, low)


def _update_by_product(
    weight: Tensor, low: Tensor | None, tokens: Tensor, grads: Tensor, step: _Step
) -> None:
    """Computes groups of rows of the gradient in fp32 with cuBLAS, then updates those rows.

    For stochastic rounding all of it, as autograd does. The rounding of an element depends on its
    index in the weight, not on the size of a group.
    """
    is_random = step[-1] is not None
    if is_random and tokens.dtype == weight.dtype and weight.nbytes <= plans.WHOLE_BYTES:
        # Autocast leaves what is given as out= in its dtype.
        grad = torch.mm(grads.t(), tokens, out=torch.empty_like(weight))
        _update_elements(weight, None, grad, step, 0)
        return
    num_rows, num_cols = weight.shape
    num_made = min(num_rows, plans.rows_per_product(num_rows, num_cols))
    made = weight.new_empty([num_made, num_cols], dtype=torch.float32)
    if not len(tokens):
        made.zero_()
    for begin in range(0, num_rows, num_made):
        rows = slice(begin, min(begin + num_made, num_rows))
        grad = made[: rows.stop - begin]
        if len(tokens):
            add_product(grad, grads[:, rows].t(), tokens, beta=0.0)
        low_rows = None if low is None else low[rows]
        _update_elements(weight[rows], low_rows, grad, step, begin * num_cols)


@on_cuda
def embedding_sgd_update_(
    weight: Tensor,
    indices: Tensor,
    grad_out: Tensor,
    lr: float,
    weight_decay: float,
    *numbers: Any,
    low: Tensor | None = None,
    clip_value: float | None = None,
    padding_idx: int = -1,
) -> None:
    """One step for the rows in the indices, or for all rows with weight decay.

    Indices out of range are ignored: the preceding lookup has asserted that there are none.
    """
    given = (weight, low, True, [indices, grad_out], 0, clip_value, lr, weight_decay)
    step = _kernels.checked_step("embedding_sgd_update_", *given, *numbers)
    _kernels.check_embedding(weight, indices, grad_out, padding_idx)
    num_rows, width = weight.shape
    ids, order = torch.sort(indices.reshape(-1), stable=True)
    touched = ids
    if weight_decay != 0:
        touched = torch.arange(num_rows, dtype=ids.dtype, device=ids.device)
    if touched.numel() and width:
        column_blocks = -(-width // plans.EMBEDDING_BLOCK)
        ends = torch.searchsorted(ids, touched), torch.searchsorted(ids, touched, right=True)
        launch(
            kernels().weight_update.embedding_kernel,
            (touched.numel(), column_blocks),
            weight,
            low,
            grad_out.contiguous(),  # (tokens, width), whatever its shape
            order,
            ids if weight_decay == 0 else None,
            *(*ends, num_rows, width, padding_idx, *step),
            BLOCK=plans.EMBEDDING_BLOCK,
            UNROLL=plans.EMBEDDING_UNROLL,
            num_warps=plans.EMBEDDING_WARPS,
        )
    _kernels.mark_written(weight, low)


def _programs(matrix: Tensor) -> tuple[int, int]:
    """The number of panels of columns, and of bands of rows; a program for each of both."""
    num_panels = -(-matrix.shape[1] // plans.MATRIX["BLOCK_COLS"])
    num_bands = max(1, plans.MATRIX_PROGRAMS // max(1, num_panels))
    return num_panels, min(num_bands, -(-matrix.shape[0] // plans.MATRIX["BLOCK_ROWS"]))


def _square_sums(grad: Tensor, num_panels: int, num_bands: int) -> tuple[Tensor, Tensor]:
    rows = grad.new_empty([num_panels, grad.shape[0]], dtype=torch.float32)
    return rows, grad.new_empty([num_bands, grad.shape[1]], dtype=torch.float32)


@on_cuda
def square_sums(
    grad: Tensor, scale: float, *, clip_value: float | None = None
) -> tuple[Tensor, Tensor]:
    """The sums of the squares of rows and of columns, in parts: float32 [parts, rows or cols]."""
    grad = grad.contiguous()
    numbers = (0, clip_value, 0.0, 0.0, scale)
    step = _kernels.checked_step("square_sums", grad, None, True, [], *numbers)
    programs = _programs(grad)
    sums = _square_sums(grad, *programs)
    if grad.numel():
        given = (grad, *sums, *grad.shape, *step[2:4])
        launch(kernels().weight_update.square_sums_kernel, programs, *given, **plans.MATRIX)
    return sums


def _factors(row: Tensor | None, col: Tensor, *, is_in_parts: bool) -> tuple[Tensor, Tensor]:
    num_parts = 0 if row is None else -(-len(row) // plans.MOMENTS["BLOCK"]) if is_in_parts else 1
    return torch.empty_like(col), col.new_empty([num_parts], dtype=torch.float64)


@on_cuda
def adalomo_moments_(
    row: Tensor | None, col: Tensor, row_sums: Tensor, col_sums: Tensor, share: float, eps: float
) -> tuple[Tensor, Tensor]:
    """Moves the moments by `share` to the means of squares.

    Returns the columns' factors and the mean of `row`, the latter in float64 parts.
    """
    _kernels.check_moments(row, col, row_sums, col_sums, "adalomo_moments_")
    sizes = 1 if row is None else len(row), len(col)
    factors = _factors(row, col, is_in_parts=True)
    num_blocks = len(factors[1]) + -(-len(col) // plans.MOMENTS["BLOCK"])
    if num_blocks:
        sums = (row_sums, col_sums, len(row_sums), len(col_sums))
        kernel = kernels().weight_update.moments_kernel
        given = (col, row, *sums, *factors, *sizes, share, eps)
        launch(kernel, (num_blocks,), *given, **plans.MOMENTS)
    _kernels.mark_written(row, col)
    return factors


@on_cuda
def adalomo_squares(
    weight: Tensor,
    grad: Tensor,
    *factors_and_scale: Any,
    low: Tensor | None = None,
    clip_value: float | None = None,
) -> Tensor:
    """The sums of the squares of the update's direction and of the weight: float64 [2, parts]."""
    op, programs = "adalomo_squares", _programs(weight)
    row, col_factor, row_mean, scale = factors_and_scale
    step = _kernels.checked_step(op, weight, low, True, [], 0, clip_value, 0.0, 0.0, scale)
    grad = _kernels.ordered_grad(grad, weight, op)
    _kernels.check_factors(weight, row, col_factor, row_mean, None, op)
    squares = grad.new_empty([2, math.prod(programs)], dtype=torch.float64)
    if weight.numel():
        factors = (row, col_factor, row_mean, len(row_mean))
        given = (grad, *factors, squares, *weight.shape, *step[2:4])
        kernel = kernels().weight_update.update_squares_kernel
        launch(kernel, programs, weight, low, *given, **plans.MATRIX)
    return squares


@on_cuda
def adalomo_update_(
    weight: Tensor,
    grad: Tensor,
    *given: Any,
    low: Tensor | None = None,
    clip_value: float | None = None,
    first_elem: int = 0,
) -> None:
    """One step; num_elems, of the full weight, and the squares decide its size on the device."""
    op = "adalomo_update_"
    row, col_factor, row_mean, squares, num_elems, *numbers = given
    read, scale_and_seed = [grad, col_factor, row_mean, squares], numbers[4:]
    checked = (weight, low, True, read, first_elem, clip_value, *numbers[:2])
    _, _, scale, limit, key = _kernels.checked_step(op, *checked, *scale_and_seed)
    grad = _kernels.ordered_grad(grad, weight, op)
    _kernels.check_factors(weight, row, col_factor, row_mean, squares, op)
    if weight.numel():
        if squares.shape[1] > plans.MATRIX_PROGRAMS:  # which as many programs each read
            squares = squares.sum(1, keepdim=True)
        factors = (row, col_factor, row_mean, len(row_mean), squares, squares.shape[1])
        sizes = (*weight.shape, num_elems, scale, limit, *numbers[:4], key, first_elem)
        kernel = kernels().weight_update.adalomo_kernel
        launch(kernel, _programs(weight), weight, low, grad, *factors, *sizes, **plans.MATRIX)
    _kernels.mark_written(weight, low)
