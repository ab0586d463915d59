"""Manifests: one InferenceService or SupervisionPolicy in a YAML file.

They are checked as the API server would.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.names import API_VERSION, POLICY_KIND, SERVICE_KIND
from plimsoll_api.schema import ResourceModel
from plimsoll_api.supervision_policy import SupervisionPolicy
from plimsoll_cli.errors import UsageError
from plimsoll_cli.yaml_text import YamlError
from plimsoll_cli.yaml_tree import MAX_FILE, split

T = TypeVar("T", bound=ResourceModel)


def read_text(file: Path) -> str:
    """Return the text of ``file`` (``-`` is standard input); UsageError says what is wrong."""
    try:
        if str(file) == "-":
            held = sys.stdin.buffer.read(MAX_FILE + 1)
        else:
            with file.open("rb") as opened:
                held = opened.read(MAX_FILE + 1)
        if len(held) > MAX_FILE:
            raise UsageError(f"{file}: larger than {MAX_FILE >> 20} MiB: this is not a manifest")
        return held.decode()
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{file}: is not UTF-8 text: {error.reason}") from None


def read(path: Path) -> InferenceService:
    """Read the InferenceService in ``path``.

    Raises :class:`UsageError` with one line for each thing that is wrong: file, field, what to do.
    """
    return _read(path, SERVICE_KIND, InferenceService)


def read_policy(path: Path) -> SupervisionPolicy:
    """Read the SupervisionPolicy in ``path``. Raises :class:`UsageError` as :func:`read` does."""
    return _read(path, POLICY_KIND, SupervisionPolicy)


def _read(path: Path, wanted: str, model: type[T]) -> T:
    document = _document(path, wanted)
    kind = document.get("kind")
    if kind != wanted:
        raise UsageError(f"{path}: kind: {kind!r} cannot be used here: write kind: {wanted}")
    return model_of(str(path), document, model)


def model_of(at: str, document: dict[str, Any], model: type[T]) -> T:
    """Return the object that ``document`` is; UsageError, whose lines begin with ``at``."""
    if (version := document.get("apiVersion")) != API_VERSION:
        raise UsageError(f"{at}: apiVersion: {version!r} is not known: write {API_VERSION}")
    try:
        # Strictly, as JSON: the API server takes no text for a number, and no number for a text.
        return model.model_validate_json(json.dumps(document), strict=True)
    except ValidationError as error:
        problems = [_problem(at, one["loc"], one) for one in error.errors()]
        raise UsageError("\n".join(problems)) from None


def _document(path: Path, wanted: str) -> dict[str, Any]:
    text = read_text(path)
    try:
        roots = [root for one in split(text) if (root := one.root()) is not None]
        documents = [one for root in roots if (one := root.value(strict=True)) is not None]
    except YamlError as error:
        raise UsageError(f"{':'.join([str(path), *map(str, error.at or ())])}: {error}") from None
    if len(documents) != 1:
        count = f"{len(documents)} documents" if documents else "nothing"
        raise UsageError(f"{path}: holds {count}: give a file with one {wanted}")
    document = documents[0]
    if not isinstance(document, dict):
        raise UsageError(f"{path}: holds no object: give a file with one {wanted}")
    return document


def field_path(location: tuple[int | str, ...]) -> str:
    """``spec.engine.env[0].name`` out of its parts."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path


def _problem(at: str, location: tuple[int | str, ...], error: Any) -> str:
    kind, message = error["type"], str(error["msg"]).removeprefix("Value error, ")
    if kind == "extra_forbidden":
        message = "is not a known field: remove it, or correct its spelling"
    elif kind == "missing":
        message = "is required: add it"
    elif kind == "string_type" and isinstance(error["input"], float):
        message = f"must be a whole number, or a text in quotes (it is {error['input']!r})"
    elif not isinstance(error["input"], dict | list):
        message = f"{message} (it is {error['input']!r})"
    return f"{at}: {field_path(location)}: {message}"
