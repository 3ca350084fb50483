"""The pages of `ringcomm show`: files that need no network, with the library's numbers in them."""

from __future__ import annotations

import json
import math
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from browsers import PHONE, SCREEN, data_of, opened
from schedule_simulation import simulate
from torch import nn

from _ringcomm import start as cli
from ringcomm import show
from ringcomm.parallel import zero
from ringcomm.parallel.pipeline.schedules import Action, Timeline
from ringcomm.testing import run_ranks
from ringcomm.trace import merge

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
    links = re.findall(r'(?:https?:|src=|href=|@import)[^"\s]*', text)
    assert links == ["http://www.w3.org/2000/svg"]  # a name, not an address


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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ring", "--trace", "{file}"], "is not a trace written by `ringcomm trace`"),
        (["memory", "--model", "nothing"], "'nothing' is neither a model nor a config.json"),
        (["pipeline", "--timeline", "{file}"], "was not written by Timeline.export_chrome_trace()"),
        (["tensor", "--model", "mixtral-8x7b"], "mixtral-8x7b has experts"),
    ],
)
def test_bad_input(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file.json"
    file.write_text("{}", encoding="utf-8")
    refused([argument.format(file=file) for argument in arguments], said, capsys)


def refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line behind the usage, and without a page."""
    page = Path(arguments[-1]).with_name("page.html")
    with pytest.raises(SystemExit) as ended:
        cli.run(["show", *arguments, "-o", str(page)])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert not page.exists()


EVENT: dict[str, Any] = {"name": "F0", "tid": 0, "ts": 0.0, "dur": 1.0, "args": {"stage": 0}}
STEP = {"cat": "step", "name": "reduce_scatter step 1", "pid": 1, "ts": 0, "args": {"seq": 1}}
NO_TRACE, NO_TIMELINE = "is not a trace written by `ringcomm trace`", "was not written by Timeline"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            '{"otherData": {"clock": ""}, "traceEvents": [{"cat": "collective", "args": {}}]}',
            "has no ring collective; ringcomm",
        ),
        ('{"traceEvents": [1]}', NO_TRACE),
        ('{"traceEvents": 1}', NO_TRACE),
        ("[]", NO_TRACE),
        ("\x1f\x8b no text", NO_TRACE),
        # Its collective is missing.
        (json.dumps({"otherData": {"clock": ""}, "traceEvents": [STEP]}), NO_TRACE),
        (json.dumps({"traceEvents": [STEP]})[:-9], NO_TRACE),
    ],
)
def test_a_file_without_a_ring(
    content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """https://github.com/google/trace-viewer/issues/145: a trace that was cut off."""
    file = tmp_path / "file.json"
    file.write_text(content, encoding="latin-1")
    refused(["ring", "--trace", str(file)], said, capsys)


@pytest.mark.parametrize(
    "changed",
    [
        {"dur": math.nan},
        {"dur": 0.0},
        {"tid": 1 << 40},
        {"tid": -1},
        {"tid": "main"},
        {"name": "X0"},
        {"name": "aten::add"},
        {"args": {}},
        None,
    ],
)
def test_a_file_that_is_no_timeline(
    changed: dict[str, Any] | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """https://github.com/MobileNativeFoundation/bluepill/issues/437: numbers that are none."""
    file = tmp_path / "file.json"
    events = [] if changed is None else [EVENT | changed]
    file.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    refused(["pipeline", "--timeline", str(file)], NO_TIMELINE, capsys)


def test_a_model_that_is_too_large_for_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | {"num_hidden_layers": 5000}), encoding="utf-8")
    for page in ("memory", "lomo", "tensor"):
        said = f"page {page} shows models of up to 1024 layers, and {tmp_path.name} has 5000"
        refused([page, "--model", str(path)], said, capsys)


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


# ---- in a browser


def set_to(page: Any, name: str, value: object) -> None:
    page.locator(name).fill(str(value))
    page.locator(name).dispatch_event("change")


