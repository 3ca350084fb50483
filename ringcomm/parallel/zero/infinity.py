"""ZeRO-Infinity (Rajbhandari et al. 2021, arXiv 2104.07857): stage 3 with offloading.

Weights, gradients and states are sharded over the ranks, in host memory or in files. A unit's
weights are gathered when it runs, and the next unit's are prefetched.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcomm.backward_pass import BackwardPass, current_pass, will_run
from ringcomm.parallel.clip import LossScale
from ringcomm.parallel.expert.local_experts import expert_parallel_modules
from ringcomm.parallel.flat_collectives import all_gathered, takes_uneven
from ringcomm.parallel.gradient_placeholder import (
    GradientHooks,
    check_same_gradients,
    largest_of,
    progress,
)
from ringcomm.parallel.offload.state_rows import Operands
from ringcomm.parallel.offload.tiers import FileTier, make_tier
from ringcomm.parallel.offload.transfers import BufferPool
from ringcomm.parallel.optimizer_classes import take_options
from ringcomm.parallel.shards import WeightShards
from ringcomm.parallel.zero.inner import Grads, Inner
from ringcomm.parallel.zero.optimizer import Given, ZeroOptimizer
from ringcomm.parallel.zero.shard_store import ShardStore


class ZeroInfinity(ZeroOptimizer):
    """Stage 3 with weights, gradients and states in a tier; made by zero.shard().

    The constructor, every step and every load of weights or states end with a commit. Files have
    the last commit even after a crash. Weights below 64 KiB stay in memory.
    """

    def __init__(self, given: Given) -> None:
        """Collective: a broadcast per unit."""
        super().__init__(given)
        optimizer, group, resume = self._inners[0].optimizer, given.group, given.options.resume
        if not takes_uneven(group, torch.device("cpu")):
            raise ValueError("offload_weights needs a group of backend ringcomm")
        device = self._device()
        if device.type not in ("cpu", "meta"):
            raise ValueError(f"offload_weights needs a model on the CPU, got one on {device}")
        pool = BufferPool()
        path = optimizer.path
        if path is not None:
            path = Path(path) / f"rank{group.rank()}of{group.size()}"
        self._tier = make_tier(optimizer.to, path, keep=True, pool=pool)
        self._grads = make_tier(optimizer.to, path, keep=False, pool=pool)
        self._store = self._tier.store if isinstance(self._tier, FileTier) else None
        try:
            self.num_steps = self._find_steps()
        except ValueError:
            self._tier.close()
            self._grads.close()
            raise
        self._shard_store = ShardStore(self._tier, self._grads, self._replacing, is_filled=resume)
        self._weights = _StoredShards(
            self._shard_store, given.model.module, group, units=given.units
        )
        self._own = {param: self._weights.shard_of(param) for param in self.all_params()}
        self._share_out({p: unit.group for unit in self._weights.units for p in unit.params})
        self._has_experts = bool(expert_parallel_modules(given.model.module))  # on any rank
        self._place_offloaded(self._tier)
        if resume:
            self._resume()
        else:
            # Masters of parts are made from the parts, when they are needed.
            halves = {param for param in self._owner_of if param.itemsize == 2}
            for owners in self._owners.values():
                for params in owners.rounds(halves):
                    wholes = owners.gathered({param: self._part_of(param) for param in params})
                    for param, value in wholes.items():
                        self._set_state(param, {"master": value.float()})
            self._commit()
        self._hooks = GradientHooks(self.all_params(), self)
        self._names = {param: given.model.weights[param].name for param in self._own}
        # Since the last step: the number of gradients, and the passes that were compared.
        self._num_grads = dict.fromkeys(self._own, 0)
        self._compared: set[tuple[BackwardPass | None, dist.ProcessGroup]] = set()

    # ---- files of an earlier run

    def _find_steps(self) -> int:
        """The step to resume after; makes its commit the last one on all ranks. Collective."""
        store = self._store
        # All ranks make the same commits: a generation is the same state on every rank.
        mine = (store.generation, store.info.get("num_steps", 0)) if store is not None else (0, 0)
        everyone = all_gathered(mine, self.group)
        (least, num_steps), (most, most_steps) = min(everyone), max(everyone)
        if not self.options.resume:
            if most_steps > 0:
                raise ValueError(
                    f"the files are from a run that reached step {most_steps}: continue it with"
                    " resume=True, or use another folder"
                )
            if store is not None:
                store.clear()  # from a run that ended before its first step
            return 0
        if least == 0:
            raise ValueError(f"there is nothing to resume on rank {everyone.index(min(everyone))}")
        if most - least > 1:
            steps = [found[1] for found in everyone]
            raise ValueError(f"the ranks' files must be from one run, but their steps are {steps}")
        if store is not None and store.generation > least:
            store.roll_back()
        return int(num_steps)

    def _resume(self) -> None:
        assert self._store is not None
        info = self._store.info
        if any(info.get(key) != value for key, value in self._layout.items()):
            raise ValueError("the files are from another model, other units or another optimizer")
        for key, packed in self._packed.items():
            with self._tier.row(key) as row:
                packed.copy_(row)
        for inner, saved in zip(self._inners, info["optimizers"], strict=True):
            inner.optimizer.restore(saved)
            for own, group in zip(inner.optimizer.param_groups, inner.groups, strict=True):
                take_options(group, own)
        LossScale.take(dict(info["loss_scale"] or {}), self._scale)

    @property
    def _packed(self) -> dict[str, Tensor]:
        rows = {f"packed.{i}": unit.packed_row for i, unit in enumerate(self._weights.units)}
        return {key: row for key, row in rows.items() if row.numel()}

    @property
    def _layout(self) -> dict[str, Any]:
        """Of each weight the shape, the class that updates it, and its owner."""
        return {
            "shapes": [list(self._shard_store.shape(shard)) for shard in self._own.values()],
            "updates": [[type(self.inner_of(p)).__name__, self.owner_of(p)] for p in self._own],
        }

    def _commit(self) -> None:
        if self._store is None:
            return
        for key, packed in self._packed.items():
            self._tier.put(key, packed)
        self._store.commit(
            {
                "num_steps": self.num_steps,
                "optimizers": [inner.optimizer.saved() for inner in self._inners],
                **self._layout,
                "loss_scale": None if self._scale is None else self._scale.state(),
            }
        )

    @contextmanager
    def _replacing(self) -> Iterator[None]:
        """A context for replacing weights or states outside a step. Collective."""
        self._shard_store.forget_ahead()
        # A write removes the commit before the last, which may be another rank's last one: all
        # ranks wait.
        if self._store is not None:
            dist.barrier(self.group)
        yield
        self._commit()

    # ---- gradients

    def take_gradient(self, param: nn.Parameter, grad: Tensor) -> None:
        """See GradientHooks; the gradient is offloaded here. Collective."""
        current, group = current_pass(), self.group_of(param)
        if current is not None and (current, group) not in self._compared:
            self._compare(group, current)
        self._num_grads[param] += 1
        mine = self._weights.reduce_scatter(param, grad.to(self.options.grad_dtype))
        self._shard_store.add_grad(self._own[param], mine)

    def drop_gradient(self, param: nn.Parameter) -> None:
        """See GradientHooks."""
        self._num_grads[param] = 0
        self._shard_store.drop_grad(self._own[param])

    def _compare(self, group: dist.ProcessGroup, current: BackwardPass | None = None) -> None:
        """Raises RuntimeError on all ranks if gradients are of different weights. Collective."""
        self._compared.add((current, group))
        mine = {}
        for param in self._own:
            if self.group_of(param) is group:
                num_before, node = self._num_grads[param], self._hooks.nodes[param]
                is_coming = current is not None and will_run(node)
                is_by_hand = num_before == 0 and param.grad is not None
                found = progress(num_before, is_coming=is_coming, is_by_hand=is_by_hand)
                mine[self._names[param]] = found
        try:
            check_same_gradients(
                mine,
                (group,),
                torch.device("cpu"),
                system="zero.shard(offload_weights=True)",
                alternative="use stage 1 or 2",
            )
        except RuntimeError:
            self._forget_gradients()
            raise

    def _agree(self) -> bool:
        for group in self._groups:
            self._compare(group)
        self._hooks.collect()
        has = any(map(self._shard_store.has_grad, self._own.values()))
        return largest_of([has], [self.group], torch.device("cpu"))[0] > 0

    def _set_sync(self, is_on: bool) -> None:
        if not is_on:
            raise RuntimeError(
                "no_sync() is not supported with offload_weights, whose gradients leave memory in "
                "each backward pass: accumulate without it"
            )

    def _shards(self, *, is_written: bool = False) -> Iterator[tuple[nn.Parameter, Tensor]]:
        for param, shard in self._own.items():
            if self._shard_store.has_grad(shard):
                with self._shard_store.gradient(shard, is_written=is_written) as grad:
                    yield param, grad

    def _scale_gradients(self, factor: float) -> None:
        for _, grad in self._shards(is_written=True):
            grad.mul_(factor)

    def _forget_gradients(self) -> None:
        self._compared.clear()
        for param in self._own:
            self.drop_gradient(param)
            param.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients, for any `set_to_none`, and the state of a failed backward pass."""
        self._forget_gradients()
        self._weights.release_all()

    def gradient_tensors(self) -> list[Tensor]:
        """See ZeroOptimizer."""
        return list(self._shard_store.small_grads.values())

    # ---- the update

    def _update(self, factor: float) -> None:
        self._shard_store.step_begins()
        own = self._own.items()
        self._step_inner({p: None for p, shard in own if self._shard_store.has_grad(shard)}, factor)
        self.num_steps += 1
        self._commit()

    def _operands_of(self, inner: Inner) -> Operands:
        return self._parts if inner.is_whole else self._shard_store

    def _run_parts(self, inner: Inner, method: str, grads: Grads, factor: float) -> None:
        self._run_offloaded(inner, method, grads, factor)

    def _rounds(self, grads: Collection[Any]) -> list[Any]:
        """A rank has one full weight of each group in memory, and its gradient. Collective."""
        rounds = [*zip_longest(*(owners.rounds(grads) for owners in self._owners.values()))]
        num_rounds = len(rounds)
        if self._has_experts:  # ranks with others may have more
            num_rounds = largest_of([num_rounds], [self.group], torch.device("cpu"))[0]
        return [*rounds, *[()] * (num_rounds - len(rounds))]

    def _read(
        self, inner: Inner, params: Iterable[Any], grads: Grads
    ) -> tuple[dict[Any, Tensor], dict[Any, Tensor]]:
        found = {}
        for param in params:
            if self.updates(param):
                inner.optimizer.start(self._own[param])
            if self._shard_store.has_grad(self._own[param]):
                with self._shard_store.gradient(self._own[param]) as grad:
                    found[param] = grad.clone()
        return {param: self._part_of(param) for param in params}, found

    def _write(self, parts: Mapping[Any, Tensor]) -> None:
        for param, part in parts.items():
            self._weights.unit_of(param).write_shard(param, part)

    def _change_mode(self, mode: str) -> None:
        self._shard_store.step_begins()
        with self._replacing():
            super()._change_mode(mode)

    def close(self) -> None:
        """Restores ordinary, unsharded weights in memory and releases the files. Collective."""
        self._shard_store.forget_ahead()
        self._weights.close()
        self._tier.close()
        self._grads.close()

    def range_of(self, param: Any, rank: int | None = None) -> tuple[int, int]:
        """See WeightShards."""
        return self._weights.range_of(param, rank)

    @property
    def io_bytes(self) -> tuple[int, int]:
        """Bytes that this rank has read from and written to files so far, in whole blocks."""
        stores = [t.store for t in (self._tier, self._grads) if isinstance(t, FileTier)]
        return sum(s.read_bytes for s in stores), sum(s.written_bytes for s in stores)

    # ---- state

    def _part_of(self, param: Any) -> Tensor:
        return self._weights.unit_of(param).read_shard(param)


class _StoredShards(WeightShards):
    """WeightShards in a ShardStore; a model on the meta device is materialized unit by unit."""

    def __init__(self, shard_store: ShardStore, *args: Any, **options: Any) -> None:
        self._shard_store = shard_store
        super().__init__(*args, **options)
