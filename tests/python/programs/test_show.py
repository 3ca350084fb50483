"""The pages of `ringcomm show`: files that need no network, with the library's numbers in them."""

from __future__ import annotations

import gzip
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from browsers import assert_alone, data_of
from torch import nn

from _ringcomm import start as cli
from ringcomm import show
from ringcomm.parallel import zero

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 32,
}


def written(*arguments: str, path: Path) -> Path:
    """A page; of `trace`, if there is no other, of the job of `ring_trace`."""
    if arguments == ("trace",):
        arguments = ("trace", "--trace", str(ring_trace(path.parent)))
    assert cli.run(["show", *arguments, "-o", str(path)]) == 0
    return path


def config_of(folder: Path) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("page", show.TITLES)
def test_a_page_needs_no_other_file(page: str, tmp_path: Path) -> None:
    path = written(page, path=tmp_path / "page.html")
    text = path.read_text(encoding="utf-8")
    assert "@" not in re.sub(r"@media", "", text)  # every mark has been replaced
    assert_alone(text)


@pytest.mark.parametrize(
    ("page", "options"),
    [
        ("ring", "--ranks 4 --bytes 1M"),
        ("memory", "--ranks 64 --model llama-7b"),
        ("pipeline", "--ranks 4 --micro-batches 8"),
        ("tensor", "--ranks 4 --model llama-7b"),
    ],
)
def test_what_is_shown_without_options(page: str, options: str, tmp_path: Path) -> None:
    first = written(page, path=tmp_path / "first.html")
    second = written(page, *options.split(), path=tmp_path / "second.html")
    assert first.read_bytes() == second.read_bytes()


def trace_of(*events: Any, **other: Any) -> bytes:
    return json.dumps({"traceEvents": events, **other}).encode()


EVENT: dict[str, Any] = {"name": "F0", "tid": 0, "ts": 0.0, "dur": 1.0, "args": {"stage": 0}}
STEP = {"cat": "step", "name": "reduce_scatter step 1", "pid": 1, "ts": 0, "args": {"seq": 1}}
OWN: dict[str, Any] = {"otherData": {"clock": []}}
NO_TRACE, NO_TIMELINE = "is not a trace written by `ringcomm trace`", "was not written by Timeline"
WHOLE = trace_of({"name": "all_reduce"}, **OWN)
NO_TRACES: dict[str, bytes] = {
    "of torch.profiler": trace_of(EVENT, distributedInfo={"rank": 0}),
    "without its end": WHOLE[:-20],
    "without its end.gz": gzip.compress(WHOLE, mtime=0)[:-12],
    "not compressed.gz": WHOLE,
    "a list": b"[1, 2]",
    "events that are none": trace_of(1),
    "numbers as events": trace_of(1, **OWN),
    "binary": b"\xff\xfe\x00",
}
ODD_EVENTS: list[dict[str, Any]] = [
    *({"dur": number} for number in (math.nan, 0.0)),
    *({"tid": number} for number in (1 << 40, -1, "main")),
    *({"name": name} for name in ("X0", "aten::add")),
    {"args": {}},
]
LARGE = json.dumps(CONFIG | {"num_hidden_layers": 5000}).encode()
NO_RING = {"cat": "collective", "args": {}}
REFUSED: list[tuple[str, str, bytes, str]] = [
    *(("trace --trace", *row, f"FILE {NO_TRACE}") for row in NO_TRACES.items()),
    *(("ring --trace", *row, f"FILE {NO_TRACE}") for row in NO_TRACES.items()),
    ("ring --trace", "no ring", trace_of(NO_RING, **OWN), "has no ring collective; ringcomm"),
    ("ring --trace", "its collective is missing", trace_of(STEP, **OWN), NO_TRACE),
    ("pipeline --timeline", "empty", trace_of(), NO_TIMELINE),
    *(("pipeline --timeline", "odd", trace_of(EVENT | odd), NO_TIMELINE) for odd in ODD_EVENTS),
    *(
        (f"{page} --model", "config.json", LARGE, f"page {page} shows models of up to 1024 layers")
        for page in ("memory", "lomo", "tensor")
    ),
]


