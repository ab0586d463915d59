"""Texts for people outside of documents: alerts, CRDs, command lines, messages, docstrings."""

from __future__ import annotations

import ast
import inspect
import io
import json
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import typer.main
import yaml

from docs.tools.blocks import ROOT
from plimsoll_cli.main import app

Text = tuple[str, str]
"""Where a text comes from, for a person, and the text."""
PACKAGES = ("operator", "sidecar", "cli", "engine_image", "probe", "crds/plimsoll_api")
REVISED = ("crds/plimsoll_api", "operator", "faults", "probe", "sidecar", "cli", "engine_image")
"""Packages whose docstrings and comments are checked. Add a package once it has no findings."""
MIN_WORDS = 3
"""Shorter strings are keys, formats and names."""
NO_PROSE = re.compile(r"</?[a-z]|\{[a-z-]+:[^ ]|\b(?:SELECT|INSERT|UPDATE|DELETE|CREATE|PRAGMA)\b")
"""HTML, CSS and SQL."""
DIRECTIVE = re.compile(r"#\s*(?:noqa|type:|fmt:|mypy:|pragma)")
ROLE = re.compile(r":[a-z]+:(?=`)")
TABLE = re.compile(r"^=+ ", re.MULTILINE)


def texts() -> Iterator[Text]:
    """Return every text, with its source."""
    yield from _manifests("dashboards", "*.yaml", {"summary", "description"})
    yield from _manifests("dashboards", "*.json", {"title", "description"})
    yield from _manifests("crds", "*.yaml", {"description", "message"})
    yield from _manifests("config", "*.yaml", {"description", "message"})
    yield from _commands(typer.main.get_command(app), "plimsoll")
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            yield from literals(file.read_text(), str(file.relative_to(ROOT)))


def code_texts() -> Iterator[Text]:
    """Yield the docstrings and comments of the packages in :data:`REVISED`."""
    for package in REVISED:
        for file in sorted((ROOT / package).rglob("*.py")):
            source, name = file.read_text(), str(file.relative_to(ROOT))
            yield from chain(docstrings(source, name), comments(source, name))


def _manifests(folder: str, pattern: str, keys: set[str]) -> Iterator[Text]:
    for file in sorted((ROOT / folder).glob(pattern)):
        load: Callable[[str], Any] = json.loads if file.suffix == ".json" else _documents
        yield from _values(load(file.read_text()), keys, str(file.relative_to(ROOT)))


def _documents(text: str) -> list[Any]:
    return list(yaml.load_all(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def _values(node: Any, keys: set[str], at: str) -> Iterator[Text]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key in keys and isinstance(value, str):
                yield f"{at}.{key}", value
            else:
                yield from _values(value, keys, f"{at}.{key}")
    elif isinstance(node, list):
        for index, item in enumerate(node):
            yield from _values(item, keys, f"{at}[{index}]")


def _commands(command: Any, name: str) -> Iterator[Text]:
    yield f"{name} --help", command.help or ""
    for parameter in command.params:
        yield f"{name} --help: {parameter.name}", getattr(parameter, "help", None) or ""
    for below in (getattr(command, "commands", None) or {}).values():
        yield from _commands(below, f"{name} {below.name}")


def literals(source: str, name: str) -> Iterator[Text]:
    """Return the string literals of a module that hold words, without docstrings.

    A value that an f-string fills in becomes ``X``.
    """
    tree = ast.parse(source)
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            skipped.update(id(part) for part in chain(*map(ast.walk, node.values)))
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Constant, ast.JoinedStr)) or id(node) in skipped:
            continue
        text = _text(node)
        words = re.findall(r"[a-z]{2,}", text) if " " in text else []
        if len(words) >= MIN_WORDS and not NO_PROSE.search(text):
            yield f"{name}:{node.lineno}", text


def _text(node: ast.Constant | ast.JoinedStr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(_text(part) if isinstance(part, ast.Constant) else "X" for part in node.values)


def docstrings(source: str, name: str) -> Iterator[Text]:
    """Yield the docstrings of a module, including those of its constants, without tables."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text = ROLE.sub("", inspect.cleandoc(str(node.value.value)))
            parts = (part for part in text.split("\n\n") if not TABLE.search(part))
            yield f"{name}:{node.lineno}", "\n\n".join(parts)


def comments(source: str, name: str) -> Iterator[Text]:
    """Yield the comments of a module; consecutive lines are one text."""
    first, last, lines = 0, 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or DIRECTIVE.match(token.string):
            continue
        if lines and token.start[0] != last + 1:
            yield f"{name}:{first}", " ".join(lines)
            lines = []
        first, last = (first if lines else token.start[0]), token.start[0]
        lines.append(token.string.lstrip("# "))
    if lines:
        yield f"{name}:{first}", " ".join(lines)


def write(target: Path, found_texts: Iterable[Text]) -> list[str]:
    """Write one text per paragraph to ``target``. Return the source of each of its lines."""
    found = {text: source for source, text in found_texts if text.strip()}
    lines: list[str] = []
    sources: list[str] = []
    for text, source in sorted(found.items(), key=lambda item: item[1]):
        for line in (" ".join(part.split()) for part in re.split(r"\n\s*\n", text)):
            lines += [line, ""]
            sources += [source, source]
    target.write_text("\n".join(lines))
    return sources
