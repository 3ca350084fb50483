"""What doctor reads of the kernel (CPUs, limits), from trees made as the kernel does."""

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


def test_cores(tmp_path: Path) -> None:
    """Hardware threads n and n + 4 on one core."""
    threads = [f"{n},{n + 4}" for n in range(4)] * 2
    files = {f"cpu{cpu}/topology/core_cpus_list": text for cpu, text in enumerate(threads)}
    write(tmp_path, files)
    assert machine.cores(range(8), tmp_path) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert machine.cores((1, 4, 5), tmp_path) == [(1, 5), (4,)]  # what an affinity mask leaves
    write(tmp_path, {"cpu0/topology/core_cpus_list": "0-x", "cpu1/topology/core_cpus_list": "1-2"})
    assert machine.cores((0, 1, 2, 9), tmp_path) == [(0,), (1, 2), (2,), (9,)]


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


def test_the_variables_are_those_of_the_reference() -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "reference" / "environment.md"
    listed = set(re.findall(r"^\| `(RINGCOMM_\w+)`", page.read_text(encoding="utf-8"), re.M))
    assert doctor.known_variables() == listed


def test_one_rank_has_no_pairs() -> None:
    found = doctor.examine_group(1, 0.0)
    assert found["pairs"] == []
    assert "errors" not in found
