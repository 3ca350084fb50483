"""An option or an object that is the wrong one: the error names it and the right one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ranks import run_ranks
from torch import nn

import ringcomm
from ringcomm.integrations.transformers import tensor_parallelize
from ringcomm.optim import AdaLomo, Lomo
from ringcomm.parallel import ParallelDims, parallelize

Call = Callable[[nn.Module], object]
CALLS: list[tuple[Call, str]] = [
    (lambda m: ringcomm.Options(algoritm="ring"), "ringcomm.Options has no option 'algoritm'; did"),  # type: ignore[call-arg]
    (lambda m: Lomo(m, clip_grad=1.0), "Lomo has no option 'clip_grad'; did you mean 'clip_grad_"),
    (lambda m: AdaLomo(m, sed=1), "AdaLomo has no option 'sed'; did you mean 'seed'?"),
    (
        lambda m: parallelize(m, ParallelDims(), torch.optim.AdamW, bucket_byte=1),
        "ShardOptions.__init__() got an unexpected keyword argument 'bucket_byte'",
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
