"""Draws a recording as text: a timeline that fits the width, in colour only where there is any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from demo_record import Lane, Recording, ticks
from rich.text import Text

LABEL = 25
OUTCOME = 19


@dataclass(frozen=True)
class Glyphs:
    """What the lines are drawn with."""

    run: str = "━"
    quiet: str = "·"
    gone: str = "○"
    stop: str = "│"
    on: str = "▶"
    sweep: str = "═"
    proof: str = "✓"
    rule: str = "─"

    @property
    def legend(self) -> str:
        """Say what the letters and glyphs of a timeline mean."""
        return (
            f"{self.run * 2} running   C Ctrl-C   T TERM   K KILL   {self.gone} gone   "
            f"{self.on} still running"
        )


ASCII = Glyphs(run="=", quiet=".", gone="o", stop="|", on=">", sweep="#", proof="*", rule="-")

LETTERS = {"INT": "C", "TERM": "T", "KILL": "K"}

RUNNING, STOPPING, OVER, LEFT, FENCE = "cyan", "yellow", "green", "bold red", "magenta"


class Row:
    """One line of the chart: a character and a style a column."""

    def __init__(self, columns: int, fill: str, style: str = "dim") -> None:
        self._cells = [(fill, style)] * columns

    def paint(self, first: int, last: int, glyph: str, style: str) -> None:
        """Put `glyph` into the columns from `first` to `last`."""
        for column in range(max(0, first), min(len(self._cells), last + 1)):
            self._cells[column] = (glyph, style)

    def put(self, column: int, text: str, style: str, *, over: str) -> int:
        """Put `text` at `column` or the next place that holds only glyphs of `over`."""
        while column + len(text) < len(self._cells) and any(
            cell[0] not in over for cell in self._cells[column : column + len(text)]
        ):
            column += 1
        column = min(column, len(self._cells) - len(text))
        for offset, letter in enumerate(text):
            self._cells[column + offset] = (letter, style)
        return column

    def text(self) -> Text:
        """Return the line."""
        line = Text()
        for glyph, style in self._cells:
            line.append(glyph, style=style)
        return line


def timeline(
    record: Recording, *, width: int, glyphs: Glyphs, window: tuple[float, float] | None = None
) -> list[Text]:
    """Return the lines of a timeline, at most `width` wide.

    With a window (seconds from Stop) zero is the moment of Stop; without one, the turn's begin.
    """
    columns = max(16, width - LABEL - OUTCOME - 1)
    zero = 0.0 if window is None else record.stop or 0.0
    first, last = window or (0.0, max(2.0, record.now() * 1.02))

    def column(at: float) -> int:
        share = (at - zero - first) / (last - first)
        return min(columns - 1, max(0, int(share * columns)))

    scale = Row(columns, " ")
    for tick in ticks((first, last), max(2, columns // 10)):
        words = f"{tick:g} s" if window is None else f"{tick:+g} s" if tick else "Stop"
        if column(zero + tick) + len(words) <= columns:
            scale.put(column(zero + tick), words, "dim" if words != "Stop" else "bold", over=" ")
    lines = [Text(" " * LABEL) + scale.text()]
    for lane in record.lanes:
        label = Text(f" {lane.number} {lane.title}"[: LABEL - 1].ljust(LABEL))
        row = _lane(record, lane, columns, column, glyphs)
        lines.append(label + row.text() + Text(" ") + _outcome(record, lane))
    label = Text(f"   {record.answerer}"[: LABEL - 1].ljust(LABEL), style="bold")
    row, outcome = _answer(record, columns, column, glyphs)
    lines.append(label + row.text() + Text(" ") + outcome)
    return lines


def _lane(
    record: Recording, lane: Lane, columns: int, column: Callable[[float], int], glyphs: Glyphs
) -> Row:
    row = Row(columns, glyphs.quiet)
    now = record.now()
    for seen in lane.seen:
        until = now if seen.until is None else seen.until
        row.paint(column(seen.since), column(until), glyphs.run, RUNNING)
    for seen in lane.seen:
        until = now if seen.until is None else seen.until
        if record.stop is not None and until > record.stop:
            after = max(seen.since, record.stop)
            left = seen.until is None and record.answered is not None and not record.proved
            style = LEFT if left else STOPPING
            row.paint(column(after), column(until), glyphs.run, style)
    if record.stop is not None:
        row.paint(column(record.stop), column(record.stop), glyphs.stop, "bold")
    free = glyphs.run + glyphs.quiet
    last = 0
    for at, name in lane.signals:
        last = row.put(column(at), LETTERS[name], "bold yellow", over=free)
    if (gone := lane.gone) is not None:
        row.put(max(column(gone), last), glyphs.gone, OVER, over=free)
    elif lane.running and record.end is not None:
        row.put(column(record.end), glyphs.on, LEFT, over=free)
    return row


def _outcome(record: Recording, lane: Lane) -> Text:
    if lane.running:
        if record.end is None:
            return Text("running", style=RUNNING if record.stop is None else STOPPING)
        return Text("STILL RUNNING", style=LEFT)
    if (gone := lane.gone) is None:
        return Text("not yet seen" if record.end is None else "never seen", style="dim")
    if record.stop is None or gone < record.stop:
        return Text("ended by itself", style=OVER)
    words = f"gone +{gone - record.stop:.2f} s"
    if lane.saved is not None:
        words += ", saved" if lane.saved else ", lost"
    return Text(words, style=OVER if lane.saved in (None, True) else LEFT)


def _answer(
    record: Recording, columns: int, column: Callable[[float], int], glyphs: Glyphs
) -> tuple[Row, Text]:
    row = Row(columns, " ")
    if record.stop is None:
        return row, Text("")
    until = record.now() if record.answered is None else record.answered
    row.paint(column(record.stop), column(until), glyphs.quiet, "dim")
    row.paint(column(record.stop), column(record.stop), glyphs.stop, "bold")
    for since, to in record.sweeps:
        row.paint(column(since), column(to), glyphs.sweep, FENCE)
    if record.answered is None:
        return row, Text("stopping", style=FENCE)
    mark = glyphs.proof if record.proved else "?"
    style = "bold green" if record.proved else "bold"
    row.put(column(record.answered), mark, style, over=glyphs.sweep + glyphs.quiet + " ")
    return row, Text(f"{record.answer} +{record.answered - record.stop:.2f} s", style=style)
