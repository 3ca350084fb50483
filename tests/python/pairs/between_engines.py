"""The systems of the tables of whole loops, with the methods of between_model.Alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from between_model import (
    ACTION_STEP,
    SEED_AFTER_LOADING,
    batch_of,
    given_params,
    make_model,
    probe,
    probed_loss,
    scheduler_of,
    torch_optimizer,
    use,
)
from pair_model import local_of
from pair_table import Case
from program_model import loss_fn_of, loss_of, targets_of, thaw, weight_of, wrapped
from torch import Tensor, nn

from ringcomm.integrations.transformers import tensor_parallelize
from ringcomm.integrations.transformers.pipeline import pipeline_blocks
from ringcomm.optim import AdaLomo, Lomo
from ringcomm.parallel import (
    ParallelDims,
    get_state_dict,
    offload,
    parallelize,
    set_state_dict,
    zero,
)

# Of the table "Between steps": sizes of the axes, and the ZeRO stage.
DIMS: dict[str, tuple[dict[str, int], int]] = {
    "data": ({"dp": 2}, 0),
    "tensor": ({"dp": 1, "tp": 2}, 0),
    "pipeline": ({"dp": 1, "pp": 2}, 0),
    "mesh": ({"dp": 2, "tp": 2}, 2),
}


def dims_of(case: Case) -> tuple[dict[str, Any], int] | None:
    """Sizes of a case's mesh, and its ZeRO stage; None without parallelize()."""
    if "mesh" not in case:
        return DIMS.get(case["system"])
    sizes = {"dp": 1, **dict.fromkeys(case["mesh"].split(" x "), 2)}
    return sizes, int(case["zero"])


def world_size(case: Case) -> int:
    """The ranks that a case runs on."""
    found = dims_of(case)
    return 2 if found is None else torch.Size(found[0].values()).numel()


def num_data_ranks(case: Case) -> int:
    """How many of them have rows of their own."""
    found = dims_of(case)
    return 2 if found is None else found[0]["dp"] * found[0].get("fsdp", 1)


def num_parts(case: Case) -> int:
    """Micro-batches of a rank's step."""
    return 1 if dims_of(case) is None else int(case.get("micro-batches", "2"))


