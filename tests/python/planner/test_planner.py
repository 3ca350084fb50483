"""What the planner refuses and why, what it ranks, and its figures beside published ones; shapes of
models; the command `ringcomm plan`."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from schedule_simulation import simulate

from _ringcomm import start as cli
from _ringcomm.command import HARDWARE as HELP_HARDWARE
from ringcomm.cost_model import Costs, Machine
from ringcomm.parallel.pipeline.schedules import make_plan
from ringcomm.planner import Cluster, Job, plan
from ringcomm.planner.candidate import RankPart, kept_by
from ringcomm.planner.costs import Traffic, activations_of, compute_flops, traffic_of_stage
from ringcomm.planner.hardware import HARDWARE, Group, Hardware, Link, find_hardware
from ringcomm.planner.job import SCHEDULES, SYSTEMS, Mesh, bubble, live_micro_batches
from ringcomm.planner.models import ModelShape, find_model
from ringcomm.planner.plans import Plan, Plans, by_rank
from ringcomm.tuning import Tuning

GIGA = 10**9
JOB = Job(tokens=1 << 20)


def plans_of(model: str = "llama-7b", num_gpus: int = 8, **options: Any) -> Plans:
    return plan(model, Cluster(num_gpus), Job(**{"tokens": 1 << 20, **options}))


def kept(num_params: int, system: str, job: Job = JOB, world_size: int = 1) -> Any:
    """Of so many weights in one piece."""
    return kept_by(RankPart((), ((num_params,),), 1, ()), SYSTEMS[system], job, world_size)


def odd(**change: Any) -> ModelShape:
    sizes: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 8, "kv_heads": 4, "ffn": 128}
    return ModelShape("odd", **{**sizes, "vocab": 100, **change})


# ---- what does not go


@pytest.mark.parametrize(
    ("model", "mesh", "reason"),
    [
        ("llama-70b", Mesh(tp=3), "tp 3 does not divide 64 heads"),
        ("llama-70b", Mesh(tp=2, is_sequence_split=True), None),
        ("llama-70b", Mesh(is_sequence_split=True), "it needs tp > 1"),
        ("llama-70b", Mesh(tp=8, is_sequence_split=True), "does not divide sequences of 2050"),
        ("llama-70b", Mesh(pp=128), "pp 128 is more than 80 layers"),
        ("llama-70b", Mesh(dp=2, ep=2), "llama-70b has no experts"),
        ("odd", Mesh(tp=12), None),  # two ranks have a group of heads each
        ("odd", Mesh(tp=4), "neither divides 6 query groups"),
        ("mixtral-8x7b", Mesh(dp=8, ep=8), None),
        ("mixtral-8x7b", Mesh(ep=2), "it needs dp > 1"),
        ("mixtral-8x7b", Mesh(dp=9, ep=3), "does not divide 8 experts"),
    ],
)
def test_meshes(model: str, mesh: Mesh, reason: str | None) -> None:
    shape = odd(hidden=48, heads=12, kv_heads=6) if model == "odd" else find_model(model)
    found = mesh.fault(shape, 2050)
    assert (found is None) == (reason is None)
    assert reason is None or reason in (found or "")


def test_refusals_say_why() -> None:
    reasons = {r.reason for r in plans_of("llama-3-70b", 8).refused}
    assert any("needs " in reason and "states alone" in reason for reason in reasons)
    sp = plans_of(is_sequence_split=True, tp=1)
    assert not sp.ranked
    assert {"it needs tp > 1" in refusal.reason for refusal in sp.refused} == {True}
    little = Cluster(8, dataclasses.replace(HARDWARE["h100"], host_memory_bytes=50 * GIGA))
    offloaded = plan("llama-7b", little, Job(1 << 20, systems=("offload-cpu",), tp=1, pp=1))
    assert "of the host's memory" in offloaded.refused[0].reason  # 8 ranks have 10 GB each
    core = plan("llama-7b", Cluster(2, "cpu-core"), JOB)
    assert any("the device is the host" in refusal.reason for refusal in core.refused)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cluster(12), "12 gpus are not a whole number of hosts of 8"),
        (lambda: Cluster(0), "must be positive"),
        (lambda: Cluster(8, "tpu"), "neither a file nor one of h100, h200"),
        (lambda: Job(1000, sequence=300), "1000 tokens are not a whole number of sequences of 300"),
        (lambda: Job(0), "tokens must be positive"),
        (lambda: Job(8, precision="fp8"), "precision must be one of bf16, fp32, got 'fp8'"),  # type: ignore[arg-type]
        (lambda: Job(8, systems=("zero4",)), "systems must be one of single, ddp, .*got 'zero4'"),
        (lambda: odd(layers=0), "layers must be a positive whole number"),
        (lambda: odd(heads=5), "4 heads of keys do not divide 5"),
        (lambda: odd(heads=12), "12 heads do not divide a width of 64"),
        (lambda: odd(experts=2, top_k=3), "top_k must be 1 to 2"),
        (lambda: plans_of(tp=3), "dp any, pp any, tp 3 do not multiply to 8 gpus"),
        (lambda: plans_of(dp=2, tp=2, pp=1), "dp 2, pp 1, tp 2 do not multiply to 8 gpus"),
    ],
)
def test_bad_input(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_hardware_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"like": "a100", "memory_bytes": 40 << 30}), encoding="utf-8")
    found = Cluster(8, path).hardware
    assert (found.name, found.memory_bytes) == ("mine", 40 << 30)
    assert found.inside_rate == HARDWARE["a100"].inside_rate


@pytest.mark.parametrize(
    ("find", "content", "message"),
    [
        (find_hardware, "{", "not JSON"),
        (find_hardware, "[]", "expected an object"),
        (find_hardware, '{"like": "b100"}', "like must be one of"),
        (find_hardware, '{"like": "a100", "speed": 1}', "speed"),
        (find_hardware, '{"like": "a100", "memory_bytes": -1}', "memory_bytes must be a positive"),
        (
            find_hardware,
            '{"like": "a100", "utilisation": 2}',
            "utilisation and overlap must be fractions",
        ),
        (find_hardware, '{"like": "a100", "peak_flops": {"bf16": 1}}', "bf16 and fp32"),
        (find_hardware, '{"memory_bytes": 1}', "missing"),
        (
            find_model,
            '{"model_type": "bert"}',
            "model_type must be one of gpt2, llama, .*got 'bert'",
        ),
        (find_model, '{"model_type": "llama"}', "has no field 'num_hidden_layers'"),
    ],
)
def test_wrong_files(find: Any, content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        find(str(path))


@pytest.mark.parametrize(
    ("model", "num_gpus"), [("llama-7b", 8), ("llama-3-8b", 16), ("mixtral-8x7b", 64)]
)
def test_the_fastest_and_then_the_simplest_is_first(model: str, num_gpus: int) -> None:
    found = plans_of(model, num_gpus, tokens=1 << 22)
    best, usable = found.best, found.cluster.usable_bytes
    is_inside = [plan.candidate.mesh.tp <= 8 for plan in found.ranked]
    assert is_inside == sorted(is_inside, reverse=True)  # over hosts only after all others
    plans = [plan for plan in found.ranked if plan.candidate.mesh.tp <= 8]
    steps = [plan.time.step for plan in plans]
    assert all(step <= 1.02 * min(steps[i:]) for i, step in enumerate(steps))
    for one in found.ranked:
        assert one.memory.device <= usable
        assert one.candidate.mesh.num_ranks in (1, num_gpus)
        assert "dominates" in one.reasons[-1]
        assert one.tokens_per_s == pytest.approx((1 << 22) / one.time.step)
    alike = [plan for plan in plans if plan.time.step <= 1.02 * min(steps)]
    assert best is not None
    fastest = min(found.ranked, key=lambda plan: plan.time.step)
    if fastest is not best:
        hidden = f"Plan {found.ranked.index(fastest) + 1} (not shown: {fastest.candidate.name}) is"
        assert found.tie_line(1).startswith(hidden)
        assert "not shown" not in found.tie_line(0)
    assert best in alike
    # No other sends a tenth of the bytes, and what does not send much more is not simpler.
    least = min(plan.traffic.sent for plan in alike)
    assert best.traffic.sent <= 10 * least
    for one in alike:
        if one.traffic.sent <= 10 * least:
            ours = best.candidate.complexity, best.traffic.sent
            assert ours <= (one.candidate.complexity, one.traffic.sent)


def test_much_more_traffic_is_never_first_for_being_simple() -> None:
    plans = plans_of("llama-3-8b", 16).ranked
    simple = next(plan for plan in plans if plan.candidate.complexity[0] == 1)
    both = next(plan for plan in plans if plan.candidate.complexity[0] == 2)
    for times, first in ((9, simple), (11, both)):
        quiet = dataclasses.replace(both, traffic=Traffic(data=1000))
        chatty = dataclasses.replace(simple, traffic=Traffic(data=1000 * times), time=both.time)
        assert next(by_rank([quiet, chatty])).candidate == first.candidate


# ---- time


def test_computing_and_collectives() -> None:
    """6 FLOP per token and weight, causal attention besides; a third more if recomputed."""
    shape, job = find_model("llama-7b"), Job(1 << 20, sequence=2048)
    flops = 6 * (1 << 20) * (shape.num_params + 32 * 2048 * 4096)
    assert compute_flops(shape, job, "none") == pytest.approx(flops)
    assert compute_flops(shape, job, "full") == pytest.approx(flops * 4 / 3)
    inside, outside = Link(1e-6, 1e9), Link(1e-5, 1e8)
    one, many = Group(4, 1, inside, outside), Group(4, 64, inside, outside)
    assert one.all_reduce(10**6) == pytest.approx(2 * 3 * 1e-6 + 2 * 3 / 4 * 10**6 / 1e9)
    assert Group(1, 1, inside, outside).all_reduce(10**6) == 0
    assert many.levels(0) == pytest.approx(3e-6 + 63e-5)
    assert many.ring(0) == pytest.approx(191e-6 + 64e-5)
    assert many.trees(0) == pytest.approx(2 * 3e-6 + 12e-5)
    assert many.all_reduce(1000) == many.trees(1000)
    assert many.all_reduce(10**9) == 2 * many.ring(10**9)


def test_seconds_of_an_update_and_of_copies_by_hand() -> None:
    def found(system: str, **change: Any) -> Plan:
        hardware = dataclasses.replace(HARDWARE["cpu-core"], memory_bytes=10**12, **change)
        job = Job(1 << 14, systems=(system,), pp=1, tp=1, checkpointings=("none",))
        return plan("gpt2", Cluster(2, hardware), job).ranked[0]

    num_params = 124_439_808
    # Two moments and a master of 4 bytes, a weight of 2: each is read and written.
    update = found("ddp", memory_rate=1e10).time.update
    assert update == pytest.approx(2 * 14 * num_params / 1e10)
    # At stage 3 each micro-batch copies what it gathers to new memory, and gradients.
    for system, copies in (("lomo-shards", 3), ("zero3", 3)):
        with_cost, without = (found(system, new_memory_rate=rate) for rate in (4e9, 0.0))
        times = copies * with_cost.candidate.num_micro_batches
        more = with_cost.time.data - without.time.data
        assert more == pytest.approx(times * 2 * num_params / 4e9)


def test_tuned_links() -> None:
    costs = Costs(copy_us=400.0)
    tuned = Tuning("", {"cores": 4}, "", "", 1, costs, 1.0, ())
    found = Cluster(4, "cpu-core").tuned(tuned)
    expected = Machine(4, 1, costs).microseconds("all_reduce", 1 << 20, 4) * 1e-6
    assert found.group(4, 1).all_reduce(1 << 20) == pytest.approx(expected)
    assert "tuned on 4 cores" in found.hardware.name
    # A group on two hosts: ranks of tensor parallelism are neighbours, those of data are not.
    candidate = plans_of("llama-7b", 32, dp=4, pp=2, tp=4).ranked[0].candidate
    groups = [candidate.group(axis) for axis in ("tp", "dp", "pp")]
    assert [(g.per_host, g.num_hosts) for g in groups] == [(4, 1), (2, 2), (1, 2)]


def test_dominating_parts() -> None:
    """Slow disks make a rank wait for states, and a slow network for gradients."""

    def best(system: str, hardware: Hardware) -> Plan:
        job = Job(1 << 17, systems=(system,), pp=1, tp=1)
        return plan("llama-3-8b", Cluster(16, hardware), job).ranked[0]

    h100 = HARDWARE["h100"]
    assert best("zero3", h100).time.largest == "compute"
    found = best("zero3", dataclasses.replace(h100, outside_rate=1e8))
    assert found.time.largest == "data"
    assert "data dominates" in found.reasons[-1]
    assert best("zero3", dataclasses.replace(h100, overlap=0.0)).time.data_hidden == 0
    assert best("offload-nvme", h100).time.largest == "offload"


# ---- weights, gradients, states


@pytest.mark.parametrize(
    ("system", "gigabytes"), [("ddp", 120), ("zero1", 46.4), ("zero2", 16.9), ("zero3", 1.9)]
)
def test_table_of_the_zero_paper(system: str, gigabytes: float) -> None:
    """Rajbhandari et al. 2020, figure 1: 7.5 billion weights on 64 GPUs.

    The figure has 31.4 and 16.6 GB for zero1 and zero2, with gradients of 16 bits. By default
    zero.shard() accumulates them in float32: 2 bytes more a weight, whole or in shards.
    """
    found = kept(7_500_000_000, system, world_size=64)
    total = found.parameters + found.gradients + found.states
    assert round(total / GIGA, 1) == gigabytes
    # The shapes of a GPT of that size, without their 0.5 % less.
    cluster = Cluster(64, memory_bytes=10**13)
    plans = plan("gpt-7.5b", cluster, Job(1 << 20, systems=(system,), pp=1, tp=1))
    memory = plans.ranked[0].memory
    of_shape = memory.parameters + memory.gradients + memory.states
    assert of_shape == pytest.approx(total * plans.shape.num_params / 7.5e9, rel=0.01)


def test_offloaded_states_are_elsewhere() -> None:
    lomo = kept(1000, "lomo", world_size=4)
    assert (lomo.parameters, lomo.gradients, lomo.states) == (2000, 6000, 0)
    assert kept(1000, "ddp", Job(1, optimizer="sgd"), 4).states == 8000
    whole, found = kept(10**8, "zero2", world_size=4), kept(10**8, "offload-cpu", world_size=4)
    assert (found.parameters, found.gradients) == (whole.parameters, whole.gradients)
    assert found.states == 0
    assert found.elsewhere == whole.states == 12 * 10**8 // 4
    assert found.streamed == 2 * found.elsewhere
    everything = kept(10**8, "infinity-nvme", world_size=4)
    assert everything.elsewhere == 18 * 10**8 // 4
    # With 16-bit weights: read 12 + 3 · 2 + 4, written 12 + 2 + 4 bytes a weight.
    assert everything.streamed + everything.streamed_each == (22 + 18) * 10**8 // 4


def test_offloading_takes_turns_with_computing() -> None:
    """i·bw of i·bw + peak computes, i FLOP per byte of states (Rajbhandari et al. 2021)."""
    options: Any = {"systems": ("offload-cpu",), "checkpointings": ("full",)}
    found = plans_of(num_gpus=1, **options).ranked[0]
    shape, hardware = find_model("llama-7b"), HARDWARE["h100"]
    peak = hardware.peak_flops["bf16"] * hardware.utilisation
    compute = 8 * (1 << 20) * shape.num_params / peak
    moving = 8 * (1 << 20) / (2 * 12) * hardware.host_rate
    share = compute / (compute + found.time.offload)
    assert share == pytest.approx(moving / (moving + peak))


@pytest.mark.parametrize("tp", [1, 8])
def test_activations_of_korthikanti(tp: int) -> None:
    """34 sbh; shared 10 + 24/t, with sequence parallelism all / t."""
    shape, job = find_model("gpt3-175b"), Job(1 << 20, sequence=2048)
    sbh = 2048 * shape.hidden
    small = 4 * 2048 * (2 + shape.heads / tp)  # a number per token of norms and heads
    found = activations_of(shape, job, Mesh(tp=tp), 1)
    assert found.layer == sbh * (10 + 24 / tp) + small
    assert found.boundary == 2 * sbh
    if tp > 1:
        found = activations_of(shape, job, Mesh(tp=tp, is_sequence_split=True), 1)
        # ringcomm.nn keeps what it has gathered in front of two pairs of layers.
        gathered = 4 * sbh * (1 - 1 / tp)
        small = 4 * 2048 * (2 + shape.heads) / tp
        assert found.layer == 34 * sbh / tp + small + gathered
        assert found.boundary == 2 * sbh / tp


def test_groups_of_heads_over_more_ranks() -> None:
    """8 groups of heads over 16 ranks: each has one."""
    shape, s = find_model("llama-3-8b"), 1024
    job = Job(1 << 20, sequence=s)
    eight, sixteen = (activations_of(shape, job, Mesh(tp=t), 1).layer for t in (8, 16))
    whole, keys = s * (8 * shape.hidden + 8), 4 * s * shape.head_dim
    assert sixteen - whole - keys == (eight - whole - keys) / 2


# ---- pipelines and experts


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_are_those_of_pipelines(schedule: str) -> None:
    """Bubbles, live micro-batches and messages are those of ringcomm.parallel.pipeline."""
    more = ((4, 10), (4, 15), (3, 4), (8, 22)) if schedule == "interleaved" else ()
    for p, m in ((2, 4), (4, 8), (4, 16), (8, 16), *more):
        timeline = simulate(schedule, p, m)
        assert bubble(schedule, p, m) == timeline.bubble()
        for rank in range(p):
            changes = [{"F": 1, "I": 0}.get(a.kind, -1) for a in timeline.of_rank(rank)]
            most = Fraction(
                max(accumulate(changes)), 2 if schedule in ("interleaved", "zbv") else 1
            )
            assert live_micro_batches(schedule, p, m, rank) == most
    options: Any = {"dp": 1, "pp": 4, "tp": 2, "tokens": 1 << 15}
    (found,) = plans_of("gpt2", 8, schedules=(schedule,), **options).ranked
    candidate, m = found.candidate, found.candidate.num_micro_batches
    assert 8 <= m <= 16
    cut = make_plan(schedule, 4, m, None)
    for rank in range(4):
        own = cut.stages_of(rank)
        beside = [t for s in own for t in (s - 1, s + 1) if t in range(cut.num_stages)]
        sent = sum(t not in own for t in beside) * m * candidate.message_bytes
        assert traffic_of_stage(candidate, rank).pipeline == sent


def test_micro_batches_of_a_pipeline() -> None:
    """2p to 4p where they fit; more where memory demands it; fewer where the batch has no more."""
    options: Any = {"pp": 8, "tp": 8, "schedules": ("1f1b",), "systems": ("ddp",)}
    tight = plans_of("llama-3-70b", 64, tokens=1 << 23, **options)
    assert tight.ranked[0].candidate.num_micro_batches > 32
    small = plans_of(num_gpus=32, tokens=1 << 14, pp=2)
    assert all(
        plan.candidate.num_micro_batches >= min(4, 8 // plan.candidate.mesh.dp)
        for plan in small.ranked
    )
    few = plans_of(dp=1, pp=8, tp=1, tokens=1 << 14, schedules=("1f1b",), systems=("ddp",))
    assert [plan.candidate.num_micro_batches for plan in few.ranked] == [8]
    assert any("less than 2p: the batch has no more" in reason for reason in few.ranked[0].reasons)


def test_a_tied_embedding_is_summed_over_its_two_stages() -> None:
    """An all_reduce of two ranks sends the gradient once."""
    for tp, rows in ((1, 50257), (2, 25129)):
        found = plans_of("gpt2", 3 * tp, pp=3, tp=tp, schedules=("1f1b",), systems=("ddp",))
        candidate = found.ranked[0].candidate
        sent = [traffic_of_stage(candidate, stage).data for stage in range(3)]
        assert sent == [2 * rows * 768, 0, 2 * rows * 768]


def test_traffic_of_experts_by_hand() -> None:
    job = Job(1 << 17, 1024, systems=("ddp",), checkpointings=("none",), tp=1, pp=1, ep=4)
    moe = plan("mixtral-8x7b", Cluster(8, memory_bytes=10**13), job).ranked[0]
    assert moe.traffic.expert == 4 * 32 * 2 * ((1 << 17) // 8) * 2 * 4096 * 3 // 4
    experts = 3 * 8 * 4096 * 14336 * 32
    dense = 46_702_792_704 - experts
    # Experts have two owners; everything else has eight.
    assert moe.traffic.data == 2 * (2 * dense * 7 // 8 + 2 * experts // 4 // 2)
    assert moe.memory.parameters == 2 * (dense + experts // 4)


# ---- shapes of models

# Published, or of transformers with its own configurations.
COUNTS = {
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "mixtral-8x7b": 46_702_792_704,
}
GPT2 = {"vocab_size": 131, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64}
LLAMA = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}


def test_known_models() -> None:
    assert {name: find_model(name).num_params for name in COUNTS} == COUNTS
    shape = find_model("mixtral-8x7b")
    assert shape.num_params - shape.num_active_params == 6 * 3 * 4096 * 14336 * 32
    assert find_model("llama-7b").num_active_params == COUNTS["llama-7b"]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
        ("mistral", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("gpt2", {"n_inner": 100}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_shapes_are_those_of_transformers(kind: str, options: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    small = GPT2 if kind == "gpt2" else LLAMA
    config = transformers.AutoConfig.for_model(kind, **small, **options)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        shape = find_model(str(path))
        assert shape.num_params == sum(param.numel() for param in model.parameters())
        assert shape.name == tmp_path.name
    if kind == "mistral":
        layer = [tuple(param.shape) for param in model.model.layers[0].parameters()]
        assert layer == [weight.shape for weight in shape.layer]


# ---- the command

PAGE = Path(__file__).resolve().parents[3] / "docs" / "choose.md"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
ASKED = ["plan", "--model", "llama-7b", "--gpus", "8", "--memory", "80GiB", "--tokens", "1M"]


def printed(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> str:
    assert cli.run(list(argv)) == status
    return capsys.readouterr().out


def test_help_lists_the_known_hardware() -> None:
    assert tuple(HARDWARE) == HELP_HARDWARE


def test_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, *ASKED, "--top", "3")
    for text in ("6,738,415,616 parameters", "8 × h100 with 80.0 GiB", "ddp, dp 8: needs "):
        assert text in out
    out = printed(capsys, *ASKED, "--systems", "ddp", "--tp", "1", "--pp", "1", status=1)
    assert "0 plans fit" in out
    options = ["--systems", "zero3", "--pp", "1", "--checkpointing", "none"]
    found = json.loads(printed(capsys, *ASKED, "--json", *options))
    assert found["cluster"]["memory_bytes"] == 80 << 30
    assert found["job"]["tokens"] == 1 << 20
    plan = found["plans"][0]
    assert plan["system"] == "zero3"
    sent = plan["traffic_bytes"]
    assert sent["sent"] == sum(sent[part] for part in ("data", "tensor", "pipeline", "expert"))
    seconds = plan["seconds"]
    assert sum(seconds.values()) == pytest.approx(2 * seconds["step"] + seconds["data_hidden"])


@pytest.mark.slow
def test_the_lines_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of docs/choose.md; tuning in small."""
    page = PAGE.read_text(encoding="utf-8")
    (block,) = re.findall(r"^## Planner.*?```sh\n(.*?)```", page, re.M | re.S)
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "path" / "to" / "config.json"
    config.parent.mkdir(parents=True)
    config.write_text(json.dumps(CONFIG), encoding="utf-8")
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert len(lines) >= 5
    for _, *argv in lines:
        short = ["--force", "--seconds", "0", "--world-sizes", "2", "--sizes", "1k,4k"]
        assert cli.run([*argv, *(short if argv[0] == "tune" else [])]) == 0, argv
        assert capsys.readouterr().out
