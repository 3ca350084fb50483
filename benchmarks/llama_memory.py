#!/usr/bin/env python3
"""Steps and peak memory of a Llama of transformers, random weights, on one device, by optimizer.

    python benchmarks/llama_memory.py --device cuda
    python benchmarks/llama_memory.py --device cuda --profile FOLDER
    python benchmarks/llama_memory.py --device cuda --predict --ways Lomo --size 65b --layers 80 \
        --rows 1 --tokens 2048

bfloat16, activations recomputed, 8 rows of 1024 tokens, 1.1 billion weights. The ways: forward
only, torch's SGD and fused AdamW, ringcomm's Lomo and AdaLomo, exact clipping by either of its two
modes, and lomo_optim's Lomo where that is installed. "linear loss": ringcomm's linear_cross_entropy
in place of the model's own loss, whose logits and their copies in fp32 are the peak. Each has a
process of its own, so that running out of memory does not end the run. Beside the peak is one
gradient: the bytes of the largest weight, which an update in the backward pass may need beyond the
forward pass. --predict: each way says first what it will take of torch's allocator, and does not
begin where the GPU has less. --profile: all ways in one process, with torch.profiler's table and
trace of two steps of each.
"""

from __future__ import annotations

import gc
import importlib.util
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import harness  # before torch: it sets the number of threads
import torch
from groups import run_ranks
from harness import Options, Report, flag
from predicted_memory import CUBLAS_BYTES, traced
from torch import Tensor, nn
from torch.profiler import profile as torch_profiler
from torch.profiler import schedule

from _ringcomm.status import RankError
from _ringcomm.values import words
from ringcomm.measure.ranks import Team
from ringcomm.ops import linear_cross_entropy
from ringcomm.optim import AdaLomo, InBackwardOptimizer, Lomo

LR = 1e-3
CLIP_NORM = 1.0
NUM_STEPS = 5
PROFILED = schedule(wait=0, warmup=NUM_STEPS - 2, active=2)
NUM_TABLE_ROWS = 60
NUM_PREDICTED_STEPS = 2  # what the others take is the same
GIB = 1 << 30
# A billion weights; layers of LLaMA-65B, which has 80; and a size for tests: width, width of the
# MLP, heads, heads of keys and values, words.
SIZES = {
    "1.1b": (2048, 5632, 32, 4, 32000),
    "65b": (8192, 22016, 64, 64, 32000),
    "tiny": (64, 128, 4, 4, 256),
}


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
WAYS |= {f"{way}{LINEAR_LOSS}": WAYS[way] for way in ("forward only", "SGD", "Lomo")}
PREDICTED = ("forward only", "SGD", "Lomo")  # which run on meta tensors


def make_model(size: str, num_layers: int, num_tokens: int, device: torch.device) -> Any:
    """A Llama with random weights, made on the device, with activation recomputation."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, width_of_mlp, num_heads, num_key_value_heads, vocab_size = SIZES[size]
    config = LlamaConfig(
        vocab_size=vocab_size,
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


def train(
    way: str,
    options: Options,
    num_layers: int,
    device: torch.device,
    num_steps: int = NUM_STEPS,
    on_step: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Runs some steps; returns the fastest one's seconds, peak memory, and losses."""
    rows, num_tokens = options.rows, options.tokens
    torch.manual_seed(0)
    model = make_model(options.size, num_layers, num_tokens, device)
    ids = torch.randint(model.config.vocab_size, (rows, num_tokens), device=device)
    optimizer = WAYS[way](model)
    losses, times = [], []
    for _ in range(num_steps):
        begin = time.perf_counter()
        with torch.set_grad_enabled(optimizer is not None):
            loss = _loss_of(model, ids, is_linear=way.endswith(LINEAR_LOSS))
        if optimizer is not None:
            _step(optimizer, loss)
        losses.append(loss.item())
        if _is_counted(device):
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - begin)
        on_step()
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
    """The fields of a record that tell of memory; a peak is None where nobody counts it.

    `forward_bytes` is the peak less one gradient, which is to be that of the forward pass alone.
    """
    one_grad = max(weight.nbytes for weight in weights) if has_grads else 0
    num_bytes = sum(weight.nbytes for weight in weights)
    names = "peak_bytes", "reserved_bytes", "forward_bytes", "weights_share"
    found: dict[str, Any] = dict.fromkeys(names)
    found |= {"one_grad_bytes": one_grad, "weights_bytes": num_bytes}
    if _is_counted(device):
        module: Any = torch.get_device_module(device)
        peak, (_, device_bytes) = module.max_memory_allocated(device), module.mem_get_info(device)
        found |= {"peak_bytes": peak, "reserved_bytes": module.max_memory_reserved(device)}
        found |= {"forward_bytes": peak - one_grad, "weights_share": num_bytes / device_bytes}
    return found


