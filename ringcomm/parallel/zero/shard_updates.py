"""The update of shards: each weight has a state of its own, neighbours are updated together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ringcomm import ops
from ringcomm.ops.updates.fused_update import Rule, rule_of
from ringcomm.parallel.offload.operands import Resident
from ringcomm.parallel.zero.bucket import Bucket
from ringcomm.parallel.zero.optimizer import is_offloaded


class _Parts(Resident):
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

    The parameters of `inner` are views of buckets' shards, one for each weight, with no elements
    where this rank has none. So a weight without a gradient is left alone, has its own number of
    steps, and any hyper-parameters of torch's optimizers work. States are views of buffers like
    the shard: neighbours with one rule and one number of steps are updated by one operator.

    Attributes:
        inner: an optimizer of the class that was given.
        num_steps: updates of each weight; the same on all ranks.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[dict[str, Any]],
        buckets: Sequence[Bucket],
    ) -> None:
        self._buckets = buckets
        self._bucket_of = {param: bucket for bucket in buckets for param in bucket.params}
        masters = {}
        if is_offloaded(optimizer):  # which keeps masters with the other states
            masters = {bucket: bucket.give_master() for bucket in buckets if bucket.has_master}
        self._parts = {
            param: bucket.shard[bucket.place_in_shard(param)]
            for param, bucket in self._bucket_of.items()
        }
        self._operands = _Parts()
        self._groups = [list(group["params"]) for group in groups]
        inner = [{**g, "params": [self._parts[p] for p in g["params"]]} for g in groups]
        kind: Any = type(optimizer)
        self.is_offloaded = is_offloaded(optimizer)
        self.inner: Any = (
            optimizer.over(inner, operands=self._operands)  # type: ignore[attr-defined]
            if self.is_offloaded
            else kind(inner)
        )
        self.num_steps = dict.fromkeys(self._parts, 0)
        self._rules: dict[nn.Parameter, Rule | None] = {}
        self._buffers: dict[Bucket, dict[str, Tensor]] = defaultdict(dict)
        for bucket, master in masters.items():
            for param in bucket.params:
                state = {"step": 0, "master": master[bucket.place_in_shard(param)]}
                self.inner.set_state_of(self._parts[param], state)

    # ---- the update

    def take_options(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Goes on with the hyper-parameters of these groups."""
        for inner, outer in zip(self.inner.param_groups, groups, strict=True):
            inner.update({key: value for key, value in outer.items() if key != "params"})
        for group, params in zip(self.inner.param_groups, self._groups, strict=True):
            rule = None if self.is_offloaded else rule_of(self.inner, group)
            self._rules |= dict.fromkeys(params, rule)

    def common_rule(self, bucket: Bucket) -> tuple[Rule, int] | None:
        """What one operator updates a whole bucket by, and the number of the step.

        None if weights differ in their hyper-parameters or steps, or ringcomm.ops has no such rule.
        """
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
        """Updates the weights of reduced buckets that are `present`, by gradients times a factor.

        Afterwards buckets have no gradients of shards.
        """
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
                self._parts[param]: bucket.shard_grad[bucket.place_in_shard(param)]
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
                    part = self._parts[param]
                    part.grad = grad[bucket.place_in_shard(param)]
                    if "step" in (state := self.inner.state.get(part, {})):
                        state["step"].fill_(self.num_steps[param])
            self.inner.step()
        for bucket, params in rest:
            bucket.shard_grad = None
            for param in params:
                self._parts[param].grad = None
                self._adopt_state(bucket, param)
            self.stepped(params)

    # ---- states

    def _buffer(self, bucket: Bucket, name: str) -> Tensor:
        found = self._buffers[bucket]
        if name not in found:
            found[name] = torch.zeros_like(bucket.shard)
        return found[name]

    def _begin_state(self, bucket: Bucket, param: nn.Parameter, rule: Rule) -> dict[str, Any]:
        """A weight's state: zeros, where it has none yet."""
        state = self.inner.state[self._parts[param]]
        for name in rule.state_names:
            if state.get(name) is None:
                state[name] = self._buffer(bucket, name)[bucket.place_in_shard(param)].zero_()
        if isinstance(rule, ops.AdamWStep) and "step" not in state:
            state["step"] = torch.tensor(0.0)
        return state

    def _adopt_state(self, bucket: Bucket, param: nn.Parameter) -> None:
        """Moves what torch's optimizer has made for a weight into the bucket's buffers."""
        part = self._parts[param]
        state = self.inner.state.get(part, {})
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() and value.shape == part.shape:
                place = self._buffer(bucket, name)[bucket.place_in_shard(param)]
                if value.data_ptr() != place.data_ptr():
                    state[name] = place.copy_(value)

    def tensors(self) -> list[Tensor]:
        """The states in memory."""
        return [buffer for found in self._buffers.values() for buffer in found.values()]

    def state_of(self, param: nn.Parameter) -> dict[str, Any]:
        """A weight's state, as torch has it, of this rank's part; {} before its first step.

        Beside 16-bit weights it has "master", their values in float32, always.
        """
        bucket, part = self._bucket_of[param], self._parts[param]
        found = self.inner.state_of(part) if self.is_offloaded else self.inner.state.get(part, {})
        state = {key: value for key, value in found.items() if value is not None}
        if "step" in state:
            state["step"] = torch.tensor(float(self.num_steps[param]))
        if bucket.has_master:
            state["master"] = bucket.shard[bucket.place_in_shard(param)]
        return state

    def new_state_of(self, param: nn.Parameter) -> dict[str, Any]:
        """What state_of() is before the first step, where states are elsewhere; otherwise {}."""
        part = self._parts[param]
        return self.inner.new_state_of(part, part) if self.is_offloaded else {}

    def set_state(self, param: nn.Parameter, state: Mapping[str, Any]) -> None:
        """Replaces a weight's state; one-dimensional tensors are of this rank's part."""
        bucket, part = self._bucket_of[param], self._parts[param]
        given = {name: value for name, value in state.items() if value is not None}
        if not bucket.is_half:
            given.pop("master", None)
        if bucket.has_master and (master := given.pop("master", None)) is not None:
            bucket.shard[bucket.place_in_shard(param)] = master
        # SGD counts no steps: it matters only whether there has been one.
        is_first = not given.keys() - {"master"}
        self.num_steps[param] = int(given.get("step", 0 if is_first else 1))
        if self.is_offloaded:
            self.inner.set_state_of(part, given)
            return
        for name, value in given.items():
            if isinstance(value, Tensor) and value.dim():
                given[name] = self._buffer(bucket, name)[bucket.place_in_shard(param)].copy_(value)
        self.inner.state.pop(part, None)
        if given:
            self.inner.state[part] = given
