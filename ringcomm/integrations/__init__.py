"""Integrations with other libraries; each library is imported only by its own module."""

from typing import TYPE_CHECKING

from ringcomm import lazy

if TYPE_CHECKING:
    from ringcomm.integrations import accelerate as accelerate
    from ringcomm.integrations import transformers as transformers
    from ringcomm.integrations import vllm as vllm

_LIBRARIES = ("accelerate", "transformers", "vllm")
__getattr__, __dir__ = lazy.attributes(__name__, *_LIBRARIES)
