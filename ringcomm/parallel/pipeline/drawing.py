"""A timeline as a picture, or as text for a terminal."""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

from ringcomm.parallel.pipeline.timeline import Action, Timeline

__all__ = ["draw", "to_svg", "to_text"]

COLORS = {"F": "#4c78a8", "B": "#59a14f", "I": "#8cd17d", "W": "#f1ce63"}
NAMES = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}
WIDTH, ROW, LEFT, TOP = 900, 26, 56, 40


def draw(timeline: Timeline, path: str | Path | None = None, *, title: str = "") -> str:
    """A row for each rank, a box for each micro-batch in a stage.

    Args:
        timeline: measured or simulated.
        path: of an SVG to write.
        title: above the rows.

    Returns:
        The SVG's text, or without a path the text for a terminal.
    """
    if path is None:
        return to_text(timeline)
    drawn = to_svg(timeline, title)
    Path(path).write_text(drawn, encoding="utf-8")
    return drawn


def to_text(timeline: Timeline, width: int = 100) -> str:
    """Letters F, B, I and W as long as each lasts, with the micro-batch where it has room."""
    begin = min(action.begin_us for action in timeline.actions)
    scale = width / timeline.span_us
    lines = []
    for rank, order in enumerate(timeline.orders()):
        cells = ["·"] * width
        for action in order:
            first = round((action.begin_us - begin) * scale)
            last = max(round((action.end_us - begin) * scale), first)
            shown = f"{action.kind}{action.micro_batch}"[: last - first]
            cells[first:last] = list(shown.ljust(last - first, action.kind.lower()))
        lines.append(f"rank {rank}  {''.join(cells)}")
    lines.append(f"bubble {100 * float(timeline.bubble()):.1f} %")
    return "\n".join(lines)


def to_svg(timeline: Timeline, title: str = "") -> str:
    """The picture: a rank's second and later stages are paler; a legend says what is what."""
    begin = min(action.begin_us for action in timeline.actions)
    scale = (WIDTH - LEFT - 10) / timeline.span_us
    rows_of: dict[int, list[int]] = {}
    for rank, order in enumerate(timeline.orders()):
        rows_of[rank] = sorted({action.stage for action in order})
    height = TOP + ROW * timeline.num_ranks + 26
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
        ' font-family="sans-serif" font-size="10">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="{LEFT}" y="16" font-size="13">{escape(title)}</text>',
        f'<text x="{LEFT}" y="32">bubble {100 * float(timeline.bubble()):.1f} %</text>',
    ]
    for rank, order in enumerate(timeline.orders()):
        y = TOP + ROW * rank
        parts.append(f'<text x="6" y="{y + 15}">rank {rank}</text>')
        for action in order:
            x = LEFT + float((action.begin_us - begin) * scale)
            width = float((action.end_us - action.begin_us) * scale)
            depth = rows_of[rank].index(action.stage)
            parts += _box(action, x, y, width, opacity=1 - 0.4 * depth / len(rows_of[rank]))
    x = LEFT
    for kind in dict.fromkeys(action.kind for action in timeline.actions):
        y = height - 18
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{COLORS[kind]}"/>')
        parts.append(f'<text x="{x + 16}" y="{y + 10}">{NAMES[kind]}</text>')
        x += 130
    return "\n".join([*parts, "</svg>\n"])


def _box(action: Action, x: float, y: int, width: float, opacity: float) -> list[str]:
    if width < 0.3:
        return []
    box = (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 4}"'
        f' fill="{COLORS[action.kind]}" fill-opacity="{opacity:.2f}" stroke="#fff"'
        ' stroke-width=".5"/>'
    )
    if width < 9:
        return [box]
    middle = x + width / 2
    label = f'<text x="{middle:.1f}" y="{y + 15}" text-anchor="middle">{action.micro_batch}</text>'
    return [box, label]
