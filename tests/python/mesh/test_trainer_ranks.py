"""The data loader of Accelerate in two processes; what it and Trainer refuse.

test_pairs.py has both together with every option of the optimizers, on batches of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_states import full_weights
from ranks import in_ranks, run_ranks
from torch import Tensor, nn

from ringcomm.nn import ColumnParallelLinear
from ringcomm.optim import Lomo
from ringcomm.parallel import zero

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

LR = 0.05
# What torchrun says.
SIZES = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
ENV = [{"RANK": rank, "LOCAL_RANK": rank, **SIZES} for rank in "01"]


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))


def rows() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(48, 6, generator=generator)
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def load_by_accelerate(rank: int) -> list[Tensor]:
    from ringcomm.integrations.accelerate import register

    register()
    accelerator = accelerate.Accelerator(cpu=True)
    optimizer = zero.shard(model := mlp(), torch.optim.SGD(model.parameters(), LR), stage=2)
    loader = torch.utils.data.DataLoader(rows(), batch_size=2)
    prepared, _, loader = accelerator.prepare(model, optimizer, loader)
    assert not isinstance(prepared, nn.parallel.DistributedDataParallel)
    return [x for x, _ in loader]


def test_batches_of_accelerate_are_shared_out() -> None:
    """Each row comes on one rank; that steps are those of one process: tests/python/training."""
    results = run_ranks(2, load_by_accelerate, env=ENV, timeout_s=180.0)
    batches = [x for found in results for x in found]
    assert {len(x) for x in batches} == {2}
    expected = rows().tensors[0]
    assert sorted(map(tuple, torch.cat(batches).tolist())) == sorted(map(tuple, expected.tolist()))


@in_ranks(2, env=ENV, timeout_s=180.0)
def test_what_accelerate_would_do_wrong(rank: int) -> None:
    from ringcomm.integrations.accelerate import register

    def prepare(model: nn.Module, *optimizers: Any) -> Any:
        return accelerate.Accelerator(cpu=True).prepare(model, *optimizers)

    x = torch.randn(2, 6)
    model = mlp()
    before = state_of(model)
    optimizer = Lomo(model, LR, group=dist.group.WORLD)
    wrapped = nn.parallel.DistributedDataParallel(model)  # as Accelerate does without register()
    with pytest.raises(ValueError, match=r"call register\(\) of ringcomm\.integrations"):
        wrapped(x)
    optimizer.close()
    sharded = zero.shard(other := mlp(), torch.optim.SGD(other.parameters(), LR), 2)
    with pytest.raises(RuntimeError, match=r"call register\(\) of ringcomm\.integrations"):
        nn.parallel.DistributedDataParallel(other)(x)
    register()
    for make, message in (
        (lambda m: Lomo(m, LR, group="none"), "over 1 processes, but Accelerate has 2"),
        (lambda m: Lomo(m, LR, group=dist.group.WORLD, accumulation_steps=2), "make them equal"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare(model, made := make(model))
        made.close()
    alone = [dist.new_group([r]) for r in range(2)][rank]
    sharded = zero.shard(other := mlp(), torch.optim.SGD(other.parameters(), LR), 1, group=alone)
    with pytest.raises(ValueError, match="over 1 processes, but Accelerate has 2"):
        prepare(other, sharded)
    sgd = torch.optim.SGD(nn.Linear(1, 1).parameters(), LR)
    with pytest.raises(TypeError, match="takes no other optimizer, got"):
        prepare(other, sharded, sgd)
    make_optimizer: Any
    for make_optimizer in (
        lambda m: Lomo(m, LR, group="none"),
        lambda m: zero.shard(m, torch.optim.SGD(m.parameters(), LR), 3, group=alone),
    ):
        linear = ColumnParallelLinear.from_linear(nn.Linear(6, 8), group=dist.group.WORLD)
        split = nn.Sequential(linear)
        with pytest.raises(ValueError, match=r"train it with ringcomm\.parallel\.parallelize"):
            prepare(split, make_optimizer(split))
    optimizer = Lomo(model, LR, group=dist.group.WORLD)
    assert all(torch.equal(value, before[name]) for name, value in state_of(model).items())
    accelerator = accelerate.Accelerator(cpu=True)
    model, wrapped = accelerator.prepare(model, optimizer)
    with pytest.raises(TypeError, match="make another Accelerator"):
        accelerator.prepare(nn.Linear(1, 1), sgd)
    other_first = accelerate.Accelerator(cpu=True)
    other_first.prepare(nn.Linear(1, 1), sgd)
    with pytest.raises(TypeError, match=r"takes no other optimizer, got \['SGD', 'Lomo'\]"):
        other_first.prepare(model, optimizer)
    accelerator.backward(model(x).sum())
    with pytest.raises(ValueError, match=r"make it with clip_grad_norm=0\.3"):
        accelerator.clip_grad_norm_(model.parameters(), 0.3)
    with pytest.raises(ValueError, match=r"pass model\.parameters"):
        accelerator.clip_grad_norm_(next(model.parameters()), 0.3)
    with pytest.raises(ValueError, match="the option clip_grad_value="):
        accelerator.clip_grad_value_(model.parameters(), 0.3)


class ForTrainer(nn.Module):
    """A model with the loss that Trainer wants."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.net(x), labels)}


