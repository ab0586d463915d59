"""Links between files of the repository; addresses elsewhere are not asked for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from docs.tools.blocks import ROOT

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6}\s+(.+)$", re.MULTILINE)
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def broken(path: Path) -> Iterator[str]:
    """Links of a document that lead nowhere."""
    text = _FENCED.sub("", path.read_text())
    for target in _LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        where = path.relative_to(ROOT)
        if not found.exists():
            yield f"{where}: {target}: there is no such file"
        elif anchor and anchor not in anchors(found):
            yield f"{where}: {target}: there is no such heading"


def anchors(path: Path) -> set[str]:
    """Headings as GitHub names them."""
    text = _FENCED.sub("", path.read_text())
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in _HEADING.findall(text))
    return {heading.strip().replace(" ", "-") for heading in plain}
