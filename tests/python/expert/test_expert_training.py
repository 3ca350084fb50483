"""Models with sharded experts by all systems: rows of the harness of training.

One process computes every expert for every token (moe_models.DenseMixture).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from moe_models import Case, loss_of, on_ranks, row_of
from ranks import in_ranks
from rows import (
    EACH,
    STAGES,
    ZERO,
    Row,
    Training,
    adamw,
    cases_of,
    check,
    momentum,
    muon,
    overflows,
)
from rows import sgd as plain_sgd
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from whole_optimizers import AdaLomoOracle, Averaged
from zero_models import loss_of as mse_of

CLIP: dict[str, Any] = {"clip_grad_norm": 0.05}
FIXED, DYNAMIC = {"loss_scale": 64.0, **CLIP}, {"loss_scale": "dynamic", **CLIP}
TWICE: dict[str, Any] = {"accumulation_steps": 2}
FEW: dict[str, Any] = {"sizes": (4, 3)}  # tokens of two ranks
sgd = partial(plain_sgd, lr=0.2, weight_decay=0.01)


def of_all(model: nn.Module) -> Any:
    """Frozen weights too: a rank may have no others."""
    return torch.optim.SGD(model.parameters(), 0.3)


def adafactor(model: nn.Module) -> Any:
    return torch.optim.Adafactor(model.parameters(), 0.02, eps=(1e-6, 1e-3))


def adalomo(model: nn.Module) -> Any:
    return AdaLomoOracle([param for param in model.parameters() if param.requires_grad])


def averaged(model: nn.Module) -> Any:
    made = Averaged(model.parameters())
    made.train()
    return made


KINDS = {"adamw": adamw, "momentum": momentum, "muon": muon, "adafactor": adafactor}


# ---- programs


def between_meshes(case: Case, num_shards: int, in_parts: bool, made: Training) -> None:
    """Goes on over other numbers of ranks and another stage, and in one process."""
    made.train(range(2))
    other = partial(on_ranks, case, num_shards, lambda net: net)
    made.reload(made.next_stage(), on_ranks=other, in_parts=in_parts)
    made.train([2])
    made.reload(EACH)
    made.train([3])


def resumed(made: Training) -> None:
    """In a new model and optimizer."""
    made.train(range(2))
    made.reload()
    made.train(range(2, 4))


def with_no_sync(after_first: Callable[[Any], Any], made: Training) -> None:
    """In the first of two micro-batches, where a system has it."""
    for step in range(3):
        no_sync = getattr(made.optimizer, "no_sync", nullcontext)
        with nullcontext() if made.system == "infinity" else no_sync():
            made.backward(2 * step)
        made.backward(2 * step + 1)
        made.step()
        if step == 0:
            after_first(made.model)


# ---- models and losses


def only(*names: str) -> Callable[[Any], Any]:
    """Trains the weights with these parts of names alone."""

    def freeze(net: Any) -> Any:
        for own, param in net.named_parameters():
            param.requires_grad_(any(name in own for name in names))
        return net

    return freeze


def one_choice(net: Any) -> Any:
    """Equal probabilities: the first two experts get all tokens."""
    net.moe.router.weight.requires_grad_(False).zero_()
    return net


def frozen(name: str, net: Any) -> Any:
    net.get_submodule(name).requires_grad_(False)
    return net


def two_experts(net: Any) -> Any:
    """All tokens go to the first two, which are one rank's."""
    with torch.no_grad():
        net.first.bias.fill_(9)
        net.moe.router.weight.zero_()
        net.moe.router.weight[:2] = torch.tensor([[1.0], [0.8]])
    return net


def recomputed(net: Any, x: Tensor, y: Tensor) -> Tensor:
    """The layer once more, in a segment."""
    hidden = net.first(x).tanh()
    again = checkpoint(net.moe, hidden, use_reentrant=False)
    return loss_of(net, x, y) + again.square().sum() / 10


def of_some_layers(model: Any, x: Tensor, _: Tensor) -> Tensor:
    """One row is of a rank that uses neither the first layer nor the last one."""
    if len(x) == 1:
        return model.moe(nn.functional.pad(x, (0, 7))).square().mean()
    return model(x).square().mean()


def rows_of_some(step: int, rank: int, _: int) -> tuple[Tensor, Tensor]:
    """Rank 1 has one row in each second pass."""
    num = 1 if rank == 1 and step % 2 == 0 else 3
    x = torch.randn(num, 2, 5, generator=torch.Generator().manual_seed(10 * step + rank))
    return x, x


# ---- rows


def options_of(made: Training) -> dict[str, Any]:
    is_flat = made.system in STAGES[:2]
    return {"clip_grad_norm": 0.1} | (
        {"bucket_bytes": 300} if is_flat else {"units": [made.model.moe]}
    )


