"""Training state in host memory or in files: ZeRO-Offload and ZeRO-Infinity."""

from ringcomm.parallel.offload.file_store import FileStore, Transfer

__all__ = ["FileStore", "Transfer"]
