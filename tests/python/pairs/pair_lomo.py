"""The table of pairs of Lomo and AdaLomo, and how a case of it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from full_states import full_weights, load_full_weights
from pair_loops import LOOPS, loop_of
from pair_model import (
    CLIP_NORM,
    CLIP_VALUE,
    DTYPES,
    GRADIENTS,
    SCALE,
    WORLD_SIZE,
    Net,
    local_of,
    micro_batches,
    params_in_groups,
)
from pair_table import Case, Meaningless, Refused, Table
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

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
            {"weights in": REPLICAS, "around": ("DDP",)},
            "ValueError|RuntimeError",  # compiled models meet it in the backward pass
            "DistributedDataParallel",
            "the model itself, and group=",
        ),
        Refused(
            {"weights in": ("WeightShards", "fully_shard"), "around": ("DDP",)},
            "RuntimeError",
            "DistributedDataParallel|Cannot flatten",  # torch's own words, and reasons
            "the model itself: its gradients are reduced",
        ),
        Refused(
            {"weights in": ("replicas without group=",)},
            "ValueError",
            "group=dist.group.WORLD",
            'group=dist.group.WORLD; group="none" for ranks that train apart',
        ),
        Refused(
            {"clipping": ("torch",)},
            "RuntimeError",
            "clip_grad_norm=",
            "the option clip_grad_norm=",
            is_late=True,
        ),
        Refused(
            {"loss scale": ("GradScaler",)},
            "RuntimeError",
            "loss_scale=",
            "the option loss_scale=, and optimizer.scale(loss).backward()",
            is_late=True,
        ),
        Refused(
            {"around": LOOPS, "loss scale": ("GradScaler",)},
            "ValueError",
            'GradScaler.*loss_scale="dynamic"',
            'mixed_precision="no", and the option loss_scale=',
        ),
        Refused(
            {"clipping": ("norm in two passes",), "accumulation": ("3",)},
            "ValueError",
            "cannot accumulate",
            'clip_mode="deferred"',
        ),
        Refused(
            {"weights in": ("WeightShards",), "compile": ("yes",)},
            "RuntimeError",
            "torch.compile",
            "fully_shard, or no torch.compile",
        ),
        Refused(
            {"weights in": ("WeightShards", "fully_shard"), "gradients": ("none on rank 1",)},
            "RuntimeError",
            "some ranks",
            "replicas with group=, or a loss that uses every weight on every rank",
        ),
        Refused(
            {"weights in": ("WeightShards",), "gradients": ("layer skipped on rank 1",)},
            "MismatchError",
            "",
            "replicas with group=, or a loss that uses every weight on every rank",
            only_with={"backend": ("ringcomm",)},
        ),
        Refused(
            {"weights in": ("fully_shard",), "gradients": ("layer skipped on rank 1",)},
            "MismatchError",
            "",
            "replicas with group=, or a loss that uses every weight on every rank",
            only_with={"backend": ("ringcomm",)},
            is_late=True,
        ),
    ),
    meaningless=(
        Meaningless({"dtype": ("float32",), "rounding": ("stochastic", "split")}),
        Meaningless({"dtype": ("float32",), "reduce dtype": ("16 bits",)}),
        Meaningless({"accumulation": ("1",), "gradients": ("none in the first micro-batch",)}),
        Meaningless({"weights in": ("WeightShards", "fully_shard"), "overlap": ("yes",)}),
        Meaningless({"given": ("model",), "groups": ("decay first", "no decay first")}),
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


def _options(case: Case, group: dist.ProcessGroup | None) -> dict[str, Any]:
    options: dict[str, Any] = {"accumulation_steps": int(case["accumulation"])}
    if case["weights in"] == "replicas":
        options["group"] = group
    if case["reduce dtype"] == "16 bits":
        options["reduce_dtype"] = DTYPES[case["dtype"]]
    if case["overlap"] == "yes":
        options["overlap"] = True
    if case["rounding"] == "stochastic":
        options["stochastic_rounding"] = True
    if case["rounding"] == "split":
        options["master"] = "split"
    if case["clipping"].startswith("norm"):
        options["clip_grad_norm"] = CLIP_NORM
        options["clip_mode"] = "two_pass" if "two passes" in case["clipping"] else "deferred"
    if case["clipping"] == "value":
        options["clip_grad_value"] = CLIP_VALUE
    if case["loss scale"] == "fixed":
        options["loss_scale"] = SCALE
    if case["loss scale"] == "dynamic":
        options["loss_scale"] = "dynamic"
    return options


class Training:
    """One case, from its start or from a checkpoint, on the ranks of a group."""

    def __init__(self, case: Case, group: dist.ProcessGroup | None, folder: Path) -> None:
        self.case = case
        model = Net(case["weights"], case["recompute"])
        if case["dtype"].endswith("weights"):
            model.to(DTYPES[case["dtype"]])
        loop = loop_of(case, model, WORLD_SIZE, folder)
        self.shards = WeightShards(model, group) if case["weights in"] == "WeightShards" else None
        if case["weights in"] == "fully_shard":
            for module in [*model.blocks, model]:
                fully_shard(module)
        kind: Any = Lomo if case["optimizer"] == "Lomo" else AdaLomo
        rest = {"lr": 0.2 if kind is Lomo else 0.05, "weight_decay": 0.01, **_options(case, group)}
        self.optimizer: Any
        if case["given"] == "model":
            self.optimizer = kind(model, **rest)
        else:
            self.optimizer = kind(params_in_groups(model, case["groups"]), model=model, **rest)
        if case["compile"] == "yes":
            model.compile(backend="aot_eager")
        self.model: nn.Module = model
        self.wrapped: nn.Module = model
        if case["around"] == "DDP":
            self.wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        self.loop: Any = self
        if loop is not None:
            self.loop = loop
            loop.take(self.optimizer)

    def run(self, steps: range, ranks: range) -> None:
        """Some steps, on the micro-batches of a rank."""
        for step in steps:
            self._step(step, ranks)

    def _step(self, step: int, ranks: range) -> None:
        (rank,) = ranks
        for batch in micro_batches(self.case, step, rank):
            loss = batch.loss(self.wrapped)
            if self.case["loss scale"] == "GradScaler":
                loss = self.scaler.scale(loss)
            if self.case["clipping"] == "norm in two passes":
                self.optimizer.backward(loss)
            else:
                self.optimizer.scale(loss).backward()
        if self.case["clipping"] == "torch":
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        if self.case["loss scale"] == "GradScaler":
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def snapshot(self) -> list[Tensor]:
        """What tells whether a weight has been written since."""
        if self.shards is None:
            # fully_shard has whole weights in their place after a pass that failed, but not here.
            return [local_of(value).clone() for value in self.model.state_dict().values()]
        return [self.shards.shard_of(param).clone() for param in self.model.parameters()]

    def whole_weights(self) -> dict[str, Tensor]:
        """On every rank. Collective."""
        state = self.model.state_dict() if self.shards is None else full_weights(self.shards)
        return whole(state)

    def saved(self) -> Any:
        """Whole weights, and the optimizer's state. Collective."""
        return self.whole_weights(), self.optimizer.state_dict()

    def load(self, saved: Any) -> None:
        """Goes on from what saved() has returned."""
        weights, state = saved
        if self.shards is not None:
            load_full_weights(self.shards, weights)
        else:
            load_weights(self.model, weights)
        self.optimizer.load_state_dict(state)


def whole(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of whole weights. Collective where they are DTensors."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in state.items()
    }


def load_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Whole weights into those of a model, which may be DTensors."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            mine = weights[name]
            if isinstance(param, DTensor):
                mine = distribute_tensor(
                    mine, param.device_mesh, param.placements, src_data_rank=None
                )
            param.copy_(mine)


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
        if grad.dim() > 1:
            means = {"row": squares.mean(1, keepdim=True), "column": squares.mean(0, keepdim=True)}
        else:
            means = {"each": squares}
        for name, mean in means.items():
            old = state.get(name, torch.zeros_like(mean))
            state[name] = beta * old + (1 - beta) * mean
        if grad.dim() > 1:
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
