"""The API server holds a podTemplate to the restricted standard, unless its namespace is open."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lab import binaries
from tests.lab.kube import Kube, eventually
from tests.lab.lab import Lab, namespace
from tests.pod_templates import (
    ALLOWED,
    CREDENTIALS,
    NO_DOWNLOAD,
    REFUSED,
    REFUSED_WITHOUT_DOWNLOAD,
)

ROOT = Path(__file__).parents[2]
POLICY = ROOT / "config" / "pod-template-policy.yaml"
NAME = "restricted-pod-templates.plimsoll.dev"


@pytest.fixture
def kube(cluster: Lab) -> Iterator[Kube]:
    """A namespace under the policy, which is in force."""
    cluster.kube("apply", "-f", str(POLICY))
    with namespace(cluster.kube) as kube:
        # A policy is in force a moment after it was made.
        eventually(lambda: write(kube, {"spec": {"hostPID": True}}).returncode, "in force")
        yield kube
    cluster.kube("delete", "-f", str(POLICY))


def service(name: str, template: Any, spec: Any = CREDENTIALS) -> dict[str, Any]:
    return {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": spec | ({"podTemplate": template} if template is not None else {}),
    }


def write(kube: Kube, template: Any, *more: str) -> subprocess.CompletedProcess[str]:
    return apply(kube, [service("qwen", template)], *more)


def refusals(kube: Kube, templates: list[Any], spec: Any = CREDENTIALS) -> list[str]:
    """What the API server says of each template, empty where it lets one in."""
    names = [f"template-{at}" for at in range(len(templates))]
    done = apply(kube, [service(*one, spec) for one in zip(names, templates, strict=True)])
    said = done.stderr.splitlines()
    return [" ".join(line for line in said if f'"{name}"' in line) for name in names]


def apply(kube: Kube, items: list[Any], *more: str) -> subprocess.CompletedProcess[str]:
    command = [*kube.kubectl, f"--kubeconfig={kube.kubeconfig}", f"-n={kube.namespace}"]
    return subprocess.run(
        [*command, "apply", "--server-side", "-f-", *(more or ("--dry-run=server",))],
        input=json.dumps({"apiVersion": "v1", "kind": "List", "items": items}),
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_what_goes_beyond_the_standard_is_refused_by_its_field(kube: Kube) -> None:
    templates = [{"spec": spec} for spec, _ in REFUSED]
    found = [*zip(REFUSED, refusals(kube, templates), strict=True)]
    others = [{"spec": spec} for spec, _ in REFUSED_WITHOUT_DOWNLOAD]
    found += zip(REFUSED_WITHOUT_DOWNLOAD, refusals(kube, others, NO_DOWNLOAD), strict=True)
    for (spec, said), refusal in found:
        assert "spec.podTemplate." in refusal, f"{spec}: {refusal}"
        assert said.partition("[")[0] in refusal, f"{spec}: {refusal}"
        assert "resulted in error" not in refusal, refusal


def test_what_is_no_template_is_refused_by_its_field(kube: Kube) -> None:
    templates: list[Any] = [
        {"metadata": {"annotations": {"container.apparmor.security.beta.kubernetes.io/a": "u"}}},
        {"spec": "none"},
        {"spec": {"containers": "none"}},
        {"spec": {"volumes": [1]}},
        {"spec": {"containers": [{"name": 5, "securityContext": {"capabilities": {"add": 1}}}]}},
        {"spec": {"initContainers": [{"env": 1, "ports": {}, "volumeMounts": "x"}]}},
        {"spec": {"volumes": [{"projected": {"sources": [1]}, "secret": "x"}]}},
    ]
    for template, refusal in zip(templates, refusals(kube, templates), strict=True):
        assert "spec.podTemplate." in refusal, f"{template}: {refusal}"
        assert "resulted in error" not in refusal, refusal


def test_what_stays_within_the_standard_is_let_in(kube: Kube) -> None:
    templates: list[Any] = [None, {}, *({"spec": spec} for spec in ALLOWED)]
    assert not [said for said in refusals(kube, templates) if said]
    assert apply(kube, [service("qwen", one) for one in templates]).returncode == 0


def test_an_administrator_opens_a_namespace_and_closes_it(kube: Kube, helm: str) -> None:
    hostile = {"spec": {"hostPID": True}}
    command = [helm, "template", "plimsoll", str(ROOT / "charts" / "plimsoll")]
    opened = f"podTemplate.unrestrictedNamespaces={{{kube.namespace}}}"
    made = subprocess.run(
        [*command, f"--kube-version={binaries.VERSION}", "--set", opened],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    items = [one for one in yaml.safe_load_all(made.stdout) if one]
    policy = [one for one in items if one["metadata"]["name"] == NAME]
    assert len(policy) == 2
    kube("apply", "-f", "-", stdin=yaml.safe_dump_all(policy))
    eventually(lambda: write(kube, hostile).returncode == 0, "the namespace is open")
    assert write(kube, hostile, "--force-conflicts").returncode == 0
    kube("apply", "-f", str(POLICY))
    eventually(lambda: write(kube, {"spec": {"hostIPC": True}}).returncode, "closed again")
    # What is there can be changed besides its template.
    kube("patch", "plinf", "qwen", "--type=merge", "-p", '{"spec": {"replicas": 2}}')


@pytest.mark.parametrize(
    "later",
    [
        {"engine": {"apiKeySecretRef": {"name": "tls"}}},
        {"model": {"uri": "s3://bucket/m", "credentialsSecretRef": {"name": "tls"}}},
        {"model": {"uri": "hf://a/b", "tokenSecretRef": {"name": "tls"}}},
    ],
)
def test_a_secret_that_the_template_reads_becomes_none_of_ours(
    kube: Kube, later: dict[str, Any]
) -> None:
    """The template stays the same, but the Secret that it reads would now hold clients' keys."""
    volumes = [{"name": "own", "secret": {"secretName": "tls"}}]
    item = service("qwen", {"spec": {"volumes": volumes}})
    done = apply(kube, [item], "--force-conflicts")
    assert done.returncode == 0, done.stderr
    done = apply(kube, [item | {"spec": item["spec"] | later}], "--force-conflicts")
    assert done.returncode != 0
    assert "spec.podTemplate.spec.volumes[own]" in done.stderr
    assert apply(kube, [item | {"spec": item["spec"] | {"replicas": 2}}]).returncode == 0
