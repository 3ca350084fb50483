"""run_ranks(): a function on several ranks of a process group, for tests.

Ranks are kept in pools, one for each test file, world size and kind of group: a call costs a
millisecond, a forked rank some 0.1 s, a spawned one 14 s. A case that fails ends its pool; the next
one gets fresh ranks. Nothing waits for ever: a rank that is late is named, its stack shown, and the
pool killed.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import inspect
import os
import pickle
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import rank_server

# After the first error the others, who may be waiting for that rank, get this long to say theirs.
GRACE_S = 3.0
CLOSE_TIMEOUT_S = 60.0
# Of the server, which may be importing torch on a busy machine.
ANSWER_S = 300.0
# What a busy machine may take to make a group, whatever its timeout is then.
MAKE_S = 30.0
MAX_LOG_CHARS = 6000


EMULATED = "RINGCOMM_TEST_EMULATED_GPU"  # of ranks with the device "emugpu": its libraries


class RankFailure(AssertionError):
    """What went wrong, of each rank."""


class Pool:
    """Some ranks, and what they were told last."""

    def __init__(self, server: Server, env: Sequence[dict[str, str]], module: str = "") -> None:
        self._server = server
        self._folder = Path(tempfile.mkdtemp(dir=server.folder))
        self._env, self._module = env, module
        self._pids: list[int] = []
        self._calls: list[Connection] = []
        for rank in range(len(env)):
            pid, calls = self._fork(rank)
            self._pids.append(pid)
            self._calls.append(calls)

    def _fork(self, rank: int) -> tuple[int, Connection]:
        pid, fd = self._server.fork_rank(rank, self._folder, self._env[rank], self._module)
        return pid, Connection(fd)

    @property
    def pids(self) -> Sequence[int]:
        """By rank; a process that has ended keeps its number until a call has noticed that."""
        return self._pids

    def renew(self, rank: int) -> None:
        """Starts another process for a rank whose process has ended."""
        self._calls[rank].close()
        self._pids[rank], self._calls[rank] = self._fork(rank)

    def init_group(self, backend: str, pg_options: Any, timeout_s: float) -> None:
        world_size = len(self._pids)
        store = str(self._folder / "store")
        self.call(_init_group, (world_size, backend, store, pg_options, timeout_s), 60.0)

    def call(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        timeout_s: float,
        may_die: Collection[int] = (),
        grace_s: float = GRACE_S,
    ) -> list[Any]:
        """fn(rank, *args) on every rank; their results. Any error kills all: RankFailure."""
        __tracebackhide__ = True
        message = pickle.dumps((fn, args))
        for calls in self._calls:
            calls.send_bytes(message)
        waiting = {calls: rank for rank, calls in enumerate(self._calls)}
        results: list[Any] = [None] * len(self._calls)
        errors: list[str] = []
        deadline = time.monotonic() + timeout_s
        while waiting:
            try:
                ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            except KeyboardInterrupt:  # the end of the tests does not wait for these ranks
                self.kill()
                raise
            if not ready:
                errors.append(self._describe_stuck(sorted(waiting.values()), timeout_s, grace_s))
                break
            for readable in ready:
                assert isinstance(readable, Connection)
                rank = waiting.pop(readable)
                kind, value = self._receive(readable, rank)
                if kind == "result":
                    results[rank] = value
                elif kind == "error" or rank not in may_die:
                    errors.append(f"rank {rank}: {value}")
                    deadline = min(deadline, time.monotonic() + grace_s)
        if errors:
            self.kill()
            raise RankFailure("\n".join(["", *errors, *self._logs()]))
        return results

    def _receive(self, calls: Connection, rank: int) -> tuple[str, Any]:
        try:
            kind, value = pickle.loads(calls.recv_bytes())
        except (EOFError, ConnectionError):
            return "end", f"the process ended: {self._server.status(self._pids[rank], 5.0)}"
        return kind, value

    def _describe_stuck(self, ranks: list[int], timeout_s: float, grace_s: float) -> str:
        for rank in ranks:
            os.kill(self._pids[rank], signal.SIGUSR1)  # faulthandler writes its stack to the log
        time.sleep(0.3)
        return (
            f"rank(s) {ranks} did not finish in {timeout_s:g} s (or {grace_s:g} s after the first "
            "error); stacks below"
        )

    def _logs(self) -> list[str]:
        logs = []
        for rank in range(len(self._pids)):
            path = self._folder / f"rank{rank}.log"
            text = path.read_text(errors="replace") if path.exists() else ""
            if text.strip():
                logs.append(f"---- output of rank {rank}\n{text[-MAX_LOG_CHARS:]}")
        return logs

    def close(self, may_die: Collection[int] = ()) -> None:
        """Ends the ranks as a program ends: group destroyed, exit status 0."""
        living = [rank for rank in range(len(self._pids)) if rank not in may_die]
        try:
            if len(living) == len(self._pids):
                for names in self.call(_leave, (), CLOSE_TIMEOUT_S):
                    self._server.sockets_seen |= names
        finally:
            for calls in self._calls:
                calls.close()
        for rank in living:
            status = self._server.status(self._pids[rank], CLOSE_TIMEOUT_S)
            if status not in ("exit status 0", "no child of the server"):
                self.kill()
                raise RankFailure("\n".join([f"rank {rank} ended with {status}", *self._logs()]))

    def kill(self) -> None:
        for rank, pid in enumerate(self._pids):
            if self._server.status(pid, 0.0) is None:
                os.kill(pid, signal.SIGKILL)
                self._server.status(pid, 5.0)
            self._calls[rank].close()
        self._server.forget(self)


def shared_memory_left() -> list[str]:
    """What the ranks of all servers have left in /dev/shm, once they have ended."""
    return [f"shared memory {path}" for path in Path("/dev/shm").glob("*ringcomm*")]


class Server:
    """This process's end of the server that forks ranks, and the pools."""

    def __init__(self, prepare: Callable[[], None] = rank_server.import_ringcomm) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ringcomm-tests-"))
        self.sockets_seen: set[str] = set()
        self._socket = rank_server.start_server(self.folder, prepare)
        self._requests = Connection(os.dup(self._socket.fileno()))
        self._pools: dict[Any, Pool] = {}

    def _ask(self, *request: Any) -> None:
        self._requests.send_bytes(pickle.dumps(request))

    def _answer(self) -> Any:
        if not self._requests.poll(ANSWER_S):
            raise RankFailure("the server of the ranks does not answer: see its server.log")
        return pickle.loads(self._requests.recv_bytes())

    def fork_rank(
        self, rank: int, folder: Path, env: dict[str, str], module: str
    ) -> tuple[int, int]:
        self._ask("fork_rank", rank, folder, env, module)
        self._socket.settimeout(ANSWER_S)
        _, fds, _, _ = socket.recv_fds(self._socket, 1, 1)
        if not fds:
            raise RankFailure((self.folder / "server.log").read_text())
        return self._answer(), fds[0]

    def status(self, pid: int, timeout_s: float) -> str | None:
        self._ask("status", pid, timeout_s)
        return self._answer()

    def pool(self, key: Any, make: Callable[[], Pool]) -> Pool:
        if key not in self._pools:
            self._pools[key] = make()
        return self._pools[key]

    def forget(self, pool: Pool) -> None:
        self._pools = {key: other for key, other in self._pools.items() if other is not pool}

    def close_pools(self) -> None:
        """Called after each test file."""
        pools, self._pools = self._pools, {}
        for pool in pools.values():
            pool.close()

    def stop(self) -> list[str]:
        """Ends the server; names what the ranks have left behind."""
        self.close_pools()
        try:
            self._ask("stop", 2.0)
            left = list(self._answer())
        except (OSError, EOFError):  # it could not even import ringcomm, perhaps
            return ["no server: " + (self.folder / "server.log").read_text()[-MAX_LOG_CHARS:]]
        if not self._requests.poll(5.0):  # nor is the server itself there: its end is closed
            left.append("the server of the ranks")
        open_sockets = {line.split()[-1] for line in _ringcomm_sockets()}
        left += [f"socket {name}" for name in open_sockets & self.sockets_seen]
        if not left:
            shutil.rmtree(self.folder)
        return left


