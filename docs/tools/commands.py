"""Commands in documents: programs, subcommands and flags must exist."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer

from docs.tools.blocks import ROOT, blocks
from plimsoll_api.names import API_GROUP, SERVICE_KIND
from plimsoll_cli.main import app

KNOWN = frozenset(
    {
        "kubectl",
        "helm",
        "promtool",
        "pytest",
        "docker",
        "kind",
        "k3d",
        "apt-get",
        "cat",
        "echo",
        "pipx",
        ".",
    }
)
"""Programs that are not ours; kubectl and helm are run by tests where they are marked."""
AMBIGUOUS = re.compile(rf"\b{SERVICE_KIND}s?\b(?!\.{re.escape(API_GROUP)})", re.IGNORECASE)
"""The kind's name without its group, which KServe's kind has too. One command takes either."""


def wrong(path: Path) -> Iterator[str]:
    """What cannot be run as it is written."""
    for block in blocks(path, "sh", "bash", "console"):
        for line in lines(block.text, block.language):
            problem = problem_of(line)
            if problem:
                yield f"{block.place}: {line}: {problem}"
    for line in _inline(path):
        problem = problem_of(line)
        if problem:
            yield f"{path.relative_to(ROOT)}: `{line}`: {problem}"


def lines(text: str, language: str = "sh") -> list[str]:
    """The commands of a block; of a console only what stands after the prompt."""
    whole = text.replace("\\\n", " ").splitlines()
    if language == "console":
        return [line[2:] for line in whole if line.startswith("$ ")]
    return [line.strip() for line in whole if line.strip() and not line.strip().startswith("#")]


def problem_of(line: str) -> str | None:
    """Why a line cannot be run; None where nothing is wrong with it."""
    for part in re.split(r"\s(?:\||&&|;)\s", line):
        try:
            words = shlex.split(part.split(" > ")[0].split(" <<")[0], comments=True)
        except ValueError as error:
            return str(error)
        while words and re.match(r"^[A-Z_]+=", words[0]):
            words = words[1:]
        if words and (problem := _problem(words)):
            return problem
    return None


def _problem(words: Sequence[str]) -> str | None:
    program, rest = words[0], list(words[1:])
    if program == "kubectl" and rest[:1] == ["plimsoll"]:
        return _ours(rest[1:])
    if program == "plimsoll":
        return _ours(rest)
    if program == "make":
        return _targets(rest)
    if program.startswith("python") and rest[:1] == ["-m"]:
        found = _module(rest[1]) if len(rest) > 1 else False
        return None if found else f"there is no module {rest[1:2]}"
    if program.startswith("python") and rest and rest[0].endswith(".py"):
        return None if (ROOT / rest[0]).exists() else f"there is no file {rest[0]}"
    if program == "kubectl" and (kind := AMBIGUOUS.search(" ".join(rest))):
        return f"{kind[0]} may be KServe's kind: write plinf, or the name with .{API_GROUP}"
    if program in ("kubectl", "helm"):
        return _files(rest)
    return None if program in KNOWN else f"{program} is not known here"


def _ours(words: list[str]) -> str | None:
    """Parsed by the command line itself, without running anything."""
    if not words:
        return None
    known: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    command = known.get(words[0])
    if command is None:
        return None if words[0].startswith("--") else f"plimsoll has no command {words[0]}"
    options = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
    own = words[: words.index("--")] if "--" in words else words
    for word in own[1:]:
        flag = word.partition("=")[0]
        if flag.startswith("-") and flag != "-" and flag not in {*options, "--help"}:
            return f"plimsoll {words[0]} has no flag {flag}"
    return _files(words)


def _targets(words: Sequence[str]) -> str | None:
    text = (ROOT / "Makefile").read_text()
    targets = {w for w in words if "=" not in w}
    missing = [one for one in targets if not re.search(rf"^{re.escape(one)}:", text, re.MULTILINE)]
    return f"make has no target {missing[0]}" if missing else None


def _files(words: Sequence[str]) -> str | None:
    """Paths of the repository that a command names."""
    for word in words:
        ours = re.match(r"^(config|charts|examples|crds|dashboards|tests|docs)/", word)
        if ours and not (ROOT / word).exists():
            return f"{word}: there is no such file"
    return None


def _module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _inline(path: Path) -> Iterator[str]:
    """Commands of ours within sentences: `` `plimsoll ...` ``."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for found in re.findall(r"`((?:plimsoll|kubectl plimsoll|make|python -m) [^`]+)`", text):
        yield " ".join(found.split())
