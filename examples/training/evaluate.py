"""What was learned: bits per byte on text that no step saw, and a sample."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from training.corpus import Corpus
from training.launch import Interrupted, stop_requested
from training.model import Llama

EVAL_ROWS = 32
SAMPLE_TEMPERATURE = 0.7


def prompt_of(corpus: Corpus) -> bytes:
    """How a sample begins: as an English sentence, or as the held-out text where there are none."""
    english = b"The "
    return english if english in corpus.train else corpus.held_out[: len(english)]


def _tokens(data: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long().to(device)


@torch.no_grad()
def held_out_bits_per_byte(
    model: Llama, corpus: Corpus, context: int, device: torch.device
) -> float:
    """Cross-entropy of the held-out bytes in bits per byte, each predicted exactly once.

    Windows of ``context`` bytes move by half, and only the second half of each counts, so every
    byte has between context / 2 and context bytes in front of it; the first ones have the end of
    the training text there.
    """
    stride = context // 2
    held = len(corpus.held_out)
    lead = context - stride
    tokens = _tokens(corpus.data[corpus.split - lead - 1 :], device)
    total = 0.0
    starts = list(range(0, held, stride))
    for group in (starts[i : i + EVAL_ROWS] for i in range(0, len(starts), EVAL_ROWS)):
        rows = [tokens[s : s + context + 1] for s in group]
        window = torch.stack([F.pad(r, (0, context + 1 - r.numel())) for r in rows])
        logits = model.logits(window[:, :-1])[:, lead:]
        losses = F.cross_entropy(
            logits.flatten(0, 1), window[:, lead + 1 :].flatten(), reduction="none"
        )
        exists = torch.arange(stride, device=device) + torch.tensor(group, device=device)[:, None]
        total += float(losses.view(len(group), stride)[exists < held].double().sum())
    return total / held / math.log(2)


@torch.no_grad()
def sample(
    model: Llama, prompt: bytes, num_bytes: int, context: int, seed: int, device: torch.device
) -> bytes:
    """``num_bytes`` that the model writes after ``prompt``; the same for the same seed.

    Raises:
        Interrupted: asked to stop meanwhile.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = _tokens(prompt, device)
    for _ in range(num_bytes):
        if stop_requested():
            raise Interrupted
        logits = model.logits(tokens[None, -context:])[0, -1].float().cpu()
        weights = (logits / SAMPLE_TEMPERATURE).softmax(dim=-1)
        following = torch.multinomial(weights, 1, generator=generator)
        tokens = torch.cat((tokens, following.to(device)))
    return bytes(tokens[-num_bytes:].tolist())
