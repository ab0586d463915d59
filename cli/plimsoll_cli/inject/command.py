"""Reads manifests, adds supervisors, prints manifests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from plimsoll_cli import yaml_text
from plimsoll_cli.errors import UsageError
from plimsoll_cli.inject.selection import Selection
from plimsoll_operator.injection.documents import inject
from plimsoll_operator.injection.errors import InjectionError
from plimsoll_operator.injection.options import Options
from plimsoll_operator.injection.pods import KINDS

Object = dict[str, Any]


def run(file: Path, options: Options, selection: Selection) -> tuple[str, list[str]]:
    """Return the text to print and notes for a person.

    UsageError, which names the file, the object and the field, where something cannot be injected,
    and where nothing was.
    """
    made: list[Object] = []
    fresh: list[Object] = []
    notes: list[str] = []
    count = 0
    for at, document in flat(read(file)):
        if not selection.takes(document):
            made.append(document)
            continue
        try:
            injected = inject(document, options)
        except InjectionError as error:
            raise UsageError(f"{file}: {at}: {error}") from None
        if injected.config_map is not None:
            count += 1
            fresh += [injected.config_map, *injected.others]
            made += [injected.config_map, *injected.others]
        made.append(injected.document)
        notes += injected.notes
    if not count:
        raise UsageError(f"{file}: nothing to inject: {_why(made, notes, selection)}")
    made = without_old(made, fresh)
    return yaml_text.dump_all(made, width=100, explicit_start=True), notes


def _why(documents: list[Object], notes: list[str], selection: Selection) -> str:
    if notes:
        return "; ".join(notes)
    if not any(selection.takes(document) for document in documents) and documents:
        return "no document matches --name and --selector"
    kinds = ", ".join(str(document.get("kind")) for document in documents) or "nothing"
    return f"the file holds {kinds}, and inject accepts {KINDS}"


def read(file: Path) -> list[Object]:
    """Return the documents of ``file`` (``-`` is standard input); UsageError says what is wrong."""
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
        documents = [one for one in yaml.safe_load_all(text) if one is not None]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{file}: cannot be read: {reason}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{file}: not YAML: {' '.join(str(error).split())}") from None
    for at, document in enumerate(documents, 1):
        if _holds_itself(document, ()):
            raise UsageError(f"{file}: document {at}: an alias refers to what it stands in")
        if not isinstance(document, dict):
            raise UsageError(
                f"{file}: document {at}: holds a {type(document).__name__}, not a manifest"
            )
        for field in ("apiVersion", "kind"):
            if not isinstance(document.get(field), str):
                raise UsageError(f"{file}: document {at}: {field}: required")
    return documents


def _holds_itself(value: object, around: tuple[int, ...]) -> bool:
    if not isinstance(value, dict | list):
        return False
    if id(value) in around:
        return True
    parts = value.values() if isinstance(value, dict) else value
    return any(_holds_itself(part, (*around, id(value))) for part in parts)


def flat(documents: list[Object], within: str = "document ") -> Iterator[tuple[str, Object]]:
    """Yield the documents, each with its place, and in place of a List its items."""
    for at, document in enumerate(documents, 1):
        place = f"{within}{at}"
        if str(document.get("kind", "")).endswith("List") and "items" in document:
            items = [one for one in document["items"] or [] if isinstance(one, dict)]
            yield from flat(items, f"{place}, item ")
        else:
            yield place, document


def without_old(documents: list[Object], fresh: list[Object]) -> list[Object]:
    """Return ``documents`` without those that the ``fresh`` objects among them replace.

    A file that was injected before holds what is made again.
    """
    made = {identity(one) for one in fresh}
    new = {id(one) for one in fresh}
    return [one for one in documents if id(one) in new or identity(one) not in made]


def identity(document: Object) -> tuple[str, ...]:
    """Which object the document is for."""
    metadata = document.get("metadata")
    meta = metadata if isinstance(metadata, dict) else {}
    parts = (
        document.get("apiVersion"),
        document.get("kind"),
        meta.get("namespace"),
        meta.get("name"),
    )
    return tuple(map(str, parts))
