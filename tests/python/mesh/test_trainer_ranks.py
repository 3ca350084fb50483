"""Trainer and Accelerate in two processes, with their own data loaders, and what they refuse.

test_pairs.py has both together with every option of the optimizers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn

from ringcomm.optim import Lomo
from ringcomm.parallel import zero

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

LR = 0.05
# What torchrun says.
ENV = [
    {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    for rank in range(2)
]


def on_two(fn: Any, *args: Any) -> list[Any]:
    return run_ranks(2, fn, *args, env=ENV, timeout_s=180.0)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))


def rows() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(48, 6, generator=generator)
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


def state_of(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, value in model.state_dict().items():
        found[name] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return {name: value.detach().clone() for name, value in found.items()}


def assert_equal_states(results: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(results[0][name], value, rtol=0, atol=2e-6)
        assert all(torch.equal(results[0][name], other[name]) for other in results[1:]), name


def made(kind: str, num_parts: int, max_norm: float | None, model: nn.Module) -> Any:
    """The optimizer of one of two ranks."""
    if kind.startswith("zero"):
        sgd = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
        return zero.shard(model, sgd, stage=int(kind[-1]))
    options: dict[str, Any] = {"accumulation_steps": num_parts, "clip_grad_norm": max_norm}
    return Lomo(model, LR, group=dist.group.WORLD, **options)


def alone(kind: str, model: nn.Module) -> Any:
    """That of one process that makes the same steps."""
    momentum = 0.9 if kind.startswith("zero") else 0.0
    return torch.optim.SGD(model.parameters(), LR, momentum=momentum)


# ---- Accelerate


def train_accelerated(rank: int, kind: str, num_parts: int, max_norm: float | None) -> Any:
    from ringcomm.integrations.accelerate import prepare

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=num_parts)
    assert accelerator.num_processes == 2
    model: nn.Module = mlp()
    optimizer: Any = made(kind, num_parts, max_norm, model)
    loader = torch.utils.data.DataLoader(rows(), batch_size=2)
    model, optimizer, loader = prepare(accelerator, model, optimizer, loader)
    assert not isinstance(model, nn.parallel.DistributedDataParallel)
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            if max_norm is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
    return state_of(model)


def train_alone(kind: str, num_parts: int, max_norm: float | None) -> dict[str, Tensor]:
    """One process, on the batches of both."""
    model = mlp()
    optimizer = alone(kind, model)
    for x, y in torch.utils.data.DataLoader(rows(), batch_size=4 * num_parts):
        nn.functional.mse_loss(model(x), y).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return state_of(model)


@pytest.mark.parametrize(
    ("kind", "num_parts", "max_norm"),
    [("zero2", 2, None)],
)
def test_accelerate(kind: str, num_parts: int, max_norm: float | None) -> None:
    results = on_two(train_accelerated, kind, num_parts, max_norm)
    assert_equal_states(results, train_alone(kind, num_parts, max_norm))


def refuse_in_accelerate(rank: int) -> None:
    from ringcomm.integrations.accelerate import prepare

    x = torch.randn(2, 6)
    model = mlp()
    before = state_of(model)
    optimizer = Lomo(model, LR, group=dist.group.WORLD)
    wrapped, _ = accelerate.Accelerator(cpu=True).prepare(model, optimizer)
    with pytest.raises(ValueError, match=r"call prepare\(\) of ringcomm\.integrations"):
        wrapped(x)
    optimizer.close()
    for make, message in (
        (lambda m: Lomo(m, LR, group="none"), "over 1 processes and Accelerate has 2"),
        (lambda m: Lomo(m, LR, group=dist.group.WORLD, accumulation_steps=2), "make them equal"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare(accelerate.Accelerator(cpu=True), model, made := make(model))
        made.close()
    sharded = zero.shard(other := mlp(), torch.optim.SGD(other.parameters(), LR), 2)
    with pytest.raises(RuntimeError, match=r"call prepare\(\) of ringcomm\.integrations"):
        accelerate.Accelerator(cpu=True).prepare(other, sharded)[0](x)
    alone = [dist.new_group([r]) for r in range(2)][rank]
    sharded = zero.shard(other := mlp(), torch.optim.SGD(other.parameters(), LR), 1, group=alone)
    with pytest.raises(ValueError, match="over 1 processes and Accelerate has 2"):
        prepare(accelerate.Accelerator(cpu=True), other, sharded)
    with pytest.raises(TypeError, match=r"accelerator\.prepare\(\) takes others"):
        prepare(accelerate.Accelerator(cpu=True), model, torch.optim.SGD(model.parameters(), LR))
    scaled = accelerate.Accelerator(cpu=True)
    scaled.scaler = torch.amp.GradScaler("cpu")  # as mixed_precision="fp16" makes on a GPU
    optimizer = Lomo(model, LR, group=dist.group.WORLD)
    with pytest.raises(ValueError, match='loss_scale="dynamic" of Lomo'):
        prepare(scaled, model, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in state_of(model).items())
    accelerator = accelerate.Accelerator(cpu=True)
    model, wrapped = prepare(accelerator, model, optimizer)
    accelerator.backward(model(x).sum())
    with pytest.raises(ValueError, match=r"make it with clip_grad_norm=0\.3"):
        accelerator.clip_grad_norm_(model.parameters(), 0.3)
    with pytest.raises(ValueError, match=r"give model\.parameters"):
        accelerator.clip_grad_norm_(next(model.parameters()), 0.3)
    with pytest.raises(ValueError, match="their own clip_grad_value="):
        accelerator.clip_grad_value_(model.parameters(), 0.3)


def test_what_accelerate_would_do_wrong() -> None:
    on_two(refuse_in_accelerate)


# ---- Trainer


class ForTrainer(nn.Module):
    """A model with the loss that Trainer wants."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.net(x), labels)}


