from typing import Any

import torch

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
def all_reduce_add_rms_norm_(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group: Any
) -> bool: ...
def checksum(data: bytes | memoryview) -> int: ...