# What is trained; over how many ranks experts are.
PARTS: dict[str, tuple[Any, int]] = {
    "all": (lambda net: net, 2),
    # https://github.com/deepspeedai/DeepSpeed/issues/4808: ranks that wait for it.
    "an expert without tokens": (one_choice, 4),
    # https://github.com/NovaSky-AI/SkyRL/pull/1568, https://github.com/modelscope/ms-swift/issues/5512
    "frozen experts": (partial(frozen, "moe.experts"), 2),
    # A rank has none: https://github.com/ScienceOne-AI/DeepSeek-671B-SFT-Guide/issues/7.
    "only experts": (only("experts"), 4),
    "only router": (only("router"), 2),
    "only first": (only("first"), 2),
    "only last experts": (only("last", "experts"), 2),
}
CASE = Case(3, 2)
of_parts = partial(row_of, CASE, optimizer=of_all, options=options_of)
at_flat = partial(row_of, CASE, systems=STAGES[:2], options=options_of)
ALL = partial(with_no_sync, lambda _: None)
of_lomo = partial(row_of, program=resumed, optimizer=sgd, systems=("Lomo",))
of_adalomo = partial(row_of, program=resumed, optimizer=adalomo, systems=("AdaLomo",))
averages = partial(row_of, Case(4, 2), 2, sizes=(6, 4), optimizer=sgd, options=CLIP)

