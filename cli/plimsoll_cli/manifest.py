"""Read manifests with one InferenceService or SupervisionPolicy, with the API server's rules."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.manifest import MIN_SIZE_BYTES
from plimsoll_api.names import API_VERSION, POLICY_KIND, SERVICE_KIND
from plimsoll_api.schema import ResourceModel
from plimsoll_api.supervision_policy import SupervisionPolicy
from plimsoll_api.units import format_bytes, parse_bytes
from plimsoll_cli.errors import UsageError
from plimsoll_cli.yaml_text import YamlError
from plimsoll_cli.yaml_tree import MAX_FILE_BYTES, split_documents

T = TypeVar("T", bound=ResourceModel)


def read_text(file: Path) -> str:
    """Return the text of ``file``, or of standard input for ``-``. Raises UsageError."""
    try:
        if str(file) == "-":
            held = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
        else:
            with file.open("rb") as opened:
                held = opened.read(MAX_FILE_BYTES + 1)
        if len(held) > MAX_FILE_BYTES:
            raise UsageError(
                f"{file}: the file is larger than {MAX_FILE_BYTES >> 20} MiB: use a smaller"
                " manifest"
            )
        return held.decode()
    except OSError as error:
        raise UsageError(f"{file}: cannot read the file: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{file}: the file is not UTF-8 text: {error.reason}") from None


def read_service(path: Path) -> InferenceService:
    """Return the InferenceService in ``path``. Raises :class:`UsageError`."""
    return _read_resource(path, SERVICE_KIND, InferenceService)


def read_policy(path: Path) -> SupervisionPolicy:
    """Return the SupervisionPolicy in ``path``. Raises :class:`UsageError`."""
    return _read_resource(path, POLICY_KIND, SupervisionPolicy)


def _read_resource(path: Path, expected_kind: str, model: type[T]) -> T:
    document = _read_document(path, expected_kind)
    kind = document.get("kind")
    if kind != expected_kind:
        raise UsageError(
            f"{path}: kind: {kind!r} is not supported by this command: use a manifest of kind"
            f" {expected_kind}"
        )
    return parse_document(str(path), document, model)


def parse_document(position: str, document: dict[str, Any], model: type[T]) -> T:
    """Parse ``document`` as a ``model``. Raises UsageError, whose lines begin with ``position``."""
    if (version := document.get("apiVersion")) != API_VERSION:
        raise UsageError(f"{position}: apiVersion: {version!r} is not supported: use {API_VERSION}")
    try:
        # Strict, like the API server: no conversion between strings and numbers.
        return model.model_validate_json(json.dumps(document), strict=True)
    except ValidationError as error:
        problems = [f"{position}: {format_problem(one)}" for one in error.errors()]
        raise UsageError("\n".join(problems)) from None


def _read_document(path: Path, expected_kind: str) -> dict[str, Any]:
    text = read_text(path)
    try:
        roots = [root for one in split_documents(text) if (root := one.parse_root()) is not None]
        documents = [one for root in roots if (one := root.read_value(strict=True)) is not None]
    except YamlError as error:
        raise UsageError(
            f"{':'.join([str(path), *map(str, error.position or ())])}: {error}"
        ) from None
    if len(documents) != 1:
        count = f"{len(documents)} documents" if documents else "no document"
        raise UsageError(
            f"{path}: the file contains {count}: use a file with exactly one {expected_kind}"
        )
    document = documents[0]
    if not isinstance(document, dict):
        raise UsageError(
            f"{path}: the file contains no object: use a file with exactly one {expected_kind}"
        )
    return document


def check_unit(name: str, text: str) -> None:
    """Raise UsageError if the size ``text`` of the option ``name`` has probably lost its unit."""
    try:
        size = parse_bytes(text)
    except ValueError:
        return  # reported where the value is used
    if 0 < size < MIN_SIZE_BYTES:
        raise UsageError(
            f"{name}: {text!r} is only {format_bytes(size)}: add a unit, for example Gi"
        )


def format_field_path(location: tuple[int | str, ...]) -> str:
    """Return the path of a field, for example ``spec.engine.env[0].name``."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path


def format_problem(error: Any) -> str:
    """Return the field of a pydantic error, and what is wrong with it."""
    return f"{format_field_path(error['loc'])}: {describe_problem(error)}"


def describe_problem(error: Any) -> str:
    """Return what is wrong with the value of a pydantic error."""
    kind, message = error["type"], str(error["msg"]).removeprefix("Value error, ")
    if message.startswith("Input should be "):
        message = f"must be {message.removeprefix('Input should be ')}"
    if kind == "extra_forbidden":
        message = "is not a known field: remove it, or correct its spelling"
    elif kind == "missing":
        message = "is required: add it"
    elif kind == "string_type" and isinstance(error["input"], float):
        message = f"must be an integer or a quoted string, not {error['input']!r}"
    elif not isinstance(error["input"], dict | list) and repr(error["input"]) not in message:
        message = f"{message}, but the value is {error['input']!r}"
    return message
