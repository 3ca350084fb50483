"""One norm over every mesh of ranks, beside the norm of the whole gradient in float64.

Gradients are made, not computed: each rank gets its part of the same whole ones, so that a norm
which counts an element twice, or not at all, has nowhere to hide.
"""

from __future__ import annotations

import math
import zlib
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from cases import quick
from ranks import in_ranks, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from ringcomm.nn import (
    ColumnParallelLinear,
    MixtureOfExperts,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from ringcomm.parallel import clip_grad_norm_, expert, pipeline, tensor
from ringcomm.parallel.clip import LossScale
from ringcomm.parallel.expert.local_experts import expert_parallel_modules
from ringcomm.parallel.model.describe import describe

DIM, VOCAB = 6, 11
NORMS = (2.0, math.inf, 1.0, 3.0)


class Case(NamedTuple):
    """Sizes of the axes, outermost first; what data parallelism does with what it replicates."""

    pp: int = 1
    dp: int = 1
    ep: int = 1
    tp: int = 1
    sharded: bool = False
    num_experts: int = 3
    tp_in_experts: bool = False


class Attention(nn.Module):
    """Keys are copied where there are more ranks than their two heads."""

    def __init__(self, tp: dist.ProcessGroup, dim: int | None) -> None:
        super().__init__()
        shares = tensor.share_heads(4, 2, tp.size())
        self.norm = nn.LayerNorm(DIM)
        unit = 3 * shares.num_together
        self.q = ColumnParallelLinear(DIM, 12, group=tp, shard_multiple=unit)
        self.k = ColumnParallelLinear(
            DIM, 6, group=tp, shard_multiple=3, num_replicas=shares.num_replicas
        )
        self.o = RowParallelLinear(12, DIM, group=tp, shard_multiple=unit, sequence_dim=dim)


class Expert(nn.Module):
    def __init__(self, tp: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 5) if tp is None else ColumnParallelLinear(DIM, 5, group=tp)


def make_blocks(case: Case, groups: dict[str, Any]) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    tp = groups["tp"]
    embed = VocabParallelEmbedding(VOCAB, DIM, group=tp)
    head = ColumnParallelLinear(DIM, VOCAB, bias=False, group=tp)
    head.weight = embed.weight
    mixture = nn.Sequential(
        nn.LayerNorm(DIM),
        MixtureOfExperts(
            DIM,
            lambda: Expert(tp if case.tp_in_experts else None),
            case.num_experts,
            1,
            group=groups["ep"],
            replica_group=groups["dp"] if case.dp > 1 else None,
        ),
    )
    attention = Attention(tp, None if case.sharded else 0)  # fully_shard refuses shared tokens
    blocks = {"embed": embed, "attention": attention, "mixture": mixture}
    return blocks | {"norm": nn.LayerNorm(DIM), "head": head}


def whole_gradient(name: str, shape: Any, dtype: torch.dtype) -> Tensor:
    seed = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(*shape, generator=seed, dtype=torch.float64).to(dtype)


def give_gradients(
    model: nn.Module, dtype: torch.dtype, scale: float = 1.0, poisoned: str | None = None
) -> None:
    """To each parameter this rank's part of the gradient of its name."""
    weights = describe(model).weights
    splits = {p: weight.split for p, weight in weights.items() if weight.split is not None}
    for name, param in model.named_parameters():
        shape, split = list(param.shape), splits.get(param)
        if split is not None:
            shape[split.dim] = split.total
        key = "embed.weight" if name == "head.weight" else name  # the same one
        grad = whole_gradient(key, shape, dtype) * scale
        if key == poisoned:
            grad.view(-1)[0] = math.nan
        grad = grad if split is None else split.cut(grad)
        if isinstance(param, DTensor):
            grad = distribute_tensor(grad, param.device_mesh, param.placements)
        param.grad = grad.clone()


def expected_norm(case: Case, norm_type: float, dtype: torch.dtype) -> float:
    """Of all gradients of the whole model, each once."""
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (VOCAB, DIM)}
    shapes["mixture.1.router.weight"] = (case.num_experts, DIM)
    for name in ("attention.norm", "mixture.0", "norm"):
        shapes |= {f"{name}.weight": (DIM,), f"{name}.bias": (DIM,)}
    for name, sizes in {"q": (12, DIM), "k": (6, DIM), "o": (DIM, 12)}.items():
        shapes |= {f"attention.{name}.weight": sizes, f"attention.{name}.bias": sizes[:1]}
    for idx in range(case.num_experts):
        name = f"mixture.1.experts.{idx}.up"
        shapes |= {f"{name}.weight": (5, DIM), f"{name}.bias": (5,)}
    every = [whole_gradient(name, shape, dtype).flatten() for name, shape in shapes.items()]
    return float(torch.linalg.vector_norm(torch.cat(every).double(), norm_type))


