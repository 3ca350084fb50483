"""The table of pairs of Lomo and AdaLomo, and how a case of it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pair_loops import LOOPS, Training
from pair_model import CLIP_VALUE, GRADIENTS, WORLD_SIZE, local_of, params_in_groups
from pair_table import Case, Refused, Table, condition
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from ringcomm.optim import AdaLomo, Lomo
from ringcomm.parallel import WeightShards

REPLICAS = ("replicas", "replicas without group=")

TABLE = Table(
    axes={
        "optimizer": ("Lomo", "AdaLomo"),
        "weights in": ("replicas", "WeightShards", "fully_shard", "replicas without group="),
        "dtype": ("float32", "bfloat16 weights"),
        "reduce dtype": ("default", "16 bits"),
        "rounding": ("nearest", "stochastic", "split"),
        "accumulation": ("1", "3"),
        "clipping": ("none", "norm", "norm in two passes", "value", "torch"),
        "loss scale": ("none", "fixed", "dynamic", "GradScaler"),
        "gradients": GRADIENTS,
        "weights": ("plain", "frozen", "tied"),
        "groups": ("one", "decay first", "no decay first"),
        "given": ("model", "parameters"),
        "overlap": ("no", "yes"),
        "recompute": ("no", "yes", "reentrant"),
        "resume": ("no", "same ranks"),
        "compile": ("no", "yes"),
        "around": ("nothing", "DDP", *LOOPS),
        "backend": ("ringcomm", "gloo"),
    },
    refused=(
        Refused(
            "weights in: replicas or replicas without group=; around: DDP",
            "ValueError|RuntimeError: DistributedDataParallel",
            "the model itself, and group=",
        ),
        Refused(
            "weights in: WeightShards or fully_shard; around: DDP",
            "RuntimeError: DistributedDataParallel|flatten",
            "the model itself: its gradients are reduced",
        ),
        Refused(
            "weights in: replicas without group=",
            "ValueError: group=dist.group.WORLD",
            'group=dist.group.WORLD; group="none" for ranks that train apart',
        ),
        Refused(
            "clipping: torch",
            "RuntimeError: clip_grad_norm=",
            "the option clip_grad_norm=",
            is_late=True,
        ),
        Refused(
            "loss scale: GradScaler",
            "RuntimeError: loss_scale=",
            "the option loss_scale=, and optimizer.scale(loss).backward()",
            is_late=True,
        ),
        Refused(
            "around: Accelerate or Trainer; loss scale: GradScaler",
            'ValueError: GradScaler.*loss_scale="dynamic"',
            'mixed_precision="no", and the option loss_scale=',
        ),
        Refused(
            "clipping: norm in two passes; accumulation: 3",
            "ValueError: cannot accumulate",
            'clip_mode="deferred"',
        ),
        Refused(
            "weights in: WeightShards; compile: yes",
            "RuntimeError: torch.compile",
            "fully_shard, or no torch.compile",
        ),
        Refused(
            "weights in: WeightShards or fully_shard; gradients: none on rank 1",
            "RuntimeError: some ranks",
            "replicas with group=, or a loss that uses every weight on every rank",
        ),
        Refused(
            "weights in: WeightShards; gradients: layer skipped on rank 1",
            "MismatchError: ",
            "replicas with group=, or a loss that uses every weight on every rank",
            only_with="backend: ringcomm",
        ),
        Refused(
            "weights in: fully_shard; gradients: layer skipped on rank 1",
            "MismatchError: ",
            "replicas with group=, or a loss that uses every weight on every rank",
            only_with="backend: ringcomm",
            is_late=True,
        ),
    ),
    meaningless=(
        condition("dtype: float32; rounding: stochastic or split"),
        condition("dtype: float32; reduce dtype: 16 bits"),
        condition("accumulation: 1; gradients: none in the first micro-batch"),
        condition("weights in: WeightShards or fully_shard; overlap: yes"),
        condition("given: model; groups: decay first or no decay first"),
    ),
    also=(
        {  # gradients that wait for step() beside those that are used
            "weights in": "fully_shard",
            "accumulation": "3",
            "gradients": "none in the first micro-batch",
            "around": "Trainer",
        },
    ),
)


class LomoTraining(Training):
    """One case, on the ranks of a group."""

    def __init__(self, case: Case, group: dist.ProcessGroup | None, folder: Path) -> None:
        super().__init__(case, WORLD_SIZE, folder)
        model = self.model
        # Selective checkpoints of torch allow one backward pass.
        model.is_selective = case["clipping"] != "norm in two passes"
        self.shards = WeightShards(model, group) if case["weights in"] == "WeightShards" else None
        if case["weights in"] == "fully_shard":
            for module in [*model.blocks, model]:
                fully_shard(module)
        kind: Any = Lomo if case["optimizer"] == "Lomo" else AdaLomo
        rest = {"lr": 0.2 if kind is Lomo else 0.05, "weight_decay": 0.01, **self._own(group)}
        if case["given"] == "model":
            self.optimizer = kind(model, **rest)
        else:
            self.optimizer = kind(params_in_groups(model, case["groups"]), model=model, **rest)
        self.wrap()

    def _own(self, group: dist.ProcessGroup | None) -> dict[str, Any]:
        case = self.case
        options = {"accumulation_steps": int(case["accumulation"]), **self.options()}
        if case["weights in"] == "replicas":
            options["group"] = group
        if case["overlap"] == "yes":
            options["overlap"] = True
        options["stochastic_rounding"] = case["rounding"] == "stochastic"
        options["master"] = "split" if case["rounding"] == "split" else None
        if case["clipping"].startswith("norm"):
            options["clip_mode"] = "two_pass" if "two passes" in case["clipping"] else "deferred"
        if case["clipping"] == "value":
            options["clip_grad_value"] = CLIP_VALUE
        return options

    def snapshot(self) -> list[Tensor]:
        if self.shards is None:
            # fully_shard has whole weights in their place after a pass that failed, but not here.
            return [local_of(value).clone() for value in self.model.state_dict().values()]
        return [self.shards.shard_of(param).clone() for param in self.model.parameters()]


class AdaLomoOracle(torch.optim.Optimizer):
    """AdaLomo's docstring, line by line, in float64."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.05, "weight_decay": 0.01})
        self.num_steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_steps += 1
        beta = 1 - self.num_steps**-0.8
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step(param, beta, group["lr"], group["weight_decay"])

    def _step(self, param: Tensor, beta: float, lr: float, weight_decay: float) -> None:
        assert param.grad is not None
        state, grad, weight = self.state[param], param.grad.double(), param.detach().double()
        squares = grad.square() + 1e-30
        if grad.dim() == 2:
            means = {"row": squares.mean(1, keepdim=True), "column": squares.mean(0, keepdim=True)}
        else:
            means = {"each": squares}
        for name, mean in means.items():
            old = state.get(name, torch.zeros_like(mean))
            state[name] = beta * old + (1 - beta) * mean
        if grad.dim() == 2:
            moment = state["row"] * state["column"] / state["row"].mean()
        else:
            moment = state["each"]
        update = grad / moment.sqrt()
        update /= max(1.0, float(update.square().mean().sqrt()))
        size = lr * max(1e-3, float(weight.square().mean().sqrt()))
        param.data.copy_((1 - size * weight_decay) * weight - size * update)


def oracle(case: Case, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """What makes the same steps in one process."""
    if case["optimizer"] == "Lomo":
        return torch.optim.SGD(groups, 0.2, weight_decay=0.01)
    return AdaLomoOracle(groups)
