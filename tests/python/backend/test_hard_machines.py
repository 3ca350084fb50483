"""Machines that have or allow little: ranks work there, or each says in one line what is missing.

docs/how-to/containers.md has the table. A call without threads or pages, in the engine alone:
tests/cpp/test_thread_pool.cc, test_shm_memory.cc.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import machines
import pytest
import torch.distributed as dist
from failing_calls import use_everything
from machines import CLONE_NEWNS, CLONE_NEWPID, CLONE_NEWUTS, Unavailable
from ranks import run_ranks
from stores import make_group

# Of a group. No error may be a time-out.
TIMEOUT_S = 20
# Of a machine, after which its processes are killed.
LIMIT_S = 40
Outcome = dict[str, str]
run_in_child = partial(machines.run_in_child, LIMIT_S)


@dataclass(frozen=True)
class Machine:
    """How a machine is made, and what its ranks say.

    `around` is in effect as long as there are ranks; a process writes its pid to the file that it
    gives. `prepare` is called by the process that forks them, which is the first of its PID
    namespace if `namespaces` has one. `enter` is called by each rank before it makes a group.
    """

    enter: Callable[[int], None] = lambda rank: None
    prepare: Callable[[], None] = lambda: None
    namespaces: int = 0
    around: Callable[[], AbstractContextManager[Path | None]] = nullcontext
    world_size: int = 2
    are_apart: bool = False  # each rank is in a PID namespace of its own
    has_files: bool = True  # for a FileStore; else there is a TCPStore
    error: str = ""  # words of the error; empty: there is none


# ---- the processes: launcher -> the one in new namespaces -> the first of these -> ranks


def live(rank: int, world_size: int, store: dist.Store) -> Iterator[str]:
    """Names each step before it is made."""
    yield "init_process_group"
    make_group(store, rank, world_size, TIMEOUT_S)
    yield from use_everything(rank, world_size)
    yield "destroy_process_group"
    dist.destroy_process_group()
    yield "the end"


def outcome_of(rank: int, machine: Machine, make_store: Callable[[], dist.Store]) -> Outcome:
    """The step that raised and what it said; "the end" if none did."""
    step = "the machine"
    try:
        store = make_store()
        machine.enter(rank)
        for begun in live(rank, machine.world_size, store):
            step = begun
    except Unavailable as reason:
        return {"skip": str(reason)}
    except BaseException as error:
        return {"step": step, "text": f"{type(error).__name__}: {error}"}
    return {"step": step}


def serve_store(port: int) -> None:
    """As torchrun's agent does: it outlives the ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(port, b"%d" % store.port)
    signal.pause()


def launch(_: int, name: str, folder: Path) -> list[Outcome]:
    """Runs the machine's ranks; their outcomes, by rank."""
    machine, answers = MACHINES[name], machines.Answers()

    def run_rank(rank: int, make_store: Callable[[], dist.Store]) -> None:
        answers.say([rank, outcome_of(rank, machine, make_store)])

    def run_apart(rank: int, make_store: Callable[[], dist.Store]) -> None:
        machines.enter_namespaces(CLONE_NEWPID)
        os.waitpid(run_in_child(run_rank, rank, make_store), 0)

    @contextlib.contextmanager
    def saying_why() -> Iterator[None]:
        try:
            yield
        except (Unavailable, OSError) as reason:
            for rank in range(machine.world_size):
                answers.say([rank, {"skip": str(reason)}])

    @saying_why()
    def run_all() -> None:
        make_store: Callable[[], dist.Store]
        make_store = partial(dist.FileStore, str(folder / "store"), machine.world_size)
        if not machine.has_files:
            port = os.pipe()
            run_in_child(serve_store, port[1])
            number = int(os.read(port[0], 6))
            make_store = partial(dist.TCPStore, "127.0.0.1", number, is_master=False)
        machine.prepare()
        run = run_apart if machine.are_apart else run_rank
        for pid in [run_in_child(run, r, make_store) for r in range(machine.world_size)]:
            os.waitpid(pid, 0)

    @saying_why()
    def run_machine(cgroup: Path | None) -> None:
        os.setpgid(0, 0)
        if cgroup is not None:
            cgroup.write_text(str(os.getpid()))
        if machine.namespaces or machine.are_apart:
            machines.enter_namespaces(machine.namespaces)
        os.waitpid(run_in_child(run_all), 0)

    try:
        with machine.around() as cgroup:
            pid = run_in_child(run_machine, cgroup)
            try:
                said = answers.read(machine.world_size, LIMIT_S)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    except Unavailable as reason:
        return [{"skip": str(reason)}]
    outcomes: list[Outcome] = [{"text": "the process ended without an answer"}] * machine.world_size
    for rank, outcome in said:
        outcomes[rank] = outcome
    return outcomes


# ---- the machines


def small_container() -> None:
    """As in unshare --pid --fork --mount-proc --mount, with a /dev/shm of 64 KiB."""
    machines.make_mounts_private()
    machines.mount("proc", "/proc")
    machines.mount("tmpfs", "/dev/shm", data="size=64k")


