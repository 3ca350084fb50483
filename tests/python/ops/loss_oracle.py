"""What cross_entropy should give, in float64 by plain torch, from the formulas of its docstring.

As torch has it, an unlikely class costs something only where it is the target or with smoothing:
the sum over classes is taken apart, for 0 * infinity is NaN.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

OUTPUTS = ("loss", "lse", "entropy", "accuracy")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


DEFAULTS: dict[str, Any] = {
    "vocab_size": None,
    "class_weight": None,
    "ignore_index": -100,
    "label_smoothing": 0.0,
    "z_loss": 0.0,
    "softcap": None,
    "logit_scale": 1.0,
    "reduction": "mean",
    "num_items": None,
}


class Expected(NamedTuple):
    """All in float64."""

    loss: Tensor
    outputs: dict[str, Tensor]
    grad: Tensor


def evaluate(logits: Tensor, target: Tensor, upstream: Any = 1.0, **options: Any) -> Expected:
    """The loss, the outputs by token and the logits' gradient for an upstream gradient."""
    given = {**DEFAULTS, **options}
    assert given.keys() == DEFAULTS.keys()
    softcap, smoothing, num_items = (given[n] for n in ("softcap", "label_smoothing", "num_items"))
    x = logits.detach().double().requires_grad_()
    z = x[..., : given["vocab_size"] or x.shape[-1]] * given["logit_scale"]
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    counted = target != given["ignore_index"]
    safe = target.masked_fill(~counted, 0).long()
    weights = torch.ones(z.shape[-1]) if given["class_weight"] is None else given["class_weight"]
    weights = weights.double()
    log_probs, lse = torch.log_softmax(z, -1), torch.logsumexp(z, -1)
    target_weight = weights[safe]
    nll = -target_weight * log_probs.gather(-1, safe[..., None]).squeeze(-1)
    losses = (1 - smoothing) * nll + given["z_loss"] * lse**2
    if smoothing:
        losses = losses - smoothing / z.shape[-1] * (weights * log_probs).sum(-1)
    losses = losses.masked_fill(~counted, 0)
    loss = losses if given["reduction"] == "none" else losses.sum()
    if given["reduction"] == "mean":
        count = target_weight.masked_fill(~counted, 0).sum()
        loss = loss / (count if num_items is None else float(num_items))
    probs = log_probs.exp()
    entropy = -(probs * log_probs).masked_fill(probs == 0, 0).sum(-1)
    accuracy = (z.argmax(-1) == target).double()
    outputs = {"loss": losses, "lse": lse, "entropy": entropy, "accuracy": accuracy}
    (grad,) = torch.autograd.grad((loss * upstream).sum(), x)
    return Expected(
        loss.detach(),
        {name: value.detach().masked_fill(~counted, 0) for name, value in outputs.items()},
        grad.masked_fill(~counted[..., None], 0),
    )


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
    excess = ((actual - expected).abs() - bound.expand(expected.shape))[finite]
    if excess.numel() == 0:
        return
    assert not excess.isnan().any(), f"{what}: NaN"
    worst = int(excess.argmax())
    assert excess[worst] <= 0, (
        f"{what}: {actual[finite][worst]:.9g} instead of {expected[finite][worst]:.9g}, "
        f"{bound.expand(expected.shape)[finite][worst]:.3g} is allowed"
    )


def assert_close(
    result: tuple[Tensor, dict[str, Tensor]], grad: Tensor, expected: Expected
) -> None:
    """To some 20 ulp of fp32 of what is summed up, and the gradient to one of its type besides."""
    loss, outputs = result
    assert loss.dtype == torch.float32
    lse = expected.outputs["lse"]
    unit = 2e-6 * max([1.0, *lse[lse.isfinite()].abs().tolist()])
    assert_within(loss, expected.loss, unit + 2e-6 * expected.loss.abs(), "loss")
    for name, value in outputs.items():
        assert value.dtype == torch.float32
        assert not value.requires_grad
        wanted = expected.outputs[name]
        assert_within(value, wanted, unit + 2e-6 * wanted.abs(), name)
    wanted_grad = expected.grad
    largest = max([1e-30, *wanted_grad[wanted_grad.isfinite()].abs().flatten().tolist()])
    rounding = 0.51 * ulp(wanted_grad, grad.dtype)
    if grad.dtype == torch.float16:
        rounding += 2**-25  # subnormal
    assert_within(grad, wanted_grad, 4e-6 * largest + rounding, "gradient")


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


# ---- logits


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


def shapes_of_logits(num_tokens: int, num_classes: int) -> dict[str, Tensor]:
    """Hard ones, by name: fp32, for a cast to other types."""
    base = random_logits((num_tokens, num_classes), spread=1.0, seed=7)
    padded = base * 3
    padded[:, num_classes // 2 + 1 :] = -math.inf
    masked = padded.clamp(min=-1e30)
    return {
        "random": base * 3,
        "huge": base * 1e4,
        "offset": base + 1e4,
        "negative_offset": base - 1e4,
        "constant": torch.full_like(base, -3.7),
        "padded": padded,
        "masked": masked,
        "one": torch.where(torch.arange(num_classes) == 0, 50.0, -50.0).expand_as(base).clone(),
    }


# ---- options

OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "ignore_a_class": {"ignore_index": 3},
    "smooth": {"label_smoothing": 0.1},
    "all_smooth": {"label_smoothing": 1.0},
    "weight": {"class_weight": True},
    "z_loss": {"z_loss": 1e-2},
    "softcap": {"softcap": 5.0},
    "scale": {"logit_scale": -0.7},
    "padding": {"vocab_size": True},
    "items": {"num_items": 3},
    "items_tensor": {"num_items": torch.tensor(2.5)},
    "sum": {"reduction": "sum"},
    "each": {"reduction": "none"},
}


def targets_for(options: dict[str, Any], num_tokens: int, num_columns: int) -> Tensor:
    return random_targets(
        (num_tokens,),
        options.get("vocab_size", num_columns),
        ignore_index=options.get("ignore_index", -100),
    )


def of_vocabulary(options: dict[str, Any], num_columns: int) -> dict[str, Any]:
    """Options with what depends on the number of classes."""
    options = dict(options)
    if options.get("vocab_size"):
        options["vocab_size"] = max(1, num_columns - num_columns // 5)
    if options.get("class_weight") is True:
        options["class_weight"] = class_weights(options.get("vocab_size", num_columns))
    return options


# ---- a softcap in saturation

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
    rounding = 4e-6 if grad.dtype == torch.float32 else 2**-7  # Triton's interpreter cuts off
    # Below the smallest normal number results may be 0.
    torch.testing.assert_close(grad.cpu().double(), expected, rtol=rounding, atol=4e-38)
