"""Training state in host memory or in files: ZeRO-Offload and ZeRO-Infinity."""

from ringcomm import lazy
from ringcomm.parallel.offload.optimizers import Offloaded

__all__ = ["Offloaded"]

__getattr__, __dir__ = lazy.attributes(__name__)
