"""ZeRO stages 1 and 2: replicated weights, optimizer state in shards of flat buckets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ringcomm import ops
from ringcomm.ops.updates.fused_update import Rule, rule_of
from ringcomm.parallel.flat_collectives import takes_uneven
from ringcomm.parallel.offload.optimizers import Operands
from ringcomm.parallel.zero.bucket import BackwardPasses, Bucket, plan_buckets
from ringcomm.parallel.zero.optimizer import ShardOptions, ZeroOptimizer

Params = Sequence[nn.Parameter]


class _Gradients(Operands):
    """Gradients for an offloaded optimizer; their dtype may differ from that of the weights."""

    def __init__(self) -> None:
        self.of: dict[Tensor, Tensor] = {}

    def has_grad(self, param: Tensor) -> bool:
        return param in self.of

    def get(self, param: Tensor) -> tuple[Tensor, Tensor]:
        return param, self.of[param]


class FlatZero(ZeroOptimizer):
    """ZeRO stages 1, which keeps unsharded gradients until the step, and 2, which keeps shards.

    The parameters of `_inner`, an optimizer of the class that was given, are `_parts`: views of
    buckets' shards, one for each weight, perhaps empty. States are views of `_buffers` like the
    shard: neighbours of one rule and one step are updated by one operator.
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
        super().__init__(model, optimizer, optimizer.param_groups, group, options)
        self.stage = stage
        dtype = options.param_dtype
        self._buckets = [
            Bucket(params, group, dtype, options.grad_dtype)
            for params in plan_buckets(model, self.param_groups, stage, options.bucket_bytes, dtype)
        ]
        self._bucket_of = {param: bucket for bucket in self._buckets for param in bucket.params}
        if dtype is not None:
            _compute_in(model, dtype, set(self._bucket_of))
        self._passes = BackwardPasses(
            self._buckets, group, self.all_params(), self._late, reduces=stage == 2
        )
        # Facts of this step that all ranks share, from _agree().
        self._present: set[nn.Parameter] = set()
        self._due: list[Bucket] = []
        self._steps = dict.fromkeys(self._bucket_of, 0)
        self._buffers: dict[Bucket, dict[str, Tensor]] = {bucket: {} for bucket in self._buckets}
        self._make_inner(optimizer)

    def _make_inner(self, optimizer: Any) -> None:
        """Makes the inner optimizer; an offloaded one keeps masters with its states."""
        half = [b for b in self._buckets if b.has_master and self._is_offloaded]
        masters = {bucket: bucket.give_master() for bucket in half}
        self._parts = {p: b.shard[b.place_in_shard(p)] for p, b in self._bucket_of.items()}
        groups = [{**g, "params": [self._parts[p] for p in g["params"]]} for g in self.param_groups]
        self._gradients = _Gradients()
        self._inner = (
            optimizer.over(groups, operands=self._gradients)
            if self._is_offloaded
            else type(optimizer)(groups)
        )
        for bucket, master in masters.items():
            for param in bucket.params:
                state = {"step": 0, "master": master[bucket.place_in_shard(param)]}
                self._inner.set_state_of(self._parts[param], state)

    # ---- gradients

    def _check_unchanged(self) -> None:
        super()._check_unchanged()
        for param, bucket in self._bucket_of.items():
            if not bucket.has_weight(param):
                raise ValueError(
                    f"a weight of shape {tuple(param.shape)} was moved after zero.shard(): move "
                    "the model before"
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

    # ---- the update

    def _update(self, factor: float) -> None:
        self._states_come()
        self._take_options()
        rules: dict[nn.Parameter, Rule | None] = {}
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            rule = None if self._is_offloaded else rule_of(self._inner, inner)
            rules |= dict.fromkeys(group["params"], rule)
        for bucket in list(self._due):
            if self._updated_in_one_pass(bucket, rules, factor):
                self._due.remove(bucket)
        self._reduce()
        reduced = [bucket for bucket in self._buckets if bucket.shard_grad is not None]
        rest = [bucket for bucket in reduced if not self._updated_by_rules(bucket, rules, factor)]
        if rest:
            self._update_by_inner(rest, factor)
        for bucket in reduced:
            bucket.shard_grad = None
            bucket.gather()

    def _runs(self, bucket: Bucket, rules: dict[nn.Parameter, Rule | None]) -> list[Any]:
        """(rule, number of the step, neighbours) of the weights that have a gradient."""

        def kind(param: nn.Parameter) -> Any:
            return param in self._present, rules[param], self._steps[param] + 1

        runs = groupby(bucket.params, kind)
        return [(rule, step, [*run]) for (has_grad, rule, step), run in runs if has_grad]

    def _updated_in_one_pass(
        self, bucket: Bucket, rules: dict[nn.Parameter, Rule | None], factor: float
    ) -> bool:
        device = bucket.weights.device
        if (
            self.stage != 1
            or bucket.shard_grad is not None
            or device.type != "cpu"
            or not takes_uneven(self.group, device)
        ):
            return False
        (rule, step, params), *others = self._runs(bucket, rules)
        if rule is None or others or len(params) < len(bucket.params):
            return False
        states = self._begun_states(bucket, params, rule)
        if bucket.has_master:
            states["master"] = bucket.shard
        ops.reduce_scatter_update_all_gather_(
            bucket.weights,
            bucket.whole_gradients(),
            states,
            optimizer=rule,
            step=step,
            group=self.group,
            grad_scale=factor,
        )
        self._stepped(params)
        return True

    def _updated_by_rules(
        self, bucket: Bucket, rules: dict[nn.Parameter, Rule | None], factor: float
    ) -> bool:
        runs = self._runs(bucket, rules)
        if bucket.shard.device.type != "cpu" or any(rule is None for rule, _, _ in runs):
            return False
        assert bucket.shard_grad is not None
        for rule, step, params in runs:
            place = bucket.place_in_shard(params[0], params[-1])
            states = self._begun_states(bucket, params, rule)
            ops.optimizer_update_(
                bucket.shard[place],
                bucket.shard_grad[place].to(bucket.shard.dtype),
                {name: buffer[place] for name, buffer in states.items()},
                optimizer=rule,
                step=step,
                grad_scale=factor,
            )
            self._stepped(params)
        return True

    def _update_by_inner(self, buckets: list[Bucket], factor: float) -> None:
        """Updates by the inner optimizer, for rules not in ringcomm.ops and offloaded states."""
        params = [p for bucket in buckets for p in bucket.params if p in self._present]
        grads = {}
        for param in params:
            bucket = self._bucket_of[param]
            assert bucket.shard_grad is not None
            grads[self._parts[param]] = bucket.shard_grad[bucket.place_in_shard(param)]
        if self._is_offloaded:
            self._gradients.of = grads
            self._inner.update(factor)
            self._gradients.of = {}
        else:
            for param, (part, grad) in zip(params, grads.items(), strict=True):
                part.grad = grad.to(part.dtype)
                if factor != 1:
                    part.grad *= factor
                if "step" in (state := self._inner.state.get(part, {})):
                    state["step"].fill_(self._steps[param])
            self._inner.step()
            self._inner.zero_grad()
            for param in params:
                self._adopt_state(param)
        self._stepped(params)

    def _stepped(self, params: Iterable[nn.Parameter]) -> None:
        """Counts an update of these weights, which all ranks have made."""
        for param in params:
            self._steps[param] += 1

    # ---- state

    def _buffer(self, bucket: Bucket, name: str) -> Tensor:
        found = self._buffers[bucket]
        if name not in found:
            found[name] = torch.zeros_like(bucket.shard)
        return found[name]

    def _begun_states(self, bucket: Bucket, params: Params, rule: Rule) -> dict[str, Tensor]:
        """The buffers of a rule's states; missing states of a weight become zeros."""
        for param in params:
            state = self._inner.state[self._parts[param]]
            for name in rule.state_names:
                if state.get(name) is None:
                    state[name] = self._buffer(bucket, name)[bucket.place_in_shard(param)].zero_()
            if isinstance(rule, ops.AdamWStep) and "step" not in state:
                state["step"] = torch.tensor(0.0)
        return {name: self._buffer(bucket, name) for name in rule.state_names}

    def _adopt_state(self, param: nn.Parameter) -> None:
        """Moves the state that torch's optimizer made for a weight into the bucket's buffers."""
        bucket, part = self._bucket_of[param], self._parts[param]
        state = self._inner.state.get(part, {})
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() and value.shape == part.shape:
                place = self._buffer(bucket, name)[bucket.place_in_shard(param)]
                if value.data_ptr() != place.data_ptr():
                    state[name] = place.copy_(value)

    def _state_of(self, param: Any) -> dict[str, Any]:
        """A weight's flat states, with a separate "step", and "master" for 16-bit weights."""
        bucket, part, inner = self._bucket_of[param], self._parts[param], self._inner
        found = inner.state_of(part) if self._is_offloaded else inner.state.get(part, {})
        state = {key: value for key, value in found.items() if value is not None}
        if "step" in state:
            state["step"] = torch.tensor(float(self._steps[param]))
        if bucket.has_master:
            state["master"] = bucket.shard[bucket.place_in_shard(param)]
        return state

    def _set_state(self, param: Any, state: dict[str, Any]) -> None:
        bucket, part = self._bucket_of[param], self._parts[param]
        place = bucket.place_in_shard(param)
        given = {name: value for name, value in state.items() if value is not None}
        if not bucket.is_half:
            given.pop("master", None)
        if bucket.has_master and (master := given.pop("master", None)) is not None:
            bucket.shard[place] = master
        # SGD has no step count: it only matters whether there was a step.
        self._steps[param] = int(given.get("step", bool(given.keys() - {"master"})))
        if self._is_offloaded:
            self._inner.set_state_of(part, given)
            return
        for name, value in given.items():
            if isinstance(value, Tensor) and value.dim():
                given[name] = self._buffer(bucket, name)[place].copy_(value)
        self._inner.state.pop(part, None)
        if given:
            self._inner.state[part] = given

    def has_stepped(self, param: Any) -> bool:
        """See ZeroOptimizer."""
        return self._steps[param] > 0

    def forget_steps(self) -> None:
        """See ZeroOptimizer."""
        self._steps = dict.fromkeys(self._steps, 0)

    def range_of(self, param: Any, rank: int | None = None) -> tuple[int, int]:
        """See ZeroOptimizer."""
        return self._bucket_of[param].part_range(param, rank)

    def new_state_of(self, param: Any) -> dict[str, Any]:
        """See ZeroOptimizer."""
        part = self._parts[param]
        return self._inner.new_state_of(part, part) if self._is_offloaded else {}

    def _states_come(self) -> None:
        for bucket in self._buckets:
            bucket.see_written_weights()

    def _states_taken(self) -> None:
        for bucket in self._buckets:
            if bucket.has_master:
                bucket.gather()


def _compute_in(model: nn.Module, dtype: torch.dtype, trained: set[nn.Parameter]) -> None:
    """Casts frozen weights and the model's inputs to the dtype too, as fully_shard does."""
    for param in model.parameters():
        if param not in trained and param.is_floating_point():
            param.data = param.data.to(dtype)

    def cast(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(
            Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, (args, kwargs)
        )

    model.register_forward_pre_hook(cast, with_kwargs=True)
