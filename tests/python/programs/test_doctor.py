"""`ringcomm doctor`: what it says of a machine and a group, and what it reads of the kernel."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import mmap
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_cli import TUNED, WORLD

from _ringcomm import start as cli
from _ringcomm.status import EXIT_FAILED, EXIT_OK
from ringcomm import tuning
from ringcomm.measure import algorithms, doctor, machine
from ringcomm.screen import counted

pytestmark = pytest.mark.skipif(
    "ringcomm" not in dist.Backend.backend_list, reason="the extension is not installed"
)

Doctor = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run_doctor(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Doctor:
    """`ringcomm doctor` in this process, whose imports are done; its status and output."""
    for name in [name for name in os.environ if name.startswith("RINGCOMM_")]:
        monkeypatch.delenv(name)

    def run_here(*argv: str, **env: str) -> tuple[int, str, str]:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        status = cli.run(["doctor", *argv])
        out, err = capfd.readouterr()
        return status, out, err

    return run_here


def test_doctor_reports_machine_group_and_pairs(run_doctor: Doctor, tmp_path: Path) -> None:
    tuned = str(tmp_path / "tuning.json")
    tuning.save(dataclasses.replace(TUNED, machine={"cpu": "another", "cores": 2}), tuned)
    env = {"RINGCOMM_ALGORITHM": "two_shot", "RINGCOMM_TUNING": tuned, "RINGCOMM_TYPO": "1"}
    status, out, err = run_doctor("--json", "--world-size", "3", "--seconds", "0", **env)
    assert (status, err) == (EXIT_OK, "")
    report = json.loads(out)
    assert report["environment"] == env
    assert {"ringcomm", "torch", "python", "kernel", "simd"} <= report["versions"].keys()
    assert report["cpus"]["usable"] == sorted(os.sched_getaffinity(0))
    assert {"cpu_cores", "memory_bytes", "max_fds"} <= report["limits"].keys()
    assert report["threads"]["torch"] == torch.get_num_threads()
    group = report["group"]
    assert [pair["ranks"] for pair in group["pairs"]] == [[0, 1], [0, 2], [1, 2]]
    for pair in group["pairs"]:
        assert pair["transport"] == "shm"
        assert re.fullmatch(r"1 host: .* \(ranks 0 1 2\)", pair["why"])
        assert pair["latency_us"] > 0
        assert pair["gb_per_s"] > 0
    assert [point["algorithms"] for point in group["all_reduce"]] == [["two_shot"]] * 3
    memory = group["memory"]
    assert 0 < memory["resident_bytes"] <= memory["mapped_bytes"]
    assert memory["mapped_bytes"] <= 3 * (8 << 20)  # of three pairs
    notes = "\n".join(report["notes"])
    for text in (
        "RINGCOMM_TYPO is set, but ringcomm has no such variable",
        f"{tuned} has no entry for 3 ranks",
        "the file was tuned with 'another'",
    ):
        assert text in notes
    assert "RINGCOMM_TUNING is set" not in notes
    assert [problem["problem"] for problem in report["problems"]] == report["notes"]
    assert all(problem["fix"] for problem in report["problems"])
    assert doctor.examine(1, 0.0)["group"]["pairs"] == []


def test_what_decides_between_algorithms(
    run_doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More ranks than cores have a constant limit, and so have ranks whose cores are not known."""
    asked = ("--world-size", str(1 + len(os.sched_getaffinity(0))), "--seconds", "0")
    assert (
        "one_shot or two_shot by a size that is the same on all machines" in run_doctor(*asked)[1]
    )
    assert doctor._algorithms_text(1).endswith("what the group's calls find faster")
    monkeypatch.setenv("RINGCOMM_TUNING", "tuned.json")
    assert doctor._algorithms_text(1).startswith("RINGCOMM_TUNING says")


def test_doctor_names_messages(run_doctor: Doctor) -> None:
    asked = ("--json", "--world-size", "2", "--seconds", "0")
    status, out, err = run_doctor(*asked, RINGCOMM_TRANSPORT="messages")
    assert (status, err) == (EXIT_OK, "")
    (pair,) = json.loads(out)["group"]["pairs"]
    assert pair["transport"] == "messages"
    assert pair["why"].startswith("over gloo, as requested; 1 host: ")


