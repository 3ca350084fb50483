"""The benchmarks of one device in small, on the CPU: their records.

No test here asserts a time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import device_kernels
import llama_memory
import pytest

from ringcomm.measure.ranks import EXIT_OK


def records_of(module: Any, path: Path, *argv: str) -> list[dict[str, Any]]:
    code = module.main(["--device", "cpu", "--json", str(path), *argv])
    assert code == EXIT_OK
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_kernels(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    records = records_of(device_kernels, path, "--scale", "64", "--seconds", "0.01")
    cases = {(record["case"], record["shape"]) for record in records}
    assert cases == {
        *(("linear", "128x64x64"), ("linear", "128x64x224"), ("embedding", "128x64x2004")),
        *(("sgd", "1x64x224"), ("linear_loss", "128x64x2004"), ("linear_loss", "256x32x500")),
    }
    assert all(record["p50_us"] > 0 and record["device"] == "cpu" for record in records)


def test_llama(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    small = ["--size", "tiny", "--layers", "1", "--rows", "1", "--tokens", "8"]
    ways = ["forward only", "AdamW", "two-pass clip"]
    chosen = ["--ways", ",".join([*ways, "lomo_optim"])]
    records = records_of(llama_memory, tmp_path / "records.jsonl", *small, *chosen)
    assert [record["way"] for record in records] == ways
    for record in records:
        learns = record["losses"][-1] < record["losses"][0]
        assert learns == (record["way"] != "forward only")
    assert "not available: lomo_optim" in capsys.readouterr().out


def test_a_model_grows_until_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def attempt(way: str, options: Any, num_layers: int, placement: Any) -> dict[str, int] | None:
        tried.append(num_layers)
        return {"num_layers": num_layers} if num_layers <= 90 else None

    monkeypatch.setattr(llama_memory, "attempt", attempt)
    found: Any = llama_memory.grow("Lomo", None, None)  # type: ignore[arg-type]
    assert found["num_layers"] <= 90 < found["num_layers"] * 1.1
    assert tried[:4] == [16, 32, 64, 128]
