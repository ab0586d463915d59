"""Manifests in documents and examples: YAML, and of our kinds what the models take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from docs.tools.blocks import ROOT, blocks
from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.names import API_VERSION, POLICY_KIND
from plimsoll_api.supervision_policy import SupervisionPolicy


def wrong(path: Path) -> Iterator[str]:
    """What the API server would refuse."""
    for block in blocks(path, "yaml"):
        yield from _wrong(block.place, block.text)


def examples() -> Iterator[str]:
    for path in sorted((ROOT / "examples").rglob("*.yaml")):
        yield from _wrong(str(path.relative_to(ROOT)), path.read_text())


def of(path: Path) -> list[dict[str, Any]]:
    """The Kubernetes objects in a document."""
    found = [one for block in blocks(path, "yaml") for one in yaml.safe_load_all(block.text)]
    return [one for one in found if isinstance(one, dict) and "apiVersion" in one]


def model_of(document: dict[str, Any]) -> type[InferenceService | SupervisionPolicy]:
    """The model of one of our kinds; a kind that people do not write fails its validation."""
    return SupervisionPolicy if document.get("kind") == POLICY_KIND else InferenceService


def _wrong(place: str, text: str) -> Iterator[str]:
    try:
        documents = [one for one in yaml.safe_load_all(text) if one is not None]
    except yaml.YAMLError as error:
        yield f"{place}: not YAML: {' '.join(str(error).split())}"
        return
    for document in documents:
        if isinstance(document, dict) and document.get("apiVersion") == API_VERSION:
            try:
                model_of(document).model_validate(document)
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(str(part) for part in first["loc"])
                yield f"{place}: {where}: {first['msg']}"
