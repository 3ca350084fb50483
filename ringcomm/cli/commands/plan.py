"""Says which system, on which mesh, trains a model on some machines, and what it takes.

Nothing is started: memory by part, traffic, bubble and time are predicted for every system and
mesh, and what fits is ranked. A model is a name or a config.json of transformers. See
docs/design/planner.md.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringcomm import tuning
from ringcomm.measure.screen import amount, as_option, make_console, words

if TYPE_CHECKING:
    from ringcomm.planner import Plans

HELP = "rank systems and meshes for a model by predicted memory and time"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the machines, the batch, and what to look at."""
    add = parser.add_argument
    add("--model", help="such as llama-7b, or the path of a config.json")
    add("--gpus", type=int, default=0, help="devices of all hosts")
    add("--tokens", default="4M", help="of a step, over all ranks (default: %(default)s)")
    add("--sequence", default="0", help="tokens of a sequence (default: the model's context)")
    _add_machines(parser)
    _add_job(parser)
    add("--top", type=int, default=10, help="lines of each kind; 0: all (default: %(default)s)")
    add("--why", type=int, default=1, help="whose reasons to show (default: the first)")
    add("--json", action="store_true", help="print all plans as one JSON object")


def _add_machines(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("machines").add_argument
    add("--hardware", default="h100", help="a name of the table, or a JSON file (default: h100)")
    add("--tuning", type=Path, metavar="FILE", help="alpha and beta as `ringcomm tune` wrote them")
    add("--memory", help="of a device: 80GiB, 80GB (default: the hardware's)")
    add("--host-memory", help="of a host (default: the hardware's)")
    add("--per-host", type=int, default=0, help="devices of a host (default: the hardware's)")
    add("--utilisation", type=float, help="share of the peak (default: the hardware's)")


def _add_job(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what to look at").add_argument
    for name, what in (("dp", "data"), ("pp", "pipeline"), ("tp", "tensor"), ("ep", "expert")):
        add(f"--{name}", type=int, default=0, help=f"size of {what} parallelism (default: all)")
    several: dict[str, Any] = {"type": as_option(words), "default": [], "metavar": "NAMES"}
    add("--systems", help="separated by commas (default: all)", **several)
    add("--schedules", help="of pipelines (default: all)", **several)
    add("--checkpointing", help="none, selective, full (default: all)", **several)
    add("--precision", default="bf16", help="bf16 (with float32 masters) or fp32")
    add("--optimizer", default="adamw", help="adamw or sgd")
    add("--attention", default="flash", help="flash, or full for s × s matrices")
    add(
        "--sequence-parallel",
        action=argparse.BooleanOptionalAction,
        help="among tensor-parallel ranks (default: where they divide sequences)",
    )
    add("--virtual-stages", type=int, default=2, help="of interleaved ranks")


def run(options: argparse.Namespace) -> int:
    """Prints the plans; the status is 1 when none fits."""
    try:
        plans = _plans(options)
    except (ValueError, OSError) as error:
        options.parser.error(str(error))
    if options.json:
        print(plans.to_json())
    else:
        _print(plans, options.top, options.why)
    return 0 if plans.best is not None else 1


def _plans(options: argparse.Namespace) -> Plans:
    from ringcomm.planner import Cluster, Job, plan

    if options.model is None or options.gpus < 1:
        raise ValueError("--model and --gpus are wanted: --model llama-7b --gpus 8")
    if options.top < 0:
        raise ValueError(f"--top is not negative, got {options.top}")
    if options.why < 1:
        raise ValueError(f"--why counts from 1, got {options.why}")
    cluster = Cluster(
        options.gpus,
        options.hardware,
        memory_bytes=amount(options.memory) if options.memory else 0,
        per_host=options.per_host,
        host_memory_bytes=amount(options.host_memory) if options.host_memory else 0,
    )
    if options.utilisation is not None:
        hardware = replace(cluster.hardware, utilisation=options.utilisation)
        cluster = replace(cluster, hardware=hardware)
    if options.tuning is not None:
        cluster = cluster.tuned(tuning.load(options.tuning).worlds)
    names = ("precision", "optimizer", "attention", "dp", "pp", "tp", "ep", "virtual_stages")
    job = Job(
        tokens=amount(options.tokens),
        sequence=0 if options.sequence == "0" else amount(options.sequence),
        is_sequence_split=options.sequence_parallel,
        fused_norms=not cluster.hardware.is_host,
        systems=tuple(options.systems),
        schedules=tuple(options.schedules),
        checkpointings=tuple(options.checkpointing),
        **{name: getattr(options, name) for name in names},
    )
    return plan(options.model, cluster, job)


def _print(plans: Plans, top: int, why: int) -> None:
    console = make_console()
    if not console.is_terminal:
        console.width = 220
    console.print(plans.headline(), soft_wrap=True)
    if plans.best is not None:
        console.print(plans.table(top))
        chosen = plans.ranked[min(why, len(plans.ranked)) - 1]
        console.print(f"Why {chosen.candidate.name}:", soft_wrap=True)
        for reason in chosen.reasons:
            console.print(f"- {reason}", soft_wrap=True)
    console.print("What does not fit, or does not go:")
    for line in plans.refusal_lines(top):
        console.print(f"- {line}", soft_wrap=True)
