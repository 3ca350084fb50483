"""A model as a sequence of named blocks: a rank's own blocks, and weights tied between ranks."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ringcomm.parallel.flat_collectives import all_gathered, device_of, local_of
from ringcomm.parallel.loss import parameters_of
from ringcomm.parallel.model.describe import describe
from ringcomm.parallel.model.refuse import Asked, refuse
from ringcomm.parallel.model.stage_part import StagePart
from ringcomm.parallel.pipeline.schedules import Log, Plan
from ringcomm.torch_names import base_of, children_of, unsafe_view

Blocks = Mapping[str, nn.Module] | Sequence[nn.Module] | nn.Sequential | nn.ModuleList


def named_blocks(blocks: Blocks) -> dict[str, nn.Module]:
    """The blocks by their names in state dicts; raises TypeError or ValueError if invalid."""
    if isinstance(blocks, nn.Sequential | nn.ModuleList):
        found: dict[str, Any] = dict(children_of(blocks))
    elif isinstance(blocks, Mapping):
        found = dict(blocks)
    elif isinstance(blocks, Sequence):
        found = {str(idx): block for idx, block in enumerate(blocks)}
    else:
        raise TypeError(
            "blocks must be an nn.Sequential, a list of modules or a dict of modules by name;"
            f" got {type(blocks).__name__}"
        )
    if not found:
        raise ValueError("a pipeline needs at least one block")
    for name, block in found.items():
        if not isinstance(block, nn.Module):
            raise TypeError(f"block {name} must be an nn.Module, got {type(block).__name__}")
        for outer in accumulate(name.split(".")[:-1], lambda *parts: ".".join(parts)):
            if outer in found:
                raise ValueError(
                    f"the name of block {name} begins with that of block {outer}, which would"
                    " contain it: rename one"
                )
    return found


def cut_blocks(
    named: Mapping[str, nn.Module], costs: Sequence[float] | None, num_stages: int
) -> list[list[str]]:
    """The names of each stage's blocks, by costs or an estimate of them; see cut()."""
    if costs is not None and len(costs) != len(named):
        raise ValueError(
            f"costs must have one element per block, got {len(costs)} for {len(named)} blocks"
        )
    found = default_costs(list(named.values())) if costs is None else costs
    names = list(named)
    return [names[blocks.start : blocks.stop] for blocks in cut(found, num_stages)]


def part_of(
    named: Mapping[str, nn.Module],
    owned: Sequence[Sequence[str]],
    group: dist.ProcessGroup,
) -> StagePart:
    """This rank's blocks, of all blocks and the names of those that each rank owns."""
    part = StagePart(group, named.values())
    for name in owned[group.rank()]:
        parent: nn.Module = part
        *outer, last = name.split(".")
        for key in outer:
            if key not in children_of(parent):
                parent.add_module(key, nn.Module())
            parent = parent.get_submodule(key)
        parent.add_module(last, named[name])
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, block in named.items():
        for param, weight in describe(block).weights.items():
            names_of.setdefault(param, []).append(f"{name}.{weight.name}")
    weights = describe(part).weights
    part.first_names = {weight.name: names_of[param][0] for param, weight in weights.items()}
    part.names_of_tied = [names for names in names_of.values() if len(names) > 1]
    params_of = [{p for name in names for p in named[name].parameters()} for names in owned]
    for param in names_of:  # in one order on all ranks, which exchange one after the other
        ranks = [rank for rank, params in enumerate(params_of) if param in params]
        if len(ranks) > 1 and group.rank() in ranks:
            part.tied[param] = ranks
    return part


