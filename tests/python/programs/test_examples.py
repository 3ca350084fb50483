"""Every example on several ranks has the losses of the same example in one process."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from cases import quick, slow
from rank_programs import run_command
from ranks import run_ranks

from ringcomm import testing

EXAMPLES = Path(__file__).parents[3] / "examples"

SMALL = "--steps 5 --rows 4 --context 32 --device cpu"
LOSS = "loss --rows 2 --context 8 --z-loss 1e-3"
# Ranks, the example and its options, and options of its run in one process.
CASES: dict[str, tuple[int, str, str]] = {
    "zero 1, state in files": (2, "zero --stage 1 --offload nvme --folder FOLDER", "zero"),
    "zero, 4 ranks": (4, "zero --stage 3", "zero"),
    "infinity": (2, "infinity --folder FOLDER", "zero --clip 1e9"),
    "lomo, clipped": (2, "lomo --clip 1", "lomo --clip 1"),
    "lomo on shards": (2, "lomo --shards", "lomo"),
    "pipeline": (2, "pipeline --schedule zero-bubble", "zero"),
    "tensor": (2, "tensor_parallel --sequence-parallel", "tensor_parallel"),
    "activations in shards": (2, "activations", "activations --keep whole"),
    "activations, auto": (2, "activations --keep auto --limit-mib 0.1", "activations --keep whole"),
    "experts": (2, "experts", "experts"),
    "loss": (2, LOSS, LOSS),
    "muon": (2, "muon --size tiny", "muon --size tiny"),
    "muon, stage 3": (2, "muon --size tiny --stage 3", "muon --size tiny"),
    "mesh, all axes": (8, "mesh --pp 2 --tp 2 --ep 2 --micro-batches 2", "mesh"),
    "mesh, hsdp": (4, "mesh --dp 2 --fsdp 2 --recompute", "mesh"),
    "train": (2, "train --size tiny --out FOLDER", "train --size tiny --out FOLDER/alone"),
}
SLOW = {
    *("muon, stage 3", "mesh, all axes", "zero, 4 ranks", "mesh, hsdp"),
    *("activations, auto", "lomo on shards"),
}


def run_example(rank: int, words: list[str]) -> Any:
    """Runs main() of an example within the group that is there."""
    name, *arguments = words
    sys.path.insert(0, str(EXAMPLES))
    for example in EXAMPLES.glob("*.py"):  # a benchmark has its name, which another test imported
        sys.modules.pop(example.stem, None)
    module = importlib.import_module(name)
    return module.main(module.parser().parse_args(arguments))


def losses(num_ranks: int, line: str, folder: Path, **options: Any) -> list[Any]:
    name, *words = line.replace("FOLDER", str(folder)).split()
    return run_ranks(num_ranks, run_example, [name, *SMALL.split(), *words], **options)


@pytest.mark.parametrize("name", quick(CASES, *(CASES.keys() - SLOW)))
def test_losses_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    num_ranks, line, alone = CASES[name]
    if line.split()[0] in ("tensor_parallel", "activations", "mesh"):
        pytest.importorskip("transformers")
    everyone = losses(num_ranks, line, tmp_path)
    (expected,) = losses(1, alone, tmp_path)
    # The loss that balances experts is of each rank's tokens; Muon rounds to 16 bits.
    tolerance = 2e-3 if line.split()[0] in ("experts", "muon") else 2e-5
    for found in everyone:
        assert found == pytest.approx(expected, rel=tolerance)
        assert found[-1] < found[0]


@pytest.mark.parametrize(
    ("num_ranks", "line"),
    [
        (2, "zero --bf16"),
        slow(2, "lomo --optimizer adalomo --lr 0.06"),
        (3, "parameter_server --dedicated --staleness 1"),
    ],
)
def test_other_options_learn(num_ranks: int, line: str, tmp_path: Path) -> None:
    everyone = losses(num_ranks, line, tmp_path)
    assert all(found[-1] < found[0] for found in everyone if found)
    assert len([found for found in everyone if found]) == 2


@pytest.mark.slow
def test_finetune(tmp_path: Path) -> None:
    """All three optimizers learn; LOMO has no state; there is a picture.

    The ranks are those of ringcomm.testing, as in a test of a user's program.
    """
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    line = f"finetune {SMALL} --steps 10 --hidden 32 --layers 1 --plot {tmp_path}/it.png"
    for found in testing.run_ranks(2, run_example, line.split(), timeout_s=300):
        assert list(found) == ["adamw", "lomo", "adalomo"]
        assert all(points[-1] < points[0] - 0.1 for points in found.values())
    assert (tmp_path / "it.png").stat().st_size > 1000


def test_decoded_tokens_are_those_of_one_process() -> None:
    pytest.importorskip("transformers")
    words = ["decode", "--tokens", "12", "--hidden", "128", "--layers", "2", "--dtype", "float32"]
    (expected,) = run_ranks(1, run_example, words)
    assert len(expected) == 12
    assert run_ranks(2, run_example, words) == [expected] * 2


@pytest.mark.parametrize(
    ("system", "victim"),
    [
        slow("ddp", 1),
        ("ddp", 0),
        slow("zero-1", 3),
        ("zero-2", 0),
        ("lomo", 2),
    ],
)
def test_survivors_have_the_losses_of_one_process(system: str, victim: int, tmp_path: Path) -> None:
    line = f"survive --system {system} --steps 8 --rows 12 --commit 3"
    kind: dict[str, Any] = {"fresh": True, "may_die": [victim]}
    everyone = losses(4, f"{line} --die {victim}:5", tmp_path, **kind)
    (expected,) = losses(1, line, tmp_path)
    assert len(expected) == 9
    for rank in {0, 1, 2, 3} - {victim}:
        assert everyone[rank] == pytest.approx(expected, rel=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("system", ["ddp", "zero-1", "zero-2", "lomo"])
def test_torchrun_restarts_from_the_last_state(system: str, tmp_path: Path) -> None:
    """Rank 1 dies in step 5; the restarted job begins at step 3, and ends with the right loss."""
    line = f"survive --system {system} --steps 8 --rows 12 --commit 3"
    (expected,) = losses(1, line, tmp_path)
    _, *words = line.split()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = run_command(
        *(*torchrun, "--nproc-per-node", "4", "--max-restarts", "1"),
        *(EXAMPLES / "survive.py", *SMALL.split(), *words),
        *("--die", "1:5", "--save", tmp_path),
        env={"OMP_NUM_THREADS": "1"},
        timeout_s=240,
    )
    assert done.returncode == 0, done.stderr
    assert f"go on at step 3 of {tmp_path}" in done.stdout
    assert "ranks go on at" not in done.stdout  # nobody has shrunk the group meanwhile
    (loss,) = re.findall(r"held out    loss ([\d.]+)", done.stdout)
    assert float(loss) == pytest.approx(expected[-1], abs=6e-5)  # as it is printed


# ---- the main job: checks, checkpoints


def with_a_wrong_weight(rank: int, words: list[str], change: float) -> str:
    sys.path.insert(0, str(EXAMPLES))
    import train

    make = train.Trainer.__init__

    def make_wrong(trainer: Any, job: Any, group: Any) -> None:
        make(trainer, job, group)
        if group is not None and torch.distributed.get_backend(group) == "gloo":
            with torch.no_grad():
                trainer.model.head.weight[0, 0] += change

    options = train.parser().parse_args(words)
    changed = mock.patch.object(train.Trainer, "__init__", make_wrong)
    with changed, pytest.raises(SystemExit) as ended:
        train.main(options)
    return str(ended.value)


def test_a_loss_that_is_not_gloos_fails_the_run(tmp_path: Path) -> None:
    for change in (1e-3, float("nan")):
        words = [*SMALL.split(), "--size", "tiny", "--out", str(tmp_path / str(change))]
        assert run_ranks(2, with_a_wrong_weight, words, change) == ["3", "3"]


def interrupted(rank: int, words: list[str], at: int) -> list[float]:
    """As if one rank alone were sent Ctrl-C in a step."""
    sys.path.insert(0, str(EXAMPLES))
    import train

    log = train.Job.log

    def log_and_interrupt(job: Any, step: int, loss: Any) -> None:
        log(job, step, loss)
        if step == at and rank == 1:
            os.kill(os.getpid(), signal.SIGINT)

    with mock.patch.object(train.Job, "log", log_and_interrupt):
        return train.main(train.parser().parse_args(words))


@pytest.mark.slow
def test_any_number_of_ranks_goes_on(tmp_path: Path) -> None:
    words = [*SMALL.split(), "--steps", "6", "--size", "tiny", "--out"]
    whole = run_ranks(2, run_example, ["train", *words, str(tmp_path / "whole")])[0]
    begun = run_ranks(2, interrupted, [*words, str(tmp_path / "begun")], 2)[0]
    assert begun == whole[:3]
    assert [path.name for path in (tmp_path / "begun").iterdir()] == ["step-3"]
    for num_ranks in (2, 4):
        out = shutil.copytree(tmp_path / "begun", tmp_path / str(num_ranks))
        rest = run_ranks(num_ranks, run_example, ["train", *words, str(out), "--resume"])[0]
        if num_ranks == 2:
            assert begun + rest == whole
        assert begun + rest == pytest.approx(whole, rel=2e-5)


def test_every_example_is_run() -> None:
    run = {line.split()[0] for _, line, _ in CASES.values()}
    shared = {"common", "model", "checkpoint", "parameter_server", "finetune", "survive", "decode"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == run | shared
