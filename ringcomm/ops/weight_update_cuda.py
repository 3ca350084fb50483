"""Updates of weights in place: fakes, and the operators on CUDA as kernels of ringcomm.kernels.

They match kernels/updates/torch_weight_update.cc, which is for the CPU. They do not wait for the
device. After its tensors an operator takes `numbers`: lr, weight_decay, scale and rounding_seed.
"""

from typing import Any

import torch
from torch import Tensor

from ringcomm.ops import arguments
from ringcomm.ops import triton_kernels as plans
from ringcomm.ops.arguments import check_weight, check_writable, gradient_of, step_of, want
from ringcomm.ops.triton_kernels import add_product, kernels, launch, mark_written, on_cuda


def _check_devices(*tensors: Any) -> None:
    devices = {str(tensor.device) for tensor in tensors if isinstance(tensor, Tensor)}
    want(
        len(devices) <= 1, "a weight update", "tensors on one device", " and ".join(sorted(devices))
    )


def _fake_update(weight: Tensor, *args: Any, low: Tensor | None = None, **options: Any) -> None:
    _check_devices(weight, low, *args)


for _name in ("sgd", "linear_sgd", "embedding_sgd", "adalomo"):
    torch.library.register_fake(f"ringcomm::{_name}_update_", _fake_update)


@torch.library.register_fake("ringcomm::square_sums")
def _(grad: Tensor, *options: Any, **more: Any) -> tuple[Tensor, Tensor]:
    rows, cols = grad.shape
    return grad.new_empty([rows], dtype=torch.float32), grad.new_empty([cols], dtype=torch.float32)


@torch.library.register_fake("ringcomm::adalomo_squares")
def _(weight: Tensor, *args: Any, low: Tensor | None = None, **options: Any) -> Tensor:
    _check_devices(weight, low, *args)
    return weight.new_empty([2], dtype=torch.float32)


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
    step = step_of(op, clip_value, *numbers)
    check_weight(op, weight, low, step, is_matrix=False)
    want(first_elem >= 0, op, "first_elem to be 0 or more", first_elem)
    ordered = gradient_of(op, weight, grad)
    check_writable(op, weight, low, grad)
    if weight.numel():
        _update_elements(weight, low, ordered, step, first_elem)
    mark_written(weight, low)