def _is_counted(device: torch.device) -> bool:
    """Whether torch's allocator counts the memory of its tensors."""
    return device.type not in ("cpu", "meta")


def predict(
    way: str,
    options: Options,
    num_layers: int,
    *,
    as_cuda: bool,
    num_steps: int = NUM_PREDICTED_STEPS,
) -> dict[str, Any]:
    """What train() takes of torch's allocator, as fields of a record; nothing is allocated.

    `predicted_parts` are the weights, the layers' checkpoints, cuBLAS's workspaces, and the
    working set: what else lives at the peak.
    """
    with traced(as_cuda=as_cuda) as trace:
        device = torch.device("meta")
        found = train(way, options, num_layers, device, num_steps)
    peak_bytes = trace.allocator.peak_bytes
    one_checkpoint = found["tokens"] * SIZES[options.size][0] * torch.bfloat16.itemsize
    parts = {
        "weights": found["weights_bytes"],
        "checkpoints": num_layers * one_checkpoint if way != "forward only" else 0,
        "cuBLAS": trace.num_workspaces * CUBLAS_BYTES,
    }
    parts["working set"] = peak_bytes - sum(parts.values())
    reserved_bytes = trace.allocator.reserved_bytes
    fields = {"predicted_peak_bytes": peak_bytes, "predicted_reserved_bytes": reserved_bytes}
    return {**fields, "predicted_parts": parts}


def sentence_of(predicted: dict[str, Any]) -> str:
    """What is printed of it before the steps."""
    parts = (f"{part / GIB:.2f} {name}" for name, part in predicted["predicted_parts"].items())
    peak, reserved = predicted["predicted_peak_bytes"], predicted["predicted_reserved_bytes"]
    return f"{peak / GIB:.2f} GiB ({', '.join(parts)}), {reserved / GIB:.2f} GiB reserved"


def refusal(predicted: dict[str, Any], device: torch.device) -> str | None:
    """Why training is not begun, in a sentence; None where it is."""
    if not _is_counted(device):
        return None
    free_bytes, _ = torch.get_device_module(device).mem_get_info(device)
    reserved = predicted["predicted_reserved_bytes"]
    if reserved <= free_bytes:
        return None
    free = f"the {free_bytes / GIB:.2f} GiB that are free"
    return f"refused, because {reserved / GIB:.2f} GiB do not fit into {free}"


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


class RefusedError(RankError):
    """What a way is predicted to take is not free."""


def attempt(
    way: str, options: Options, num_layers: int, say: Callable[[str], None]
) -> dict[str, Any] | None:
    """Runs ``train`` in a separate process; returns None where memory ran out, and says so.

    Raises:
        RefusedError: it was not begun.
        RankError: it failed otherwise, or ran out of memory after a prediction.
    """
    found: dict[str, Any] = {}

    def main(team: Team) -> None:
        device, predicted = options.placement.take(0), {}
        if options.predict:
            predicted = predict(way, options, num_layers, as_cuda=device.type == "cuda")
            team.report({"predicted": sentence_of(predicted)})
            refused = refusal(predicted, device)
            if refused:
                team.report({"refused": refused})
                return
        trained = train(way, options, num_layers, device)
        for name in ("peak_bytes", "reserved_bytes") if predicted and _is_counted(device) else ():
            predicted[f"{name}_of_prediction"] = trained[name] / predicted[f"predicted_{name}"]
        team.report({**trained, **predicted})

    def receive(message: dict[str, Any]) -> None:
        if "predicted" in message:
            say(f"{way}: predicted {message['predicted']}")
        else:
            found.update(message)

    try:
        run_ranks(1, main, receive)
    except RankError as error:
        if options.predict or "OutOfMemoryError" not in str(error):
            raise
        say(f"{way}: out of memory with {num_layers} layers")
    if "refused" in found:
        raise RefusedError(f"{way}: {found['refused']}")
    return found or None


