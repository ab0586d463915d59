"""Reads manifests, adds supervisors, prints manifests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from plimsoll_cli.errors import UsageError
from plimsoll_cli.inject.sidecar import Wish, inject

Object = dict[str, Any]


def run(file: Path, wish: Wish) -> tuple[str, list[str]]:
    """The text to print and notes for a person. UsageError where nothing could be injected."""
    made: list[Object] = []
    notes: list[str] = []
    count = 0
    for document in flat(read(file)):
        try:
            injected = inject(document, wish)
        except ValidationError as error:
            first = error.errors()[0]
            raise UsageError(f"{file}: {document.get('kind')}: {first['msg']}") from None
        if injected is None:
            made.append(document)
            continue
        count += 1
        made += [injected.config_map, injected.document]
        notes += injected.notes
    if not count:
        kinds = ", ".join(str(document.get("kind")) for document in made) or "nothing"
        raise UsageError(
            f"{file}: holds {kinds}: inject takes a Deployment, StatefulSet, DaemonSet, Pod or a"
            " KServe InferenceService"
        )
    return yaml.safe_dump_all(made, sort_keys=False, width=100, explicit_start=True), notes


def read(file: Path) -> list[Object]:
    """The documents of ``file``; ``-`` is the standard input. UsageError says what is wrong."""
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
        documents = [one for one in yaml.safe_load_all(text) if one is not None]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{file}: cannot be read: {reason}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{file}: not YAML: {' '.join(str(error).split())}") from None
    wrong = next((one for one in documents if not isinstance(one, dict)), None)
    if wrong is not None:
        raise UsageError(f"{file}: holds a {type(wrong).__name__}, not a manifest")
    return documents


def flat(documents: list[Object]) -> Iterator[Object]:
    """The documents, and in place of a List its items."""
    for document in documents:
        if str(document.get("kind", "")).endswith("List") and "items" in document:
            yield from flat(list(document["items"] or []))
        else:
            yield document
