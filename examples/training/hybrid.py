"""Data, pipeline, tensor, sequence and expert parallelism in one step, by ``ringcomm.parallel``.

Each rank has its stage's part of the layers. The whole state, which checkpoints have, is put
together along tensor parallelism, then experts, then stages.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcomm.parallel import expert, pipeline, tensor
from training import tensor_parallel
from training.expert_parallel import spread
from training.mesh import Mesh, MeshSizes
from training.model import Llama, ModelConfig, shard_range
from training.system import System
from training.wire import Wire, all_reduce_bytes, scatter_or_gather_bytes


class Hybrid(System):
    """A replica in parts; its wire is of all ranks."""

    def __init__(self, config: ModelConfig, wire: Wire, model: Llama, sizes: MeshSizes) -> None:
        super().__init__(config, wire, model)
        self.mesh = Mesh(sizes, wire)
        if sizes.ep > 1:
            spread(model, self.mesh)
        if sizes.tp > 1:
            tensor_parallel.split(model, self.mesh.tp, shares_tokens=sizes.shares_tokens)
        self._pipe: pipeline.Pipeline | None = None
        self._prepared: set[torch.Size] = set()
        if sizes.pp > 1:
            self._pipe = self._cut_into_stages()
            self.part = self._pipe.module
        self._splits = {name: split for name, _, _, split in tensor.split_params(self.part)}

    def _cut_into_stages(self) -> pipeline.Pipeline:
        model, sizes = self.model, self.mesh.sizes
        blocks: dict[str, nn.Module] = {"tok": model.tok}
        blocks |= {f"layers.{i}": layer for i, layer in enumerate(model.layers)}
        blocks |= {"norm": model.norm, "head": model.head}

        def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
            loss: Tensor = model.loss(logits.flatten(0, 1), targets.flatten())
            return loss

        return pipeline.Pipeline(
            blocks,
            loss_of,
            sizes.schedule,
            sizes.num_microbatches_or_default,
            group=self.mesh.pp,
        )

    # ---- a step

    def step(self, inputs: Tensor, targets: Tensor, lr: float) -> float:
        """See ``System``. The first step of a shape prepares the pipeline, and is not counted."""
        assert self.wire is not None
        if self._pipe is None or inputs.shape in self._prepared:
            return super().step(inputs, targets, lr)
        self._prepared.add(inputs.shape)
        formula_bytes = self.wire.formula_bytes
        with self.wire.aside():
            loss = super().step(inputs, targets, lr)
        self.wire.formula_bytes = formula_bytes
        return loss

    def _rows_of(self, num_rows: int) -> range:
        return shard_range(num_rows, self.mesh.dp.size(), self.mesh.dp.rank())

    @property
    def splits_rows(self) -> bool:
        """See ``System``."""
        return self.mesh.dp.size() > 1

    def _backward(self, inputs: Tensor, targets: Tensor) -> float:
        if self._pipe is None:
            loss = super()._backward(inputs, targets)
        else:
            loss = float(self._pipe.step(inputs, targets))
        if self.mesh.dp.size() > 1 and not self.mesh.sizes.zero_stage:
            expert.average_gradients(self.part, self.mesh.dp)
        return loss

    # ---- bytes

    def _bytes_of_step(self, inputs: Tensor) -> float:
        tp = self.mesh.tp.size()
        saved = sum(scatter_or_gather_bytes(s.gathered_bytes, tp) for s in self._saved)
        layers = tensor_parallel.step_bytes(
            self.model,
            self.part,
            inputs.numel(),
            self.mesh.tp,
            num_microbatches=self._pipe.plan.num_microbatches if self._pipe else 1,
            recomputes=self.model.saving is not None,
        )
        return layers + self._stage_bytes(inputs.numel()) + self._mean_bytes() + saved

    def _stage_bytes(self, num_tokens: int) -> float:
        """Activations to the next stage, and their gradients to the one before."""
        if self._pipe is None:
            return 0
        plan, rank = self._pipe.plan, self.mesh.pp.rank()
        total = 8.0 * (self.mesh.pp.size() - 1)  # a digest of shapes, to each other stage
        for stage in range(plan.num_stages - 1):
            ends = plan.rank_of(stage), plan.rank_of(stage + 1)
            if ends[0] == ends[1] or rank not in ends:
                continue
            # Behind the last norm, which enters the output layer, all tokens are there.
            is_shared = self.mesh.sizes.shares_tokens and self._pipe.stages[stage][-1] != "norm"
            num = num_tokens // self.mesh.tp.size() if is_shared else num_tokens
            total += 4 * num * self.config.dim
        return total

    def _mean_bytes(self) -> float:
        """Means of gradients, and of a byte for each weight that says whether there is one."""
        if self.mesh.sizes.zero_stage:
            return 0  # ZeRO's updater counts
        experts = set(expert.expert_parameters(self.part).values())
        others = [param for param in self.part.parameters() if param not in experts]
        total = all_reduce_bytes(sum(p.nbytes + 1 for p in others), self.mesh.dp.size())
        if self.mesh.sizes.ep > 1:
            total += all_reduce_bytes(sum(p.nbytes + 1 for p in experts), self.mesh.replicas.size())
        return total

    # ---- the whole state

    def _cut(self, name: str, whole: Tensor) -> Tensor:
        return self._splits[name].cut(whole) if name in self._splits else whole

    def _joined(self, part: Tensor, split: tensor.Split) -> Tensor:
        everyone: list[Tensor] = [part] * self.mesh.tp.size()
        dist.all_gather_object(everyone, part, group=self.mesh.tp)
        shape = [*part.shape]
        shape[split.dim] = split.total
        whole = part.new_empty(shape)
        for (begin, end), one in zip(split.ranges, everyone, strict=True):
            whole.narrow(split.dim, begin, end - begin).copy_(one)
        return whole

    def _whole(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        assert self.wire is not None
        with self.wire.aside():
            found = {
                name: self._joined(part, self._splits[name]) if name in self._splits else part
                for name, part in parts.items()
            }
            found = super()._whole(found)
            for group in (self.mesh.ep, self.mesh.pp):
                everyone: list[dict[str, Tensor]] = [found] * group.size()
                if group.size() > 1:
                    dist.all_gather_object(everyone, found, group=group)
                found = {name: part for parts_of in everyone for name, part in parts_of.items()}
        return found

    # ---- memory

    def _group_with_same_rows(self) -> dist.ProcessGroup:
        return self.mesh.tp
