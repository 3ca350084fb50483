"""A torch.distributed backend for a single machine.

    import torch.distributed as dist
    dist.init_process_group("ringcomm")

works without importing this module, which adds options, operators, counters and error types.
"""

import _ringcomm_autoload
from ringcomm import _extension as _extension  # first: its error says what to do
from ringcomm import ops
from ringcomm.backend import stats
from ringcomm.errors import CollectiveTimeoutError, MismatchError, PeerDiedError, RingcommError
from ringcomm.memory import empty_shared
from ringcomm.memory import is_shared as is_shared
from ringcomm.ops.collectives import monitored_barrier
from ringcomm.options import Options
from ringcomm.survivors import Health, health, on_death, shrink
from ringcomm.version import __version__

_ringcomm_autoload.register()

__all__ = [
    "CollectiveTimeoutError",
    "Health",
    "MismatchError",
    "Options",
    "PeerDiedError",
    "RingcommError",
    "__version__",
    "empty_shared",
    "health",
    "monitored_barrier",
    "on_death",
    "ops",
    "shrink",
    "stats",
]
