"""The command `ringcomm plan`: what it prints and refuses."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from ringcomm import cli

SYSTEMS = Path(__file__).resolve().parents[3] / "docs" / "systems.md"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
LLAMA = ["plan", "--model", "llama-7b", "--gpus", "8", "--memory", "80GiB", "--tokens", "1M"]


def printed(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> str:
    assert cli.run(list(argv)) == status
    return capsys.readouterr().out


def test_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, *LLAMA, "--top", "3")
    for text in ("6,738,415,616 parameters", "8 × h100 with 80.0 GiB", "ddp, dp 8: needs "):
        assert text in out
    out = printed(capsys, *LLAMA, "--systems", "ddp", "--tp", "1", "--pp", "1", status=1)
    assert "0 plans fit" in out
    options = ["--systems", "zero3", "--pp", "1", "--checkpointing", "none"]
    found = json.loads(printed(capsys, *LLAMA, "--json", *options))
    assert found["cluster"]["memory_bytes"] == 80 << 30
    assert found["job"]["tokens"] == 1 << 20
    plan = found["plans"][0]
    assert plan["system"] == "zero3"
    sent = plan["traffic_bytes"]
    assert sent["sent"] == sum(sent[part] for part in ("data", "tensor", "pipeline", "expert"))
    seconds = plan["seconds"]
    assert sum(seconds.values()) == pytest.approx(2 * seconds["step"] + seconds["data_hidden"])


@pytest.mark.slow
def test_the_lines_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of docs/systems.md; tuning in small."""
    page = SYSTEMS.read_text(encoding="utf-8")
    (block,) = re.findall(r"^## Planner.*?```sh\n(.*?)```", page, re.M | re.S)
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "path" / "to" / "config.json"
    config.parent.mkdir(parents=True)
    config.write_text(json.dumps(CONFIG), encoding="utf-8")
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert len(lines) >= 5
    for _, *argv in lines:
        short = ["--seconds", "0", "--world-sizes", "2", "--sizes", "1k,4k"]
        assert cli.run([*argv, *(short if argv[0] == "tune" else [])]) == 0, argv
        assert capsys.readouterr().out
