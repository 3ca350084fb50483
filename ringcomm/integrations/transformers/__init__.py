"""Hugging Face transformers: the loss, tensor and expert parallelism, pipelines and the Trainer.

The functions import transformers when they are called; this package does not.
"""

from typing import TYPE_CHECKING

from ringcomm._renamed import getattr_of
from ringcomm.integrations.transformers.experts import expert_parallelize
from ringcomm.integrations.transformers.tensor_parallel import tensor_parallelize
from ringcomm.integrations.transformers.training import patch_loss, prepare

__all__ = ["expert_parallelize", "patch_loss", "prepare", "tensor_parallelize"]

if not TYPE_CHECKING:
    __getattr__ = getattr_of(__name__)
