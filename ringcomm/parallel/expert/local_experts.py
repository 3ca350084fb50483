"""The experts of one rank, and their gradients under data parallelism."""

import weakref
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ringcomm import torch_names
from ringcomm.backend import resolve_group
from ringcomm.ops.fused_update import shard_range
from ringcomm.parallel.expert.dispatch import (
    DispatchPlan,
    combine,
    counts_of,
    dispatch,
    plan_dispatch,
    rows_of_tokens,
    sums_of_rows,
)
from ringcomm.parallel.flat_collectives import largest_of
from ringcomm.parallel.model.cut import find_trainer
from ringcomm.parallel.model.saving import refuse_copy, refuse_part
from ringcomm.parallel.tensor.splits import Split, load_parts, save_parts
from ringcomm.parallel.torch_checks import register_part
from ringcomm.torch_names import all_reduce_coalesced_, foreach_div_, version_of

_AVERAGED = "_ringcomm_averaged"


class LocalExperts(nn.Module):
    """This rank's experts, named by their numbers in the whole layer; names differ between ranks.

    If the layer has weights of all experts, stacked, they are rows of these, under their names.

    Indexed and iterated like a torch.nn.ModuleDict. It is none, because fully_shard of torch 2.11
    refuses a container also if it has a forward().

    Args:
        experts: all experts of the layer, in order, the same on all ranks; may be an iterator.
        num_experts: their number.
        group: the expert-parallel ranks; each has a contiguous range by shard_range().
        replica_group: the ranks with the same experts as this one; None if there are no others.

    Attributes:
        range: the experts [begin, end) of this rank.
        is_dry: whether forward() only returns the shape and dtype of its result, and calls nothing.
    """

    is_dry = False

    __deepcopy__ = __reduce_ex__ = refuse_copy
    _save_to_state_dict, _load_from_state_dict = save_parts, load_parts  # type: ignore[assignment]

    def __init__(
        self,
        experts: Iterable[nn.Module],
        num_experts: int,
        group: dist.ProcessGroup,
        replica_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.splits: dict[str, Split] = {}  # of stacked weights, by name
        register_part(self)
        self.num_experts, self.group, self.replica_group = num_experts, group, replica_group
        self.range = shard_range(num_experts, group.size(), group.rank())
        if group.size() > 1:
            refuse_part(self)
        seen: set[nn.Parameter] = set()
        for idx, expert in enumerate(experts):
            params = set(expert.parameters())
            if seen & params:
                raise ValueError(
                    f"expert {idx} shares a parameter with another expert: give each its own copy"
                )
            seen |= params
            if self.range[0] <= idx < self.range[1]:
                self.add_module(str(idx), expert)

    def _experts(self) -> dict[str, nn.Module]:
        """By number; one without parameters may be several of them."""
        return {
            idx: made for idx, made in torch_names.children_of(self).items() if made is not None
        }

    def __getitem__(self, key: str) -> nn.Module:
        return self._experts()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._experts())

    def __len__(self) -> int:
        return len(self._experts())

    def keys(self) -> KeysView[str]:
        """The experts' numbers, as text."""
        return self._experts().keys()

    def items(self) -> ItemsView[str, nn.Module]:
        """Numbers and experts."""
        return self._experts().items()

    def values(self) -> ValuesView[nn.Module]:
        """The experts."""
        return self._experts().values()

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Each token's weighted sum of the results of its experts, which may be on any rank.

        Args:
            tokens: (tokens, width), any number of them. Under autocast they are sent in its dtype,
                as for linear layers.
            chosen: (tokens, choices), int64: the experts' numbers; num_experts for no expert.
            weights: (tokens, choices), of the results. Sums are in float32 for 16-bit weights.

        Returns the shape and dtype of the tokens.

        Raises ValueError on all ranks if the dtype of tokens, or the need for gradients, differs
        between ranks. Collective, and so is its backward pass, on all ranks if some rank needs it.
        """
        self._check_ddp()
        trained = (tokens, weights, *self.parameters())
        is_grad_needed = any(tensor.requires_grad for tensor in trained)
        if self.is_dry:  # no leaf, which may not be written
            zeros = torch.zeros(tokens.shape, dtype=tokens.dtype, device=tokens.device)
            return zeros.requires_grad_(is_grad_needed).clone()
        kind, num_choices = tokens.device.type, chosen.shape[1]
        is_cast = torch.is_autocast_enabled(kind) and tokens.dtype != torch.float64
        wire = tokens.to(torch.get_autocast_dtype(kind)) if is_cast else tokens
        plan = plan_dispatch(
            counts_of(chosen, self.num_experts + 1)[:-1],
            wire.dtype,
            self.group,
            is_grad_needed=is_grad_needed,
        )
        slots = chosen.flatten().argsort(stable=True)[: sum(plan.sent)]
        results = self._run(rows_of_tokens(wire, slots, num_choices), plan)
        wide = weights.to(torch.promote_types(weights.dtype, torch.float32))
        weighted = results * wide.reshape(-1).index_select(0, slots)[:, None]
        return sums_of_rows(weighted, slots, len(tokens), num_choices).to(tokens.dtype)

    def _run(self, rows: Tensor, plan: DispatchPlan) -> Tensor:
        """Sends each row through its expert on any rank; returns rows in the same order and dtype.

        Every expert runs, even on no rows, so that its parameters have gradients in every step.
        """
        received, of_experts = dispatch(rows, plan)
        results = []
        for (idx, expert), part in zip(self.items(), of_experts, strict=True):
            result = expert(part)
            if result.shape != part.shape:
                raise ValueError(
                    f"expert {idx} must return the shape of its tokens, {tuple(part.shape)}, got"
                    f" {tuple(result.shape)}"
                )
            results.append(result.to(rows.dtype))
        return combine(results, received, plan)

    def _check_ddp(self) -> None:
        if self.group.size() == 1 or torch_names.active_ddp() is None:
            return
        if not all(torch_names.is_ignored_in_ddp(param) for param in self.parameters()):
            raise RuntimeError(
                "DistributedDataParallel has replaced this rank's experts with those of rank 0"
                " and would average their gradients: call"
                " ringcomm.parallel.expert.ignore_in_ddp(model) before"
            )

    def extra_repr(self) -> str:
        """Which experts of how many."""
        return f"{self.range[0]}:{self.range[1]} of {self.num_experts}"


def expert_parallel_modules(model: nn.Module) -> dict[str, LocalExperts]:
    """The expert-parallel modules of a model, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, LocalExperts) and module.group.size() > 1
    }


