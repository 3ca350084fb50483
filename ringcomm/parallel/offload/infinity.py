"""ZeRO-Infinity (Rajbhandari et al. 2021, arXiv 2104.07857): stage 3 with offloading.

Weights, gradients and states are sharded over the ranks, in host memory or in files. A unit's
weights are gathered when it runs, and the next unit's are prefetched.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcomm.backward_pass import BackwardPass, current_pass, will_run
from ringcomm.parallel.flat_collectives import largest_of, takes_uneven
from ringcomm.parallel.gradient_placeholder import (
    GradientHooks,
    check_same_gradients,
    progress,
)
from ringcomm.parallel.model.cut import note_trainer
from ringcomm.parallel.model.units import device_of_model
from ringcomm.parallel.offload.shard_store import ShardStore
from ringcomm.parallel.offload.state_rows import Operands
from ringcomm.parallel.offload.tiers import make_tier
from ringcomm.parallel.offload.weight_shards import WeightShards
from ringcomm.parallel.zero.inner import (
    Given,
    Grads,
    Inner,
    InnerSteps,
    check_options,
)
from ringcomm.parallel.zero.optimizer import ZeroOptimizer

_CPU = torch.device("cpu")


class _StoredSteps(InnerSteps):
    """Steps on weights and gradients of a store; `has_experts` is the same on all ranks."""

    store: ShardStore
    shards: WeightShards
    has_experts: bool

    def _operands_of(self, inner: Inner) -> Operands:
        return self._parts if inner.is_whole else self.store

    def _run_parts(self, inner: Inner, method: str, grads: Grads, factor: float) -> None:
        self._run_offloaded(inner, method, grads, factor)

    def _rounds(self, grads: Collection[Any]) -> list[Any]:
        """A rank has one full weight of each group in memory, and its gradient. Collective."""
        rounds = [*zip_longest(*(owners.rounds(grads) for owners in self.owners.values()))]
        num_rounds = len(rounds)
        if self.has_experts:  # ranks with others may have more
            num_rounds = largest_of([num_rounds], [self._group])[0]
        return [*rounds, *[()] * (num_rounds - len(rounds))]

    def _read(
        self, inner: Inner, params: Iterable[Any], grads: Grads
    ) -> tuple[dict[Any, Tensor], dict[Any, Tensor]]:
        found = {}
        for param in params:
            if self.updates(param):
                inner.optimizer.start(self.own[param])
            if self.store.has_grad(self.own[param]):
                with self.store.gradient(self.own[param]) as grad:
                    found[param] = grad.clone()
        return {param: self._optimizer.part_of(param) for param in params}, found

    def _write(self, parts: Mapping[Any, Tensor]) -> None:
        for param, part in parts.items():
            self.shards.unit_of(param).write_shard(param, part)


class ZeroInfinity(ZeroOptimizer):
    """Stage 3 with weights, gradients and states in a tier; made by zero.shard().

    Weights below 64 KiB stay in memory. Files end with the process: for checkpoints use
    ringcomm.parallel.get_state_dict() and torch.distributed.checkpoint.
    """

    _inner_class = _StoredSteps
    _grad_device = _CPU
    inner: _StoredSteps

    def __init__(self, given: Given) -> None:
        """Collective: a broadcast per unit."""
        optimizer, group = given.optimizers[0].optimizer, given.group
        device = device_of_model(given.model.weights)
        experts = [*given.model.experts.values()]
        for each in (group, *filter(None, (layer.replica_group for layer in experts))):
            if not (takes_uneven(each, _CPU) and takes_uneven(each, device)):
                where = f"CPUs and {device.type}" if device != _CPU else "CPUs"
                raise ValueError(
                    f"offload_weights needs groups of backend ringcomm for {where}, of experts too"
                )
        super().__init__(given)
        self._tier = make_tier(optimizer.to, optimizer.path)
        self._shard_store = ShardStore(self._tier, device)
        self._weights = WeightShards(given.model, group, given.units, self._shard_store, device)
        unit_of = self._weights.unit_of
        self._own = {param: unit_of(param).shards[param] for param in self.all_params()}
        inner = self.inner
        inner.own, inner.store, inner.shards = self._own, self._shard_store, self._weights
        inner.share_out({p: unit.group for unit in self._weights.units for p in unit.params})
        inner.has_experts = bool(experts)
        inner.place_offloaded(self._tier)
        # Masters of parts are made from the parts, when they are needed.
        halves = {param for param in inner.owner_of if param.itemsize == 2}
        for owners in inner.owners.values():
            for params in owners.rounds(halves):
                wholes = owners.gathered({param: self.part_of(param) for param in params})
                for param, value in wholes.items():
                    self.set_state_of(param, {"master": value.float()})
        self._hooks = GradientHooks(self.all_params(), self)
        self._names = {param: given.model.weights[param].name for param in self._own}
        # Since the last step: the number of gradients, and the passes that were compared.
        self._num_grads = dict.fromkeys(self._own, 0)
        self._compared: set[tuple[BackwardPass | None, dist.ProcessGroup]] = set()

    # ---- gradients

    def take_gradient(self, param: nn.Parameter, grad: Tensor) -> None:
        """See GradientHooks; the gradient is offloaded here. Collective."""
        current, group = current_pass(), self.inner.group_of[param]
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
            if self.inner.group_of[param] is group:
                num_before, node = self._num_grads[param], self._hooks.nodes[param]
                is_coming = current is not None and will_run(node)
                is_by_hand = num_before == 0 and param.grad is not None
                found = progress(num_before, is_coming=is_coming, is_by_hand=is_by_hand)
                mine[self._names[param]] = found
        try:
            check_same_gradients(
                mine,
                (group,),
                system="zero.shard(offload_weights=True)",
                alternative="use stage 1 or 2",
            )
        except RuntimeError:
            self._forget_gradients()
            raise

    def _agree(self) -> bool:
        for group in self.inner.rank_groups:
            self._compare(group)
        self._hooks.collect()
        has = any(map(self._shard_store.has_grad, self._own.values()))
        facts = [has, *self.inner.option_bytes(self.param_groups)]
        has_any, *options = largest_of(facts, [self.group], torch.uint8)
        check_options(options)
        return has_any > 0

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

    # ---- the update

    def _update(self, factor: float) -> None:
        self._shard_store.step_begins()
        own = self._own.items()
        self._step_inner({p: None for p, shard in own if self._shard_store.has_grad(shard)}, factor)

    def _change_mode(self, mode: str) -> None:
        self._shard_store.step_begins()
        super()._change_mode(mode)

    def close(self) -> None:
        """Restores ordinary, unsharded weights in memory and releases the files. Collective.

        Another optimizer may then train them.
        """
        self._forget_gradients()
        vars(self).pop("_hooks", None)  # which take gradients as long as they live
        note_trainer(self.all_params(), None)
        self._weights.close()
        self._shard_store.close()
        self._tier.close()

    def part_of(self, param: Any) -> Tensor:
        """See ZeroOptimizer."""
        return self._weights.unit_of(param).read_shard(param)

    def range_of(self, param: Any, rank: int | None = None) -> tuple[int, int]:
        """See WeightShards."""
        return self._weights.range_of(param, rank)
