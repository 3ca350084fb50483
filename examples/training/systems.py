"""A system makes a step: a model, how its rows or weights are split, and what updates them.

One class for all of them; they differ in three choices, which ``build_system`` makes from
``--parallel`` and ``--optimizer``.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ringcomm.parallel import activations
from training.lomo import Lomo
from training.model import Llama, ModelConfig, Whole, initial_weights, shard_range
from training.tensor_parallel import TensorParallel
from training.updaters import Moments, Offload, TorchUpdater, Updater, live_bytes
from training.wire import Wire, all_reduce_bytes, scatter_or_gather_bytes
from training.zero import Zero

ZERO_STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}
PARALLELS = ("ddp", "tp", *ZERO_STAGES, "single")
OPTIMIZERS = ("adamw", "sgd", "lomo")


@dataclass
class TrainState:
    """Everything that training changes, whole (not sharded), so any system can continue from it."""

    weights: dict[str, Tensor]
    moments: Moments = field(default_factory=dict)
    num_updates: int = 0

    @classmethod
    def fresh(cls, config: ModelConfig, seed: int) -> TrainState:
        """The start of a run: seeded weights, no optimizer state."""
        return cls(initial_weights(config, seed))


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank keeps alive, measured from its tensors."""

    params: int
    grads: int
    states: int


def why_impossible(
    parallel: str, optimizer: str, config: ModelConfig, world_size: int, *, offloads: bool = False
) -> str | None:
    """The reason why a system cannot be built, for the user; None if it can."""
    if optimizer == "lomo" and (parallel in ZERO_STAGES or offloads):
        what = "ZeRO splits" if parallel in ZERO_STAGES else "--offload moves"
        return f"{what} optimizer state, and LOMO has none: choose --optimizer adamw or sgd"
    if parallel == "tp" and world_size > config.num_kv_heads:
        return (
            f"tensor parallelism gives every rank whole key/value heads: at most "
            f"{config.num_kv_heads} ranks for this size, {world_size} asked for"
        )
    return None


def _split_of(name: str, config: ModelConfig, world_size: int, rank: int) -> tuple[int, range]:
    """(dimension, range of rows or columns) of a weight that ``rank`` holds; -1: all of it."""
    leaf = name.removesuffix(".weight").rpartition(".")[2]
    if leaf in ("tok", "head"):
        return 0, shard_range(config.vocab_size, world_size, rank)
    if leaf in ("w1", "w3", "w2"):
        return int(leaf == "w2"), shard_range(config.ffn_dim, world_size, rank)
    if leaf in ("wq", "wk", "wv", "wo"):
        heads = shard_range(config.num_kv_heads, world_size, rank)
        group = config.num_heads // config.num_kv_heads if leaf in ("wq", "wo") else 1
        unit = config.head_dim * group
        return int(leaf == "wo"), range(heads.start * unit, heads.stop * unit)
    return -1, range(0)