@pytest.mark.parametrize(("words", "name", "content", "said"), REFUSED)
def test_a_file_that_cannot_be_shown(
    words: str,
    name: str,
    content: bytes,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In one line behind the usage, and without a page. What viewers of others do with a file:

    https://github.com/facebookresearch/HolisticTraceAnalysis/issues/17: a long traceback.
    https://github.com/google/trace-viewer/issues/145: it is without its end.
    https://github.com/MobileNativeFoundation/bluepill/issues/437: numbers that are none.
    """
    file, page = tmp_path / name, tmp_path / "page.html"
    file.write_bytes(content)
    with pytest.raises(SystemExit) as ended:
        cli.run(["show", *words.split(), str(file), "-o", str(page)])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert said.replace("FILE", str(file)) in error
    assert "--model" not in words or f"{tmp_path.name} has 5000" in error
    assert "Traceback" not in error
    assert not page.exists()


def test_names_do_not_end_the_page(tmp_path: Path) -> None:
    """https://github.com/CodeGraphContext/CodeGraphContext/issues/1514 and
    https://github.com/topoteretes/cognee/pull/4428
    """
    for name in ("<!--<script>", "@VERSION@ @DATA@ \u2028 & \"'"):
        (tmp_path / name).mkdir()
        model = config_of(tmp_path / name)
        path = written("lomo", "--model", model, path=tmp_path / "page.html")
        assert data_of(path)["model"] == name
        assert path.read_text(encoding="utf-8").count("<script") == 2


def ring_trace(folder: Path) -> Path:
    """Of two ranks, as far as pages read it."""
    about = {"group": "g", "seq": 7, "bytes": 4096, "algorithm": "ring"}
    whole = {"cat": "collective", "ph": "X", "tid": 1, "ts": 0.0, "dur": 20.0, "args": about}
    events: list[dict[str, Any]] = [{"name": "all_reduce", "pid": pid} | whole for pid in (1, 2)]
    # Not for a rank, and so on no page.
    own = {"cat": "wait", "ph": "X", "pid": 1, "tid": 9, "ts": 1.0, "dur": 9.0, "args": about}
    events.append({"name": "wait for this rank's own thread"} | own)
    for at, name in enumerate(("forward", "backward", "optimizer")):
        place = {"ph": "X", "pid": 1, "tid": 9, "ts": 30.0 * at + 30, "dur": 30.0, "args": {}}
        events.append({"name": name, "cat": "program"} | place)
    for rank in range(2):
        pid = rank + 1
        named = {"name": "process_name", "ph": "M", "pid": pid}
        events.append(named | {"args": {"name": f"rank {rank}"}})
        for at, half in enumerate(("reduce_scatter", "all_gather")):
            place = {"ph": "X", "pid": pid, "tid": 1, "ts": 10.0 * at}
            args = {"group": "g", "seq": 7, "chunk": (rank + at) % 2, "slice": 0, "from": 1 - rank}
            step = {"name": f"{half} step 1", "cat": "step", "dur": 8.0 + rank, "args": args}
            wait = {"name": "wait", "cat": "wait", "dur": 2.0 * rank}
            wait["args"] = about | {"rank": 1 - rank}
            events += [place | step, place | wait]
    path = folder / "trace.json"
    whole_trace = {"otherData": {"clock": []}, "traceEvents": events}
    path.write_text(json.dumps(whole_trace), encoding="utf-8")
    return path


def test_a_recorded_ring(tmp_path: Path) -> None:
    trace = str(ring_trace(tmp_path))
    data = data_of(
        written("ring", "--trace", trace, "--seq", "7", path=tmp_path / "page.html"), "data"
    )
    assert (data["ranks"], data["bytes"]) == (2, 4096)
    assert data["recorded"] == "all_reduce #7 of 2 ranks, from trace.json"
    assert show.ring(2, 1, None, None)["recorded"] == ""
    assert {"rank": "rank 1", "step": "all_gather step 1"} | {
        "us": 9.0,
        "wait_us": 2.0,
        "peer": "rank 0",
    } in data["measured"]
    with pytest.raises(ValueError, match=r"no ring collective of call #8"):
        show.ring(2, 1, Path(trace), 8)


def test_a_page_keeps_the_newest_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/pytorch/kineto/issues/595: a viewer shows nothing of a large trace."""
    monkeypatch.setattr(show, "MAX_EVENTS", 2)
    data = data_of(written("trace", path=tmp_path / "page.html"))
    assert [event["name"] for event in data["events"]] == ["backward", "optimizer"]
    assert "The oldest 7 events are not on this page." in data["about"]


def test_the_memory_of_a_page_is_what_zero_predicts(tmp_path: Path) -> None:
    """Of the weights alone; activations are the planner's."""
    data = data_of(
        written("memory", "--model", config_of(tmp_path), path=tmp_path / "page.html"), "data"
    )
    rows = {(row["system"], row["ranks"]): row for row in data["rows"]}
    assert {ranks for _, ranks in rows} == {2, 4, 8, 16, 32, 64}
    h, f, v = 64, 96, 128
    layer = 4 * h * h + 3 * h * f + 2 * h
    assert data["num_params"] == 2 * v * h + 2 * layer + h
    ddp, num_params = rows["ddp", 4], data["num_params"]
    # Weights in bfloat16 and float32, and two float32 states.
    parts = [ddp[name] for name in ("parameters", "gradients", "states")]
    assert parts == [6 * num_params, 2 * num_params, 8 * num_params]
    model = nn.Linear(
        1000, 1000, bias=False, dtype=torch.bfloat16
    )  # stage 1 has no regard to shapes
    predicted = zero.predict_memory(model, torch.optim.AdamW(model.parameters()), 1, world_size=4)
    share = (rows["zero1", 4]["states"] + rows["zero1", 4]["parameters"]) / num_params
    assert share == pytest.approx((predicted.states + predicted.parameters) / 1e6, rel=1e-3)
    sharded = [rows["zero3", 4][name] / num_params for name in ("parameters", "states")]
    assert sharded == pytest.approx([4 / 4, 8 / 4], rel=0.02)  # the longest rows
    lomo = [rows["lomo", 4][name] for name in ("parameters", "states")]
    assert lomo == [2 * num_params, 0]


@pytest.mark.parametrize(("most", "stops"), [(2, [2]), (3, [2, 3]), (6, [2, 4, 6]), (8, [2, 4, 8])])
def test_the_memory_of_the_ranks_that_are_asked_for(most: int, stops: list[int]) -> None:
    """Another number than a power of two was left out without a word."""
    rows = show.memory("gpt2", most)["rows"]
    assert list(dict.fromkeys(row["ranks"] for row in rows)) == stops


def test_memory_over_a_backward_pass(tmp_path: Path) -> None:
    data = data_of(
        written("lomo", "--model", config_of(tmp_path), path=tmp_path / "page.html"), "data"
    )
    sizes = data["sizes"]
    assert (sizes[0]["name"], sizes[-1]["name"]) == ("the head", "the embedding")
    assert len(sizes) == 1 + 2 * 9 + 2
    layer = 4 * 64 * 64 + 3 * 64 * 96 + 2 * 64
    assert sum(one["bytes"] for one in sizes) == 2 * (2 * 128 * 64 + 2 * layer + 64)
    assert sum(one["activations"] > 0 for one in sizes) == 4  # one for each unit
