"""`ringcomm bench systems`: the table is right, and a wrong system shows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import systems
import trainees

from ringcomm import cli
from ringcomm.measure.ranks import EXIT_OK, EXIT_WRONG_RESULTS

SIZES = ["--width", "96", "--layers", "2", "--tokens", "12", "--seconds", "0.1", "--repeats", "1"]


def run(tmp_path: Path, *options: str) -> tuple[int, list[dict[str, Any]]]:
    path = tmp_path / "systems.jsonl"
    status = cli.run(["bench", "systems", *SIZES, "--json", str(path), *options])
    return status, [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_losses_bytes_and_memory(tmp_path: Path, world_size: int) -> None:
    plot = tmp_path / "systems.svg"
    status, records = run(tmp_path, "--world-size", str(world_size), "--plot", str(plot))
    assert status == EXIT_OK
    assert [record["system"] for record in records] == trainees.DEFAULT
    by_name = {record["system"]: record for record in records}
    for record in records:
        assert record["loss"] == pytest.approx(record["one_process_loss"], rel=1e-4)
        if "gloo" in record["system"] or record["system"] == "parameter server":
            assert record["sent_bytes"] is None
        elif world_size == 2:
            assert record["sent_bytes"] == record["formula_bytes"]
    whole = by_name["ddp"]["param_bytes"]
    assert whole == 4 * by_name["ddp"]["num_params"]
    assert by_name["ddp"]["state_bytes"] >= 2 * whole
    assert by_name["lomo"]["state_bytes"] == 0
    for name in ("zero-1", "zero-2"):
        assert by_name[name]["state_bytes"] == pytest.approx(2 * whole / world_size, rel=0.01)
    assert by_name["lomo on shards"]["param_bytes"] <= whole / world_size + 4 * 40
    assert "ddp" in plot.read_text(encoding="utf-8")


def test_backends_and_the_share_of_communication(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also where a name has a comma; steps that move nothing are no records."""
    names = "ddp;ddp blocking;zero-3;tensor, tokens shared"
    status, records = run(tmp_path, "--systems", names, "--over", "gloo,fake")
    assert status == EXIT_OK
    found = {record["system"]: record for record in records}
    assert list(found) == [f"{n}{on}" for n in names.split(";") for on in ("", " on gloo")]
    for name, record in found.items():
        assert record["backend"] == ("gloo" if "gloo" in name else "ringcomm")
        assert ("over_ringcomm" in record) == ("gloo" in name)
        assert ("communication_share" in record) == ("tensor" not in name)
    said = capfd.readouterr().out
    assert "over ringcomm" in said
    assert "communication share" in said


def test_wrong_losses_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ddp = systems.SYSTEMS["ddp"]
    wrong = replace(ddp, like=systems.SYSTEMS["lomo"].like)
    monkeypatch.setitem(systems.SYSTEMS, "ddp", wrong)
    status, records = run(tmp_path, "--systems", "ddp")
    assert status == EXIT_WRONG_RESULTS
    assert records[0]["wrong_elems"] > 0
