"""Results of ``bench/result.py`` name what made them: a clean commit and a command that exists."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from docs.tools.blocks import ROOT

RESULTS = sorted((ROOT / "research" / "bench" / "results").glob("*.json"))
OLD = {
    "conformance": "some rows need SGLang of then, or a GPU",
    "real-engines": "two days of vLLM and SGLang on the CPU",
    "real-engines-h200": "an H200",
}
"""Results of commits that were changed before they were merged, and what measuring again takes.

A result that was measured again leaves this list, and no other may enter it.
"""


def commits(found: Any) -> Iterator[str]:
    """The commits of a result and of the parts that came from other runs."""
    if isinstance(found, dict):
        for key, value in found.items():
            if key == "commit":
                yield str(value)
            else:
                yield from commits(value)
    elif isinstance(found, list):
        for one in found:
            yield from commits(one)


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_each_result_is_of_a_clean_commit_of_this_history() -> None:
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("needs the whole history")
    known = set(git("rev-list", "HEAD").stdout.split())
    short = {commit[:8] for commit in known}

    def is_known(commit: str) -> bool:
        return commit in known or (re.fullmatch("[0-9a-f]{7,8}", commit) is not None
                                   and any(one.startswith(commit) for one in short))  # fmt: skip

    wrong = {
        path.stem
        for path in RESULTS
        if not (told := list(commits(json.loads(path.read_text())))) or not all(map(is_known, told))
    }
    assert wrong == set(OLD)


def program(command: str) -> list[str]:
    """The files, or the target of make, that a command runs; empty if it names none."""
    if found := re.match(r"make (\S+)", command):
        return [found[1]]
    if command.startswith("plimsoll "):
        return ["cli/plimsoll_cli/main.py"]
    if tests := re.findall(r"tests/\S+\.py", command):
        return tests
    if found := re.match(r"python -m ([\w.]+)|python (\S+)\.py", command):
        return [(found[1] or found[2]).replace(".", "/") + ".py"]
    return []


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_command_of_each_result_exists(path: Path) -> None:
    command = json.loads(path.read_text())["command"]
    targets = re.findall(r"(?m)^([\w-]+):", (ROOT / "Makefile").read_text())
    made = program(command)
    assert made, command
    for one in made:
        there = (ROOT / one).exists() or (ROOT / "research" / one).exists()
        assert there or one in targets, command