_servers: list[Server] = []


def start() -> None:
    """Called once, by conftest.py."""
    _servers.append(Server())


def stop() -> list[str]:
    """Ends the server, if there is one; names what the ranks have left behind."""
    return _servers.pop().stop() if _servers else []


def server() -> Server:
    """The one that conftest.py started."""
    return _servers[0]


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 120.0,
    backend: str | None = "ringcomm",
    pg_options: Any = None,
    fresh: bool = False,
    may_die: Collection[int] = (),
    group_timeout_s: float = 30.0,
    env: dict[str, str] | Sequence[dict[str, str]] | None = None,
    grace_s: float = GRACE_S,
    module: str = "",
) -> list[Any]:
    """Calls fn(rank, *args) on every rank of a group and returns the results, by rank.

    Args:
        fn: a function at the top of a module; like args, it is pickled.
        timeout_s: of the whole call.
        backend: of the default group, which is there when fn is called; None makes no group.
        pg_options: of the default group.
        fresh: ranks of its own, for a case that does not leave the group whole.
        may_die: ranks that may end in the case; their result is None. Wants `fresh`.
        group_timeout_s: of the group's collectives.
        env: added to the ranks' environment: to all, or to each its own.
        grace_s: what the others get after the first error, before they are killed.
        module: imported before ranks are forked; fn's by default.

    Raises:
        RankFailure: with every rank's traceback, and the stacks of those that did not come back.
    """
    __tracebackhide__ = True
    rank_env = [env or {}] * world_size if isinstance(env, dict | None) else env
    if "emugpu" in args:
        import emulated_gpu

        if backend == "gloo":
            pytest.skip("Gloo has no tensors on emulated GPUs")
        driver, extension = emulated_gpu.build()
        emulated = {EMULATED: f"{driver}:{extension}", "RINGCOMM_EMULATOR_SMS": "512"}
        emulated |= emulated_gpu.with_kernels() | {rank_server.DROPS_GROUPS: "1"}
        rank_env = [{**emulated, **own} for own in rank_env]

    def make() -> Pool:
        pool = Pool(server(), rank_env, module or fn.__module__)
        if backend is not None:
            pool.init_group(backend, pg_options, group_timeout_s)
        return pool

    if not fresh:
        key = (fn.__module__, world_size, backend, pg_options, group_timeout_s, str(rank_env))
        return server().pool(key, make).call(fn, args, timeout_s, grace_s=grace_s)
    pool = make()
    results = pool.call(fn, args, timeout_s, may_die, grace_s)
    pool.close(may_die)
    return results


