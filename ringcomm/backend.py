"""Connects torch.distributed to the engine: makes groups, finds them, asks them."""

import atexit
import contextlib
import copy
import functools
import logging
import multiprocessing.util
import os
import re
import shlex
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ringcomm import _C, message_backend, trace, tuning
from ringcomm.errors import RingcommError
from ringcomm.options import Options, checks_targets, flag, timeout_of, warn_of_unknown_variables
from ringcomm.process import interpreter
from ringcomm.torch_names import all_groups, backend_of, global_ranks_of, set_timeout
from ringcomm.trace import dumps, layout

_log = logging.getLogger("ringcomm")
# Variables of launchers and of ringcomm.
_OF_A_RANK = re.compile(
    r"(\w+_)?(RANK|RANKID|SIZE|PROCID)|(MASTER|TORCHELASTIC|RINGCOMM|PMIX?|OMPI|SLURM)_\w+", re.A
)
_TOLD_S = 0.05  # until the peers have read it, and before they see that this rank has left


def create(dist_backend_opts: Any, pg_options: Any) -> Any:
    """Makes this rank's backend of a group; torch.distributed calls it for every ringcomm group.

    `pg_options` is an `Options`, None for the defaults, or the `options` attribute of another
    group's backend. Raises TypeError for anything else, ValueError for an invalid value, a damaged
    tuning file or a rank outside the group, OSError where the tuning file is missing or the folder
    of RINGCOMM_TRACE cannot be written, and RingcommError if a rank did not join, or has other
    options or another world size.
    """
    store, size = dist_backend_opts.store, dist_backend_opts.group_size
    # Empty for the default group, which has all ranks.
    global_ranks = list(dist_backend_opts.global_ranks_in_group or range(size))
    try:
        options = _prepare(dist_backend_opts, pg_options)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if size > 1:
            _C.report_failure(store, dist_backend_opts.group_rank, size, global_ranks, text)
        raise
    options.global_ranks_in_group = global_ranks
    backend = _C.create_process_group(
        store=store, rank=dist_backend_opts.group_rank, size=size, options=options
    )
    _log.info(
        "group %s, rank %d of %d: %s",
        dist_backend_opts.group_id,
        dist_backend_opts.group_rank,
        size,
        _C.transport_of(backend),
    )
    return backend


def _prepare(dist_backend_opts: Any, pg_options: Any) -> _C.GroupOptions:
    """What this rank does alone; the options of the group."""
    _tell_peers_of_the_end(os.getpid())
    layout.offer_stacks()
    _let_the_doctor_come(os.getpid())
    dumps.start()
    trace.start()
    warn_of_unknown_variables()
    # What a call would read later, where the other ranks would wait for this one.
    checks_targets()
    flag("RINGCOMM_MAP_TENSORS", os.environ.get("RINGCOMM_MAP_TENSORS") or "1")
    _C.simd_level()
    if isinstance(pg_options, _C.GroupOptions):
        options = copy.deepcopy(pg_options)
    else:
        options = _engine_options(pg_options, dist_backend_opts.group_size)
    set_timeout(options, timeout_of(dist_backend_opts.timeout))
    options.group_name = str(dist_backend_opts.group_id)
    return options


@functools.cache
def _let_the_doctor_come(pid: int) -> None:
    """Where nobody can type a command, the log of a wait of 60 s has the doctor's verdict."""
    asked = (os.environ.get(name) for name in ("RINGCOMM_AS_GLOO", "CI"))
    if all(value in (None, "", "0", "false") for value in asked):
        return
    question = ["doctor", "--job", str(pid)]
    python = interpreter()
    if python is None:
        text = (
            f"ringcomm: {sys.executable or 'this program'} is not a Python interpreter, which the "
            f"doctor needs: type `ringcomm {' '.join(question)}` in an environment with ringcomm"
        )
        command = f"echo {shlex.quote(text)}"
    else:
        code = (
            "import signal, sys; signal.pthread_sigmask(signal.SIG_SETMASK, []); "
            f"sys.path.append({str(Path(__file__).parents[1])!r}); "
            "from _ringcomm.start import main; sys.exit(main())"
        )
        # What Python runs at its start may take the doctor for a rank.
        unset = shlex.join(["unset", "-v", "RANK", *filter(_OF_A_RANK.fullmatch, os.environ)])
        command = f"{unset}; exec {shlex.join([python, '-c', code, *question, '--verdict'])}"
    _C.set_doctor(f"exec </dev/null >&2; {command}")


