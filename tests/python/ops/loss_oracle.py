"""What the losses should give, by plain torch from the formula of cross_entropy's docstring.

As torch has it, an unlikely class costs something only where it is the target or with smoothing:
the sum over classes is taken apart, for 0 * infinity is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from pair_table import Case, Table
from torch import Tensor

OUTPUTS = ("loss", "lse", "entropy", "accuracy")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BY_NAME = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def reference(
    logits: Tensor,
    target: Tensor,
    *,
    wide: torch.dtype = torch.float64,
    vocab_size: int | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    num_items: Any = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and outputs by token, in `wide` from the logits on; differentiable."""
    z = logits.to(wide)[..., :vocab_size] * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    if target.is_floating_point():
        wanted = target.to(z) * (1 - label_smoothing) + label_smoothing / z.shape[-1]
        wanted = wanted if weight is None else wanted * weight.to(z)
        losses = z_loss * torch.logsumexp(z, -1) ** 2 - (wanted * torch.log_softmax(z, -1)).sum(-1)
        num_rows = losses.numel() if num_items is None else float(num_items)
        mean = losses.sum() / torch.tensor(num_rows, dtype=wide)
        return {"none": losses, "sum": losses.sum(), "mean": mean}[reduction], {}
    counted = target != ignore_index
    safe = target.masked_fill(~counted, 0).long()
    weights = torch.ones(z.shape[-1], dtype=wide) if weight is None else weight.to(wide)
    log_probs, lse = torch.log_softmax(z, -1), torch.logsumexp(z, -1)
    nll = -weights[safe] * log_probs.gather(-1, safe[..., None]).squeeze(-1)
    losses = (1 - label_smoothing) * nll + z_loss * lse**2
    if label_smoothing:
        losses = losses - label_smoothing / z.shape[-1] * (weights * log_probs).sum(-1)
    losses = losses.masked_fill(~counted, 0)
    loss = losses if reduction == "none" else losses.sum()
    if reduction == "mean":
        count = weights[safe].masked_fill(~counted, 0).sum()
        loss = loss / (count if num_items is None else float(num_items))
    probs = log_probs.exp()
    entropy = -(probs * log_probs).masked_fill(probs == 0, 0).sum(-1)
    accuracy = (z.argmax(-1) == target).to(wide)
    outputs = {"loss": losses, "lse": lse, "entropy": entropy, "accuracy": accuracy}
    return loss, {key: value.detach().masked_fill(~counted, 0) for key, value in outputs.items()}


class Expected(NamedTuple):
    loss: Tensor
    outputs: dict[str, Tensor]
    grad: Tensor


def evaluate(
    logits: Tensor,
    target: Tensor,
    upstream: Any = 1.0,
    wide: torch.dtype = torch.float64,
    **options: Any,
) -> Expected:
    """The loss, the outputs by token and the logits' gradient for an upstream gradient."""
    x = logits.detach()
    x = (x.double() if wide == torch.float64 else x.clone()).requires_grad_()
    loss, outputs = reference(x, target, wide=wide, **options)
    (grad,) = torch.autograd.grad((loss * upstream).sum(), x)
    if not target.is_floating_point():
        grad = grad.masked_fill((target == options.get("ignore_index", -100))[..., None], 0)
    return Expected(loss.detach(), outputs, grad)


def evaluate_layer(layer: list[Tensor], target: Tensor, upstream: Any, **options: Any) -> Any:
    """The loss, outputs and gradients of hidden, weight and bias, in the layer's dtype."""
    hidden, weight, bias = layer
    logits = F.linear(hidden, weight, bias)
    loss, outputs, grad = evaluate(logits, target, upstream, **options)
    rows, tokens = grad.reshape(-1, len(weight)), hidden.reshape(-1, weight.shape[1])
    return [loss, *outputs.values()], [grad @ weight, rows.t() @ tokens, rows.sum(0)]


# ---- comparisons

# Of 16 bits.
ROUNDING_ULPS = 0.51


