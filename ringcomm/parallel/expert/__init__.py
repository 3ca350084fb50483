"""Expert parallelism: functions for training models with ringcomm.nn.MixtureOfExperts."""

from typing import TYPE_CHECKING

from ringcomm._renamed import getattr_of
from ringcomm.parallel.expert.local_experts import (
    average_gradients,
    expert_parameters,
    ignore_in_ddp,
)

__all__ = ["average_gradients", "expert_parameters", "ignore_in_ddp"]

if not TYPE_CHECKING:
    __getattr__ = getattr_of(__name__)