def profile(ways: list[str], options: Options, report: Report) -> None:
    """Runs each way in one process, under a profiler; a table and a trace of each in a folder."""

    def main(team: Team) -> None:
        device = options.placement.take(0)
        for way in ways:
            if _is_counted(device):
                gc.collect()  # the model and the optimizer of the way before
                torch.get_device_module(device).empty_cache()
                torch.get_device_module(device).reset_peak_memory_stats(device)
            path = options.profile / f"llama_memory-{way.replace(' ', '_')}"
            write = partial(_write_profile, path)
            with torch_profiler(schedule=PROFILED, on_trace_ready=write) as seen:
                found = train(way, options, options.layers, device, NUM_STEPS, seen.step)
            team.report({"way": way, **found, "verified": True})

    run_ranks(1, main, lambda record: report.add([record]))


def _write_profile(path: Path, seen: Any) -> None:
    table = seen.key_averages().table("self_device_time_total", row_limit=NUM_TABLE_ROWS)
    path.with_suffix(".txt").write_text(table, encoding="utf-8")
    seen.export_chrome_trace(f"{path}.json.gz")


def measure(options: Options, report: Report) -> None:
    """Runs every way in turn and reports each result at once.

    Raises RankError at the end with the ways that were refused.
    """
    from transformers import LlamaForCausalLM  # noqa: F401 - seconds' worth, before the forks

    ways = [*(options.ways or WAYS)]
    try:
        importlib.import_module("lomo_optim")
    except ImportError as error:
        report.console.print(f"not available: lomo_optim: {error}")
        ways = [way for way in ways if way != "lomo_optim"]
    if options.profile is not None:
        profile(ways, options, report)
        return
    refused = []
    for name in ways:
        try:
            found = attempt(name, options, options.layers, report.console.print)
        except RefusedError as error:
            refused.append(str(error))
            continue
        if found is not None:
            report.add([{"way": name, **found, "verified": True}])
    if refused:
        raise RankError("; ".join(refused))


def check(options: Options) -> None:
    """Raises ValueError for what cannot run here."""
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("transformers is not installed")
    if options.predict and not {*(options.ways or WAYS)} <= {*PREDICTED}:
        raise ValueError(f"--predict is for the ways {', '.join(PREDICTED)}; name them in --ways")


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
        flag("--profile", Path, None, "profile two steps of each, into a folder", metavar="FOLDER"),
        ("--predict", {"action": "store_true", "help": "say the peak before it is reached"}),
    ],
    check=check,
    facts=lambda options: {"dtype": "bfloat16"},
    columns=[
        "way",
        ("weights", lambda r: f"{r['num_params']:,}"),
        ("tokens", lambda r: f"{r['tokens']:,}"),
        ("step ms", lambda r: f"{r['step_s'] * 1e3:,.0f}"),
        ("peak GiB", or_unknown("peak_bytes", lambda peak: f"{peak / GIB:.2f}")),
        ("reserved GiB", or_unknown("reserved_bytes", lambda peak: f"{peak / GIB:.2f}")),
        ("one gradient GiB", lambda r: f"{r['one_grad_bytes'] / GIB:.2f}"),
        ("weights of the GPU's memory", or_unknown("weights_share", lambda s: f"{s:.0%}")),
        ("loss", lambda r: f"{r['losses'][0]:.3f} → {r['losses'][-1]:.3f}"),
    ],
    title=lambda options: f"bfloat16, {options.device}",
)

if __name__ == "__main__":
    PROGRAM.run_script()
