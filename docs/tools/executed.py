"""Commands in documents that no test executes.

A block of commands is marked by who runs it:

- ``<!-- run -->``: tests/integration/test_docs_commands.py, as it is written;
- ``<!-- run: cluster -->``: tests/cluster/test_docs_cluster.py, on a real API server;
- ``<!-- run: tests/... -->`` (or ``.ci/run``): that file, which must name what the commands do.

Within sentences a command is there to be completed by the reader, so it is enough that some test
runs its subcommand.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from docs.tools.blocks import ROOT, blocks
from docs.tools.commands import lines

BY_MARK = {"local", "cluster"}
NO_COMMANDS = {".", "cat", "echo", "apt-get", "export"}
_INLINE = re.compile(r"`((?:plimsoll|kubectl) [^`]+)`")
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def unrun(path: Path) -> Iterator[str]:
    """Commands of a document that nothing executes."""
    for block in blocks(path, "sh", "bash"):
        if block.run is None:
            yield f"{block.place}: no test runs it: mark who does, as docs/tools/executed.py says"
        elif block.run not in BY_MARK:
            yield from _not_in(ROOT / block.run, block.text, block.place)
    text = _FENCED.sub("", path.read_text())
    for command in _INLINE.findall(text):
        what = deed(" ".join(command.split()))
        if what is not None and f'"{what}"' not in _tests():
            yield f"{path.relative_to(ROOT)}: `{command}`: no test runs {what!r}"


def deed(line: str) -> str | None:
    """What a command does: its first word that is no flag, after the program's name."""
    words = shlex.split(line.split(" > ")[0], comments=True)
    while words and re.match(r"^[A-Z_]+=", words[0]):
        words = words[1:]
    if not words or words[0] in NO_COMMANDS:
        return None
    if words == ["make", "setup"]:
        return None  # what every other target does first
    if words[:2] == ["kubectl", "plimsoll"]:
        words = words[1:]
    rest = iter(words[1:])
    for word in rest:
        if word in ("-n", "--namespace", "-m"):
            if word == "-m":
                return next(rest, None)
            next(rest, None)
        elif not word.startswith("-"):
            return word
    return None


def _not_in(test: Path, text: str, place: str) -> Iterator[str]:
    if not test.is_file():
        yield f"{place}: {test.relative_to(ROOT)}: there is no such test"
        return
    body = test.read_text()
    for line in lines(text):
        what = deed(line)
        if what is not None and what not in body:
            yield f"{place}: {line}: {test.relative_to(ROOT)} does not run {what!r}"


@functools.cache
def _tests() -> str:
    return "".join(path.read_text() for path in sorted((ROOT / "tests").rglob("*.py")))