class Engine:
    """A model in training on this rank."""

    model: Any
    optimizer: Any
    scheduler: Any
    is_whole = True  # this rank can call the model

    def __init__(self, case: Case, seed: int) -> None:
        self.case = case
        self.data_rank, self.num_data = dist.get_rank(), dist.get_world_size()
        self.core = make_model(case, seed)
        self.model = wrapped(case, self.core)
        self.params: list[nn.Parameter] = []
        self.losses: list[float] = []  # that step() of parallelize() has returned

    def made(self) -> None:
        """Called at the end of __init__."""
        self.params = [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def owner(self) -> Any:
        """What states are taken of."""
        return self.model

    def step(self, step: int) -> None:
        use(self.case, step, self.data_rank)
        try:
            self.run(*batch_of(self.case, step, self.data_rank, self.num_data))
        except ValueError as error:
            if "an error of the user's" in str(error):
                self.optimizer.zero_grad()
            raise
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def run(self, ids: Tensor, labels: Tensor) -> None:
        """Forward and backward pass: the recipe for means over the labels of all ranks."""
        total = torch.tensor([weight_of(self.case, labels)], dtype=torch.float32)
        dist.all_reduce(total)
        loss = loss_of(self.case, self.model, ids, labels, float(total) / self.num_data)
        self.optimizer.scale(loss).backward()

    def evaluate(self) -> float:
        return probed_loss(self.case, self.model)

    def hooked(self) -> list[nn.Module]:
        """The first and the last layer of the model, of those that this rank has."""
        return [self.core.model.layers[0], self.core.model.layers[-1]]

    def thaw(self) -> None:
        """Makes frozen weights trained."""
        thaw(self.core)

    def replica(self) -> tuple[int, ...]:
        """Ranks with the same have the same weights."""
        return (dist.get_rank(),) if self.case["system"] in ("zero 3", "infinity") else ()

    def snapshot(self) -> list[Tensor]:
        """What tells whether a weight has been written since."""
        return [local_of(param).clone() for param in self.params]

    def reloaded(self) -> Any:
        """A new one that goes on from this one's checkpoint. Collective."""
        saved = get_state_dict(self.owner, self.optimizer, full=True)
        made = type(self)(self.case, SEED_AFTER_LOADING)
        set_state_dict(made.owner, made.optimizer, *saved)
        made.scheduler.load_state_dict(self.scheduler.state_dict())
        made.losses = self.losses
        return made


class ZeroEngine(Engine):
    """zero.shard() in a loop by hand."""

    def __init__(self, case: Case, seed: int) -> None:
        super().__init__(case, seed)
        system, kind = case["system"], case.get("optimizer", "AdamW")
        is_infinity = system == "infinity"
        params = given_params(case, self.model.parameters())
        given = torch_optimizer(case, params)
        if is_infinity and kind in ("AdamW", "SGD"):
            options = {k: v for k, v in given.defaults.items() if k in ("momentum", "eps")}
            own: Any = getattr(offload, kind)
            given = own(params, given.defaults["lr"], weight_decay=0.01, **options)
        is_before = case.get("scheduler") == "before"
        scheduler = scheduler_of(case, given) if is_before else None
        stage = 3 if is_infinity else int(system[-1])
        self.optimizer = zero.shard(
            self.model, given, stage, bucket_bytes=2000, offload_weights=is_infinity
        )
        self.scheduler = scheduler or scheduler_of(case, self.optimizer)
        self.made()

    def snapshot(self) -> list[Tensor]:
        if isinstance(self.optimizer, zero.ZeroInfinity):  # whose weights are elsewhere
            return [torch.tensor(self.optimizer.num_steps)]
        return super().snapshot()


class LomoEngine(Engine):
    """Lomo and AdaLomo over replicas."""

    def __init__(self, case: Case, seed: int) -> None:
        super().__init__(case, seed)
        kind, lr = {"Lomo": (Lomo, 0.2), "AdaLomo": (AdaLomo, 0.05)}[case["system"]]
        self.optimizer = kind(self.model, lr, 0.01, group=dist.group.WORLD)
        self.scheduler = scheduler_of(case, self.optimizer)
        self.made()


class MeshEngine(Engine):
    """parallelize()."""

    def __init__(self, case: Case, seed: int) -> None:
        super().__init__(case, seed)
        found = dims_of(case)
        assert found is not None
        sizes, stage = found
        dims = ParallelDims(**sizes)
        early: list[Any] = []

        def make(params: Any) -> torch.optim.Optimizer:
            made = torch_optimizer(case, given_params(case, params))
            if case.get("scheduler") == "before":
                early.append(scheduler_of(case, made))
            return made

        options: dict[str, Any] = {"num_microbatches": num_parts(case), "zero_stage": stage}
        if dims.pp > 1:
            options["schedule"] = case.get("schedule", "1f1b")
        options["recompute"] = case.get("recompute") == "yes"
        if (loss_fn := loss_fn_of(case)) is not None:
            options["loss_fn"] = loss_fn
            if dims.tp > 1:  # the user's loss needs all classes
                tensor_parallelize(self.model, dims.group("tp"), gather_logits=True)
            if dims.pp > 1:  # which takes a user's loss with a user's blocks
                self.model = pipeline_blocks(self.model)
        self.train = parallelize(self.model, dims, make, **options)
        self.model, self.optimizer = self.train.model, self.train.optimizer
        self.scheduler = early[0] if early else scheduler_of(case, self.optimizer)
        batch = dims["batch"]
        self.data_rank, self.num_data = batch.get_local_rank(), batch.size()
        self.is_whole = dims.pp == 1
        places = [dims["pp"].get_local_rank(), dims["tp"].get_local_rank()]
        if stage == 3:
            places.append(dims["fsdp"].get_local_rank())
        self._places = tuple(places)
        self.made()

    @property
    def owner(self) -> Any:
        return self.train

    def run(self, ids: Tensor, labels: Tensor) -> None:
        self.losses.append(float(self.train.step(ids, targets_of(self.case, labels))))

    def evaluate(self) -> float:
        use(self.case, ACTION_STEP, 0)
        ids = probe().repeat(2, 1)
        return float(self.train.evaluate(ids, targets_of(self.case, ids)))

    def hooked(self) -> list[nn.Module]:
        if self.is_whole:
            return super().hooked()
        blocks = [m for m in self.model.modules() if type(m).__name__ == "LlamaDecoderLayer"]
        return [blocks[0], blocks[-1]]

    def replica(self) -> tuple[int, ...]:
        return self._places


def engine_of(case: Case, seed: int, folder: Path) -> Engine:
    """The engine of a case. Collective."""
    if dims_of(case) is not None:
        return MeshEngine(case, seed)
    return (LomoEngine if "Lomo" in case["system"] else ZeroEngine)(case, seed)
