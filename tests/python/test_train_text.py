"""The main job's text, batches and command line: what is refused, and in which words."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from training import cli
from training.corpus import Batches, CorpusError, load_corpus
from training.options import CONTEXT_BYTES, InputError

CPU = torch.device("cpu")


def test_own_text_is_split_without_loss() -> None:
    corpus = load_corpus(None, CONTEXT_BYTES)
    assert corpus.train + corpus.held_out == corpus.data
    assert len(corpus.held_out) == round(0.05 * len(corpus.data))
    assert corpus.sha256 == hashlib.sha256(corpus.data).hexdigest()
    held, whole = corpus.gzip_bits_per_byte()
    assert 1.5 < whole < 3.0
    assert 1.5 < held < 3.0


def test_text_that_is_not_utf8_works(tmp_path: Path) -> None:
    file = tmp_path / "latin1.txt"
    file.write_bytes(bytes(range(256)) * 40)
    with pytest.raises(UnicodeDecodeError):
        file.read_text(encoding="utf-8")
    corpus = load_corpus(file, CONTEXT_BYTES)
    inputs, targets = Batches(corpus.train, CONTEXT_BYTES, 0, CPU).rows(0, 3)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal((inputs + 1) % 256, targets)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(b"", "is empty", id="empty"),
        pytest.param(b"x" * 100, "too few", id="shorter than a row"),
        pytest.param(b"x" * 600, "too few", id="held-out part too short"),
    ],
)
def test_hopeless_text_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "text"
    file.write_bytes(content)
    with pytest.raises(CorpusError, match=words):
        load_corpus(file, CONTEXT_BYTES)


def test_the_length_asked_for_is_enough(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"x")
    with pytest.raises(CorpusError) as refused:
        load_corpus(file, CONTEXT_BYTES)
    shortest = int(str(refused.value).partition("give ")[2].split()[0])
    file.write_bytes(b"x" * shortest)
    assert len(load_corpus(file, CONTEXT_BYTES).data) == shortest


def test_batches_depend_on_seed_and_step_alone() -> None:
    data = load_corpus(None, CONTEXT_BYTES).train
    first, again = (Batches(data, 16, 3, CPU) for _ in range(2))
    first.rows(0, 4)  # an earlier call leaves no trace
    assert torch.equal(first.rows(7, 4)[0], again.rows(7, 4)[0])
    assert not torch.equal(first.rows(7, 4)[0], first.rows(8, 4)[0])
    assert not torch.equal(first.rows(7, 4)[0], Batches(data, 16, 4, CPU).rows(7, 4)[0])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--backend", "smoke"], "one of ringcomm"),
        (["--backend", "gloo,gloo,gloo"], "one or two names"),
        (["--backend", "nccl"], "--device cuda"),
        (["--backend", "gloo", "--world", "0"], "at least 1 rank"),
        (["--backend", "gloo", "--world", "1025"], "at most 1024"),
        (["--backend", "gloo", "--steps", "0"], "more than 0"),
        (["--backend", "gloo", "--seconds", "0"], "--seconds 0.0: must be more than 0"),
        (["--backend", "gloo", "--seconds", "nan"], "--seconds nan"),
        (["--backend", "gloo", "--seconds", "inf"], "--seconds inf"),
        (["--backend", "gloo", "--race-seconds", "0"], "--race-seconds 0.0"),
        (["--backend", "gloo", "--race-seconds", "nan"], "--race-seconds nan"),
        (["--backend", "gloo", "--race-seconds", "inf"], "--race-seconds inf"),
        (["--backend", "bogus", "--parallel", "single"], "one of ringcomm"),
        (["--backend", "gloo", "--parallel", "single", "--world", "2"], "one process"),
        (["--backend", "gloo", "--parallel", "zero1", "--optimizer", "lomo"], "LOMO has none"),
        (["--backend", "gloo", "--parallel", "tp", "--world", "3"], "at most 2 ranks"),
        (["--backend", "gloo", "--parallel", "tp", "--zero-stage", "1"], "is --parallel zero1"),
        (["--backend", "gloo", "--offload", "cpu", "--optimizer", "lomo"], "LOMO has none"),
        (["--backend", "gloo", "--offload-path", "/tmp"], "is for --offload nvme"),
        (["--backend", "gloo", "--offload", "nvme", "--offload-path", "/no"], "no such folder"),
        (["--backend", "gloo", "--offload", "cpu", "--zero-stage", "3"], "runs over ringcomm"),
        (["--tp", "3"], "2 is no multiple of that"),
        (["--tp", "2", "--world", "6", "--ep", "2"], "which has 3 ranks here"),
        (["--ep", "2", "--experts", "0"], "the model has none"),
        (["--sp"], "add --tp 2"),
        (["--tp", "2", "--parallel", "zero1"], "leave it out"),
        (["--tp", "2", "--zero-stage", "3"], "ZeRO has stage 1 or 2"),
        (["--pp", "5", "--world", "5"], "5 stages of 4 layers"),
        (["--pp", "2", "--micro-batches", "3"], "16 rows do not divide"),
        (["--pp", "0"], "are 1 or more"),
        (["--schedule", "gpipe"], "add --pp 2"),
        (["--pp", "2", "--partition-activations"], "leave out --pp"),
        (["--pp", "2", "--optimizer", "lomo"], "LOMO has no gradients to average"),
    ],
)
def test_contradicting_options_are_refused(argv: list[str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        cli.read_options(argv)


@pytest.mark.parametrize(
    ("num_gpus", "argv", "words"),
    [
        (0, [], "finds no GPU"),
        (2, [], "ringcomm has no CUDA support yet: add --backend nccl"),
        (2, ["--backend", "nccl,ringcomm"], "no CUDA support yet"),
        (1, ["--backend", "nccl"], r"2 ranks and 1 GPU\(s\), but NCCL refuses two ranks"),
        (4, ["--backend", "gloo,nccl", "--world", "5"], "NCCL refuses two ranks"),
    ],
)
def test_what_gpus_cannot_do_is_refused(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, argv: list[str], words: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    with pytest.raises(InputError, match=words):
        cli.read_options(["--device", "cuda", *argv])


def test_gpus_that_suffice_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert cli.read_options(["--device", "cuda", "--backend", "nccl,gloo"]).world_size == 2
    # Of torchrun on two machines with 2 GPUs each.
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert cli.read_options(["--device", "cuda", "--backend", "nccl"]).world_size == 4


def test_launcher_decides_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert cli.read_options(["--backend", "gloo"]).world_size == 4
    with pytest.raises(InputError, match="started 4 ranks"):
        cli.read_options(["--backend", "gloo", "--world", "2"])


def test_no_write_permission_is_said_before_training(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # A folder under a file: refused to root as well, who may write everywhere else.
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "runs"
    assert cli.main(["--backend", "gloo", "--size", "tiny", "--out", str(out)]) == 2
    assert f"--out {out}: cannot write there" in capfd.readouterr().err


def test_bad_checkpoints_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    base = ["--backend", "gloo", "--size", "tiny", "--out", str(tmp_path / "runs"), "--resume"]
    assert cli.main([*base, str(tmp_path)]) == 2
    assert "there is no" in capfd.readouterr().err
    (tmp_path / "checkpoint.pt").write_bytes(b"not a checkpoint")
    assert cli.main([*base, str(tmp_path)]) == 2
    assert "not a checkpoint of this program" in capfd.readouterr().err
    assert not (tmp_path / "runs").exists()
