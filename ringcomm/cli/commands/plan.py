"""Says which system, on which mesh, trains a model on some machines, and what it takes.

Nothing is started: memory by part, traffic, bubble and time are predicted for every system and
mesh, and what fits is ranked. A model is a name or a config.json of transformers. See
docs/design/planner.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

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
    add(
        "--why", type=int, default=1, help="whose reasons to show (default: %(default)s, the first)"
    )
    add("--json", action="store_true", help="print all plans as one JSON object")


def _add_machines(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("machines").add_argument
    add("--hardware", default="h100", help="a name of the table, or a JSON file (default: h100)")
    add("--tuning", type=Path, metavar="FILE", help="alpha and beta as `ringcomm tune` wrote them")
    add("--memory", help="of a device: 80GiB, 80GB (default: the hardware's)")
    add("--host-memory", help="of a host (default: the hardware's)")
    add("--per-host", type=int, default=0, help="devices of a host (default: the hardware's)")
    add("--utilisation", type=float, default=0.0, help="share of the peak (default: hardware's)")


def _add_job(parser: argparse.ArgumentParser) -> None:
    from ringcomm.measure.screen import as_option, words

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
    add("--regather", action="store_true", help="gather again in the backward pass what that has")
    add("--virtual-stages", type=int, default=2, help="of interleaved ranks")
    add("--load-whole", action="store_true", help="count a rank's weights in host memory at start")


def run(options: argparse.Namespace) -> int:
    """Prints the plans; the status is 1 when none fits."""
    from ringcomm.planner.job import bytes_of

    try:
        plans = _plans(options, bytes_of)
    except (ValueError, OSError) as error:
        options.parser.error(str(error))
    if options.json:
        print(plans.to_json())
    else:
        _print(plans, options.top, options.why)
    return 0 if plans.best is not None else 1


def _plans(options: argparse.Namespace, bytes_of: Any) -> Any:
    from ringcomm import planner, tuning
    from ringcomm.planner.job import count_of

    if options.model is None or options.gpus < 1:
        raise ValueError("--model and --gpus are wanted: --model llama-7b --gpus 8")
    if options.top < 0:
        raise ValueError(f"--top is not negative, got {options.top}")
    if options.why < 1:
        raise ValueError(f"--why counts from 1, got {options.why}")
    cluster = planner.Cluster(
        options.gpus,
        planner.find_hardware(options.hardware),
        memory_bytes=bytes_of(options.memory) if options.memory else 0,
        per_host=options.per_host,
        host_memory_bytes=bytes_of(options.host_memory) if options.host_memory else 0,
    )
    if options.tuning is not None:
        cluster = cluster.tuned(tuning.load(options.tuning))
    job = planner.Job(
        tokens=count_of(options.tokens),
        sequence=0 if options.sequence == "0" else count_of(options.sequence),
        precision=options.precision,
        optimizer=options.optimizer,
        attention=options.attention,
        is_sequence_split=options.sequence_parallel,
        regathers=options.regather,
        fused_norms=not cluster.hardware.is_host,
        loads_whole=options.load_whole,
        utilisation=options.utilisation,
        dp=options.dp,
        pp=options.pp,
        tp=options.tp,
        ep=options.ep,
        systems=tuple(options.systems),
        schedules=tuple(options.schedules),
        checkpointings=tuple(options.checkpointing),
        virtual_stages=options.virtual_stages,
    )
    return planner.plan(planner.find_model(options.model), cluster, job)


def _print(plans: Any, top: int, why: int) -> None:
    from ringcomm.measure.screen import make_console
    from ringcomm.planner.plans import headline, refusal_lines, table_of_plans

    console = make_console()
    if not console.is_terminal:
        console.width = 220
    console.print(headline(plans), soft_wrap=True)
    if plans.best is not None:
        console.print(table_of_plans(plans, top))
        chosen = plans.ranked[min(why, len(plans)) - 1]
        console.print(f"Why {chosen.candidate.name}:", soft_wrap=True)
        for reason in chosen.reasons:
            console.print(f"- {reason}", soft_wrap=True)
    console.print("What does not fit, or does not go:")
    for line in refusal_lines(plans, top):
        console.print(f"- {line}", soft_wrap=True)
