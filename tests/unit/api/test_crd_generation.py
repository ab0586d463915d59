"""The CRDs are what the models say, and say everything about themselves.

Tests ``plimsoll_api/generate.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.tools import manifests
from plimsoll_api import generate
from plimsoll_api.inferenceservice import InferenceService
from plimsoll_operator.plans.service import parse_service

ROOT = Path(__file__).parents[3]
CRDS = [
    generate.make_inference_service_crd(),
    generate.make_leak_incident_crd(),
    generate.make_supervision_policy_crd(),
]


def schema_of(crd: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def nodes(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    if "items" in node:
        yield from nodes(node["items"], f"{path}[]")
    if "additionalProperties" in node:
        yield from nodes(node["additionalProperties"], f"{path}{{}}")


def test_the_files_are_generated() -> None:
    for name, text in generate.generate_files().items():
        assert (ROOT / "crds" / name).read_text() == text, "run: python -m plimsoll_api.generate"


def test_check_reports_drift(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "CRD_DIR", tmp_path)
    assert generate.main(["--check"]) == 1
    assert "run make generate" in capsys.readouterr().err
    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 0


@pytest.mark.parametrize("crd", CRDS, ids=lambda crd: crd["metadata"]["name"])
def test_every_field_is_described_and_typed(crd: dict[str, Any]) -> None:
    for path, node in nodes(schema_of(crd)):
        if path and not path.endswith(("[]", "{}")) and path != ".metadata":
            assert node.get("description"), path
        assert "type" in node or "x-kubernetes-int-or-string" in node, path
        assert not {"$ref", "oneOf", "allOf", "title", "const"} & set(node), path
        if node.get("type") == "array":
            assert "maxItems" in node, path


def test_an_object_whose_parts_have_defaults_has_one_itself() -> None:
    """Else the API server would not fill the parts in where a manifest leaves the object out."""
    spec = schema_of(CRDS[0])["properties"]["spec"]
    for path, node in nodes(spec):
        for name, child in node.get("properties", {}).items():
            filled = any("default" in part for part in child.get("properties", {}).values())
            required = name in node.get("required", ())
            optional = (
                *("host", "device", "autoscaling", "maintenanceWindow", "window", "startGate"),
                "parallelism",
            )
            absent_means_none = name in optional or name.endswith("Ref")
            if filled and not required and not absent_means_none:
                assert "default" in child, f"{path}.{name}"


def test_defaults_of_schema_and_models_agree() -> None:
    """A manifest means the same with the API server's defaults and without."""

    def filled(node: dict[str, Any], value: Any) -> Any:
        if not isinstance(value, dict) or "properties" not in node:
            return value
        out = dict(value)
        for name, child in node["properties"].items():
            if name not in out and "default" in child:
                out[name] = child["default"]
            if name in out:
                out[name] = filled(child, out[name])
        return out

    spec = {"model": {"uri": "file:///m"}, "memory": {"host": {"growthBudget": "1Gi"}}}
    base = {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "a"},
    }
    full = filled(schema_of(CRDS[0])["properties"]["spec"], spec)
    assert full["supervision"]["drain"] == {"mode": "Carry", "deadline": "30s"}
    assert InferenceService.model_validate(base | {"spec": full}) == parse_service(
        base | {"spec": spec}
    )


def test_examples_are_valid() -> None:
    files = (ROOT / "examples").glob("*.yaml")
    documents = [one for path in files for one in yaml.safe_load_all(path.read_text())]
    ours = [one for one in documents if one["apiVersion"].startswith("plimsoll.dev/")]
    assert ours
    for document in ours:
        manifests.model_of(document).model_validate(document)
