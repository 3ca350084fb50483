"""What the planner refuses and why, what it ranks, and how long it takes steps to be."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from ringcomm import planner, tuning
from ringcomm.planner import Cluster, Job, Mesh, Plan, Plans
from ringcomm.planner.cluster import Group, Link
from ringcomm.planner.job import bytes_of, count_of
from ringcomm.planner.mesh import mesh_fault
from ringcomm.planner.search import by_rank
from ringcomm.planner.step_time import compute_seconds
from ringcomm.planner.traffic import Traffic

GIGA = 10**9
LLAMA = planner.find_model("llama-7b")
JOB = Job(tokens=1 << 20)


def plans_of(model: str = "llama-7b", num_gpus: int = 8, **options: Any) -> Plans:
    options = {"tokens": 1 << 20, **options}
    return planner.plan(planner.find_model(model), Cluster(num_gpus), Job(**options))


# ---- what does not go


@pytest.mark.parametrize(
    ("mesh", "reason"),
    [
        (Mesh(tp=3), "tp 3 does not divide 64 heads"),
        (Mesh(tp=64), None),
        (Mesh(tp=16), None),
        (Mesh(tp=2, is_sequence_split=True), None),
        (Mesh(is_sequence_split=True), "it needs tp > 1"),
        (Mesh(tp=8, is_sequence_split=True), "does not divide sequences of 2050"),
        (Mesh(pp=128), "pp 128 is more than 80 layers"),
        (Mesh(dp=2, ep=2), "llama-70b has no experts"),
    ],
)
def test_meshes_of_llama(mesh: Mesh, reason: str | None) -> None:
    found = mesh_fault(planner.find_model("llama-70b"), mesh, 2050)
    assert (found is None) == (reason is None)
    assert reason is None or reason in (found or "")


def test_query_groups() -> None:
    shape = planner.ModelShape("odd", 2, 48, 12, 6, 96, 100)
    assert mesh_fault(shape, Mesh(tp=3), 64) is None
    assert mesh_fault(shape, Mesh(tp=12), 64) is None  # two ranks have a group each
    assert "neither divides 6 query groups" in (mesh_fault(shape, Mesh(tp=4), 64) or "")


def test_meshes_of_experts() -> None:
    shape = planner.find_model("mixtral-8x7b")
    assert mesh_fault(shape, Mesh(dp=8, ep=8), 64) is None
    assert "it needs dp > 1" in (mesh_fault(shape, Mesh(ep=2), 64) or "")
    assert "does not divide dp 8" in (mesh_fault(shape, Mesh(dp=8, ep=16), 64) or "")
    assert "does not divide 8 experts" in (mesh_fault(shape, Mesh(dp=9, ep=3), 64) or "")


def test_refusals_say_why() -> None:
    reasons = {r.reason for r in plans_of("llama-3-70b", 8).refused}
    assert any("needs " in reason and "states alone" in reason for reason in reasons)
    sp = plans_of(is_sequence_split=True, tp=1)
    assert not sp.ranked
    assert {"it needs tp > 1" in refusal.reason for refusal in sp.refused} == {True}
    ep = plans_of("mixtral-8x7b", ep=2, dp=1, tp=8)
    assert "needs dp > 1" in ep.refused[0].reason
    flash = plans_of(checkpointings=("selective",), tp=8)
    assert "flash attention keeps no matrices" in flash.refused[0].reason
    whole = planner.plan(
        LLAMA,
        Cluster(8, host_memory_bytes=50 * GIGA),
        Job(1 << 20, systems=("zero3",), loads_whole=True, tp=1, pp=1),
    )
    assert "of the host's memory" in whole.refused[0].reason  # 8 ranks read 13.5 GB each
    core = planner.plan(LLAMA, Cluster(2, planner.find_hardware("cpu-core")), JOB)
    assert any("the device is the host" in refusal.reason for refusal in core.refused)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cluster(12), "12 gpus are no whole number of hosts of 8"),
        (lambda: Cluster(0), "are positive"),
        (lambda: Job(1000, sequence=300), "1000 tokens are no whole number of sequences of 300"),
        (lambda: Job(0), "tokens are positive"),
        (lambda: Job(8, precision="fp8"), "precision: known are bf16, fp32, got 'fp8'"),  # type: ignore[arg-type]
        (lambda: Job(8, systems=("zero4",)), "systems: known are single, ddp, .*got 'zero4'"),
        (lambda: Job(8, utilisation=2), "utilisation is a share"),
        (lambda: plans_of(tp=3), "dp any, pp any, tp 3 do not make 8 gpus"),
        (lambda: plans_of(dp=2, tp=2, pp=1), "dp 2, pp 1, tp 2 do not make 8 gpus"),
        (lambda: bytes_of("80"), None),
        (lambda: bytes_of("80 parsecs"), "'80 parsecs' is no amount of memory: write 80GiB"),
        (lambda: bytes_of("0GB"), "no amount"),
        (lambda: count_of("1.3"), "no number of tokens"),
        (lambda: planner.find_hardware("tpu"), "no file and none of h100, h200"),
    ],
)
def test_bad_input(make: Any, message: str | None) -> None:
    if message is None:
        assert make()
        return
    with pytest.raises(ValueError, match=message):
        make()


def test_amounts() -> None:
    assert bytes_of("80GiB") == 80 << 30
    assert bytes_of("80GB") == 80 * GIGA
    assert bytes_of("1.5 kb") == 1500
    assert count_of("4M") == 4 << 20


# ---- what is ranked


def test_ranking() -> None:
    plans = plans_of("llama-3-8b", 16)
    best = plans.best
    assert best is plans.ranked[0]
    steps = [plan.time.step for plan in plans if plan.candidate.mesh.tp <= 8]
    assert all(step <= 1.02 * min(steps[i:]) for i, step in enumerate(steps))
    is_inside = [plan.candidate.mesh.tp <= 8 for plan in plans]
    assert is_inside == sorted(is_inside, reverse=True)  # over hosts only after all others
    assert not all(is_inside)
    usable = plans.cluster.usable_bytes
    assert all(plan.memory.device <= usable for plan in plans)
    for plan in plans:
        assert plan.candidate.mesh.num_ranks in (1, 16)
        assert "dominates" in plan.reasons[-1]
        assert plan.tokens_per_s == pytest.approx((1 << 20) / plan.time.step)


CLUSTERS = [("llama-7b", 8), ("llama-3-8b", 64), ("llama-3-70b", 64), ("mixtral-8x7b", 64)]


@pytest.mark.parametrize(("model", "num_gpus"), CLUSTERS)
def test_what_costs_less_is_first_among_equally_fast_plans(model: str, num_gpus: int) -> None:
    found = planner.plan(planner.find_model(model), Cluster(num_gpus), Job(tokens=1 << 22))
    plans = [plan for plan in found if plan.candidate.mesh.tp <= 8]
    best, fastest = found.best, min(plan.time.step for plan in plans)
    assert best is not None
    alike = [plan for plan in plans if plan.time.step <= 1.02 * fastest]
    assert best in alike
    # No other sends a tenth of the bytes, and what does not send much more is not simpler.
    assert all(10 * plan.traffic.sent >= best.traffic.sent for plan in alike)
    least = min(plan.traffic.sent for plan in alike)
    for plan in alike:
        if plan.traffic.sent <= 10 * least:
            ours = best.candidate.complexity, best.traffic.sent
            assert ours <= (plan.candidate.complexity, plan.traffic.sent)


def test_much_more_traffic_is_never_first_for_being_simple() -> None:
    plans = plans_of("llama-3-8b", 16)
    simple = next(plan for plan in plans if plan.candidate.complexity[0] == 1)
    both = next(plan for plan in plans if plan.candidate.complexity[0] == 2)
    for times, first in ((9, simple), (11, both)):
        quiet = dataclasses.replace(both, traffic=Traffic(data=1000))
        chatty = dataclasses.replace(simple, traffic=Traffic(data=1000 * times), time=both.time)
        found = next(by_rank([quiet, chatty]))
        assert found.candidate == first.candidate


def test_less_memory_leaves_fewer_plans() -> None:
    counts = [
        len(planner.plan(LLAMA, Cluster(8, memory_bytes=size * GIGA), JOB)) for size in (20, 40, 80)
    ]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]
    assert planner.plan(LLAMA, Cluster(8, memory_bytes=2 * GIGA), JOB).best is None


def test_json() -> None:
    plans = plans_of(tp=2)
    found = json.loads(plans.to_json())
    assert found["model"]["num_params"] == LLAMA.num_params
    assert len(found["plans"]) == len(plans)
    assert len(found["refused"]) == len(plans.refused)
    first, best = found["plans"][0], plans.ranked[0]
    assert first["system"] == best.candidate.system.name
    assert first["memory_bytes"]["device"] == best.memory.device
    assert first["seconds"]["step"] == best.time.step
    assert (
        sum(v for k, v in first["traffic_bytes"].items() if k not in ("sent", "offloaded"))
        == (first["traffic_bytes"]["sent"])
    )


# ---- time


def test_computing() -> None:
    """6 FLOP per token and weight, causal attention besides; a third more if recomputed."""
    cluster = Cluster(8)
    job = Job(1 << 20, sequence=2048, utilisation=0.5)
    flops = 6 * (1 << 20) * (LLAMA.num_params + 32 * 2048 * 4096)
    expected = flops / (8 * 0.5 * 989e12)
    assert compute_seconds(LLAMA, job, cluster, 8, "none") == pytest.approx(expected)
    assert compute_seconds(LLAMA, job, cluster, 8, "full") == pytest.approx(expected * 4 / 3)


def test_collectives() -> None:
    inside, outside = Link(1e-6, 1e9), Link(1e-5, 1e8)
    one = Group(4, 1, inside, outside)
    num_bytes = 10**6
    assert one.all_reduce(num_bytes) == pytest.approx(2 * 3 * 1e-6 + 2 * 3 / 4 * num_bytes / 1e9)
    assert Group(1, 1, inside, outside).all_reduce(num_bytes) == 0
    many = Group(4, 64, inside, outside)
    assert many.levels(0) == pytest.approx(3e-6 + 63e-5)
    assert many.ring(0) == pytest.approx(191e-6 + 64e-5)
    assert many.trees(0) == pytest.approx(2 * 3e-6 + 12e-5)
    assert many.all_reduce(1000) == many.trees(1000)
    assert many.all_reduce(10**9) == 2 * many.ring(10**9)


def test_groups_of_a_mesh() -> None:
    cluster = Cluster(32)
    mesh = Mesh(dp=4, pp=2, tp=4)
    assert (cluster.tensor_group(mesh).per_host, cluster.tensor_group(mesh).num_hosts) == (4, 1)
    assert (cluster.data_group(mesh).per_host, cluster.data_group(mesh).num_hosts) == (2, 2)
    assert cluster.pipeline_group(mesh).num_hosts == 2
    assert not Cluster(32).tensor_group(Mesh(tp=16, dp=2)).is_inside


def test_tuned_links() -> None:
    worlds = tuple(tuning.World(n, 0.5, 100.0 * n, 3.0, 1.1, True, 1 << 18, ()) for n in (2, 4))
    found = Cluster(4, planner.find_hardware("cpu-core")).tuned(
        tuning.Tuning("", {}, "", "", worlds)
    )
    group = found.data_group(Mesh(dp=4))
    expected = 3e-6 + 6 * 0.5e-6 + 1.5 * (1 << 20) * 400e-6 / (1 << 20)
    assert group.all_reduce(1 << 20) == pytest.approx(expected)
    assert "tuned with 4 ranks" in found.hardware.name


def test_hardware_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"like": "a100", "memory_bytes": 40 << 30}), encoding="utf-8")
    found = planner.find_hardware(path)
    assert (found.name, found.memory_bytes) == ("mine", 40 << 30)
    assert found.inside_rate == planner.HARDWARE["a100"].inside_rate
    for content, message in (
        ("{", "not JSON"),
        ("[]", "hardware is an object"),
        ('{"like": "b100"}', "like is one of"),
        ('{"like": "a100", "speed": 1}', "unknown speed"),
        ('{"like": "a100", "memory_bytes": -1}', "memory_bytes is a positive number, got -1"),
        ('{"like": "a100", "peak_flops": {"bf16": 1}}', "bf16 and fp32"),
        ('{"memory_bytes": 1}', "missing"),
    ):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            planner.find_hardware(path)


def test_dominating_parts() -> None:
    """Slow disks make a rank wait for states, and a slow network for gradients."""

    def best(system: str, hardware: planner.Hardware, **options: Any) -> Plan:
        job = Job(1 << 17, systems=(system,), pp=1, tp=1, **options)
        return planner.plan(planner.find_model("llama-3-8b"), Cluster(16, hardware), job).ranked[0]

    h100 = planner.HARDWARE["h100"]
    assert best("zero3", h100).time.largest == "compute"
    slow = dataclasses.replace(h100, outside_rate=1e8)
    found = best("zero3", slow)
    assert found.time.largest == "data"
    assert "data dominates" in found.reasons[-1]
    assert found.time.data + found.time.data_hidden > best("zero3", h100).time.data_hidden
    busy = best("zero3", dataclasses.replace(h100, overlap=0.0))
    assert busy.time.data_hidden == 0
    assert best("offload-nvme", h100).time.largest == "offload"


def test_who_hides_what() -> None:
    """DDP and fully_shard communicate beside computing; the others where they stand."""
    plans = plans_of("gpt2", 8, tp=1, pp=1)
    hidden = {plan.candidate.system.name: plan.time.data_hidden > 0 for plan in plans}
    assert {name for name, hides in hidden.items() if hides} == {"ddp", "zero3"}
    assert {"zero1", "zero2", "lomo", "infinity-cpu"} <= set(hidden)
    for plan in plans:
        assert plan.time.data + plan.time.data_hidden > 0
