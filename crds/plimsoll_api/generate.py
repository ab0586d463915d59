"""Generate crds/*.yaml from the models: ``python -m plimsoll_api.generate [--check]``.

A CRD's schema must be structural: it has no references and no ``oneOf``, and every property has a
type. :mod:`plimsoll_api.structural` makes the schemas of msgspec structs.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from plimsoll_api import names
from plimsoll_api.cel import make_rule, make_validations
from plimsoll_api.inferenceservice import MAX_NAME_CHARS, NAME_PATTERN, InferenceService
from plimsoll_api.leakincident import LeakIncident
from plimsoll_api.parallelism import NAME_LENGTH_RULE
from plimsoll_api.schema import STRUCTURAL_KEY
from plimsoll_api.structural import make_structural_schema
from plimsoll_api.supervision_policy import SupervisionPolicy

CRD_DIR = Path(__file__).resolve().parents[1]
_DROPPED_KEYS = ("title", "additionalProperties", "discriminator", "propertyNames", "const")


def make_model_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the structural schema of a pydantic model."""
    schema = model.model_json_schema(by_alias=True, mode="validation")
    return _make_structural(schema, schema.get("$defs", {}))


def _make_structural(node: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any]:
    node = {key: value for key, value in node.items() if key != "$defs"}
    if "$ref" in node:
        target = defs[node.pop("$ref").rpartition("/")[2]]
        node = {**target, **node}
    if STRUCTURAL_KEY in node:
        return {key: value for key, value in node.items() if key not in (STRUCTURAL_KEY, "title")}
    if "x-kubernetes-int-or-string" in node:
        return {key: value for key, value in node.items() if key not in ("type", "title")}
    options = [option for option in node.pop("anyOf", ()) if option.get("type") != "null"]
    if len(options) > 1:
        raise ValueError(f"a structural schema must have exactly one type, not {options}")
    if options:
        inner = _make_structural(options[0], defs)
        node.pop("default", None)
        return {**inner, **{key: value for key, value in node.items() if key != "title"}}
    values = node.get("additionalProperties")
    out = {key: value for key, value in node.items() if key not in _DROPPED_KEYS}
    if isinstance(values, dict):
        out["additionalProperties"] = _make_structural(values, defs)
    if "properties" in node:
        required = node.get("required", ())
        out["properties"] = {
            name: _make_property(value, name in required, defs)
            for name, value in node["properties"].items()
        }
    if "items" in node:
        out["items"] = _make_structural(node["items"], defs)
    return out


# An object that is never null gets the default ``{}``, so that the defaults of its fields apply
# even if a manifest omits the object.
def _make_property(node: dict[str, Any], required: bool, defs: dict[str, Any]) -> dict[str, Any]:
    out = _make_structural(node, defs)
    always_there = "anyOf" not in node and not required and "default" not in out
    if always_there and out.get("type") == "object" and "properties" in out:
        out["default"] = {}
    return out


def _make_crd(
    schema: dict[str, Any],
    kind: str,
    plural: str,
    short_name: str,
    columns: Sequence[dict[str, Any]],
    subresources: dict[str, Any],
    rules: dict[str, Any],
) -> dict[str, Any]:
    schema["properties"] = {
        "apiVersion": {
            "type": "string",
            "description": "APIVersion defines the versioned schema of this object.",
        },
        "kind": {
            "type": "string",
            "description": "Kind is the REST resource that this object represents.",
        },
        "metadata": {"type": "object"},
        "spec": schema["properties"]["spec"],
        "status": schema["properties"]["status"],
    }
    schema["required"] = ["spec"]
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{names.API_GROUP}"},
        "spec": {
            "group": names.API_GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
                "shortNames": [short_name],
                "categories": ["plimsoll"],
            },
            "versions": [
                {
                    "name": names.CRD_VERSION,
                    "served": True,
                    "storage": True,
                    "additionalPrinterColumns": list(columns),
                    "subresources": subresources,
                    "schema": {"openAPIV3Schema": schema | rules},
                }
            ],
        },
    }


def _make_column(name: str, path: str, type_: str = "string", priority: int = 0) -> dict[str, Any]:
    column = {"name": name, "type": type_, "jsonPath": path}
    return column | {"priority": priority} if priority else column


def _make_condition_path(field: str) -> str:
    return f'.status.conditions[?(@.type=="Ready")].{field}'


