"""The command `ringcomm plan`: what it prints and refuses."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from test_tuning import make_tuning

from ringcomm import cli, tuning

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
    assert "6,738,415,616 parameters" in out
    assert "8 × h100 with 85.9 GB" in out
    for word in ("params", "grads", "states", "acts", "buffers", "host", "sent GB", "bubble"):
        assert word in out
    assert "dominates with" in out
    assert "ddp, dp 8: needs " in out


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, *LLAMA, "--json", "--systems", "zero3", "--pp", "1"))
    assert {plan["system"] for plan in found["plans"]} == {"zero3"}
    assert found["cluster"]["memory_bytes"] == 80 << 30
    assert found["job"]["tokens"] == 1 << 20
    assert found["plans"][0]["reasons"]


def test_tuning(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    tuning.save(make_tuning(), path)
    small = ["--model", "gpt2", "--gpus", "2", "--tokens", "4k", "--hardware", "cpu-core"]
    out = printed(capsys, "plan", *small, "--tuning", str(path))
    assert "tuned with 2 ranks" in out


def test_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, *LLAMA, "--systems", "ddp", "--tp", "1", "--pp", "1", status=1)
    assert "0 plans fit" in out
    assert "needs " in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "llama-8b", "--gpus", "8"], "known are llama-7b, llama-13b"),
        (["--gpus", "8"], "--model and --gpus are wanted"),
        (["--model", "gpt2", "--gpus", "12"], "no whole number of hosts of 8"),
        (
            ["--model", "gpt2", "--gpus", "8", "--memory", "80"],
            "80 B of memory are less than the driver's 1.07 GB",
        ),
        (["--model", "gpt2", "--gpus", "8", "--tokens", "much"], "no number of tokens"),
        (["--model", "gpt2", "--gpus", "8", "--tp", "3"], "do not make 8 gpus"),
        (["--model", "gpt2", "--gpus", "8", "--systems", "zero9"], "systems: known are single"),
        (["--model", "gpt2", "--gpus", "8", "--hardware", "abacus"], "none of h100"),
        (["--model", "gpt2", "--gpus", "8", "--tuning", "no.json"], "no tuning file"),
        (["--model", "gpt2", "--gpus", "8", "--top", "-1"], "--top is not negative"),
    ],
)
def test_bad_input(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.run(["plan", *argv])
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


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