def _update_elements(
    weight: Tensor, low: Tensor | None, grad: Tensor, step: arguments.Step, first_elem: int
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
    needs one dtype, rounding to nearest and no limit. Other cases need a quarter of the gradient in
    float32 as workspace, at most 32 MiB.
    """
    op = "linear_sgd_update_"
    step = step_of(op, clip_value, *numbers)
    check_weight(op, weight, low, step)
    tokens, grads = arguments.tokens_of(op, weight, x, grad_out)
    check_writable(op, weight, low, tokens, grads)
    is_plain = low is None and clip_value is None and step.key is None
    if is_plain and tokens.dtype == weight.dtype:
        alpha = step.minus_lr * step.scale
        torch.addmm(weight, grads.t(), tokens, beta=step.decay, alpha=alpha, out=weight)
    elif weight.numel():
        _update_by_product(weight, low, tokens, grads, step)
    mark_written(weight, low)


def _update_by_product(
    weight: Tensor, low: Tensor | None, tokens: Tensor, grads: Tensor, step: arguments.Step
) -> None:
    """Computes groups of rows of the gradient in fp32 with cuBLAS, then updates those rows.

    The rounding of an element depends on its index in the weight, not on the size of a group.
    """
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
    op = "embedding_sgd_update_"
    step = step_of(op, clip_value, lr, weight_decay, *numbers)
    check_weight(op, weight, low, step)
    num_rows, width = weight.shape
    is_row = -1 <= padding_idx < max(1, num_rows)
    want(is_row, op, f"padding_idx to be one of {num_rows} rows, or -1 for none", padding_idx)
    arguments.check_tensor(op, "indices", indices, weight, (torch.int64, torch.int32))
    arguments.check_tensor(op, "grad_out", grad_out, weight, shape=(*indices.shape, width))
    check_writable(op, weight, low, indices, grad_out)
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
    mark_written(weight, low)


_BLOCK = {"BLOCK_ROWS": plans.MATRIX_ROWS, "BLOCK_COLS": plans.MATRIX_COLS}
_TILE = {**_BLOCK, "num_warps": plans.MATRIX_WARPS}


def _tiles(matrix: Tensor) -> tuple[int, int]:
    """The number of tiles along the columns, and along the rows."""
    return -(-matrix.shape[0] // plans.MATRIX_ROWS), -(-matrix.shape[1] // plans.MATRIX_COLS)


@on_cuda
def square_sums(
    grad: Tensor, scale: float, *, clip_value: float | None = None
) -> tuple[Tensor, Tensor]:
    """The sums of the squares of rows and of columns, float32."""
    op = "square_sums"
    arguments.check_tensor(op, "grad", grad, grad)
    want(grad.dim() == 2, op, "a matrix", tuple(grad.shape))
    step = step_of(op, clip_value, 0.0, 0.0, scale)
    grad = grad.contiguous()
    tiles_down, tiles_across = _tiles(grad)
    row_sums = grad.new_empty([tiles_across, grad.shape[0]], dtype=torch.float64)
    col_sums = grad.new_empty([tiles_down, grad.shape[1]], dtype=torch.float64)
    if grad.numel():
        kernel = kernels().weight_update.square_sums_kernel
        given = (grad, row_sums, col_sums, *grad.shape, step.scale, step.limit)
        launch(kernel, (tiles_down * tiles_across,), *given, **_TILE)
    return row_sums.sum(0).float(), col_sums.sum(0).float()


def _factored(op: str, weight: Tensor, grad: Tensor, *factors: Tensor) -> tuple[Tensor, ...]:
    """The gradient and the factors of its rows and columns, checked."""
    for name, factor, size in zip(("row_factor", "col_factor"), factors, weight.shape, strict=True):
        arguments.check_tensor(op, name, factor, weight, (torch.float32,), (size,))
    return gradient_of(op, weight, grad), *(factor.contiguous() for factor in factors)


@on_cuda
def adalomo_squares(
    weight: Tensor,
    grad: Tensor,
    row_factor: Tensor,
    col_factor: Tensor,
    scale: float,
    *,
    low: Tensor | None = None,
    clip_value: float | None = None,
) -> Tensor:
    """The sums of the squares of the update's direction and of the weight: float32 of shape [2]."""
    op = "adalomo_squares"
    step = step_of(op, clip_value, 0.0, 0.0, scale)
    check_weight(op, weight, low, step)
    factored = _factored(op, weight, grad, row_factor, col_factor)
    tiles_down, tiles_across = _tiles(weight)
    sums = grad.new_empty([2, tiles_down * tiles_across], dtype=torch.float64)
    if weight.numel():
        kernel = kernels().weight_update.update_squares_kernel
        given = (weight, low, *factored, sums, *weight.shape, step.scale, step.limit)
        launch(kernel, sums.shape[1:], *given, **_TILE)
    return sums.sum(1).float()


@on_cuda
def adalomo_update_(
    weight: Tensor,
    grad: Tensor,
    row_factor: Tensor,
    col_factor: Tensor,
    step_and_decay: Tensor,
    *scale_and_seed: Any,
    low: Tensor | None = None,
    clip_value: float | None = None,
    first_elem: int = 0,
) -> None:
    """One step by the gradient times its factors; step and decay are read on the device."""
    op = "adalomo_update_"
    step = step_of(op, clip_value, 0.0, 0.0, *scale_and_seed)
    check_weight(op, weight, low, step)
    want(first_elem >= 0, op, "first_elem to be 0 or more", first_elem)
    factored = _factored(op, weight, grad, row_factor, col_factor)
    arguments.check_tensor(op, "step_and_decay", step_and_decay, weight, (torch.float32,), (2,))
    check_writable(op, weight, low, *factored, step_and_decay)
    tiles_down, tiles_across = _tiles(weight)
    if weight.numel():
        kernel = kernels().weight_update.adalomo_kernel
        options = (step.scale, step.limit, step.key, first_elem)
        given = (weight, low, *factored, step_and_decay.contiguous(), *weight.shape, *options)
        launch(kernel, (tiles_down * tiles_across,), *given, **_TILE)
    mark_written(weight, low)
