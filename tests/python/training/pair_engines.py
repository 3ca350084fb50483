"""Systems in training: ZeRO, Lomo and parallelize()."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from pair_batches import count_items_of, loss_fn_of, micro_batches, probe, rows_of
from pair_loops import launched, loop_of
from pair_models import CLIP_NORM, CLIP_VALUE, DTYPES, SCALE, is_small, make_model, wrapped
from pair_optimizers import groups_of, offloaded, scheduler_of, torch_optimizer
from pair_table import Case
from pair_tables import LOMO, ZERO
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ringcomm.optim import AdaLomo, Lomo
from ringcomm.parallel import (
    ParallelDims,
    get_state_dict,
    parallelize,
    set_state_dict,
    zero,
)

SEED_AFTER_LOADING = 99
USERS_ERROR = "an error of the user's"
# What cases have that do not say so.
PLAIN = {**ZERO.plain, **LOMO.plain}
# Systems of parallelize(): the mesh and the ZeRO stage.
SYSTEMS = {"data": ("dp", 0), "tensor": ("tp", 0), "pipeline": ("pp", 0), "mesh": ("dp x tp", 2)}


def dims_of(case: Case) -> tuple[dict[str, Any], int] | None:
    """Sizes of a case's mesh, and its ZeRO stage; None without parallelize()."""
    if "zero" in case:
        mesh, stage = case["mesh"], int(case["zero"])
    elif case.get("system") in SYSTEMS:
        mesh, stage = SYSTEMS[case["system"]]
    else:
        return None
    return {"dp": 1, **dict.fromkeys(mesh.split(" x "), 2)}, stage


