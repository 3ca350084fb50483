"""ZeRO stages 1 and 2: weights whole on every rank, optimizer state in shards of flat buckets."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ringcomm import ops
from ringcomm.parallel.flat_collectives import takes_uneven
from ringcomm.parallel.update_rules import Rule, rule_of
from ringcomm.parallel.zero.bucket import Bucket, cut_into_buckets
from ringcomm.parallel.zero.inner import is_offloaded, made_over, set_state_of, state_of
from ringcomm.parallel.zero.optimizer import ZeroOptimizer, tensors_of
from ringcomm.parallel.zero.options import ShardOptions


class FlatZeroOptimizer(ZeroOptimizer):
    """Stage 1 keeps gradients whole until the step, stage 2 their shards alone.

    Weights become views of flat buckets. Stage 1 reduces, updates and gathers each bucket in one
    operator where the group has it (ringcomm, on CPUs) and nothing is to be known first. Otherwise,
    and at stage 2, torch's own optimizer updates the shards in between.
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
        self._buckets: list[Bucket] = []
        inner_groups = []
        masters: list[tuple[Bucket, Tensor]] = []
        for group_idx, param_group in enumerate(self.param_groups):
            mine = [
                Bucket(params, group_idx, group, options.param_dtype)
                for params in cut_into_buckets(
                    param_group["params"], options.bucket_bytes, options.param_dtype
                )
            ]
            self._buckets += mine
            if is_offloaded(optimizer):  # which keeps masters with the other states
                masters += [(bucket, bucket.give_master()) for bucket in mine if bucket.is_half]
            shards = [bucket.shard for bucket in mine]
            inner_groups.append({**param_group, "params": shards})
        if options.param_dtype is not None:
            trained = {param for bucket in self._buckets for param in bucket.params}
            _compute_in(model, options.param_dtype, trained)
        self._inner = made_over(optimizer, inner_groups)
        for bucket, master in masters:
            set_state_of(self._inner, bucket.shard, {"step": 0, "master": master})
        self._bucket_of = {param: bucket for bucket in self._buckets for param in bucket.params}
        # The bucket that is to be reduced next: all ranks keep this order.
        self._next = 0
        told = weakref.ref(self)
        for param in self._bucket_of:
            param.register_post_accumulate_grad_hook(_hook(told))

    # ---- gradients

    def grad_arrived(self, param: nn.Parameter) -> None:
        """The hook after autograd has added to a gradient. Collective at stage 2."""
        with torch.no_grad():
            self._bucket_of[param].take(param, keep_view=self.stage == 1)
            if self.stage == 2:
                while self._buckets[self._next].is_complete:
                    self._reduce_next()

    def _reduce_next(self) -> None:
        self._buckets[self._next].reduce_and_free()
        self._next = (self._next + 1) % len(self._buckets)

    def _check_unchanged(self) -> None:
        super()._check_unchanged()
        for param, bucket in self._bucket_of.items():
            if not bucket.has_weight(param):
                raise ValueError(
                    f"a weight of shape {tuple(param.shape)} has moved since zero.shard(), by"
                    " .to() or .data: move the model before"
                )

    def _has_gradients(self) -> bool:
        self._take_left_gradients()
        return any(bucket.is_fresh or bucket.shard_grad is not None for bucket in self._buckets)

    def _take_left_gradients(self) -> None:
        """What a user has put there by hand, or at stage 1 dropped: the model's zero_grad()."""
        for param, bucket in self._bucket_of.items():
            if param.grad is not None and not bucket.has_taken(param):
                bucket.take(param, keep_view=self.stage == 1)
            elif param.grad is None and self.stage == 1:
                bucket.drop(param)

    def _reduce(self) -> None:
        self._take_left_gradients()
        if self._next == 0 and not any(bucket.is_fresh for bucket in self._buckets):
            return
        if self.stage == 1:
            for bucket in self._buckets:
                bucket.reduce()
            return
        for _ in range(self._next, len(self._buckets)):
            self._reduce_next()

    def _shards(self) -> Iterator[tuple[Tensor, Tensor]]:
        for bucket in self._buckets:
            if bucket.shard_grad is not None:
                yield bucket.shard, bucket.shard_grad

    def _forget_gradients(self) -> None:
        for bucket in self._buckets:
            bucket.forget_gradients()
            if self.stage == 2:
                bucket.free_gradients()
        self._next = 0
        super().zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients, whatever `set_to_none`; at stage 2 the model's does not."""
        self._forget_gradients()

    def gradient_tensors(self) -> list[Tensor]:
        """See ZeroOptimizer."""
        return [tensor for bucket in self._buckets for tensor in bucket.gradient_tensors]

    def state_tensors(self) -> list[Tensor]:
        """See ZeroOptimizer."""
        masters = [bucket.shard for bucket in self._buckets if bucket.has_master]
        return [*masters, *tensors_of(self._inner)]

    # ---- the update

    def _update(self, factor: float) -> None:
        for bucket in self._buckets:
            bucket.see_written_weights()
        for inner, outer in zip(self._inner.param_groups, self.param_groups, strict=True):
            inner.update({key: value for key, value in outer.items() if key != "params"})
        rules = [rule_of(self._inner, group) for group in self.param_groups]
        if self._is_one_pass(rules):
            for bucket in self._buckets:
                self._update_in_one_pass(bucket, rules[bucket.group_idx], factor)
            return
        self._reduce()
        for bucket in self._buckets:
            self._update_shard(bucket, factor)

    def _is_one_pass(self, rules: list[Rule | None]) -> bool:
        return (
            self.stage == 1
            and not is_offloaded(self._inner)
            and None not in rules
            and all(
                bucket.shard_grad is None
                and bucket.weights.device.type == "cpu"
                and takes_uneven(self.group, bucket.weights.device)
                for bucket in self._buckets
            )
        )

    def _update_in_one_pass(self, bucket: Bucket, rule: Any, factor: float) -> None:
        state = self._inner.state[bucket.shard]
        num_steps = _begin_step(state, rule, bucket.shard)
        tensors = {name: state[name] for name in rule.state_names}
        if bucket.has_master:
            tensors["master"] = bucket.shard
        ops.reduce_scatter_update_all_gather_(
            bucket.weights,
            bucket.whole_gradients(),
            tensors,
            optimizer=rule,
            step=num_steps,
            group=self.group,
            grad_scale=factor,
        )

    def _update_shard(self, bucket: Bucket, factor: float) -> None:
        assert bucket.shard_grad is not None
        grad = bucket.shard_grad.to(bucket.shard.dtype)
        bucket.shard_grad = None
        rule = rule_of(self._inner, self.param_groups[bucket.group_idx])
        if rule is not None and grad.device.type == "cpu" and not is_offloaded(self._inner):
            state = self._inner.state[bucket.shard]
            num_steps = _begin_step(state, rule, bucket.shard)
            ops.optimizer_update_(
                bucket.shard,
                grad,
                {name: state[name] for name in rule.state_names},
                optimizer=rule,
                step=num_steps,
                grad_scale=factor,
            )
        else:
            bucket.shard.grad = grad.mul_(factor) if factor != 1 else grad
            self._inner.step()
            bucket.shard.grad = None
        bucket.gather()

    # ---- state

    def _shard_state(self) -> Any:
        masters = [bucket.shard.clone() if bucket.has_master else None for bucket in self._buckets]
        return {"optimizer": self._inner.state_dict(), "masters": masters}

    def _load_shard_state(self, state: Any) -> None:
        sizes = [bucket.shard.shape for bucket in self._buckets]
        found = [None if m is None else m.shape for m in state["masters"]]
        wanted = [
            size if b.has_master else None for b, size in zip(self._buckets, sizes, strict=True)
        ]
        if found != wanted:
            raise ValueError(
                "the state was saved with other buckets: bucket_bytes, param_dtype and the"
                " parameter groups have to be the same, or zero.load_full_state_dict() takes it"
            )
        self._inner.load_state_dict(state["optimizer"])
        for bucket, master in zip(self._buckets, state["masters"], strict=True):
            if master is not None:
                bucket.shard.copy_(master)
                bucket.gather()

    def _whole_states(self) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
        for bucket in self._buckets:
            state = state_of(self._inner, bucket.shard)
            if bucket.has_master:
                state["master"] = bucket.shard
            of_params: dict[nn.Parameter, dict[str, Any]] = {p: {} for p in bucket.params}
            for key, value in state.items():
                is_shard = isinstance(value, Tensor) and value.shape == bucket.shard.shape
                whole = bucket.whole_of(value).cpu() if is_shard else value
                for param, mine in of_params.items():
                    mine[key] = bucket.view(whole, param).clone() if is_shard else _copied(value)
            yield from of_params.items()

    def _take_states(self, states: dict[Any, dict[str, Any]]) -> None:
        for bucket in self._buckets:
            found = [states.get(param, {}) for param in bucket.params]
            keys = dict.fromkeys(key for state in found for key in state)
            mine = {}
            for key in keys:
                values = {p: s[key] for p, s in zip(bucket.params, found, strict=True) if key in s}
                first = next(iter(values.values()))
                is_whole = isinstance(first, Tensor) and first.dim() > 0
                if is_whole:
                    mine[key] = bucket.shard_of(values)
                else:
                    mine[key] = _copied(first)
            if not bucket.is_half:
                mine.pop("master", None)
            elif "master" in mine:
                bucket.shard.copy_(mine["master"])
            if bucket.has_master:
                mine.pop("master", None)
            set_state_of(self._inner, bucket.shard, mine)
            if bucket.is_half:
                bucket.gather()


class ZeroAdamW(FlatZeroOptimizer):
    """torch.optim.AdamW, sharded; made by zero.shard()."""


class ZeroSGD(FlatZeroOptimizer):
    """torch.optim.SGD, sharded; made by zero.shard()."""


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


def _hook(told: weakref.ref[FlatZeroOptimizer]) -> Callable[[Tensor], None]:
    def grad_arrived(param: Any) -> None:
        if (found := told()) is not None:
            found.grad_arrived(param)

    return grad_arrived


def _begin_step(state: dict[str, Any], rule: Rule, shard: Tensor) -> int:
    """Counts a step in torch's own state, which is made before the first; the step's number."""
    is_first = not state
    for name in rule.state_names:
        if state.get(name) is None:
            state[name] = torch.zeros_like(shard)
    if isinstance(rule, ops.SGD):
        return 1 if is_first else 2  # the first one alone is special
    step = state.setdefault("step", torch.tensor(0.0))
    step += 1
    return int(step)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
