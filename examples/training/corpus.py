"""What is learned: a text as bytes, its split, and the batch that belongs to a step."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT_SHARE = 0.05
# Fewer held-out bytes than this give a figure that means nothing.
MIN_HELD_OUT_BYTES = 32


class CorpusError(ValueError):
    """The text cannot be trained on; the message says why and what to do."""


@dataclass(frozen=True)
class Corpus:
    """A text as bytes. Tokens are bytes (vocabulary 256), so any encoding works.

    ``held_out`` is the last 5 % of the text, ``train`` what stands before it.
    """

    name: str
    data: bytes

    @property
    def split(self) -> int:
        """Number of training bytes."""
        return len(self.data) - max(1, round(len(self.data) * HELD_OUT_SHARE))

    @property
    def train(self) -> bytes:
        """The bytes that are trained on."""
        return self.data[: self.split]

    @property
    def held_out(self) -> bytes:
        """The bytes that no step sees."""
        return self.data[self.split :]

    @property
    def sha256(self) -> str:
        """Of the whole text; it differs between patch releases of Python."""
        return hashlib.sha256(self.data).hexdigest()

    def gzip_bits_per_byte(self) -> tuple[float, float]:
        """Bits per byte that ``gzip -9`` needs: of the held-out part alone, of the whole text."""
        held, whole = (
            8 * len(gzip.compress(part, compresslevel=9, mtime=0)) / len(part)
            for part in (self.held_out, self.data)
        )
        return held, whole


def load_corpus(path: Path | None, context: int) -> Corpus:
    """Reads ``path``, or joins Python's own ``pydoc_data.topics`` in the order of their names.

    Args:
        path: a file of any encoding, or None for the text that every full Python carries.
        context: bytes that one training row holds; the text must exceed it several times.

    Raises:
        CorpusError: unreadable, empty, or too short.
    """
    if path is None:
        try:
            from pydoc_data.topics import topics
        except ImportError as error:
            raise CorpusError(
                "this Python comes without pydoc_data.topics (a stripped build?); "
                "give a text of your own with --text FILE"
            ) from error
        corpus = Corpus("pydoc_data.topics", "\n".join(topics[k] for k in sorted(topics)).encode())
    else:
        try:
            corpus = Corpus(str(path), path.read_bytes())
        except OSError as error:
            raise CorpusError(f"--text {path}: cannot be read: {error.strerror}") from error
    if not corpus.data:
        raise CorpusError(f"--text {corpus.name}: the file is empty; there is nothing to learn")
    if corpus.split <= context + 1 or len(corpus.held_out) < MIN_HELD_OUT_BYTES:
        shortest = max(round((context + 3) / (1 - HELD_OUT_SHARE)), 20 * MIN_HELD_OUT_BYTES)
        raise CorpusError(
            f"--text {corpus.name}: {len(corpus.data)} bytes are too few for rows of {context} "
            f"bytes and a held-out part; give {shortest} bytes or more"
        )
    return corpus


class Batches:
    """Rows drawn at random from the training bytes, as a function of (seed, step) alone.

    So every system, backend and number of ranks sees the same rows at the same step, and the data
    position after a resume is the step number: there is no other random state to restore.
    """

    def __init__(self, data: bytes, context: int, seed: int, device: torch.device) -> None:
        self._tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._context = context
        self._seed = seed
        self._device = device

    def rows(self, step: int, num_rows: int) -> tuple[Tensor, Tensor]:
        """The global batch of ``step``.

        Returns:
            inputs and targets, int64 [num_rows, context]; targets are inputs moved by one byte.
        """
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        last_start = self._tokens.numel() - self._context - 1
        starts = torch.randint(0, last_start + 1, (num_rows, 1), generator=generator)
        window = self._tokens[starts + torch.arange(self._context + 1)].long().to(self._device)
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()