class Whole(nn.Module):
    """What fully_shard takes; torch 2.11 takes no ModuleDict."""

    def __init__(self, blocks: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, block in blocks.items():
            self.add_module(name, block)


def make_model(case: Case) -> Any:
    sizes = {"pp": case.pp, "dp": case.dp, "ep": case.ep, "tp": case.tp}
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    groups = {name: mesh[name].get_group() for name in sizes}
    blocks = make_blocks(case, groups)
    if case.sharded:
        # What is replicated over all ranks of data parallelism, experts over those that have them.
        data = mesh["dp", "ep"]._flatten("data") if case.ep > 1 else mesh["dp"]
        whole = Whole(blocks)
        mine = set(expert.expert_parameters(whole).values())
        if mine and case.dp > 1:
            for layer in expert_parallel_modules(whole).values():
                for one in layer.values():
                    fully_shard(one, mesh=mesh["dp"])
            mine = set(expert.expert_parameters(whole).values())
        fully_shard(whole, mesh=data, ignored_params=mine)
        return whole
    if case.pp > 1:
        loss = nn.functional.mse_loss
        return pipeline.Pipeline(blocks, loss, num_microbatches=case.pp, group=groups["pp"])
    return nn.ModuleDict(blocks)


def check(rank: int, case: Case, dtype: torch.dtype) -> list[float]:
    made = make_model(case)
    model: nn.Module = made if isinstance(made, nn.Module) else made.module
    model.to(dtype)
    norms = []
    for norm_type in NORMS:
        give_gradients(model, dtype)
        expected = expected_norm(case, norm_type, dtype)
        before = {name: local(p.grad).clone() for name, p in model.named_parameters()}
        norm = clip_grad_norm_(made, 0.5, norm_type=norm_type, error_if_nonfinite=True)
        assert float(norm) == pytest.approx(expected, rel=1e-6 if dtype != torch.float64 else 1e-12)
        for name, param in model.named_parameters():
            clipped = before[name].double() * (0.5 / (expected + 1e-6))
            torch.testing.assert_close(local(param.grad), clipped.to(dtype))
        norms.append(float(norm))
    give_gradients(model, dtype, 1e-3)
    assert float(clip_grad_norm_(made, 1.0)) < 1  # and nothing was changed
    give_gradients(model, dtype, poisoned="embed.weight")  # which some ranks alone have
    for norm_type in NORMS:
        with pytest.raises(RuntimeError, match="the norm of the gradients is nan"):
            clip_grad_norm_(made, 0.5, norm_type=norm_type, error_if_nonfinite=True)
    assert math.isnan(clip_grad_norm_(made, 0.5))
    model.zero_grad()
    with pytest.raises(RuntimeError, match="no rank has a gradient to clip"):
        clip_grad_norm_(made, 0.5)
    return norms


def local(grad: Any) -> Any:
    return grad.to_local() if isinstance(grad, DTensor) else grad


CASES = {
    "pp2 tp2": Case(pp=2, tp=2),
    "ep2 tp2": Case(ep=2, tp=2),
    "ep2 tp2, both in experts, a rank without any": Case(
        ep=2, tp=2, tp_in_experts=True, num_experts=1
    ),
    "ep2 tp2, both in experts": Case(ep=2, tp=2, tp_in_experts=True),
    "pp2 ep2": Case(pp=2, ep=2),
    "dp2 tp2": Case(dp=2, tp=2),
    "dp2 tp2, sharded": Case(dp=2, tp=2, sharded=True),
    "dp2 ep2, sharded": Case(dp=2, ep=2, sharded=True),
    "tp4, copied heads": Case(tp=4),
    "pp4": Case(pp=4),
}


QUICK = (
    *("pp2 tp2", "pp2 ep2", "dp2 tp2", "dp2 ep2, sharded", "tp4, copied heads"),
    "ep2 tp2, both in experts, a rank without any",
)


@pytest.mark.parametrize("name", quick(CASES, *QUICK))
def test_the_norm_of_one_process(name: str) -> None:
    case = CASES[name]
    world_size = case.pp * case.dp * case.ep * case.tp
    for dtype in (torch.float32, torch.bfloat16) if name == "dp2 tp2" else (torch.float32,):
        results = run_ranks(world_size, check, case, dtype)
        assert all(norms == results[0] for norms in results)


@in_ranks(2)
def test_refusals(rank: int) -> None:
    groups = {"ep": dist.group.WORLD, "tp": dist.new_subgroups(1)[0]}
    alone = make_blocks(Case(), groups | {"ep": groups["tp"]})
    pipe = pipeline.Pipeline(alone, nn.functional.mse_loss, num_microbatches=2)
    mine: Any = next(iter(pipe.module.children()))
    give_gradients(mine, torch.float32)
    before = next(mine.parameters()).grad.clone()
    for piece in (mine, nn.ModuleDict(alone)):
        with pytest.raises(ValueError, match="on other ranks: pass the Pipeline"):
            clip_grad_norm_(piece, 1.0)
    with pytest.raises(TypeError, match="needs the model or its Pipeline"):
        clip_grad_norm_(pipe.parameters(), 1.0)
    with pytest.raises(TypeError, match="needs the model or its Pipeline"):
        clip_grad_norm_(torch.optim.SGD(pipe.parameters(), 1.0), 1.0)
    with pytest.raises(ValueError, match="norm_type must be a positive number"):
        clip_grad_norm_(pipe, 1.0, norm_type=0)
    assert torch.equal(before, next(mine.parameters()).grad)


class OwnNorm(torch.optim.SGD):
    def clip_grad_norm_(self, max_norm: float, **options: Any) -> tuple[float, dict[str, Any]]:
        return max_norm, options


def test_an_optimizer_that_clips_is_asked() -> None:
    optimizer = OwnNorm([nn.Parameter(torch.zeros(1))], 1.0)
    found: Any = clip_grad_norm_(optimizer, 2.0, error_if_nonfinite=True)
    assert found == (2.0, {"error_if_nonfinite": True})


def test_a_loss_scale_that_overflows_in_every_step_stays_positive() -> None:
    scale = LossScale("dynamic")
    for _ in range(2000):
        scale.update(has_overflow=True)
    assert scale.value == LossScale.least_value > 0
