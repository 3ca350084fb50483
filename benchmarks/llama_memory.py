#!/usr/bin/env python3
"""Steps and peak memory of a Llama of transformers, random weights, on one device, by optimizer.

    python benchmarks/llama_memory.py --device cuda
    python benchmarks/llama_memory.py --device cuda --grow --size 65b

bfloat16, activations recomputed, 8 rows of 1024 tokens, 1.1 billion weights. The ways: forward
only, torch's SGD and fused AdamW, ringcomm's Lomo and AdaLomo, exact clipping by either of its two
modes, and lomo_optim's Lomo where that is installed. "linear loss": ringcomm's linear_cross_entropy
in place of the model's own loss, whose logits and their copies in fp32 are the peak. Each has a
process of its own, so that running out of memory does not end the run. Beside the peak is one
gradient: the bytes of the largest weight, which an update in the backward pass may need beyond the
forward pass. --grow: the most layers with which 1 row of 2048 tokens is trained, by Lomo and by
AdamW.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Any

import harness  # before torch: it sets the number of threads
import torch
from groups import run_ranks
from harness import Options, Report, flag
from torch import Tensor, nn

from _ringcomm.status import RankError
from _ringcomm.values import words
from ringcomm.measure.ranks import Team
from ringcomm.ops import linear_cross_entropy
from ringcomm.optim import AdaLomo, InBackwardOptimizer, Lomo

LR = 1e-3
CLIP_NORM = 1.0
NUM_STEPS = 5
# The initial number of layers of --grow, which doubles it until it does not fit and then bisects.
FIRST_LAYERS = 16
MAX_LAYERS = 4096
# A billion weights; layers of LLaMA-65B, which has 80; and a size for tests: width, width of the
# MLP, heads, heads of keys and values.
SIZES = {"1.1b": (2048, 5632, 32, 4), "65b": (8192, 22016, 64, 64), "tiny": (64, 128, 4, 4)}


def _lomo_optim(model: nn.Module) -> Any:
    from lomo_optim import Lomo as TheirLomo  # type: ignore[import-not-found]

    return TheirLomo(model, lr=LR)


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "forward only": lambda model: None,
    "SGD": lambda model: torch.optim.SGD(model.parameters(), LR),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), LR, fused=True),
    "Lomo": lambda model: Lomo(model, LR),
    "AdaLomo": lambda model: AdaLomo(model, LR),
    "deferred clip": lambda model: Lomo(model, LR, clip_grad_norm=CLIP_NORM),
    "two-pass clip": lambda model: Lomo(model, LR, clip_grad_norm=CLIP_NORM, clip_mode="two_pass"),
    "lomo_optim": _lomo_optim,
}
LINEAR_LOSS = " linear loss"
WAYS |= {f"{way}{LINEAR_LOSS}": WAYS[way] for way in ("SGD", "Lomo")}
GROWN = ("Lomo", "AdamW")


def make_model(size: str, num_layers: int, num_tokens: int, device: torch.device) -> Any:
    """A Llama with random weights, made on the device, with activation recomputation."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, width_of_mlp, num_heads, num_key_value_heads = SIZES[size]
    config = LlamaConfig(
        vocab_size=256 if size == "tiny" else 32000,
        hidden_size=width,
        intermediate_size=width_of_mlp,
        num_attention_heads=num_heads,
        num_key_value_heads=num_key_value_heads,
        num_hidden_layers=num_layers,
        max_position_embeddings=num_tokens,
        use_cache=False,
    )
    torch.set_default_dtype(torch.bfloat16)  # never a copy of it in fp32
    with device:
        model: Any = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    return model


def train(way: str, options: Options, num_layers: int, device: torch.device) -> dict[str, Any]:
    """Runs some steps; returns the fastest one's seconds, peak memory, and losses."""
    rows, num_tokens = (1, 2 * options.tokens) if options.grow else (options.rows, options.tokens)
    torch.manual_seed(0)
    model = make_model(options.size, num_layers, num_tokens, device)
    ids = torch.randint(model.config.vocab_size, (rows, num_tokens), device=device)
    optimizer = WAYS[way](model)
    losses, times = [], []
    for _ in range(NUM_STEPS):
        begin = time.perf_counter()
        with torch.set_grad_enabled(optimizer is not None):
            loss = _loss_of(model, ids, is_linear=way.endswith(LINEAR_LOSS))
        if optimizer is not None:
            _step(optimizer, loss)
        losses.append(loss.item())
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    weights = list(model.parameters())
    return {
        "num_params": sum(weight.numel() for weight in weights),
        "num_layers": num_layers,
        "tokens": rows * num_tokens,
        "step_s": min(times),
        "losses": losses,
        **memory_of(weights, optimizer is not None, device),
    }


