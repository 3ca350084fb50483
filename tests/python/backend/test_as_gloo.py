"""ringcomm in programs that never import it: by its name, or as Gloo by RINGCOMM_AS_GLOO=1."""

from __future__ import annotations

import importlib.metadata
import io
import re
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from cases import slow
from rank_programs import run_command

from ringcomm import as_gloo
from ringcomm.options import timeout_of

ROOT = Path(__file__).parents[3]
IS_INSTALLED = "ringcomm" in [
    e.name for e in importlib.metadata.entry_points(group="torch.backends")
]
# Cases, each in two ranks, forked after the import of torch.
PROGRAM = """
import os, sys, torch, torch.distributed as dist
from datetime import timedelta

def use_names_of_gloo(store, rank, real):
    gloo, backend = dist.ProcessGroupGloo, dist.group.WORLD._get_backend(torch.device("cpu"))
    options = backend._Options()
    options._devices = [backend.create_device(interface="lo")]
    assert isinstance(backend.create_default_device(), backend.Device)
    tensor = torch.ones(5)
    gloo(dist.PrefixStore("made", store), rank, 2, options).allreduce([tensor]).wait()
    dist.all_reduce(tensor, group=dist.new_group(pg_options=options))
    assert tensor.tolist() == [4] * 5
    backend._set_default_timeout(timedelta(seconds=40))
    assert backend.options._timeout == timedelta(seconds=40)
    assert isinstance(backend, gloo) == hasattr(backend.options, "_devices") == (real == "gloo")
    if real == "ringcomm":
        options = backend.options
        for use in (lambda: options._threads, lambda: setattr(options, "_threads", 1)):
            try:
                use()
            except AttributeError as error:
                assert "has no _threads; GLOO_SOCKET_IFNAME" in str(error), error
            else:
                raise AssertionError("no error")
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
    if rank == 0:
        try:
            dist.all_reduce(tensor)
        except dist.DistBackendError if real == "ringcomm" else RuntimeError:
            store.set("it failed", "")
    store.wait(["it failed"], timedelta(seconds=60))

def run(rank, number, backend, as_gloo, real, other_host):
    os.environ["RINGCOMM_AS_GLOO"] = as_gloo
    {register}
    assert "ringcomm" not in sys.modules
    assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
    assert dist.Backend.default_device_backend_map["cuda"] == "nccl"
    os.environ["RINGCOMM_HOST_ID"] = ("here", other_host)[rank]
    store = dist.FileStore({folder!r} + "/store" + str(number), 2)
    if real == "refused":
        try:
            return dist.init_process_group(backend, store=store, rank=rank, world_size=2)
        except ValueError as error:
            variable = "the environment variable RINGCOMM_AS_GLOO"
            sys.exit(str(error) != f"{{variable}} must be 0 or 1, got '{{as_gloo}}'")
    os.environ["RINGCOMM_TIMEOUT"] = "45.5"
    dist.init_process_group(backend, store=store, rank=rank, world_size=2)
    if real == "ringcomm":
        timeout = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
        assert timeout == timedelta(seconds=45.5), timeout
    name = "gloo" if as_gloo else "ringcomm"
    for group in (dist.group.WORLD, dist.new_group(), dist.new_group([0, 1], backend=name)):
        tensor = torch.ones(5)
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [2] * 5
        objects = [None, None]
        dist.all_gather_object(objects, f"of {{rank}}", group=group)
        assert objects == ["of 0", "of 1"]
        if dist.get_backend(group) == "gloo":
            dist.monitored_barrier(group, timedelta(seconds=30))
        assert dist.get_backend(group) in (name, backend, "undefined"), dist.get_backend(group)
        assert group._get_backend(torch.device("cpu")).name() == real
    assert ("ringcomm" in sys.modules) == (real == "ringcomm")
    if as_gloo:
        return use_names_of_gloo(store, rank, real)  # which ends in an error
    dist.destroy_process_group()

for number, case in enumerate({cases!r}):
    for rank in range(2):
        if os.fork() == 0:
            run(rank, number, *case)
            sys.stderr.flush()
            os._exit(0)
    assert [os.wait()[1] for _ in range(2)] == [0, 0], case
print("fine")
"""
# torch finds an installed ringcomm by itself. Twice does no harm.
BY_HAND = "import _ringcomm.autoload as a; a.register(); a.register()"
# Backend, RINGCOMM_AS_GLOO, what it is really, and the host of the other rank.
CASES: list[tuple[str | None, ...]] = [
    ("cpu:gloo", "1", "ringcomm", "here"),
    (None, "1", "ringcomm", "here"),
    ("gloo", "1", "ringcomm", "there"),
    ("gloo", "0", "gloo", "here"),
    ("gloo", "true", "refused", "here"),
]


