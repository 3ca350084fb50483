"""What doctor reads of the kernel (CPUs, caches, limits), from trees made as the kernel does."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from ringcomm.measure import doctor, machine


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
    found = machine.read_cpus(range(8), sysfs(tmp_path, l3, cores))
    assert found.cores == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert found.l3 == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert (found.shares_l3((0, 5)), found.shares_l3((0, 2))) == (True, False)
    assert machine.telling_pairs(found) == [(0, 1), (0, 2)]
    few = machine.read_cpus((1, 4, 5), tmp_path)  # what an affinity mask leaves
    assert few.cores == ((1, 5), (4,))
    assert machine.telling_pairs(few) == [(1, 4)]
    write(tmp_path, {"cpu0/cache/index3/shared_cpu_list": "0-x"})
    assert machine.read_cpus((0,), tmp_path).l3 == ()


def test_a_kernel_that_tells_nothing(tmp_path: Path) -> None:
    found = machine.read_cpus((0, 3), tmp_path)
    assert (found.cores, found.l3) == (((0,), (3,)), ())
    assert found.shares_l3((0, 3)) is None
    assert machine.telling_pairs(found) == [(0, 3)]
    assert machine.telling_pairs(machine.read_cpus((0,), tmp_path)) == []


def test_limits_of_a_cgroup(tmp_path: Path) -> None:
    """An ancestor may allow less; the root of the hierarchy has no such files."""
    top = tmp_path / "cg"
    files = {"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}
    files |= {"a/memory.max": "max", "a/b/memory.max": str(3 << 30)}
    write(top, files)
    found = machine.read_limits(write(tmp_path / "proc", {"cgroup": "0::/a/b"}), top)
    assert found["cpu_cores"] == (1.5, str(top / "a/cpu.max"))
    assert found["memory_bytes"] == (3 << 30, str(top / "a/b/memory.max"))
    assert found["max_fds"] > 0
    found = machine.read_limits(tmp_path / "no proc", top)
    assert (found["cpu_cores"], found["memory_bytes"]) == (None, None)


def test_a_refused_system_call_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.missing_features() == []

    def refuse(_name: str) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert machine.missing_features() == ["memfd_create: [Errno 1] Operation not permitted"]


def test_the_variables_are_those_of_the_readme() -> None:
    readme = Path(__file__).resolve().parents[3] / "README.md"
    listed = set(re.findall(r"^\| `(RINGCOMM_\w+)`", readme.read_text(encoding="utf-8"), re.M))
    assert doctor.known_variables() == listed


def test_one_rank_has_no_pairs() -> None:
    found = doctor.examine_group(1, [], 0.0)
    assert (found["pairs"], found["hand_overs"]) == ([], [])
    assert found["memory"]["mapped_bytes_per_pair"] is None


def test_hand_over_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one the rest is measured, and the note says what is missing."""
    monkeypatch.setenv("PATH", "")
    found = doctor.examine(2, 0.0)
    pairs = found["group"]["hand_overs"]  # none on a machine of one core
    assert all(entry["us"] is None for entry in pairs)
    assert len(found["group"]["pairs"]) == 1
    said = [note for note in found["notes"] if "it takes a C compiler" in note]
    assert len(said) == len(pairs)
