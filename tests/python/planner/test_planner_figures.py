"""The planner's figures beside published ones, and beside formulas by hand."""

from __future__ import annotations

from typing import Any

import pytest

from ringcomm import planner
from ringcomm.planner import SYSTEMS, Cluster, Job, Mesh, Plans
from ringcomm.planner.memory import activations_of
from ringcomm.planner.mesh import SCHEDULES, bubble, live_micro_batches
from ringcomm.planner.plans import efficiency

GIGA = 10**9
JOB = Job(tokens=1 << 20)


def plans_of(model: str = "llama-7b", num_gpus: int = 8, **options: Any) -> Plans:
    options = {"tokens": 1 << 20, **options}
    return planner.plan(planner.find_model(model), Cluster(num_gpus), Job(**options))


# ---- weights, gradients, states


def test_seven_billion_weights_take_112_gb() -> None:
    """16 bytes a weight: 16-bit weights and gradients, float32 masters and two moments."""
    kept = planner.kept_bytes(7 * GIGA, SYSTEMS["single"], JOB)
    assert kept.parameters == kept.gradients == 14 * GIGA
    assert kept.states == 84 * GIGA
    assert kept.parameters + kept.gradients + kept.states == 112 * GIGA


@pytest.mark.parametrize(
    ("system", "gigabytes"), [("ddp", 120), ("zero1", 46.4), ("zero2", 16.9), ("zero3", 1.9)]
)
def test_table_of_the_zero_paper(system: str, gigabytes: float) -> None:
    """Rajbhandari et al. 2020, figure 1: 7.5 billion weights on 64 GPUs.

    The figure has 31.4 and 16.6 GB for zero1 and zero2, with gradients of 16 bits. By default
    zero.shard() accumulates them in float32: 2 bytes more a weight, whole or in shards.
    """
    kept = planner.kept_bytes(7_500_000_000, SYSTEMS[system], JOB, 64)
    total = kept.parameters + kept.gradients + kept.states
    assert round(total / GIGA, 1) == gigabytes
    # The shapes of a GPT of that size, without their 0.5 % less.
    shape = planner.find_model("gpt-7.5b")
    found = planner.plan(
        shape, Cluster(64, memory_bytes=10**13), Job(1 << 20, systems=(system,), pp=1, tp=1)
    )
    memory = found.ranked[0].memory
    of_shape = memory.parameters + memory.gradients + memory.states
    assert of_shape == pytest.approx(total * shape.num_params / 7.5e9, rel=0.01)


def test_precisions_and_optimizers() -> None:
    for job, states in (
        (Job(1, precision="fp32"), 8),
        (Job(1, precision="fp32", optimizer="sgd"), 4),
        (Job(1, optimizer="sgd"), 8),
    ):
        kept = planner.kept_bytes(1000, SYSTEMS["ddp"], job, 4)
        assert kept.parameters == kept.gradients == 1000 * job.itemsize
        assert kept.states == 1000 * states
    lomo = planner.kept_bytes(1000, SYSTEMS["lomo"], JOB, 4)
    assert (lomo.parameters, lomo.gradients, lomo.states) == (2000, 6000, 0)


def test_offloaded_states_are_elsewhere() -> None:
    whole = planner.kept_bytes(10**8, SYSTEMS["zero2"], JOB, 4)
    kept = planner.kept_bytes(10**8, SYSTEMS["offload-cpu"], JOB, 4)
    assert (kept.parameters, kept.gradients) == (whole.parameters, whole.gradients)
    assert kept.states == 0
    assert kept.elsewhere == whole.states == 12 * 10**8 // 4
    assert kept.streamed == 2 * kept.elsewhere
    everything = planner.kept_bytes(10**8, SYSTEMS["infinity-nvme"], JOB, 4)
    assert everything.elsewhere == 18 * 10**8 // 4
    # As docs/systems.md has it: read 12 + 3 · 2 + 4, written 12 + 2 + 4 bytes a weight.
    streamed = everything.streamed + everything.streamed_each
    assert streamed == (22 + 18) * 10**8 // 4


@pytest.mark.parametrize(
    ("intensity", "bandwidth", "percent"),
    [
        (8 * 1024 / (4 * 2), 70e9, 50.6),
        (8 * 2 * 1024 / (2 * 16), 1.5e12, 91.6),
        (24 * 2048, 2e9, 58.4),
    ],
)
def test_figures_of_zero_infinity(intensity: float, bandwidth: float, percent: float) -> None:
    """Weights, states and checkpoints; section 4 of the paper, at 70 TFLOP/s."""
    assert 100 * efficiency(intensity, bandwidth, 70e12) == pytest.approx(percent, abs=0.05)


def test_efficiency_is_that_of_the_step() -> None:
    """States that stream by turns leave the share of time that the formula leaves."""
    found = plans_of(num_gpus=1, systems=("offload-cpu",), checkpointings=("full",)).ranked[0]
    shape, hardware = planner.find_model("llama-7b"), Cluster(1).hardware
    peak = hardware.peak_flops["bf16"] * hardware.utilisation
    compute = 8 * (1 << 20) * shape.num_params / peak
    share = efficiency(8 * (1 << 20) / (2 * 12), hardware.host_rate, peak)
    assert compute / (compute + found.time.offload) == pytest.approx(share)


# ---- activations


def gpt(**options: Any) -> tuple[Any, Job, int]:
    shape = planner.find_model("gpt3-175b")
    return shape, Job(1 << 20, sequence=2048, attention="full", **options), 2048 * shape.hidden