@pytest.mark.slow
@pytest.mark.parametrize("size", [SCREEN, PHONE], ids=["screen", "phone"])
@pytest.mark.parametrize("page", show.TITLES)
def test_pages_fit_the_screen(browser: Any, page: str, size: Any, tmp_path: Path) -> None:
    with opened(browser, written(page, path=tmp_path / "page.html"), size) as shown:
        assert shown.locator("svg").count() >= 1
        assert shown.locator("svg rect, svg path").count() > 5
        widths = "all => all.map(svg => [svg.clientWidth, svg.viewBox.baseVal.width])"
        for width, own in shown.locator("figure svg").evaluate_all(widths):
            assert 13 * width >= 11 * (own - 1)  # texts of 13 px have at least 11 px
        if page != "loss":  # twelve numbers in a row do not fit on a phone
            figure = shown.locator("#picture")
            assert figure.evaluate("figure => figure.scrollWidth - figure.clientWidth") == 0
        clipped = "all => all.filter(one => one.scrollWidth > one.clientWidth + 1).length"
        assert shown.locator(".halves span").evaluate_all(clipped) == 0


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 11, 20, 64])
def test_names_of_chunks_are_whole_on_a_phone(browser: Any, ranks: int, tmp_path: Path) -> None:
    with opened(browser, written("ring", path=tmp_path / "page.html"), PHONE) as page:
        set_to(page, "#ranks", ranks)
        lefts = "all => all.map(text => text.getBBox().x)"
        names = page.locator("#picture text.faint")
        assert names.count() == (ranks if ranks <= 20 else ranks // 8)
        assert min(names.evaluate_all(lefts)) >= 0


# Of each page with a table of numbers: the columns that a phone shows without scrolling.
FIRST_COLUMNS = {
    "memory": ["system", "in all"],
    "lomo": ["optimizer", "now", "most"],
    "trace": ["", "wait", "call"],
}


@pytest.mark.slow
@pytest.mark.parametrize("page", FIRST_COLUMNS)
def test_a_phone_shows_the_totals_of_a_table(browser: Any, page: str, tmp_path: Path) -> None:
    with opened(browser, written(page, path=tmp_path / "page.html"), PHONE) as shown:
        table = shown.locator("#sums, #table")
        heads = table.locator("th")
        first = FIRST_COLUMNS[page]
        assert heads.all_inner_texts()[: len(first)] == first
        rights = heads.evaluate_all("all => all.map(one => one.getBoundingClientRect().right)")
        assert max(rights[: len(first)]) <= PHONE["width"]
        assert all("".join(column) for column in columns_of(table))


def columns_of(table: Any) -> list[tuple[str, ...]]:
    """The texts of each column below its head."""
    rows = table.locator("tbody tr").all()
    return [*zip(*(row.locator("td").all_inner_texts() for row in rows), strict=True)]


@pytest.mark.slow
def test_a_trace_without_phases_has_no_columns_for_them(browser: Any, tmp_path: Path) -> None:
    trace = json.loads(ring_trace(tmp_path).read_text(encoding="utf-8"))
    trace["traceEvents"] = [e for e in trace["traceEvents"] if e.get("cat") != "program"]
    (tmp_path / "trace.json").write_text(json.dumps(trace), encoding="utf-8")
    path = written("trace", "--trace", str(tmp_path / "trace.json"), path=tmp_path / "page.html")
    with opened(browser, path) as page:
        assert page.locator("#sums th").all_inner_texts() == ["", "wait", "call"]
        assert page.locator(".legend span").all_inner_texts() == ["■ call", "■ wait"]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ring", "two_shot", "one_shot"])
@pytest.mark.parametrize("n", [2, 3, 8, 64])
def test_every_rank_gets_the_sum(browser: Any, algorithm: str, n: int, tmp_path: Path) -> None:
    with opened(browser, written("ring", path=tmp_path / "page.html")) as page:
        set_to(page, "#ranks", n)
        page.locator("#algorithm").select_option(algorithm)
        steps = {"ring": 2 * (n - 1), "two_shot": 2, "one_shot": 1}[algorithm]
        assert page.locator("#step").get_attribute("max") == str(steps)
        complete = "+".join(map(str, range(n)))
        page.locator("#step").fill(str(steps - 1))
        cells = page.locator(f'rect.cell[data-parts="{complete}"]')
        assert cells.count() < n * n  # a negative control
        page.locator("#step").fill(str(steps))
        assert cells.count() == n * n
        received = n - 1 if algorithm == "one_shot" else 2 * (n - 1) / n
        assert (
            f"received {float(f'{received:.3g}'):g} × the buffer"
            in page.locator("#sent").inner_text()
        )


@pytest.mark.slow
def test_a_recorded_ring_says_who_waited(browser: Any, tmp_path: Path) -> None:
    trace = str(ring_trace(tmp_path))
    with opened(browser, written("ring", path=tmp_path / "page.html")) as page:
        assert page.locator("#recorded").is_hidden()
    with opened(browser, written("ring", "--trace", trace, path=tmp_path / "page.html")) as page:
        assert "all_reduce #7 of 2 ranks, from trace.json" in page.locator("#recorded").inner_text()
        page.locator("#step").fill("1")
        said = page.locator("#waits").inner_text()
        assert "rank 1 waited 2 µs for rank 0" in said
        assert "took 9 µs" in said
        page.locator("#play").click()
        page.wait_for_function("document.getElementById('step').value === '2'")
        set_to(page, "#ranks", 3)
        assert page.locator("#recorded").is_hidden()


def reduce_once(rank: int) -> None:
    dist.all_reduce(torch.ones(4096))


@pytest.mark.slow
def test_a_recorded_job_in_a_browser(browser: Any, tmp_path: Path) -> None:
    with opened(browser, written("trace", path=tmp_path / "page.html")) as page:

        def kinds() -> list[str]:
            boxes = page.locator("rect.event")
            found = boxes.evaluate_all("all => all.map(box => box.dataset.kind)")
            return sorted(kind for kind in found if kind != "wait")

        phases = ["forward", "backward", "optimizer"]
        assert kinds() == sorted([*phases, "call", "call"])
        assert page.locator('rect.event[data-kind="wait"][data-rank="1"]').count() == 2
        row = page.locator("#sums tbody tr").nth(0).locator("td").all_inner_texts()
        assert row == ["rank 0", "", "20 µs (16.7 %)", *["30 µs (25 %)"] * 3]
        (arrow,) = page.locator("path.arrow").all()  # rank 0 has waited for 0 µs
        assert "rank 1 waited 4 µs for rank 0" in arrow.text_content()
        page.locator('rect.event[data-kind="backward"]').click()
        assert page.locator("#chosen").inner_text() == "rank 0: backward, 30 µs, from 60 µs on"
        page.locator("#closer").click()  # from 30 to 90 µs
        assert kinds() == ["backward", "forward"]
        page.locator("#whole").click()
        assert len(kinds()) == 5


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 5])
def test_the_steps_are_those_of_a_real_ring(
    browser: Any, n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which chunk a rank receives in which step, in a trace of ringcomm's own ring."""
    monkeypatch.setenv("RINGCOMM_TRACE", str(tmp_path / "recorded"))
    monkeypatch.setenv("RINGCOMM_ALGORITHM", "ring")
    run_ranks(n, reduce_once, timeout_s=300.0)
    trace = tmp_path / "trace.json"
    merge.merge([tmp_path / "recorded"], trace)
    found = show.ring_of(trace)
    real = {
        (e["name"], found.ranks[e["pid"]], e["args"]["from"], e["args"]["chunk"])
        for e in found.steps
        if "from" in e["args"]
    }
    with opened(browser, written("ring", "--trace", str(trace), path=tmp_path / "p.html")) as page:
        steps = page.evaluate(f"ALGORITHMS.ring({n})")
        shown = {
            (step["name"], f"rank {move['to']}", move["from"], move["chunk"])
            for step in steps
            for move in step["moves"]
        }
        assert shown == real


@pytest.mark.slow
@pytest.mark.parametrize(
    ("p", "m", "schedule"),
    [
        (p, m, schedule)
        for p, m in [(1, 1), (2, 4), (4, 8), (8, 16)]
        for schedule in ["gpipe", "1f1b", "interleaved", "zero-bubble"]
        if schedule != "interleaved" or p > 1  # one rank has nothing to interleave
    ],
)
def test_schedules_are_the_librarys(
    browser: Any,
    schedule: str,
    p: int,
    m: int,
    tmp_path: Path,
) -> None:
    """Every action begins and ends when the simulation of torch's own schedules says."""
    with opened(browser, written("pipeline", path=tmp_path / "page.html")) as page:
        actions = page.evaluate(f"simulated('{schedule}', {p}, {m})")
        expected = simulate(schedule, num_ranks=p, num_microbatches=m)
        # A gradient of inputs that nobody needs takes no time of the simulation's first stage.
        assert {(a["rank"], a["kind"], a["stage"], a["microBatch"]) for a in actions} == {
            (a.rank, a.kind, a.stage, a.micro_batch) for a in expected.actions
        }
        assert page.evaluate(f"idleShare(simulated('{schedule}', {p}, {m}), {p})") == pytest.approx(
            float(expected.bubble())
        )
        live = expected.max_live()
        times = [(float(a.begin_us), float(a.end_us)) for a in expected.actions]
        assert sorted((a["begin"], a["end"]) for a in actions) == sorted(times)
        if schedule != "interleaved":
            assert [
                page.evaluate(f"maxLive(simulated('{schedule}', {p}, {m}), {r})") for r in range(p)
            ] == [live[rank] for rank in range(p)]


@pytest.mark.slow
def test_a_step_of_a_pipeline_is_stepped_through(browser: Any, tmp_path: Path) -> None:
    """Full boxes have begun before the line."""
    expected = simulate("zero-bubble", num_ranks=4, num_microbatches=8)
    full = "all => all.filter(one => +one.getAttribute('fill-opacity') === 1).length"
    with opened(browser, written("pipeline", path=tmp_path / "page.html")) as page:
        page.locator("#schedule").select_option("zero-bubble")
        assert page.locator("rect.action").evaluate_all(full) == len(expected.actions)
        assert page.locator("#picture line").count() == 0
        ends = sorted({a.end_us for a in expected.actions})
        for step, time in ((0, 0), (1, ends[0]), (9, ends[8])):
            page.locator("#step").fill(str(step))
            begun = sum(a.begin_us < time for a in expected.actions)
            assert page.locator("rect.action").evaluate_all(full) == begun
            done = sum(a.end_us <= time for a in expected.actions)
            assert f"{done} of {len(expected.actions)} computations" in (
                page.locator("#now").inner_text()
            )
            assert page.locator("#picture line").count() == 1


@pytest.mark.slow
@pytest.mark.parametrize("page", ["ring", "memory", "lomo", "pipeline", "tensor"])
def test_play_ends_at_the_last_step(browser: Any, page: str, tmp_path: Path) -> None:
    with opened(browser, written(page, path=tmp_path / "page.html")) as shown:
        shown.locator("#play").click()
        assert shown.locator("#play").inner_text() == "Pause"
        is_over = "document.getElementById('play').textContent === 'Play'"
        shown.wait_for_function(is_over, timeout=120_000)
        slider = shown.locator("input[type=range]")
        assert slider.input_value() == slider.get_attribute("max")


@pytest.mark.slow
def test_a_recorded_pipeline(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    actions = (Action(0, "F", 0, 0, 0.0, 1.0), Action(1, "F", 1, 0, 1.0, 2.0))
    Timeline(
        2, (*actions, Action(1, "B", 1, 0, 2.0, 4.0), Action(0, "B", 0, 0, 4.0, 6.0))
    ).export_chrome_trace(path)
    with opened(
        browser, written("pipeline", "--timeline", str(path), path=tmp_path / "p.html")
    ) as page:
        assert page.locator("rect.action").count() == 4
        assert "Idle: 50 %" in page.locator("#idle").inner_text()


@pytest.mark.slow
def test_bars_have_the_bytes_of_the_data(browser: Any, tmp_path: Path) -> None:
    path = written("memory", "--ranks", "8", path=tmp_path / "page.html")
    rows = {(row["system"], row["ranks"]): row for row in data_of(path)["rows"]}
    with opened(browser, path) as page:
        for idx, ranks in enumerate((2, 4, 8)):
            page.locator("#ranks").fill(str(idx))
            bars = page.locator("rect.part").evaluate_all(
                "bars => bars.map(bar => ({...bar.dataset}))"
            )
            assert len(bars) == 6 * 5
            for bar in bars:
                assert int(bar["bytes"]) == rows[bar["system"], ranks][bar["part"]]


@pytest.mark.slow
def test_lomo_has_one_gradient(browser: Any, tmp_path: Path) -> None:
    """Of llama-7b it is less than a pixel: a mark shows where it is, and a number how large."""
    heights = "all => all.map(one => one.getBoundingClientRect().height)"
    with opened(browser, written("lomo", path=tmp_path / "page.html")) as page:
        said = page.locator("text.gradients").all_text_contents()
        assert said == ["gradients now: 6.28 GiB"] * 2 + ["gradients now: 32 MiB"]
        assert min(page.locator("rect.mark").evaluate_all(heights)) >= 3
    path = written("lomo", "--model", config_of(tmp_path), path=tmp_path / "page.html")
    sizes = [one["bytes"] for one in data_of(path)["sizes"]]
    with opened(browser, path) as page:

        def most(name: str) -> int:
            return max(
                page.evaluate(f"memoryAt('{name}', {count}).gradients")
                for count in range(len(sizes) + 1)
            )

        assert most("LOMO") == max(sizes)
        assert most("SGD") == most("AdamW") == sum(sizes)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "target"), [(1, 0), (4, 3), (12, 7)])