def test_doctor_says_why_a_group_cannot_be_made(run_doctor: Doctor) -> None:
    """And tells the rest all the same."""
    status, out, err = run_doctor("--world-size", "2", RINGCOMM_TRANSPORT="tcp")
    assert (status, err) == (EXIT_FAILED, "")
    cause = "rank 1: ValueError: transport of ringcomm.Options, or RINGCOMM_TRANSPORT, must be"
    said = f"  ✗ the group could not be created: {cause} shm or messages, got 'tcp'\n"
    assert f"{said}    fix: look the message up" in out
    assert "cores" in out
    assert "all_reduce" not in out


def test_doctor_prints_a_line_for_each_check(run_doctor: Doctor) -> None:
    """✓ with units that people read, ✗ with one fix."""
    env = {"RINGCOMM_TRANSPRT": "shm", "RINGCOMM_ALGORITHM": "two_shot"}
    env |= {"RINGCOMM_AS_GLOO": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    status, out, err = run_doctor("--world-size", "2", "--seconds", "0", **env)
    assert (status, err) == (EXIT_OK, "")
    lines = [line for line in out.splitlines() if line]
    checks = [line for line in lines if line.startswith("  ✓ ")]
    wrong = [index for index, line in enumerate(lines) if line.startswith("  ✗ ")]
    fixes = [index for index, line in enumerate(lines) if line.startswith("    fix: ")]
    assert fixes == [index + 1 for index in wrong]
    assert len(lines) == len(checks) + 2 * len(wrong) + 3  # two titles, and how many problems
    assert lines[-1] == f"{counted(len(wrong), 'problem')} found; the group works"
    named = lines.index("  ✗ RINGCOMM_TRANSPRT is set, but ringcomm has no such variable")
    assert lines[named + 1] == "    fix: did you mean RINGCOMM_TRANSPORT?"
    unused = (
        "  ✗ RINGCOMM_AS_GLOO has no effect, and groups use Gloo: TORCH_DEVICE_BACKEND_AUTOLOAD"
    )
    assert f"{unused} is 0" in lines
    time_, rate = r"[\d.,]+ (µs|ms|s)", r"[\d.e+]+ GB/s"
    for pattern in (
        r"  ✓ [\d.,]+ [GM]iB of memory, [\d.,]+ [GM]iB available",
        rf"  ✓ ranks 0 and 1: 1 KiB in {time_}, 4 MiB with {rate}",
        r"  ✓ shared memory of the group: [\d.]+ [MK]iB in use of at most [\d.]+ MiB",
    ):
        assert any(re.fullmatch(pattern, line) for line in checks), (pattern, out)
    # ✗ if other programs use the cores.
    pattern = rf"  [✓✗] all_reduce of 16 MiB: {time_}, 99th percentile {time_}, "
    assert any(re.match(pattern, line) for line in lines), out


def problems(patch: pytest.MonkeyPatch, threads: str = "1", **changes: Any) -> dict[str, str]:
    """What is wrong, by check, of ranks on four cores with two threads each."""
    given = {"load": 4.0, "busbw": 1.1, "world_size": 2, "p99_us": 500.0, "others": 0.0, **changes}
    patch.setenv("OMP_NUM_THREADS", threads)
    point = {"bytes": 16 << 20, "busbw_gb_per_s": given["busbw"], "p50_us": 10.0}
    group = {"all_reduce": [{**point, "p99_us": given["p99_us"]}], "copy_gb_per_s": 10.0}
    report: dict[str, Any] = {
        "group": {**group, "others_busy_percent": given["others"]},
        "machine": {"cores": 8, "load": (2 * given["load"], 0, 0)},
        "cpus": {"num_cores": 4},
        "threads": {"torch": 3},
        "limits": {"cpu_cores": None},
        "environment": {},
    }
    return {check: text for check, text, _ in doctor._problems(report, given["world_size"])}


LATE = "all_reduce of 16 MiB"
WAITED, IN_USE = "a rank waited for a core", "other programs use the cores"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"threads": "2"}, {}),
        ({"load": 4.5, "threads": "2"}, {}),  # of programs that have ended
        ({"others": 11.0}, {"others": ""}),
        ({"load": 4.5, "others": 11.0}, {"others": "idle machine; load 9.00 over the minute"}),
        ({"busbw": 0.9}, {"speed": "has 9 % of the speed of one rank's copy"}),
        ({"threads": "3"}, {"environment": "2 ranks compute with 6 threads"}),
        ({"threads": "300"}, {"environment": "6 threads"}),  # more than torch takes
        ({"p99_us": 1000.0}, {LATE: f"100 times the median (at most 50 expected): {WAITED}"}),
        ({"p99_us": 1000.0, "others": 11.0}, {"others": "", LATE: IN_USE}),
        ({"world_size": 5}, {"cpus": "5 ranks on 4 cores: the ranks have to take turns"}),
    ],
)
def test_doctor_has_limits_for_load_speed_and_threads(
    changes: dict[str, Any], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://github.com/pytorch/pytorch/issues/91989: importing torch left a process one core."""
    for name in doctor.PINNING_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    found = problems(monkeypatch, **changes)
    assert [*found] == [*expected]
    assert all(words in found[check] for check, words in expected.items()), found
    if "cpus" in found:
        monkeypatch.setenv("GOMP_CPU_AFFINITY", "0-3")
        moved = "; with GOMP_CPU_AFFINITY=0-3 OpenMP moves each rank there when it imports torch"
        assert problems(monkeypatch, **changes) == {"cpus": found["cpus"] + moved}
        monkeypatch.setenv("OMP_PROC_BIND", "FALSE")
        assert problems(monkeypatch, **changes) == found


@pytest.mark.parametrize(
    ("threads", "cores", "said"),
    [
        (8, 8, "use 8 threads of a rank"),
        (8, 4, "use 1 thread of a rank: .* with OMP_NUM_THREADS=4 they use 4"),
        (1, 2, "use 1 thread of a rank: .* with OMP_NUM_THREADS=2 they use 2"),
        (1, 0, "use 1 thread of a rank: .* less than 1 core"),
        (2, 1, "use 1 thread .* without torchrun, .* ranks compute with 2 threads on 1 core"),
    ],
)
def test_doctor_says_how_many_threads_of_a_rank_copy(
    monkeypatch: pytest.MonkeyPatch, threads: int, cores: int, said: str
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    text = doctor._threads_text({"threads": {"torch": threads, "cores_per_rank": cores}})
    assert re.fullmatch(f"collectives of 256 KiB and more {said}.*", text), text
    assert ("they use" in text) == (threads != cores > 1)


def test_doctor_says_that_gloo_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ringcomm is not installed, so that `import torch` does not load it."""
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(doctor, "entry_points", lambda group: importlib.metadata.EntryPoints())
    report: dict[str, Any] = {
        "group": {},
        "machine": {"cores": 4, "load": (0, 0, 0)},
        "cpus": {"num_cores": 4},
        "limits": {"cpu_cores": None},
        "environment": {"RINGCOMM_AS_GLOO": "1"},
    }
    ((check, text, _),) = doctor._problems(report, 2)
    assert (check, "ringcomm is not installed here" in text) == ("environment", True)


def test_no_cost_model_of_a_disturbed_run() -> None:
    assert "copy_us 90" in algorithms._model_text(TUNED)
    disturbed = dataclasses.replace(TUNED, worlds=(dataclasses.replace(WORLD, quiet=False),))
    for found in (disturbed, dataclasses.replace(TUNED, worst_fit=1988.0)):
        assert "copy_us" not in algorithms._model_text(found)


@pytest.mark.parametrize(
    ("all_sizes", "of_2_mib", "setting", "text"),
    [
        ("always within_size advise [never] deny force", None, "never", "thp/shmem_enabled allows"),
        ("always within_size [advise] never deny force", None, "advise", "is advise"),
        ("always [never] deny", "always [inherit] within_size advise never", "never", "no huge"),
        ("always [never] deny", "[always] inherit within_size advise never", "always", "may have"),
        ("always [deny] force", "always [inherit] never", "deny", "is deny; `advise`"),
        ("[always] never", "always inherit [never]", "never", "2048kB/shmem_enabled allows"),
        (None, None, None, "does not say"),
        ("", None, None, "does not say"),
    ],
)
def test_huge_pages_of_shared_memory(
    tmp_path: Path, all_sizes: str | None, of_2_mib: str | None, setting: str | None, text: str
) -> None:
    files = {"shmem_enabled": all_sizes, "hugepages-2048kB/shmem_enabled": of_2_mib}
    write(tmp_path / "thp", {name: said for name, said in files.items() if said is not None})
    found = machine.huge_pages(tmp_path / "thp")
    assert (found and found["setting"]) == setting
    assert text in doctor._huge_pages_text(found)


def test_what_proc_says_of_memory_and_processes() -> None:
    found = machine.memory()
    assert found["total_bytes"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < found["available_bytes"] <= found["total_bytes"]
    assert 1 <= (machine.num_cores() or 1) <= (os.cpu_count() or 1)
    before = machine._cpu_s(os.getpid())
    begin = time.process_time()
    while time.process_time() < begin + 0.3:
        pass
    assert machine._cpu_s(os.getpid()) - before >= 0.2
    descriptor = os.memfd_create("ringcomm-of-a-test")
    os.ftruncate(descriptor, 8 << 12)
    with mmap.mmap(descriptor, 8 << 12) as memory:
        memory[:1] = b"x"
        after = machine.mapped_memory()
        memory.flush()
    os.close(descriptor)
    gone = machine.mapped_memory()
    assert after["mapped_bytes"] - gone["mapped_bytes"] == 8 << 12
    assert after["resident_bytes"] - gone["resident_bytes"] >= 1 << 12
    assert after["share_bytes"] - gone["share_bytes"] >= 1 << 12


# ---- what doctor reads of the kernel, from trees made as the kernel does


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def test_nodes_are_those_of_the_cores_that_a_process_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = {"node0": "0-3,8-11", "node1": "4-7,12", "node2": ""}  # node2 has only memory
    folder = write(tmp_path / "node", {f"{name}/cpulist": said for name, said in nodes.items()})
    for usable, expected in (({0, 9}, 1), ({3, 4}, 2), ({12}, 1), ({99}, 1)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, usable=usable: usable)
        assert machine.num_nodes(folder) == expected
    assert machine.num_nodes(tmp_path / "nowhere") == 1


def test_two_threads_of_a_core_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/llmmanorg/llmman/issues/331: a cpuset's CPUs were taken for cores."""
    siblings = {
        f"cpu{cpu}/topology/thread_siblings_list": f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)
    }
    cpus = write(tmp_path / "cpu", siblings)
    for usable, expected in ((range(8), 4), ({0, 4}, 1), ({0, 1}, 2), ({3, 7, 2}, 2), ({99}, None)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, usable=usable: usable)
        assert machine.num_cores(cpus) == expected
    # As reported at https://github.com/vllm-project/vllm/pull/38681, some have no topology.
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 4, 98, 99})
    assert machine.num_cores(cpus) == 3


