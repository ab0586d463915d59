"""config/: what the operator may do is what it does and what it grants.

Tests ``config/rbac.yaml`` and ``config/operator.yaml``.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml

from plimsoll_operator import main
from plimsoll_operator.config import parse_config
from plimsoll_operator.kinds import OWNED_KINDS, WATCHED_KINDS
from plimsoll_operator.plans.service import parse_service as parse_service
from plimsoll_operator.render.objects import make_role
from plimsoll_operator.runtime.watches import make_settings

ROOT = Path(__file__).parents[3]


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "config" / name).read_text()))


def permissions(rules: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


CLUSTER_ROLE = permissions(
    next(one for one in documents("rbac.yaml") if one["kind"] == "ClusterRole")["rules"]
)


def test_the_operator_may_grant_what_it_grants() -> None:
    service = parse_service(
        {
            "apiVersion": "plimsoll.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "a"},
            "spec": {"model": {"uri": "file:///m"}},
        }
    )
    assert permissions(make_role(service)["rules"]) <= CLUSTER_ROLE


def test_it_may_watch_and_keep_its_kinds_and_nothing_else() -> None:
    needed = {
        (kind.group, kind.plural, verb) for kind in WATCHED_KINDS for verb in ("list", "watch")
    }
    needed |= {
        (kind.group, kind.plural, verb)
        for kind in OWNED_KINDS
        for verb in ("get", "create", "patch", "delete")
    }
    needed |= {("", "events", verb) for verb in ("list", "create", "patch")}
    assert needed <= CLUSTER_ROLE
    assert not any("*" in part for one in CLUSTER_ROLE for part in one)
    assert not any(resource == "secrets" for _, resource, _ in CLUSTER_ROLE)


def test_the_deployment_runs_the_command_line_that_exists() -> None:
    container = documents("operator.yaml")[0]["spec"]["template"]["spec"]["containers"][0]
    config = parse_config(container["args"], environ={})
    assert config.namespaces == ()
    assert config.http_port == container["ports"][0]["containerPort"]
    assert config.lease == ("plimsoll-system", "plimsoll-operator"), "two never work at once"
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_the_watches_are_narrowed_by_the_server() -> None:
    selectors = make_settings().watching.label_selectors
    assert len(selectors) == len([kind for kind in WATCHED_KINDS if kind.selector])
    assert make_settings().posting.enabled is False


def test_namespaces_come_from_flags_or_the_environment() -> None:
    assert parse_config(["run", "--namespace", "b", "--namespace", "a"], {}).namespaces == (
        "a",
        "b",
    )
    assert parse_config(["run"], {"PLIMSOLL_NAMESPACES": "x,y"}).namespaces == ("x", "y")
    assert parse_config(["run", "--all-namespaces"], {"PLIMSOLL_NAMESPACES": "x"}).namespaces == ()


def test_the_log_warns_where_no_admission_policy_bounds_what_pods_write(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flags = ["run", "--kubeconfig", str(tmp_path / "none"), "--without-admission-policies"]
    for given, warned in ((flags, True), (flags[:-1], False)):
        caplog.clear()
        with pytest.raises(OSError, match="kubeconfig"):
            asyncio.run(main.run(parse_config(given, {}), asyncio.Event()))
        assert ("admission policies of Plimsoll are not installed" in caplog.text) is warned
