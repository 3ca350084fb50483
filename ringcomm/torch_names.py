"""Names that differ between the versions of torch that ringcomm serves."""

import torch.distributed as dist

__all__ = ["all_gather_single", "reduce_scatter_single"]

# torch 2.13 renamed these; 2.11 has only the old names, and the new torch warns about
# them on every call.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