def trainer_of(folder: str, make: Callable[[nn.Module], Any], model: nn.Module) -> Any:
    args = transformers.TrainingArguments(
        output_dir=folder, use_cpu=True, max_steps=5, report_to=[], save_strategy="no"
    )
    data = [{"x": x, "labels": y} for x, y in zip(*rows().tensors, strict=True)]
    trainer = transformers.Trainer(model, args, train_dataset=data)
    trainer.optimizer = make(model)  # Trainer has moved the model
    return trainer


def trained_with_smoothing(folder: str, stage: int) -> dict[str, Tensor]:
    from ringcomm.integrations.transformers import register

    register()
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=11, **sizes, **heads))
    args = transformers.TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=2,
        per_device_train_batch_size=1,
        report_to=[],
        save_strategy="no",
        label_smoothing_factor=0.2,
    )
    ids = torch.randint(11, (8, 6), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in ids]
    trainer = transformers.Trainer(model, args, train_dataset=data)
    trainer.optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), LR), stage)
    trainer.train()
    assert type(model).__name__ == "LlamaForCausalLM"  # what Trainer asks
    return full_weights(model)


@in_ranks(2, env=ENV, timeout_s=180.0)
def test_smoothed_labels_are_shifted_for_sharded_weights(rank: int, tmp_path: Path) -> None:
    """fully_shard renames the class, by which Trainer knows that labels are to be shifted."""
    expected, found = (trained_with_smoothing(str(tmp_path), stage) for stage in (1, 3))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@in_ranks(2, env=ENV, timeout_s=180.0)
def test_what_trainer_would_do_wrong(rank: int, tmp_path: Path) -> None:
    from ringcomm.integrations.transformers import register

    folder = str(tmp_path)
    model = ForTrainer()
    before = state_of(model)
    with pytest.raises(ValueError, match=r"pass group=dist\.group\.WORLD"):
        Lomo(model, LR)
    optimizer = Lomo(model, LR, group=dist.group.WORLD)
    register()
    with pytest.raises(
        ValueError, match=r"max_grad_norm is 1\.0, but clip_grad_norm of Lomo is None"
    ):
        trainer_of(folder, lambda _: optimizer, model).train()
    assert all(torch.equal(value, before[name]) for name, value in state_of(model).items())
    optimizer.close()
    sgd = torch.optim.SGD
    early = zero.shard(other := ForTrainer(), sgd(other.parameters(), LR), 1)
    with pytest.raises(ValueError, match="A Trainer moves its model, so make it before"):
        trainer_of(folder, lambda _: early, other).train()
    trainer = trainer_of(folder, lambda m: zero.shard(m, sgd(m.parameters(), LR), 1), model)
    trainer.args.save_strategy = "steps"
    with pytest.raises(ValueError, match="set save_only_model=True"):
        trainer.train()
    trainer = trainer_of(folder, lambda m: zero.shard(m, sgd(m.parameters(), LR), 3), ForTrainer())
    trainer.args.save_strategy = "steps"
    with pytest.raises(ValueError, match='set save_strategy="no"'):
        trainer.train()
    trainer.args.save_strategy = "no"
    trainer.args.predict_with_generate = True  # as Seq2SeqTrainingArguments have it
    with pytest.raises(ValueError, match=r"use zero\.shard\(\) at stage 1 or 2, or predict"):
        trainer.train()
