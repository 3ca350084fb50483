"""Other libraries, in two processes: losses, tokens and saved weights are those of Gloo and DDP."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import sys
import uuid
from functools import cache
from pathlib import Path
from typing import Any

import client_files
import client_runs
import pytest
from ranks import run_ranks

PROGRAMS = Path(__file__).with_name("program_job.py")
CLIENTS = {client.name: client for client in client_files.read_all()}
# Libraries want one; a file takes its place.
ADDRESS = {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
SYSTEMS = ("DDP", "zero 2", "zero 3", "Lomo")
REFUSED = {
    ("zero 3", "predict_with_generate"): "use zero.shard() at stage 1 or 2, or predict_with",
    ("zero 3", "EMA"): "copy the model before it is sharded",
}
BACKENDS = importlib.metadata.entry_points(group="torch.backends")
IS_INSTALLED = "ringcomm" in BACKENDS.names


def launch(program: list[str | Path], folder: Path) -> list[dict[str, Any]]:
    """What two ranks of a program have written to a folder."""
    folder.mkdir()
    return client_runs.launch(Path(sys.executable), [*program, folder], 2, folder, limit_s=240.0)


SHORT = [one.name for one in CLIENTS.values() if one.is_short]


# Without a library, and quick: test_as_gloo.py.
@pytest.mark.slow
@pytest.mark.skipif(not IS_INSTALLED, reason="only an installed ringcomm is found by torch")
@pytest.mark.parametrize("name", SHORT)
def test_results_are_those_of_gloo(name: str) -> None:
    if not client_files.is_installed(CLIENTS[name]):
        pytest.skip(f"{CLIENTS[name].requirements} are not installed")
    result = client_runs.compare(CLIENTS[name], {})
    assert result.status in (client_runs.EQUAL, client_runs.CLOSE), result.text


def report(value: float, real: str) -> dict[str, Any]:
    return {"real": real, "series": {"losses": [0.5, value]}}


def test_what_differs_is_said() -> None:
    client = next(iter(CLIENTS.values()))

    def judged(gloo: dict[str, Any], ours: dict[str, Any], **changed: Any) -> tuple[str, str]:
        found = {"gloo": [gloo], "ringcomm": [ours]}
        return client_runs.judge(dataclasses.replace(client, **changed), found)

    same, other = report(1.0, "gloo"), report(1.0 + 2**-20, "ringcomm")
    assert judged(same, report(1.0, "ringcomm"))[0] == client_runs.EQUAL
    status, text = judged(same, other)
    assert (status, "losses[1] of rank 0" in text) == (client_runs.DIFFERENT, True)
    assert judged(same, other, tolerance=(1e-5, "sums"))[0] == client_runs.CLOSE
    assert judged(same, same)[0] == client_runs.FAILED  # it has not run over ringcomm
    assert judged(report(float("nan"), "gloo"), other)[0] == client_runs.FAILED
    assert judged(same, other, fails_on_gloo="no such operation")[0] == client_runs.FAILED
    fewer = {"real": "ringcomm", "series": {"losses": [0.5]}}
    assert judged(same, fewer)[0] == client_runs.DIFFERENT


def test_a_client_without_its_source_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fetch(url: str, path: Path) -> None:
        raise OSError("no route")

    monkeypatch.setattr(client_files, "CACHE", tmp_path)
    monkeypatch.setattr(client_files, "_fetch", fetch)
    client = dataclasses.replace(next(iter(CLIENTS.values())), source=("someone/program", "0"))
    result = client_runs.compare(client, {})
    assert result.is_wrong
    assert "no route; --source program=FOLDER" in result.text


DIFFERS = """
import os
from support import report

REQUIREMENTS = ()
RANKS = 1
IS_SHORT = True
LIMIT_S = 60.0


def main(folder, source):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return {"losses": [0.5, float(os.environ["RINGCOMM_AS_GLOO"])]}


if __name__ == "__main__":
    report(main)
"""


@pytest.mark.slow
@pytest.mark.skipif(not IS_INSTALLED, reason="only an installed ringcomm is found by torch")
def test_a_client_that_differs_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(client_files.FOLDER), prepend=os.pathsep)
    (tmp_path / "differs.py").write_text(DIFFERS)
    client = client_files.read(tmp_path / "differs.py")
    assert client is not None
    result = client_runs.compare(client, {})
    assert result.is_wrong
    assert "losses[1] of rank 0: 1.0, not 0.0" in result.text


@pytest.mark.slow
def test_a_client_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = uuid.uuid4()
    monkeypatch.setattr(client_runs.uuid, "uuid4", lambda: mark)
    (tmp_path / "hangs.py").write_text(
        "import time\nREQUIREMENTS = ()\nRANKS = 2\nIS_SHORT = True\nLIMIT_S = 8.0\n"
        "time.sleep(600)\n"
    )
    client = client_files.read(tmp_path / "hangs.py")
    assert client is not None
    result = client_runs.compare(client, {})
    assert result.status == client_runs.FAILED
    assert "it did not end in 8 s" in result.text
    assert not client_runs.marked(mark.hex)


@pytest.mark.skipif(not IS_INSTALLED, reason="only an installed ringcomm is found by torch")
@pytest.mark.parametrize("library", ["accelerate", "trainer"])
def test_the_backend_by_name_and_optimizers_that_reduce(library: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    import register_job

    env = [{"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", **ADDRESS} for rank in "01"]
    reports = run_ranks(
        2, register_job.run, library, tmp_path, backend=None, fresh=True, env=env, timeout_s=180.0
    )
    for report in reports:
        assert report.pop("backend") == "ringcomm"
        expected = report.pop("DDP")
        assert expected["is wrapped"]
        for system, found in report.items():
            assert not found["is wrapped"], system
            for key in ("weights", "losses"):
                assert found[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-6), system


# ---- programs that generate, save, resume, adapt and average


@cache
def programs(system: str, backend: str, folder: Path) -> list[dict[str, Any]]:
    """What each rank reports of all programs with one system."""
    return launch([PROGRAMS, system, backend], folder)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize(
    "name", ["predict_with_generate", "save and resume", "gather_for_metrics", "LoRA", "EMA"]
)
def test_programs_see_what_they_see_with_gloo(name: str, system: str, base: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    oracle = programs("DDP", "gloo", base / "gloo")
    found = programs(system, "ringcomm", base / system)
    if reason := REFUSED.get((system, name)):
        assert all(reason in report[name] for report in found)
        return
    for rank in range(2):
        mine, expected = found[rank][name], oracle[rank][name]
        assert isinstance(expected, dict), expected
        assert isinstance(mine, dict), mine
        assert "losses" in mine
        for key in mine:
            if system == "DDP" or key == "tokens":
                assert mine[key] == expected[key], key
            else:
                assert mine[key] == pytest.approx(expected[key], rel=1e-4), key
    if name == "save and resume":
        report = found[0][name]
        assert report.get("resumed", report["losses"]) == report["losses"]
        assert report.get("saved") == report.get("kept")