@functools.cache
def _tell_peers_of_the_end(_pid: int) -> None:
    """Makes peers say in their errors whether this process exited, or which exception ended it."""
    atexit.register(_C.report_exit)
    atexit.register(_C.end_continuations)  # a thread that calls Python after its end is a crash
    show = sys.excepthook

    def tell_and_show(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        _tell_exception(error)
        show(kind, error, trace)

    sys.excepthook = tell_and_show
    # A process of multiprocessing catches what ends it: its finalizers run while it handles that.
    multiprocessing.util.Finalize(
        None, lambda: _tell_exception(sys.exc_info()[1]), exitpriority=100
    )


def _tell_exception(error: BaseException | None) -> None:
    """Tells the peers the first line of what ends this process; an exit code they know."""
    if isinstance(error, SystemExit) and not isinstance(error.code, str):
        error = error.__context__ if error.code else None  # torch.multiprocessing.spawn's
    if error is None:
        return
    with contextlib.suppress(Exception):
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        _C.report_exit(text.encode("ascii", "backslashreplace").decode())


def report_handled_exception() -> None:
    """Before this rank leaves a group, tells its peers which exception it handles; for the engine.

    They already know an error of ringcomm, or wait for nothing.
    """
    error = sys.exc_info()[1]
    if error is None or isinstance(error, RingcommError):
        return
    _tell_exception(error)
    time.sleep(_TOLD_S)


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
    tuned = _one_shot_max_bytes(options.tuning, world_size) if options.tuning else 0
    # The backend for messages between ranks without shared memory: a group on one host needs none.
    has_gloo = options.message_backend != "gloo" or dist.is_gloo_available()
    has_messages = options.transport == "messages" or (options.transport is None and has_gloo)
    return _group_options(
        algorithm=options.algorithm,
        is_rank_ordered=options.deterministic == "rank_order",
        one_shot_max_bytes=tuned,
        transport=options.transport or "",
        max_threads=options.max_threads or 0,
        log_waits=options.log_waits,
        message_backend=message_backend.checked(options.message_backend) if has_messages else "",
    )


def _one_shot_max_bytes(path: str, world_size: int) -> int:
    try:
        return tuning.load(path).one_shot_max_bytes(world_size) or 0
    except (OSError, ValueError) as error:
        raise type(error)(f"tuning of ringcomm.Options, or RINGCOMM_TUNING: {error}") from None


def _group_options(**fields: Any) -> _C.GroupOptions:
    """Raises RuntimeError if the extension lacks one of the fields."""
    try:
        return _C.GroupOptions(**fields)
    except TypeError:
        signature = _C.GroupOptions.__init__.__doc__ or ""
        if all(f"{name}: " in signature for name in fields):
            raise  # a value of the wrong type
        raise RuntimeError(
            "the extension is older than ringcomm's Python files: build it again (make build, or"
            " pip install -e . in a checkout)"
        ) from None


def resolve_group(
    group: dist.ProcessGroup | None = None, mesh: DeviceMesh | None = None
) -> dist.ProcessGroup:
    """Returns the group itself, the group of a one-dimensional mesh, or the default group.

    Raises ValueError if there is no default group, this rank is not in the group, the mesh has
    several dimensions, or both are given.
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
        {("all_reduce", "ring"): {"num_calls": 3, "sent_bytes": 4096, "copied_bytes": 6144,
        "num_in_place": 0, "num_staged": 0}, ...}, without collectives that were never called.

        `sent_bytes` are the bytes that peers read from this rank: (N-1) S for a one_shot all_reduce
        of S bytes over N ranks, and 2(N-1)/N S for two_shot and ring. `copied_bytes` are the bytes
        that this rank copied: into memory that its peers read, and from there or from its own input
        into its results. Of calls and sends on a GPU that are long enough, `num_in_place` are those
        in which peers could use this rank's buffers where they are, and `num_staged` the others,
        whose staged bytes are `copied_bytes`.

    Raises:
        ValueError: the group has another backend for CPU tensors, or none, or this rank is not in
            the group.
    """
    return _C.stats() if group is None else _C.group_stats(_cpu_backend_of(group))


def peer_stats(group: dist.ProcessGroup | None = None) -> dict[int, dict[str, float]]:
    """What this rank has waited for each peer, and their messages, since the group was made.

    Not collective. Waits count if they take at least 100 µs; shorter ones are the latency of a
    call. Waits of asynchronous collectives count too, although the program may compute meanwhile.
    Calls on GPU tensors do not count: the GPU waits there.

    Args:
        group: the group to count, of backend "ringcomm"; None adds up all groups of that backend
            that this process has now.

    Returns:
        {3: {"num_waits": 12, "waited_s": 0.52, "num_late": 10, "sent_bytes": 0,
        "received_bytes": 0}, ...}, by the peers' ranks in the default group.

        `num_waits` and `waited_s` are the waits of this rank for the peer, and their seconds: for
        it to begin a collective, to finish a part of one, or to send or receive. If one call waits
        for several peers, each has the time in which it was waited for, one after another.

        `num_late` is the number of collectives in which the peer was the last to arrive: of the
        waits for peers to begin the call, the wait for this peer was the last one of at least 100
        µs. Over shared memory a rank sees all peers arrive. Over messages the limit is 1 ms, and a
        rank sees those from which it receives first: all of them in short all_reduces, the previous
        rank in others.

        `sent_bytes` and `received_bytes` are data in messages: of `send` and `recv`, and of
        collectives over Gloo. What collectives copy into the shared staging buffer has no single
        receiver and is in `stats()` only.

        In a group of one it is empty.

    Raises:
        ValueError: as `stats()`.
        RuntimeError: this process could not make the flight recorder, which has the counters.
    """
    groups = [group] if group is not None else [each for each in all_groups() if _is_ours(each)]
    found: dict[int, dict[str, float]] = {}
    for each in groups:
        counts, size = _C.peer_counts(_cpu_backend_of(each)), each.size()
        if len(counts) != size and size > 1:
            raise RuntimeError("ringcomm.peer_stats: this process has no flight recorder")
        for rank, number in global_ranks_of(each).items():
            if size == 1 or rank == each.rank():
                continue
            old = found.get(number, {})
            found[number] = {key: old.get(key, 0) + n for key, n in counts[rank].items()}
    return found


def _cpu_backend_of(group: dist.ProcessGroup) -> Any:
    """The backend for CPU tensors; raises ValueError without one."""
    try:
        return backend_of(resolve_group(group), torch.device("cpu"))
    except RuntimeError as error:
        raise ValueError(f"this group has no backend for CPU tensors: {error}") from None


def _is_ours(group: dist.ProcessGroup) -> bool:
    """Whether ringcomm is the group's backend for CPU tensors."""
    with contextlib.suppress(ValueError):
        return isinstance(_cpu_backend_of(group), _C.ProcessGroupRingcomm)
    return False


def monitored_barrier(
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """A barrier that reports on rank 0 which ranks did not arrive.

    It replaces torch.distributed.monitored_barrier, which accepts only groups of backend "gloo".
    The group stays usable after a failure, and a late rank raises an error too.

    Args:
        group: None for the default group.
        timeout: how long rank 0 waits for the others, a timedelta; None uses the group's timeout.
            The others wait for rank 0 for the group's timeout, or for twice this one if that is
            longer.
        wait_all_ranks: whether rank 0 names all missing ranks, or only the first.

    Raises:
        CollectiveTimeoutError: "monitored_barrier: rank 2 did not come within 1000 ms" on the ranks
            that arrived; rank 0 names all. Its `rank` is the first missing rank.
        ValueError: this rank is not in the group, or there is no default group.

    Collective over the group; blocks until rank 0 has heard from all ranks.
    """
    resolved: Any = resolve_group(group)
    if timeout is None:
        resolved.monitored_barrier(wait_all_ranks=wait_all_ranks)
    elif isinstance(timeout, timedelta):
        resolved.monitored_barrier(timeout, wait_all_ranks)
    else:
        raise TypeError(f"timeout of monitored_barrier must be a timedelta, got {timeout!r}")
