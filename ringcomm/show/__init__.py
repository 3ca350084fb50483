"""`ringcomm show`: pages that show how an algorithm works, also from a recorded run.

A page is one file that needs no network: page.html with the data, common.js and the script of its
name. The scripts compute what a reader may change; the rest comes with the data. A page's function
raises ValueError for a model, a trace or a file that the page cannot show.

tools/site_pages.py writes the site's pages without torch, which only the data of `memory` needs.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from _ringcomm.values import MAX_MICRO_BATCHES, MAX_WORLD_SIZE
from ringcomm.screen import COLORS, write_text
from ringcomm.version import __version__

TITLES = {
    "ring": "An all_reduce, step by step",
    "memory": "Memory of a rank: DDP, ZeRO 1 to 3, LOMO",
    "lomo": "Memory over a backward pass: AdamW, SGD, LOMO",
    "pipeline": "A step of a pipeline, and its idle time",
    "tensor": "Tensor parallelism of one block, and its four collectives",
    "loss": "Cross-entropy over a split vocabulary, in one collective",
    "trace": "A recorded job: its phases, calls and waits",
}
MAX_LAYERS = 1024
MAX_EVENTS = 50_000  # of page trace, the newest: some 5 MB
_SYSTEMS = ("ddp", "zero1", "zero2", "zero3", "lomo", "lomo-shards")


class Ring(NamedTuple):
    """One ring collective of a trace: events of it, of its steps and of waits, by their begin."""

    whole: dict[str, Any]
    steps: list[dict[str, Any]]
    waits: list[dict[str, Any]]
    ranks: dict[int, str]  # names, by the `pid` of the events


@contextmanager
def _events_of(path: Path) -> Iterator[list[dict[str, Any]]]:
    """The events of a trace, to read; raises ValueError if they are not of `ringcomm trace`."""
    wrong = AttributeError, EOFError, LookupError, TypeError, ValueError, zlib.error
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            whole = json.load(file)
        whole["otherData"]["clock"]  # a trace of another program has other events
        yield whole["traceEvents"]
    except (gzip.BadGzipFile, *wrong):
        text = f"{path} is not a trace written by `ringcomm trace`, or not all of it"
        raise ValueError(text) from None


def ring_of(path: Path, seq: int | None = None) -> Ring:
    """A ring collective of a trace: call number `seq` of its group; None means the first one.

    Raises ValueError if there is none.
    """
    with _events_of(path) as events:
        found = [
            e for e in events if e.get("cat") == "step" and seq in (None, e["args"].get("seq"))
        ]
        if found:
            call = _call_of(min(found, key=itemgetter("ts")))
            (whole, *_), steps, waits = (
                sorted((e for e in events if _call_of(e, kind) == call), key=itemgetter("ts"))
                for kind in ("collective", "step", "wait")
            )
            names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
            ranks = {row: names[row] for row in sorted({e["pid"] for e in steps})}
            return Ring(whole, steps, waits, ranks)
    of_call = "" if seq is None else f" of call #{seq}"
    raise ValueError(
        f"{path} has no ring collective{of_call};"
        ' ringcomm.Options(algorithm="ring") makes rings of all_reduces on two or more ranks'
    )


def _call_of(event: dict[str, Any], kind: str = "step") -> tuple[Any, Any] | None:
    """The group and number of its call; None for an event of another kind."""
    if event.get("cat") != kind:
        return None
    return event["args"].get("group"), event["args"].get("seq")


def ring(num_ranks: int, num_bytes: int, trace: Path | None, seq: int | None) -> dict[str, Any]:
    """Of page `ring`: buffers of `num_bytes`, or call `seq` of a trace of `ringcomm trace`."""
    if trace is None:
        made_up = {"ranks": num_ranks, "bytes": num_bytes, "recorded": "", "measured": []}
        return {"max_ranks": MAX_WORLD_SIZE} | made_up
    found = ring_of(trace, seq)
    times: dict[tuple[str, str], dict[str, Any]] = defaultdict(lambda: {"us": 0.0, "wait_us": 0.0})
    for step in found.steps:  # of all slices
        mine = times[found.ranks[step["pid"]], step["name"]]
        mine["us"] += step["dur"]
        end = step["ts"] + step["dur"]
        mine["wait_us"] += sum(
            wait["dur"]
            for wait in found.waits
            if (wait["pid"], wait["tid"]) == (step["pid"], step["tid"])
            and step["ts"] <= wait["ts"] < end
        )
        mine["peer"] = f"rank {step['args'].get('from')}"
    name, about = found.whole["name"], found.whole["args"]
    return {
        "max_ranks": MAX_WORLD_SIZE,
        "ranks": len(found.ranks),
        "bytes": about["bytes"],
        "recorded": f"{name} #{about['seq']} of {len(found.ranks)} ranks, from {trace.name}",
        "measured": [{"rank": rank, "step": name} | own for (rank, name), own in times.items()],
    }


def memory(model: str, max_ranks: int) -> dict[str, Any]:
    """Of page `memory`: a known model or the path of a config.json; 2, 4 ... `max_ranks` ranks."""
    from ringcomm.planner import Cluster, Job
    from ringcomm.planner.candidate import Candidate
    from ringcomm.planner.costs import memory_of
    from ringcomm.planner.job import SYSTEMS, Mesh

    shape = _shape_of("memory", model)
    rows = []
    for num_ranks in (*(1 << k for k in range(1, 7) if 1 << k < max_ranks), max_ranks):
        job = Job(shape.context * num_ranks, shape.context)
        cluster = Cluster(num_ranks, per_host=num_ranks)
        for name in _SYSTEMS:
            of_step = (SYSTEMS[name], Mesh(num_ranks), "", "full", 1, 1)
            found = vars(memory_of(Candidate(shape, cluster, job, *of_step)))
            # ZeRO-3's weights are the float32 masters, which others count as a third of the states.
            masters = 0 if name == "zero3" else found["states"] // 3
            found["parameters"] += masters
            found["states"] -= masters
            rows.append({"ranks": num_ranks, "system": name} | found)
    about = (
        f"A rank has one sequence of {shape.context:,} tokens, in bfloat16, plus float32 master"
        " weights, except LOMO; states are AdamW's. Layers are recomputed: only their inputs are"
        " kept. The page lomo differs: one rank, all activations kept."
    )
    return {"model": shape.name, "num_params": shape.num_params, "about": about, "rows": rows}


def lomo(model: str) -> dict[str, Any]:
    """Of page `lomo`: a known model or the path of a config.json."""
    from ringcomm.planner import Job
    from ringcomm.planner.costs import activations_of
    from ringcomm.planner.job import Mesh

    shape = _shape_of("lomo", model)
    job = Job(shape.context, shape.context)
    kept = activations_of(shape, job, Mesh(), 1)
    units = [("the embedding", shape.embedding, kept.embedding)]
    units += [(f"layer {idx}", shape.layer, kept.layer) for idx in range(shape.layers)]
    units.append(("the head", shape.head, kept.head))
    sizes = [
        {
            "name": name,
            "bytes": job.itemsize * weight.num_elems,
            "activations": activations * (idx == 0),  # freed with the unit's last gradient
        }
        for name, unit, activations in reversed(units)
        for idx, weight in reversed(list(enumerate(unit)))
    ]
    about = (
        f"One sequence of {shape.context:,} tokens on one rank, in bfloat16, plus float32 master"
        " weights, except LOMO. All activations are kept; the page memory recomputes layers."
    )
    return {"model": shape.name, "about": about, "sizes": sizes}


def pipeline(num_ranks: int, num_micro_batches: int, timeline: Path | None) -> dict[str, Any]:
    """Of page `pipeline`: any numbers, or a file of `Pipeline.timeline().export_chrome_trace()`."""
    limits = {"max_ranks": MAX_WORLD_SIZE, "max_micro_batches": MAX_MICRO_BATCHES}
    if timeline is None:
        return limits | {"ranks": num_ranks, "micro_batches": num_micro_batches, "actions": []}
    try:
        events = json.loads(timeline.read_text(encoding="utf-8"))["traceEvents"]
        actions = [
            {
                "rank": event["tid"],
                "kind": event["name"][0],
                "stage": event["args"]["stage"],
                "microBatch": int(event["name"][1:]),
                "begin": event["ts"],
                "end": event["ts"] + event["dur"],
            }
            for event in events
        ]
        ranks = {one["rank"] for one in actions}
        is_whole = bool(actions) and ranks == set(range(len(ranks)))
        times = [one[key] for one in actions for key in ("begin", "end")]
        if not is_whole or not all(one["kind"] in "FBIW" for one in actions):
            raise ValueError
        if not all(map(math.isfinite, times)) or min(times) == max(times):
            raise ValueError
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(f"{timeline} was not written by Timeline.export_chrome_trace()") from None
    return limits | {"ranks": len(ranks), "micro_batches": 0, "actions": actions}


def tensor(model: str, num_ranks: int) -> dict[str, Any]:
    """Of page `tensor`: a known dense model or the path of a config.json."""
    shape = _shape_of("tensor", model)
    if shape.experts:
        raise ValueError(f"page tensor shows a dense block, and {shape.name} has experts")
    sizes = {
        "hidden": shape.hidden,
        "query": shape.query_width,
        "key_value": shape.kv_width,
        "ffn": shape.ffn,
        "num_inner": 2 if shape.gated else 1,
        "tokens": shape.context,
    }
    return {"model": shape.name, "max_ranks": MAX_WORLD_SIZE, "ranks": num_ranks} | sizes


def _shape_of(page: str, model: str) -> Any:
    from ringcomm.planner.models import find_model

    shape = find_model(model)
    if shape.layers > MAX_LAYERS:
        raise ValueError(
            f"page {page} shows models of up to {MAX_LAYERS} layers, and {shape.name} has"
            f" {shape.layers}"
        )
    return shape


def loss(num_ranks: int) -> dict[str, Any]:
    """Of page `loss`: an example of twelve classes, which 1, 2, 3, 4, 6 or 12 ranks share."""
    logits = [1.5, 0.25, -2.0, 3.0, 0.5, -0.75, 2.25, 4.0, -1.0, 0.0, 2.0, 1.0]
    return {"logits": logits, "target": 3, "ranks": num_ranks}


def _shown_events(found: list[dict[str, Any]], rows: dict[Any, int]) -> Iterator[dict[str, Any]]:
    """Of the events of a trace, those of the page. `rows`: the row of each `pid`."""
    from ringcomm.trace.merge import is_wait_for_peer

    kinds = {"program": "program", "collective": "call"}
    messages = {e["id"]: e["ts"] for e in found if e["ph"] == "e"}
    for e in found:
        if (e["ph"], e.get("cat")) == ("b", "message"):
            kind, end = "message", messages[e["id"]]
        elif e.get("cat") in kinds or is_wait_for_peer(e):
            kind, end = kinds.get(e["cat"], "wait"), e["ts"] + e["dur"]
        else:
            continue
        args = e["args"]
        about = {"rank": rows[e["pid"]], "kind": kind, "name": e["name"]}
        about |= {"begin": e["ts"], "end": round(end, 3), "seq": args.get("seq")}
        yield about | {"peer": args.get("rank"), "unfinished": "unfinished" in args}


def trace(path: Path) -> dict[str, Any]:
    """Of page `trace`: a trace of `ringcomm trace`. Times are in µs."""
    with _events_of(path) as found:
        names = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
        rows = {pid: row for row, pid in enumerate(sorted(names))}
        events = [*_shown_events(found, rows)]
    if not events:
        raise ValueError(f"{path} has no call")
    events.sort(key=lambda event: event["begin"])
    num_left_out = max(0, len(events) - MAX_EVENTS)
    said = f" The oldest {num_left_out} events are not on this page." if num_left_out else ""
    shown = events[num_left_out:]
    return {
        "about": "For each rank: the phases of the program, and under them its calls. The lower"
        f" edge of a call is orange while the rank waits for another one.{said}",
        "ranks": [names[pid] for pid in rows],
        "numbers": [int(names[pid].split()[1]) for pid in rows],
        "events": shown,
    }


def write_page(name: str, data: dict[str, Any], path: Path) -> None:
    """Writes a page. Raises OSError if it cannot be written."""
    write_text(path, page_of(name, data))


def page_of(name: str, data: dict[str, Any]) -> str:
    """The text of a page."""
    files = resources.files(__name__)
    script = "\n".join(files.joinpath(f"{part}.js").read_text("utf-8") for part in ("common", name))
    # JSON in a <script>: the text must not end it.
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    page = files.joinpath("page.html").read_text("utf-8")
    for mark, part in (
        ("@TITLE@", TITLES[name]),
        ("@VERSION@", __version__),
        ("@SCRIPT@", script),
        ("@COLORS@", json.dumps(COLORS)),
        ("@DATA@", text),
    ):
        page = page.replace(mark, part)
    return page
