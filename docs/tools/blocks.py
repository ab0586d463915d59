"""The documents and the fenced blocks in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(
    r"^(?:<!-- run(?P<where>: [\w/.]+)? -->\n)?"
    r"```(?P<language>\w*)\n(?P<text>.*?)^```",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """``run`` says who executes it: ``local``, ``cluster``, a test's path, or None for nobody."""

    path: Path
    line: int
    language: str
    text: str
    run: str | None

    @property
    def place(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def documents() -> list[Path]:
    """The README and everything in ``docs/`` that people read."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(path: Path, *languages: str) -> Iterator[Block]:
    """The fenced blocks of a document in these languages."""
    text = path.read_text()
    for match in _FENCE.finditer(text):
        if match["language"] in languages:
            marked = match[0].startswith("<!--")
            run = (match["where"] or ": local").removeprefix(": ") if marked else None
            line = text.count("\n", 0, match.start("text")) + 1
            yield Block(path, line, match["language"], match["text"], run)
