"""Programs of test_clients.py: Trainer with checkpoints, and with a backend by name.

Each trains in two processes with DistributedDataParallel, or with a system of ringcomm in its
place, and returns what the user sees.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

LR, STEPS, VOCABULARY = 0.05, 6, 37
Report = dict[str, Any]


def shard(system: str, model: nn.Module) -> Any:
    """The optimizer of a system, which all compare with SGD under DDP."""
    from ringcomm.optim import Lomo
    from ringcomm.parallel import zero

    trained = [param for param in model.parameters() if param.requires_grad]
    if system == "Lomo":
        return Lomo(trained, LR, model=model, group=dist.group.WORLD)
    sgd = torch.optim.SGD(trained, LR)
    return sgd if system == "DDP" else zero.shard(model, sgd, int(system[-1]))


def causal_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config)


def rows(num: int) -> list[dict[str, Tensor]]:
    """Sequences with different numbers of labels."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for idx in range(num):
        ids = torch.randint(3, VOCABULARY, (8,), generator=generator)
        labels = ids.clone()
        labels[8 - idx % 5 :] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def arguments(kind: Any, folder: Path, **more: Any) -> Any:
    options: dict[str, Any] = {
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": STEPS,
        "logging_steps": 1,
        "learning_rate": LR,
        "lr_scheduler_type": "linear",
        "max_grad_norm": 0.0,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 3,
    }
    return kind(output_dir=str(folder), **{**options, **more})


def prepared(system: str, trainer: Any) -> Any:
    """The trainer with a system's optimizer, as docs/how-to/migrate.md has it."""
    from ringcomm.integrations.transformers import register

    register()
    trainer.optimizer = shard(system, trainer.model)
    return trainer


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def save_and_resume(system: str, folder: Path) -> Report:
    """Trainer's checkpoints: resume_from_checkpoint, save_pretrained and from_pretrained."""
    from transformers import LlamaForCausalLM, Trainer, TrainingArguments

    data: Any = rows(24)
    is_model_only = system.startswith("zero")  # docs/how-to/migrate.md: the state of zero.shard()
    saves: dict[str, Any] = {"save_steps": 3, "save_only_model": is_model_only}
    saves["save_strategy"] = "steps"
    if system == "zero 3":  # whose weights are sharded: get_state_dict(full=True)
        saves = {"save_strategy": "no"}

    def made() -> Any:
        args = arguments(TrainingArguments, folder, **saves)
        return prepared(system, Trainer(causal_model(), args, train_dataset=data))

    trainer = made()
    trainer.train()
    report: dict[str, Any] = {"losses": losses_of(trainer)}
    if not is_model_only:
        again = made()
        again.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
        report["resumed"] = losses_of(again)
    if system != "zero 3":
        trainer.save_model(str(folder / "saved"))
        dist.barrier()
        loaded = LlamaForCausalLM.from_pretrained(folder / "saved")
        ids = data[0]["input_ids"][None]
        with torch.no_grad():
            report["saved"] = float(loaded(input_ids=ids, labels=ids).loss)
            report["kept"] = float(trainer.model(input_ids=ids, labels=ids).loss)
    return report


def by_name(rank: int, folder: Path) -> Report:
    """Trainer makes the group of backend "ringcomm", in a process without torchrun's port.

    With accumulation and clipping; the weights and whether the model is wrapped, by optimizer.
    """
    from transformers import Trainer, TrainingArguments

    from ringcomm.integrations.transformers import register
    from ringcomm.optim import Lomo

    register()
    register()  # once is enough
    place: dict[str, Any] = {"init_method": f"file://{folder}/store", "rank": rank}
    dist.init_process_group = partial(dist.init_process_group, world_size=2, **place)
    report: Report = {}
    for system in ("DDP", "zero 2", "Lomo"):
        options = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "max_steps": 3}
        args = arguments(TrainingArguments, folder, ddp_backend="ringcomm", **options)
        model = causal_model()
        how: dict[str, Any] = {}
        if system == "Lomo":  # by its class, with its options
            lomo = {"model": model, "lr": LR, "group": dist.group.WORLD}
            lomo |= {"clip_grad_norm": 0.5, "accumulation_steps": 2}
            how["optimizer_cls_and_kwargs"] = (Lomo, lomo)
        trainer = Trainer(model, args, train_dataset=rows(24), **how)
        if not how:  # zero.shard() after Trainer has moved the model
            trainer.optimizer = shard(system, model)
        trainer.train()
        weights = torch.cat([param.detach().flatten() for param in model.parameters()])
        wrapped = isinstance(trainer.model_wrapped, nn.parallel.DistributedDataParallel)
        report[system] = wrapped, weights
    return report | {"backend": dist.get_backend()}


def main(system: str, backend: str, folder: Path) -> None:
    """What a rank reports is written to a file."""
    dist.init_process_group(backend)
    report = save_and_resume(system, folder)
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