def _loss_of(model: Any, ids: Tensor, *, is_linear: bool) -> Tensor:
    """The mean over the next tokens."""
    if not is_linear:
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        return loss
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
    found: Tensor = linear_cross_entropy(hidden, model.lm_head.weight, ids[:, 1:])
    return found


def memory_of(weights: list[Tensor], has_grads: bool, device: torch.device) -> dict[str, Any]:
    """The fields of a record that tell of memory; the peak is None where nobody counts it.

    `forward_bytes` is the peak less one gradient, which is to be that of the forward pass alone.
    """
    one_grad = max(weight.nbytes for weight in weights) if has_grads else 0
    found: dict[str, Any] = dict.fromkeys(("peak_bytes", "forward_bytes", "weights_share"))
    found["one_grad_bytes"] = one_grad
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        total = torch.cuda.get_device_properties(device).total_memory
        share = sum(weight.nbytes for weight in weights) / total
        found |= {"peak_bytes": peak, "forward_bytes": peak - one_grad, "weights_share": share}
    return found


def _step(optimizer: Any, loss: torch.Tensor) -> None:
    if isinstance(optimizer, InBackwardOptimizer):
        optimizer.backward(loss)
    elif hasattr(optimizer, "fused_backward"):
        optimizer.fused_backward(loss.float(), LR)
        return
    else:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def attempt(way: str, options: Options, num_layers: int) -> dict[str, Any] | None:
    """Runs ``train`` in a separate process; returns None if memory ran out.

    Raises:
        RankError: it failed otherwise.
    """
    found: list[dict[str, Any]] = []

    def main(team: Team) -> None:
        team.report(train(way, options, num_layers, options.placement.take(0)))

    try:
        run_ranks(1, main, found.append)
    except RankError as error:
        if "OutOfMemoryError" in str(error):
            return None
        raise
    return found[0]


def grow(way: str, options: Options) -> dict[str, Any] | None:
    """The result with the most layers that fit."""
    best, fits, limit = None, 0, MAX_LAYERS
    num_layers = FIRST_LAYERS
    while fits < num_layers < limit and num_layers - fits >= max(1, fits // 16):
        found = attempt(way, options, num_layers)
        if found is None:
            limit = num_layers
        else:
            best, fits = found, num_layers
        num_layers = 2 * fits if limit == MAX_LAYERS else (fits + limit) // 2
    return best


def measure(options: Options, report: Report) -> None:
    """Runs every way in turn and reports each result at once."""
    from transformers import LlamaForCausalLM  # noqa: F401 - seconds' worth, before the forks

    for name in options.ways or (GROWN if options.grow else WAYS):
        if name == "lomo_optim" and importlib.util.find_spec("lomo_optim") is None:
            report.console.print("not available: lomo_optim is not installed")
            continue
        found = grow(name, options) if options.grow else attempt(name, options, options.layers)
        if found is None:
            report.console.print(f"{name}: out of memory")
            continue
        report.add([{"way": name, "grown": options.grow, **found, "verified": True}])


def check(options: Options) -> None:
    """Raises ValueError for what cannot run here."""
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("transformers is not installed")


def or_unknown(name: str, how: Callable[[float], str]) -> Callable[[dict[str, Any]], str]:
    """A cell, with a question mark for what could not be counted."""
    return lambda record: "?" if record[name] is None else how(record[name])


PROGRAM = harness.Program(
    doc=__doc__,
    kind="llama_memory",
    measure=measure,
    device="cuda",
    flags=[
        flag("--size", str, "1.1b", "of a layer", choices=list(SIZES)),
        flag("--layers", int, 22),
        flag("--rows", int, 8),
        flag("--tokens", int, 1024, "of a row"),
        flag("--ways", words, None, "some of them, separated by commas", known=WAYS),
        ("--grow", {"action": "store_true", "help": "find the largest model that fits instead"}),
    ],
    check=check,
    facts=lambda options: {"dtype": "bfloat16"},
    columns=[
        "way",
        ("weights", lambda r: f"{r['num_params']:,}"),
        ("tokens", lambda r: f"{r['tokens']:,}"),
        ("step ms", lambda r: f"{r['step_s'] * 1e3:,.0f}"),
        ("peak GiB", or_unknown("peak_bytes", lambda peak: f"{peak / 2**30:.2f}")),
        ("one gradient GiB", lambda r: f"{r['one_grad_bytes'] / 2**30:.2f}"),
        ("weights of the GPU's memory", or_unknown("weights_share", lambda s: f"{s:.0%}")),
        ("loss", lambda r: f"{r['losses'][0]:.3f} → {r['losses'][-1]:.3f}"),
    ],
    title=lambda options: f"bfloat16, {options.device}",
)

if __name__ == "__main__":
    PROGRAM.run_script()
