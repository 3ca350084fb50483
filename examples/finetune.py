#!/usr/bin/env python3
"""Trains a small Llama of transformers with AdamW, LOMO and AdaLomo on the same text.

    python examples/finetune.py [--steps 300] [--text FILE] [--out runs/finetune]

The config is random, the text is Python's own unless --text gives one; tokens are bytes. Every
optimizer starts from the same weights and sees the same rows. Held-out loss by step and the memory
of a step, measured, go to a picture and to JSON lines.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from training.corpus import Batches, Corpus, CorpusError, load_corpus

from ringcomm.optim import AdaLomo, Lomo

VOCAB = 256
SEED = 1
# Of the held-out text, at so many points of the curve.
NUM_HELD_OUT_ROWS, NUM_POINTS = 32, 20
# Where each does best among a factor of about 3, on the default model and text.
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), 3e-3, fused=True),
    "lomo": lambda model: Lomo(model, 0.3, clip_grad_norm=1.0),
    "adalomo": lambda model: AdaLomo(model, 0.06),
}


def make_model(hidden: int, layers: int) -> Any:
    """A Llama with random weights, the same in every call, that recomputes its layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    model: Any = LlamaForCausalLM(config)
    # transformers 5 calls it so.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)()
    return model


def held_out_loss(model: nn.Module, rows: Tensor) -> float:
    """In nats per byte."""
    model.eval()
    with torch.no_grad():
        loss = float(model(input_ids=rows, labels=rows).loss)
    model.train()
    return loss


def train(
    name: str, model: nn.Module, corpus: Corpus, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """The points of one optimizer's curve."""
    device = torch.device("cpu")
    batches = Batches(corpus.train, options.context, SEED, device)
    held_out = Batches(corpus.held_out, min(options.context, len(corpus.held_out) - 2), 0, device)
    rows, _ = held_out.rows(0, NUM_HELD_OUT_ROWS)
    opt = OPTIMIZERS[name](model)
    warm_up = max(1, options.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        opt, lambda t: min(1.0, (t + 1) / warm_up) * max(0.1, 1 - t / options.steps)
    )
    points = []
    for step in range(options.steps + 1):
        if step % max(1, options.steps // NUM_POINTS) == 0:
            loss = held_out_loss(model, rows)
            points.append({"optimizer": name, "step": step, "held_out_nats": loss})
            print(f"{name:8} step {step:5}  held out {loss:.3f} nats per byte", flush=True)
        ids, _ = batches.rows(step, options.rows)
        model(input_ids=ids, labels=ids).loss.backward()
        opt.step()
        opt.zero_grad()
        schedule.step()
    return points


def measure(name: str, model: nn.Module, rows: Tensor) -> dict[str, int]:
    """Bytes by part when a step with an optimizer needs most, by torch's MemTracker."""
    optimizer = OPTIMIZERS[name](model)
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        for _ in range(2):  # the first step makes the optimizer's states
            tracker.reset_mod_stats()
            model(input_ids=rows, labels=rows).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    peak = tracker.get_tracker_snapshot("peak")[rows.device]
    parts = {str(getattr(part, "value", part)): num_bytes for part, num_bytes in peak.items()}
    del parts["Total"]
    return parts


def draw(points: list[dict[str, Any]], memory: dict[str, dict[str, int]], path: Path) -> None:
    """Curves on the left, on the right the parts of a step's memory at its peak."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    for name in OPTIMIZERS:
        mine = [point for point in points if point["optimizer"] == name]
        left.plot([p["step"] for p in mine], [p["held_out_nats"] for p in mine], label=name)
    left.set(xlabel="step", ylabel="held-out loss, nats per byte")
    left.legend()
    bottom = [0.0] * len(memory)
    for part in next(iter(memory.values())):
        heights = [of[part] / 2**20 for of in memory.values()]
        right.bar(list(memory), heights, bottom=bottom, label=part)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    right.set(ylabel="MiB at the peak of a step, measured", xlim=(-0.5, len(memory) + 0.9))
    right.legend(loc="center right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line; ends the process with a message when it makes no sense."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=int, default=300)
    add("--rows", type=int, default=8, help="rows of a batch")
    add("--context", type=int, default=128, help="bytes of a row")
    add("--hidden", type=int, default=128, help="width of the model, a multiple of 8")
    add("--layers", type=int, default=3)
    add("--text", type=Path, help="a file to learn instead of pydoc_data.topics")
    add("--out", type=Path, default=Path("runs/finetune"), help="folder of the results")
    options = parser.parse_args(argv)
    if min(options.steps, options.rows, options.layers) < 1 or options.context < 8:
        parser.error("wants a step, a row, a layer and 8 bytes of context at least")
    if options.hidden % 8:
        parser.error("--hidden is a multiple of 8: four heads of an even size")
    return options


def main(argv: list[str]) -> int:
    """Trains with each optimizer, measures, draws; returns the exit code."""
    options = parse(argv)
    try:
        corpus = load_corpus(options.text, options.context)
    except CorpusError as error:
        print(f"finetune.py: {error}", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    points: list[dict[str, Any]] = []
    for name in OPTIMIZERS:
        points += train(name, make_model(options.hidden, options.layers), corpus, options)
    rows = torch.randint(0, VOCAB, (options.rows, options.context))
    memory = {
        name: measure(name, make_model(options.hidden, options.layers), rows) for name in OPTIMIZERS
    }
    for name, parts in memory.items():
        print(f"{name:8} peak of a step", *(f"{k} {v / 2**20:.2f} MiB" for k, v in parts.items()))
    lines = [*points, *({"optimizer": name, "memory": parts} for name, parts in memory.items())]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (options.out / "finetune.jsonl").write_text(text, encoding="utf-8")
    draw(points, memory, options.out / "finetune.png")
    print(f"curves and memory: {options.out}/finetune.png, {options.out}/finetune.jsonl")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