def wrap_stages(
    part: StagePart,
    modules: "Mapping[int, StageModule]",
    wrap: Callable[[nn.Module], nn.Module] | None,
    plan: Plan,
) -> dict[int, nn.Module]:
    """Wraps this rank's stages for data parallelism; may replace their parameters. Collective."""
    before, own = set(part.parameters()), [set(m.parameters()) for m in modules.values()]
    is_tied = sum(map(len, own)) > len(before)
    names = {param: name for name, param in part.named_parameters()}
    tied = {names[param]: ranks for param, ranks in part.tied.items()}
    wrapped = {s: wrap(m) if wrap else m for s, m in modules.items()}
    ends_tie = is_tied and before != set(part.parameters())  # as fully_shard does, in each stage
    if any(all_gathered(ends_tie, part.group)):
        raise ValueError(
            f"{plan.schedule} puts two stages with a tied parameter on one rank, and `wrap`"
            " replaced parameters, which ends the tie: use another schedule, such as 1f1b, or ZeRO"
            " stage 1 or 2 instead of fully_shard"
        )
    part.tied = {part.get_parameter(name): ranks for name, ranks in tied.items()}
    part.num_stages = len(modules)
    part.own(block for module in modules.values() for block in module.blocks)
    part.late = set(part.parameters() if plan.has_halves else part.tied)
    if plan.has_halves and any(isinstance(m, DistributedDataParallel) for m in wrapped.values()):
        raise ValueError(
            f"DistributedDataParallel does not see the gradients of {plan.schedule}, whose backward"
            " passes are split: average them after step(), or call zero.shard() on Pipeline.module"
        )
    return wrapped


def check_blocks(
    module: nn.Module, named: Mapping[str, nn.Module], owned: Sequence[Sequence[str]]
) -> None:
    """Raises TypeError or ValueError if a rank with some of the blocks cannot start.

    `owned` has the names of the blocks of each rank.
    """
    for rank, names in enumerate(owned):
        if not any(True for name in names for _ in named[name].parameters()):
            raise ValueError(
                f"rank {rank} would have no parameters, only {', '.join(names)}, and its optimizer"
                " would fail alone: use fewer ranks, other costs=, or join these blocks to others"
            )
    whole = nn.Module()
    children_of(whole).update(named)
    devices = {str(p.device) for p in module.parameters() if not p.is_meta}
    if len(devices) > 1:
        raise ValueError(
            f"the blocks are on several devices, {', '.join(sorted(devices))}: move them to one"
        )
    refuse(describe(whole), Asked("Pipeline", "Pipeline"))
    refuse(describe(module), Asked("stage", "Pipeline"))


