"""The models of transformers that a small configuration can be made for, trained by each system.

The reference is torch.optim.SGD in one process. Users of LOMO expect it to be independent of the
model (https://github.com/OpenLMLab/LOMO/issues/73). Models that plain torch cannot train here are
skipped, with the reason in the test's output.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from model_zoo import KNOWN, VOCAB, build, distance
from torch import Tensor, nn

from ringcomm.optim import Lomo

pytestmark = pytest.mark.slow

LR = 0.01
NUM_STEPS = 3
IDS = [torch.randint(4, VOCAB, (2, 12), generator=torch.Generator().manual_seed(i)) for i in (1, 2)]


@contextlib.contextmanager
def sgd(model: nn.Module) -> Iterator[Any]:
    """The reference."""
    yield torch.optim.SGD([p for p in model.parameters() if p.requires_grad], LR)


@contextlib.contextmanager
def lomo(model: nn.Module) -> Iterator[Any]:
    """Layers are fused, weights are updated in the backward pass."""
    yield Lomo(model, LR)


@contextlib.contextmanager
def lomo_deferred(model: nn.Module) -> Iterator[Any]:
    """Gradients wait for the norm."""
    yield Lomo(model, LR, clip_grad_norm=1e9)


System = Callable[[nn.Module], contextlib.AbstractContextManager[Any]]


def train(system: System, model: nn.Module) -> dict[str, Tensor]:
    """The weights after some steps."""
    with system(model) as optimizer:
        for step in range(NUM_STEPS):
            torch.manual_seed(step)  # for dropout
            ids = IDS[step % len(IDS)]
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def compare(system: System, family: str, kind: str) -> tuple[str, str]:
    """(why it was skipped, what is wrong), both empty if the system trains as the reference."""
    try:
        model = build(family, kind)
        first = {name: param.detach().clone() for name, param in model.named_parameters()}
        wanted = train(sgd, model)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:100]}", ""
    change = distance(wanted, first)
    if not 0 < change < math.inf:
        return f"weights move by {change}", ""
    try:
        gap = distance(train(system, build(family, kind)), wanted) / change
    except Exception as error:
        return "", f"{type(error).__name__}: {str(error)[:200]}"
    if gap < 1e-4:
        return "", ""
    noise = distance(train(sgd, build(family, kind)), wanted) / change
    if noise > 1e-6:
        return f"two runs of SGD differ by {noise:.1e} of the change", ""
    return "", f"weights differ by {gap:.1e} of the change"


@pytest.mark.parametrize("system", [lomo, lomo_deferred])
@pytest.mark.parametrize("family", KNOWN)
def test_models_train_as_with_sgd(family: str, system: System) -> None:
    """Weights after three steps are those of torch.optim.SGD, for all models of a family."""
    modeling_auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    skipped, wrong, right = {}, {}, []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind in getattr(modeling_auto, family):
            reason, error = compare(system, family, kind)
            if reason:
                skipped[kind] = reason
            elif error:
                wrong[kind] = error
            else:
                right.append(kind)
            print(f"{kind}: {error or reason or 'right'}", flush=True)
    assert not wrong
    assert not skipped.keys() & set(KNOWN[family].split())
