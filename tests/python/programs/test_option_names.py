"""An option or an object that is the wrong one: the error names it and the right one."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn

import ringcomm
from ringcomm.integrations.transformers import tensor_parallelize
from ringcomm.optim import AdaLomo, Lomo
from ringcomm.parallel import ParallelDims, offload, parallelize

Call = Callable[[nn.Module], object]
CALLS: list[tuple[Call, str]] = [
    (lambda m: ringcomm.Options(algoritm="ring"), "ringcomm.Options has no option 'algoritm'; did"),  # type: ignore[call-arg]
    (lambda m: Lomo(m, clip_grad=1.0), "Lomo has no option 'clip_grad'; did you mean 'clip_grad_"),
    (lambda m: AdaLomo(m, sed=1), "AdaLomo has no option 'sed'; did you mean 'seed'?"),
    (
        lambda m: offload.AdamW(m.parameters(), learning_rate=1.0),
        "AdamW has no option 'learning_rate'; it has ",
    ),
    (
        lambda m: Lomo(m, momentum=0.9),
        "Lomo has no option 'momentum': LOMO keeps no state for a weight; it has clip_grad_norm,",
    ),
    (
        lambda m: parallelize(m, ParallelDims(), torch.optim.AdamW(m.parameters())),  # type: ignore[arg-type]
        "optimizer must be a function that makes one: lambda params: AdamW(params)",
    ),
    (
        lambda m: ringcomm.nn.ColumnParallelLinear.from_linear(nn.ReLU()),  # type: ignore[arg-type]
        "from_linear() takes an nn.Linear, got ReLU",
    ),
    (
        lambda _: ringcomm.nn.VocabParallelEmbedding.from_embedding(nn.ReLU()),  # type: ignore[arg-type]
        "from_embedding() takes an nn.Embedding, got ReLU",
    ),
    (
        lambda m: parallelize(m, {"dp": 1}, torch.optim.AdamW),  # type: ignore[arg-type]
        "dims must be a ParallelDims, such as ParallelDims(dp=2), got dict",
    ),
    (
        lambda m: Lomo(torch.optim.AdamW(m.parameters())),  # type: ignore[arg-type]
        "Lomo takes the model, or its parameters, and not an optimizer: got AdamW",
    ),
    (
        tensor_parallelize,
        "Sequential is not a model of transformers: build its layers from ringcomm.nn",
    ),
]


def call_all(rank: int) -> None:
    for call, said in CALLS:
        layer = nn.Linear(4, 4)
        before = layer.weight.clone()
        with pytest.raises(TypeError) as error:
            call(nn.Sequential(layer))
        assert str(error.value).startswith(said), error.value
        assert torch.equal(layer.weight, before)


def test_the_error_names_what_was_meant() -> None:
    run_ranks(1, call_all)


# Of operators, which run many times in a step, Python's own error has to do. Lomo's are above.
MODULES = (
    *("ringcomm", "ringcomm.nn", "ringcomm.planner", "ringcomm.parallel"),
    *("ringcomm.integrations.transformers", "ringcomm.parallel.activations", "ringcomm.testing"),
    *("ringcomm.parallel.expert", "ringcomm.parallel.offload", "ringcomm.parallel.pipeline"),
    "ringcomm.parallel.zero",
)


def calls_with_options() -> list[Any]:
    modules: list[Any] = [importlib.import_module(name) for name in MODULES]
    found = [getattr(module, name) for module in modules for name in module.__all__]
    return [
        call
        for call in found
        if callable(call)
        and any(
            one.kind is inspect.Parameter.KEYWORD_ONLY
            for one in inspect.signature(call).parameters.values()
        )
    ]


@pytest.mark.parametrize("call", calls_with_options(), ids=lambda call: call.__name__)
def test_every_call_with_options_names_the_nearest(call: Any) -> None:
    parameters = inspect.signature(call).parameters.values()
    options = [one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY]
    name = options[0]
    with pytest.raises(TypeError, match=f"has no option '{name}x'; did you mean '{name}'"):
        call(**{f"{name}x": None})
