"""The table of pairs of meshes (tensor, pipeline, expert, data parallelism), and a case's steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pair_loops import Training
from pair_model import CLIP_NORM, MicroBatch, Net, params_in_groups
from pair_table import Case, Refused, Table, condition
from pair_zero import torch_optimizer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ringcomm.nn import (
    ColumnParallelLinear,
    MixtureOfExperts,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from ringcomm.optim import Lomo
from ringcomm.parallel import (
    clip_grad_norm_,
    expert,
    pipeline,
    tensor,
    zero,
)
from ringcomm.parallel.tensor.splits import SplitModule

WORLD_SIZE = 4
# The ranks of a row share a model; those of a column have the same part of it.
DATA_RANKS = {
    "tensor 2 x data 2": 2,
    "sequence 2 x data 2": 2,
    "pipeline 2 x data 2": 2,
    "pipeline 2 x tensor 2": 1,
    "pipeline 2 x sequence 2": 1,
    "experts 2 x data 4": 4,
    "experts 4 x data 4": 4,
}
# Where a run goes on; the first one that allows what it has.
OTHER_MESHES = {
    "tensor 2 x data 2": ("pipeline 2 x data 2", "tensor 4"),
    "sequence 2 x data 2": ("pipeline 2 x tensor 2", "tensor 2 x data 2"),
    "pipeline 2 x data 2": ("sequence 2 x data 2", "tensor 2 x data 2"),
    "pipeline 2 x tensor 2": ("pipeline 2 x sequence 2", "tensor 4"),
    "pipeline 2 x sequence 2": ("pipeline 2 x tensor 2",),
    "experts 2 x data 4": ("experts 4 x data 4",),
    "experts 4 x data 4": ("experts 2 x data 4",),
}

PIPELINE = ("pipeline 2 x data 2", "pipeline 2 x tensor 2", "pipeline 2 x sequence 2")
PIPELINES = " or ".join(PIPELINE)
EXPERTS = "experts 2 x data 4 or experts 4 x data 4"
ZERO = ("zero 1", "zero 2", "zero 3")
OF_TORCH = ("optimizer", "DDP", "fully_shard")

TABLE = Table(
    axes={
        "mesh": tuple(DATA_RANKS),
        "trained by": (*OF_TORCH, *ZERO, "Lomo"),
        "optimizer": ("sgd", "adamw"),
        "dtype": ("float32", "bfloat16 weights"),
        "accumulation": ("1", "3"),
        "clipping": ("none", "function", "option", "torch"),
        "loss scale": ("none", "fixed", "dynamic", "GradScaler"),
        "weights": ("plain", "frozen", "tied"),
        "groups": ("one", "no decay first"),
        "recompute": ("no", "yes"),
        "resume": ("no", "same ranks", "one rank", "another mesh"),
        "backend": ("ringcomm", "gloo"),
    },
    refused=(
        Refused(
            f"mesh: {EXPERTS}; trained by: zero 3",
            "ValueError: different experts",
            "zero.shard() at stage 1 or 2, Lomo, or expert.average_gradients()",
        ),
        Refused(
            f"mesh: {PIPELINES}; trained by: zero 3",
            "ValueError: which a pipeline does not call",
            "stage 1 or 2, or Pipeline(wrap=lambda stage: fully_shard(stage, mesh=...))",
        ),
        Refused(
            "mesh: sequence 2 x data 2 or pipeline 2 x sequence 2; trained by: fully_shard",
            "ValueError: sequence_dim.*fully_shard",
            "DistributedDataParallel, or zero.shard at stage 1 or 2",
        ),
        Refused(
            "mesh: sequence 2 x data 2; trained by: zero 3",
            "ValueError: summed over the ranks of a tensor-parallel group",
            "stage 1 or 2",
        ),
        Refused(
            f"mesh: {PIPELINES}; trained by: Lomo; clipping: option",
            "ValueError: only the gradients of this rank's pipeline stages",
            "zero.shard",
        ),
        Refused(
            f"mesh: {PIPELINES}; trained by: Lomo; loss scale: fixed or dynamic",
            "ValueError: only the gradients of this rank's pipeline stages",
            "zero.shard",
        ),
        Refused(
            f"mesh: {PIPELINES}; trained by: Lomo; weights: tied",
            "ValueError: shared by stages",
            "zero.shard at stage 1 or 2",
        ),
        Refused(
            "trained by: Lomo; clipping: function",
            "RuntimeError: clip_grad_norm=",
            "the option clip_grad_norm= of Lomo",
            is_late=True,
        ),
        Refused(
            "clipping: torch",
            r"RuntimeError: parallel\.clip_grad_norm_|optimizer\.clip_grad_norm_|clip_grad_norm=",
            "ringcomm.parallel.clip_grad_norm_(model, max_norm)",
            besides="mesh: tensor 2 x data 2 or pipeline 2 x data 2 or experts 4 x data 4",
            is_late=True,
        ),
        Refused(
            "loss scale: GradScaler",
            "RuntimeError: loss_scale=",
            "torch's ShardedGradScaler; the option loss_scale= of zero.shard() or Lomo",
            besides="mesh: tensor 2 x data 2 or pipeline 2 x data 2 or experts 4 x data 4",
            is_late=True,
        ),
        Refused(
            "trained by: zero 3; dtype: bfloat16 weights",
            "ValueError: float32",
            "float32 weights and param_dtype=torch.bfloat16",
        ),
    ),
    meaningless=(
        condition("trained by: optimizer or DDP or fully_shard; clipping: option"),
        condition("trained by: optimizer or DDP or fully_shard; loss scale: fixed or dynamic"),
        condition("trained by: Lomo; optimizer: adamw"),
    ),
)


def oracle(case: Case, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """What makes the same steps in one process."""
    if case["trained by"] == "Lomo":
        return torch.optim.SGD(groups, 0.2, weight_decay=0.01)
    return torch_optimizer(case, groups)


class Mesh:
    """The groups of a case that this rank is in."""

    def __init__(self, name: str, rank: int) -> None:
        rows = [dist.new_group([first, first + 1]) for first in (0, 2)]
        columns = [dist.new_group([first, first + 2]) for first in (0, 1)]
        alone = [dist.new_group([r]) for r in range(WORLD_SIZE)]
        everyone = dist.group.WORLD
        row, column = rows[rank // 2], columns[rank % 2]
        self.shares_tokens = "sequence" in name
        self.tensor = row if "tensor" in name or self.shares_tokens else None
        if name == "tensor 4":
            self.tensor = everyone
        self.pipeline: dist.ProcessGroup | None = None
        if name == "pipeline 2 x data 2":
            self.pipeline = row
        if name in PIPELINE[1:]:
            self.pipeline = column
        self.experts: dist.ProcessGroup | None = None
        self.replicas: dist.ProcessGroup | None = None
        if name == "experts 2 x data 4":
            self.experts, self.replicas = row, column
        if name == "experts 4 x data 4":
            self.experts = everyone
        self.data = {1: alone[rank], 2: column, 4: everyone}[DATA_RANKS.get(name, 1)]
        self.data_rank = self.data.rank()


def mesh_to_go_on(case: Case) -> str:
    """Where a case trains from its checkpoint on."""
    if case["resume"] != "another mesh":
        return "one rank" if case["resume"] == "one rank" else case["mesh"]
    others = OTHER_MESHES[case["mesh"]]
    return next((mesh for mesh in others if TABLE.allows({**case, "mesh": mesh})), others[-1])


def split_in_tensor_parallel(model: Any, group: dist.ProcessGroup, shares_tokens: bool) -> None:
    """Megatron's split of a model's layers."""
    is_tied = model.head.weight is model.embedding.weight
    options: dict[str, Any] = {"group": group, "sequence_dim": 0 if shares_tokens else None}
    model.embedding = VocabParallelEmbedding.from_embedding(model.embedding, **options)
    for block in model.blocks:
        block.up = ColumnParallelLinear.from_linear(block.up, **options)
        block.down = RowParallelLinear.from_linear(block.down, **options)
    model.head = ColumnParallelLinear.from_linear(model.head, gather_output=True, **options)
    if is_tied:
        model.head.weight = model.embedding.weight
    for module in model.modules():
        if shares_tokens and not isinstance(module, SplitModule):
            for param in module.parameters(recurse=False):
                tensor.all_reduce_grad_(param, group)


class MeshTraining(Training):
    """One case, on a mesh of all ranks."""

    def __init__(
        self,
        case: Case,
        group: dist.ProcessGroup | None,
        folder: Path,
        mesh_name: str | None = None,
    ) -> None:
        self.mesh = mesh = Mesh(mesh_name or case["mesh"], dist.get_rank())
        # The ranks of the first mesh that a rank of this one stands for.
        num = DATA_RANKS[case["mesh"]] // mesh.data.size()
        self.ranks = range(mesh.data_rank * num, (mesh.data_rank + 1) * num)
        super().__init__(case, WORLD_SIZE, folder)
        model = self.model
        if mesh.tensor is not None:
            split_in_tensor_parallel(model, mesh.tensor, mesh.shares_tokens)
        if mesh.experts is not None:
            for block in model.blocks:
                block.mixture = MixtureOfExperts.from_experts(
                    block.mixture.router,
                    list(block.mixture.experts),
                    group=mesh.experts,
                    replica_group=mesh.replicas,
                )
        self.pipe: pipeline.Pipeline | None = None
        if mesh.pipeline is not None:
            self._make_pipeline(model, mesh.pipeline)
        else:
            if case["trained by"] == "DDP":
                expert.ignore_in_ddp(model)
                self.wrapped = DistributedDataParallel(model, process_group=mesh.data)
            if case["trained by"] == "fully_shard":
                self._fully_shard()
        self.optimizer = self._make_optimizer()

    def _make_pipeline(self, model: Net, group: dist.ProcessGroup) -> None:
        blocks: dict[str, nn.Module] = {"embedding": model.embedding}
        blocks |= {f"blocks.{i}": block for i, block in enumerate(model.blocks)}
        blocks |= {"norm": model.norm, "head": model.head}

        def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
            return nn.functional.cross_entropy(logits.float(), targets)

        def wrap(stage: nn.Module) -> nn.Module:
            if self.case["trained by"] == "DDP":
                return DistributedDataParallel(stage, process_group=self.mesh.data)
            mesh = DeviceMesh.from_group(self.mesh.data, "cpu")
            fully_shard(stage, mesh=mesh)
            return stage

        self.pipe = pipeline.Pipeline(
            blocks,
            loss_of,
            "zero-bubble" if self.case["trained by"] in ZERO else "1f1b",
            num_microbatches=2,
            group=group,
            recompute=self.case["recompute"] == "yes",
            wrap=wrap if self.case["trained by"] in ("DDP", "fully_shard") else None,
        )
        self.model = self.pipe.module

    def _fully_shard(self) -> None:
        mesh = DeviceMesh.from_group(self.mesh.data, "cpu")
        apart = set(expert.expert_parameters(self.model).values())
        fully_shard(self.model, mesh=mesh, ignored_params=apart)

    def _make_optimizer(self) -> Any:
        case, kind = self.case, self.case["trained by"]
        groups = params_in_groups(self.model, case["groups"])
        if kind == "Lomo":
            return Lomo(
                groups,
                0.2,
                0.01,
                model=self.model,
                group=self.mesh.data if self.mesh.data.size() > 1 else "none",
                accumulation_steps=int(case["accumulation"])
                * len(self.ranks)
                * (1 if self.pipe is None else 2),
                **self.options(),
            )
        optimizer = torch_optimizer(case, groups)
        if kind.startswith("zero"):
            return zero.shard(
                self.model,
                optimizer,
                int(kind[-1]),
                group=self.mesh.data,
                bucket_bytes=200,
                **self.options(),
            )
        return optimizer

    def run(self, steps: range, ranks: range) -> None:
        super().run(steps, self.ranks)

    def backward(self, batch: MicroBatch, share: float) -> None:
        if self.pipe is not None:
            scale = getattr(self.optimizer, "loss_scale", 1.0) * batch.factor * share
            if self.case["loss scale"] == "GradScaler":
                scale *= self.scaler.scale(torch.ones(())).item()
            self.pipe.step(batch.ids, batch.targets, loss_scale=scale)
        elif hasattr(self.optimizer, "scale") or self.case["loss scale"] == "GradScaler":
            super().backward(batch, share)
        else:
            (batch.loss(self.wrapped) * share).backward()

    def finish_step(self) -> None:
        kind = self.case["trained by"]
        if kind == "optimizer":
            expert.average_gradients(self.model, self.mesh.data)
        elif self.mesh.experts is not None and kind in ("DDP", "fully_shard"):
            expert.average_gradients(self.wrapped, self.mesh.data)
        if self.case["clipping"] == "function":
            has_own = hasattr(self.optimizer, "clip_grad_norm_")
            clip_grad_norm_(self.optimizer if has_own else self.pipe or self.model, CLIP_NORM)
        super().finish_step()
