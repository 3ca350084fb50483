"""Training state in host memory or in files: ZeRO-Offload and ZeRO-Infinity."""

from typing import TYPE_CHECKING

from ringcomm._renamed import getattr_of
from ringcomm.parallel.offload.file_store import FileStore as FileStore
from ringcomm.parallel.offload.optimizers import SGD, AdamW

__all__ = ["SGD", "AdamW"]

if not TYPE_CHECKING:
    __getattr__ = getattr_of(__name__)