def read_only_container() -> None:
    small_container()
    machines.make_all_read_only()
    writable = [name for name in ("/", "/tmp", "/var/tmp", "/dev/shm", ".") if is_writable(name)]
    assert not writable, writable


def is_writable(folder: str) -> bool:
    probe = Path(folder, "ringcomm-probe")
    try:
        probe.mkdir()
    except OSError:
        return False
    probe.rmdir()
    return True


def no_exec_container() -> None:
    small_container()
    sysctl = Path("/proc/sys/vm/memfd_noexec")
    if not sysctl.exists():
        raise Unavailable("vm.memfd_noexec is of Linux 6.3")
    sysctl.write_text("2")  # of this PID namespace


def container_without_boot_id() -> None:
    """As some sandboxes; a recording asks for it."""
    small_container()
    machines.mount("tmpfs", "/proc/sys/kernel/random")
    os.environ["RINGCOMM_TRACE"] = tempfile.mkdtemp()


def container_without_proc() -> None:
    """As some sandboxes; shrink() and the command say that they need it."""
    small_container()
    machines.mount("tmpfs", "/proc")


def with_own_name(rank: int) -> None:
    with_host_name(b"host%d" % rank, "shm", rank)


def on_one_core() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def limit(which: int, most: int, rank: int) -> None:
    resource.setrlimit(which, (most, most))


def limit_descriptors(more: int, rank: int) -> None:
    limit(resource.RLIMIT_NOFILE, machines.limit_of_descriptors(more), rank)


def limit_address_space(more_mib: int, rank: int) -> None:
    """So much more than the rank has, and its tensors."""
    limit(resource.RLIMIT_AS, machines.used_bytes() + ((more_mib + 5) << 20), rank)


def limit_file_size(rank: int) -> None:
    """In a program that has not ignored the signal, as Python has."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    limit(resource.RLIMIT_FSIZE, 1 << 20, rank)


def take_priority(rank: int) -> None:
    """Real-time scheduling: on one core only the rank with the highest priority runs."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1 + rank))
    except PermissionError as error:
        raise Unavailable(f"this user may not have real-time priorities: {error}") from None


def limit_threads(num_threads: int, rank: int) -> None:
    """Of all ranks together, as a user that has no other processes; root has no limit."""
    if os.geteuid() != 0:
        raise Unavailable("only root can become another user")
    os.setgid(1_000_000 + os.getppid())
    os.setuid(1_000_000 + os.getppid())
    limit(resource.RLIMIT_NPROC, num_threads, rank)


def with_host_name(name: bytes, transport: str, rank: int) -> None:
    """As `docker run --hostname`, of a name that the kernel takes."""
    machines.enter_namespaces(CLONE_NEWUTS)
    socket.sethostname(name)  # type: ignore[arg-type]
    os.environ["RINGCOMM_TRANSPORT"] = transport


def become_other_user(rank: int) -> None:
    if os.geteuid() != 0:
        raise Unavailable("only root can become another user")
    os.setuid(1_000_001)


def in_rank_1(enter: Callable[[int], None]) -> Callable[[int], None]:
    return lambda rank: enter(rank) if rank == 1 else None


def refuse(error: int, *names: str) -> Machine:
    """A seccomp filter that refuses calls that ringcomm can do without."""
    return Machine(lambda _: machines.refuse_calls(error, *names))


def refuse_needed(error: int, name: str) -> Machine:
    words = f"{re.escape(name)} failed: .*; allow this call in the container's seccomp filter"
    return Machine(lambda _: machines.refuse_calls(error, name), error=words)


CONTAINER = CLONE_NEWPID | CLONE_NEWNS
NO_FILES = (
    r"failed: Too many open files \(errno 24\); raise the limit of open files, \d+ \(ulimit -n\)"
)
NO_THREAD = r"the thread ringcomm-\w+ could not be started; check the limits of threads \(ulimit -u"
NO_MEMORY = r"shared memory failed: .*; free memory, or raise the limit of address space"
NO_LARGE_FILE = r"ftruncate of a memfd .*; raise the limit of file sizes \(ulimit -f\)"
OPTIONAL = (
    *("getcpu", "io_uring_setup", "futex_waitv", "madvise", "mbind", "membarrier", "pidfd_getfd"),
    *("pidfd_open", "process_vm_readv", "sched_getaffinity", "sched_setaffinity", "userfaultfd"),
)

