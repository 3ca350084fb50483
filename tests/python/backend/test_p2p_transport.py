"""Transport "p2p": which backend carries the messages of a group, and how its ends are made.

What ranks do over messages: the tests of the other files, each of which runs over both transports.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_errors import ENVS, caught
from test_p2p import check_sizes, check_source_and_futures

from ringcomm import Options, message_backend


def check_carrier(rank: int) -> None:
    for num_elems in (1, 1000, 300_001):
        inputs = [oracle.integers(r, num_elems, torch.float32) for r in range(2)]
        tensor = inputs[rank].clone()
        dist.all_reduce(tensor)
        oracle.assert_equal(tensor, oracle.reduced(inputs, "sum"))
        dist.reduce(inputs[rank], 1)
    check_sizes(rank)
    check_source_and_futures(rank)


def test_over_another_backend() -> None:
    """ringcomm's own shared memory as a stranger: a backend with Backend.abort() only."""
    run_ranks(2, check_carrier, pg_options=Options(transport="p2p", p2p_backend="ringcomm"))


def test_carriers_of_devices() -> None:
    with pytest.raises(ValueError, match=r"xpu .*cpu:ringcomm,cuda:nccl"):
        message_backend.for_device("gloo", "xpu")


def make_again(rank: int, path: str) -> None:
    """Groups over one store, one after the other, also with other options, ended in two ways."""
    for turn, num_slots in enumerate((2, 2, 3, 2)):
        if rank == 0 and turn > 0:
            time.sleep(0.1)  # the others find this rank's old record first
        store = dist.PrefixStore("same", dist.FileStore(path, 3))
        options = Options(num_slots=num_slots)
        dist.init_process_group(
            "ringcomm", store=store, rank=rank, world_size=3, pg_options=options
        )
        tensor = torch.full((100_001,), float(turn))
        dist.all_reduce(tensor)
        assert (tensor == 3.0 * turn).all()
        if turn % 2 == 1:
            dist.barrier()
            dist.group.WORLD._get_backend(torch.device("cpu")).abort()  # type: ignore[union-attr]
        dist.destroy_process_group()


@pytest.mark.parametrize("env", ENVS)
def test_groups_are_made_again_over_the_same_store(tmp_path: Path, env: str) -> None:
    run_ranks(3, make_again, str(tmp_path / "s"), backend=None, fresh=True, env=ENVS[env])


def make_late(rank: int, fails: bool) -> tuple[float, dict[str, Any]]:
    """When rank 0 has made its end, or any other its group; and the error."""
    make, made_s = dist.ProcessGroupGloo, 0.0

    def make_own(*args: Any, **kwargs: Any) -> Any:
        nonlocal made_s
        backend = make(*args, **kwargs)
        time.sleep(0.2)
        if fails:
            raise OSError("no such network")
        made_s = time.monotonic()
        return backend

    if rank == 0:
        dist.ProcessGroupGloo = make_own  # type: ignore[assignment,misc]
    try:
        error = caught(lambda: dist.destroy_process_group(dist.new_group()))
    finally:
        dist.ProcessGroupGloo = make  # type: ignore[misc]
    return made_s or time.monotonic(), error


def test_no_rank_has_a_group_before_all_have() -> None:
    """A rank that leaves it at once would close connections that others are making."""
    (made_s, _), *others = run_ranks(3, make_late, False, env=ENVS["p2p"])
    for had_s, error in others:
        assert not error, error
        assert had_s >= made_s


def test_a_rank_that_cannot_make_its_end_is_named() -> None:
    for rank, (_, error) in enumerate(run_ranks(3, make_late, True, fresh=True, env=ENVS["p2p"])):
        assert error["type"] == "RingcommError", error
        assert ("rank 0: " if rank > 0 else "") + "no such network" in error["text"], error
