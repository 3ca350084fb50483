"""Sweeps on devices, on one that is the host with a clock of its own; MPS with a stand-in.

No test here asserts a time.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fused_update
import mps
import plot
import pytest
import torch
from operations import OPERATIONS
from placement import MEMORY_FACTORS, Placement, Speeds, memory_bytes

from ringcomm import cli
from ringcomm.measure import ranks

KIND = "hostgpu"


class HostEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: HostEvent) -> float:
        return (end.at - self.at) * 1e3


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices whose tensors are the CPU's."""
    module = SimpleNamespace(
        Event=HostEvent,
        synchronize=lambda device=None: None,
        set_device=lambda device: None,
        device_count=lambda: 2,
    )
    monkeypatch.setattr(torch, KIND, module, raising=False)
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: module)
    monkeypatch.setattr(Placement, "device_of", lambda self, rank: torch.device("cpu"))


def run(path: Path, *argv: str, op: str = "all_reduce") -> tuple[int, list[dict[str, Any]]]:
    quick = ["--seconds", "0.02", "--repeats", "0", "--json", str(path), "--device", KIND]
    code = cli.run(["bench", op, *quick, *argv])
    return code, [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("clock", ["events", "host"])
def test_records(tmp_path: Path, clock: str, capfd: pytest.CaptureFixture[str]) -> None:
    drawing = tmp_path / "plot.png"
    peers = "gloo,mpi4py,nccl" if clock == "events" else "gloo"
    code, records = run(
        tmp_path / "records.jsonl",
        *("--peers", peers, "--sizes", "1k", "--dtype", "float32,bfloat16"),
        *("--layout", "one", "--clock", clock, "--plot", str(drawing)),
    )
    assert code == ranks.EXIT_OK
    said = capfd.readouterr().out
    if clock == "events":
        assert "not available: mpi4py: its calls take arrays in the host's memory" in said
        assert "not available: nccl" in said
    points = [(r["dtype"], r["backend"]) for r in records]
    expected = [
        (dtype, backend) for dtype in ("float32", "bfloat16") for backend in ("ringcomm", "gloo")
    ]
    assert points == expected
    for record in records:
        assert (record["kind"], record["device"]) == ("collective_on_device", KIND)
        assert (record["layout"], record["num_devices"], record["mps"]) == ("one", 2, False)
        assert (record["mode"], record["clock"], record["calls_per_graph"]) == (
            *("eager", clock),
            None,
        )
        assert record["count"] * (4 if record["dtype"] == "float32" else 2) == record["bytes"]
        assert record["verified"]
        assert record["num_buffers"] == 32
        assert record["link_gb_per_s"] is None
        # The floor by hand: 2 N S bytes at the copy's speed, and the share of the median call.
        floor_us = 4 * record["bytes"] / record["copy_gb_per_s"] / 1e3
        assert record["floor_us"] == pytest.approx(floor_us, rel=1e-3)
        assert record["share_of_floor"] == pytest.approx(floor_us / record["p50_us"], rel=1e-3)
    assert f"2 ranks on 1 {KIND}" in said
    late = [{**r, "device": "cuda", "gpu": "X", "date": "2099"} for r in records]
    early = [{**r, "device": "cuda", "gpu": "X", "date": "2098"} for r in records]
    assert plot.device_runs([*records, *early, *late]) == {"bandwidth-w2-one.png": late}
    if "no plot" not in said:
        assert drawing.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.usefixtures("devices")
def test_every_operation(tmp_path: Path) -> None:
    names = ",".join(name for name in OPERATIONS if name != "all_reduce_shared")
    code, records = run(
        tmp_path / "records.jsonl",
        *("--peers", "none", "--sizes", "1k", "--layout", "all"),
        op=names,
    )
    assert code == ranks.EXIT_OK
    assert [record["op"] for record in records] == names.split(",")
    assert all(record["link_gb_per_s"] > 0 for record in records)


@pytest.mark.usefixtures("devices")
def test_one_wrong_element_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operation = OPERATIONS["all_reduce"]

    def spoil(buffers: Any, group: Any) -> None:
        operation.call(buffers, group)
        if buffers.place.rank == 1:
            buffers.output[7] += 1

    broken = dataclasses.replace(operation, call=spoil)
    monkeypatch.setitem(OPERATIONS, "all_reduce", broken)
    code, records = run(tmp_path / "records.jsonl", "--peers", "none", "--sizes", "1k")
    assert code == ranks.EXIT_WRONG_RESULTS
    assert records[0]["wrong_elems"] == 2


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize(
    ("optimizer", "dtype", "num_state_bytes"),
    [("adamw", "bfloat16", 12), ("lomo", "float32", 0)],
)
def test_steps(tmp_path: Path, optimizer: str, dtype: str, num_state_bytes: int) -> None:
    path = tmp_path / "records.jsonl"
    quick = ["--seconds", "0.02", "--repeats", "0", "--sizes", "40000", "--json", str(path)]
    where = ["--device", KIND, "--layout", "one", "--world", "2", "--no-mps"]
    code = fused_update.main([*quick, *where, "--optimizer", optimizer, "--dtype", dtype])
    assert code == ranks.EXIT_OK
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [record["way"] for record in records] == ["fused", "zero1"]
    elem_bytes = 2 if dtype == "bfloat16" else 4
    num_elems = 40_000 // elem_bytes
    for record in records:
        assert (record["kind"], record["verified"]) == ("fused_update_on_device", True)
        assert record["state_bytes"] == num_state_bytes * num_elems
        # 2 N S, states read and written, and parameters read where no master is.
        moved = (4 * elem_bytes + 2 * num_state_bytes) * num_elems
        moved += 0 if num_state_bytes == 12 else elem_bytes * num_elems
        floor_us = moved / record["copy_gb_per_s"] / 1e3
        assert record["floor_us"] == pytest.approx(floor_us, rel=1e-3)


def test_every_operation_has_a_floor() -> None:
    assert MEMORY_FACTORS.keys() == OPERATIONS.keys()
    four_on_two = Placement("cuda", 2)
    # Two ranks of each device read and write a MB each: 4 MB; half as much crosses each link.
    assert memory_bytes("all_reduce", 1_000_000, four_on_two, 4) == 4_000_000
    assert Speeds(1e12, None).floor_us(4e6, 1.5e6) == 4.0
    assert Speeds(1e12, 1e11).floor_us(4e6, 1.5e6) == 15.0


@pytest.mark.parametrize(
    ("placement", "used", "most", "where"),
    [
        (Placement("cuda", 8, "one"), 1, 4, [0, 0, 0, 0]),
        (Placement("cuda", 8, "all"), 4, 1, [0, 1, 2, 3]),
        (Placement("cuda", 3, "all"), 3, 2, [0, 1, 2, 0]),
    ],
)
def test_places(placement: Placement, used: int, most: int, where: list[int]) -> None:
    assert (placement.num_used(4), placement.max_ranks(4)) == (used, most)
    assert [placement.device_of(rank).index for rank in range(4)] == where


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--device", "cuda"], "no cuda device here"),
        (["--device", "no_such_device"], "no no_such_device device here"),
        (["--graph", "20"], "add --device cuda"),
        (["--dtype", "float31"], "float31"),
        (["--nccl-library", "/nowhere/libnccl.so"], "/nowhere/libnccl.so"),
    ],
)
def test_what_makes_no_sense_is_refused(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "cuda" in argv and torch.cuda.device_count():
        pytest.skip("there is one")
    with pytest.raises(SystemExit):
        cli.run(["bench", "all_reduce", *argv])
    assert message in capsys.readouterr().err


# ---- MPS

# What the daemon's control program does, as far as it is used: -d starts a process in the
# background, quit ends it, and the list of servers has one more.
CONTROL = f"""#!{sys.executable}
import os, pathlib, signal, subprocess, sys
folder = pathlib.Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
sleeper = [sys.executable, "-c", "import time; time.sleep(300)"]
def start(name):
    process = subprocess.Popen(sleeper, start_new_session=True, stdin=subprocess.DEVNULL,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (folder / name).write_text(str(process.pid))
if sys.argv[1:] == ["-d"]:
    if os.environ.get("MPS_REFUSES"):
        sys.exit("An instance of this daemon is already running")
    start("nvidia-cuda-mps-control.pid")
    start("server.pid")
    sys.exit()
for command in sys.stdin.read().split():
    if command == "get_server_list":
        print((folder / "server.pid").read_text())
    elif command == "quit":
        for name in ("nvidia-cuda-mps-control.pid", "server.pid"):
            os.kill(int((folder / name).read_text()), signal.SIGKILL)
"""


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / mps.CONTROL
    path.write_text(CONTROL, encoding="utf-8")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def pids_of(folder: str) -> list[int]:
    return [int((Path(folder) / name).read_text()) for name in ("server.pid", f"{mps.CONTROL}.pid")]


def await_end(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "the daemon is still there"
        time.sleep(0.02)


@pytest.mark.usefixtures("control")
def test_mps_lasts_as_long_as_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_LOG_DIRECTORY", "/of/another")
    with mps.Mps():
        folder = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
        pids = pids_of(folder)
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    await_end(pids)
    assert not Path(folder).exists()
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert os.environ["CUDA_MPS_LOG_DIRECTORY"] == "/of/another"


@pytest.mark.usefixtures("control")
def test_mps_does_not_outlive_a_killed_program() -> None:
    program = "import time; from mps import Mps\nwith Mps():\n import os\n print("
    program += "os.environ['CUDA_MPS_PIPE_DIRECTORY'], flush=True)\n time.sleep(60)"
    command, folder = [sys.executable, "-c", program], Path(mps.__file__).parent
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = pids_of(process.stdout.readline().strip())
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    await_end(pids)


@pytest.mark.usefixtures("control")
def test_an_mps_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPS_REFUSES", "1")
    with pytest.raises(RuntimeError, match="already running"), mps.Mps():
        pass
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
