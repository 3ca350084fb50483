"""Training state in host memory or in files: ZeRO-Offload and ZeRO-Infinity."""

from ringcomm.parallel.offload.file_store import FileStore as FileStore
from ringcomm.parallel.offload.optimizers import SGD, AdamW, Offloaded

__all__ = ["SGD", "AdamW", "Offloaded"]