def local_of(tensor: Tensor) -> Tensor:
    """What this rank holds of a weight."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


class Place(NamedTuple):
    """Where a model trains: its files, its seed, and its group if not the default one."""

    folder: Path
    seed: int = 0
    group: dist.ProcessGroup | None = None


class Engine:
    """A model in training on this rank, in our loop or in another one.

    Attributes:
        ranks: those whose micro-batches it takes; more than one where it stands for others.
        owner: what states are taken of.
        replica: ranks with the same have the same weights.
        losses: that step() of parallelize() has returned.
        is_whole: this rank can call the model.
    """

    optimizer: Any
    scheduler: Any = None
    replica: tuple[int, ...] = ()
    is_whole = True

    def __init__(self, case: Case, place: Place) -> None:
        self.case, self.place, self.has = case, place, PLAIN | case
        place.folder.mkdir(parents=True, exist_ok=True)
        group = place.group or dist.group.WORLD
        assert group is not None
        self.group = group
        self.data_rank, self.num_data = group.rank(), group.size()
        self.ranks = range(self.data_rank, self.data_rank + 1) if self.num_data > 1 else range(2)
        model = make_model(case, place.seed)
        if self.has["dtype"].endswith("weights"):
            model.to(DTYPES[case["dtype"]])
        self.model = self.wrapped = self.owner = wrapped(case, model)
        self.loop = loop_of(case, self.model, self.num_data, place.folder)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        self.losses: list[float] = []

    def options(self) -> dict[str, Any]:
        """Of the optimizer, as all of the library call them."""
        found: dict[str, Any] = {}
        if self.has["clipping"] == "option" or self.has["clipping"].startswith("norm"):
            found["clip_grad_norm"] = CLIP_NORM
        if self.has["loss scale"] in ("fixed", "dynamic"):
            found["loss_scale"] = SCALE if self.has["loss scale"] == "fixed" else "dynamic"
        if self.has["reduce dtype"] == "16 bits":
            found["reduce_dtype"] = DTYPES[self.case["dtype"]]
        return found

    def made(self, early: Any = None) -> None:
        """Called at the end of __init__: puts around the model what the case has."""
        if not is_small(self.case):
            self.scheduler = early or scheduler_of(self.case, self.optimizer)
        if self.has["compile"] == "yes":
            self.model.compile(backend="aot_eager")
        if self.has["around"] == "DDP":
            self.wrapped = DistributedDataParallel(self.model, find_unused_parameters=True)
        if self.loop is not None:
            self.loop.take(self.optimizer)

    def run(self, steps: range) -> None:
        if self.loop is not None:
            self.loop.run(steps, self.ranks)
            return
        for step in steps:
            try:
                self.forward_backward(step)
            except ValueError as error:
                if USERS_ERROR in str(error):
                    self.optimizer.zero_grad()
                raise
            self.finish_step()

    def forward_backward(self, step: int) -> None:
        if is_small(self.case):
            batches: list[Any] = micro_batches(self.case, range(step, step + 1), self.ranks)
        else:  # the recipe for means over the labels of all ranks
            rows = rows_of(self.case, step, self.data_rank, self.num_data)
            total = torch.tensor([rows.weight], dtype=torch.float32)
            dist.all_reduce(total)
            batches = [dataclasses.replace(rows, total=float(total) / self.num_data)]
        for batch in batches:
            waits = "no_sync" in self.has["accumulation"] and batch is not batches[-1]
            with self.optimizer.no_sync() if waits else contextlib.nullcontext():
                self.backward(batch, 1 / len(self.ranks))

    def backward(self, batch: Any, share: float) -> None:
        loss = batch.loss(self.wrapped) * share
        if self.has["loss scale"] == "GradScaler":
            self.scaler.scale(loss).backward()
        elif self.has["clipping"] == "norm in two passes":
            self.optimizer.backward(loss)
        else:
            getattr(self.optimizer, "scale", lambda loss: loss)(loss).backward()

    def finish_step(self) -> None:
        clipping, is_scaled = self.has["clipping"], self.has["loss scale"] == "GradScaler"
        if is_scaled and clipping in ("torch", "optimizer"):
            self.scaler.unscale_(self.optimizer)
        if clipping == "torch":
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        if clipping == "optimizer":
            self.optimizer.clip_grad_norm_(CLIP_NORM)
        if is_scaled:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()

    def evaluate(self) -> float:
        with torch.no_grad():
            return float(probe(self.case).loss(self.model))

    def hooked(self) -> list[nn.Module]:
        """The first and the last layer of the Llama, of those that this rank has."""
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer

        blocks = [each for each in self.model.modules() if isinstance(each, LlamaDecoderLayer)]
        return [blocks[0], blocks[-1]]

    @property
    def params(self) -> list[nn.Parameter]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def snapshot(self) -> list[Tensor]:
        """What tells whether a weight has been written since."""
        if isinstance(self.optimizer, zero.ZeroInfinity):  # whose weights are elsewhere
            return [self.optimizer.part_of(param).clone() for param in self.params]
        return [local_of(param).clone() for param in self.params]

    def reloaded(self) -> Any:
        """A new one that goes on from this one's checkpoint. Collective."""
        if self.has["resume"] == "same ranks":  # the optimizer's own state
            weights = get_state_dict(self.owner, full=True)[0]
            states = copy.deepcopy(self.optimizer.state_dict())
            made = self.again()
            set_state_dict(made.owner, None, weights)
            made.optimizer.load_state_dict(states)
        elif self.has["resume"] == "torch's state dict":
            saved = copy.deepcopy(dcp.get_state_dict(self.model, self.optimizer))
            made = self.again()
            dcp.set_state_dict(
                *(made.model, made.optimizer),
                model_state_dict=saved[0],
                optim_state_dict=saved[1],
                options=dcp.StateDictOptions(strict=False),  # for weights that have no state yet
            )
        else:
            saved = get_state_dict(self.owner, self.optimizer, full=True)
            made = self.again()
            set_state_dict(made.owner, made.optimizer, *saved)
        if self.scheduler is not None:
            made.scheduler.load_state_dict(self.scheduler.state_dict())
        made.losses = self.losses
        return made

    def again(self) -> Any:
        """A new one, of other weights; each rank alone where the case says so."""
        folder, rank = self.place.folder / "again", dist.get_rank()
        if self.has["resume"] != "one rank":
            return type(self)(self.case, Place(folder, SEED_AFTER_LOADING))
        groups = [dist.new_group([r]) for r in range(dist.get_world_size())]
        with launched(self.case, rank, 1):
            place = Place(folder / str(rank), SEED_AFTER_LOADING, groups[rank])
            return type(self)(self.case, place)


class ZeroEngine(Engine):
    """zero.shard()."""

    def __init__(self, case: Case, place: Place) -> None:
        super().__init__(case, place)
        if self.has["around"] == "fully_shard before":
            fully_shard(self.model)
        self.stage = case.get("stage", case.get("system", "").removeprefix("zero "))
        given = self._given()
        early = scheduler_of(case, given) if case.get("scheduler") == "before" else None
        options = {"bucket_bytes": 200 if is_small(case) else 2000, **self.options()}
        if self.has["dtype"] in ("bfloat16", "float16"):
            options["param_dtype"] = DTYPES[case["dtype"]]
        options["offload_weights"] = self.stage == "infinity"
        stage = 3 if self.stage == "infinity" else int(self.stage)
        self.replica = (dist.get_rank(),) if stage == 3 else ()
        self.optimizer = zero.shard(self.model, given, stage, group=self.group, **options)
        self.made(early)
        self.optimizer.train()  # for schedule-free ones

    def _given(self) -> Any:
        """The user's optimizer, or the library's with states elsewhere."""
        params, state = [*self.model.parameters()], self.has["state"]
        given = torch_optimizer(self.case, groups_of(self.case, params))
        is_known = isinstance(given, torch.optim.AdamW | torch.optim.SGD)
        if self.stage == "infinity" and "system" in self.case and is_known:
            state = "host"
        if state == "device":
            return given
        where = {"to": "nvme", "path": self.place.folder} if state == "file" else {"to": "cpu"}
        return offloaded(given, **where)

    def reloaded(self) -> Any:
        self.optimizer.eval()
        made = super().reloaded()
        made.optimizer.train()
        return made


