"""Meshes of the library's layers, pipelines and experts that a user puts together by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from pair_batches import MicroBatch
from pair_engines import SEED_AFTER_LOADING, Engine, Place
from pair_models import CLIP_NORM, Net
from pair_optimizers import groups_of, torch_optimizer
from pair_table import Case
from pair_tables import BY_HAND
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
from ringcomm.parallel import clip_grad_norm_, expert, pipeline, tensor, zero
from ringcomm.parallel.tensor.splits import SplitModule

WORLD_SIZE = 4
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


def num_data_ranks(mesh: str) -> int:
    """How many ranks have rows of their own: those of a column have the same part of a model."""
    return int(mesh[-1]) if "data" in mesh else 1


def mesh_to_go_on(case: Case) -> str:
    """Where a case trains from its checkpoint on."""
    if case["resume"] != "another mesh":
        return "one rank" if case["resume"] == "one rank" else case["mesh"]
    others = OTHER_MESHES[case["mesh"]]
    return next((mesh for mesh in others if BY_HAND.allows({**case, "mesh": mesh})), others[-1])


class Mesh:
    """The groups of a mesh that this rank is in; the ranks of a row share a model."""

    def __init__(self, name: str) -> None:
        row, column, alone = (
            dist.new_subgroups_by_enumeration(ranks)[0]
            for ranks in ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0], [1], [2], [3]])
        )
        everyone: Any = dist.group.WORLD
        self.shares_tokens = "sequence" in name
        self.tensor = row if "tensor" in name or self.shares_tokens else None
        if name == "tensor 4":
            self.tensor = everyone
        self.pipeline = (row if "data" in name else column) if "pipeline" in name else None
        self.experts = {"experts 2 x data 4": row, "experts 4 x data 4": everyone}.get(name)
        self.replicas = column if name == "experts 2 x data 4" else None
        self.data = {1: alone, 2: column, 4: everyone}[num_data_ranks(name)]


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


class MeshByHand(Engine):
    """One case, on a mesh of all ranks."""

    def __init__(self, case: Case, place: Place, mesh_name: str = "") -> None:
        super().__init__(case, place)
        self.mesh = mesh = Mesh(mesh_name or case["mesh"])
        self.by, self.data_rank = case["trained by"], mesh.data.rank()
        # The ranks of the first mesh that a rank of this one stands for.
        num = num_data_ranks(case["mesh"]) // mesh.data.size()
        self.ranks = range(self.data_rank * num, (self.data_rank + 1) * num)
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
            self.pipe = self._pipeline(model)
            self.model = self.owner = self.pipe.module
        elif self.by in ("DDP", "fully_shard"):
            self.wrapped = self._over_data_ranks(model)
        self.optimizer = self._optimizer()

    def again(self) -> MeshByHand:
        place = Place(self.place.folder / "again", SEED_AFTER_LOADING)
        return MeshByHand(self.case, place, mesh_to_go_on(self.case))

    def _over_data_ranks(self, model: nn.Module) -> Any:
        """A model, or a stage of one, in torch's data parallelism."""
        if self.by == "DDP":
            expert.ignore_in_ddp(model)
            return DistributedDataParallel(model, process_group=self.mesh.data)
        apart = set(expert.expert_parameters(model).values())
        mesh = DeviceMesh.from_group(self.mesh.data, "cpu")
        fully_shard(model, mesh=mesh, ignored_params=apart or None)
        return model

    def _pipeline(self, model: Net) -> pipeline.Pipeline:
        blocks: dict[str, nn.Module] = {"embedding": model.embedding}
        blocks |= {f"blocks.{i}": block for i, block in enumerate(model.blocks)}
        blocks |= {"norm": model.norm, "head": model.head}

        def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
            return nn.functional.cross_entropy(logits.float(), targets)

        return pipeline.Pipeline(
            blocks,
            loss_of,
            "zero-bubble" if self.by.startswith("zero") else "1f1b",
            num_microbatches=2,
            group=self.mesh.pipeline,
            count_items=len,
            recompute=self.case["recompute"] == "yes",
            wrap=self._over_data_ranks if self.by in ("DDP", "fully_shard") else None,
        )

    def _optimizer(self) -> Any:
        groups, data = groups_of(self.case, self.model.parameters()), self.mesh.data
        if self.by == "Lomo":
            num_parts = int(self.case["accumulation"]) * len(self.ranks)
            return Lomo(
                groups,
                0.2,
                0.01,
                model=self.model,
                group=data if data.size() > 1 else "none",
                accumulation_steps=num_parts * (1 if self.pipe is None else 2),
                **self.options(),
            )
        optimizer = torch_optimizer(self.case, groups)
        if self.by.startswith("zero"):
            options = {"group": data, "bucket_bytes": 200, **self.options()}
            return zero.shard(self.model, optimizer, int(self.by[-1]), **options)
        return optimizer

    def backward(self, batch: MicroBatch, share: float) -> None:
        if self.pipe is None:
            super().backward(batch, share)
            return
        scale = getattr(self.optimizer, "loss_scale", 1.0) * batch.factor * share
        if self.case["loss scale"] == "GradScaler":
            scale *= self.scaler.scale(torch.ones(())).item()
        self.pipe.step(batch.ids, batch.targets, loss_scale=scale)

    def finish_step(self) -> None:
        if self.by == "optimizer":
            expert.average_gradients(self.model, self.mesh.data)
        elif self.mesh.experts is not None and self.by in ("DDP", "fully_shard"):
            expert.average_gradients(self.wrapped, self.mesh.data)
        if self.case["clipping"] == "function":
            has_own = hasattr(self.optimizer, "clip_grad_norm_")
            clip_grad_norm_(self.optimizer if has_own else self.pipe or self.model, CLIP_NORM)
        super().finish_step()