def test_the_loss_is_torchs(browser: Any, n: int, target: int, tmp_path: Path) -> None:
    path = written("loss", path=tmp_path / "page.html")
    logits = torch.tensor([data_of(path)["logits"]], dtype=torch.float64)
    with opened(browser, path) as page:
        page.locator("#ranks").select_option(str(n))
        page.locator("#target").fill(str(target))
        shown = float(page.locator("#merged").get_attribute("data-loss"))
        expected = nn.functional.cross_entropy(logits, torch.tensor([target])).item()
        assert math.isclose(shown, expected, rel_tol=1e-12)


@pytest.mark.slow
def test_a_block_has_four_collectives(browser: Any, tmp_path: Path) -> None:
    path = written("tensor", "--ranks", "4", path=tmp_path / "page.html")
    data = data_of(path)
    with opened(browser, path) as page:
        assert page.locator('rect.collective[data-pass="forward"]').count() == 2
        assert page.locator('rect.collective[data-pass="backward"]').count() == 2
        all_bytes = 4 * 2 * 3 / 4 * 2 * data["hidden"] * data["tokens"]
        assert (
            f"receives {all_bytes / 2**20:g} MiB in 4 all_reduces"
            in page.locator("#facts").inner_text()
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "outputs"),
    [
        ("llama-7b", {2: "2,048 × 3,072", 3: "2,048 × 1,024", 7: "2,048 × 5,504"}),
        (
            "llama-3-8b",
            {2: "8,192 × 1,536", 3: "8,192 × 1,024", 7: "8,192 × 7,168"},
        ),  # grouped queries
        ("gpt2", {2: "1,024 × 576", 3: "1,024 × 192", 7: "1,024 × 768"}),  # no gate
    ],
)
def test_widths_are_the_models(
    browser: Any, model: str, outputs: dict[int, str], tmp_path: Path
) -> None:
    path = written("tensor", "--model", model, path=tmp_path / "page.html")
    with opened(browser, path) as page:
        for step, said in outputs.items():
            page.locator("#step").fill(str(step))
            assert f"Output: {said} on each rank." in page.locator("#facts").inner_text()


@pytest.mark.slow
@pytest.mark.parametrize("size", [SCREEN, PHONE], ids=["screen", "phone"])
def test_both_passes_of_a_block_have_all_of_its_layers(
    browser: Any, size: Any, tmp_path: Path
) -> None:
    """And no name touches another one."""
    boxes = "all => all.map(one => one.getBoundingClientRect().toJSON())"
    with opened(browser, written("tensor", path=tmp_path / "page.html"), size) as page:
        names = page.locator("#picture text.faint")
        said = names.all_text_contents()
        assert len(said) == 18
        assert sorted(said[:9]) == sorted(said[9:])
        found = names.evaluate_all(boxes)
        for one, two in combinations(found, 2):
            beside = one["right"] < two["left"] or two["right"] < one["left"]
            assert beside or one["bottom"] <= two["top"] or two["bottom"] <= one["top"]
