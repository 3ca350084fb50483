from collections.abc import Sequence
from typing import Any

from torch import Tensor

def softmax_shard_entry(
    vocab_start: int,
    vocab_size: int,
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    num_classes: int,
    wants_weighted: bool,
    wants_more: bool,
) -> tuple[float, float, float, float, float, int]: ...
def argument_kinds(arguments: tuple[Any, ...]) -> bytes: ...
def mark_written(*tensors: Tensor | None) -> None: ...
def checked_step(
    op: str,
    weight: Tensor,
    low: Tensor | None,
    is_matrix: bool,
    read: Sequence[Tensor],
    first_elem: int,
    clip_value: float | None,
    lr: float,
    weight_decay: float,
    scale: float,
    rounding_seed: int = ...,
) -> tuple[float, float, float, float, int | None]: ...
def ordered_grad(grad: Tensor, weight: Tensor, op: str) -> Tensor: ...
def tokens_of(weight: Tensor, x: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor]: ...
def check_embedding(
    weight: Tensor, indices: Tensor, grad_out: Tensor, padding_idx: int
) -> None: ...
def check_moments(
    row: Tensor | None, col: Tensor, row_sums: Tensor, col_sums: Tensor, op: str
) -> None: ...
def check_factors(
    weight: Tensor,
    row: Tensor | None,
    col_factor: Tensor,
    row_mean: Tensor,
    squares: Tensor | None,
    op: str,
) -> None: ...
