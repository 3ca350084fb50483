"""The pages of `ringcomm show` in a browser: what they draw is what the library does."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from browsers import PHONE, SCREEN, data_of, opened
from schedule_simulation import simulate
from test_show import config_of, ring_trace, written
from torch import nn

from ringcomm import show
from ringcomm.parallel.pipeline.schedules import Action, Timeline
from ringcomm.testing import run_ranks
from ringcomm.trace import merge

pytestmark = pytest.mark.slow


def set_to(page: Any, name: str, value: object) -> None:
    page.locator(name).fill(str(value))
    page.locator(name).dispatch_event("change")


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


@pytest.mark.parametrize("page", ["ring", "memory", "lomo", "pipeline", "tensor"])
def test_play_ends_at_the_last_step(browser: Any, page: str, tmp_path: Path) -> None:
    with opened(browser, written(page, path=tmp_path / "page.html")) as shown:
        shown.locator("#play").click()
        assert shown.locator("#play").inner_text() == "Pause"
        is_over = "document.getElementById('play').textContent === 'Play'"
        shown.wait_for_function(is_over, timeout=120_000)
        slider = shown.locator("input[type=range]")
        assert slider.input_value() == slider.get_attribute("max")


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