class LomoEngine(Engine):
    """Lomo and AdaLomo."""

    def __init__(self, case: Case, place: Place) -> None:
        super().__init__(case, place)
        model, has, options = self.model, self.has, self.options()
        if has["weights in"] == "fully_shard":
            for module in [*model.blocks, model]:
                fully_shard(module)
        if has["weights in"] == "replicas":
            options["group"] = self.group
        if has["overlap"] == "yes":
            options["overlap"] = True
        if has["clipping"].startswith("norm"):
            options["clip_mode"] = "two_pass" if "two passes" in has["clipping"] else "deferred"
        if has["clipping"] == "value":
            options["clip_grad_value"] = CLIP_VALUE
        options["stochastic_rounding"] = has["rounding"] == "stochastic"
        options["master"] = "split" if has["rounding"] == "split" else None
        options |= {"accumulation_steps": int(has["accumulation"]), "weight_decay": 0.01}
        is_ada = "AdaLomo" in (case.get("system"), case.get("optimizer"))
        kind: Any = AdaLomo if is_ada else Lomo
        options["lr"] = 0.05 if is_ada else 0.2
        if has["given"] == "model":
            self.optimizer = kind(model, **options)
        else:
            self.optimizer = kind(groups_of(case, model.parameters()), model=model, **options)
        self.made()

    def snapshot(self) -> list[Tensor]:
        if self.has["weights in"] == "fully_shard":
            # Which has whole weights in their place after a pass that failed, but not here.
            return [local_of(value).clone() for value in self.model.state_dict().values()]
        return super().snapshot()


class ParallelizedEngine(Engine):
    """parallelize()."""

    def __init__(self, case: Case, place: Place) -> None:
        from ringcomm.integrations.transformers import tensor_parallelize
        from ringcomm.integrations.transformers.pipeline import pipeline_blocks
        from ringcomm.parallel.model.describe import unwrapped

        super().__init__(case, place)
        found = dims_of(case)
        assert found is not None
        dims, stage = ParallelDims(**found[0]), found[1]
        early: list[Any] = []

        def make(params: Any) -> torch.optim.Optimizer:
            made: torch.optim.Optimizer = torch_optimizer(case, groups_of(case, params))
            if case.get("scheduler") == "before":
                early.append(scheduler_of(case, made))
            return made

        num_parts = int(case.get("micro-batches", "2"))
        options: dict[str, Any] = {"num_microbatches": num_parts, "zero_stage": stage}
        if dims.pp > 1:
            options["schedule"] = case.get("schedule", "1f1b")
        options["recompute"] = case.get("recompute") == "yes"
        if (loss_fn := loss_fn_of(case)) is not None:
            options |= {"loss_fn": loss_fn, "count_items": count_items_of(case)}
            if dims.tp > 1:  # the user's loss needs all classes
                tensor_parallelize(self.model, dims.group("tp"), gather_logits=True)
            if dims.pp > 1:  # which takes a user's loss with a user's blocks
                self.model = pipeline_blocks(unwrapped(self.model))
        self.train = self.owner = parallelize(self.model, dims, make, **options)
        self.model, self.optimizer = self.train.model, self.train.optimizer
        self.data_rank, self.num_data = dims["batch"].get_local_rank(), dims["batch"].size()
        self.is_whole = dims.pp == 1
        axes = ["pp", "tp", *(["fsdp"] if stage == 3 else [])]
        self.replica = tuple(dims[axis].get_local_rank() for axis in axes)
        self.made(*early[:1])  # of the first of two calls

    def forward_backward(self, step: int) -> None:
        rows = rows_of(self.case, step, self.data_rank, self.num_data)
        self.losses.append(float(self.train.step(rows.ids, rows.targets)))

    def evaluate(self) -> float:
        rows = probe(self.case)
        return float(self.train.evaluate(rows.ids.repeat(2, 1), rows.targets.repeat(2, 1)))