def trainer_of(
    folder: str, make: Callable[[nn.Module], Any], model: nn.Module, rows_each: int, **options: Any
) -> Any:
    args = transformers.TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=5,
        per_device_train_batch_size=rows_each,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=3,
        **options,
    )
    data = [{"x": x, "labels": y} for x, y in zip(*rows().tensors, strict=True)]
    trainer = transformers.Trainer(model, args, train_dataset=data)
    trainer.optimizer = make(model)  # Trainer has moved the model
    return trainer


def train_by_trainer(
    rank: int, folder: str, kind: str, num_parts: int, max_norm: float | None
) -> dict[str, Tensor]:
    from ringcomm.integrations.transformers import prepare

    model = ForTrainer()
    options = {"max_grad_norm": max_norm or 0.0, "gradient_accumulation_steps": num_parts}
    make = partial(made, kind, num_parts, max_norm)
    trainer = prepare(trainer_of(folder, make, model, 2, **options))
    assert trainer.args.world_size == 2
    trainer.train()
    assert trainer.state.global_step == 5
    return state_of(model)


@pytest.mark.parametrize(
    ("kind", "num_parts", "max_norm"),
    [("lomo", 2, 0.3)],
)
def test_trainer(tmp_path: Path, kind: str, num_parts: int, max_norm: float | None) -> None:
    """The weights of one process that has the rows of both."""
    results = on_two(train_by_trainer, str(tmp_path), kind, num_parts, max_norm)
    model = ForTrainer()
    options = {"max_grad_norm": max_norm or 0.0, "gradient_accumulation_steps": num_parts}
    trainer = trainer_of(str(tmp_path), partial(alone, kind), model, 4, **options)
    trainer.train()
    assert_equal_states(results, state_of(model))


def refuse_in_trainer(rank: int, folder: str) -> None:
    from ringcomm.integrations.transformers import prepare

    model = ForTrainer()
    before = state_of(model)
    with pytest.raises(ValueError, match=r"say group=dist\.group\.WORLD"):
        Lomo(model, LR)
    optimizer = Lomo(model, LR, group=dist.group.WORLD)
    with pytest.raises(ValueError, match=r"call prepare\(\) of ringcomm\.integrations"):
        trainer_of(folder, lambda _: optimizer, model, 2).train()
    with pytest.raises(
        ValueError, match=r"max_grad_norm is 1\.0 and clip_grad_norm of Lomo is None"
    ):
        prepare(trainer_of(folder, lambda _: optimizer, model, 2))
    assert all(torch.equal(value, before[name]) for name, value in state_of(model).items())
    optimizer.close()
    trainer = trainer_of(folder, partial(made, "zero1", 1, None), model, 2)
    trainer.args.save_strategy = "steps"
    with pytest.raises(ValueError, match="set save_only_model=True"):
        prepare(trainer)


def test_what_trainer_would_do_wrong(tmp_path: Path) -> None:
    on_two(refuse_in_trainer, str(tmp_path))
