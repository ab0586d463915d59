"""The chart, rendered and linted by Helm itself: no cluster is needed for that.

Tests ``charts/plimsoll/Chart.yaml``.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from plimsoll_cli.cluster.doctor import MIN_KUBERNETES_MINOR
from plimsoll_cli.main import app
from plimsoll_operator import config
from tests.lab import binaries

ROOT = Path(__file__).parents[3]
CHART = ROOT / "charts" / "plimsoll"
MONITORING = "--api-versions=monitoring.coreos.com/v1"


def run(helm: str, *flags: str, values: dict[str, Any] | None = None) -> Any:
    command = [
        helm,
        "template",
        "plimsoll",
        str(CHART),
        "--namespace=sys",
        f"--kube-version={binaries.VERSION}",
    ]
    return subprocess.run(
        [*command, *flags, "--values=-"],
        input=json.dumps(values or {}),
        capture_output=True,
        text=True,
        timeout=60,
    )


def rendered(helm: str, *flags: str, values: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    done = run(helm, *flags, values=values)
    assert done.returncode == 0, done.stderr
    return [item for item in yaml.safe_load_all(done.stdout) if item]


def of(items: list[dict[str, Any]], kind: str, name: str = "plimsoll") -> dict[str, Any]:
    (found,) = [i for i in items if i["kind"] == kind and i["metadata"]["name"] == name]
    return found


def kinds(items: list[dict[str, Any]]) -> set[str]:
    return {item["kind"] for item in items}


def test_what_the_chart_takes_from_elsewhere_is_current() -> None:
    command = [sys.executable, str(ROOT / "charts" / "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_it_lints(helm: str) -> None:
    done = subprocess.run(
        [helm, "lint", "--strict", str(CHART)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"replica": 2}, "replica"),
        ({"replicas": 0}, "replicas"),
        ({"replicas": "two"}, "replicas"),
        ({"crds": {"enable": True}}, "crds"),
        ({"clusterObjects": "None"}, "clusterObjects"),
        ({"images": {"digests": {"engine": "latest"}}}, "engine"),
        ({"images": {"digests": {"probe": ""}}}, "probe"),
        ({"images": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
        ({"namespaces": ["Not_A_Name"]}, "namespaces"),
        ({"podTemplate": {"unrestrictedNamespaces": ["Not_A_Name"]}}, "unrestrictedNamespaces"),
        ({"serviceMonitor": {"interval": "soon"}}, "interval"),
        ({"extraArgs": ["workers=2"]}, "extraArgs"),
        ({"logLevel": "LOUD"}, "logLevel"),
        ({"webhook": {"port": 443}}, "port"),
        ({"webhook": {"issuerRef": {"kind": "Secret"}}}, "kind"),
        ({"rules": {"runbooks": "wiki/plimsoll"}}, "runbooks"),
        ({"serviceAccount": {"create": False}}, "serviceAccount.name must name"),
    ],
)
def test_bad_values_are_refused_by_their_name(helm: str, values: dict[str, Any], said: str) -> None:
    done = run(helm, values=values)
    assert done.returncode != 0
    assert said in done.stderr


def test_pods_satisfy_the_restricted_standard(helm: str) -> None:
    items = rendered(helm)
    specs = [of(items, "Deployment")["spec"]["template"]["spec"]]
    specs.append(of(items, "Pod", "plimsoll-test")["spec"])
    for spec in specs:
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True


def test_openshift_assigns_the_user_of_the_operators_pods(helm: str) -> None:
    """Its constraint restricted-v2 refuses a pod that names a user outside the namespace's range;
    elsewhere, the kubelet admits runAsNonRoot only if the image's own user is a number."""
    items = rendered(helm)
    plain = yaml.safe_load((ROOT / "config" / "operator.yaml").read_text())
    pods = [of(items, "Deployment")["spec"]["template"], plain["spec"]["template"]]
    for pod in (*pods, of(items, "Pod", "plimsoll-test")):
        contexts = [pod["spec"], *pod["spec"]["containers"]]
        fields = {field for one in contexts for field in one["securityContext"]}
        assert not fields & {"runAsUser", "runAsGroup", "fsGroup", "supplementalGroups"}
    stage = (ROOT / "Dockerfile").read_text().partition(" AS operator\n")[2]
    user = re.search(r"^USER (\S+)$", stage, re.M)
    assert user is not None
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user[1])


