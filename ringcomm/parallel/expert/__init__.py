"""Expert parallelism: functions for training models with ringcomm.nn.MixtureOfExperts."""

from ringcomm.parallel.expert.local_experts import (
    average_gradients,
    expert_parameters,
    ignore_in_ddp,
)

__all__ = ["average_gradients", "expert_parameters", "ignore_in_ddp"]
