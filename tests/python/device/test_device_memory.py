"""The memory that torch's allocator takes is predicted: 80 layers of LLaMA-65B, scaled down."""

from __future__ import annotations

import random
from functools import cache
from types import SimpleNamespace
from typing import Any

import emugpu
import emulated_gpu
import llama_memory
import predicted_memory
import pytest
import torch
from cells import RESULTS
from emulated_gpu import in_emulated_ranks, run_on_gpus
from html_report import read_records

pytestmark = emulated_gpu.needs_emulated_gpu

NUM_LAYERS = 80
SCALE = 64  # of each length; of bytes it is the square
H200_BYTES = 141_000_000_000
SIZE = "65b scaled"
GPU = "emugpu:0"
SEGMENTS = {"RINGCOMM_EMULATOR_SEGMENTS": "1"}


def options(size: str, rows: int = 1, tokens: int = 2048) -> Any:
    return SimpleNamespace(size=size, rows=rows, tokens=tokens, grow=False)


def scaled() -> Any:
    width, width_of_mlp, *_, num_words = llama_memory.SIZES["65b"]
    lengths = (width, width_of_mlp, SCALE, SCALE, num_words)
    llama_memory.SIZES[SIZE] = tuple(length // SCALE for length in lengths)  # type: ignore[assignment]
    return options(SIZE, tokens=2048 // SCALE)


@cache
def predicted() -> dict[str, Any]:
    return llama_memory.predict("Lomo", scaled(), NUM_LAYERS, as_cuda=False, num_steps=1)


def train(rank: int, fields: dict[str, Any]) -> dict[str, Any]:
    """A step, and whether it would have been refused."""
    gpu = torch.device(GPU)
    refused = llama_memory.refusal(fields, gpu)
    try:
        return {**llama_memory.train("Lomo", scaled(), NUM_LAYERS, gpu, 1), "refused": refused}
    except torch.OutOfMemoryError as error:
        return {"error": str(error), "refused": refused}


def train_with(num_bytes: int) -> dict[str, Any]:
    env = {**SEGMENTS, "RINGCOMM_EMULATOR_MEMORY": str(num_bytes)}
    (found,) = run_on_gpus(1, train, predicted(), backend=None, env=env, fresh=True)
    return dict(found)


@pytest.mark.slow
def test_80_layers_take_the_memory_that_is_predicted() -> None:
    """To the byte, on an emulated GPU that has no more; a scaled H200 has more."""
    pytest.importorskip("transformers")
    reserved_bytes = predicted()["predicted_reserved_bytes"]
    assert reserved_bytes < H200_BYTES / SCALE**2
    found = train_with(reserved_bytes)
    assert found["refused"] is None
    assert found["num_layers"] == NUM_LAYERS
    assert (found["peak_bytes"], found["reserved_bytes"]) == (
        predicted()["predicted_peak_bytes"],
        reserved_bytes,
    )
    (loss,) = found["losses"]
    assert 5.5 < loss < 7.0  # of 500 words, all as likely: 6.2


@pytest.mark.slow
def test_with_less_memory_than_predicted_they_run_out_of_it() -> None:
    """A byte less is a segment less, and the tensors of the peak do not fit into the others."""
    pytest.importorskip("transformers")
    reserved_bytes = predicted()["predicted_reserved_bytes"]
    assert (
        reserved_bytes - predicted_memory.SMALL_SEGMENT_BYTES < predicted()["predicted_peak_bytes"]
    )
    found = train_with(reserved_bytes - 1)
    assert "out of memory" in found["error"]
    assert found["refused"]


@in_emulated_ranks(1, kernels=False, env={"RINGCOMM_EMULATOR_MEMORY": str(3 << 30)}, backend=None)
def test_what_does_not_fit_is_refused_in_a_sentence(rank: int) -> None:
    def refused(num_bytes: int) -> str | None:
        fields = {"predicted_reserved_bytes": num_bytes}
        return llama_memory.refusal(fields, torch.device(GPU))

    assert refused(3 << 30) is None
    said = "refused, because 4.00 GiB do not fit into the 3.00 GiB that are free"
    assert refused(4 << 30) == said


def test_the_prediction_for_an_h200_is_what_was_measured_there() -> None:
    """Of 1.1 billion weights; it was exact. Another transformers may make other tensors."""
    pytest.importorskip("transformers")
    records = read_records([RESULTS / "2026-11-27-llama_memory-cuda.jsonl"])
    measured = {record["way"]: record["peak_bytes"] for record in records}
    for way in ("forward only", "SGD", "Lomo"):
        found = llama_memory.predict(way, options("1.1b", 8, 1024), 22, as_cuda=True)
        assert found["predicted_peak_bytes"] == pytest.approx(measured[way], rel=1e-3)


@pytest.mark.slow
def test_65_billion_weights_fit_into_an_h200_by_the_prediction() -> None:
    pytest.importorskip("transformers")
    found = llama_memory.predict("Lomo", options("65b"), NUM_LAYERS, as_cuda=True)
    parts = found["predicted_parts"]
    assert parts["weights"] == 2 * 65_285_660_672
    assert parts["checkpoints"] == 80 * 2048 * 8192 * 2
    assert found["predicted_peak_bytes"] == sum(parts.values())
    assert found["predicted_peak_bytes"] < found["predicted_reserved_bytes"] < H200_BYTES


@in_emulated_ranks(1, kernels=False, env=SEGMENTS, fresh=True, backend=None)
def test_blocks_of_random_sizes(rank: int) -> None:
    """They are at the same addresses, of the same segments, and counted as predicted."""
    draw = random.Random(0)
    ours = predicted_memory.CachingAllocator()
    live: list[tuple[torch.Tensor, predicted_memory.Block]] = []
    for _ in range(600):
        if live and draw.random() < 0.48:
            tensor, block = live.pop(draw.randrange(len(live)))
            del tensor
            ours.give_back(block)
            continue
        kilobyte = draw.choice([1, 16, 500, 1024, 1025, 3000, 9000, 10_240, 13_000])
        tensor = torch.empty(draw.randint(1, kilobyte << 10), dtype=torch.uint8, device=GPU)
        block = ours.take(tensor.nbytes, tensor.data_ptr())
        assert block.address == tensor.data_ptr()
        live.append((tensor, block))
        assert emugpu.memory_allocated() == ours.allocated_bytes
        assert emugpu.memory_reserved() == ours.reserved_bytes
    assert emugpu.max_memory_allocated() == ours.peak_bytes
    assert emugpu.max_memory_reserved() == ours.reserved_bytes
    tensor = block = None  # type: ignore[assignment]
    live.clear()
    emugpu.empty_cache()
    emugpu.reset_peak_memory_stats()
    assert emugpu.max_memory_reserved() == emugpu.max_memory_allocated() == 0
    num_free, num_all = emugpu.mem_get_info()
    assert num_free == num_all