class StageModule(nn.Module):
    """Calls blocks in turn; a returned tuple is the arguments of the next block.

    Its result is sent as a message.

    Attributes:
        recompute: whether only the blocks' inputs are kept.
        kwargs: for each micro-batch, keyword arguments of those blocks that have such parameters.
        micro_batch: the next one to run.
        log: what the stage computes, if that is recorded.
        writes_inputs: whether a block writes into its inputs. Those that need gradients are leaves
            here, which may not be written, and are copied then.
    """

    def __init__(self, blocks: Sequence[nn.Module], recompute: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.recompute = recompute
        self._names = [set(parameters_of(block.forward)) for block in blocks]
        self.kwargs: Sequence[Mapping[str, Tensor]] = ()
        self.micro_batch = 0
        self.log: Log | None = None
        self.writes_inputs = False

    def forward(self, *inputs: Any) -> Any:
        """The last block's result."""
        value: Any = inputs
        if self.writes_inputs:
            value = tuple(x.clone() if x.is_leaf and x.requires_grad else x for x in inputs)
        given = self.kwargs[self.micro_batch] if self.kwargs else {}
        for block, names in zip(self.blocks, self._names, strict=True):
            args = value if isinstance(value, tuple) else (value,)
            kwargs: dict[str, Any] = {name: given[name] for name in given if name in names}
            if self.recompute and torch.is_grad_enabled():
                value = checkpoint(block, *args, use_reentrant=False, **kwargs)
            else:
                value = block(*args, **kwargs)
        return tuple(map(_as_message, value)) if isinstance(value, tuple) else _as_message(value)


def _as_message(value: Any) -> Any:
    """A contiguous tensor that is not a view, copied only if needed: torch detaches it in place."""
    if not isinstance(value, Tensor):
        return value
    value = value.contiguous()
    return value if base_of(value) is None else unsafe_view(value, value.shape)


def cut(costs: Sequence[float], num_stages: int) -> list[range]:
    """Cuts a sequence of blocks into stages such that the largest stage is as small as possible.

    Exact, by dynamic programming. Among cuts with the same largest stage it selects the one with
    the smallest second largest stage, and so on.

    Args:
        costs: one per block, in any unit, not negative; preferably times.
        num_stages: the number of stages; each gets at least one block.

    Returns:
        The range of blocks of each stage, in order.

    Raises:
        ValueError: there are fewer blocks than stages, or a cost is negative or not finite.
    """
    if num_stages < 1:
        raise ValueError(f"num_stages must be 1 or more, got {num_stages}")
    if len(costs) < num_stages:
        raise ValueError(
            f"{num_stages} stages need {num_stages} blocks or more, and the model has {len(costs)}:"
            " cut it into more blocks, or use fewer ranks or stages per rank"
        )
    for block_idx, cost in enumerate(costs):
        if not 0 <= cost < math.inf:
            raise ValueError(f"costs must not be negative, got {cost} for block {block_idx}")
    sums = [0.0, *accumulate(costs)]
    # Keyed by the number of blocks in the stages so far: stage sizes, descending, and their begins.
    best: dict[int, tuple[list[float], list[int]]] = {0: ([], [])}
    for _ in range(num_stages):
        best = {
            end: min(
                (sorted([*sizes, sums[end] - sums[begin]], reverse=True), [*begins, begin])
                for begin, (sizes, begins) in best.items()
                if begin < end
            )
            for end in range(min(best) + 1, len(sums))
        }
    begins = best[len(costs)][1]
    return [range(begin, end) for begin, end in pairwise([*begins, len(costs)])]


def default_costs(blocks: Sequence[nn.Module]) -> list[float]:
    """An estimate: 1 plus the elements of a block's parameters, without embedding tables.

    A weight costs six operations per token, a table none; a head that is tied to a table counts.
    """
    costs, kinds = [], nn.Embedding | nn.EmbeddingBag
    for block in blocks:
        tables = {module.weight for module in block.modules() if isinstance(module, kinds)}
        costs.append(1.0 + sum(p.numel() for p in block.parameters() if p not in tables))
    return costs


# ---- weights tied between stages on several ranks


def copy_tied_from_first(part: StagePart) -> None:
    """Copies values from the first rank that has them to the others."""
    for param, ranks in part.tied.items():
        values = _exchange(param.detach(), ranks, part.group)
        with torch.no_grad():
            param.copy_(values[0])


@contextmanager
def tied_gradients_summed(part: StagePart) -> Iterator[None]:
    """Sums gradients that are computed inside over all ranks; earlier ones are already sums.

    A gradient that no rank has stays None.
    """
    before = {param: param.grad for param in part.tied}
    for param in before:
        param.grad = None
    try:
        yield
    except BaseException:
        for param, grad in before.items():
            param.grad = grad
        raise
    for param, ranks in part.tied.items():
        if not param.requires_grad:
            param.grad = before[param]
            continue
        device = device_of(part.group)  # that on the CPU is read without a wait for others
        has_grad = torch.tensor([param.grad is not None], dtype=torch.uint8, device=device)
        if any(_exchange(has_grad, ranks, part.group)):
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            # Data-parallel ranks of other stages have the same part of a DTensor.
            mine = local_of(param.grad)
            first, *others = _exchange(mine, ranks, part.group)
            mine.copy_(sum(others, start=first.clone()))
        if (earlier := before[param]) is not None:
            param.grad = earlier if param.grad is None else earlier.add_(param.grad)


def _exchange(mine: Tensor, ranks: Sequence[int], group: dist.ProcessGroup) -> list[Tensor]:
    """Gathers all ranks' tensors, in rank order."""
    mine = mine.contiguous()
    found = [mine if r == group.rank() else torch.empty_like(mine) for r in ranks]
    ops = []
    for rank, theirs in zip(ranks, found, strict=True):
        if rank != group.rank():
            ops.append(dist.P2POp(dist.isend, mine, group=group, group_peer=rank))
            ops.append(dist.P2POp(dist.irecv, theirs, group=group, group_peer=rank))
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return found