class System:
    """One replica of one way of training; all ranks of its wire make each step together."""

    updater: Updater
    """Set once the model has its weights."""

    def __init__(self, config: ModelConfig, wire: Wire | None, model: Llama) -> None:
        self.config = config
        self.wire = wire
        self.model = model
        self._folder: Path | None = None
        self._saved: list[activations.Partitioned] = []
        self._module: nn.Module = model
        self._num_updates = 0
        self._uncounted_bytes = 0.0
        self._splits_weights = model.sharding.world_size > 1
        self._splits_rows = wire is not None and not self._splits_weights

    def wrap_in_ddp(self, overlap: bool) -> None:
        """Lets DDP average the gradients, overlapped with the backward pass or blocking."""
        assert self.wire is not None
        module = DistributedDataParallel(
            self.model, process_group=self.wire.group, gradient_as_bucket_view=True
        )
        if not overlap:
            # Through a lambda: torch refuses annotations that are strings, as all are here.
            hook = lambda wire, bucket: _blocking_hook(wire, bucket)  # noqa: E731, PLW0108
            module.register_comm_hook(self.wire, hook)
        # A blocking hook goes through the wire, which counts; torch's own all-reduces do not.
        grad_bytes = sum(p.nbytes for p in self.model.parameters()) if overlap else 0
        self._uncounted_bytes = all_reduce_bytes(grad_bytes, self.wire.world_size)
        self._module = module

    @property
    def splits_rows(self) -> bool:
        """Whether each rank takes rows of its own, so that the loss is a mean over ranks."""
        return self._splits_rows

    def step(self, inputs: Tensor, targets: Tensor, lr: float) -> float:
        """One training step.

        Args:
            inputs: the GLOBAL batch, int64 [rows, time]; each rank takes its own part of it.
            targets: like inputs.
            lr: learning rate of this step.

        Returns:
            this rank's mean loss in nats, before the update.
        """
        if self._splits_rows and self.wire is not None:
            part = shard_range(inputs.shape[0], self.wire.world_size, self.wire.rank)
            inputs, targets = inputs[part.start : part.stop], targets[part.start : part.stop]
        loss = self._module(inputs, targets)
        self.updater.begin(lr)
        loss.backward()
        self.updater.finish()
        self._num_updates += 1
        if self.wire is not None:
            self.wire.formula_bytes += self._uncounted_bytes
            for saved in self._saved:
                gathered = scatter_or_gather_bytes(saved.gathered_bytes, self.wire.world_size)
                self.wire.formula_bytes += gathered if self._splits_weights else 0
            self._saved.clear()
        return float(loss.detach())

    def memory(self) -> Memory:
        """Bytes of this rank's weights, gradients (at their peak) and optimizer state."""
        params = live_bytes(
            param.to_local() if isinstance(param, DTensor) else param
            for param in self.model.parameters()
        )
        return Memory(params, self.updater.grad_bytes, self.updater.state_bytes())

    def state(self) -> TrainState:
        """The whole training state, as copies on the CPU. Collective unless nothing is sharded."""
        weights = self.updater.weights()
        moments = self.updater.moments()
        if self._splits_weights:
            weights = {n: self._gather(n, t) for n, t in weights.items()}
            moments = {
                key: {n: self._gather(n, t) for n, t in by_name.items()}
                for key, by_name in moments.items()
            }
        return TrainState(
            {n: t.cpu().clone() for n, t in weights.items()},
            {k: {n: t.cpu().clone() for n, t in v.items()} for k, v in moments.items()},
            self._num_updates,
        )

    def load_weights(self, state: TrainState) -> None:
        """Begins with the weights of ``state``; every rank passes the same one."""
        with torch.no_grad():
            for name, param in self.model.named_parameters():
                param.copy_(self._cut(name, state.weights[name]))

    def load_moments(self, state: TrainState) -> None:
        """Continues from ``state``, whose weights are there."""
        moments = {
            key: {n: self._cut(n, t) for n, t in by_name.items()}
            for key, by_name in state.moments.items()
        }
        self.updater.load_moments(moments, state.num_updates)
        self._num_updates = state.num_updates

    def _cut(self, name: str, whole: Tensor) -> Tensor:
        sharding = self.model.sharding
        dim, part = _split_of(name, self.config, sharding.world_size, sharding.rank)
        return whole if dim < 0 else whole.narrow(dim, part.start, len(part))

    def _gather(self, name: str, part: Tensor) -> Tensor:
        wire = self.wire
        assert wire is not None
        dim, _ = _split_of(name, self.config, wire.world_size, wire.rank)
        if dim < 0:
            return part
        moved = part.movedim(dim, 0)
        lengths = [
            len(_split_of(name, self.config, wire.world_size, r)[1]) for r in range(wire.world_size)
        ]
        width = moved[0].numel()
        flat = wire.gather_uneven(moved.contiguous(), [n * width for n in lengths])
        return torch.cat(flat).view(sum(lengths), *moved.shape[1:]).movedim(0, dim).contiguous()

    # ---- memory

    def new_folder(self, inside: Path) -> Path:
        """A folder for offloaded state, which close() removes."""
        self._folder = Path(tempfile.mkdtemp(prefix="offload-", dir=inside))
        return self._folder

    def recompute_layers(self, *, to_host: bool) -> None:
        """Keeps the inputs of layers alone, 1/N of each where all ranks have the same ones."""
        if self.wire is None:
            group = None
        elif self._splits_weights:
            group = self.wire.group
        else:  # of this rank alone, whose rows nobody else has
            group, _ = dist.new_subgroups(1, backend=self.wire.backend)

        @contextmanager
        def saving() -> Iterator[None]:
            if group is None:
                yield
                return
            with activations.partition(
                group, offload="cpu" if to_host else None, min_elems=0
            ) as saved:
                self._saved.append(saved)
                yield

        self.model.saving = saving

    def close(self) -> None:
        """Lets files go; there are no more steps. Collective."""
        self.updater.close()
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None


def _blocking_hook(wire: Wire, bucket: Any) -> torch.futures.Future[Tensor]:
    """DDP's own average, but blocking, so that the time in communication can be read."""
    buffer = bucket.buffer()
    buffer.div_(wire.world_size)
    wire.all_reduce(buffer)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


def build_system(
    parallel: str,
    optimizer: str,
    config: ModelConfig,
    wire: Wire | None,
    state: TrainState,
    device: torch.device,
    *,
    overlap: bool = True,
    offload: Offload | None = None,
    recompute: bool = False,
) -> System:
    """Builds a replica that continues from ``state``. Collective.

    Args:
        parallel: one of ``PARALLELS``; ``single`` ignores ``wire``.
        optimizer: one of ``OPTIMIZERS``.
        config: sizes of the whole model.
        wire: the group to communicate over; None only for ``single``.
        state: the same on every rank.
        device: where the model lives.
        overlap: False makes DDP's all-reduces blocking, to measure them.
        offload: where optimizer state goes, and with ``zero3`` weights and gradients, too.
        recompute: save inputs of layers alone, in shards under ``tp``, in host memory with
            ``offload``.

    Raises:
        ValueError: the combination makes no sense; see ``why_impossible``.
    """
    if parallel == "single":
        wire = None
    elif wire is None:
        raise ValueError(f"{parallel} needs a group to communicate over")
    reason = why_impossible(parallel, optimizer, config, wire.world_size if wire else 1)
    if reason is not None:
        raise ValueError(reason)
    sharding = TensorParallel(wire) if parallel == "tp" and wire else Whole()
    with torch.device(device):
        model = Llama(config, sharding)
    system = System(config, wire, model)
    system.load_weights(state)
    if offload is not None and offload.path is not None:
        offload = replace(offload, path=system.new_folder(offload.path))
    named = list(model.named_parameters())
    if parallel in ZERO_STAGES and wire:
        system.updater = Zero(model, optimizer, wire, ZERO_STAGES[parallel], offload)
    elif optimizer == "lomo":
        system.updater = Lomo(named, wire if parallel == "ddp" else None)
    else:
        system.updater = TorchUpdater(named, optimizer, offload)
    system.load_moments(state)
    if recompute:
        system.recompute_layers(to_host=offload is not None)
    if parallel == "ddp" and optimizer != "lomo":
        system.wrap_in_ddp(overlap)
    return system
