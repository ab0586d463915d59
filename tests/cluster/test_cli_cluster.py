"""The command line on a real API server: pages, stories, permissions, wrong versions."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from plimsoll_cli.cluster import client
from plimsoll_cli.errors import RunError, UsageError
from plimsoll_cli.main import app
from plimsoll_operator.injection.kserve_llm import SCHEME_TEMPLATE
from plimsoll_operator.render.compare import merge_patch
from tests.lab.kube import Kube, eventually
from tests.lab.lab import Lab, namespace

COUNT = 12
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def kube(cluster: Lab) -> Iterator[Kube]:
    with namespace(cluster.kube) as kube:
        kube.apply(service("calm"), service("leaky"))
        for index in range(COUNT):
            kube.apply(incident(index))
        status = {"phase": "Resolved", "outcome": "Trim", "returnedBytes": 1 << 20}
        kube("patch", "leakincident", "leaky-03", "--subresource=status", "--type=merge",
             "-p", json.dumps({"status": status}))  # fmt: skip
        memory = {"memory": {"hostConsumedPercent": 85, "replica": "leaky-0"}, "openIncidents": 11}
        kube("patch", "plinf", "leaky", "--subresource=status", "--type=merge",
             "-p", json.dumps({"status": memory}))  # fmt: skip
        yield kube


def service(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": {"model": {"uri": "file:///models/tiny"}},
    }


def incident(index: int) -> dict[str, Any]:
    return {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "LeakIncident",
        "metadata": {"name": f"leaky-{index:02d}", "labels": {"plimsoll.dev/service": "leaky"}},
        "spec": {
            "id": f"leaky-0-{index:08x}",
            "workloadRef": {"kind": "InferenceService", "name": "leaky"},
            "pod": "leaky-0",
            "container": "engine",
            "epoch": f"ab:{index}",
            "openedAt": f"2026-01-01T00:00:{index:02d}Z",
            "kind": "HostGrowth",
        },
    }


def plimsoll(kube: Kube, *arguments: str, kubeconfig: Path | None = None) -> Result:
    flags = ["--kubeconfig", str(kubeconfig or kube.kubeconfig), "-n", kube.namespace]
    return CliRunner().invoke(app, [*arguments, *flags])


def test_incidents_are_read_by_page_newest_first(
    kube: Kube, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "MAX_OBJECTS_PER_PAGE", 5)
    done = plimsoll(kube, "incidents", "-o", "json")
    assert done.exit_code == 0, done.output
    names = [one["metadata"]["name"] for one in json.loads(done.stdout)]
    assert names == [f"leaky-{index:02d}" for index in reversed(range(COUNT))]
    some = plimsoll(kube, "incidents", "leaky", "--limit", "3").stdout.splitlines()
    assert some[0].split()[:3] == ["OPENED", "NAME", "TARGET"]
    assert some[-1] == "9 older incidents are not shown: increase --limit to show them"
    none = plimsoll(kube, "incidents", "calm").stdout
    assert none.startswith("no incidents in namespace ")
    assert none.endswith("; to search all namespaces, add -A\n")


def test_filters(kube: Kube) -> None:
    done = plimsoll(kube, "incidents", "--phase", "Resolved", "-o", "yaml")
    assert [one["metadata"]["name"] for one in yaml.safe_load(done.stdout)] == ["leaky-03"]
    still = json.loads(plimsoll(kube, "incidents", "--open", "-o", "json").stdout)
    assert len(still) == COUNT - 1
    wrong = plimsoll(kube, "incidents", "--kind", "Rust")
    assert isinstance(wrong.exception, UsageError)


def test_plimsoll_explain_prints_the_whole_incident(kube: Kube) -> None:
    done = plimsoll(kube, "explain", "leaky-03")
    assert done.exit_code == 0, done.output
    assert "Resolved (Trim)" in done.stdout
    assert "Freed: 1.0 MiB" in done.stdout
    as_json = json.loads(plimsoll(kube, "explain", "leaky-03", "-o", "json").stdout)
    assert as_json["next"].startswith("nothing now")
    absent = plimsoll(kube, "explain", "nobody")
    assert "incident nobody does not exist in namespace" in str(absent.exception)


def test_top_lists_the_worst_first(kube: Kube) -> None:
    lines = plimsoll(kube, "top").stdout.splitlines()
    assert lines[0].split()[:4] == ["NAME", "KIND", "PODS", "HOST%"]
    kind = "InferenceService"
    assert lines[1].split()[:4] == [f"{kube.namespace}/leaky", kind, "0/1", "85%"]
    assert lines[2].split()[:4] == [f"{kube.namespace}/calm", kind, "0/1", "?"]


def test_doctor_finds_what_is_missing(kube: Kube) -> None:
    done = plimsoll(kube, "doctor", "-o", "json")
    checks = {one["name"]: one for one in json.loads(done.stdout)}
    assert checks["api server"]["ok"] is True
    assert checks["inferenceservices.plimsoll.dev"]["ok"] is True
    assert checks["permission to create pods/exec"]["ok"] is True
    assert checks["operator"]["ok"] is False
    assert done.exit_code == 1


@pytest.mark.parametrize(
    "command",
    [
        ["top"], ["incidents"], ["explain", "leaky-03"], ["trim", "leaky-0", "--yes"],
        ["restart", "deployment/x", "--yes"],
    ],
)  # fmt: skip
def test_a_namespace_that_does_not_exist_is_an_error(kube: Kube, command: list[str]) -> None:
    absent = ["--kubeconfig", str(kube.kubeconfig), "-n", "no-such-namespace"]
    done = CliRunner().invoke(app, [*command, *absent])
    assert isinstance(done.exception, UsageError), done.output
    assert "namespace no-such-namespace does not exist" in str(done.exception)
    checks = json.loads(CliRunner().invoke(app, ["doctor", "-o", "json", *absent]).stdout)
    assert [one["ok"] for one in checks if one["name"] == "namespace"] == [False]


def test_doctor_names_the_secret_of_the_webhook_and_the_other_inference_service(
    kube: Kube,
) -> None:
    labels = {"app.kubernetes.io/name": "plimsoll"}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hook"}}
    container = {"name": "operator", "image": "x", "args": [f"--webhook={kube.namespace}/hook"]}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    kserve = "serving.kserve.io"
    other = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"inferenceservices.{kserve}"},
        "spec": {
            "group": kserve,
            "scope": "Namespaced",
            "names": {"kind": "InferenceService", "plural": "inferenceservices"},
            "versions": [
                {"name": "v1beta1", "served": True, "storage": True,
                 "schema": {"openAPIV3Schema": {"type": "object"}}}
            ],
        },
    }  # fmt: skip

    def look() -> dict[str, dict[str, Any]]:
        done = plimsoll(kube, "doctor", "-o", "json")
        return {one["name"]: one for one in json.loads(done.stdout)}

    assert "KServe" not in look()
    kube.apply(
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "p", "labels": labels},
         "spec": {"selector": {"matchLabels": labels}, "template": template}},
        other,
    )  # fmt: skip
    try:
        assert "hook does not exist" in look()["webhook secret"]["text"]
        kube.apply(secret | {"stringData": {"tls.crt": "c", "tls.key": "k"}})
        assert look()["webhook secret"]["ok"] is False
        assert "has no ca.crt" in look()["webhook secret"]["text"]
        kube.apply(secret | {"stringData": {"tls.crt": "c", "tls.key": "k", "ca.crt": "a"}})
        eventually(lambda: "KServe" in look(), "the API server serves KServe's kind")
        found = look()
        assert found["webhook secret"]["ok"] is True
        assert "write plinf or inferenceservices.plimsoll.dev" in found["KServe"]["text"]
    finally:
        kube("delete", "crd", f"inferenceservices.{kserve}")
        kube("delete", "deployment/p", "secret/hook", "--ignore-not-found")


def nobody(kube: Kube, folder: Path) -> Path:
    """A kubeconfig of an account without rights."""
    kube.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "nobody"}})
    config = yaml.safe_load(kube.kubeconfig.read_text())
    token = kube("create", "token", "nobody", "--duration=1h").strip()
    config["users"] = [{"name": "nobody", "user": {"token": token}}]
    config["contexts"][0]["context"]["user"] = "nobody"
    config["current-context"] = config["contexts"][0]["name"]
    target = folder / "kubeconfig"
    target.write_text(yaml.safe_dump(config))
    target.chmod(0o600)
    return target


def test_the_rule_that_is_printed_is_the_one_that_helps(kube: Kube, tmp_path: Path) -> None:
    kubeconfig = nobody(kube, tmp_path)
    refused = plimsoll(kube, "incidents", kubeconfig=kubeconfig)
    assert isinstance(refused.exception, RunError)
    message = str(refused.exception)
    assert (
        f"you are not allowed to list leakincidents.plimsoll.dev in namespace {kube.namespace}"
        in message
    )
    rules = yaml.safe_load(message.partition("\n\n")[2])["rules"]
    kind = {"apiVersion": "rbac.authorization.k8s.io/v1"}
    subject = {"kind": "ServiceAccount", "name": "nobody", "namespace": kube.namespace}
    ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader"}
    kube.apply(
        {**kind, "kind": "Role", "metadata": {"name": "reader"}, "rules": rules},
        {**kind, "kind": "RoleBinding", "metadata": {"name": "reader"}, "roleRef": ref,
         "subjects": [subject]},
    )  # fmt: skip
    assert plimsoll(kube, "incidents", kubeconfig=kubeconfig).exit_code == 0


@pytest.mark.parametrize(
    "name", ["vllm-deployment", "sglang-deployment", "production-stack", "llm-d", "dynamo-frontend"]
)
def test_the_api_server_takes_what_inject_writes(kube: Kube, name: str) -> None:
    file = EXAMPLES / "inject" / f"{name}.yaml"
    # The picker of llm-d speaks gRPC on the first of its ports, so nobody knows its port.
    every = [] if name == "llm-d" else ["--all"]
    flags = ["--supervisor-image", "supervisor:1", *every]
    done = CliRunner().invoke(app, ["inject", str(file), *flags])
    assert done.exit_code == 0, done.exception
    everything = [one for one in yaml.safe_load_all(done.stdout) if one]
    for one in everything:
        one["metadata"].pop("namespace", None)
    text = yaml.safe_dump_all(everything)
    applied = kube("apply", "--dry-run=server", "--validate=strict", "-f", "-", stdin=text)
    assert applied.count("(server dry run)") == len(everything)


def test_the_api_server_takes_the_pod_that_kserve_makes_of_what_inject_writes(kube: Kube) -> None:
    """KServe is not here. It puts the container of its runtime beside what the predictor has of a
    pod, so the API server is asked about that pod."""
    file = EXAMPLES / "inject" / "kserve-inferenceservice.yaml"
    done = CliRunner().invoke(app, ["inject", str(file), "--supervisor-image", "supervisor:1"])
    assert done.exit_code == 0, done.output
    config, service = (one for one in yaml.safe_load_all(done.stdout) if one)
    predictor = service["spec"]["predictor"]
    pod_fields = ("initContainers", "volumes", "shareProcessNamespace")
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "predictor", "labels": predictor["labels"]},
        "spec": {field: predictor[field] for field in pod_fields}
        | {"containers": [{"name": "kserve-container", "image": "runtime:1"}]},
    }
    text = yaml.safe_dump_all([config, pod])
    applied = kube("apply", "--dry-run=server", "--validate=strict", "-f", "-", stdin=text)
    assert applied.count("(server dry run)") == 2


PRESET = {
    "containers": [
        {
            "name": "main",
            "image": "ghcr.io/llm-d/llm-d-cuda:v0.9.0",
            "command": ["/bin/bash", "-c", "exec vllm serve /mnt/models --port 8001 $@", "--"],
            "ports": [{"containerPort": 8001}],
            "securityContext": {"runAsNonRoot": True, "capabilities": {"drop": ["ALL"]}},
            "volumeMounts": [{"name": "dshm", "mountPath": "/dev/shm"}],
        }
    ],
    "initContainers": [
        {
            "name": "llm-d-routing-sidecar",
            "image": "proxy:1",
            "restartPolicy": "Always",
            "ports": [{"containerPort": 8000}],
        }
    ],
    "volumes": [{"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}],
}
"""Of a decode pod, in the form of KServe's own configurations."""


