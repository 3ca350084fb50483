"""The table of pairs of zero.shard(), and how a case of it trains."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pair_loops import LOOPS, Training
from pair_model import DTYPES, GRADIENTS, params_in_groups
from pair_table import Case, Refused, Table, condition
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from whole_optimizers import Averaged, Kron, SmoothMuon, Together, by_dimensions

from ringcomm.parallel import offload, zero
from ringcomm.parallel.optimizer_classes import optimizers_of

OPTIMIZERS = ("sgd", "adamw", "muon and adamw", "adafactor", "shampoo", "schedule-free")

TABLE = Table(
    axes={
        "stage": ("1", "2", "3", "infinity"),
        "optimizer": OPTIMIZERS,
        "state": ("device", "host", "file"),
        "dtype": ("float32", "bfloat16", "float16", "bfloat16 weights"),
        "reduce dtype": ("default", "16 bits"),
        "accumulation": ("1", "3", "3 with no_sync"),
        "clipping": ("none", "option", "optimizer", "torch"),
        "loss scale": ("none", "fixed", "dynamic", "GradScaler"),
        "gradients": GRADIENTS,
        "weights": ("plain", "frozen", "tied"),
        "groups": ("one", "decay first", "no decay first"),
        "recompute": ("no", "yes", "reentrant"),
        "resume": ("no", "same ranks", "one rank", "torch's state dict"),
        "compile": ("no", "yes"),
        "around": ("nothing", "DDP", "fully_shard before", *LOOPS),
        "backend": ("ringcomm", "gloo"),
    },
    refused=(
        Refused(
            "around: DDP",
            "RuntimeError: DistributedDataParallel|flatten",
            "the model itself: zero.shard reduces gradients",
        ),
        Refused(
            "stage: 3; dtype: float16; reduce dtype: 16 bits; loss scale: fixed or dynamic",
            "ValueError: reduce_dtype",
            "reduce_dtype=torch.float32, the default",
        ),
        Refused("around: fully_shard before", "ValueError: already sharded", "one of the two"),
        Refused(
            "stage: 1 or 2 or infinity; clipping: torch",
            r"RuntimeError: optimizer\.clip_grad_norm_",
            "optimizer.clip_grad_norm_(max_norm), or the option clip_grad_norm=",
            besides="state: host",
        ),
        Refused(
            "stage: 1 or 2 or infinity; loss scale: GradScaler",
            "RuntimeError: loss_scale=",
            "the option loss_scale=, and optimizer.scale(loss).backward()",
            besides="state: host",
        ),
        Refused(
            "around: Accelerate or Trainer; loss scale: GradScaler",
            'ValueError: GradScaler.*loss_scale="dynamic"',
            'mixed_precision="no", and the option loss_scale=',
        ),
        Refused(
            "stage: infinity; state: device",
            "ValueError: ringcomm.parallel.offload",
            "an optimizer of ringcomm.parallel.offload",
        ),
        Refused(
            "stage: infinity; dtype: bfloat16 or float16",
            "ValueError: param_dtype",
            "a model of 16-bit weights: model.to(dtype)",
            besides="state: host",
        ),
        Refused(
            "stage: infinity; backend: gloo",
            "ValueError: ringcomm",
            "a group of backend ringcomm",
            besides="state: host",
        ),
        Refused(
            "stage: infinity; compile: yes",
            "RuntimeError: torch.compile",
            "stage 3, or no torch.compile",
            besides="state: host",
        ),
        Refused(
            "stage: 3; dtype: bfloat16 weights",
            "ValueError: float32",
            "float32 weights and param_dtype=torch.bfloat16",
        ),
        Refused(
            "stage: infinity; accumulation: 3 with no_sync",
            r"RuntimeError: no_sync\(\)",
            "accumulation without it, or another stage",
            besides="state: host",
        ),
        Refused(
            "stage: infinity; gradients: none on rank 1",
            "RuntimeError: some ranks only, which zero.shard",
            "stage 1 or 2, or a loss that uses every weight on every rank",
            besides="state: host; backend: ringcomm",
        ),
        Refused(
            "stage: infinity; gradients: layer skipped on rank 1",
            "MismatchError: ",
            "stage 1 or 2, or a loss that uses every weight on every rank",
            besides="state: host",
            only_with="backend: ringcomm",
        ),
        Refused(
            "stage: 3; gradients: layer skipped on rank 1",
            "MismatchError: ",
            "stage 1 or 2, or a loss that uses every layer on every rank",
            only_with="backend: ringcomm",
        ),
    ),
    meaningless=(
        condition("dtype: float32; reduce dtype: 16 bits"),
        condition("accumulation: 1; gradients: none in the first micro-batch"),
        condition("accumulation: 3 with no_sync; around: Accelerate or Trainer"),
    ),
)


def torch_optimizer(case: Case, groups: list[dict[str, Any]]) -> Any:
    adamw = partial(torch.optim.AdamW, lr=0.02, eps=1e-3)
    match case["optimizer"]:
        case "sgd":
            return torch.optim.SGD(groups, 0.2, momentum=0.9, weight_decay=0.01)
        case "muon and adamw":
            return by_dimensions(groups, partial(SmoothMuon, lr=0.1), adamw)
        case "adafactor":
            return torch.optim.Adafactor(groups, 0.05, eps=(1e-6, 1e-3))
        case "shampoo":
            return Kron(groups, 0.05)
        case "schedule-free":
            return Averaged(groups, 0.2)
    return adamw(groups)


def oracle(case: Case, groups: list[dict[str, Any]]) -> Any:
    """What makes the same steps in one process."""
    together = Together(optimizers_of(torch_optimizer(case, groups)))
    together.train()
    return together


def _optimizer(case: Case, model: nn.Module, folder: Path) -> Any:
    groups = params_in_groups(model, case["groups"])
    if case["state"] == "device":
        return torch_optimizer(case, groups)
    place: dict[str, Any] = {"to": "cpu"}
    if case["state"] == "file":
        place = {"to": "nvme", "path": folder}
    if case["optimizer"] == "sgd":
        return offload.SGD(groups, 0.2, momentum=0.9, weight_decay=0.01, **place)
    if case["optimizer"] == "adamw":
        return offload.AdamW(groups, 0.02, eps=1e-3, **place)
    return [offload.Offloaded(x, **place) for x in optimizers_of(torch_optimizer(case, groups))]


class ZeroTraining(Training):
    """One case, on the ranks of a group."""

    def __init__(self, case: Case, group: dist.ProcessGroup, folder: Path) -> None:
        super().__init__(case, group.size(), folder)
        if case["around"] == "fully_shard before":
            fully_shard(self.model)
        options: dict[str, Any] = {"bucket_bytes": 200, **self.options()}
        if case["dtype"] in ("bfloat16", "float16"):
            options["param_dtype"] = DTYPES[case["dtype"]]
        stage = 3 if case["stage"] == "infinity" else int(case["stage"])
        options["offload_weights"] = case["stage"] == "infinity"
        optimizer = _optimizer(case, self.model, folder)
        self.optimizer = zero.shard(self.model, optimizer, stage, group=group, **options)
        self.wrap()
        self.optimizer.train()  # for schedule-free ones

    def snapshot(self) -> list[Tensor]:
        if isinstance(self.optimizer, zero.ZeroInfinity):  # whose weights are elsewhere
            return [torch.tensor(self.optimizer.num_steps)]
        return super().snapshot()

    def saved(self) -> Any:
        self.optimizer.eval()
        return super().saved()

    def load(self, saved: Any) -> None:
        super().load(saved)
        self.optimizer.train()