class Body:
    """What a test of make_test() does, which ranks find by the test's name."""

    def __init__(self, body: Callable[..., Any]) -> None:
        self.__module__ = body.__module__
        self._name = body.__name__

    def __call__(self, rank: int, *args: Any) -> Any:
        return getattr(importlib.import_module(self.__module__), self._name).body(rank, *args)


def make_test(
    body: Callable[..., Any], run: Callable[..., Any], names: Collection[str]
) -> Callable[..., None]:
    """A test that takes body's parameters but the rank, and `names`.

    It calls run(Body, *arguments of body, **those of `names`).
    """
    own = list(inspect.signature(body).parameters)[1:]

    def test(**given: Any) -> None:
        __tracebackhide__ = True
        run(Body(body), *(given[name] for name in own), **{name: given[name] for name in names})

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, keyword) for name in dict.fromkeys([*own, *names])]
    test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    test.__doc__, test.__module__, test.__name__ = body.__doc__, body.__module__, body.__name__
    test.pytestmark = list(getattr(body, "pytestmark", []))  # type: ignore[attr-defined]
    test.body = body  # type: ignore[attr-defined]
    return test


def hosts(places: str) -> list[dict[str, str]]:
    """Environments of ranks: each letter is the host of its rank; with - all is messages."""
    return [
        {"RINGCOMM_TRANSPORT": "messages"} if host == "-" else {"RINGCOMM_HOST_ID": f"host-{host}"}
        for host in places
    ]


