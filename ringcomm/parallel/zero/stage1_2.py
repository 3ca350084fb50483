"""ZeRO stages 1 and 2: replicated weights, optimizer state in shards of flat buckets."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from ringcomm import ops
from ringcomm.ops.fused_update import Rule, rule_of
from ringcomm.parallel.flat_collectives import device_of, fuses_updates, with_own_storage
from ringcomm.parallel.gradient_placeholder import weakly
from ringcomm.parallel.model.describe import describe, start_equal
from ringcomm.parallel.model.stage_part import StagePart
from ringcomm.parallel.model.units import materialize
from ringcomm.parallel.zero.bucket import Bucket
from ringcomm.parallel.zero.bucket_plan import plan_buckets
from ringcomm.parallel.zero.inner import Given, Grads, Inner, InnerSteps, data_was_set
from ringcomm.parallel.zero.optimizer import ZeroOptimizer
from ringcomm.parallel.zero.reducer import GradientReducer
from ringcomm.torch_names import foreach_add_, tree_map_only


class _FlatSteps(InnerSteps):
    """Owners have whole weights in their shards."""

    def _run_whole(self, inner: Inner, method: str, grads: Grads, factor: float) -> None:
        parts = {p: part for p in grads if (part := self._optimizer.part_of(p)).numel()}
        self._run_owned(inner, method, parts, grads, factor)


class FlatZero(ZeroOptimizer):
    """ZeRO stages 1, which keeps unsharded gradients until the step, and 2, which keeps shards.

    Each weight has a part of its bucket's shard, perhaps empty. torch's AdamW and SGD have states
    in `_buffers` like the shard: one operator updates neighbours of one rule and one step.
    Optimizers of other classes run on the parts.
    """

    _inner_class = _FlatSteps

    def __init__(self, given: Given) -> None:
        """Collective: a broadcast per bucket."""
        described, model, group, options = (
            given.model,
            given.model.module,
            given.group,
            given.options,
        )
        if described.has_meta:
            materialize(model, [*described.weights], device_of(group))
            described = describe(model)  # of other buffers
        start_equal(described, [group], over_data=True)
        super().__init__(given._replace(model=described))
        self.inner.share_out({p: w.data_group(group) for p, w in described.weights.items()})
        self.stage = stage = given.stage
        dtype = options.param_dtype
        by_optimizer = [inner.groups for inner in given.optimizers]
        plans = plan_buckets(
            described, by_optimizer, stage, options, self.inner.owner_of, group.size()
        )
        self._buckets = [
            Bucket(plan, group, dtype, options.grad_dtype, keeps_buffer=stage == 1)
            for plan in plans
        ]
        self._bucket_of = {param: bucket for bucket in self._buckets for param in bucket.params}
        if dtype is not None:
            _compute_in(model, dtype)
        late = frozenset(model.late) if isinstance(model, StagePart) else frozenset()
        self._reducer = GradientReducer(
            self._buckets,
            group,
            self.all_params(),
            late,
            reduces=stage == 2,
            defers=bool(described.experts),
        )
        if isinstance(model, StagePart) and stage == 2:
            model.after_backward.append(weakly(self._reducer.join))
        # Facts of this step that all ranks share, from _agree().
        self._present: set[nn.Parameter] = set()
        self._unreduced: list[Bucket] = []
        self._buffers: dict[Bucket, dict[str, Tensor]] = {bucket: {} for bucket in self._buckets}
        # Offloaded optimizers keep masters with their states.
        offloaded = {p for p, inner in self.inner.by_param.items() if inner.is_offloaded}
        masters = {
            param: self.part_of(param)
            for param, bucket in self._bucket_of.items()
            if param in offloaded and bucket.has_master and self.inner.updates(param)
        }
        for bucket in self._buckets:
            if bucket.params[0] in offloaded:
                bucket.offload()
        self.inner.place_offloaded()
        for param, master in masters.items():
            self.set_state_of(param, {"master": master})

    def part_of(self, param: Any) -> Tensor:
        """See ZeroOptimizer."""
        bucket = self._bucket_of[param]
        part = bucket.shard[bucket.place_in_shard(param)]
        is_all = part.numel() == param.numel() and (bucket.is_whole or not param.numel())
        return part.view(param.shape) if is_all else part

    # ---- gradients

    def _check_memory_of(self, name: str, param: nn.Parameter) -> None:
        bucket = self._bucket_of.get(param)
        if bucket is None or bucket.has_weight(param):
            return
        is_moved = param.device != bucket.weights.device or param.dtype != bucket.weights.dtype
        if not is_moved and not param.is_shared():
            raise ValueError(data_was_set(name))
        raise ValueError(
            f"{name} was cast or moved after zero.shard(): move the model before. A Trainer moves"
            " its model, so make it before, too. torch.multiprocessing moves the tensors"
            " that it sends, so send clones"
        )

    def _set_sync(self, is_on: bool) -> None:
        self._reducer.reduces = is_on and self.stage == 2

    def _agree(self) -> bool:
        self._reducer.hooks.collect()
        found, present = self._reducer.agree(self.inner.option_bytes(self.param_groups))
        self._present = present.difference(self._buckets)
        self._unreduced = [bucket for bucket in self._buckets if bucket in present]
        return bool(found)  # also where only ranks with other experts have a gradient

    def _reduce(self) -> None:
        self._reducer.has_reduced = True
        for bucket in self._unreduced:
            bucket.reduce()
        self._unreduced = []

    def _shards(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        for bucket in self._buckets:
            if bucket.shard_grad is not None:
                for param in bucket.params:
                    yield param, bucket.shard_grad[bucket.place_in_shard(param)]

    def _forget_gradients(self) -> None:
        self._reducer.drop()
        self._reducer.forget()
        self._present, self._unreduced = set(), []
        for param in self._bucket_of:
            param.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients, for any `set_to_none`.

        Collective at stage 2 after a backward pass that has raised.
        """
        super().zero_grad()
        self._reducer.drop_all()

    def _change_mode(self, mode: str) -> None:
        self._see_written_weights()
        super()._change_mode(mode)
        for bucket in self._buckets:
            bucket.gather()
        for param in self._bucket_of:
            self._show_master(param)

    # ---- the update

    def _update(self, factor: float) -> None:
        self._see_written_weights()
        rules: dict[nn.Parameter, Rule | None] = {}
        on_device = any(bucket.weights.device.type != "cpu" for bucket in self._buckets)
        for inner in self.inner:
            for group in () if inner.is_whole else inner.groups:
                rule = rule_of(inner.optimizer, group)
                if on_device and (group.get("fused") or group.get("capturable")):
                    rule = None  # the number of the step is on the device
                rules |= dict.fromkeys(group["params"], rule)
        waiting = [bucket for bucket in self._unreduced if bucket.shard_grad is None]
        done = [bucket for bucket in waiting if self._updated_by_rules(bucket, rules, factor)]
        self._unreduced = [bucket for bucket in self._unreduced if bucket not in done]
        self._reduce()
        reduced = [bucket for bucket in self._buckets if bucket.shard_grad is not None]
        rest = [bucket for bucket in reduced if not self._updated_by_rules(bucket, rules, factor)]
        # Ranks may have different experts, and agree on a step of full weights.
        if rest or any(inner.is_whole for inner in self.inner):
            params = {p for bucket in rest for p in bucket.params if p in self._present}
            grads = {param: grad for param, grad in self._shards() if param in params}
            self._step_inner(grads, factor)
        for bucket in reduced:
            bucket.forget_gradients()
            bucket.gather()
        for param in self._present:
            self._show_master(param)

    def _runs(self, bucket: Bucket, rules: dict[nn.Parameter, Rule | None]) -> list[Any]:
        """(rule, number of the step, neighbours) of the weights that have a gradient."""

        def kind(param: nn.Parameter) -> Any:
            state = {} if rules.get(param) is None else self.kept_states.get(param, {})
            # Of SGD it only matters whether there was a step.
            num_steps = state.get("step", state.get("momentum_buffer") is not None)
            return param in self._present, rules.get(param), int(num_steps) + 1

        runs = groupby(bucket.params, kind)
        return [(rule, step, [*run]) for (has_grad, rule, step), run in runs if has_grad]

    def _updated_by_rules(
        self, bucket: Bucket, rules: dict[nn.Parameter, Rule | None], factor: float
    ) -> bool:
        """Updates a bucket by operators if they can; one operator if it is not reduced yet."""
        runs, device = self._runs(bucket, rules), bucket.weights.device
        grads = bucket.shard_grad
        if any(rule is None for rule, *_ in runs) or (grads is not None and device.type != "cpu"):
            return False
        if grads is None and (
            self.stage != 1
            or bucket.group is not self.group
            or not fuses_updates(self.group, device)
            or [params for *_, params in runs] != [bucket.params]
        ):
            return False
        for rule, step, params in runs:
            states = self._begun_states(bucket, params, rule)
            options: dict[str, Any] = {"optimizer": rule, "step": step, "grad_scale": factor}
            if grads is None:
                if bucket.has_master:
                    states["master"] = bucket.shard
                ops.reduce_scatter_update_all_gather_(
                    bucket.weights, bucket.whole_gradients(), states, group=self.group, **options
                )
            else:
                place = bucket.place_in_shard(params[0], params[-1])
                ops.optimizer_update_(
                    bucket.shard[place],
                    grads[place].to(bucket.shard.dtype),
                    {name: buffer[place] for name, buffer in states.items()},
                    **options,
                )
            if isinstance(rule, ops.AdamWStep):
                foreach_add_([self.kept_states[param]["step"] for param in params], 1)
        return True

    # ---- state

    def _begun_states(
        self, bucket: Bucket, params: Sequence[nn.Parameter], rule: Rule
    ) -> dict[str, Tensor]:
        """The buffers of a rule's states, with all states of the weights; missing ones are zeros.

        Users and load_state_dict() may have replaced states by other tensors.
        """
        buffers = self._buffers[bucket]
        for name in rule.state_names:
            if name not in buffers:
                buffers[name] = torch.zeros_like(bucket.shard)
        for param in params:
            state, place = self.kept_states.setdefault(param, {}), bucket.place_in_shard(param)
            for name in rule.state_names:
                own, value = buffers[name][place], state.get(name)
                if value is None:
                    state[name] = with_own_storage(own.zero_())
                elif value.data_ptr() != own.data_ptr():
                    state[name] = with_own_storage(own.copy_(value))
            if isinstance(rule, ops.AdamWStep) and not isinstance(state.get("step"), Tensor):
                step = float(state.get("step", 0))
                state["step"] = torch.full([], step, dtype=torch.float32, device="cpu")
        return {name: buffers[name] for name in rule.state_names}

    def master_of(self, param: Any) -> dict[str, Any]:
        """See ZeroOptimizer."""
        has_master = self._bucket_of[param].has_master and self.inner.updates(param)
        return {"master": self.part_of(param)} if has_master else {}

    def set_state_of(self, param: Any, state: dict[str, Any]) -> None:
        """See ZeroOptimizer."""
        bucket, given = self._bucket_of[param], dict(state)
        if bucket.has_master or bucket.weights.dtype == torch.float32:
            master = given.pop("master", None)
            if bucket.has_master and master is not None and self.inner.updates(param):
                self.part_of(param).copy_(master)
        super().set_state_of(param, given)
        self._show_master(param)

    def _show_master(self, param: nn.Parameter) -> None:
        """Adds a master to `state`, whose keys torch's flat state dicts have."""
        if not self._bucket_of[param].has_master or not self.inner.updates(param):
            return
        state, own = self.kept_states.setdefault(param, {}), self.part_of(param)
        if "master" not in state or state["master"].data_ptr() != own.data_ptr():
            state["master"] = with_own_storage(own)

    def range_of(self, param: Any, rank: int | None = None) -> tuple[int, int]:
        """See ZeroOptimizer."""
        return self._bucket_of[param].part_range(param, rank)

    def _see_written_weights(self) -> None:
        for bucket in self._buckets:
            bucket.see_written_weights()

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """See ZeroOptimizer."""
        self._see_written_weights()
        yield
        for bucket in self._buckets:
            if bucket.has_master:
                bucket.gather()


def _compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts frozen weights and the model's inputs to the dtype too, as fully_shard does."""
    for param in model.parameters():
        if param.is_floating_point() and param.dtype.itemsize > 1 and param.dtype != dtype:
            param.data = param.data.to(dtype)  # not float8, which has scales elsewhere
    model.register_forward_pre_hook(partial(_cast_inputs, dtype), with_kwargs=True)


def _cast_inputs(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> Any:
    return tree_map_only(
        Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, (args, kwargs)
    )
