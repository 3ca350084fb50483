"""The planner's figures beside what training a decoder on CPUs keeps alive and sends."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gradient_watch import gradients_of, states_of
from ranks import run_ranks
from steps import apply_steps, train_step
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from zero_models import live_bytes, sent_bytes

import ringcomm
from ringcomm.nn import (
    ColumnParallelLinear,
    CrossEntropyLoss,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from ringcomm.optim import Lomo
from ringcomm.parallel import offload, tensor, zero
from ringcomm.parallel.model.units import default_units
from ringcomm.parallel.offload.transfers import aligned_size
from ringcomm.planner import Cluster, Job, plan
from ringcomm.planner.hardware import Hardware
from ringcomm.planner.models import ModelShape
from ringcomm.planner.plans import Plan

SHAPE = ModelShape(
    "small", layers=3, hidden=64, heads=8, kv_heads=4, ffn=150, vocab=131, context=32
)
BATCH = 2


class Layer(nn.Module):
    """Grouped queries and a gated feed-forward layer; parameters in the order of Llama."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        h, kv = shape.hidden, shape.kv_width

        def linear(inputs: int, outputs: int) -> Any:
            return nn.Linear(inputs, outputs, bias=False)

        self.q, self.k, self.v = linear(h, shape.query_width), linear(h, kv), linear(h, kv)
        self.o = linear(shape.query_width, h)
        self.gate, self.up = linear(h, shape.ffn), linear(h, shape.ffn)
        self.down = linear(shape.ffn, h)
        self.norm1, self.norm2 = nn.RMSNorm(h), nn.RMSNorm(h)

    def enter(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(self.norm1(x))
        q, k, v = (
            w(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for w in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.enter(self.norm2(x))
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


class Decoder(nn.Module):
    def __init__(self, shape: ModelShape = SHAPE, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok: Any = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.head: Any = nn.Linear(shape.hidden, shape.vocab, bias=False)
        self.loss: Any = CrossEntropyLoss()
        self.is_checkpointed = is_checkpointed

    def forward(self, ids: Tensor) -> Tensor:
        given, wanted = ids[:, :-1], ids[:, 1:]
        x = self.tok(given)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)
        loss: Tensor = self.loss(self.head(self.norm(x)).flatten(0, 1), wanted.flatten())
        return loss


class SplitLayer(Layer):
    sequence_dim: int | None = None

    def enter(self, x: Tensor) -> Tensor:
        return tensor.copy_to_tp(x, sequence_dim=self.sequence_dim)


def split(model: Decoder, *, is_sequence_split: bool) -> Decoder:
    """This rank's part among all ranks."""
    dim = 1 if is_sequence_split else None
    model.tok = VocabParallelEmbedding.from_embedding(model.tok, sequence_dim=dim)
    layers: Any = model.layers
    for layer in layers:
        layer.__class__ = SplitLayer
        layer.sequence_dim = dim
        for name in ("q", "k", "v", "gate", "up"):
            unit = layer.head_dim if name in "qkv" else 1
            whole = getattr(layer, name)
            part = ColumnParallelLinear.from_linear(whole, copy_input=False, shard_multiple=unit)
            setattr(layer, name, part)
        layer.o = RowParallelLinear.from_linear(
            layer.o, shard_multiple=layer.head_dim, sequence_dim=dim
        )
        layer.down = RowParallelLinear.from_linear(layer.down, sequence_dim=dim)
    if is_sequence_split:
        for module in model.modules():
            if isinstance(module, nn.RMSNorm):
                tensor.all_reduce_grad_(module.weight)
    model.head = ColumnParallelLinear.from_linear(model.head, sequence_dim=dim)
    model.loss = CrossEntropyLoss(
        group=torch.distributed.group.WORLD, num_columns=model.head.weight.shape[0]
    )
    return model


def rows(seed: int = 0, shape: ModelShape = SHAPE) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(shape.vocab, (BATCH, shape.context + 1), generator=generator)


def saved_bytes(model: nn.Module, ids: Tensor) -> int:
    """What a forward pass keeps for the backward pass: live storages, each once, no weights."""
    weights = {param.untyped_storage().data_ptr() for param in model.parameters()}
    kept: dict[int, tuple[int, Tensor]] = {}

    def pack(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes(), saved
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        model(ids)
    return sum(num_bytes for num_bytes, _ in kept.values())


CPU = Cluster(2, "cpu-core").hardware
SYSTEMS = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}
RING = ringcomm.Options(algorithm="ring")


def plan_of(num_ranks: int, system: str, *, hardware: Hardware = CPU, **options: Any) -> Plan:
    """Of the decoder; a replica's batch is BATCH rows."""
    replicas = num_ranks // options.get("tp", 1)
    options = {"precision": "fp32", "checkpointings": ("none",), **options}
    job = Job(BATCH * SHAPE.context * replicas, systems=(system,), **options)
    plans = plan(SHAPE, Cluster(num_ranks, hardware), job)
    found = [
        p for p in plans.ranked if p.candidate.mesh.pp == 1 and p.candidate.mesh.dp == replicas
    ]
    assert len(found) == 1
    assert found[0].candidate.num_micro_batches == 1
    return found[0]


def train(
    rank: int, stage: int, num_micro_batches: int = 1, precision: str = "fp32"
) -> tuple[int, list[int]]:
    """Bytes sent in a step, and those of parameters, gradients and states at its end."""
    model = Decoder()
    adamw = torch.optim.AdamW(model.parameters(), 1e-3, fused=precision == "fp32")
    dtype: Any = {"param_dtype": torch.bfloat16} if precision == "bf16" else {}
    optimizer: Any = zero.shard(model, adamw, stage, **dtype) if stage else adamw
    replica: Any = model if stage else DistributedDataParallel(model)
    for step in range(3):  # the second one rebuilds the buckets of DDP
        before = sent_bytes().total()
        for i in range(num_micro_batches):
            replica(rows(2 * step + rank + 10 * i)).backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        gradients = live_bytes(grads if stage in (0, 3) else gradients_of(optimizer))
        apply_steps(optimizer)
        sent = sent_bytes().total() - before
    states = (
        states_of(optimizer)
        if stage
        else [t for state in adamw.state.values() for t in state.values()]
    )
    return sent, [live_bytes(model.parameters()), gradients, live_bytes(states)]


@pytest.mark.parametrize(
    ("system", "world_size", "precision"),
    [
        ("ddp", 3, "fp32"),
        ("zero1", 2, "fp32"),
        ("zero1", 2, "bf16"),
        ("zero2", 2, "bf16"),
        ("zero3", 2, "bf16"),
        ("zero3", 3, "fp32"),
    ],
)
def test_data_parallel(system: str, world_size: int, precision: str) -> None:
    found = plan_of(world_size, system, precision=precision)
    # Where no rank's shard is like another's, ZeRO's prediction is not the ring's, by an element.
    options = RING if system == "ddp" or world_size == 2 else None
    args = SYSTEMS[system], 1, precision
    sent, kept = run_ranks(world_size, train, *args, pg_options=options)[0]
    assert sent == found.traffic.data == found.traffic.sent
    for name, measured in zip(("parameters", "gradients", "states"), kept, strict=True):
        assert measured == pytest.approx(getattr(found.memory, name), rel=0.05)


@pytest.mark.parametrize("system", ["zero1", "zero2", "zero3"])
def test_micro_batches(system: str) -> None:
    """Stage 2 reduces each of them, stage 3 gathers besides; stage 1 neither."""
    job = Job(4 * BATCH * SHAPE.context, precision="fp32", systems=(system,))
    # As much memory as two micro-batches of half the rows take, and no more.
    cluster = Cluster(2, CPU, memory_bytes=plan_of(2, system).memory.device)
    best = next(p for p in plan(SHAPE, cluster, job).ranked if p.candidate.mesh.dp == 2)
    if best.candidate.checkpointing == "none":
        assert best.candidate.num_micro_batches == 2
    num_micro_batches = best.candidate.num_micro_batches
    measured = run_ranks(2, train, SYSTEMS[system], num_micro_batches, pg_options=RING)
    assert measured[0][0] == best.traffic.data


def train_lomo(rank: int, is_sharded: bool) -> tuple[int, int, int]:
    model = Decoder()
    if is_sharded:
        for unit in [*default_units(model), model]:
            fully_shard(unit, reshard_after_forward=True)
    optimizer = Lomo(model, lr=1e-3, group=None if is_sharded else torch.distributed.group.WORLD)
    for step in range(2):
        before = sent_bytes().total()
        train_step(model(rows(2 * step + rank)), optimizer)
        sent = sent_bytes().total() - before
    return sent, live_bytes(model.parameters()), sum(1 for _ in model.parameters())


@pytest.mark.parametrize("is_sharded", [False, True])
def test_lomo(is_sharded: bool) -> None:
    found = plan_of(2, "lomo-shards" if is_sharded else "lomo")
    sent, kept, num_weights = run_ranks(2, train_lomo, is_sharded, pg_options=RING)[0]
    agreement = 8 * num_weights  # two int32 a weight, once a backward pass
    if is_sharded:  # fully_shard pads to whole rows
        assert sent == pytest.approx(found.traffic.sent + agreement, rel=2e-3)
    else:  # replicas agree in step() too, and on whether a rank is in a pass
        assert sent == found.traffic.sent + 2 * (agreement + 4)
        assert kept == found.memory.parameters


def train_offloaded(rank: int, to: Any, folder: Path) -> dict[str, int]:
    model = Decoder()
    path = folder / f"{rank}" if to == "nvme" else None
    sharded: Any = zero.shard(
        model, offload.Offloaded(torch.optim.AdamW(model.parameters(), 1e-3), to=to, path=path), 2
    )
    tier = next(iter(sharded.inner)).optimizer.tier
    before = moved = 0
    for step in range(2):
        model(rows(2 * step + rank)).backward()
        gradients = live_bytes(gradients_of(sharded))
        apply_steps(sharded)
        if to == "nvme":
            moved = tier.store.read_bytes + tier.store.written_bytes - before
            before += moved
    return {
        "parameters": live_bytes(model.parameters()),
        "gradients": gradients,
        "states": live_bytes(states_of(sharded)),
        "elsewhere": moved // 2 or sum(aligned_size(row.nbytes) for row in tier._rows.values()),
        "moved": moved,
    }


@pytest.mark.parametrize("to", ["cpu", "nvme"])
def test_offloaded_states(to: str, tmp_path: Path) -> None:
    """Beside a device that has a host."""
    device = dataclasses.replace(CPU, is_host=False)
    found = plan_of(2, f"offload-{to}", hardware=device)
    kept = run_ranks(2, train_offloaded, to, tmp_path, pg_options=RING)
    for name in ("parameters", "gradients", "states"):
        assert kept[0][name] == pytest.approx(getattr(found.memory, name), rel=0.05)
    predicted = found.memory.disk if to == "nvme" else found.memory.host
    assert kept[0]["elsewhere"] == pytest.approx(predicted, rel=0.05)  # in blocks of 4 KiB
    if to == "nvme":
        assert kept[0]["moved"] == pytest.approx(found.traffic.offloaded, rel=0.05)


def count_split(rank: int, is_sequence_split: bool, is_checkpointed: bool) -> list[int]:
    model = split(Decoder(is_checkpointed=is_checkpointed), is_sequence_split=is_sequence_split)
    before = sent_bytes().total()
    model(rows()).backward()
    sent = sent_bytes().total() - before
    kept = saved_bytes(model, rows())
    return [sent, kept, live_bytes(model.parameters())]


@pytest.mark.parametrize(
    ("world_size", "is_sequence_split", "checkpointing"),
    [(2, False, "none"), (2, True, "full"), (4, True, "none"), (4, False, "full")],
)
def test_tensor_parallel(world_size: int, is_sequence_split: bool, checkpointing: str) -> None:
    found = plan_of(
        world_size,
        "ddp",
        tp=world_size,
        is_sequence_split=is_sequence_split,
        checkpointings=(checkpointing,),
    )
    args = is_sequence_split, checkpointing == "full"
    sent, kept, weights = run_ranks(world_size, count_split, *args, pg_options=RING)[0]
    assert sent == found.traffic.tensor
    assert found.traffic.sent == found.traffic.tensor
    assert weights == pytest.approx(found.memory.parameters, rel=0.05)
    assert kept == pytest.approx(found.memory.activations, rel=0.05)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_activations_of_one_process(checkpointing: str) -> None:
    found = plan_of(1, "single", checkpointings=(checkpointing,))
    kept = saved_bytes(Decoder(is_checkpointed=checkpointing == "full"), rows())
    assert kept == pytest.approx(found.memory.activations, rel=0.05)