def in_ranks(
    world_size: int | Sequence[int] = (),
    envs: Mapping[str, Any] | Sequence[str] = (),
    *,
    may_die: Collection[int] | str = (),
    **options: Any,
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Makes a test of a function that every rank of a group runs.

    The function's parameters after the rank are the test's, from fixtures or parametrize(). A
    parameter `backend` is the default group's, `env` is that of the ranks.

    Args:
        world_size: several make a test of each; by default the number of environments, or if the
            test has none its parameter `world_size`.
        envs: environments by name, or hosts(), which make a test of each.
        may_die: run_ranks()'s, or the name of the parameter that has it.
        options: run_ranks()'s.
    """
    sizes = [world_size] if isinstance(world_size, int) else list(world_size)

    def run(body: Body, *args: Any, **given: Any) -> None:
        __tracebackhide__ = True
        own = dict(options)
        if env := given.get("env"):
            own["env"] = envs[env] if isinstance(envs, Mapping) else hosts(env)
        own["may_die"] = given[may_die] if isinstance(may_die, str) else may_die
        if "backend" in given:
            own["backend"] = given["backend"]
        size = given.get("world_size") or (sizes[0] if sizes else len(own["env"]))
        run_ranks(size, body, *args, **own)

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        own = inspect.signature(body).parameters
        drawn: dict[str, list[Any]] = {"world_size": [], "env": list(envs)}
        if len(sizes) > 1:
            drawn["world_size"] = sizes
        names = [name for name, values in drawn.items() if values]
        if "env" in own and not envs:
            names.append("env")
        if not (sizes or "env" in [*names, *options]):
            names.append("world_size")
        if "backend" in own and "backend" not in options:
            names.append("backend")
        test = make_test(body, run, [*names, *([may_die] if isinstance(may_die, str) else [])])
        for name, values in drawn.items():
            if values:
                test = pytest.mark.parametrize(name, values)(test)
        return test

    return decorate


def place(device: str, rank: int) -> Any:
    """The torch.device of a rank for a test's fixture `device`; a GPU becomes the current one."""
    import torch

    if device == "cpu":
        return torch.device("cpu")
    module: Any = torch.get_device_module(device)
    module.set_device(rank % module.device_count())
    return torch.device(device, module.current_device())


def init_group(
    rank: int,
    world_size: int,
    store: str | Path,
    timeout_s: float = 30.0,
    pg_options: Any = None,
    backend: str = "ringcomm",
    *,
    keeps_file: bool = False,
) -> None:
    """Makes the default group, over the file `store`; for ranks that are made without one.

    The last of `world_size` FileStores to be closed removes the file, even if one has just been
    opened on it: `keeps_file` is for groups that are made a second time.
    """
    import torch.distributed as dist

    dist.init_process_group(
        backend,
        store=dist.FileStore(str(store), -1 if keeps_file else world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
        pg_options=pg_options,
    )


def _init_group(
    rank: int, world_size: int, backend: str, store: str, pg_options: Any, timeout_s: float
) -> None:
    import torch.distributed as dist

    from ringcomm.torch_names import backend_of, devices_of, set_timeout

    if libraries := os.environ.get(EMULATED):
        import emulated_gpu

        os.environ.setdefault("RINGCOMM_EMULATOR_BOX", store)
        driver, extension = map(Path, libraries.split(":"))
        emulated_gpu.load((driver, extension)).set_device(0)
    is_ours = "ringcomm" in backend
    make_s = max(timeout_s, MAKE_S) if is_ours else timeout_s
    init_group(rank, world_size, store, make_s, pg_options, backend)
    made: Any = dist.group.WORLD
    for device in devices_of(made) if is_ours and timeout_s < MAKE_S else ():
        set_timeout(backend_of(made, device).options, datetime.timedelta(seconds=timeout_s))


def _ringcomm_sockets() -> list[str]:
    lines = Path("/proc/net/unix").read_text().splitlines()
    return [line for line in lines if line.split()[-1].startswith("@ringcomm-")]


def _leave(rank: int) -> set[str]:
    """Names this process's sockets of ringcomm, and destroys the groups."""
    import torch.distributed as dist

    lines, mine = _ringcomm_sockets(), set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            mine.add(os.readlink(link))
    if dist.is_initialized():
        dist.destroy_process_group()
    fields = [line.split() for line in lines]
    return {line[-1] for line in fields if f"socket:[{line[6]}]" in mine}


def end_groups() -> None:
    """Destroys all groups of a rank that may make others.

    DTensor caches shardings by the contents of meshes: the next group's weights would be on a mesh
    of this one, with groups that are gone.
    """
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    dist.destroy_process_group()
    _clear_sharding_prop_cache()
