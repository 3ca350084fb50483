"""The models of transformers that a small configuration can be made for, trained by two ranks.

The reference is torch.optim.SGD in one process: the mean of the losses of both halves of the rows.
Users of LOMO expect it to be independent of the model: https://github.com/OpenLMLab/LOMO/issues/73.
Models that plain torch cannot train here are skipped. What a system does not support it refuses,
by one of the sentences of REFUSALS. The output has the verdict on each model, and the reason.
"""

from __future__ import annotations

import math
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_states import full_weights
from model_zoo import KNOWN, VOCAB, build, distance, drop_nothing, gaps
from ranks import RankFailure, run_ranks
from steps import apply_steps, train_step
from torch import Tensor

import ringcomm
from ringcomm.optim import Lomo
from ringcomm.parallel import ParallelDims, parallelize, zero

pytest.importorskip("transformers")

LR = 0.03
NUM_STEPS = 3
IDS = [torch.randint(4, VOCAB, (4, 12), generator=torch.Generator().manual_seed(i)) for i in (1, 2)]
# What a system may say of a model that it does not support.
REFUSALS = {
    "tp": "has neither a tensor-parallel plan|plan has the style|is not in the model's plan"
    "|must have the loss ForCausalLMLoss",
    "pp": "cannot be split into a sequence of blocks|has no pipeline plan of its modules",
    "zero 3": "is a scalar, or empty on some rank",
    "dp": "has a loss of its own, which does not say which labels",
    "ep": "has neither stacked experts of transformers|has a loss of its own, which does not",
}
# Known models that a system refuses; all others are right.
NO_PLAN = (
    "bloom falcon gpt2 gptj mamba mpt opt stablelm albert bert deberta-v2 distilbert electra esm"
    " roberta bart marian mbart mt5 pegasus t5"
)
MIXTURES = {"deepseek_v3", "mixtral", "qwen2_moe", "qwen3_moe"}
DENSE = " ".join({*" ".join(KNOWN.values()).split()} - MIXTURES)
KNOWN_REFUSED = {"tp": NO_PLAN + " olmo2", "pp": NO_PLAN, "ep": DENSE}

Trained = tuple[Callable[[Tensor], object], Any]  # a step on all rows; what has the weights


def sgd(params: Any, momentum: float = 0.9) -> torch.optim.SGD:
    return torch.optim.SGD([p for p in params if p.requires_grad], LR, momentum)


def step_of(model: Any, optimizer: Any, ids: Tensor) -> None:
    """On both halves of the rows."""
    for half in ids.chunk(2):
        (model(input_ids=half, labels=half).loss / 2).backward()
    apply_steps(optimizer)


def step_on_own(model: Any, optimizer: Any, ids: Tensor) -> None:
    """On this rank's half of the rows."""
    own = ids.chunk(2)[dist.get_rank()]
    train_step(model(input_ids=own, labels=own).loss, optimizer)


def sharded(stage: int, model: Any) -> Trained:
    optimizer = zero.shard(model, sgd(model.parameters()), stage)
    return partial(step_on_own, model, optimizer), model


def lomo(model: Any) -> Trained:
    return partial(step_on_own, model, Lomo(model, LR, group=dist.group.WORLD)), model


def lomo_alone(model: Any, **options: Any) -> Trained:
    """Each rank by itself, on all rows."""
    optimizer = Lomo(model, LR, group="none", **options)
    return lambda ids: train_step(model(input_ids=ids, labels=ids).loss, optimizer), model


def on_mesh(axis: str, model: Any) -> Trained:
    sizes: dict[str, Any] = {"dp": 2, "ep": 2} if axis == "ep" else {axis: 2}
    dims = ParallelDims(**sizes)
    made = parallelize(model, dims, sgd, num_microbatches=2 if axis in ("tp", "pp") else 1)
    owner = made.pipeline or made.model

    def step(ids: Tensor) -> None:
        own = ids.chunk(2)[dist.get_rank()] if "dp" in sizes else ids
        made.step({"input_ids": own, "labels": own})
        apply_steps(made.optimizer)

    return step, owner


SYSTEMS: dict[str, Callable[[Any], Trained]] = {
    "zero 1": partial(sharded, 1),
    "zero 2": partial(sharded, 2),
    "zero 3": partial(sharded, 3),
    "tp": partial(on_mesh, "tp"),
    "dp": partial(on_mesh, "dp"),
    "pp": partial(on_mesh, "pp"),
    "ep": partial(on_mesh, "ep"),
    "lomo": lomo,
    "lomo alone": lomo_alone,
    "lomo alone, deferred": partial(lomo_alone, clip_grad_norm=1e9),  # gradients wait for the norm
}


