"""ZeRO stages 1 and 2: weights whole on every rank, optimizer state in shards of flat buckets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ringcomm import ops
from ringcomm.ops.updates.fused_update import Rule
from ringcomm.parallel.flat_collectives import takes_uneven
from ringcomm.parallel.model_axes import tied_over_stages
from ringcomm.parallel.zero.bucket import BackwardPasses, Bucket, plan_buckets
from ringcomm.parallel.zero.optimizer import ShardOptions, ZeroOptimizer
from ringcomm.parallel.zero.shard_updates import ShardUpdates


class FlatZero(ZeroOptimizer):
    """Stage 1 keeps gradients whole until the step, stage 2 their shards alone.

    Weights become views of flat buckets. Stage 1 reduces, updates and gathers each bucket in one
    operator where the group has it (ringcomm, on CPUs) and nothing is to be known first. Otherwise,
    and at stage 2, shards are updated in between.

    A step begins with one MAX all_reduce of a byte for each weight and bucket. It tells all ranks
    which weights have a gradient on any rank, and which buckets have gradients to reduce. At stage
    2 so does each backward pass, for ranks that make fewer of them.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        stage: int,
        group: dist.ProcessGroup,
        options: ShardOptions,
    ) -> None:
        """Collective: a broadcast per bucket."""
        super().__init__(model, optimizer.param_groups, group, options)
        self.stage = stage
        dtype = options.param_dtype
        self._buckets = [
            Bucket(params, group, dtype, options.grad_dtype)
            for params in plan_buckets(model, self.param_groups, stage, options.bucket_bytes, dtype)
        ]
        self._bucket_of = {param: bucket for bucket in self._buckets for param in bucket.params}
        if dtype is not None:
            _compute_in(model, dtype, set(self._bucket_of))
        self._updates = ShardUpdates(optimizer, self.param_groups, self._buckets)
        late = tied_over_stages(model)
        self._passes = BackwardPasses(self._buckets, group, late, reduces=stage == 2)
        # What all ranks know of this step, from _agree().
        self._present: set[nn.Parameter] = set()
        self._due: list[Bucket] = []

    # ---- gradients

    def _check_unchanged(self) -> None:
        super()._check_unchanged()
        for param, bucket in self._bucket_of.items():
            if not bucket.has_weight(param):
                raise ValueError(
                    f"a weight of shape {tuple(param.shape)} has moved since zero.shard(), by"
                    " .to() or .data: move the model before"
                )

    def _set_sync(self, is_on: bool) -> None:
        self._passes.reduces = is_on and self.stage == 2

    def _agree(self) -> bool:
        self._passes.hooks.collect()
        self._present, self._due = self._passes.agree()
        return bool(self._present)

    def _reduce(self) -> None:
        for bucket in self._due:
            bucket.reduce()
            if self.stage == 2:
                bucket.free_buffer()
        self._due = []

    def _shards(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        for bucket in self._buckets:
            if bucket.shard_grad is not None:
                for param in bucket.params:
                    yield param, bucket.shard_grad[bucket.place_in_shard(param)]

    def _forget_gradients(self) -> None:
        for bucket in self._buckets:
            bucket.forget_gradients()
            if self.stage == 2:
                bucket.free_buffer()
        self._passes.forget()
        self._present, self._due = set(), []
        for param in self._bucket_of:
            param.grad = None

    def gradient_tensors(self) -> list[Tensor]:
        """See ZeroOptimizer."""
        return [tensor for bucket in self._buckets for tensor in bucket.gradient_tensors]

    def state_tensors(self) -> list[Tensor]:
        """See ZeroOptimizer."""
        masters = [bucket.shard for bucket in self._buckets if bucket.has_master]
        return [*masters, *self._updates.tensors()]

    # ---- the update

    def _update(self, factor: float) -> None:
        for bucket in self._buckets:
            bucket.see_written_weights()
        self._updates.take_options(self.param_groups)
        for bucket in list(self._due):
            if (rule := self._rule_for_one_pass(bucket)) is not None:
                self._due.remove(bucket)
                self._update_in_one_pass(bucket, *rule, factor)
        self._reduce()
        reduced = [bucket for bucket in self._buckets if bucket.shard_grad is not None]
        self._updates.update(reduced, self._present, factor)
        for bucket in reduced:
            bucket.gather()

    def _rule_for_one_pass(self, bucket: Bucket) -> tuple[Rule, int] | None:
        device = bucket.weights.device
        can = (
            self.stage == 1
            and bucket.shard_grad is None
            and device.type == "cpu"
            and takes_uneven(self.group, device)
            and all(param in self._present for param in bucket.params)
        )
        return self._updates.common_rule(bucket) if can else None

    def _update_in_one_pass(self, bucket: Bucket, rule: Rule, step: int, factor: float) -> None:
        ops.reduce_scatter_update_all_gather_(
            bucket.weights,
            bucket.whole_gradients(),
            self._updates.whole_states(bucket, rule),
            optimizer=rule,
            step=step,
            group=self.group,
            grad_scale=factor,
        )
        self._updates.stepped(bucket.params)

    # ---- state

    def _state_of(self, param: Any) -> dict[str, Any]:
        return self._updates.state_of(param)

    def has_stepped(self, param: Any) -> bool:
        """See ZeroOptimizer."""
        return self._updates.num_steps[param] > 0

    def _states_come(self) -> None:
        for bucket in self._buckets:
            bucket.see_written_weights()

    def range_of(self, param: Any, rank: int | None = None) -> tuple[int, int]:
        """See ZeroOptimizer."""
        return self._bucket_of[param].part_range(param, rank)

    def new_state_of(self, param: Any) -> dict[str, Any]:
        """See ZeroOptimizer."""
        return self._updates.new_state_of(param)

    def forget_steps(self) -> None:
        """See ZeroOptimizer."""
        self._updates.num_steps = dict.fromkeys(self._updates.num_steps, 0)

    def _set_state(self, param: Any, state: dict[str, Any]) -> None:
        self._updates.set_state(param, state)

    def _states_taken(self) -> None:
        for bucket in self._buckets:
            if bucket.has_master:
                bucket.gather()


def _compute_in(model: nn.Module, dtype: torch.dtype, trained: set[nn.Parameter]) -> None:
    """Frozen weights and the inputs of the model get a dtype, too, as with fully_shard."""
    for param in model.parameters():
        if param not in trained and param.is_floating_point():
            param.data = param.data.to(dtype)

    def cast(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(
            Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, (args, kwargs)
        )

    model.register_forward_pre_hook(cast, with_kwargs=True)
