"""Manifests: one InferenceService or SupervisionPolicy in a YAML file.

They are checked as the API server would.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.names import API_VERSION, POLICY_KIND, SERVICE_KIND
from plimsoll_api.schema import ResourceModel
from plimsoll_api.supervision_policy import SupervisionPolicy
from plimsoll_cli.errors import UsageError

T = TypeVar("T", bound=ResourceModel)
MAX_BYTES = 3 << 20
"""The API server takes no larger request body (its limit for writes is 3 MiB)."""


class _Loader(yaml.SafeLoader):
    """Refuses a key that is written twice, where YAML's own reader would take the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                if key_node.value in seen and key_node.tag != "tag:yaml.org,2002:merge":
                    raise yaml.constructor.ConstructorError(
                        problem=f"{key_node.value} appears twice: remove one of them",
                        problem_mark=key_node.start_mark,
                    )
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


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
    kind, version = document.get("kind"), document.get("apiVersion")
    if kind != wanted:
        raise UsageError(f"{path}: kind: {kind!r} cannot be used here: write kind: {wanted}")
    if version != API_VERSION:
        raise UsageError(f"{path}: apiVersion: {version!r} is not known: write {API_VERSION}")
    try:
        return model.model_validate(document)
    except ValidationError as error:
        problems = [_problem(path, one["loc"], one) for one in error.errors()]
        raise UsageError("\n".join(problems)) from None


def _document(path: Path, wanted: str) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UsageError(f"{path}: larger than {MAX_BYTES >> 20} MiB: this is not a manifest")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is not UTF-8 text: {error.reason}") from None
    try:
        # _Loader is a SafeLoader: it makes no objects of other classes.
        documents = [d for d in yaml.load_all(text, Loader=_Loader) if d is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise UsageError(f"{path}{at}: not YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: not YAML: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise UsageError(f"{path}: nested too deeply to be a manifest") from None
    if len(documents) != 1:
        count = f"{len(documents)} documents" if documents else "nothing"
        raise UsageError(f"{path}: holds {count}: give a file with one {wanted}")
    document = documents[0]
    if not isinstance(document, dict):
        what = type(document).__name__
        raise UsageError(f"{path}: holds a {what}: give a file with one {wanted}")
    return document


def field_path(location: tuple[int | str, ...]) -> str:
    """``spec.engine.env[0].name`` out of its parts."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path


def _problem(path: Path, location: tuple[int | str, ...], error: Any) -> str:
    kind, message = error["type"], str(error["msg"]).removeprefix("Value error, ")
    if kind == "extra_forbidden":
        message = "is not a known field: remove it, or correct its spelling"
    elif kind == "missing":
        message = "is required: add it"
    elif not isinstance(error["input"], dict | list):
        message = f"{message} (it is {error['input']!r})"
    return f"{path}: {field_path(location)}: {message}"
