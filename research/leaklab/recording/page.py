"""Writes the tables of ``research/leaklab/recordings/README.md``: how each was made, and what
is found.

python -m leaklab.recording.page
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from leaklab.recording.published import FOLDER, Recording, recordings
from leaklab.recording.verdicts import table
from plimsoll_cli.figures import find_commit

PAGE = FOLDER / "README.md"


def made(chosen: Sequence[Recording]) -> list[str]:
    """Return the lines of the table of how each was made, in Markdown."""
    rows = [
        "| Recording | Part | Engine | Machine | Seconds | Samples | Requests a second | Cause |"
        " Bytes a second |",
        "|---|---|---|---|--:|--:|---|---|--:|",
    ]
    for one in chosen:
        about = one.about
        device = next(iter(about["machine"].get("devices", [])), "CPU only")
        leak = next(iter(one.labels.leaks), None)
        rate = f"{leak.rate_bytes_per_s:,.0f}" if leak else ""
        engine = f"{about['engine']} {about['version']}"
        mechanism = about["mechanism"]
        cause = one.labels.note.replace(mechanism, f"`{mechanism}`", 1)
        length = f"{about['recorded_s']:.0f}", str(about["samples"])
        row = (f"`{one.name}`", about["part"], engine, device, *length, load(about), cause, rate)
        rows.append(f"| {' | '.join(row)} |")
    return rows


def load(about: dict[str, Any]) -> str:
    """Say the phases in words: ``answers 1 for 40 s, then 12 for 20 s``.

    A shape is named where it is another one than before."""
    phases = about["load"]
    if len(phases) == 1:
        _, per_s, shape = phases[0]
        return f"{shape} {per_s:g}"
    shapes = ["", *(shape for _, _, shape in phases)]
    told = [
        f"{'' if shape == before else f'{shape} '}{per_s:g} for {seconds:g} s"
        for before, (seconds, per_s, shape) in zip(shapes, phases, strict=False)
    ]
    return ", then ".join(told)


def filled(text: str, name: str, lines: Sequence[str]) -> str:
    """Return the page with ``lines`` between the marks of ``name``.

    ValueError where it does not have these marks.
    """
    begin, end = f"<!-- begin: {name} -->\n", f"<!-- end: {name} -->"
    before, first, rest = text.partition(begin)
    _, last, after = rest.partition(end)
    if not first or not last:
        raise ValueError(f"{PAGE}: no {begin.strip()} with its end")
    return "".join([before, begin, *(f"{line}\n" for line in lines), end, after])


def main() -> int:
    """Write both tables."""
    every = list(recordings())
    text = filled(PAGE.read_text(), "recordings", made(every))
    found = table([one for one in every if one.seen])
    at = (find_commit() or "unknown").partition("-")[0][:7]
    PAGE.write_text(filled(text, "verdicts", [f"At commit {at}:", "", *found]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