BY_NAME = ("cpu:ringcomm", "", "ringcomm", "here")


@pytest.mark.parametrize(
    ("is_found", "cases"),
    [slow(False, CASES), (True, CASES[:1]), slow(True, [BY_NAME])],
    ids=["by hand", "found by torch, as gloo", "found by torch, by name"],
)
def test_programs(is_found: bool, cases: list[tuple[str | None, ...]], tmp_path: Path) -> None:
    is_found = is_found and IS_INSTALLED
    program = PROGRAM.format(
        register="pass" if is_found else BY_HAND, folder=str(tmp_path), cases=cases
    )
    env = {
        "OMP_NUM_THREADS": "1",
        "RINGCOMM_AS_GLOO": str(cases[0][1]),  # which torch's search for backends sees
        "TORCH_DEVICE_BACKEND_AUTOLOAD": str(int(is_found)),
    }
    folder = tmp_path if is_found else ROOT
    done = run_command(sys.executable, "-c", program, cwd=folder, env=env)
    assert done.stdout == "fine\n", done.stderr
    said = done.stderr.count("ringcomm serves the CPU tensors of groups that ask for gloo")
    # By rank 0 of each case that ringcomm serves.
    assert said == sum(case[1:3] == ("1", "ringcomm") for case in cases), done.stderr


def test_a_closed_standard_error_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has no sys.stderr where a daemon has closed it."""
    for stderr in (io.StringIO(), None):
        monkeypatch.setattr(sys, "stderr", stderr)
        as_gloo.say_once.__wrapped__()
        assert stderr is None or "serves the CPU tensors" in stderr.getvalue()


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "inf"])
def test_a_timeout_that_is_none(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGCOMM_TIMEOUT", text)
    with pytest.raises(ValueError, match=f"must be a number of seconds such as 60, got '{text}'"):
        timeout_of(timedelta(seconds=3))


# The ranks of a group, forked after the import of torch; some without the variable.
MIXED = """
import os, sys, time, torch, torch.distributed as dist
from datetime import timedelta

def make(rank, backend, timeout_s):
    store = dist.FileStore({folder!r} + "/store", 99)  # which nobody removes
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size={world_size}, timeout=timeout
    )

def run(rank):
    os.dup2(os.open(f"{folder}/log{{rank}}", os.O_CREAT | os.O_WRONLY), 2)
    if {is_old}:
        make(rank, "gloo", 60)
        dist.destroy_process_group()
        open(f"{folder}/over{{rank}}", "w").close()
        while not os.path.exists(f"{folder}/over{{1 - rank}}"):
            time.sleep(0.05)
    if rank != {other}:
        os.environ["RINGCOMM_AS_GLOO"] = "1"
        import _ringcomm.autoload
        _ringcomm.autoload.register()
        while b"cpu//0/{other}" not in open({folder!r} + "/store", "rb").read():
            time.sleep(0.05)
    elif {is_old}:
        return
    try:
        make(rank, "gloo", {timeout_s})
    except Exception as error:
        sys.stderr.write(f"ERROR {{error}}\\n")

for rank in range({world_size}):
    if os.fork() == 0:
        run(rank)
        sys.stderr.flush()
        os._exit(0)
assert [os.wait()[1] for _ in range({world_size})] == [0] * {world_size}
"""


@pytest.mark.parametrize(
    ("world_size", "other", "is_old", "timeout_s"),
    [(2, 1, False, 4), slow(3, 0, False, 4), slow(2, 1, True, 12)],
    ids=["rank 1", "rank 0", "keys of an earlier group"],
)
def test_the_variable_on_some_ranks_only(
    world_size: int,
    other: int,
    is_old: bool,
    timeout_s: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """https://github.com/ray-project/ray/issues/2260 and
    https://github.com/open-mpi/ompi/issues/4877
    """
    fields = {"other": other, "is_old": is_old, "timeout_s": timeout_s}
    program = MIXED.format(folder=str(tmp_path), world_size=world_size, **fields)
    (tmp_path / "store").touch()
    monkeypatch.delenv("RINGCOMM_AS_GLOO", raising=False)
    env = {"OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = run_command(sys.executable, "-c", program, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr
    words = f"rank {other} made a Gloo group instead, unless an earlier one has left its keys"
    for rank in set(range(world_size)) - {other}:
        said, _, error = (tmp_path / f"log{rank}").read_text().partition("ERROR ")
        assert f"rank {other} did not join the group in {timeout_s}000 ms" in error
        if is_old:
            assert "a Gloo group" not in error + said
        else:
            assert re.search(rf"in \d s; the group is still being made; {words}", said), said
            assert words in error
            assert "name one backend, with RINGCOMM_AS_GLOO=1 on all ranks" in error