def test_what_the_kernel_hides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As reported at https://github.com/google/gvisor/issues/91 of /sys,
    https://github.com/CypherpunkArmory/UserLAnd/issues/1476 of /proc/stat and
    https://github.com/rust-psutil/rust-psutil/issues/82 of MemAvailable.
    """
    pages = tmp_path / "meminfo"
    pages.write_text("MemTotal:        1048576 kB\nMemFree:          834036 kB\n")
    found = machine.memory(pages)
    assert found["total_bytes"] == 1 << 30
    assert found["available_bytes"] > 0
    monkeypatch.setattr(machine, "Path", lambda path: tmp_path / "hidden")
    monkeypatch.setattr(os, "getloadavg", lambda: os.stat(tmp_path / "hidden"))
    assert machine.memory(tmp_path / "hidden")["total_bytes"] > 0
    assert machine.num_cores(tmp_path / "hidden") is None
    assert machine.identity()["cpu"]
    assert machine.OthersWatch([os.getpid()]).percent() == 0
    assert machine.mapped_memory()["share_bytes"] == 0
    assert machine.load() is None
    assert doctor._load_text(machine.load()) == "the kernel does not say what the load is"


def test_limits_of_a_cgroup(tmp_path: Path) -> None:
    """An ancestor may allow less; the root of the hierarchy has no such files."""
    top = tmp_path / "cg"
    files = {"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}
    files |= {"a/memory.max": "max", "a/b/memory.max": str(3 << 30)}
    write(top, files)
    found = machine.read_limits(write(tmp_path / "proc", {"cgroup": "0::/a/b"}), top)
    assert found["cpu_cores"] == (1.5, str(top / "a/cpu.max"))
    assert found["memory_bytes"] == (3 << 30, str(top / "a/b/memory.max"))
    # In a container the cgroup may be at the root, and its name that on the host. Version 1 is not
    # read.
    top = tmp_path / "container"
    files = {"cpu.max": "250000 100000", "memory.max": str(5 << 30)}
    write(top, {**files, "memory/memory.limit_in_bytes": str(1 << 30)})
    lines = "4:memory:/\n1:name=systemd:/\n0::/a/gone"
    for proc in (write(tmp_path / "proc", {"cgroup": lines}), tmp_path / "no proc"):
        found = machine.read_limits(proc, top)
        assert found["cpu_cores"] == (2.5, str(top / "cpu.max"))
        assert found["memory_bytes"] == (5 << 30, str(top / "memory.max"))
    found = machine.read_limits(tmp_path / "no proc", tmp_path / "no cgroup")
    assert (found["cpu_cores"], found["memory_bytes"]) == (None, None)