@pytest.mark.parametrize("tp", [1, 8])
def test_activations_of_korthikanti(tp: int) -> None:
    """sbh (34 + 5as/h); shared 10 + 24/t + 5as/(ht), with sequence parallelism all / t."""
    shape, job, sbh = gpt()
    scores = 5 * shape.heads * 2048 / shape.hidden
    small = 2 * 4 * 2048  # a norm's number per token
    found = activations_of(shape, job, Mesh(tp=tp), 1)
    assert found.layer == sbh * (10 + 24 / tp + scores / tp) + small
    assert found.scores == sbh * scores / tp
    assert found.kept("selective") == sbh * (10 + 24 / tp) + small
    assert found.kept("full") == 2 * sbh
    if tp > 1:
        shape, job, _ = gpt(regathers=True)
        found = activations_of(shape, job, Mesh(tp=tp, is_sequence_split=True), 1)
        assert found.layer == (sbh * (34 + scores) + small) / tp
        assert found.kept("full") == 2 * sbh / tp
        # ringcomm.nn keeps what it has gathered in front of two pairs of layers.
        kept = activations_of(shape, gpt()[1], Mesh(tp=tp, is_sequence_split=True), 1)
        assert kept.layer - found.layer == 4 * sbh * (1 - 1 / tp)


def test_activations_of_llama() -> None:
    """sbh (12 + 4g + 8 f/h), and 4 bytes per token for each head and norm."""
    for name in ("llama-7b", "llama-3-8b"):
        shape = planner.find_model(name)
        job = Job(1 << 20, sequence=1024)
        b, s, h = 3, 1024, shape.hidden
        factor = 12 + 4 * shape.kv_heads / shape.heads + 8 * shape.ffn / h
        found = activations_of(shape, job, Mesh(), b)
        assert found.layer == s * b * h * factor + 4 * s * b * (shape.heads + 2)
        full = activations_of(shape, Job(1 << 20, sequence=1024, attention="full"), Mesh(), b)
        assert full.layer == s * b * h * factor + 8 * s * b + 2 * shape.heads * s * s * b


def test_copies_of_keys_where_ranks_are_more_than_groups() -> None:
    shape = planner.find_model("llama-3-8b")  # 8 groups
    job = Job(1 << 20, sequence=1024)
    eight, sixteen = (activations_of(shape, job, Mesh(tp=t), 1).layer for t in (8, 16))
    whole = 1024 * (8 * shape.hidden + 8)
    keys = 4 * 1024 * shape.head_dim  # one head of each, on every rank
    assert sixteen - whole - keys == (eight - whole - keys) / 2


# ---- pipelines


def test_bubbles() -> None:
    for p, m in ((2, 4), (4, 16), (8, 16)):
        assert bubble("gpipe", p, m) == bubble("1f1b", p, m) == pytest.approx((p - 1) / (m + p - 1))
        assert bubble("interleaved", p, m, 4) == pytest.approx((p - 1) / (4 * m + p - 1))
        assert bubble("zbv", p, m) == pytest.approx((p - 1) / (6 * m + p - 1))
        assert [live_micro_batches("1f1b", p, m, i) for i in range(p)] == list(range(p, 0, -1))
        assert {live_micro_batches("gpipe", p, m, i) for i in range(p)} == {m}
        assert {live_micro_batches("zbv", p, m, i) for i in range(p)} == {p}
        # Narayanan et al. 2021: 1 + (p - 1) / (p v) times as much.
        assert live_micro_batches("interleaved", p, m, 0, 2) == min(m, p + (p - 1) / 2)
    assert live_micro_batches("1f1b", 8, 3, 0) == 3


def test_micro_batches_of_a_pipeline() -> None:
    """2p to 4p where they fit; more where memory demands it; fewer where the batch has no more."""
    for schedule in SCHEDULES:
        found = plans_of("gpt2", 8, schedules=(schedule,), dp=1, pp=4, tp=2, tokens=1 << 15)
        assert [8 <= plan.candidate.num_micro_batches <= 16 for plan in found] == [True]
        # At least m b s h elements of 2 bytes, over one boundary in one direction.
        assert found.ranked[0].traffic.pipeline >= 2 * (1 << 15) * 768
    options: Any = {"pp": 8, "tp": 8, "schedules": ("1f1b",), "systems": ("ddp",)}
    tight = plans_of("llama-3-70b", 64, tokens=1 << 23, **options)
    assert tight.ranked[0].candidate.num_micro_batches > 32
    few = plans_of(dp=1, pp=8, tp=1, tokens=1 << 14, schedules=("1f1b",), systems=("ddp",))
    assert [plan.candidate.num_micro_batches for plan in few] == [8]
    assert any("less than 2p: the batch has no more" in reason for reason in few.ranked[0].reasons)


def test_traffic_of_pipelines_and_experts_by_hand() -> None:
    options: Any = {"systems": ("ddp",), "checkpointings": ("full",), "sequence": 1024}
    found = plans_of(pp=8, tp=1, dp=1, schedules=("1f1b",), **options).ranked[0]
    # A stage in the middle: every micro-batch forward to one side, its gradient to the other.
    assert found.traffic.pipeline == 2 * 2 * (1 << 20) * 4096
    moe = planner.plan(
        planner.find_model("mixtral-8x7b"),
        Cluster(8, memory_bytes=10**13),
        Job(1 << 17, sequence=1024, systems=("ddp",), checkpointings=("none",), tp=1, pp=1, ep=4),
    ).ranked[0]
    tokens = (1 << 17) // 8
    assert moe.traffic.expert == 4 * 32 * 2 * tokens * 2 * 4096 * 3 // 4
    experts = 3 * 8 * 4096 * 14336 * 32
    dense = 46_702_792_704 - experts
    # Experts have two owners; everything else has eight.
    assert moe.traffic.data == 2 * (2 * dense * 7 // 8 + 2 * experts // 4 // 2)
    assert moe.memory.parameters == 2 * (dense + experts // 4)
