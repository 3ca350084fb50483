"""What doctor reads of the kernel (CPUs, caches, limits), from trees made as the kernel does."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from ringcomm.doctor import facts, report
from ringcomm.doctor.group import Plan, examine_group


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def sysfs(tmp_path: Path, l3: list[str], siblings: list[str]) -> Path:
    """CPUs with these L3 and cores, by CPU."""
    files = {}
    for cpu, (shared, core) in enumerate(zip(l3, siblings, strict=True)):
        files[f"cpu{cpu}/topology/core_cpus_list"] = core
        files[f"cpu{cpu}/cache/index3/shared_cpu_list"] = shared
    return write(tmp_path, files)


def test_cpus_and_caches(tmp_path: Path) -> None:
    """Two L3, hardware threads n and n + 4 on one core."""
    l3 = ["0-1,4-5", "0-1,4-5", "2-3,6-7", "2-3,6-7"] * 2
    cores = [f"{n},{n + 4}" for n in range(4)] * 2
    found = facts.read_cpus(range(8), sysfs(tmp_path, l3, cores))
    assert found.cores == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert found.l3 == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert (found.shares_l3((0, 5)), found.shares_l3((0, 2))) == (True, False)
    assert facts.telling_pairs(found) == [(0, 1), (0, 2)]
    few = facts.read_cpus((1, 4, 5), tmp_path)  # what an affinity mask leaves
    assert few.cores == ((1, 5), (4,))
    assert facts.telling_pairs(few) == [(1, 4)]


def test_a_kernel_that_tells_nothing(tmp_path: Path) -> None:
    found = facts.read_cpus((0, 3), tmp_path)
    assert (found.cores, found.l3) == (((0,), (3,)), ())
    assert found.shares_l3((0, 3)) is None
    assert facts.telling_pairs(found) == [(0, 3)]
    assert facts.telling_pairs(facts.read_cpus((0,), tmp_path)) == []


def test_lists_of_cpus() -> None:
    assert facts.parse_list("0-2,5\n") == (0, 1, 2, 5)
    assert facts.parse_list("\n") == ()
    with pytest.raises(ValueError, match="invalid literal"):
        facts.parse_list("0-x")


def proc(tmp_path: Path, cgroup: str) -> Path:
    return write(tmp_path / "proc", {"cgroup": cgroup})


def test_limits_of_cgroup_v2(tmp_path: Path) -> None:
    """An ancestor may allow less; the root of the hierarchy has no such files."""
    top = tmp_path / "cg"
    files = {"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}
    files |= {"a/memory.max": "max", "a/b/memory.max": str(3 << 30)}
    write(top, files)
    found = facts.read_limits(proc(tmp_path, "0::/a/b"), top)
    assert found.cpu_cores == facts.Limit(1.5, str(top / "a/cpu.max"))
    assert found.memory_bytes == facts.Limit(3 << 30, str(top / "a/b/memory.max"))
    assert found.max_fds > 0


def test_limits_of_cgroup_v1_in_a_container(tmp_path: Path) -> None:
    """The container sees only its own part of each hierarchy."""
    top = tmp_path / "cg"
    files = {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}
    files |= {"memory/memory.limit_in_bytes": str(1 << 30)}
    write(top, files)
    cgroup = "4:memory:/docker/x\n1:cpu,cpuacct:/docker/x\n0::/"
    found = facts.read_limits(proc(tmp_path, cgroup), top)
    assert found.cpu_cores == facts.Limit(0.5, str(top / "cpu/cpu.cfs_quota_us"))
    assert found.memory_bytes == facts.Limit(1 << 30, str(top / "memory/memory.limit_in_bytes"))


def test_no_limits(tmp_path: Path) -> None:
    top = tmp_path / "cg"
    files = {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}
    files |= {"memory/memory.limit_in_bytes": "9223372036854771712"}
    write(top, files)
    for where in (proc(tmp_path, "4:memory:/\n1:cpu:/"), tmp_path / "no proc"):
        found = facts.read_limits(where, top)
        assert (found.cpu_cores, found.memory_bytes) == (None, None)


def test_this_machine_has_what_ringcomm_needs() -> None:
    assert facts.missing_features() == []


def test_a_refused_system_call_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_name: str) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert facts.missing_features() == ["memfd_create: [Errno 1] Operation not permitted"]


def test_the_variables_are_those_of_the_readme() -> None:
    readme = Path(__file__).resolve().parents[3] / "README.md"
    listed = set(re.findall(r"^\| `(RINGCOMM_\w+)`", readme.read_text(encoding="utf-8"), re.M))
    assert report.known_variables() == listed


def test_one_rank_has_no_pairs() -> None:
    found = examine_group(Plan(1, [], 0.0))
    assert (found["pairs"], found["hand_overs"]) == ([], [])
    assert found["memory"]["mapped_bytes_per_pair"] is None


def test_hand_over_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one the rest is measured, and the note says what is missing."""
    monkeypatch.setenv("PATH", "")
    found = report.examine(2, 0.0)
    pairs = found["group"]["hand_overs"]  # none on a machine of one core
    assert all(entry["us"] is None for entry in pairs)
    assert len(found["group"]["pairs"]) == 1
    said = [note for note in found["notes"] if "it takes a C compiler" in note]
    assert len(said) == len(pairs)
