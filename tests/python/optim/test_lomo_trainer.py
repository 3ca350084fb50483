"""LOMO in transformers' Trainer; test_pairs.py has Accelerate and the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ringcomm.integrations.transformers import prepare
from ringcomm.optim import InBackwardOptimizer, Lomo

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

VOCAB, LR, STEPS = 64, 0.05, 6


def llama(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        **options,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def rows(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (count, 12), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def run_trainer(folder: Path, model: nn.Module, opt: Any, **options: Any) -> list[float]:
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=3,
        **options,
    )
    scheduler = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, total_iters=STEPS)
    trainer = transformers.Trainer(model, args, train_dataset=rows(32), optimizers=(opt, scheduler))
    if isinstance(opt, InBackwardOptimizer):
        prepare(trainer)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def closest(model: nn.Module, other: nn.Module) -> float:
    return max(
        float((a.detach() - b.detach()).abs().max())
        for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


def test_trainer(tmp_path: Path) -> None:
    """The losses and weights of torch's SGD in the same Trainer."""
    options: dict[str, Any] = {"max_grad_norm": 0.0, "gradient_checkpointing": True}
    options["gradient_checkpointing_kwargs"] = {"use_reentrant": True}
    ours, theirs = (llama(tie_word_embeddings=True) for _ in range(2))
    opt = Lomo(ours, LR)
    losses = run_trainer(tmp_path, ours, opt, **options)
    expected = run_trainer(tmp_path, theirs, torch.optim.SGD(theirs.parameters(), LR), **options)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert closest(ours, theirs) < 1e-6
    assert opt.param_groups[0]["step"] == STEPS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"max_grad_norm is 1\.0 and clip_grad_norm of Lomo is None"),
        ({"gradient_accumulation_steps": 3, "max_grad_norm": 0.0}, "make them equal"),
    ],
)
def test_what_trainer_would_ignore(tmp_path: Path, options: Any, message: str) -> None:
    model = llama()
    with pytest.raises(ValueError, match=message):
        run_trainer(tmp_path, model, Lomo(model, LR), **options)


def test_trainer_that_was_not_prepared(tmp_path: Path) -> None:
    """It clips by torch, or takes the norm, where no gradient is left."""
    model = llama()
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, max_steps=1, report_to=[])
    opt = Lomo(model, LR)
    scheduler = torch.optim.lr_scheduler.LinearLR(opt)
    trainer = transformers.Trainer(model, args, train_dataset=rows(8), optimizers=(opt, scheduler))
    with pytest.raises(RuntimeError, match=r"call prepare\(\) of ringcomm.integrations"):
        trainer.train()


@pytest.mark.parametrize("how", ["clip_grad_norm_", "clip_grad_value_", "GradScaler", "no step"])
def test_torchs_own_clipping_and_scaling_raise(how: str) -> None:
    model = torch.nn.Linear(4, 4)
    opt = Lomo(model, LR)
    scaler = torch.amp.GradScaler("cpu", enabled=how == "GradScaler")
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    calls: dict[str, Any] = {
        "clip_grad_norm_": lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        "clip_grad_value_": lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        "GradScaler": lambda: scaler.step(opt),
        "no step": lambda: model.bias.sum().backward(),
    }
    words = "got a gradient after its update" if how == "no step" else "Use clip_grad_norm="
    with pytest.raises(RuntimeError, match=words):
        calls[how]()
    opt.zero_grad()
    assert model.weight.grad is None
