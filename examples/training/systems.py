"""A system makes a step: a model, how its rows or weights are split, and what updates them.

One class for all of them; they differ in three choices, which ``build_system`` makes from
``--parallel`` and ``--optimizer``.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ringcomm.parallel import activations, tensor
from training import tensor_parallel
from training.lomo import Lomo
from training.model import Llama, ModelConfig, initial_weights, shard_range
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
    if parallel == "tp":
        try:
            tensor.share_heads(config.num_heads, config.num_kv_heads, world_size)
        except ValueError as error:
            return f"tensor parallelism gives every rank whole heads: {error}"
    return None


class System:
    """One replica of one way of training; all ranks of its wire make each step together."""

    updater: Updater
    """Set once the model has its weights."""
    is_timed: bool
    """Whether steps are slow ones, that tell how long layers in parts communicate."""

    def __init__(
        self, config: ModelConfig, wire: Wire | None, model: Llama, *, splits_weights: bool
    ) -> None:
        self.config = config
        self.wire = wire
        self.model = model
        self._folder: Path | None = None
        self._saved: list[activations.Partitioned] = []
        self._module: nn.Module = model
        self._num_updates = 0
        self._uncounted_bytes = 0.0
        self.is_timed = False
        self._splits_weights = splits_weights
        self._splits_rows = wire is not None and not splits_weights
        self._splits: dict[str, tensor.Split] = {}

    def split_layers(self, *, shares_tokens: bool = False) -> None:
        """Keeps this rank's parts of the layers alone."""
        assert self.wire is not None
        tensor_parallel.split(self.model, self.wire.group, shares_tokens=shares_tokens)
        self._splits = {name: split for name, _, _, split in tensor.split_params(self.model)}

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
        with self.wire.timing_operators() if self.wire and self.is_timed else nullcontext():
            loss = self._module(inputs, targets)
            self.updater.begin(lr)
            loss.backward()
            self.updater.finish()
        self._num_updates += 1
        if self.wire is not None:
            self.wire.formula_bytes += self._uncounted_bytes
            if self._splits_weights:
                num_tokens = inputs.numel()
                self.wire.formula_bytes += tensor_parallel.step_bytes(
                    self.config,
                    num_tokens,
                    self.wire.group,
                    recomputes=self.model.saving is not None,
                )
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
        return self._splits[name].cut(whole) if name in self._splits else whole

    def _gather(self, name: str, part: Tensor) -> Tensor:
        if name not in self._splits:
            return part
        assert self.wire is not None
        with self.wire.aside():
            return tensor.whole_of(part, self._splits[name], self.wire.group)

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
        overlap: False makes DDP's all-reduces blocking, and times those of layers in parts.
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
    with torch.device(device):
        model = Llama(config)
    system = System(config, wire, model, splits_weights=parallel == "tp")
    if parallel == "tp":
        system.split_layers()
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
    system.is_timed = parallel == "tp" and not overlap
    if parallel == "ddp" and optimizer != "lomo":
        system.wrap_in_ddp(overlap)
    return system