def test_the_api_server_takes_the_pod_that_kserve_merges_of_an_llm_service(kube: Kube) -> None:
    """KServe is not here. It merges a pod as strategic merge patches do, of its preset, of what
    baseRefs name and of the service."""
    file = EXAMPLES / "inject" / "kserve-llminferenceservice.yaml"
    flags = ["--supervisor-image", "supervisor:1", "--probe"]
    done = CliRunner().invoke(app, ["inject", str(file), *flags])
    assert done.exit_code == 0, done.exception
    config_map, config, service = (one for one in yaml.safe_load_all(done.stdout) if one)
    assert service["spec"]["baseRefs"] == [{"name": config["metadata"]["name"]}]
    spec = merge_patch(merge_patch(PRESET, config["spec"]["template"]), service["spec"]["template"])
    rendered = json.loads(json.dumps(spec).replace(SCHEME_TEMPLATE, "http"))
    assert "{{" not in json.dumps(rendered)
    metadata = {"name": "decode", "labels": config["spec"]["labels"]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": rendered}
    text = yaml.safe_dump_all([config_map, pod])
    applied = kube("apply", "--dry-run=server", "--validate=strict", "-f", "-", stdin=text)
    assert applied.count("(server dry run)") == 2
    names = [one["name"] for one in rendered["initContainers"]]
    assert names == ["llm-d-routing-sidecar", "plimsoll-probe", "supervisor"]
    assert {"name": "PLIMSOLL_CONTAINER", "value": "main"} in rendered["containers"][0]["env"]


def test_the_api_server_takes_what_init_writes(kube: Kube) -> None:
    done = CliRunner().invoke(app, ["init", "qwen", "--model", "pvc://models/qwen", "--yes"])
    assert done.exit_code == 0, done.output
    assert "(server dry run)" in kube("apply", "--dry-run=server", "-f", "-", stdin=done.stdout)


def test_an_action_needs_pods_exec(kube: Kube, tmp_path: Path) -> None:
    refused = plimsoll(kube, "trim", "leaky-0", "--yes", kubeconfig=nobody(kube, tmp_path))
    assert "you are not allowed to create pods/exec" in str(refused.exception)
    absent = plimsoll(kube, "trim", "leaky-0", "--yes")
    assert isinstance(absent.exception, RunError)
    assert "leaky-0" in str(absent.exception)


def test_the_last_ready_pod_of_a_service_is_drained_only_by_force(kube: Kube) -> None:
    """No kubelet runs here: a drain that goes on ends at the exec."""
    labels = {"app": "last"}
    kube.apply(
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "last"},
         "spec": {"selector": labels, "ports": [{"port": 80}]}},
        *({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels},
           "spec": {"containers": [{"name": "engine", "image": "none"}]}}
          for name in ("last-0", "last-1")),
    )  # fmt: skip

    def set_ready(pod: str, ready: str) -> None:
        status = {"conditions": [{"type": "Ready", "status": ready}]}
        kube("patch", "pod", pod, "--subresource=status", "-p", json.dumps({"status": status}))

    def drain(*options: str) -> str:
        return str(plimsoll(kube, "drain", "last-0", "--yes", *options).exception)

    set_ready("last-0", "True")
    assert "last-0: the pod is the last ready pod of Service last" in drain()
    assert "last ready" not in drain("--force")
    set_ready("last-1", "True")
    assert "last ready" not in drain()
    set_ready("last-0", "False")
    set_ready("last-1", "False")
    assert "last ready" not in drain(), "it is out of service already"


def test_another_version_of_the_crds_is_said(kube: Kube, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CRD_VERSION", "v9")
    done = plimsoll(kube, "incidents")
    assert "on the cluster are v1alpha1, but this plimsoll command needs v9" in str(done.exception)
    monkeypatch.setattr(client, "API_GROUP", "absent.dev")
    assert "absent.dev are not installed" in str(plimsoll(kube, "incidents").exception)


def test_an_api_server_that_is_away_is_said(kube: Kube, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = yaml.safe_load(kube.kubeconfig.read_text())
    config["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{port}"
    target = tmp_path / "kubeconfig"
    target.write_text(yaml.safe_dump(config))
    for command in (["incidents"], ["top"], ["explain", "x"], ["trim", "x", "--yes"]):
        done = plimsoll(kube, *command, kubeconfig=target)
        assert isinstance(done.exception, RunError), done.output
        assert "127.0.0.1" in str(done.exception)
    assert plimsoll(kube, "doctor", kubeconfig=target).exit_code == 1
    absent = plimsoll(kube, "top", kubeconfig=tmp_path / "absent")
    assert "does not exist" in str(absent.exception)
