"""Weight updates on CUDA tensors, launched as the Triton kernels of ringcomm.kernels.

They do what csrc/bindings/ops/weight_update_ops.cc does for the CPU. Nothing waits for the device.
Triton is imported by the first launch.
"""

import torch
from torch import Tensor

from ringcomm.ops import update_plans as plans
from ringcomm.ops.loss_rows import lead_of
from ringcomm.ops.triton_kernels import kernels, mark_written
from ringcomm.ops.triton_plans import VECTOR_BYTES
from ringcomm.ops.update_arguments import (
    Step,
    check_factors,
    check_layout,
    check_numbers,
    check_weight,
    gradient_of,
    limit_of,
    matrix_of,
    rounding_key,
    step_of,
    tokens_of,
)

# ---- SGD


def sgd_update_(
    weight: Tensor,
    grad: Tensor,
    lr: float,
    weight_decay: float,
    scale: float,
    rounding_seed: int = -1,
    *,
    low: Tensor | None = None,
    clip_value: float | None = None,
    first_elem: int = 0,
) -> None:
    """One step by a gradient of the weight's shape."""
    check_weight("sgd_update_", weight, low, rounding_seed, is_matrix=False)
    grad = gradient_of(weight, grad)
    step = step_of(lr, weight_decay, scale, clip_value, rounding_seed)
    num_elems, lead = weight.numel(), lead_of(weight)
    if num_elems:
        is_aligned = all(
            (tensor.data_ptr() - lead * tensor.element_size()) % VECTOR_BYTES == 0
            for tensor in (grad, low)
            if tensor is not None
        )
        with torch.cuda.device_of(weight):
            kernels().weights.sgd_kernel[(-(-(lead + num_elems) // plans.SGD_BLOCK),)](
                weight,
                low,
                grad,
                lead,
                num_elems,
                step.decay,
                step.minus_lr,
                step.scale,
                step.limit,
                step.key,
                first_elem,
                BLOCK=plans.SGD_BLOCK,
                IS_ALIGNED=is_aligned,
                IS_STOCHASTIC=step.is_stochastic,
                num_warps=plans.SGD_WARPS,
            )
    mark_written(weight, low)


# ---- linear layers


def linear_sgd_update_(
    weight: Tensor,
    x: Tensor,
    grad_out: Tensor,
    lr: float,
    weight_decay: float,
    scale: float,
    rounding_seed: int = -1,
    *,
    low: Tensor | None = None,
    clip_value: float | None = None,
) -> None:
    """One step by grad_out^T x.

    cuBLAS adds a product to a matrix in 1.02 to 1.03 times a product's own time (H200), so that it
    does what it can: one dtype, rounded to nearest, without limits.
    """
    check_weight("linear_sgd_update_", weight, low, rounding_seed, is_matrix=True)
    x = tokens_of("x", x, weight.shape[1], weight)
    grad_out = tokens_of("grad_out", grad_out, weight.shape[0], weight)
    if x.dtype != grad_out.dtype:
        raise TypeError(
            f"ringcomm: x and grad_out are of one dtype, got {x.dtype} and {grad_out.dtype}"
        )
    if x.shape[0] != grad_out.shape[0]:
        raise ValueError(f"ringcomm: x has {x.shape[0]} tokens, and grad_out {grad_out.shape[0]}")
    step = step_of(lr, weight_decay, scale, clip_value, rounding_seed)
    is_plain = low is None and clip_value is None and not step.is_stochastic
    if is_plain and x.dtype == weight.dtype:
        alpha = step.minus_lr * step.scale
        torch.addmm(weight, grad_out.t(), x, beta=step.decay, alpha=alpha, out=weight)
    elif weight.numel():
        _update_by_product(weight, low, x, grad_out, step)
    mark_written(weight, low)


def _is_describable(rows: Tensor) -> bool:
    """What TMA can load: 16-bit rows that begin at multiples of 16 bytes."""
    return (
        rows.element_size() == 2
        and rows.numel() > 0
        and rows.data_ptr() % VECTOR_BYTES == 0
        and rows.stride(0) * 2 % VECTOR_BYTES == 0
    )


def _update_by_product(
    weight: Tensor, low: Tensor | None, x: Tensor, grad_out: Tensor, step: Step
) -> None:
    num_out, num_in = weight.shape
    machine = plans.machine_of(weight.device)
    is_described = machine.has_descriptors and _is_describable(x) and _is_describable(grad_out)
    plan = plans.linear_plan(num_out, num_in, x.element_size(), machine, is_described)
    linear = kernels().linear
    if is_described:
        from triton.tools.tensor_descriptor import TensorDescriptor

        kernel, strides = linear.described_kernel, ()
        operands = (
            TensorDescriptor.from_tensor(x, [plan.block_tokens, plan.block_in]),
            TensorDescriptor.from_tensor(grad_out, [plan.block_tokens, plan.block_out]),
        )
    else:
        kernel, operands = linear.addressed_kernel, (x, grad_out)
        strides = (x.stride(0), grad_out.stride(0))
    with torch.cuda.device_of(weight):
        kernel[(plans.num_tiles(num_out, num_in, plan.block_out, plan.block_in),)](
            weight,
            low,
            *operands,
            *strides,
            x.shape[0],
            num_out,
            num_in,
            step.decay,
            step.minus_lr,
            step.scale,
            step.limit,
            step.key,
            BLOCK_TOKENS=plan.block_tokens,
            BLOCK_OUT=plan.block_out,
            BLOCK_IN=plan.block_in,
            IS_STOCHASTIC=step.is_stochastic,
            num_warps=plan.num_warps,
            num_stages=plan.num_stages,
        )


# ---- embeddings


def embedding_sgd_update_(
    weight: Tensor,
    indices: Tensor,
    grad_out: Tensor,
    lr: float,
    weight_decay: float,
    scale: float,
    rounding_seed: int = -1,
    *,
    low: Tensor | None = None,
    clip_value: float | None = None,
    padding_idx: int = -1,
) -> None:
    """One step of the rows that the indices name, or of all where weights decay.

    An index out of range is left out: the lookup before has asserted that there is none.
    """
    check_weight("embedding_sgd_update_", weight, low, rounding_seed, is_matrix=True)
    num_rows, width = weight.shape
    grad_out = tokens_of("grad_out", grad_out, width, weight)
    if indices.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"ringcomm: indices are int64 or int32, got {indices.dtype}")
    if indices.numel() != grad_out.shape[0] or indices.device != weight.device:
        raise ValueError(
            f"ringcomm: one index on {weight.device} for each of {grad_out.shape[0]} tokens, got"
            f" {indices.numel()} on {indices.device}"
        )
    step = step_of(lr, weight_decay, scale, clip_value, rounding_seed)
    ids, order = torch.sort(indices.reshape(-1), stable=True)
    touched = ids
    if weight_decay != 0:
        touched = torch.arange(num_rows, dtype=ids.dtype, device=ids.device)
    if touched.numel() and width:
        column_blocks = -(-width // plans.EMBEDDING_BLOCK)
        with torch.cuda.device_of(weight):
            kernels().weights.embedding_kernel[(touched.numel(), column_blocks)](
                weight,
                low,
                grad_out.contiguous(),
                order,
                ids if weight_decay == 0 else None,
                torch.searchsorted(ids, touched),
                torch.searchsorted(ids, touched, right=True),
                num_rows,
                width,
                padding_idx,
                step.decay,
                step.minus_lr,
                step.scale,
                step.limit,
                step.key,
                BLOCK=plans.EMBEDDING_BLOCK,
                UNROLL=plans.EMBEDDING_UNROLL,
                IS_STOCHASTIC=step.is_stochastic,
                num_warps=plans.EMBEDDING_WARPS,
            )
    mark_written(weight, low)


# ---- AdaLomo


def square_sums(
    grad: Tensor, scale: float, *, clip_value: float | None = None
) -> tuple[Tensor, Tensor]:
    """The sums of the squares of rows and of columns, float32."""
    grad, limit = matrix_of(grad), limit_of(clip_value)
    num_rows, num_cols = grad.shape
    tiles_down, tiles_across = _tiles(grad)
    row_sums = grad.new_empty([tiles_across, num_rows], dtype=torch.float64)
    col_sums = grad.new_empty([tiles_down, num_cols], dtype=torch.float64)
    if grad.numel():
        with torch.cuda.device_of(grad):
            kernels().matrices.square_sums_kernel[(tiles_down * tiles_across,)](
                grad,
                row_sums,
                col_sums,
                num_rows,
                num_cols,
                scale,
                limit,
                BLOCK_ROWS=plans.MATRIX_ROWS,
                BLOCK_COLS=plans.MATRIX_COLS,
                num_warps=plans.MATRIX_WARPS,
            )
    return row_sums.sum(0).float(), col_sums.sum(0).float()


def _tiles(matrix: Tensor) -> tuple[int, int]:
    """How many stand below one another, and side by side."""
    return -(-matrix.shape[0] // plans.MATRIX_ROWS), -(-matrix.shape[1] // plans.MATRIX_COLS)


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
    check_layout(weight, low, is_matrix=True)
    grad, limit = gradient_of(weight, grad), limit_of(clip_value)
    check_factors(grad, row_factor, col_factor)
    tiles_down, tiles_across = _tiles(weight)
    sums = grad.new_empty([2, tiles_down * tiles_across], dtype=torch.float64)
    if weight.numel():
        with torch.cuda.device_of(weight):
            kernels().matrices.update_squares_kernel[(sums.shape[1],)](
                weight,
                low,
                grad,
                row_factor,
                col_factor,
                sums,
                weight.shape[0],
                weight.shape[1],
                scale,
                limit,
                BLOCK_ROWS=plans.MATRIX_ROWS,
                BLOCK_COLS=plans.MATRIX_COLS,
                num_warps=plans.MATRIX_WARPS,
            )
    return sums.sum(1).float()


def adalomo_update_(
    weight: Tensor,
    grad: Tensor,
    row_factor: Tensor,
    col_factor: Tensor,
    step_and_decay: Tensor,
    scale: float,
    rounding_seed: int = -1,
    *,
    low: Tensor | None = None,
    clip_value: float | None = None,
    first_elem: int = 0,
) -> None:
    """One step by the gradient times its factors; step and decay are the device's."""
    check_weight("adalomo_update_", weight, low, rounding_seed, is_matrix=True)
    grad, limit = gradient_of(weight, grad), limit_of(clip_value)
    check_factors(grad, row_factor, col_factor)
    check_numbers("step_and_decay", step_and_decay, 2)
    tiles_down, tiles_across = _tiles(weight)
    if weight.numel():
        with torch.cuda.device_of(weight):
            kernels().matrices.adalomo_kernel[(tiles_down * tiles_across,)](
                weight,
                low,
                grad,
                row_factor,
                col_factor,
                step_and_decay,
                weight.shape[0],
                weight.shape[1],
                scale,
                limit,
                rounding_key(rounding_seed),
                first_elem,
                BLOCK_ROWS=plans.MATRIX_ROWS,
                BLOCK_COLS=plans.MATRIX_COLS,
                IS_STOCHASTIC=rounding_seed >= 0,
                num_warps=plans.MATRIX_WARPS,
            )
    mark_written(weight, low)


_CUDA = torch.library.Library("ringcomm", "IMPL", "CUDA")
for _launcher in (
    sgd_update_,
    linear_sgd_update_,
    embedding_sgd_update_,
    square_sums,
    adalomo_squares,
    adalomo_update_,
):
    _CUDA.impl(_launcher.__name__, _launcher)
