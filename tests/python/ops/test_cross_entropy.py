"""The losses against float64: of logits, of a linear layer, and over a vocabulary in shards."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import loss_oracle
import oracle
import pytest
import torch
import torch.distributed as dist
from loss_oracle import (
    BY_NAME,
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
from ringcomm.ops.losses import linear_blocks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HIDDEN = 24


def set_blocks(set_value: Callable[[Any, str, int], None]) -> None:
    """Several of tokens and of classes, the last ones short."""
    sizes = {"BLOCK_BYTES": 1, "MIN_BLOCK_TOKENS": 16, "MIN_BLOCK_CLASSES": 10}
    sizes |= {"CUDA_BLOCK_BYTES": 1, "CUDA_PARTS_OF_WEIGHT": 1 << 60, "CUDA_TILE": 16}
    for name, value in sizes.items():
        set_value(linear_blocks, name, value)


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
    given = loss_oracle.on(device, options)
    result = call(leaf if part is None else leaf * 1, target.to(device), **given)
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
    if case["layout"] == "reversed":
        layer[1] = layer[1].t().contiguous().t()
    places = [tokens, slice(first, first + size), slice(first, first + size)]
    own = [hidden[tokens], *(own_part(tensor, 0, first, size) for tensor in layer[1:])]
    x, weight, bias = (tensor.detach().to(device).requires_grad_() for tensor in own)
    call = call_layer_module if case["path"] == "linear module" else linear_cross_entropy
    given = {**loss_oracle.on(device, options), **(how or {}), "outputs": OUTPUTS}
    given["class_weight"] = given.pop("weight", None)
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
        # The logarithm of a sum that begins with 1: rounded as 1 is, however small it is.
        least_size = 1.0 if name == "entropy" else 1e-3
        loss_oracle.assert_near(got, right, other, dtype, f"{name} of {case}", least_size)
    for grad, right, other, at in zip(grads, exact[1], torchs[1], places, strict=True):
        assert grad is not None
        num_rows = len(right[at])
        parts = (grad[:num_rows], right[at], other[at], dtype)
        loss_oracle.assert_near(*parts, f"gradient of shape {tuple(right.shape)} of {case}")
        assert not grad[num_rows:].any()  # behind the vocabulary
    return [oracle.bits(tensor.cpu()) for tensor in found]


@pytest.mark.parametrize("case", CASES, ids=named)
def test_against_float64(case: Case, device: str) -> None:
    """Every pair of paths, options, types, sizes and layouts.

    https://github.com/pytorch/pytorch/issues/72056: the weight of an ignored target was read.
    https://github.com/unslothai/unsloth-zoo/pull/930: the scale of a head counted twice.
    https://github.com/allenai/OLMo-core/pull/702: the z-loss was in the outputs of every loss.
    https://github.com/NVIDIA-NeMo/Automodel/issues/3803: of blocks, a mean of means.
    """
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
    logits = random_logits((NUM_TOKENS, NUM_CLASSES))
    target = torch.arange(NUM_TOKENS) % NUM_CLASSES
    for ranks in ([1, 2], [2], [0, 2]):
        group = dist.new_group(ranks)
        if rank in ranks:
            part = SHARDS["even" if len(ranks) == 2 else "alone"][ranks.index(rank)]
            for start in (part[0], None):
                how = {"group": group, "vocab_start": start, "vocab_size": NUM_CLASSES}
                check_logits(logits, target, "cpu", partial(cross_entropy, **how), part)
