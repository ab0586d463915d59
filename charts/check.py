"""Check all manifests with Helm's lint and kubeconform: ``python -m charts.check``.

The schemas are generated here: those of Kubernetes from the OpenAPI documents in its Go module, and
those of custom resources from their definitions. Needs Go, which also installs kubeconform.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.lab import binaries

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "charts" / "plimsoll"
KUBECONFORM = "github.com/yannh/kubeconform/cmd/kubeconform@v0.8.0"
TIMEOUT_S = 900
ALL_FEATURES_ON = (
    "webhook.enabled=true", "serviceMonitor.enabled=true", "rules.enabled=true",
    "dashboards.enabled=true", "networkPolicy.enabled=true",
)  # fmt: skip
"""Values with which the chart renders every template."""
SKIPPED_KINDS = (
    "apiextensions.k8s.io/v1/CustomResourceDefinition", "monitoring.coreos.com/v1/ServiceMonitor",
     "monitoring.coreos.com/v1/PrometheusRule",
    "serving.kserve.io/v1beta1/InferenceService", "serving.kserve.io/v1alpha2/LLMInferenceService",
)  # fmt: skip
"""Kinds without a schema in these documents. The tests validate the definitions against real API
servers, and the kinds of the Prometheus operator and KServe are in none of the Go modules."""
INT_OR_STRING = {"anyOf": [{"type": "integer"}, {"type": "string"}]}
Schema = dict[str, Any]


def run_command(*command: str | Path, cwd: Path = ROOT, stdin_text: str | None = None) -> str:
    """Return a program's standard output. If it fails, exit with its output as the message."""
    completed = subprocess.run(
        command, cwd=cwd, input=stdin_text, capture_output=True, text=True, timeout=TIMEOUT_S,
        check=False,
    )  # fmt: skip
    if completed.returncode:
        sys.exit(f"{' '.join(map(str, command))}:\n{completed.stdout}{completed.stderr}")
    return completed.stdout


def forbid_unknown_fields(schema: Any) -> Any:
    """Return the schema with ``additionalProperties: false`` in all objects."""
    if isinstance(schema, list):
        return [forbid_unknown_fields(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return INT_OR_STRING
    result = {key: forbid_unknown_fields(value) for key, value in schema.items()}
    if isinstance(kind := result.get("type"), str):  # else a property named "type"
        if result.get("nullable"):
            result["type"] = [kind, "null"]
        if "properties" in result and not result.get("x-kubernetes-preserve-unknown-fields"):
            result.setdefault("additionalProperties", False)
    return result


def drop_nulls(value: Any) -> Any:
    """Return the value as the API server reads it: without fields that are null."""
    if isinstance(value, list):
        return [drop_nulls(one) for one in value]
    if isinstance(value, dict):
        return {key: drop_nulls(one) for key, one in value.items() if one is not None}
    return value


def iterate_builtin_schemas(folder: Path) -> Iterator[tuple[str, Schema]]:
    """Yield file name and schema of each kind of Kubernetes, with the definitions that it uses.

    ``folder`` contains the OpenAPI documents, one per group version.
    """
    for file in sorted(folder.glob("*.json")):
        definitions = forbid_unknown_fields(
            json.loads(file.read_text()).get("components", {}).get("schemas", {})
        )
        for schema in definitions.values():
            for known in schema.get("x-kubernetes-group-version-kind", ()):
                needed: dict[str, Schema] = {}
                _collect_definitions(schema, definitions, needed)
                yield _make_file_name(known["group"], known["version"], known["kind"]), {
                    **schema, "components": {"schemas": needed},
                }  # fmt: skip


def _collect_definitions(
    schema: Any, definitions: dict[str, Schema], into: dict[str, Schema]
) -> None:
    if isinstance(schema, list):
        for one in schema:
            _collect_definitions(one, definitions, into)
    elif isinstance(schema, dict):
        for key, value in schema.items():
            if key == "$ref" and isinstance(value, str):
                name = value.rpartition("/")[2]
                if name not in into:
                    into[name] = definitions[name]
                    _collect_definitions(definitions[name], definitions, into)
            else:
                _collect_definitions(value, definitions, into)


def iterate_custom_schemas(files: list[Path]) -> Iterator[tuple[str, Schema]]:
    """Yield file name and schema of each version of the custom resources in ``files``."""
    specs = (one["spec"] for file in files for one in yaml.safe_load_all(file.read_text()) if one)
    for definition in specs:
        for version in definition["versions"]:
            schema = forbid_unknown_fields(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {"type": "object"}
            kind = definition["names"]["kind"]
            yield _make_file_name(definition["group"], version["name"], kind), schema


def _make_file_name(group: str, version: str, kind: str) -> str:
    return f"{group or version}_{kind.lower()}_{version}.json"


def main() -> int:
    go = shutil.which("go")
    if go is None:
        sys.exit("charts.check: install Go")
    helm = binaries.helm(max(binaries.HELM))
    on = [f"--set={value}" for value in ALL_FEATURES_ON]
    run_command(helm, "lint", "--strict", CHART)
    run_command(helm, "lint", "--strict", CHART, *on)
    print("helm lint: ok")

    release = f"k8s.io/kubernetes@{binaries.VERSION}"
    module = json.loads(run_command(go, "mod", "download", "-json", release, cwd=binaries.MODULE))
    _, definitions = binaries.leader_worker_set()
    external = sorted((definitions / "crd" / "bases").glob("*.yaml"))
    for other in (binaries.ARGO_ROLLOUTS, binaries.FLAGGER):
        external += binaries.module(other).glob(binaries.DEFINITIONS[other])
    own = sorted((ROOT / "crds").glob("*.plimsoll.dev.yaml"))
    manifests = [
        run_command(helm, "template", "plimsoll", CHART),
        run_command(
            helm, "template", "plimsoll", CHART, "--api-versions=monitoring.coreos.com/v1", *on
        ),
        run_command("kubectl", "kustomize", "config"),
        *(path.read_text() for path in sorted((ROOT / "examples").rglob("*.yaml"))),
    ]
    objects = [
        drop_nulls(one)
        for text in manifests
        for one in yaml.safe_load_all(text)
        if one is not None and "kind" in one  # omit Argo CD's patch
    ]
    with tempfile.TemporaryDirectory() as folder:
        openapi = Path(module["Dir"]) / "api" / "openapi-spec" / "v3"
        for name, schema in (
            *iterate_builtin_schemas(openapi),
            *iterate_custom_schemas([*own, *external]),
        ):
            (Path(folder) / name).write_text(json.dumps(schema))
        location = f"{folder}/{{{{.Group}}}}_{{{{.ResourceKind}}}}_{{{{.ResourceAPIVersion}}}}.json"
        os.environ["CGO_ENABLED"] = "0"
        summary = run_command(
            go, "run", KUBECONFORM, "-strict", "-summary", f"-schema-location={location}",
            f"-skip={','.join(SKIPPED_KINDS)}", "-", stdin_text=yaml.safe_dump_all(objects),
        )  # fmt: skip
    print(f"kubeconform: {summary.strip()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