_NAME_RULE = make_rule(
    f"size(self.metadata.name) <= {MAX_NAME_CHARS} && self.metadata.name.matches('{NAME_PATTERN}')",
    f"metadata.name must be at most {MAX_NAME_CHARS} lower-case letters, digits and dashes, and "
    "begin with a letter",
)


def make_inference_service_crd() -> dict[str, Any]:
    """Build the CRD of InferenceService."""
    return _make_crd(
        make_model_schema(InferenceService),
        names.SERVICE_KIND,
        names.SERVICE_PLURAL,
        names.SERVICE_SHORT_NAME,
        [
            _make_column("URL", ".status.url", priority=1),
            _make_column("Ready", ".status.readyReplicas", "integer"),
            _make_column("Desired", ".status.desiredReplicas", "integer"),
            _make_column("Reason", _make_condition_path("reason")),
            _make_column("Host%", ".status.memory.hostConsumedPercent", "integer", 1),
            _make_column("Device%", ".status.memory.deviceConsumedPercent", "integer", 1),
            _make_column("Restarts", ".status.restarts", "integer", 1),
            _make_column("Incidents", ".status.openIncidents", "integer"),
            _make_column("Age", ".metadata.creationTimestamp", "date"),
        ],
        {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        make_validations(_NAME_RULE, NAME_LENGTH_RULE),
    )


def make_supervision_policy_crd() -> dict[str, Any]:
    """Build the CRD of SupervisionPolicy."""
    return _make_crd(
        make_model_schema(SupervisionPolicy),
        names.POLICY_KIND,
        names.POLICY_PLURAL,
        names.POLICY_SHORT_NAME,
        [
            _make_column("Selected", ".status.selected", "integer"),
            _make_column("Supervised", ".status.supervised", "integer"),
            _make_column("Waiting", ".status.waitingForRestart", "integer"),
            _make_column("Refused", ".status.refused", "integer"),
            _make_column("Reason", _make_condition_path("reason")),
            _make_column("Host%", ".status.memory.hostConsumedPercent", "integer", 1),
            _make_column("Device%", ".status.memory.deviceConsumedPercent", "integer", 1),
            _make_column("Incidents", ".status.openIncidents", "integer"),
            _make_column("Age", ".metadata.creationTimestamp", "date"),
        ],
        {"status": {}},
        make_validations(_NAME_RULE),
    )


def make_leak_incident_crd() -> dict[str, Any]:
    """Build the CRD of LeakIncident."""
    return _make_crd(
        {"description": inspect.getdoc(LeakIncident), **make_structural_schema(LeakIncident)},
        names.INCIDENT_KIND,
        names.INCIDENT_PLURAL,
        names.INCIDENT_SHORT_NAME,
        [
            _make_column("Workload", ".spec.workloadRef.name"),
            _make_column("Kind", ".spec.kind"),
            _make_column("Phase", ".status.phase"),
            _make_column("Outcome", ".status.outcome"),
            _make_column("Segment", ".status.attribution.segment", priority=1),
            _make_column("Pod", ".spec.pod", priority=1),
            _make_column("ID", ".spec.id", priority=1),
            _make_column("Age", ".metadata.creationTimestamp", "date"),
        ],
        {"status": {}},
        {},
    )


# Without aliases, the files are easier to read.
class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def generate_files() -> dict[str, str]:
    """Return the text of each generated manifest, by file name."""
    return {
        f"{crd['metadata']['name']}.yaml": "# Generated by python -m plimsoll_api.generate\n"
        + yaml.dump(crd, Dumper=_Dumper, sort_keys=False, width=100)
        for crd in (
            make_inference_service_crd(),
            make_supervision_policy_crd(),
            make_leak_incident_crd(),
        )
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files; with ``--check``, print differences and return 1 if there are any."""
    parser = argparse.ArgumentParser(prog="plimsoll_api.generate", description=__doc__)
    parser.add_argument(
        "--check",
        action="store_true",
        help="write no files; exit with status 1 if a generated file is out of date",
    )
    check = parser.parse_args(arguments).check
    drifted = False
    for name, text in generate_files().items():
        path = CRD_DIR / name
        if not check:
            path.write_text(text, encoding="utf-8")
            continue
        found = path.read_text(encoding="utf-8") if path.exists() else ""
        if found != text:
            drifted = True
            sys.stderr.writelines(
                difflib.unified_diff(
                    found.splitlines(True), text.splitlines(True), f"crds/{name}", "generated"
                )
            )
    if drifted:
        sys.stderr.write("crds/*.yaml are out of date: run make generate\n")
    return int(drifted)


if __name__ == "__main__":
    sys.exit(main())
