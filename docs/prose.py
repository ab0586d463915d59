"""Check the style of all documents with Vale: ``python -m docs.prose``.

``.vale.ini`` names the rules, which are ours, in ``styles/Plimsoll``. Errors exit with 1, warnings
are printed. Texts outside of documents count too: alerts, dashboards, CRDs, the help of commands,
messages, log lines, and the docstrings and comments of code (``docs.tools.texts``). The texts of
values, metrics and faults are checked in the pages generated from them. Code has stricter rules in
addition: ``styles/Code``. ``python -m docs.prose FILE...`` checks other files.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from docs.tools import texts, vale
from docs.tools.blocks import ROOT

FOLDERS = (
    ".", "docs", "docs/runbooks", "docs/decisions", "charts/plimsoll",
    "research/leaklab/recordings",
)  # fmt: skip
TIMEOUT_S = 600


def files() -> list[str]:
    """Return the documents, relative to the root."""
    found = [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.md"))]
    found.append(ROOT / "charts" / "plimsoll" / "templates" / "NOTES.txt")
    return [str(path.relative_to(ROOT)) for path in found]


def check(paths: Sequence[str]) -> int:
    """Print Vale's findings, one a line. Return 1 if one of them is an error, else 0."""
    done = _vale(paths)
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    return min(done.returncode, 1)


def check_texts() -> int:
    """Do the same for the texts outside of documents. Name each finding's source."""
    with tempfile.TemporaryDirectory(prefix="plimsoll-prose-") as name:
        pages = {Path(name) / "texts.md": texts.texts(), Path(name) / "code.md": texts.code_texts()}
        sources = {str(page): texts.write(page, found) for page, found in pages.items()}
        done = _vale([f"--config={ROOT / '.vale.ini'}", *sources])
    for finding in done.stdout.splitlines():
        page, line, rest = finding.split(":", 2)
        sys.stdout.write(f"{sources[page][int(line) - 1]}: {rest}\n")
    sys.stderr.write(done.stderr)
    return min(done.returncode, 1)


def _vale(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = [vale.find(), "--output=line", *arguments]
    return subprocess.run(
        command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=TIMEOUT_S
    )


def main(arguments: Sequence[str]) -> int:
    """Check ``arguments``, or all documents and the other texts."""
    try:
        status = check(arguments) if arguments else check(files()) | check_texts()
    except vale.NoValeError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    print("prose: " + ("see above" if status else "ok"))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
