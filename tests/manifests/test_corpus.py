"""Minimal inputs of each kind, with what is said of them and what is written into them.

``python -m tests.manifests.test_corpus`` writes the expected texts anew, for review.
"""

from __future__ import annotations

import difflib
import tempfile
from pathlib import Path

import pytest

from plimsoll_cli.errors import UsageError
from plimsoll_cli.inject import command
from plimsoll_cli.inject.command import Selection
from plimsoll_operator.injection.options import InjectionOptions

CORPUS = Path(__file__).parent / "corpus"
OPTIONS = InjectionOptions("supervisor:1", run_as_user=1000)
SHOWN = ("+", "-")


def said(file: Path) -> str:
    """The messages, and the lines that are changed in the workload, apart from the supervisor's."""
    text = file.read_text()
    try:
        made, notes = command.inject_into_file(file, OPTIONS, Selection())
    except UsageError as error:
        return str(error).replace(f"{file}: ", "") + "\n"
    with tempfile.TemporaryDirectory() as folder:
        injected = Path(folder, "m.yaml")
        injected.write_text(made)
        assert command.remove_from_file(injected) == text
    lines = difflib.unified_diff(text.splitlines(), made.splitlines(), n=0, lineterm="")
    changed = [one for one in lines if one.startswith(SHOWN) and not one.startswith(("---", "+++"))]
    # The supervisor's container and its configuration are tested elsewhere.
    record = [one for one in changed if one[1:].strip().startswith(("of ", "+ /", "= /"))]
    short = [
        one for one in changed if "PLIMSOLL_CONTAINER" in one or "plimsoll.dev/service:" in one
    ]
    removed = [one for one in changed if one.startswith("-")]
    return "\n".join([*notes, *removed, *record, *short]) + "\n"


@pytest.mark.parametrize("file", sorted(CORPUS.glob("*.yaml")), ids=lambda one: one.stem)
def test_what_is_said_and_written(file: Path) -> None:
    assert said(file) == file.with_suffix(".txt").read_text()


if __name__ == "__main__":
    for one in sorted(CORPUS.glob("*.yaml")):
        one.with_suffix(".txt").write_text(said(one))
