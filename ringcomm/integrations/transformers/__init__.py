"""Hugging Face transformers: the loss, tensor and expert parallelism, pipelines and the Trainer.

The functions import transformers when they are called; this package does not.
"""

from ringcomm.integrations.transformers.experts import expert_parallelize
from ringcomm.integrations.transformers.tensor_parallel import tensor_parallelize
from ringcomm.integrations.transformers.training import patch_loss, register

__all__ = ["expert_parallelize", "patch_loss", "register", "tensor_parallelize"]