def test_the_plain_manifests_and_the_chart_give_the_same_rights(helm: str) -> None:
    plain = yaml.safe_load_all((ROOT / "config" / "rbac.yaml").read_text())
    rules = next(one for one in plain if one["kind"] == "ClusterRole")["rules"]
    assert of(rendered(helm), "ClusterRole")["rules"] == rules


@pytest.mark.parametrize("image", ["registry.example/probe:1", None])
def test_an_image_of_the_probe_reaches_the_operator(helm: str, image: str | None) -> None:
    from plimsoll_operator.config import parse_config

    items = rendered(helm, values={"images": {"probe": image or ""}})
    container = of(items, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    assert parse_config(container["args"], environ={}).images.probe == image


def test_what_supervisors_get_by_default_reaches_the_operator(helm: str) -> None:
    from plimsoll_operator.config import parse_config

    amounts = {"limits": {"cpu": "1", "memory": "512Mi"}, "requests": {"cpu": "100m"}}
    supervisor = {"imagePullSecrets": [{"name": "hub"}, {"name": "own"}], "resources": amounts}
    items = rendered(helm, values={"supervisor": supervisor})
    container = of(items, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    images = parse_config(container["args"], environ={}).images
    assert images.pull_secrets == ("hub", "own")
    assert images.resources.model_dump() == amounts
    plain = of(rendered(helm), "Deployment")["spec"]["template"]["spec"]["containers"][0]
    assert not any("--supervisor-" in one for one in plain["args"] if "image" not in one)


def test_amounts_may_be_numbers_and_have_any_suffix(helm: str) -> None:
    from plimsoll_operator.config import parse_config

    amounts = {
        "limits": {"cpu": 1.5, "memory": 1 << 30},
        "requests": {"cpu": 0.5, "memory": "64e6"},
    }
    download = {"resources": {"limits": {"memory": "2000000k"}}}
    values = {"supervisor": {"resources": amounts}, "modelDownload": download, "resources": amounts}
    container = of(rendered(helm, values=values), "Deployment")["spec"]["template"]["spec"][
        "containers"
    ][0]
    images = parse_config(container["args"], environ={}).images
    assert images.resources.limits == {"cpu": "1.5", "memory": "1073741824"}
    assert images.resources.requests == {"cpu": "0.5", "memory": "64e6"}
    assert images.download.limits == {"memory": "2000000k"}
    refused = run(helm, values={"supervisor": {"resources": {"limits": {"memory": "500K"}}}})
    assert "/supervisor/resources/limits/memory" in refused.stderr


def test_names_that_yaml_takes_for_other_values_stay_names(helm: str) -> None:
    from plimsoll_operator.config import parse_config

    names = ["2026", "no", "null", "1e3"]
    values = {
        "namespaces": names, "priorityClassName": "7", "serviceAccount": {"name": "123"},
        "webhook": {"enabled": True}, "keptIncidents": 1_000_000, "api": {"qps": 2_000_000},
    }  # fmt: skip
    items = rendered(helm, "--namespace=1", values=values)
    found = [one for one in items if one["kind"] == "Role"]
    assert {one["metadata"]["namespace"] for one in found} == {*names, "1"}
    for one in items:
        meta = one["metadata"]
        texts = [meta["name"], meta.get("namespace", ""), *meta.get("labels", {}).values()]
        texts += [part for who in one.get("subjects", ()) for part in who.values()]
        assert all(isinstance(text, str) for text in texts), texts
    pod = of(items, "Deployment")["spec"]["template"]["spec"]
    assert (pod["priorityClassName"], pod["serviceAccountName"]) == ("7", "123")
    config = parse_config(pod["containers"][0]["args"], environ={})
    assert (config.kept_incidents, config.qps) == (1_000_000, 2_000_000)


def test_named_namespaces_get_roles_and_nothing_wider(helm: str) -> None:
    items = rendered(helm, values={"namespaces": ["a", "b"], "rbac": {"aggregate": False}})
    assert not kinds(items) & {"ClusterRole", "ClusterRoleBinding"}
    roles = [i["metadata"]["namespace"] for i in items if i["kind"] == "Role"]
    assert sorted(roles) == ["a", "b", "sys"]
    (role,) = [i for i in items if i["kind"] == "Role" and i["metadata"]["namespace"] == "a"]
    wide = of(rendered(helm), "ClusterRole")["rules"]
    left_out = [rule for rule in wide if rule not in role["rules"]]
    assert [rule["resources"] for rule in left_out] == [["resourceslices"]], "not in a namespace"
    assert len(role["rules"]) == len(wide) - 1
    container = of(items, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    assert {"--namespace=a", "--namespace=b"} <= set(container["args"])


class UniqueKeys(yaml.SafeLoader):
    """Loader that refuses a key that a mapping has twice, as Helm does when it installs."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"{node.start_mark}: {keys}"
        return super().construct_mapping(node, deep)


def test_labels_that_repeat_the_charts_own_do_not_replace_them(helm: str) -> None:
    labels = {"app.kubernetes.io/name": "other", "helm.sh/chart": "other", "team": "a"}
    given = {"enabled": True, "labels": labels}
    names = ("rules", "dashboards", "serviceMonitor")
    done = run(helm, MONITORING, values=dict.fromkeys(names, given) | {"podLabels": labels})
    assert done.returncode == 0, done.stderr
    items = [item for item in yaml.load_all(done.stdout, UniqueKeys) if item]
    deployment = of(items, "Deployment")
    pod = deployment["spec"]["template"]["metadata"]["labels"]
    assert pod.items() >= deployment["spec"]["selector"]["matchLabels"].items()
    assert pod == deployment["metadata"]["labels"] | {"team": "a"}
    for kind in ("PrometheusRule", "ServiceMonitor"):
        assert of(items, kind)["metadata"]["labels"] == pod
    boards = [i for i in items if i["kind"] == "ConfigMap" and "team" in i["metadata"]["labels"]]
    assert boards
    for board in boards:
        assert board["metadata"]["labels"].items() >= pod.items()


def test_the_command_line_is_one_that_the_operator_takes(helm: str) -> None:
    from plimsoll_operator.config import parse_config

    items = rendered(helm, values={"namespaces": ["a"], "extraArgs": ["--workers=3"]})
    container = of(items, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    config = parse_config(container["args"], environ={})
    assert config.lease == ("sys", "plimsoll")
    assert config.workers == 3
    assert config.http_port == container["ports"][0]["containerPort"]


def test_an_opened_namespace_is_open_for_policy_and_operator(helm: str) -> None:
    from plimsoll_operator.config import parse_config

    items = rendered(helm, values={"podTemplate": {"unrestrictedNamespaces": ["lab"]}})
    kind, name = "ValidatingAdmissionPolicyBinding", "restricted-pod-templates.plimsoll.dev"
    apart = {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": ["lab"]}
    bound = of(items, kind, name)["spec"]
    assert bound["matchResources"] == {"namespaceSelector": {"matchExpressions": [apart]}}
    assert bound["validationActions"] == ["Deny"]
    container = of(items, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    config = parse_config(container["args"], environ={})
    assert config.unrestricted_namespaces == frozenset({"lab"})
    assert "matchResources" not in of(rendered(helm), kind, name)["spec"]


def test_monitoring_is_made_where_its_api_is(helm: str) -> None:
    asked = {"serviceMonitor": {"enabled": True}, "rules": {"enabled": True}}
    wanted = {"ServiceMonitor", "PrometheusRule"}
    assert not kinds(rendered(helm, values=asked)) & wanted
    assert kinds(rendered(helm, MONITORING, values=asked)) >= wanted
    assert not kinds(rendered(helm, MONITORING)) & wanted


def test_alerts_link_to_where_pages_and_dashboards_are_published(helm: str) -> None:
    asked = {
        "enabled": True,
        "runbooks": "https://wiki.example/plimsoll/",
        "grafana": "https://g.example",
    }
    items = rendered(helm, MONITORING, values={"rules": asked})
    rules = of(items, "PrometheusRule")["spec"]["groups"][0]["rules"]
    for rule in rules:
        notes = rule["annotations"]
        assert notes["runbook_url"] == f"https://wiki.example/plimsoll/{rule['alert']}.md"
        assert notes["dashboard"].startswith("https://g.example/d/plimsoll-")


def test_toggles(helm: str) -> None:
    items = rendered(helm)
    assert {"ValidatingAdmissionPolicy", "CustomResourceDefinition"} <= kinds(items)
    assert not {"NetworkPolicy", "PodDisruptionBudget"} & kinds(items)
    for crd in (item for item in items if item["kind"] == "CustomResourceDefinition"):
        assert crd["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    off = {
        "crds": {"enabled": False},
        "admissionPolicy": {"enabled": False},
        "networkPolicy": {"enabled": True},
        "replicas": 2,
    }
    (operator,) = of(items, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert "--without-admission-policies" not in operator["args"]
    items = rendered(helm, values=off)
    (operator,) = of(items, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert "--without-admission-policies" in operator["args"], "its log warns of that"
    assert not {"ValidatingAdmissionPolicy", "CustomResourceDefinition"} & kinds(items)
    assert {"NetworkPolicy", "PodDisruptionBudget"} <= kinds(items)
    mortal = rendered(helm, values={"crds": {"keep": False}})
    crds = [item for item in mortal if item["kind"] == "CustomResourceDefinition"]
    assert not any("annotations" in crd["metadata"] for crd in crds)


ONCE = {"CustomResourceDefinition", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}


def test_what_a_cluster_has_once_is_installed_with_without_or_apart(helm: str) -> None:
    named = {"namespaces": ["a"], "replicas": 2, "webhook": {"enabled": False}}
    assert kinds(rendered(helm, values=named)) >= {*ONCE, "Deployment", "ClusterRole"}
    without = kinds(rendered(helm, values=named | {"clusterObjects": "Exclude"}))
    assert not without & {*ONCE, "ClusterRole", "ClusterRoleBinding"}
    assert "Deployment" in without
    apart = rendered(helm, values=named | {"clusterObjects": "Only", "webhook": {"enabled": True}})
    assert kinds(apart) == {*ONCE, "ClusterRole"}


def test_a_digest_wins_over_a_tag(helm: str) -> None:
    digest = f"sha256:{'a' * 64}"
    images = {"tag": "x", "registry": "registry.example/team/", "digests": {"operator": digest}}
    items = rendered(helm, values={"images": images})
    container = of(items, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == f"registry.example/team/plimsoll-operator@{digest}"
    assert "--supervisor-image=registry.example/team/plimsoll-supervisor:x" in container["args"]


def test_chart_dockerfile_manifests_and_operator_name_the_same_images(helm: str) -> None:
    """The chart once pulled an image by a name that nothing built."""
    container = of(rendered(helm), "Deployment")["spec"]["template"]["spec"]["containers"][0]
    images = config.parse_config(container["args"], environ={}).images
    assert (images.engine, images.supervisor) == (
        config.DEFAULT_IMAGES.engine,
        config.DEFAULT_IMAGES.supervisor,
    )
    chart = {container["image"], images.engine, images.supervisor}
    targets = re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "Dockerfile").read_text(), re.M)
    for image in chart:
        name, _, tag = image.partition(":")
        assert name.removeprefix("plimsoll-") in targets
        assert tag == version("plimsoll")
    kustomization = yaml.safe_load((ROOT / "config" / "kustomization.yaml").read_text())
    assert {f"{one['name']}:{one['newTag']}" for one in kustomization["images"]} == chart


def test_the_page_of_the_fleet_is_off_by_default(helm: str) -> None:
    for values, served in ((None, False), ({"fleetPage": {"enabled": True}}, True)):
        items = rendered(helm, values=values)
        (operator,) = of(items, "Deployment")["spec"]["template"]["spec"]["containers"]
        assert ("--fleet-page" in operator["args"]) is served


def test_the_webhook_is_off_by_default(helm: str) -> None:
    items = rendered(helm)
    assert "MutatingWebhookConfiguration" not in kinds(items)
    (operator,) = of(items, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert not any("webhook" in flag for flag in operator["args"])


def test_the_webhook_has_objects_and_just_the_rights_on_them(helm: str) -> None:
    values = {"webhook": {"enabled": True, "port": 10443}, "networkPolicy": {"enabled": True}}
    items = rendered(helm, values=values)
    (operator,) = of(items, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert "--webhook=sys/plimsoll-webhook" in operator["args"]
    assert "--webhook-port=10443" in operator["args"]
    assert {"name": "webhook", "containerPort": 10443} in operator["ports"]
    assert "webhooks" not in of(items, "MutatingWebhookConfiguration", "plimsoll-webhook")
    assert "data" not in of(items, "Secret", "plimsoll-webhook")
    assert of(items, "Service", "plimsoll-webhook")["spec"]["ports"][0]["targetPort"] == "webhook"
    (rule,) = of(items, "Role", "plimsoll-webhook")["rules"]
    assert rule["resourceNames"] == ["plimsoll-webhook"]
    assert rule["verbs"] == ["get", "create", "patch"]
    configuration, *rest = of(items, "ClusterRole", "plimsoll-webhook")["rules"]
    assert configuration["resourceNames"] == ["plimsoll-webhook"]
    rollouts = {
        "apiGroups": ["apps"],
        "resources": ["deployments", "statefulsets", "daemonsets"],
        "verbs": ["get", "patch"],
    }
    reads = [
        {"apiGroups": [group], "resources": [plural], "verbs": [verb]}
        for group, plural, verb in (
            ("", "events", "watch"),
            ("apps", "replicasets", "get"),
            ("batch", "jobs", "get"),
            ("", "replicationcontrollers", "get"),
            ("ray.io", "rayclusters", "get"),
        )
    ]
    assert rest == [rollouts, *reads]
    assert not any(one["metadata"]["name"] == "plimsoll-webhook-rollout" for one in items)
    # With a list of namespaces, only there.
    items = rendered(helm, values=values | {"namespaces": ["ml", "web"]})
    assert len(of(items, "ClusterRole", "plimsoll-webhook")["rules"]) == 1
    granted = [
        one
        for one in items
        if one["kind"] == "Role" and one["metadata"]["name"] == "plimsoll-webhook-rollout"
    ]
    assert [one["metadata"]["namespace"] for one in granted] == ["ml", "web"]
    assert all(one["rules"] == rest for one in granted)
    assert "Certificate" not in kinds(items)
    ports = [one["ports"][0]["port"] for one in of(items, "NetworkPolicy")["spec"]["ingress"]]
    assert ports == ["http", "webhook"]


def test_cert_manager_writes_the_webhooks_secret(helm: str) -> None:
    items = rendered(helm, values={"webhook": {"enabled": True, "certManager": True}})
    certificate = of(items, "Certificate", "plimsoll-webhook")["spec"]
    assert certificate["secretName"] == "plimsoll-webhook"
    assert certificate["dnsNames"] == ["plimsoll-webhook.sys.svc"]
    assert (
        certificate["issuerRef"]["name"]
        == of(items, "Issuer", "plimsoll-webhook")["metadata"]["name"]
    )
    assert "Secret" not in kinds(items)
    (operator,) = of(items, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert "--webhook-certificate-provided" in operator["args"]
    (rule,) = of(items, "Role", "plimsoll-webhook")["rules"]
    assert rule["verbs"] == ["get"]
    issuer = {"name": "ours", "kind": "ClusterIssuer"}
    given = {"enabled": True, "certManager": True, "issuerRef": issuer}
    items = rendered(helm, values={"webhook": given})
    assert "Issuer" not in kinds(items)
    assert of(items, "Certificate", "plimsoll-webhook")["spec"]["issuerRef"] == issuer


EVERY_FLAG = {
    "fleetPage": {"enabled": True},
    "images": {"probe": "probe:1"},
    "namespaces": ["ml"],
    "podTemplate": {"unrestrictedNamespaces": ["open"]},
    "supervisor": {"imagePullSecrets": [{"name": "s"}], "resources": {"limits": {"cpu": "1"}}},
    "modelDownload": {"resources": {"limits": {"memory": "4Gi"}}},
    "webhook": {"enabled": True, "certManager": True, "url": "https://hook.example/pods"},
    "intervals": {"clocks": {"canary": 1.5}},
    "admissionPolicy": {"enabled": False},
}
NO_VALUE = {"--help", "--kubeconfig", "--all-namespaces"}
"""The pod's own account and all namespaces are the defaults."""


def test_each_flag_of_the_operator_has_a_value(helm: str) -> None:
    deployment = of(rendered(helm, values=EVERY_FLAG), "Deployment")
    arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    (commands,) = [one for one in config._create_parser({})._actions if one.choices]
    assert commands.choices is not None
    flags = {
        flag
        for one in dict(commands.choices)["run"]._actions
        for flag in one.option_strings
        if flag.startswith("--")
    }
    assert {one.partition("=")[0] for one in arguments[1:]} == flags - NO_VALUE
    assert config.parse_config(arguments, {}).intervals.canary == 1.5


def test_the_chart_has_the_defaults_of_the_operator(helm: str) -> None:
    deployment = of(rendered(helm), "Deployment")
    arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    found, wanted = config.parse_config(arguments, {}), config.parse_config(["run"], {})
    differs = {
        one.name for one in fields(found) if getattr(found, one.name) != getattr(wanted, one.name)
    }
    assert differs == {"lease", "identity"}
    assert (found.qps, found.burst) == (50, 100)


def test_the_policy_on_the_operators_account_is_of_its_release(helm: str) -> None:
    values = {"webhook": {"enabled": True, "url": "https://hook.example/pods"}}
    items = rendered(helm, values=values)
    name = "account-of-plimsoll.sys.plimsoll.dev"
    spec = of(items, "ValidatingAdmissionPolicy", name)["spec"]
    assert of(items, "ValidatingAdmissionPolicyBinding", name)["spec"]["policyName"] == name
    (account,) = spec["matchConditions"]
    assert account["expression"].endswith("== 'system:serviceaccount:sys:plimsoll'")
    variables = {one["name"]: one["expression"] for one in spec["variables"]}
    assert variables["lease"] == "'sys/plimsoll'"
    assert variables["webhook"] == "'sys/plimsoll-webhook'"
    assert variables["webhookUrl"] == "'https://hook.example/pods'"
    assert "'plimsoll-operator'" in variables["ours"], "the label is the same everywhere"


def test_the_examples_on_artifact_hub_are_valid(tmp_path: Path) -> None:
    annotations = yaml.safe_load((CHART / "Chart.yaml").read_text())["annotations"]
    examples = yaml.safe_load(annotations["artifacthub.io/crdsExamples"])
    file = tmp_path / "examples.yaml"
    file.write_text(yaml.safe_dump_all(examples))
    done = CliRunner().invoke(app, ["validate", str(file)])
    assert done.exit_code == 0, done.output
    kinds = {one["kind"] for one in yaml.safe_load(annotations["artifacthub.io/crds"])}
    assert kinds == {*(one["kind"] for one in examples), "LeakIncident"}
    assert yaml.safe_load(annotations["artifacthub.io/links"])


def test_chart_doctor_and_pages_name_the_same_oldest_kubernetes() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">=1.{MIN_KUBERNETES_MINOR}.0-0"
    for page in ("README.md", "docs/quickstart.md", "docs/adopt.md"):
        told = set(re.findall(r"Kubernetes 1\.(\d+) or later", (ROOT / page).read_text()))
        assert told == {str(MIN_KUBERNETES_MINOR)}, page