def ulp(magnitude: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The distance between numbers of a type at a magnitude (float64)."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(magnitude.double().abs().clamp(min=info.tiny)).exponent - 1
    return info.eps * 2.0 ** exponent.double()


def assert_within(actual: Tensor, expected: Tensor, bound: Tensor, what: str) -> None:
    """Each element at most `bound` away; infinities and NaN where expected."""
    assert actual.shape == expected.shape, f"{what}: {actual.shape}, not {expected.shape}"
    actual = actual.detach().double()
    finite = expected.isfinite()
    torch.testing.assert_close(
        actual[~finite], expected[~finite], equal_nan=True, msg=lambda m: f"{what}: {m}"
    )
    bounds = bound.expand(expected.shape)
    wrong = ~((actual - expected).abs() <= bounds) & finite
    assert not wrong.any(), (
        f"{what}: {actual[wrong][0]:.9g} instead of {expected[wrong][0]:.9g}, "
        f"{bounds[wrong][0]:.3g} is allowed"
    )


def assert_close(
    result: tuple[Tensor, dict[str, Tensor]], grad: Tensor, expected: Expected
) -> None:
    """To some 20 ulp of fp32 of what is summed up, and the gradient to one of its type besides."""
    loss, outputs = result
    assert loss.dtype == torch.float32
    lse = expected.outputs.get("lse", expected.loss.reshape(-1))
    unit = 2e-6 * max([1.0, *lse[lse.isfinite()].abs().tolist()])
    assert_within(loss, expected.loss, unit + 2e-6 * expected.loss.abs(), "loss")
    for name, value in outputs.items():
        assert value.dtype == torch.float32
        assert not value.requires_grad
        wanted = expected.outputs[name]
        assert_within(value, wanted, unit + 2e-6 * wanted.abs(), name)
    largest = max([1e-10, *expected.grad[expected.grad.isfinite()].abs().flatten().tolist()])
    rounding = ROUNDING_ULPS * ulp(expected.grad, grad.dtype)
    if grad.dtype == torch.float16:
        rounding += 2**-25  # subnormal
    assert_within(grad, expected.grad, 4e-6 * largest + rounding, "gradient")


def assert_near(
    actual: Tensor,
    exact: Tensor,
    torchs: Tensor,
    dtype: torch.dtype,
    what: str,
    least_size: float = 1e-3,
) -> None:
    """No further off than torch in the same dtype, half as much again and a rounding.

    The rounding is one of the largest number, or of `least_size` if that is larger.
    """
    assert actual.shape == exact.shape, (actual.shape, exact.shape)
    finite = exact.isfinite()
    actual, exact, torchs = (t.detach().cpu().double() for t in (actual, exact, torchs))
    torch.testing.assert_close(actual[~finite], exact[~finite], equal_nan=True)
    if finite.any():
        size = exact[finite].abs().max().clamp(min=least_size)
        allowed = 1.5 * (torchs - exact)[finite].abs().max()
        allowed += (torch.finfo(dtype).eps + 16 * torch.finfo(torch.float32).eps) * size
        error = (actual - exact)[finite].abs().max()
        assert error <= allowed, f"{what}: {error:.3g}, and {allowed:.3g} is allowed"


def assert_as_good_as_torch(
    loss: Tensor,
    lse: Tensor,
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    columns: slice = slice(None),
    **options: Any,
) -> None:
    """Errors are at most those of torch's cross_entropy in the same type * 1.5, and 2 ulp of fp32
    at max(1, |lse|); 16-bit gradients are rounded once besides.

    The loss is that of each token, the gradient that of their sum, in these columns.
    """
    expected = evaluate(logits, target, **options)
    theirs = logits.clone().requires_grad_()
    their_loss = F.cross_entropy(theirs, target, **options)
    (their_grad,) = torch.autograd.grad(their_loss.sum(), theirs)
    right_lse = expected.outputs["lse"]
    their_lse = torch.logsumexp(logits, -1).masked_fill(target == -100, 0)
    unit = 2 * ulp(right_lse.abs().clamp(min=1))

    def bound(their: Tensor, right: Tensor) -> Tensor:
        return 1.5 * (their.detach().double() - right).abs().nan_to_num(0.0)

    assert_within(loss, expected.loss, bound(their_loss, expected.loss) + unit, "loss")
    assert_within(lse, right_lse, bound(their_lse, right_lse) + unit, "lse")
    right = expected.grad[:, columns]
    allowed = bound(their_grad[:, columns], right) + unit[:, None]
    if logits.dtype != torch.float32:
        allowed += 0.51 * ulp(right, logits.dtype)
    assert_within(grad, right, allowed, "gradient")


# ---- what a loss is called with


def random_logits(
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    *,
    spread: float = 3.0,
    seed: int = 0,
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * spread).to(dtype)


def random_targets(
    shape: tuple[int, ...], vocab_size: int, *, ignored: float = 0.2, ignore_index: int = -100
) -> Tensor:
    """Classes, some of them ignored (not the first)."""
    generator = torch.Generator().manual_seed(math.prod(shape) + vocab_size)
    target = torch.randint(vocab_size, shape, generator=generator)
    drop = torch.rand(shape, generator=generator) < ignored
    if drop.dim() > 0 and drop.numel() > 0:
        drop.view(-1)[0] = False
    return target.masked_fill(drop & bool(shape), ignore_index)


def class_weights(vocab_size: int) -> Tensor:
    """From 0.25 to 2, and some zeros."""
    generator = torch.Generator().manual_seed(vocab_size)
    weight = torch.rand(vocab_size, generator=generator) * 1.75 + 0.25
    weight[3::5] = 0
    return weight


# Axes of a table of cases: the plain value first. What depends on the number of classes is True.
OPTION_AXES: dict[str, dict[str, dict[str, Any]]] = {
    "ignore": {"-100": {}, "a class": {"ignore_index": 3}},
    "smoothing": {"0": {}, "0.1": {"label_smoothing": 0.1}, "1": {"label_smoothing": 1.0}},
    "weight": {"none": {}, "some": {"weight": True}},
    "z_loss": {"0": {}, "0.01": {"z_loss": 1e-2}},
    "softcap": {"none": {}, "5": {"softcap": 5.0}},
    "scale": {"1": {}, "-0.7": {"logit_scale": -0.7}},
    "padding": {"none": {}, "some": {"vocab_size": True}},
    "reduction": {
        "mean": {},
        "items": {"num_items": 3},
        "items_tensor": {"num_items": torch.tensor([2.5])},
        "sum": {"reduction": "sum"},
        "none": {"reduction": "none"},
    },
}


def covering(axes: dict[str, Iterable[str]], *never: dict[str, tuple[str, ...]]) -> list[Case]:
    """Cases that hold every pair of values, but for values that never go together."""
    table = {axis: tuple(values) for axis, values in axes.items()}
    return Table(table, (), tuple(never)).covering


def named(case: Case) -> str:
    return ",".join(case.values())


def options_of(case: dict[str, str], num_columns: int) -> dict[str, Any]:
    """The options that a case of these axes stands for, over so many columns."""
    options: dict[str, Any] = {}
    for axis, values in OPTION_AXES.items():
        options |= values[case.get(axis, next(iter(values)))]
    if options.get("vocab_size"):
        options["vocab_size"] = max(1, num_columns - num_columns // 5)
    if options.get("weight") is True:
        options["weight"] = class_weights(options.get("vocab_size", num_columns))
    return options


def on(device: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Options whose tensors are on a device."""
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()}


def hard_logits(num_tokens: int, num_classes: int) -> dict[str, Tensor]:
    """By name: fp32, for a cast to other types."""
    base = random_logits((num_tokens, num_classes), spread=1.0, seed=7)
    padded = base * 3
    padded[:, num_classes // 2 + 1 :] = -math.inf
    return {
        "random": base * 3,
        "huge": base * 1e4,
        "offset": base + 1e4,
        "negative_offset": base - 1e4,
        "constant": torch.full_like(base, -3.7),
        "padded": padded,
        "masked": padded.clamp(min=-1e30),
        "one": torch.where(torch.arange(num_classes) == 0, 50.0, -50.0).expand_as(base).clone(),
    }


SATURATED_CAP = 4.0  # a power of two: logits / cap are exact


def saturated_logits(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits up to 50 caps from 0, whose z hardly differ, and targets at both ends and at 0."""
    row = torch.linspace(-50, 50, 1101) * SATURATED_CAP
    return row.to(dtype).repeat(3, 1), torch.tensor([0, 550, 1100])


def assert_saturated(grad: Tensor, logits: Tensor, target: Tensor) -> None:
    """The gradient of the summed loss, relative to each element's own size."""
    ratio = logits.double() / SATURATED_CAP
    probabilities = torch.softmax(SATURATED_CAP * ratio.tanh(), -1)
    expected = (probabilities - F.one_hot(target, logits.shape[1])) / ratio.cosh().square()
    rounding = 4e-6 if grad.dtype == torch.float32 else 2**-7
    # e^-2|ratio| passes on an error of the ratio: GPUs divide with up to 2 units in the last place.
    allowed = expected.abs() * (rounding + 2 * ratio.abs() * 2**-22)
    # Below the smallest normal number results may be 0.
    error = (grad.cpu().double() - expected).abs()
    assert (error <= allowed + 4e-38).all(), f"{(error / allowed).max()} of what is allowed"
