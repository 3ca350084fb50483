"""A torch.distributed backend for a single machine.

    import torch.distributed as dist
    dist.init_process_group("ringcomm")

works without importing this module, which adds options, operators, counters and error types.
Subpackages and operators are imported at their first use.
"""

import sys
from typing import TYPE_CHECKING

if sys.orig_argv[1:3] == ["-m", "ringcomm"]:  # Python imports the package before __main__
    import _ringcomm.command

    _ringcomm.command.answer_before_torch()

import _ringcomm.autoload
from ringcomm import _extension as _extension  # first: its error says what to do
from ringcomm import lazy
from ringcomm.backend import monitored_barrier, peer_stats, stats
from ringcomm.errors import CollectiveTimeoutError, MismatchError, PeerDiedError, RingcommError
from ringcomm.memory import empty_shared, release
from ringcomm.memory import is_shared as is_shared
from ringcomm.options import Options
from ringcomm.survivors import health, shrink
from ringcomm.trace.dumps import flight_dump
from ringcomm.version import __version__

if TYPE_CHECKING:
    from ringcomm import integrations as integrations
    from ringcomm import nn as nn
    from ringcomm import ops
    from ringcomm import optim as optim
    from ringcomm import parallel as parallel
    from ringcomm import planner as planner

_ringcomm.autoload.register()
lazy.register_operators_at_first_use()

__all__ = [
    "CollectiveTimeoutError",
    "MismatchError",
    "Options",
    "PeerDiedError",
    "RingcommError",
    "__version__",
    "empty_shared",
    "flight_dump",
    "health",
    "monitored_barrier",
    "ops",
    "peer_stats",
    "release",
    "shrink",
    "stats",
]

_SUBPACKAGES = ("integrations", "nn", "ops", "optim", "parallel", "planner", "testing")
__getattr__, __dir__ = lazy.attributes(__name__, *_SUBPACKAGES)
