"""The losses against float64: of logits, of a linear layer, and over a vocabulary in shards."""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import loss_oracle
import oracle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from loss_oracle import (
    BY_NAME,
    DTYPES,
    OPTION_AXES,
    OUTPUTS,
    covering,
    named,
    options_of,
    random_logits,
    random_targets,
)
from pair_table import Case
from ranks import in_ranks, place, run_ranks
from torch import Tensor

from ringcomm import nn
from ringcomm.ops import cross_entropy, linear_cross_entropy

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# The function of that name hides its module.
LINEAR = importlib.import_module("ringcomm.ops.losses.linear_cross_entropy")
HIDDEN = 24


def set_blocks(set_value: Callable[[Any, str, int], None]) -> None:
    """Several of tokens and of classes, the last ones short."""
    for name, value in (("BLOCK_BYTES", 1), ("MIN_BLOCK_TOKENS", 16), ("MIN_BLOCK_CLASSES", 10)):
        set_value(LINEAR, name, value)


def upstream_of(loss: Tensor) -> Tensor:
    return torch.linspace(0.5, 2, loss.numel(), dtype=torch.float64).view(loss.shape)


def split(result: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the outputs, on the CPU."""
    loss, outputs = result if isinstance(result, tuple) else (result, {})
    return loss.cpu(), {name: value.cpu() for name, value in outputs.items()}


# ---- the table: paths, sizes, layouts and options

SIZES = {
    "dtype": tuple(BY_NAME),
    # One vector; a block of 1024 and a class; many blocks with a part.
    "size": ("64", "1", "7", "1000", "1025", "3000"),
    "tokens": ("6", "2x3", "one", "0", "2x0"),
    "layout": ("contiguous", "reversed", "in wider rows", "every other", "expanded"),
}
LOGITS = covering(
    {"path": ("logits", "module"), "index": ("int64", "int32"), **SIZES, **OPTION_AXES}
)
PROBABILITIES = covering(
    {
        "path": ("probabilities",),
        "offset": ("0", "1e4"),
        **SIZES,
        **{key: axis for key, axis in OPTION_AXES.items() if key not in ("ignore", "padding")},
    },
    {"offset": ("1e4",), "softcap": ("5",)},  # where all z are equal
    {"offset": ("1e4",), "scale": ("-0.7",)},  # a product that fp32 rounds
)
LAYERS = ("linear", "linear module", "fused update")
CASES = LOGITS + PROBABILITIES
CASES += covering({"path": LAYERS, "blocks": ("many", "one"), **SIZES, **OPTION_AXES})

Layout = list[tuple[int, int]]  # each rank's first class and number of columns
NUM_CLASSES, LEAD = 41, (12, 7)
NUM_TOKENS = math.prod(LEAD)
SHARDS: dict[str, Layout] = {
    "alone": [(0, 41)],
    "even": [(0, 21), (21, 20)],
    "reversed": [(20, 21), (0, 20)],
    "all_but_one": [(40, 1), (0, 40)],
    "empty": [(0, 41), (41, 0)],
    "empty_first": [(0, 0), (0, 41)],
    "empty_elsewhere": [(13, 0), (0, 41)],
    "padded": [(0, 25), (25, 20)],
    "all_padding": [(0, 41), (41, 7)],
    "padding_far_off": [(60, 3), (0, 41)],
    "three": [(30, 11), (0, 29), (29, 1)],
    "four": [(10, 1), (0, 10), (11, 0), (11, 35)],
}
OVER_RANKS = covering(
    {
        "shards": SHARDS,
        "backend": ("ringcomm", "gloo"),
        "path": ("logits", "in place", *LAYERS),
        "dtype": BY_NAME,
        "start": ("given", "in order"),
        "tokens": ("all", "shares"),
        "layout": ("contiguous", "reversed"),
        "blocks": ("many", "one"),
        **{axis: values for axis, values in OPTION_AXES.items() if axis != "padding"},
    },
    {"path": ("in place",), "reduction": ("none",)},
    {"path": ("logits", "in place"), "tokens": ("shares",)},
    {
        "start": ("in order",),
        "shards": tuple(name for name, places in SHARDS.items() if places != sorted(places)),
    },
)


def laid_out(layout: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Numbers in whatever order the memory has them."""
    *lead, size = shape
    if layout == "reversed":
        return random_logits(shape[::-1], dtype).permute(*reversed(range(len(shape))))
    if layout == "in wider rows":
        return random_logits((*lead, size + 7), dtype)[..., 3 : size + 3]
    if layout == "every other":
        return random_logits((*lead, 2 * size), dtype)[..., ::2]
    if layout == "expanded":
        return random_logits((*[1] * len(lead), size), dtype).expand(shape)
    return random_logits(shape, dtype)


def own_part(whole: Tensor, dim: int, first: int, size: int) -> Tensor:
    """A rank's classes; what is behind the vocabulary holds what would be noticed."""
    shape = list(whole.shape)
    begin, num_real = min(first, shape[dim]), max(0, min(size, shape[dim] - first))
    shape[dim] = size
    own = whole.new_full(shape, 77)
    own.narrow(dim, 0, num_real).copy_(whole.narrow(dim, begin, num_real))
    return own


def check_logits(
    logits: Tensor,
    target: Tensor,
    device: Any,
    call: Any = cross_entropy,
    part: tuple[int, int] | None = None,
    **options: Any,
) -> list[bytes]:
    """Loss, outputs and this rank's gradient; the bits of what all ranks have."""
    first, size = part or (0, logits.shape[-1])
    own = logits if part is None else own_part(logits, -1, first, size)
    leaf = own.detach().to(device).requires_grad_()
    kept = leaf.detach().clone()
    if not target.is_floating_point():
        call = partial(call, outputs=OUTPUTS)
    result = call(
        leaf if part is None else leaf * 1, target.to(device), **loss_oracle.on(device, options)
    )
    found = split(result)
    factor = upstream_of(found[0])
    (result[0] if isinstance(result, tuple) else result).backward(factor.to(device, torch.float32))
    assert leaf.grad is not None
    assert leaf.grad.dtype == logits.dtype
    expected = loss_oracle.evaluate(logits, target, factor, **options)
    grad = expected.grad[..., first : first + size]
    mine = leaf.grad.cpu()
    loss_oracle.assert_close(found, mine[..., : grad.shape[-1]], expected._replace(grad=grad))
    assert (mine[..., grad.shape[-1] :] == 0).all()
    assert torch.equal(leaf.detach(), kept)
    return [oracle.bits(tensor) for tensor in (found[0], *found[1].values())]


def call_module(logits: Tensor, target: Tensor, num_items: Any = None, **options: Any) -> Any:
    return nn.CrossEntropyLoss(**options)(logits, target, num_items)


def call_layer_module(
    hidden: Tensor, weight: Tensor, target: Tensor, num_items: Any = None, **options: Any
) -> Any:
    bias = options.pop("bias")
    module = nn.LinearCrossEntropyLoss(num_columns=len(weight), **options)
    return module(hidden, weight, target, bias, num_items)


def check_layer(
    case: Case,
    hidden: Tensor,
    target: Tensor,
    device: Any,
    part: tuple[int, int],
    tokens: Any = ...,
    how: Any = None,
    **options: Any,
) -> list[bytes]:
    """Of logits that are a layer's: no further off than torch; this rank's parts of gradients."""
    dtype, (first, size) = hidden.dtype, part
    num_classes = NUM_CLASSES if how else size
    shapes = (num_classes, HIDDEN), (num_classes,)
    layer = [hidden, *(random_logits(shape, dtype, spread=0.3, seed=3) for shape in shapes)]
    places = [tokens, slice(first, first + size), slice(first, first + size)]
    own = [hidden[tokens], *(own_part(tensor, 0, first, size) for tensor in layer[1:])]
    x, weight, bias = (tensor.detach().to(device).requires_grad_() for tensor in own)
    call = call_layer_module if case["path"] == "linear module" else linear_cross_entropy
    given = {**loss_oracle.on(device, options), **(how or {}), "outputs": OUTPUTS}
    updates = torch.zeros(size, HIDDEN, device=device)
    if case["path"] == "fused update":
        given["fused_update"] = lambda rows, grad: updates[rows].copy_(grad)
    with pytest.MonkeyPatch.context() as patch:
        if case["blocks"] == "many":
            set_blocks(patch.setattr)
        loss, outputs = call(x, weight, target.to(device), bias=bias, **given)
        factor = upstream_of(loss)
        loss.backward(factor.to(loss))
    grads = [x.grad, updates if case["path"] == "fused update" else weight.grad, bias.grad]
    found = [loss.detach(), *outputs.values()]
    exact = loss_oracle.evaluate_layer([t.double() for t in layer], target, factor, **options)
    torchs = loss_oracle.evaluate_layer(layer, target, factor.float(), wide=FP32, **options)
    for got, right, other, name in zip(found, exact[0], torchs[0], ("mean", *OUTPUTS), strict=True):
        loss_oracle.assert_near(got, right, other, dtype, f"{name} of {case}")
    for grad, right, other, at in zip(grads, exact[1], torchs[1], places, strict=True):
        assert grad is not None
        num_rows = len(right[at])
        given = (grad[:num_rows], right[at], other[at], dtype)
        loss_oracle.assert_near(*given, f"gradient of shape {tuple(right.shape)} of {case}")
        assert not grad[num_rows:].any()  # behind the vocabulary
    return [oracle.bits(tensor.cpu()) for tensor in found]


@pytest.mark.parametrize("case", CASES, ids=named)
def test_against_float64(case: Case, device: str) -> None:
    """Every pair of paths, options, types, sizes and layouts."""
    size, dtype, where = int(case["size"]), BY_NAME[case["dtype"]], place(device, 0)
    lead = tuple(map(int, case["tokens"].split("x"))) if case["tokens"] != "one" else ()
    options = options_of(case, size)
    vocab_size, ignored = options.get("vocab_size", size), options.get("ignore_index", -100)
    target = random_targets(lead, vocab_size, ignore_index=ignored)
    if case["path"] in LAYERS:
        hidden = laid_out(case["layout"], (*lead, HIDDEN), dtype)
        check_layer(case, hidden, target, where, (0, size), **options)
        return
    call = call_module if case["path"] == "module" else cross_entropy
    logits = laid_out(case["layout"], (*lead, size), dtype)
    target = target.to(getattr(torch, case.get("index", "int64")))
    if case["path"] == "probabilities":
        logits = (logits.float() + float(case["offset"])).to(dtype)
        target = torch.softmax(random_logits((*lead, size), seed=2), -1).to(dtype)
    check_logits(logits, target, where, call, **options)


def check_shards(rank: int, places: Layout, cases: list[Case], device: str) -> list[bytes]:
    bits = []
    for case in cases:
        options, dtype = options_of(case, NUM_CLASSES), BY_NAME[case["dtype"]]
        target = torch.arange(NUM_TOKENS) % NUM_CLASSES
        target[::7] = options.get("ignore_index", -100)
        target = target.view(LEAD)
        how: dict[str, Any] = {"group": dist.group.WORLD, "vocab_size": NUM_CLASSES}
        how["vocab_start"] = places[rank][0] if case["start"] == "given" else None
        given = (target, place(device, rank))
        if case["path"] in LAYERS:
            share, tokens = LEAD[0] // dist.get_world_size(), slice(None)
            if case["tokens"] == "shares":
                how["sequence_parallel"] = True
                tokens = slice(share * rank, share * (rank + 1))
            hidden = laid_out(case["layout"], (*LEAD, HIDDEN), dtype)
            bits += check_layer(case, hidden, *given, places[rank], tokens, how, **options)
            continue
        logits = random_logits((*LEAD, NUM_CLASSES), dtype)
        if not options.get("label_smoothing"):
            logits[4, 2, :20] = -math.inf * options.get("logit_scale", 1.0)
        how["inplace"] = case["path"] == "in place"
        call: Any = partial(cross_entropy, **how)
        if case["start"] == "in order":
            call = partial(call_module, **how, num_columns=places[rank][1])
        bits += check_logits(logits, *given, call, places[rank], **options)
    return bits


@pytest.mark.parametrize("backend", ["ringcomm", "gloo"])
@pytest.mark.parametrize("name", SHARDS)
def test_shards(name: str, backend: str, device: str) -> None:
    """Every pair of paths, options, types and shards, and all ranks have the same bits."""
    cases = [c for c in OVER_RANKS if (c["shards"], c["backend"]) == (name, backend)]
    places = SHARDS[name]
    assert cases
    results = run_ranks(len(places), check_shards, places, cases, device, backend=backend)
    assert all(result == results[0] for result in results)


@in_ranks(3)
def test_subgroups(rank: int) -> None:
    """A group of some ranks; shards in order and not."""
    logits, target = (
        random_logits((NUM_TOKENS, NUM_CLASSES)),
        torch.arange(NUM_TOKENS) % NUM_CLASSES,
    )
    for ranks in ([1, 2], [2], [0, 2]):
        group = dist.new_group(ranks)
        if rank in ranks:
            part = SHARDS["even" if len(ranks) == 2 else "alone"][ranks.index(rank)]
            for start in (part[0], None):
                how = {"group": group, "vocab_start": start, "vocab_size": NUM_CLASSES}
                check_logits(logits, target, "cpu", partial(cross_entropy, **how), part)


# ---- the bound of errors, and numbers at the edges


def even_loss(rank: int, logits: Tensor, target: Tensor, **options: Any) -> Any:
    """Of shards of one size, in rank order."""
    start = rank * logits.shape[-1]
    return cross_entropy(logits, target, group=dist.group.WORLD, vocab_start=start, **options)


HARD_CASES = covering(
    {
        "logits": tuple(loss_oracle.hard_logits(1, 1)),
        "size": ("7", "1000", "3000", "32003"),
        "dtype": tuple(BY_NAME),
        "smoothing": ("0", "0.1"),
    },
    # What smoothing makes of a mask is 1e28, and all else is rounded off.
    {"logits": ("masked",), "smoothing": ("0.1",)},
)


def check_bound(case: Case, size: int, call: Any, columns: slice) -> None:
    logits = loss_oracle.hard_logits(8, size)[case["logits"]].to(BY_NAME[case["dtype"]])
    target = random_targets((8,), size // 2 + 1)
    own = logits[:, columns].clone().requires_grad_()
    options: dict[str, Any] = {"label_smoothing": float(case["smoothing"]), "reduction": "none"}
    loss, outputs = call(own, target, outputs=["lse"], **options)
    loss.sum().backward()
    assert own.grad is not None
    given = (own.grad, logits, target, columns)
    loss_oracle.assert_as_good_as_torch(loss, outputs["lse"], *given, **options)


@pytest.mark.parametrize("case", HARD_CASES, ids=named)
def test_error_bound(case: Case) -> None:
    check_bound(case, int(case["size"]), cross_entropy, slice(None))


@in_ranks(3)
def test_error_bound_of_shards(rank: int) -> None:
    """That of one process's torch, over the same logits."""
    for case in HARD_CASES:
        check_bound(case, 3000, partial(even_loss, rank), slice(rank * 1000, rank * 1000 + 1000))


def check_not_finite(value: float, dtype: torch.dtype, call: Any, columns: slice) -> None:
    logits = random_logits((7, 1100), dtype)
    target = random_targets((7,), 1100, ignored=0)
    logits[0, (int(target[0]) + 1) % 1100] = value
    logits[1, target[1]] = value
    logits[2] = value
    logits[3, 1090] = value
    logits[4, :1090] = value
    logits[5, 0], logits[5, 1] = value, math.inf
    for smoothing in (0.0, 0.1):
        options: dict[str, Any] = {"label_smoothing": smoothing, "reduction": "none"}
        theirs = logits.float().clone().requires_grad_()
        ours = logits[:, columns].clone().requires_grad_()
        expected, loss = F.cross_entropy(theirs, target, **options), call(ours, target, **options)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
        (right,) = torch.autograd.grad(expected.sum(), theirs)
        (grad,) = torch.autograd.grad(loss.sum(), ours)
        right = right[:, columns]
        torch.testing.assert_close(grad.float(), right, rtol=1e-2, atol=1e-2, equal_nan=True)
        if value == -math.inf and smoothing == 0:
            assert loss[1] == math.inf


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_not_finite(value: float, dtype: torch.dtype) -> None:
    """NaN and infinities where torch has them: one of them, the target, the row, behind a block."""
    check_not_finite(value, dtype, cross_entropy, slice(None))


@in_ranks(2)
def test_shards_that_are_not_finite_and_ties(rank: int) -> None:
    columns = slice(550 * rank, 550 * rank + 550)
    for value in (math.nan, math.inf, -math.inf):
        check_not_finite(value, FP32, partial(even_loss, rank), columns)
    # Of equal logits the first class is the largest, wherever it is.
    target = torch.arange(12)
    for lowest in (0, 5, 6, 11):
        whole = torch.zeros(12, 12)
        whole[:, :lowest] = -1
        own = whole[:, 6 * rank : 6 * rank + 6]
        _, outputs = even_loss(rank, own, target, outputs=["accuracy"])
        assert outputs["accuracy"].tolist() == (target == lowest).float().tolist()


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_the_gradient_of_a_saturated_softcap(dtype: torch.dtype) -> None:
    """1 - tanh^2 would have lost all digits where a logit is 10 caps from 0."""
    logits, target = loss_oracle.saturated_logits(dtype)
    wanted = F.one_hot(target, logits.shape[1]).float()
    for given in (target, wanted):
        leaf = logits.clone().requires_grad_()
        cross_entropy(leaf, given, softcap=loss_oracle.SATURATED_CAP, reduction="sum").backward()
        assert leaf.grad is not None
        loss_oracle.assert_saturated(leaf.grad, logits, target)


def check_nothing_counts(call: Any) -> None:
    for num_tokens, dtype, inplace in itertools.product((0, 4), DTYPES, (False, True)):
        for reduction, expected in (("mean", math.nan), ("sum", 0.0)):
            leaf = random_logits((num_tokens, 9), dtype).requires_grad_()
            options: dict[str, Any] = {"reduction": reduction, "inplace": inplace}
            ignored = torch.full((num_tokens,), -100)
            loss, outputs = call(leaf * 1, ignored, outputs=OUTPUTS, **options)
            (grad,) = torch.autograd.grad(loss, leaf)
            torch.testing.assert_close(loss, torch.tensor(expected), equal_nan=True)
            assert all((value == 0).all() for value in (grad, *outputs.values()))


def test_nothing_counts() -> None:
    """No tokens, or all ignored: as in torch, but that the gradient of a mean is 0."""
    check_nothing_counts(cross_entropy)


@in_ranks(3)
def test_nothing_counts_on_shards(rank: int) -> None:
    check_nothing_counts(partial(even_loss, rank))


def test_more_than_2_to_the_31_logits() -> None:
    """The rows that count are the first and the last; nothing touches the others' memory."""
    num_tokens, size = 67_200, 32_000
    logits = torch.empty(num_tokens, size, dtype=BF16)
    assert logits.numel() > 2**31
    target = torch.full((num_tokens,), -100)
    target[0], target[-1] = 1, size - 1
    ends = [0, num_tokens - 1]
    logits[ends] = random_logits((2, size), BF16)
    expected = loss_oracle.evaluate(logits[ends], target[ends])
    loss, outputs = cross_entropy(logits, target, outputs=["lse"])
    torch.testing.assert_close(loss.double(), expected.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(outputs["lse"][ends].double(), expected.outputs["lse"])


@pytest.mark.parametrize("items", [4, torch.tensor([2.5])], ids=str)
def test_probabilities_of_one_class(items: Any) -> None:
    """One-hot targets are classes, also where an unlikely class has a logit of -infinity."""
    logits, classes = random_logits((6, 30)), random_targets((6,), 30, ignored=0)
    logits[0, (int(classes[0]) + 1) % 30] = -math.inf
    options: dict[str, Any] = {"z_loss": 1e-2, "logit_scale": 1.3}
    options["class_weight"] = loss_oracle.class_weights(30)
    results = []
    for target in (classes, F.one_hot(classes, 30).float()):
        leaf = logits.clone().requires_grad_()
        loss = cross_entropy(leaf, target, num_items=items, **options)
        loss.backward()
        results.append((loss.detach(), leaf.grad))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(300, 1000), (100_000, 3)], ids=str)
def test_same_bits(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Again, and with another number of threads."""
    logits, target = random_logits(shape, dtype), random_targets(shape[:1], shape[1])
    results = []
    for number in (1, 1, 2):
        with oracle.num_threads(number):
            leaf = logits.clone().requires_grad_()
            loss, outputs = cross_entropy(leaf, target, outputs=OUTPUTS, label_smoothing=0.1)
            loss.backward()
            changed = logits.clone()
            cross_entropy(changed, target, inplace=True, label_smoothing=0.1)
            assert leaf.grad is not None
            tensors = (loss, leaf.grad, changed, *outputs.values())
            results.append([oracle.bits(tensor) for tensor in tensors])
    assert results[0] == results[1] == results[2]