MACHINES = {
    "container": Machine(namespaces=CONTAINER, prepare=small_container),
    "read-only": Machine(namespaces=CONTAINER, prepare=read_only_container, has_files=False),
    "memfd_noexec": Machine(namespaces=CONTAINER, prepare=no_exec_container),
    "pid-namespaces": Machine(are_apart=True),
    "no-proc": Machine(namespaces=CONTAINER, prepare=container_without_proc),
    "no-boot-id": Machine(namespaces=CONTAINER, prepare=container_without_boot_id),
    # As reported at https://github.com/microsoft/WSL/issues/2518 of a kernel without one, of two.
    "no-boot-id-two-names": Machine(
        with_own_name,
        namespaces=CONTAINER,
        prepare=container_without_boot_id,
        error="share no memory: host host",
    ),
    "half-a-core": Machine(around=partial(machines.cpu_quota, 0.5)),
    "one-core": Machine(prepare=on_one_core),
    # As reported at https://github.com/google/sanitizers/issues/614 of waits that spin.
    "one-core-priorities": Machine(take_priority, prepare=on_one_core, world_size=4),
    # As reported at https://github.com/vllm-project/vllm/issues/7074 of a name that is unknown.
    "host-name-newline": Machine(partial(with_host_name, b"two\nlines", "shm")),
    "host-name-not-utf8": Machine(partial(with_host_name, b"b\xffse", "shm")),
    "host-name-dots-messages": Machine(partial(with_host_name, b"a..b", "messages")),
    "host-name-not-utf8-messages": Machine(partial(with_host_name, b"b\xffse", "messages")),
    "one-rank-not-as-root": Machine(
        in_rank_1(become_other_user), has_files=False, error="run all ranks of a host as one user"
    ),
    "memlock-0": Machine(partial(limit, resource.RLIMIT_MEMLOCK, 0)),
    "64-files": Machine(partial(limit, resource.RLIMIT_NOFILE, 64)),
    "64-files-4-ranks": Machine(partial(limit, resource.RLIMIT_NOFILE, 64), world_size=4),
    # 12 are enough, as a rule: Python may have one or two open for a moment.
    "14-files": Machine(partial(limit_descriptors, 14)),
    "20-files-4-ranks": Machine(partial(limit_descriptors, 20), world_size=4),
    # Each is the first that some step misses; without any, a FileStore ends the process.
    **{
        f"{num}-files": Machine(partial(limit_descriptors, num), has_files=False, error=NO_FILES)
        for num in (0, 2, 4, 6, 8, 9)
    },
    **{
        f"{num}-files-in-rank-1-of-4": Machine(
            in_rank_1(partial(limit_descriptors, num)),
            has_files=False,
            world_size=4,
            error=NO_FILES,
        )
        for num in (6, 9, 12, 14)
    },
    "0-threads": Machine(partial(limit_threads, 1), has_files=False, error=NO_THREAD),
    "0-threads-in-rank-1": Machine(
        in_rank_1(partial(limit_threads, 1)), has_files=False, error=NO_THREAD
    ),
    "1-thread-each": Machine(partial(limit_threads, 4), has_files=False, error=NO_THREAD),
    "2-threads-each": Machine(partial(limit_threads, 6), has_files=False, error=NO_THREAD),
    "3-threads-each": Machine(partial(limit_threads, 8), has_files=False, error=NO_THREAD),
    "4-threads-each": Machine(partial(limit_threads, 10), has_files=False),
    "0-MiB": Machine(partial(limit_address_space, 0), error=f"{NO_THREAD}|{NO_MEMORY}"),
    "4-MiB": Machine(partial(limit_address_space, 4), error=NO_MEMORY),
    "32-MiB": Machine(partial(limit_address_space, 32), error=NO_MEMORY),
    # As reported at https://github.com/dotnet/runtime/issues/117819 of memfds.
    "file-size": Machine(limit_file_size, error=NO_LARGE_FILE),
    "no-optional-calls-EPERM": refuse(errno.EPERM, *OPTIONAL),
    "no-optional-calls-ENOSYS": refuse(errno.ENOSYS, *OPTIONAL),
    "no-memfd_create-EPERM": refuse_needed(errno.EPERM, "memfd_create"),
    "no-memfd_create-ENOSYS": refuse_needed(errno.ENOSYS, "memfd_create"),
    "no-seals-EPERM": refuse_needed(errno.EPERM, "fcntl(F_ADD_SEALS)"),
    "no-seals-ENOSYS": refuse_needed(errno.ENOSYS, "fcntl(F_ADD_SEALS)"),
    "no-eventfd-EPERM": refuse_needed(errno.EPERM, "eventfd"),
    "no-eventfd-ENOSYS": refuse_needed(errno.ENOSYS, "eventfd"),
}


@pytest.mark.parametrize("name", MACHINES)
def test_it_works_or_says_what_is_missing(name: str, tmp_path: Path) -> None:
    outcomes = run_ranks(1, launch, name, tmp_path, backend=None, fresh=True, module=__name__)[0]
    for outcome in outcomes:
        if "skip" in outcome:
            pytest.skip(outcome["skip"])
    assert_as_expected(outcomes, MACHINES[name].error)


def assert_as_expected(outcomes: list[Outcome], error: str) -> None:
    """Every rank came to the end, or every rank says why in a line, at least one in these words."""
    texts = [outcome.get("text", "") for outcome in outcomes]
    assert any(texts) == all(texts) == bool(error), outcomes
    for text in filter(None, texts):
        assert "\n" not in text, text
        assert re.search(rf"{error}|rank \d", text), outcomes
        assert "Timeout" not in text, outcomes
    assert any(re.search(error, text) for text in texts), outcomes
