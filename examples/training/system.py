"""One rank's end of a model in training: rows in, a step made, its memory and its whole state."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ringcomm.parallel import activations, clip_grad_norm_
from training.model import Llama, ModelConfig, initial_weights, shard_range
from training.updaters import Moments, Updater, live_bytes
from training.wire import Wire, all_reduce_bytes


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


class System:
    """One replica of one way of training; all ranks of its wire make each step together."""

    updater: Updater
    """Set once the model has its weights."""
    part: nn.Module
    """What this rank has of the model."""
    is_timed: bool
    """Whether steps are slow ones, that tell how long layers in parts communicate."""
    max_norm: float | None
    """Gradients are clipped to this norm, over all ranks; None where the updater does that."""

    def __init__(self, config: ModelConfig, wire: Wire | None, model: Llama) -> None:
        self.config = config
        self.wire = wire
        self.model = model
        self.part: nn.Module = model
        self.is_timed = False
        self.max_norm = None
        self._folder: Path | None = None
        self._saved: list[activations.Partitioned] = []
        self._module: nn.Module = model
        self._num_updates = 0
        self._uncounted_bytes = 0.0

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
        return self.wire is not None

    def step(self, inputs: Tensor, targets: Tensor, lr: float) -> float:
        """One training step.

        Args:
            inputs: the GLOBAL batch, int64 [rows, time]; each rank takes its own part of it.
            targets: like inputs.
            lr: learning rate of this step.

        Returns:
            this rank's mean loss in nats, before the update.
        """
        rows = self._rows_of(inputs.shape[0])
        inputs, targets = inputs[rows.start : rows.stop], targets[rows.start : rows.stop]
        self.updater.begin(lr)
        with self.wire.timing_operators() if self.wire and self.is_timed else nullcontext():
            loss = self._backward(inputs, targets)
        if self.max_norm is not None:
            with self.wire.aside() if self.wire else nullcontext():
                clip_grad_norm_(self.part, self.max_norm)
        self.updater.finish()
        self._num_updates += 1
        if self.wire is not None:
            self.wire.formula_bytes += self._bytes_of_step(inputs)
        self._saved.clear()
        return loss

    def _rows_of(self, num_rows: int) -> range:
        """Of the global batch this rank's."""
        if self.wire is None:
            return range(num_rows)
        return shard_range(num_rows, self.wire.world_size, self.wire.rank)

    def _backward(self, inputs: Tensor, targets: Tensor) -> float:
        """Forward and backward; the loss."""
        loss = self._module(inputs, targets)
        loss.backward()
        return float(loss.detach())

    def _bytes_of_step(self, inputs: Tensor) -> float:
        """What this rank had to send that no collective of the wire has counted."""
        return self._uncounted_bytes

    def memory(self) -> Memory:
        """Bytes of this rank's weights, gradients (at their peak) and optimizer state."""
        params = live_bytes(
            param.to_local() if isinstance(param, DTensor) else param
            for param in self.part.parameters()
        )
        return Memory(params, self.updater.grad_bytes, self.updater.state_bytes())

    def state(self) -> TrainState:
        """The whole training state, as copies on the CPU. Collective unless nothing is sharded."""
        weights = self._whole(self.updater.weights())
        moments = {key: self._whole(by_name) for key, by_name in self.updater.moments().items()}
        return TrainState(weights, moments, self._num_updates)

    def load_moments(self, state: TrainState) -> None:
        """Continues from ``state``, whose weights are there."""
        moments = {
            key: {n: self._cut(n, by_name[n]) for n, _ in self.part.named_parameters()}
            for key, by_name in state.moments.items()
        }
        self.updater.load_moments(moments, state.num_updates)
        self._num_updates = state.num_updates

    def _cut(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a weight, or of what an optimizer keeps of it."""
        return whole

    def _whole(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """All ranks' parts, whole, as copies on the CPU. Collective where there are parts."""
        return {name: part.cpu().clone() for name, part in parts.items()}

    # ---- memory

    def new_folder(self, inside: Path) -> Path:
        """A folder for offloaded state, which close() removes."""
        self._folder = Path(tempfile.mkdtemp(prefix="offload-", dir=inside))
        return self._folder

    def recompute_layers(self, *, to_host: bool) -> None:
        """Keeps the inputs of layers alone, 1/N of each where all ranks have the same ones."""
        group = self._group_with_same_rows()

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

    def _group_with_same_rows(self) -> dist.ProcessGroup | None:
        """Of this rank alone, whose rows nobody else has. Collective."""
        if self.wire is None:
            return None
        group, _ = dist.new_subgroups(1, backend=self.wire.backend)
        return group

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
