"""ZeRO stages 1 and 2: weights whole on every rank, optimizer state in shards of flat buckets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ringcomm import ops
from ringcomm.ops.updates.fused_update import Rule, rule_of
from ringcomm.parallel.flat_collectives import takes_uneven
from ringcomm.parallel.model_axes import tied_over_stages
from ringcomm.parallel.offload.operands import Operands
from ringcomm.parallel.zero.bucket import BackwardPasses, Bucket, plan_buckets
from ringcomm.parallel.zero.optimizer import ShardOptions, ZeroOptimizer, is_offloaded


class _Parts(Operands):
    """Gradients for an offloaded optimizer; their dtype need not be that of the weights."""

    def __init__(self) -> None:
        self.grads: dict[Tensor, Tensor] = {}

    def has_grad(self, param: Tensor) -> bool:
        """See Operands."""
        return param in self.grads

    def get(self, param: Tensor) -> tuple[Tensor, Tensor]:
        """See Operands."""
        return param, self.grads[param]


class ShardUpdates:
    """An optimizer over the parts of weights that are in this rank's shards.

    The parameters of `inner`, an optimizer of the class that was given, are views of buckets'
    shards, one for each weight, perhaps empty. So a weight without a gradient is left alone, has
    its own number of steps, and any hyper-parameters of torch's optimizers work. States are views
    of `buffers` like the shard: one operator updates a bucket of one rule and one step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[dict[str, Any]],
        buckets: Sequence[Bucket],
    ) -> None:
        self._bucket_of = {param: bucket for bucket in buckets for param in bucket.params}
        self.is_offloaded = is_offloaded(optimizer)  # and keeps masters with the other states
        half = [bucket for bucket in buckets if bucket.has_master and self.is_offloaded]
        masters = {bucket: bucket.give_master() for bucket in half}
        self.parts = {
            param: bucket.shard[bucket.place_in_shard(param)]
            for param, bucket in self._bucket_of.items()
        }
        self._operands = _Parts()
        inner = [{**g, "params": [self.parts[p] for p in g["params"]]} for g in groups]
        kind: Any = type(optimizer)
        over: Any = getattr(optimizer, "over", None)  # of an offloaded one
        self.inner: Any = over(inner, operands=self._operands) if over else kind(inner)
        self.num_steps = dict.fromkeys(self.parts, 0)
        self._rules: dict[nn.Parameter, Rule | None] = {}
        self.buffers: dict[Bucket, dict[str, Tensor]] = defaultdict(dict)
        for bucket, master in masters.items():
            for param in bucket.params:
                state = {"step": 0, "master": master[bucket.place_in_shard(param)]}
                self.inner.set_state_of(self.parts[param], state)

    # ---- the update

    def take_options(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Goes on with the hyper-parameters of these groups."""
        for inner, outer in zip(self.inner.param_groups, groups, strict=True):
            inner.update({key: value for key, value in outer.items() if key != "params"})
            rule = None if self.is_offloaded else rule_of(self.inner, inner)
            self._rules |= dict.fromkeys(outer["params"], rule)

    def common_rule(self, bucket: Bucket) -> tuple[Rule, int] | None:
        """What one operator can update a whole bucket by, and the number of the step, or None."""
        found = {(self._rules[param], self.num_steps[param] + 1) for param in bucket.params}
        rule, step = next(iter(found))
        return (rule, step) if len(found) == 1 and rule is not None else None

    def whole_states(self, bucket: Bucket, rule: Rule) -> dict[str, Tensor]:
        """The states of a bucket's shard, for an operator that updates all of it by one rule."""
        for param in bucket.params:
            self._begin_state(bucket, param, rule)
        states = {name: self._buffer(bucket, name) for name in rule.state_names}
        return {**states, "master": bucket.shard} if bucket.has_master else states

    def stepped(self, params: Iterable[nn.Parameter]) -> None:
        """Counts an update of these weights, which all ranks have made."""
        for param in params:
            self.num_steps[param] += 1

    def update(self, buckets: Sequence[Bucket], present: Collection[Any], factor: float) -> None:
        """Updates the weights of reduced buckets that are `present`, and drops their gradients."""
        rest = []
        for bucket in buckets:
            params = [param for param in bucket.params if param in present]
            rules = [self._rules[param] for param in params]
            if bucket.shard.device.type != "cpu" or None in rules:
                rest.append((bucket, params))
                continue
            common = self.common_rule(bucket) if len(params) == len(bucket.params) else None
            if common is not None:
                states = self.whole_states(bucket, common[0])
                self._update_part(bucket, slice(None), states, *common, factor)
            else:
                for param, rule in zip(params, rules, strict=True):
                    assert rule is not None
                    states = self._begin_state(bucket, param, rule)
                    place, step = bucket.place_in_shard(param), self.num_steps[param] + 1
                    self._update_part(bucket, place, states, rule, step, factor)
            self.stepped(params)
            bucket.shard_grad = None
        self._update_by_inner(rest, factor)

    def _update_part(
        self,
        bucket: Bucket,
        place: slice,
        states: dict[str, Tensor],
        rule: Rule,
        step: int,
        factor: float,
    ) -> None:
        assert bucket.shard_grad is not None
        shard, grad = bucket.shard[place], bucket.shard_grad[place].to(bucket.shard.dtype)
        states = {name: states[name] for name in rule.state_names}
        ops.optimizer_update_(shard, grad, states, optimizer=rule, step=step, grad_scale=factor)

    def _update_by_inner(
        self, rest: Sequence[tuple[Bucket, Sequence[nn.Parameter]]], factor: float
    ) -> None:
        """Where ringcomm.ops has no such rule, or states are elsewhere."""
        if not rest:
            return
        if self.is_offloaded:
            self._operands.grads = {
                self.parts[param]: bucket.shard_grad[bucket.place_in_shard(param)]
                for bucket, params in rest
                for param in params
                if bucket.shard_grad is not None
            }
            self.inner.update(factor)
            self._operands.grads = {}
        else:
            for bucket, params in rest:
                assert bucket.shard_grad is not None
                grad = bucket.shard_grad.to(bucket.shard.dtype)
                grad = grad.mul_(factor) if factor != 1 else grad
                for param in params:
                    part = self.parts[param]
                    part.grad = grad[bucket.place_in_shard(param)]
                    if "step" in (state := self.inner.state.get(part, {})):
                        state["step"].fill_(self.num_steps[param])
            self.inner.step()
        for bucket, params in rest:
            bucket.shard_grad = None
            for param in params:
                self.parts[param].grad = None
                self._adopt_state(bucket, param)
            self.stepped(params)

    # ---- states

    def _buffer(self, bucket: Bucket, name: str) -> Tensor:
        found = self.buffers[bucket]
        if name not in found:
            found[name] = torch.zeros_like(bucket.shard)
        return found[name]

    def _begin_state(self, bucket: Bucket, param: nn.Parameter, rule: Rule) -> dict[str, Any]:
        """A weight's state: zeros, where it has none yet."""
        state = self.inner.state[self.parts[param]]
        for name in rule.state_names:
            if state.get(name) is None:
                state[name] = self._buffer(bucket, name)[bucket.place_in_shard(param)].zero_()
        if isinstance(rule, ops.AdamWStep) and "step" not in state:
            state["step"] = torch.tensor(0.0)
        return state

    def _adopt_state(self, bucket: Bucket, param: nn.Parameter) -> None:
        """Moves what torch's optimizer has made for a weight into the bucket's buffers."""
        part = self.parts[param]
        state = self.inner.state.get(part, {})
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() and value.shape == part.shape:
                place = self._buffer(bucket, name)[bucket.place_in_shard(param)]
                if value.data_ptr() != place.data_ptr():
                    state[name] = place.copy_(value)

    def state_of(self, param: nn.Parameter) -> dict[str, Any]:
        """A weight's state, as torch has it, of this rank's part; of 16 bits with "master"."""
        bucket, part = self._bucket_of[param], self.parts[param]
        found = self.inner.state_of(part) if self.is_offloaded else self.inner.state.get(part, {})
        state = {key: value for key, value in found.items() if value is not None}
        if "step" in state:
            state["step"] = torch.tensor(float(self.num_steps[param]))
        if bucket.has_master:
            state["master"] = bucket.shard[bucket.place_in_shard(param)]
        return state

    def set_state(self, param: nn.Parameter, state: Mapping[str, Any]) -> None:
        """Replaces a weight's state; one-dimensional tensors are of this rank's part."""
        bucket, part = self._bucket_of[param], self.parts[param]
        given = {name: value for name, value in state.items() if value is not None}
        if not bucket.is_half:
            given.pop("master", None)
        if bucket.has_master and (master := given.pop("master", None)) is not None:
            bucket.shard[bucket.place_in_shard(param)] = master
        # SGD counts no steps: it matters only whether there has been one.
        self.num_steps[param] = int(given.get("step", bool(given.keys() - {"master"})))
        if self.is_offloaded:
            self.inner.set_state_of(part, given)
            return
        for name, value in given.items():
            if isinstance(value, Tensor) and value.dim():
                given[name] = self._buffer(bucket, name)[bucket.place_in_shard(param)].copy_(value)
        self.inner.state.pop(part, None)
        if given:
            self.inner.state[part] = given


class FlatZero(ZeroOptimizer):
    """Stage 1 keeps gradients whole until the step, stage 2 their shards alone.

    Weights become views of flat buckets. Stage 1 reduces, updates and gathers each bucket in one
    operator where the group has it (ringcomm, on CPUs) and nothing is to be known first. Otherwise,
    and at stage 2, shards are updated in between.
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
        self._inner = self._updates.inner
        late = tied_over_stages(model)
        self._passes = BackwardPasses(self._buckets, group, late, reduces=stage == 2)
        # What all ranks know of this step, from _agree().
        self._present: set[nn.Parameter] = set()
        self._due: list[Bucket] = []

    def _check_unchanged(self) -> None:
        super()._check_unchanged()
        for param, bucket in self._bucket_of.items():
            if not bucket.has_weight(param):
                raise ValueError(
                    f"a weight {tuple(param.shape)} has moved since zero.shard(): move it before"
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
        states = self._updates.buffers.values()
        return [*masters, *(buffer for found in states for buffer in found.values())]

    # ---- the update

    def _update(self, factor: float) -> None:
        self._states_come()
        self._updates.take_options(self.param_groups)
        for bucket in list(self._due):
            if self._updated_in_one_pass(bucket, factor):
                self._due.remove(bucket)
        self._reduce()
        reduced = [bucket for bucket in self._buckets if bucket.shard_grad is not None]
        self._updates.update(reduced, self._present, factor)
        for bucket in reduced:
            bucket.gather()

    def _updated_in_one_pass(self, bucket: Bucket, factor: float) -> bool:
        device = bucket.weights.device
        can = (
            self.stage == 1
            and bucket.shard_grad is None
            and device.type == "cpu"
            and takes_uneven(self.group, device)
            and all(param in self._present for param in bucket.params)
        )
        common = self._updates.common_rule(bucket) if can else None
        if common is None:
            return False
        rule, step = common
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
        return True

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
        part = self._updates.parts[param]
        return self._inner.new_state_of(part, part) if self._updates.is_offloaded else {}

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
