"""Training state in host memory or in files: ZeRO-Offload and ZeRO-Infinity."""

from ringcomm.parallel.offload.efficiency import (
    checkpoint_intensity,
    efficiency,
    optimizer_intensity,
    weight_intensity,
)
from ringcomm.parallel.offload.file_store import FileStore
from ringcomm.parallel.offload.optimizers import SGD, AdamW
from ringcomm.parallel.offload.store_engine import Transfer
from ringcomm.parallel.offload.tiled_linear import TiledLinear

__all__ = [
    "SGD",
    "AdamW",
    "FileStore",
    "TiledLinear",
    "Transfer",
    "checkpoint_intensity",
    "efficiency",
    "optimizer_intensity",
    "weight_intensity",
]
