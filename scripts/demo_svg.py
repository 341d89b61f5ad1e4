"""Draws two recordings as one SVG: no network fonts, and colours for a light and a dark page."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from demo_record import Lane, Recording, common_window, ticks

WIDTH = 960
LABEL = 208
RIGHT = 176
CHART = WIDTH - LABEL - RIGHT
ROW = 27
HEAD = 64
GAP = 26

LIGHT = {
    "bg": "#ffffff",
    "edge": "#d1d9e0",
    "grid": "#e6eaef",
    "text": "#1f2328",
    "dim": "#59636e",
    "run": "#218bff",
    "stopping": "#d4a72c",
    "over": "#1a7f37",
    "left": "#cf222e",
    "fence": "#8250df",
    "ink": "#1f2328",
    "paper": "#ffffff",
}
DARK = {
    "bg": "#0d1117",
    "edge": "#3d444d",
    "grid": "#212830",
    "text": "#f0f6fc",
    "dim": "#9198a1",
    "run": "#4493f8",
    "stopping": "#d29922",
    "over": "#3fb950",
    "left": "#f85149",
    "fence": "#ab7df8",
    "ink": "#f0f6fc",
    "paper": "#0d1117",
}
Place = Callable[[float], float]
"""Turns seconds into a place from left to right."""

LETTERS = {"INT": "C", "TERM": "T", "KILL": "K"}


def draw(fenced: Recording, alone: Recording) -> str:
    """Return the SVG text. Both panels have the same scale; zero is the moment of Stop."""
    window = common_window(fenced, alone)
    height_of = HEAD + ROW * (len(fenced.lanes) + 1) + GAP
    height = 2 * height_of + 34
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title desc">',
        "<title id='title'>A turn is stopped: with the fence, and with the SDK alone</title>",
        f"<desc id='desc'>{escape(_describe(fenced, alone))}</desc>",
        f"<style>{_style()}</style>",
        f'<rect class="bg" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        *_panel(fenced, window, 0),
        *_panel(alone, window, height_of),
        *_legend(height - 22),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _style() -> str:
    def rules(colours: dict[str, str]) -> str:
        return (
            f".bg{{fill:{colours['bg']};stroke:{colours['edge']}}}"
            f".grid{{stroke:{colours['grid']}}}"
            f"text{{fill:{colours['text']}}}"
            f".dim{{fill:{colours['dim']}}}"
            f".run{{fill:{colours['run']}}}"
            f".stopping{{fill:{colours['stopping']}}}"
            f".left{{fill:{colours['left']}}}"
            f".over{{fill:{colours['over']}}}"
            f".sweep{{fill:{colours['fence']}}}"
            f".gone{{fill:{colours['bg']};stroke:{colours['over']};stroke-width:2.5}}"
            f".stop{{stroke:{colours['text']};stroke-width:1.5}}"
            f".proof{{stroke:{colours['over']};stroke-width:1.5;stroke-dasharray:4 3}}"
            f".said{{stroke:{colours['dim']};stroke-width:1.5;stroke-dasharray:4 3}}"
            f".signal{{fill:{colours['ink']}}}"
            f".letter{{fill:{colours['paper']};font-size:10px;font-weight:700;text-anchor:middle}}"
        )

    font = "-apple-system,BlinkMacSystemFont,'Segoe UI',Helvetica,Arial,sans-serif"
    return (
        f"text{{font-family:{font};font-size:13px}}"
        ".head{font-size:15px;font-weight:600}.strong{font-weight:600}"
        ".tick{font-size:11px;text-anchor:middle}.mark{font-size:12px;font-weight:600}"
        f"{rules(LIGHT)}@media(prefers-color-scheme:dark){{{rules(DARK)}}}"
    )


def _panel(record: Recording, window: tuple[float, float], top: float) -> list[str]:
    first_at, last_at = window
    stop = record.stop or 0.0

    def x(at: float) -> float:
        share = (at - stop - first_at) / (last_at - first_at)
        return round(LABEL + CHART * min(1.0, max(0.0, share)), 1)

    parts = [f'<text class="head" x="20" y="{top + 30:g}">{escape(record.title)}</text>']
    first = top + HEAD
    bottom = first + ROW * (len(record.lanes) + 1)
    for tick in ticks(window, 12):
        at = x(stop + tick)
        parts.append(f'<line class="grid" x1="{at}" x2="{at}" y1="{first - 6:g}" y2="{bottom:g}"/>')
        label = f"{tick:+g} s" if tick else "Stop"
        parts.append(f'<text class="dim tick" x="{at}" y="{bottom + 14:g}">{label}</text>')
    for index, lane in enumerate(record.lanes):
        parts += _lane(record, lane, x, first + ROW * index + ROW / 2)
    parts += _answer(record, x, first + ROW * len(record.lanes) + ROW / 2)
    if record.stop is not None:
        at = x(record.stop)
        parts.append(
            f'<line class="stop" x1="{at}" x2="{at}" y1="{first - 12:g}" y2="{bottom:g}"/>'
            f'<text class="mark" x="{at - 4:g}" y="{first - 17:g}" text-anchor="end">Stop</text>'
        )
    if record.answered is not None:
        at = x(record.answered)
        kind, words = (
            ("proof", "proved") if record.proved else ("said", "run cancelled, all closed")
        )
        colour = "over" if record.proved else "dim"
        parts.append(
            f'<line class="{kind}" x1="{at}" x2="{at}" y1="{first - 12:g}" y2="{bottom:g}"/>'
            f'<text class="mark {colour}" x="{at + 4:g}" y="{first - 17:g}">{words}</text>'
        )
    return parts


def _lane(record: Recording, lane: Lane, x: Place, middle: float) -> list[str]:
    """Draw one command: label, bars of what ran, signals, end."""
    now = record.now()
    stop = record.stop if record.stop is not None else now
    parts = [f'<text x="20" y="{middle + 4.5:g}">{lane.number} {escape(lane.title)}</text>']
    bars: list[tuple[float, float, str]] = []
    for since, until in _merged(
        [(s.since, now if s.until is None else s.until) for s in lane.seen]
    ):
        bars.append((since, min(until, stop), "run"))
        answered = record.answered if record.answered is not None and lane.running else now
        bars.append((max(since, stop), min(until, answered), "stopping"))
        bars.append((max(since, answered), until, "left"))
    for since, until, kind in bars:
        if until > since:
            wide = max(1.0, round(x(until) - x(since), 1))
            parts.append(_bar(kind, x(since), middle, wide))
    dots, free = _signals(lane, x, middle)
    parts += dots
    gone = lane.gone
    right = LABEL + CHART + 14
    if gone is not None:
        at = max(x(gone), free)
        parts.append(f'<circle class="gone" cx="{at:g}" cy="{middle:g}" r="5"/>')
        words = f"gone +{gone - stop:.2f} s"
        if lane.saved is not None:
            words += ", saved" if lane.saved else ", lost"
        colour = "over" if lane.saved in (None, True) else "left"
        parts.append(f'<text class="{colour}" x="{right}" y="{middle + 4.5:g}">{words}</text>')
    elif lane.running:
        at = x(now)
        parts.append(
            f'<path class="left" d="M{at} {middle - 9:g}l12 9l-12 9z"/>'
            f'<text class="left strong" x="{right}" y="{middle + 4.5:g}">still running</text>'
        )
    return parts


def _bar(kind: str, left: float, middle: float, wide: float) -> str:
    return f'<rect class="{kind}" x="{left}" y="{middle - 5:g}" width="{wide}" height="10"/>'


def _signals(lane: Lane, x: Place, middle: float) -> tuple[list[str], float]:
    """Draw the signals as lettered dots that do not cover each other; tell the next free place."""
    parts: list[str] = []
    free = 0.0
    for at, name in lane.signals:
        place = max(x(at), free)
        free = place + 15
        parts.append(
            f'<circle class="signal" cx="{place:g}" cy="{middle:g}" r="7"/>'
            f'<text class="letter" x="{place:g}" y="{middle + 3.6:g}">{LETTERS[name]}</text>'
        )
    return parts, free - 2 if lane.signals else 0.0


def _answer(record: Recording, x: Place, middle: float) -> list[str]:
    """Draw the row of whoever was asked to stop the turn."""
    parts = [f'<text class="strong" x="20" y="{middle + 4.5:g}">{escape(record.answerer)}</text>']
    for since, until in record.sweeps:
        wide = max(2.0, round(x(until) - x(since), 1))
        parts.append(_bar("sweep", x(since), middle, wide))
    if record.answered is not None and record.stop is not None:
        colour = "over strong" if record.proved else "dim strong"
        words = f"{record.answer} +{record.answered - record.stop:.2f} s"
        parts.append(
            f'<text class="{colour}" x="{LABEL + CHART + 14}" y="{middle + 4.5:g}">{words}</text>'
        )
    return parts


def _legend(y: float) -> list[str]:
    parts = []
    place = 20.0
    for kind, words in (
        ("run", "running"),
        ("stopping", "being stopped"),
        ("left", "survived"),
        ("sweep", "control run"),
    ):
        parts.append(f'<rect class="{kind}" x="{place:g}" y="{y - 9:g}" width="18" height="10"/>')
        parts.append(f'<text class="dim" x="{place + 24:g}" y="{y:g}">{words}</text>')
        place += 44 + 7.2 * len(words)
    for letter, words in (("C", "Ctrl-C"), ("T", "TERM"), ("K", "KILL")):
        parts.append(
            f'<circle class="signal" cx="{place + 7:g}" cy="{y - 4:g}" r="7"/>'
            f'<text class="letter" x="{place + 7:g}" y="{y - 0.4:g}">{letter}</text>'
            f'<text class="dim" x="{place + 19:g}" y="{y:g}">{words}</text>'
        )
        place += 34 + 8 * len(words)
    return parts


def _merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Join spans that overlap or touch within two looks."""
    joined: list[tuple[float, float]] = []
    for since, until in sorted(spans):
        if joined and since <= joined[-1][1] + 0.05:
            joined[-1] = (joined[-1][0], max(joined[-1][1], until))
        else:
            joined.append((since, until))
    return joined


def _describe(fenced: Recording, alone: Recording) -> str:
    took = (fenced.answered or 0) - (fenced.stop or 0)
    return (
        f"{len(fenced.lanes)} commands over time. With the fence all are gone and this is proved "
        f"{took:.2f} s after Stop. With the SDK alone {len(alone.survivors)} processes are still "
        "running after everything was closed."
    )
