"""What programs ask of Gloo's backend object, on the one that they get with RINGCOMM_AS_GLOO=1.

It is not an instance of torch.distributed.ProcessGroupGloo; docs/design/architecture.md says why.
"""

import functools
import sys
from typing import Any

import torch.distributed as dist

from ringcomm import _C, torch_names


@functools.cache
def add_names() -> None:
    """Gives ringcomm's backend the names of Gloo's.

    Devices and options made by them are Gloo's, for dist.ProcessGroupGloo(store, rank, size,
    options), which makes a real one. The options of ringcomm's backend have no devices and threads:
    reading or setting them raises AttributeError.
    """
    backend: Any = _C.ProcessGroupRingcomm
    if dist.is_gloo_available():
        for name in torch_names.GLOO_STATICS:
            setattr(backend, name, staticmethod(getattr(dist.ProcessGroupGloo, name)))
    setattr(
        backend,
        torch_names.SET_DEFAULT_TIMEOUT,
        lambda own, timeout: torch_names.set_timeout(own.options, timeout),
    )
    for name in torch_names.GLOO_OPTIONS:
        setattr(_C.GroupOptions, name, property(*(functools.partial(_refuse, name),) * 2))


@functools.cache
def say_once() -> None:
    """Writes to stderr that ringcomm is in the place of Gloo, which no name of a group shows."""
    if sys.stderr is not None:  # as it is where a daemon has closed it
        sys.stderr.write(
            "ringcomm: RINGCOMM_AS_GLOO=1: ringcomm serves the CPU tensors of groups that ask for"
            ' gloo (get_backend() still returns "gloo")\n'
        )


def _refuse(name: str, *unused: Any) -> None:
    raise AttributeError(
        f"ringcomm: a group made in place of Gloo (RINGCOMM_AS_GLOO=1) has no {name}; "
        "GLOO_SOCKET_IFNAME selects the network interface of its messages between hosts, and "
        "without RINGCOMM_AS_GLOO the group is Gloo's"
    )
