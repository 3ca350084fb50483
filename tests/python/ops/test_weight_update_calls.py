"""The weight updates as operators: torch's checks, torch.compile, autograd, and bad calls."""

from __future__ import annotations

import math
from typing import Any

import oracle
import pytest
import torch
from test_weight_update import random
from torch import Tensor
from update_oracle import BF16, FP16

from ringcomm.ops.updates import weight_update_cuda

_ops: Any = torch.ops.ringcomm
LOW = torch.arange(24, dtype=torch.int16).view(4, 6)

SHAPE = (4, 6)
INDICES = torch.tensor([0, 3, 3])


def calls() -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Right arguments of each operator, new ones every time."""
    grad, x, grad_out = random(SHAPE, seed=1), random((3, 6), seed=2), random((3, 4), seed=3)
    factors, means = (torch.ones(4), torch.ones(6)), (torch.ones(4), torch.ones(6))
    return {
        "sgd_update_": ((random(SHAPE), grad, 0.1, 0.1, 1.0), {}),
        "linear_sgd_update_": ((random(SHAPE), x, grad_out, 0.1, 0.1, 1.0), {}),
        "embedding_sgd_update_": ((random(SHAPE), INDICES, x, 0.1, 0.1, 1.0), {}),
        "square_sums": ((grad, 1.0), {}),
        "adalomo_squares": ((random(SHAPE), grad, *factors, 1.0), {}),
        "adalomo_update_": ((random(SHAPE), grad, *factors, torch.tensor([0.1, 0.9]), 1.0), {}),
        "linear_adalomo_update_": (
            (random(SHAPE), x, grad_out, *means, 0.1, 0.1, 1.0),
            {"beta2": 0.5},
        ),
    }


NAMES = list(calls())
IN_PLACE = [name for name in NAMES if name.endswith("_")]


# ---- torch's own checks


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str) -> None:
    args, options = calls()[name]
    torch.library.opcheck(getattr(_ops, name).default, args, options)
    if "low" in str(getattr(_ops, name).default._schema):
        args = (args[0].to(BF16), *args[1:])
        options = {**options, "low": LOW.clone(), "clip_value": 0.5}
        torch.library.opcheck(getattr(_ops, name).default, args, options)


@pytest.mark.parametrize("name", IN_PLACE)
def test_versions_and_gradients(name: str) -> None:
    """What is written has another version; in grad mode a weight that requires grad is refused."""
    args, options = calls()[name]
    weight, kept = args[0], args[0].clone()
    low = LOW.clone()
    getattr(_ops, name)(weight.requires_grad_(False), *args[1:], **options)
    assert weight._version == 1
    weight.copy_(kept).requires_grad_()
    with pytest.raises(ValueError, match="requires grad"):
        getattr(_ops, name)(weight, *args[1:], **options)
    oracle.assert_equal(weight.detach(), kept)
    version = weight._version
    with torch.no_grad():
        getattr(_ops, name)(weight, *args[1:], **options)
    assert weight._version == version + 1
    with torch.inference_mode():
        split = kept.to(BF16).clone()
        getattr(_ops, name)(split, *args[1:], **options, low=low)
        assert not torch.equal(split, kept.to(BF16))
    assert low._version == 1


@pytest.mark.parametrize("name", NAMES)
def test_compile_and_autocast_change_nothing(name: str) -> None:
    operator = getattr(_ops, name)

    def call(*args: Any, **options: Any) -> Any:
        return operator(*args, **options)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    results = []
    for function, is_cast in ((call, False), (compiled, False), (call, True)):
        args, options = calls()[name]
        with torch.autocast("cpu", dtype=BF16, enabled=is_cast):
            found = function(*args, **options)
        results.append([*args, *(found if isinstance(found, tuple) else (found,))])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            if isinstance(one, Tensor):
                oracle.assert_equal(two, one)


# ---- wrong arguments

_SGD, _LINEAR, _EMBEDDING = IN_PLACE[:3]
_ADALOMO, _LINEAR_ADALOMO = IN_PLACE[3:]
_BUFFER = torch.zeros(200)

# Positions in the arguments: what stands there instead.
_Change = dict[int | str, Any]
_FOR_ALL: list[tuple[type[Exception], str, _Change]] = [
    (TypeError, "Double|float64", {0: torch.ones(SHAPE).double()}),
    (TypeError, "Int|int32", {0: torch.ones(SHAPE).int()}),
    (ValueError, "side by side|contiguous", {0: torch.ones(4, 1).expand(SHAPE)}),
    (ValueError, "side by side|contiguous", {0: torch.ones(4, 12)[:, ::2]}),
    (ValueError, "meta", {0: torch.ones(SHAPE, device="meta")}),
    (ValueError, "meta", {1: torch.ones(SHAPE, device="meta")}),
    (ValueError, "meta", {2: torch.ones(3, 4, device="meta")}),
    (ValueError, "Float|float32", {"low": LOW}),
    (ValueError, "Float|float32", {"rounding_seed": 3}),
    (ValueError, "Half|float16", {0: random(SHAPE, FP16), "rounding_seed": 3}),
    (ValueError, "-2", {"rounding_seed": -2}),
    (ValueError, "both", {0: random(SHAPE, BF16), "low": LOW,
                          "rounding_seed": 3}),
    (TypeError, "int", {0: random(SHAPE, BF16), "low": LOW.int()}),
    (ValueError, r"\[4, 5\]", {0: random(SHAPE, BF16), "low": LOW[:, :5]}),
    (ValueError, "strides", {0: random(SHAPE, BF16), "low": LOW.t().contiguous().t()}),
    (ValueError, "clip_value", {"clip_value": 0.0}),
    (ValueError, "clip_value", {"clip_value": math.nan}),
]  # fmt: skip
_NUMBERS: list[tuple[str, int, float]] = [  # of lr's place and those behind it
    ("lr.*-1", 0, -1.0),
    ("lr.*nan", 0, math.nan),
    ("weight_decay.*-1", 1, -1.0),
    ("weight_decay.*inf", 1, math.inf),
    ("scale.*nan", 2, math.nan),
]
_WRONG_NUMBERS: list[tuple[str, type[Exception], str, _Change]] = [
    (name, ValueError, words, {lr + place: number})
    for name, lr in ((_SGD, 2), (_LINEAR, 3), (_EMBEDDING, 3), (_LINEAR_ADALOMO, 5))
    for words, place, number in _NUMBERS
]
WRONG: list[tuple[str, type[Exception], str, _Change]] = [
    *[
        (name, error, words, change)
        for name in IN_PLACE
        for error, words, change in _FOR_ALL
        if not (name == _SGD and 2 in change)
    ],
    *_WRONG_NUMBERS,
    (_SGD, ValueError, r"\[4, 6\]", {1: random((4, 5))}),
    (_SGD, TypeError, "Double", {1: random(SHAPE).double()}),
    (_SGD, ValueError, "first_elem", {"first_elem": -1}),
    (_SGD, ValueError, "share", {0: _BUFFER[:24].view(SHAPE), 1: _BUFFER[:24].view(SHAPE)}),
    (_SGD, ValueError, "share", {0: _BUFFER[:24].view(SHAPE), 1: _BUFFER[23:47].view(SHAPE)}),
    (_SGD, ValueError, "share", {0: _BUFFER[:12].view(BF16).view(SHAPE),
                                 "low": _BUFFER[:12].view(torch.int16).view(SHAPE)}),
    (_LINEAR, ValueError, "two dimensions", {0: random((6, 4)).t()}),
    (_LINEAR, ValueError, r"\.\.\., 6", {1: random((3, 5))}),
    (_LINEAR, ValueError, r"\.\.\., 4", {2: random((3, 6))}),
    (_LINEAR, ValueError, "as many tokens", {1: random((2, 6))}),
    (_LINEAR, TypeError, "BFloat16", {1: random((3, 6), BF16)}),
    (_LINEAR, TypeError, "Double", {1: random((3, 6)).double(),
                                            2: random((3, 4)).double()}),
    (_LINEAR, ValueError, "share", {0: _BUFFER[:24].view(SHAPE), 1: _BUFFER[20:38].view(3, 6)}),
    (_EMBEDDING, ValueError, "two dimensions", {0: random((24,))}),
    (_EMBEDDING, IndexError, "index 2 is 4", {1: torch.tensor([0, 3, 4])}),
    (_EMBEDDING, IndexError, "index 0 is -1", {1: torch.tensor([-1, 0, 0], dtype=torch.int32)}),
    (_EMBEDDING, TypeError, "Short", {1: torch.tensor([0, 0, 0], dtype=torch.int16)}),
    (_EMBEDDING, ValueError, r"\[3, 6\]", {2: random((3, 5))}),
    (_EMBEDDING, ValueError, "padding_idx", {"padding_idx": 4}),
    (_EMBEDDING, ValueError, "share", {0: _BUFFER[:24].view(SHAPE), 2: _BUFFER[20:38].view(3, 6)}),
    (_ADALOMO, ValueError, "row_factor", {2: torch.ones(6)}),
    (_ADALOMO, ValueError, "col_factor", {3: torch.ones(1, 6)}),
    (_ADALOMO, TypeError, "row_factor", {2: torch.ones(4).double()}),
    (_ADALOMO, ValueError, "step_and_decay", {4: torch.ones(3)}),
    (_ADALOMO, TypeError, "step_and_decay", {4: torch.ones(2).to(BF16)}),
    (_ADALOMO, ValueError, "share", {0: _BUFFER[:24].view(SHAPE), 3: _BUFFER[20:26]}),
    (_ADALOMO, ValueError, "first_elem", {"first_elem": -1}),
    (_LINEAR_ADALOMO, ValueError, "two dimensions", {0: random((24,))}),
    (_LINEAR_ADALOMO, ValueError, r"\.\.\., 6", {1: random((3, 5))}),
    (_LINEAR_ADALOMO, TypeError, "bfloat16", {1: random((3, 6), BF16)}),
    (_LINEAR_ADALOMO, ValueError, "exp_avg_sq_row", {3: torch.ones(6)}),
    (_LINEAR_ADALOMO, TypeError, "float64", {4: torch.ones(6).double()}),
    (_LINEAR_ADALOMO, ValueError, "beta2", {"beta2": 1.0}),
    (_LINEAR_ADALOMO, ValueError, "clip_threshold", {"clip_threshold": 0.0}),
    (_LINEAR_ADALOMO, ValueError, "eps_grad", {"eps_grad": -1.0}),
    (_LINEAR_ADALOMO, ValueError, "eps_weight", {"eps_weight": math.nan}),
    ("square_sums", ValueError, "matrix", {0: random((24,))}),
    ("square_sums", TypeError, "Double", {0: random(SHAPE).double()}),
    ("adalomo_squares", ValueError, "row_factor", {2: torch.ones(5)}),
    ("adalomo_squares", ValueError, "meta", {1: torch.ones(SHAPE, device="meta")}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "error", "words", "change"), WRONG)
def test_wrong_arguments(
    name: str, error: type[Exception], words: str, change: dict[int | str, Any]
) -> None:
    """Refused on the CPU, and by the launchers for CUDA; nothing is written."""
    args, options = calls()[name]
    options = {**options, **{key: new for key, new in change.items() if isinstance(key, str)}}
    given = [change.get(place, arg) for place, arg in enumerate(args)]
    tensors = [arg for arg in (*given, *options.values()) if isinstance(arg, Tensor)]
    kept = [tensor.clone() for tensor in tensors if not tensor.is_meta]
    with pytest.raises(error, match=words):
        getattr(_ops, name)(*given, **options)
    launcher = getattr(weight_update_cuda, name, None)
    if launcher is not None and error is not IndexError:  # of which the device is told
        with pytest.raises(error, match="ringcomm: "):
            launcher(*given, **options)
    for tensor, before in zip((t for t in tensors if not t.is_meta), kept, strict=True):
        oracle.assert_equal(tensor, before)


def test_right_arguments() -> None:
    """What the wrong ones are made of."""
    for name, (args, options) in calls().items():
        assert (getattr(_ops, name)(*args, **options) is None) == name.endswith("_")