ROWS: dict[str, Row] = {
    # Gradients of experts have their size: https://github.com/deepspeedai/DeepSpeed/issues/6545,
    # https://github.com/deepspeedai/DeepSpeed/issues/5618; each counts once in the norm:
    # https://github.com/deepspeedai/DeepSpeed/issues/8475,
    # https://github.com/hpcaitech/ColossalAI/issues/2192.
    # Checkpoints go on elsewhere: https://github.com/pytorch/torchtitan/pull/732.
    **{
        f"{num} experts over {shards} of {ranks}, {system}, {kind}": row_of(
            Case(num, min(2, num)),
            shards,
            partial(between_meshes, Case(num, min(2, num)), other, in_parts),
            sizes=(2, 3, 1, 2)[:ranks],
            optimizer=KINDS[kind],
            systems=() if is_slow else (system,),
            slow=(system,) if is_slow else (),
            options={"bucket_bytes": 300, **options},
            num_parts=2,
        )
        for ranks, shards, other, num, system, kind, options, in_parts, is_slow in (
            (2, 2, 2, 4, "zero 1", "adamw", {}, True, False),
            (2, 2, 2, 4, "zero 2", "momentum", FIXED, False, False),
            (4, 2, 4, 3, "zero 1", "muon", FIXED, False, False),
            (4, 2, 4, 4, "zero 2", "adamw", FIXED, True, True),
            (4, 4, 2, 3, "zero 2", "muon", {}, False, False),  # a rank without experts
            (4, 2, 4, 4, "zero 2", "adafactor", {}, False, False),
            (2, 2, 2, 4, "zero 3", "adamw", {}, True, True),
            (2, 2, 2, 3, "zero 3", "momentum", FIXED, False, True),
            (4, 2, 4, 3, "zero 3", "muon", FIXED, False, True),
            (4, 2, 4, 4, "zero 3", "adamw", FIXED, True, False),
            (4, 4, 2, 3, "zero 3", "muon", {}, False, False),
            (4, 2, 4, 4, "zero 3", "adafactor", {}, False, False),
            (2, 2, 2, 3, "infinity", "adamw", {}, True, False),
            (4, 2, 4, 4, "infinity, file", "adamw", FIXED, True, True),
            (4, 4, 2, 3, "infinity, file", "adamw", FIXED, True, False),
            (2, 2, 2, 3, "infinity", "muon", {}, False, True),
            (4, 2, 4, 4, "infinity", "muon", FIXED, False, True),
            (4, 4, 2, 3, "infinity", "muon", {}, False, False),
        )
    },
    # One call: experts over 2 ranks, 2 replicas; at stage 3 also with replicas of the rest.
    **{
        f"mesh {dims}": row_of(
            Case(4, 2),
            2,
            sizes=(2, 2, 2, 2),
            optimizer=adamw,
            loss=mse_of,
            dims={**dims, "ep": 2},
            systems=systems,
        )
        for dims, systems in (
            ({}, ("parallelize zero 1", "parallelize zero 2")),
            ({"dp": 1, "fsdp": 4}, ("parallelize zero 3",)),
            ({"dp": 2, "fsdp": 2}, ("parallelize zero 3",)),
        )
    },
    **{
        name: of_parts(
            shards,
            ALL,
            prepare=prepare,
            systems=(ZERO[number % 4],),
            slow=tuple(system for system in ZERO if system != ZERO[number % 4]),
        )
        for number, (name, (prepare, shards)) in enumerate(PARTS.items())
    },
    # With Muon, of which experts have an owner among their replicas.
    "thawed": at_flat(
        2,
        partial(with_no_sync, lambda net: net.requires_grad_(True)),
        prepare=only("last"),
        optimizer=muon,
    ),
    **{
        f"only experts, {kind}": at_flat(4, ALL, prepare=only("experts"), optimizer=KINDS[kind])
        for kind in ("adamw", "muon")
    },
    **{
        f"two experts, {kind}": at_flat(
            2, ALL, prepare=lambda net: only("experts")(two_experts(net)), optimizer=KINDS[kind]
        )
        for kind in ("adamw", "muon")
    },
    # https://github.com/NVIDIA/Megatron-LM/pull/4851, https://github.com/NVIDIA-NeMo/Automodel/pull/935:
    # of its own, or for its experts. Divided by too few ranks:
    # https://github.com/NVIDIA/Megatron-LM/pull/5956.
    "a rank without tokens": at_flat(2, ALL, sizes=(4, 0, 2, 2), optimizer=adamw),
    "tokens of two experts": at_flat(4, ALL, prepare=two_experts, optimizer=adamw),
    # https://github.com/deepspeedai/DeepSpeed/issues/7156: their states are sharded, too.
    "schedule-free": at_flat(2, ALL, optimizer=averaged),
    # No rank may wait for another one before its tokens.
    **{
        f"ranks use different layers, {name}": row_of(
            Case(4, 2),
            2,
            optimizer=kind,
            loss=of_some_layers,
            batch=rows_of_some,
            systems=systems,
            options=options,
            num_parts=2,
        )
        for name, kind, systems, options in (
            ("zero", momentum, STAGES[:2], {"bucket_bytes": 100}),
            ("Lomo", sgd, ("Lomo",), TWICE),
            ("Lomo, clipped", sgd, ("Lomo",), CLIP | TWICE),
        )
    },
    # https://github.com/deepspeedai/DeepSpeed/pull/5259: an overflow that one rank has.
    "overflow of one expert": row_of(
        Case(4, 2),
        2,
        partial(overflows, "moe.experts.3.2.bias"),
        **FEW,
        optimizer=sgd,
        systems=(*STAGES[:2], "Lomo"),
        options={"loss_scale": "dynamic"},
    ),
    # LOMO: each expert counts once in the norm, also one without tokens.
    # https://github.com/deepspeedai/DeepSpeed/issues/8475 and issues/5066.
    "Lomo": of_lomo(Case(4, 2), 2, **FEW),
    "Lomo, clipped": of_lomo(Case(3, 2, normalize_weights=True), 2, **FEW, options=FIXED),
    "Lomo, replicas": of_lomo(Case(4, 2), 2),
    "Lomo, replicas, clipped": of_lomo(Case(3, 1), 2, options=DYNAMIC),
    "Lomo, a rank without experts": of_lomo(CASE, 4, options=TWICE, num_parts=2),
    "Lomo, experts without tokens": of_lomo(Case(4, 1), 2, sizes=(0, 1), options=CLIP),
    "Lomo, values": of_lomo(CASE, 2, **FEW, options={"clip_grad_value": 0.003, "overlap": True}),
    "AdaLomo": of_adalomo(Case(5, 1), 2, sizes=(1, 0)),
    "AdaLomo, two passes": of_adalomo(CASE, 2, options={"clip_mode": "two_pass", **CLIP}),
    "AdaLomo, replicas": of_adalomo(Case(4, 2), 2, options=TWICE | CLIP, num_parts=2),
    # https://github.com/pytorch/pytorch/issues/160285: gradients of experts are twice as large.
    # https://github.com/huggingface/transformers/pull/48205: a rank's part of a router's gradient.
    # https://github.com/NVIDIA/Megatron-LM/pull/5916: experts that the norm leaves out.
    "averaged by hand": averages(systems=("average",)),
    "averaged by hand, accumulated": row_of(
        CASE, 2, optimizer=sgd, systems=("average",), num_parts=2
    ),
    "averaged by hand, one choice": averages(prepare=one_choice, systems=("average",)),
    # https://github.com/NVIDIA-NeMo/Automodel/pull/3680: a rank without tokens, or experts without.
    "averaged by hand, no tokens": row_of(
        Case(4, 2), 2, sizes=(6, 0), optimizer=sgd, options=CLIP, systems=("average",)
    ),
    # https://github.com/NVIDIA-NeMo/Automodel/pull/2635: a layer that is recomputed.
    "averaged by hand, recomputed": averages(loss=recomputed, systems=("average",)),
    **{
        f"averaged by hand, frozen {name}": averages(
            prepare=partial(frozen, f"moe.{name}"), systems=("average",)
        )
        for name in ("router", "experts")
    },
}


@pytest.mark.parametrize(("name", "system", "world_size", "backend"), cases_of(ROWS))
@in_ranks()
def test_rows(rank: int, name: str, system: str, world_size: int, backend: str) -> None:
    check(rank, ROWS[name], system)
