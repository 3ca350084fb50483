"""Expert parallelism: tokens to the ranks of their experts and back, and what trains such models.

The layer is ringcomm.nn.MixtureOfExperts.
"""

from typing import TYPE_CHECKING

from ringcomm._renamed import getattr_of
from ringcomm.parallel.expert.dispatch import (
    DispatchPlan,
    combine,
    dispatch,
    plan_dispatch,
    rows_of_tokens,
    sums_of_rows,
)
from ringcomm.parallel.expert.gradients import average_gradients
from ringcomm.parallel.expert.local_experts import (
    LocalExperts,
    expert_parameters,
    ignore_in_ddp,
    split_experts,
)

__all__ = [
    "DispatchPlan",
    "LocalExperts",
    "average_gradients",
    "combine",
    "dispatch",
    "expert_parameters",
    "ignore_in_ddp",
    "plan_dispatch",
    "rows_of_tokens",
    "split_experts",
    "sums_of_rows",
]

if not TYPE_CHECKING:
    __getattr__ = getattr_of(__name__)