@contextmanager
def dry_experts(model: nn.Module) -> Iterator[None]:
    """A context for forward passes on zeros that the ranks with the other experts may not make."""
    layers = expert_parallel_modules(model).values()
    for layer in layers:
        layer.is_dry = True
    try:
        yield
    finally:
        for layer in layers:
            layer.is_dry = False


def check_data_ranks(
    layers: Mapping[str, LocalExperts], group: dist.ProcessGroup, system: str
) -> None:
    """Raises ValueError unless the ranks of sharded experts and their replicas are the group's."""
    for name, experts in layers.items():
        num_replicas = 1 if experts.replica_group is None else experts.replica_group.size()
        if experts.group.size() * num_replicas != group.size():
            raise ValueError(
                f"{system} is given {group.size()} data-parallel ranks, but {name or 'the model'}"
                f" has experts over {experts.group.size()} ranks in {num_replicas} replicas: give"
                f" the layer its replica_group, and {system} the group of all ranks with different"
                " tokens"
            )


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a model's experts on this rank, by name.

    Systems that average or shard the other parameters must ignore these, as with
    fully_shard(ignored_params=...).
    """
    return {
        name: param
        for prefix, experts in expert_parallel_modules(model).items()
        for name, param in experts.named_parameters(prefix)
    }


def ignore_in_ddp(model: nn.Module) -> None:
    """Makes DistributedDataParallel ignore a model's experts; call it before, on the same model.

    Their gradients need average_gradients(), or a separate optimizer.
    """
    names = [*expert_parameters(model), *torch_names.ignored_in_ddp(model)]
    for prefix, experts in expert_parallel_modules(model).items():
        names += [name for name, _ in experts.named_buffers(prefix)]
    torch_names.ignore_in_ddp(model, names)


def average_gradients(
    model: nn.Module,
    group: dist.ProcessGroup | None = None,
    *,
    mesh: DeviceMesh | None = None,
) -> None:
    """Averages gradients over the ranks; call it between backward() and step().

    The gradient of a replicated parameter becomes the mean over the ranks. The gradient of an
    expert already is the sum over the tokens of all expert-parallel ranks: it is divided by the
    number of ranks, and summed over the ranks with the same expert.

    Args:
        model: a model with or without experts. With DistributedDataParallel and fully_shard, which
            average the other parameters themselves, only experts are averaged here.
        group: all ranks with different tokens; default: DistributedDataParallel's, or the default
            group.
        mesh: a one-dimensional DeviceMesh of them, instead of a group.

    Raises:
        ValueError: a layer's group and replica_group do not make up the group; nothing was written.
        RuntimeError: gradients of experts were already averaged, as zero.shard() does, or a
            backward pass added to averaged ones: they would be divided twice. Nothing was written.

    Collective: over the group 2(N-1)/N of the replicated gradients' bytes and of a byte for each
    parameter, over a replica_group likewise of its experts'; nothing where experts have no replica.
    A gradient that only some ranks have counts as 0 on the others. Accumulate first, and call it
    once after the last backward().
    """
    ddp: Any = model if isinstance(model, DistributedDataParallel) else None
    if ddp is not None and group is None and mesh is None:
        group = ddp.process_group
    resolved = resolve_group(group, mesh)
    layers = expert_parallel_modules(model)
    check_data_ranks(layers, resolved, "average_gradients()")
    params = list(model.parameters())
    if layers and any(isinstance(p, DTensor) and find_trainer(p) is not None for p in params):
        raise RuntimeError(
            "the gradients are in the optimizer of zero.shard(), which averages them: leave"
            " average_gradients() out"
        )
    of_experts = {param for experts in layers.values() for param in experts.parameters()}
    handled = [*(of_experts if ddp is not None else params)] if layers else []
    if any(_has_average(param.grad) for param in handled):
        raise RuntimeError(
            "average_gradients() has already averaged these gradients: call it once per step,"
            " after the last backward() and before step() and zero_grad()"
        )
    if ddp is None:
        others = [param for param in params if param not in of_experts]
        replicated = [param for param in others if not isinstance(param, DTensor)]
        _average(replicated, resolved)
    done: set[nn.Parameter] = set()
    for experts in layers.values():
        own = [param for param in experts.parameters() if param not in done]
        done.update(own)  # layers may share experts
        if experts.replica_group is not None:
            _average(own, experts.replica_group)
        for param in own:
            if param.grad is not None:
                param.grad.div_(experts.group.size())
    for param in handled:
        _note_average(param)


def _has_average(grad: Tensor | None) -> bool:
    return grad is not None and getattr(grad, _AVERAGED, None) == version_of(grad)


def _note_average(param: nn.Parameter) -> None:
    """Marks an averaged gradient with its version, which zero_grad() changes."""
    if param.grad is None or not param.requires_grad:
        return
    setattr(param.grad, _AVERAGED, version_of(param.grad))
    if not hasattr(param, _AVERAGED):
        setattr(param, _AVERAGED, True)
        param.register_hook(partial(_before_accumulation, weakref.ref(param)))


def _before_accumulation(of: weakref.ref[nn.Parameter], _: Tensor) -> None:
    grad: Any = getattr(of(), "grad", None)
    if _has_average(grad):
        setattr(grad, _AVERAGED, version_of(grad) + 1)


def _average(params: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Averages the gradients that any rank of the group has; missing ones count as zeros."""
    trained = [param for param in params if param.requires_grad]
    if not trained:
        return
    has_grad = largest_of([param.grad is not None for param in trained], [group], torch.uint8)
    grads = []
    for param, is_there in zip(trained, has_grad, strict=True):
        if is_there:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            grads.append(param.grad)
    all_reduce_coalesced_(grads, group)
    if grads:
        foreach_div_(grads, group.size())