class CannotTrain(Exception):
    """Plain torch does not train a model here."""


Weights = dict[str, Tensor]


@lru_cache(maxsize=2)
def reference(family: str, kind: str, momentum: float, noise: float = 0.0) -> tuple[Weights, ...]:
    """The weights of one process, at first and at the end; `noise` is added to the first."""
    try:
        model: Any = drop_nothing(build(family, kind))
        first = {name: param.detach().clone() for name, param in model.named_parameters()}
        for param in model.parameters() if noise else ():
            param.data *= 1 + noise * torch.randn_like(param)
        wanted = train(partial(step_of, model, sgd(model.parameters(), momentum)), model)
    except Exception as error:
        raise CannotTrain(f"{type(error).__name__}: {str(error)[:100]}") from None
    if not 0 < (change := distance(wanted, first)) < math.inf:
        raise CannotTrain(f"weights move by {change}")
    return first, wanted


def train(step: Callable[[Tensor], object], model: Any) -> Weights:
    """The weights after some steps."""
    for idx in range(NUM_STEPS):
        torch.manual_seed(idx)
        step(IDS[idx % len(IDS)])
    return {name: param.detach() for name, param in model.named_parameters()}


def compare(_: int, family: str, kind: str, system: str) -> tuple[str, str]:
    """("right", "refused", "skipped" or "wrong", why); "rounding": none of them can be told."""
    warnings.simplefilter("ignore")
    momentum = 0.0 if "lomo" in system else 0.9
    try:
        first, wanted = reference(family, kind, momentum)
    except CannotTrain as error:
        return "skipped", str(error)
    model: Any = drop_nothing(build(family, kind))
    try:
        step, owner = SYSTEMS[system](model)
        train(step, model)
    except (TypeError, ValueError) as error:
        place = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        is_ours = Path(ringcomm.__file__).parent in place.parents
        if is_ours and re.search(REFUSALS.get(system, "$^"), str(error)):
            return "refused", str(error)
        raise
    found = full_weights(owner)
    name, gap = max(gaps(found, wanted, first).items(), key=lambda item: item[1])
    if gap < 1e-3:
        return "right", ""
    noisy = reference(family, kind, momentum, 1e-7)[1]
    noise = max(gaps(noisy, wanted, first).values())
    if noise > 0.02:
        return "rounding", f"a change of 1e-7 of the weights becomes {noise:.1e} of their change"
    return "right" if gap < 10 * noise else "wrong", f"{name} differs by {gap:.1e} of its change"


def verdict(family: str, kind: str, system: str) -> tuple[str, str]:
    """compare() in two ranks, which are others after an error."""
    try:
        found = run_ranks(2, compare, family, kind, system, timeout_s=300.0)
    except RankFailure as error:
        return "wrong", str(error)
    return found[0] if found[0][0] == found[1][0] else ("wrong", f"ranks differ: {found}")


def verdicts(family: str, kinds: list[str]) -> dict[str, dict[str, tuple[str, str]]]:
    """By system and kind. A model that plain torch cannot train is tried once."""
    found: dict[str, dict[str, tuple[str, str]]] = {system: {} for system in SYSTEMS}
    for kind in kinds:
        for system, own in found.items():
            own[kind] = verdict(family, kind, system)
            print(f"{system}, {kind}:", *own[kind], flush=True)
            if own[kind][0] == "skipped":
                break
    for system, own in found.items():
        print(f"{system}:", dict(Counter(result for result, _ in own.values())))
    return found


def check(family: str, kinds: list[str]) -> None:
    for system, own in verdicts(family, kinds).items():
        assert not {kind: why for kind, (result, why) in own.items() if result == "wrong"}, system
        refused = KNOWN_REFUSED.get(system, "").split()
        for kind in set(KNOWN[family].split()) & set(kinds):
            assert own[kind][0] == ("refused" if kind in refused else "right"), (system, kind)


@pytest.mark.slow
@pytest.mark.parametrize("family", KNOWN)
def test_models_train_as_in_one_process(family: str) -> None:
    """Weights after three steps are those of one process, for all models of a family."""
    modeling_auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    check(family, list(getattr(modeling_auto, family)))
