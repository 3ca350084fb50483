"""Connects torch.distributed to the engine: makes groups, finds them, reads their counters."""

import atexit
import contextlib
import copy
import functools
import logging
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ringcomm import _C, message_backend, trace, tuning
from ringcomm.errors import RingcommError
from ringcomm.options import Options, warn_of_unknown_variables
from ringcomm.torch_names import backend_of, set_timeout
from ringcomm.trace import flight

_log = logging.getLogger("ringcomm")


def create(dist_backend_opts: Any, pg_options: Any) -> Any:
    """Makes this rank's backend of a group; torch.distributed calls it for every ringcomm group.

    Args:
        dist_backend_opts: torch's store, group_rank, group_size, timeout and more.
        pg_options: an `Options`, None for the defaults, or the `options` attribute of another
            group's backend.

    Raises:
        TypeError: pg_options is something else.
        ValueError: an option has an invalid value, the tuning file is damaged, or the rank is
            outside the group.
        FileNotFoundError: the tuning file does not exist.
        OSError: the folder that RINGCOMM_TRACE names cannot be written.
        RingcommError: a rank did not join, or ranks have different options or world sizes.
    """
    _tell_peers_of_the_end()
    flight.offer_stacks()
    trace.start()
    warn_of_unknown_variables()
    size = dist_backend_opts.group_size
    if isinstance(pg_options, _C.GroupOptions):
        options = copy.deepcopy(pg_options)
    else:
        options = _engine_options(pg_options, size)
    set_timeout(options, dist_backend_opts.timeout)
    options.group_name = str(dist_backend_opts.group_id)
    # Empty for the default group, which has all ranks.
    global_ranks = list(dist_backend_opts.global_ranks_in_group or range(size))
    options.global_ranks_in_group = global_ranks
    try:
        backend = _C.create_process_group(
            store=dist_backend_opts.store,
            rank=dist_backend_opts.group_rank,
            size=size,
            options=options,
        )
    except RingcommError as error:
        if global_ranks != list(range(size)):
            error.args = (f"{error}; ranks of this group are the global ranks {global_ranks}",)
        raise
    _log.info(
        "group %s, rank %d of %d: %s",
        dist_backend_opts.group_id,
        dist_backend_opts.group_rank,
        size,
        _C.transport_of(backend),
    )
    return backend


@functools.cache
def _tell_peers_of_the_end() -> None:
    """Makes peers say in their errors whether this process exited, or which exception ended it."""
    atexit.register(_C.say_exit)
    show = sys.excepthook

    def tell_and_show(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        with contextlib.suppress(Exception):
            text = f"{kind.__name__}: {error}".partition("\n")[0]
            _C.say_last_words(text.encode("ascii", "backslashreplace").decode())
        show(kind, error, trace)

    sys.excepthook = tell_and_show


def _engine_options(pg_options: Any, world_size: int) -> _C.GroupOptions:
    """The engine's options, from an `Options` or None and the environment."""
    if pg_options is None:
        pg_options = Options()
    if not isinstance(pg_options, Options):
        raise TypeError(
            "pg_options of a ringcomm group must be a ringcomm.Options, got "
            f"{type(pg_options).__name__}"
        )
    options = pg_options.with_environment()
    if options.deterministic not in (None, "rank_order"):
        raise ValueError(
            'deterministic of ringcomm.Options must be None or "rank_order", got '
            f"{options.deterministic!r}"
        )
    tuned = tuning.load(options.tuning).one_shot_max_bytes(world_size) if options.tuning else None
    # The backend for messages between ranks without shared memory: a group on one host needs none.
    has_gloo = options.p2p_backend != "gloo" or dist.is_gloo_available()
    has_messages = options.transport == "p2p" or (options.transport is None and has_gloo)
    return _C.GroupOptions(
        algorithm=options.algorithm,
        is_rank_ordered=options.deterministic == "rank_order",
        one_shot_max_bytes=tuned or 0,
        transport=options.transport or "",
        says_waits=options.says_waits,
        p2p_backend=message_backend.checked(options.p2p_backend) if has_messages else "",
    )


def resolve_group(
    group: dist.ProcessGroup | None = None, mesh: DeviceMesh | None = None
) -> dist.ProcessGroup:
    """Returns the group itself, the group of a one-dimensional mesh, or the default group.

    Raises:
        ValueError: there is no default group, this rank is not in the group, the mesh has several
            dimensions, or both are given.
    """
    if mesh is not None:
        if group is not None:
            raise ValueError("give a group or a mesh, not both")
        if mesh.ndim != 1:
            names = ", ".join(map(str, mesh.mesh_dim_names or mesh.shape))
            raise ValueError(f"the mesh must have one dimension, such as mesh['tp']; got ({names})")
        return mesh.get_group()
    if group is not None:
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError("this rank is not in the group: new_group() gave it no ProcessGroup")
        return group
    if not dist.is_initialized():
        raise ValueError(
            "there is no default group: call torch.distributed.init_process_group first"
        )
    return dist.group.WORLD  # type: ignore[return-value]


def stats(group: dist.ProcessGroup | None = None) -> dict[tuple[str, str], dict[str, int]]:
    """Calls and bytes of this rank since it started, by (collective, algorithm). Not collective.

    Args:
        group: the group to count, of backend "ringcomm"; None counts all groups that this process
            has made.

    Returns:
        {("all_reduce", "ring"): {"num_calls": 3, "sent_bytes": 4096, "copied_bytes": 6144}, ...},
        without collectives that were never called. `sent_bytes` are the bytes that peers read from
        this rank: (N-1) S for a one_shot all_reduce of S bytes over N ranks, and 2(N-1)/N S for
        two_shot and ring. `copied_bytes` are the bytes that this rank copied: into memory that its
        peers read, and from there or from its own input into its results.

    Raises:
        ValueError: the group has another backend for CPU tensors, or none, or this rank is not in
            the group.
    """
    if group is None:
        return _C.stats()
    try:
        backend = backend_of(resolve_group(group), torch.device("cpu"))
    except RuntimeError as error:
        raise ValueError(f"this group has no backend for CPU tensors: {error}") from None
    return _C.group_stats(backend)
