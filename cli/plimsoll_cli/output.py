"""Output of commands: tables for people, JSON or YAML for programs."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from plimsoll_cli import yaml_text

Cell = str | Text
COLUMN_GAP_CHARS, MIN_LAST_COLUMN_CHARS = 2, 6


class Output(StrEnum):
    """Value of ``--output``."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"

    @property
    def is_table(self) -> bool:
        """Whether the format is a table."""
        return self in (Output.TABLE, Output.WIDE)


_CONTROL_PATTERN = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def escape_control_characters(text: str) -> str:
    """Return ``text`` with its control characters, except tabs and line ends, as escapes.

    Pods write texts of incidents. Without this, they could write to the terminal of their reader.
    """
    return _CONTROL_PATTERN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class _SafeConsole(Console):
    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else escape_control_characters(text), style, control)


def make_console(stderr: bool = False) -> Console:
    """Return a console for texts of any origin, which respects NO_COLOR and pipes."""
    return _SafeConsole(stderr=stderr, highlight=False)


@contextlib.contextmanager
def show_spinner(text: str) -> Iterator[Callable[[str], None]]:
    """Return a context that shows a spinner with ``text`` if standard error is a terminal.

    The context's value is a function that changes the text.
    """
    out = make_console(stderr=True)
    if not out.is_terminal:
        yield lambda text: None
        return
    style = "line" if is_ascii_only(out) else "dots"
    with out.status(escape(text), spinner=style) as status:
        yield lambda text: status.update(escape(text))


def is_ascii_only(console: Console) -> bool:
    """Report whether the terminal supports only ASCII."""
    return not console.encoding.lower().startswith("utf")


def format_value(value: Any, output: Output, ascii_only: bool = False) -> str:
    """Return ``value``, which consists of JSON types, as JSON text or YAML text."""
    if output is Output.YAML:
        return yaml_text.dump(value, allow_unicode=not ascii_only)
    return json.dumps(value, indent=2, ensure_ascii=ascii_only) + "\n"


def print_value(value: Any, output: Output) -> None:
    """Write ``value`` to standard output, without line wrapping or colours."""
    out = make_console()
    out.file.write(format_value(value, output, is_ascii_only(out)))


def make_table(columns: Sequence[str], rows: Sequence[Sequence[Cell]], width: int | None) -> Table:
    """Return a table like kubectl's, cut to ``width`` characters if it is set.

    The last column is cut first, then the first; the others keep their widths.
    """
    made = Table(box=None, padding=(0, COLUMN_GAP_CHARS, 0, 0), pad_edge=False, width=None)
    needed = [
        max(cell_len(column), *(cell_len(str(row[index])) for row in rows), 0)
        for index, column in enumerate(columns)
    ]
    if width is not None and len(columns) > 1:
        left = width - sum(needed[1:-1]) - COLUMN_GAP_CHARS * len(columns)
        if needed[0] + MIN_LAST_COLUMN_CHARS > left:
            needed[0] = max(left - min(needed[-1], left // 2), MIN_LAST_COLUMN_CHARS)
        needed[-1] = max(min(needed[-1], left - needed[0]), MIN_LAST_COLUMN_CHARS)
    for column, cells in zip(columns, needed, strict=True):
        made.add_column(
            column,
            no_wrap=True,
            overflow="ellipsis" if width else "ignore",
            min_width=cells if width else None,
            max_width=cells if width else None,
        )
    for row in rows:
        made.add_row(*row)
    return made


def fit_columns(
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    width: int,
    min_widths: Mapping[str, int],
) -> tuple[list[str], list[list[Cell]]]:
    """Return the columns to show in a terminal of ``width`` characters, and their cells.

    ``min_widths`` maps a column to the minimum terminal width at which it is shown.
    """
    kept = [at for at, name in enumerate(columns) if width >= min_widths.get(name, 0)]
    return [columns[at] for at in kept], [[row[at] for at in kept] for row in rows]


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Cell]], console: Console) -> None:
    """Print a table, cut to the width of the terminal, but not in a pipe."""
    if console.is_terminal:
        console.print(make_table(columns, rows, console.width))
    else:
        texts = ([escape_control_characters(str(cell)) for cell in row] for row in rows)
        lines = [list(columns), *texts]
        widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
        for line in lines:
            cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            console.file.write("  ".join(cells).rstrip() + "\n")


BAR_CHARACTERS = "▁▂▃▄▅▆▇█"
ASCII_BAR_CHARACTERS = "_.-=*#%@"


def draw_sparkline(
    values: Sequence[float | None],
    width: int = 24,
    ascii_only: bool = False,
    low: float | None = None,
    high: float | None = None,
) -> str:
    """Return the newest ``width`` values as a line of bars; None becomes a space.

    The scale covers ``low``, ``high`` and all values.
    """
    shown = list(values)[-width:]
    known = [value for value in shown if value is not None]
    if not known:
        return ""
    marks = ASCII_BAR_CHARACTERS if ascii_only else BAR_CHARACTERS
    low = min(known) if low is None else min(low, *known)
    span = (max(known) if high is None else max(high, *known)) - low
    return "".join(
        " "
        if value is None
        else marks[round((value - low) / span * (len(marks) - 1)) if span else 0]
        for value in shown
    )


def draw_bar(fraction: float | None, width: int, ascii_only: bool = False) -> str:
    """Return a bar of which ``fraction`` is filled; an empty string if ``fraction`` is None."""
    full, empty = ("#", ".") if ascii_only else ("█", "░")
    filled = round(min(max(fraction or 0.0, 0.0), 1.0) * width)
    return full * filled + empty * (width - filled)


def draw_area_chart(
    points: Sequence[tuple[float, float]], width: int, height: int, ascii_only: bool
) -> list[str]:
    """Return an area chart of ``points`` as ``height`` lines, from top to bottom.

    ``points`` are pairs of x and y, in the order of x. Without a range of x, the result is empty.
    """
    begin, end = points[0][0], points[-1][0]
    if len(points) < 2 or end <= begin:
        return []
    marks = ASCII_BAR_CHARACTERS if ascii_only else BAR_CHARACTERS
    low, high = min(y for _, y in points), max(y for _, y in points)
    low -= (high - low or 1.0) / (height * len(marks))
    levels = [
        (_interpolate(points, begin + (end - begin) * column / (width - 1)) - low) / (high - low)
        for column in range(width)
    ]
    full = [max(1, round(level * height * len(marks))) for level in levels]
    lines = []
    for row in range(height - 1, -1, -1):
        filled = [min(max(eighths - row * len(marks), 0), len(marks)) for eighths in full]
        lines.append("".join(marks[count - 1] if count else " " for count in filled).rstrip())
    return lines


# If several points have this x, the last of them counts.
def _interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    for (x0, y0), (x1, y1) in zip(reversed(points[:-1]), reversed(points[1:]), strict=True):
        if x >= x0:
            return y1 if x1 <= x0 else y0 + (y1 - y0) * min((x - x0) / (x1 - x0), 1.0)
    return points[0][1]
