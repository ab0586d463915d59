"""An incident's story, and how tables and pictures behave on small and plain terminals."""

from __future__ import annotations

import io
import json
import re
import sys
from typing import Any

import pytest
import yaml
from rich.console import Console

from plimsoll_api.fleet_row import make_policy_row, make_service_row, sort_rows_worst_first
from plimsoll_api.incident_record import Reason
from plimsoll_api.incidents import IncidentKind, WaitReason
from plimsoll_cli import explain, incidents
from plimsoll_cli.cluster.client import format_denied_message, get_required_rule
from plimsoll_cli.cluster.top import BudgetHistory, choose_columns, make_cells, render_frame
from plimsoll_cli.errors import UsageError
from plimsoll_cli.incident_view import IncidentView, UnreadableError, make_view_from_object
from plimsoll_cli.incidents import make_label_queries
from plimsoll_cli.output import (
    BAR_CHARACTERS,
    Output,
    draw_area_chart,
    draw_bar,
    draw_sparkline,
    format_value,
    make_console,
    print_table,
    print_value,
)

MIB = 1 << 20
INCIDENT: dict[str, Any] = {
    "metadata": {"name": "leaky-0-1a2b3c4d", "namespace": "default"},
    "spec": {
        "id": "leaky-0-1a2b3c4d", "workloadRef": {"kind": "InferenceService", "name": "leaky"},
        "pod": "leaky-0", "container": "engine", "epoch": "ab:1",
        "openedAt": "2026-01-01T00:00:00Z", "kind": "HostGrowth",
    },
    "status": {
        "phase": "Resolved", "outcome": "WorkerRestart", "consumedPercent": 104,
        "returnedBytes": 60 * MIB, "endedAt": "2026-01-01T00:00:28Z",
        "attribution": {
            "segment": "python_objects", "process": "worker", "bytes": 66 * MIB,
            "bytesPerHour": 1 << 30, "bytesPerRequest": 2 * MIB, "confidencePercent": 97,
            "evidence": ["66.0 MiB in 30 s at comparable load"],
        },
        "diagnostics": ["diagnostics/x/stacks.txt", "diagnostics/x/gc.txt"],
        "timeline": [
            {"time": "2026-01-01T00:00:05Z", "step": "Trim", "outcome": "Succeeded",
             "beforeBytes": 400 * MIB, "afterBytes": 398 * MIB, "message": "gc 0.1 s"},
            {"time": "2026-01-01T00:00:15Z", "step": "WorkerRestart", "outcome": "Succeeded",
             "beforeBytes": 410 * MIB, "afterBytes": 350 * MIB, "message": "8 requests carried"},
        ],
    },
}  # fmt: skip


def text(incident: IncidentView, width: int = 100, plain: bool = False) -> str:
    return "\n".join(line.plain for line in explain.format_lines(incident, width, plain))


def test_the_story_says_what_grew_what_was_tried_and_what_came_back() -> None:
    story = text(make_view_from_object(INCIDENT))
    for part in (
        "Resolved (WorkerRestart)", "host memory grew", "default/leaky", "after 28 s",
        "66.0 MiB in python_objects of the worker", "2.0 MiB a request", "104 %",
        "+5 s", "Trim", "400 MiB -> 398 MiB (2.0 MiB back)", "410 MiB -> 350 MiB (60.0 MiB back)",
        "8 requests carried", "Freed: 60.0 MiB", "Saved in diagnostics/x: stacks.txt, gc.txt",
        "What next: report the leak",
    ):  # fmt: skip
        assert part in story, f"{part!r} is not in:\n{story}"
    assert set(BAR_CHARACTERS) & set(story)
    assert "410 MiB │" in story
    assert "350 MiB │" in story


def test_a_narrow_or_plain_terminal_gets_shorter_lines_and_ascii() -> None:
    story = text(make_view_from_object(INCIDENT), width=40, plain=True)
    steps = [line for line in story.splitlines() if line.startswith("  +")]
    assert len(steps) == 2
    assert all(len(line) <= 40 and line.endswith("...") for line in steps)
    assert story.isascii()


def test_an_incident_without_status_is_shown_as_open() -> None:
    incident = make_view_from_object({key: INCIDENT[key] for key in ("metadata", "spec")})
    assert "No action has been tried yet" in text(incident)
    assert "What next: wait" in text(incident)


def test_an_object_of_another_shape_is_named() -> None:
    with pytest.raises(UnreadableError, match="LeakIncident x"):
        make_view_from_object({"metadata": {"name": "x"}, "spec": {"pod": 3}})


def test_every_ending_wait_and_kind_says_what_to_do() -> None:
    told_by_operator = {"ContainerRestarted", "Recovered", "PodReplaced", "PodGone"}
    assert {reason.value for reason in Reason} | told_by_operator <= set(explain.NEXT_STEPS)
    assert {reason.value for reason in WaitReason} == set(explain.NEXT_STEPS_WHILE_WAITING)
    assert {kind.value for kind in IncidentKind} == set(explain.PROBLEMS_BY_KIND)


@pytest.mark.parametrize("reason", sorted(set(Reason) - {Reason.SLOT_TIMEOUT}))
def test_an_incident_of_this_machine_needs_no_cluster(reason: Reason) -> None:
    """Restart slots alone, and so the end of a wait for one, are a cluster's."""
    item = INCIDENT | {"metadata": {"name": "vllm-8000-1a2b3c4d"}}
    incident = make_view_from_object(
        item | {"status": {"phase": "Resolved", "outcome": reason.value}}
    )
    told = explain.choose_next_step(incident)
    assert "kubectl" not in told
    assert not re.search(r"plimsoll (resume|restart) (?!\S+ --local)", told)


def test_a_wait_names_its_reason_and_not_another_replica() -> None:
    status = {
        "phase": "AwaitingSlot",
        "waitingReason": "ServiceRestartBudgetExhausted",
        "message": "the service had 3 restarts within 3600 s; the limit is 3",
    }
    story = text(make_view_from_object(INCIDENT | {"status": status}))
    assert "Now: the service had 3 restarts within 3600 s; the limit is 3" in story
    assert "plimsoll resume leaky-0 --service" in story
    assert "another replica" not in story


@pytest.mark.parametrize("kind", list(IncidentKind))
def test_every_kind_that_exists_can_be_listed(kind: IncidentKind) -> None:
    wanted = incidents.IncidentFilter(kind=kind.value)
    wanted.validate()
    incident = make_view_from_object(INCIDENT | {"spec": {**INCIDENT["spec"], "kind": kind.value}})
    assert incidents.select_newest_incidents([incident], wanted, None) == [incident]
    assert explain.choose_next_step(incident)


def test_a_kind_that_does_not_exist_is_answered_with_those_that_do() -> None:
    with pytest.raises(UsageError) as caught:
        incidents.IncidentFilter(kind="Crash").validate()
    for kind in IncidentKind:
        assert kind.value in str(caught.value)


def test_objects_round_trip_as_json_and_yaml() -> None:
    value = incidents.make_incident_object(make_view_from_object(INCIDENT))
    assert isinstance(value["status"], dict)
    assert value["status"]["timeline"] == INCIDENT["status"]["timeline"]
    assert json.loads(format_value(value, Output.JSON)) == yaml.safe_load(
        format_value(value, Output.YAML)
    )
    assert make_view_from_object(value) == make_view_from_object(INCIDENT)


@pytest.mark.parametrize("output", [Output.JSON, Output.YAML])
def test_json_and_yaml_are_whole_in_a_locale_without_unicode(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin1")
    monkeypatch.setattr(sys, "stdout", out)
    print_value({"message": "\u6ca1\u6709 \U0001f600 \u202e"}, output)
    out.flush()
    printed = out.buffer.getvalue()
    read = json.loads if output is Output.JSON else yaml.safe_load
    assert read(printed) == {"message": "\u6ca1\u6709 \U0001f600 \u202e"}


def test_a_pipe_gets_whole_cells_without_colour() -> None:
    out = Console(file=io.StringIO(), width=20)
    incident = make_view_from_object(INCIDENT)
    print_table(
        incidents.choose_columns(True, True), [incidents.make_row(incident, True, True)], out
    )
    printed = out.file.getvalue()  # type: ignore[attr-defined]
    assert "leaky-0-1a2b3c4d" in printed
    assert "\x1b" not in printed
    assert len(printed.splitlines()) == 2


@pytest.mark.parametrize("terminal", [True, False])
def test_the_text_of_an_incident_cannot_write_to_the_terminal(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervised pod writes its incidents, and the reader may administer the cluster."""
    hostile = "worker\x1b]0;title\x07\x1b[2J\x9b31m\r\u202e"
    status = INCIDENT["status"] | {
        "phase": "Open",
        "message": hostile,
        "attribution": INCIDENT["status"]["attribution"] | {"process": hostile},
    }
    incident = make_view_from_object(INCIDENT | {"status": status})
    monkeypatch.setenv("TERM", "xterm")
    out = make_console()
    out.file = io.StringIO()
    out._force_terminal = terminal
    explain.print_story(incident, out, ascii_only=False)
    rows = [incidents.make_row(incident, True, True)]
    print_table(incidents.choose_columns(True, True), rows, out)
    printed = out.file.getvalue()
    assert "\\x1b]0;title" in printed
    own = re.sub(r"\x1b\[[0-9;]*m", "", printed)
    assert [one for one in own if not one.isprintable() and one != "\n"] == []


def test_filters_and_order() -> None:
    first = make_view_from_object(INCIDENT)
    later = make_view_from_object(
        INCIDENT
        | {"metadata": {"name": "b"}, "status": {"phase": "Confirmed"}}
        | {"spec": {**INCIDENT["spec"], "openedAt": "2026-02-01T00:00:00Z"}}
    )
    everything = [first, later]
    names = [
        incident.name
        for incident in incidents.select_newest_incidents(
            everything, incidents.IncidentFilter(), None
        )
    ]
    assert names == ["b", "leaky-0-1a2b3c4d"]
    assert incidents.select_newest_incidents(everything, incidents.IncidentFilter(), 1) == [later]
    assert incidents.select_newest_incidents(
        everything, incidents.IncidentFilter(open_only=True), None
    ) == [later]
    assert incidents.select_newest_incidents(
        everything, incidents.IncidentFilter(phase="Resolved"), None
    ) == [first]
    assert (
        incidents.select_newest_incidents(everything, incidents.IncidentFilter(target="x"), None)
        == []
    )
    with pytest.raises(Exception, match="--phase 'x': use one of Open"):
        incidents.IncidentFilter(phase="x").validate()


OF_POLICY: dict[str, Any] = {
    "metadata": {"name": "vllm-0-99", "namespace": "ml"},
    "spec": {
        "id": "vllm-0-1a2b3c4d", "pod": "vllm-0", "container": "server", "epoch": "ab:1",
        "openedAt": "2026-01-01T00:00:00Z", "kind": "HostGrowth", "policyRef": {"name": "engines"},
        "workloadRef": {"apiGroup": "apps", "kind": "Deployment", "name": "vllm"},
    },
    "status": {"phase": "AwaitingSlot", "waitingReason": "SlotHeld"},
}  # fmt: skip


def test_an_incident_of_a_policy_names_workload_and_policy() -> None:
    incident = make_view_from_object(OF_POLICY)
    story = text(incident)
    assert "Deployment ml/vllm (SupervisionPolicy engines), pod vllm-0" in story
    assert "kubectl get leases -l plimsoll.dev/policy=engines" in story
    failed = {**OF_POLICY, "status": {"phase": "Unresolved", "outcome": "Failed"}}
    assert "kubectl logs vllm-0 -c server" in text(make_view_from_object(failed))
    assert "deployment/vllm" in [str(cell) for cell in incidents.make_row(incident, False, False)]


def test_an_incident_of_a_group_names_the_group_and_the_pod_that_leaks() -> None:
    workload = {"kind": "LeaderWorkerSet", "name": "llama"}
    leak = {"segment": "anonymous_other", "bytes": 5 << 30, "pod": "llama-0-1"}
    spec = {
        **OF_POLICY["spec"], "workloadRef": workload, "podGroup": "0", "pod": "llama-0",
        "target": {"role": "Decode"},
    }  # fmt: skip
    status = {**OF_POLICY["status"], "attribution": leak}
    incident = make_view_from_object({**OF_POLICY, "spec": spec, "status": status})
    story = text(incident)
    assert "LeaderWorkerSet ml/llama, group 0 (SupervisionPolicy engines)" in story
    assert ", pod llama-0 (Decode), epoch" in story
    assert "Grew: 5.0 GiB in anonymous_other in pod llama-0-1" in story
    assert "in pod llama-0-1" in incident.story.headline


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vllm", True), ("engines", True), ("deployment/vllm", True), ("deploy/vllm", True),
        ("plsp/engines", True), ("pod/vllm-0", True), ("plinf/vllm", False), ("sts/vllm", False),
        ("vllm-0", False), ("plsp/vllm", False),
    ],
)  # fmt: skip
def test_incidents_are_found_by_workload_policy_or_pod(name: str, expected: bool) -> None:
    found = incidents.select_newest_incidents(
        [make_view_from_object(OF_POLICY)], incidents.IncidentFilter(name), None
    )
    assert bool(found) is expected
    assert all("labelSelector" in one for one in make_label_queries(name)) is (name != "pod/vllm-0")


@pytest.mark.parametrize("name", ["svc/x", "deployment/", "deployment/a/b"])
def test_a_target_of_another_form_is_an_error(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}: "):
        incidents.select_newest_incidents(
            [make_view_from_object(OF_POLICY)], incidents.IncidentFilter(name), None
        )


def test_small_pictures() -> None:
    assert draw_sparkline([]) == ""
    assert draw_sparkline([None]) == ""
    assert draw_sparkline([1, 1]) == "▁▁"
    assert draw_sparkline([0, None, 7]) == "▁ █"
    assert len(draw_sparkline(range(100), 10)) == 10
    assert draw_sparkline([0, 1], ascii_only=True).isascii()
    assert draw_bar(0.5, 4) == "██░░"
    assert draw_bar(None, 4, ascii_only=True) == "...."
    assert draw_bar(7.0, 4, ascii_only=True) == "####"


def test_a_plot_shows_rise_and_fall() -> None:
    assert draw_area_chart([(0, 1)], 8, 2, False) == []
    assert draw_area_chart([(1, 1), (1, 2)], 8, 2, False) == []
    rising = draw_area_chart([(0.0, 0.0), (7.0, 8.0)], 8, 1, False)
    assert rising == ["▁▂▃▄▅▆▇█"]
    fallen = draw_area_chart([(0.0, 1.0), (5.0, 4.0), (5.0, 1.0), (9.0, 1.0)], 10, 3, False)
    assert [len(line) for line in fallen] == [5, 5, 10]
    assert all(line.isascii() for line in draw_area_chart([(0, 1), (3, 2)], 9, 3, True))
    flat = draw_area_chart([(0, 5), (3, 5)], 6, 2, False)
    assert len(set(flat)) <= 2, "no change is a plain block"


SERVICE = {
    "metadata": {"name": "qwen", "namespace": "ml"},
    "spec": {"replicas": 2, "supervision": {"mode": "Recover"}},
    "status": {
        "readyReplicas": 1, "restarts": 3, "openIncidents": 1,
        "memory": {"hostConsumedPercent": 55, "replica": "qwen-1"},
        "conditions": [{"type": "Ready", "status": "False", "reason": "EngineStarting"}],
    },
}  # fmt: skip


def test_top_puts_the_worst_first_and_shows_what_fits() -> None:
    bad, new = (
        make_service_row(SERVICE),
        make_service_row({"metadata": {"name": "a", "namespace": "ml"}}),
    )
    assert (bad.host, bad.device, bad.state, bad.consumed_percent) == (
        55,
        None,
        "EngineStarting",
        55,
    )
    assert (new.host, new.state, new.mode) == (None, "Unknown", "Observe")
    assert sort_rows_worst_first([new, bad]) == [bad, new]
    history = BudgetHistory()
    history.add([bad, new])
    assert "TREND" in choose_columns(False, 120)
    assert "TREND" not in choose_columns(False, 80)
    plain = [str(cell) for cell in make_cells(bad, history, True, 120, True)]
    assert plain[:6] == ["ml/qwen", "InferenceService", "1/2", "######....", "*", "55%"]
    assert "TREND" not in choose_columns(False, 120, trend=False)
    once = make_cells(bad, None, False, 120, True)
    assert len(once) == len(choose_columns(False, 120, trend=False))
    for width in (40, 80, 200):
        out = Console(file=io.StringIO(), width=width, force_terminal=True)
        out.print(render_frame([bad, new], history, True, out))
        lines = out.file.getvalue().splitlines()  # type: ignore[attr-defined]
        assert len(lines) == 5
    out = Console(file=io.StringIO(), width=60, force_terminal=True, color_system=None)
    out.print(render_frame([bad, new], history, False, out))
    narrow = out.file.getvalue().splitlines()[2:]  # type: ignore[attr-defined]
    assert narrow[0].split() == ["NAME", "HOST%", "DEVICE%", "INCIDENTS", "STATE"]
    assert narrow[1].split() == ["ml/qwen", "55%", "?", "1", "EngineStarting"]


def test_a_long_name_hides_no_figure() -> None:
    row = make_service_row(SERVICE | {"metadata": {"name": "embeddings-" * 5, "namespace": "team"}})
    history = BudgetHistory()
    history.add([row])
    for width in (45, 60, 80, 100, 120, 140):
        out = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
        out.print(render_frame([row], history, False, out))
        head, line = out.file.getvalue().splitlines()[2:]  # type: ignore[attr-defined]
        assert "HOST%" in head
        assert "55%" in line
        assert "EngineStarting" in line
        assert "…" not in head


POLICY: dict[str, Any] = {
    "metadata": {"name": "qwen", "namespace": "ml"},
    "spec": {"selector": {"matchLabels": {"app": "vllm"}}},
    "status": {
        "selected": 3, "supervised": 2, "openIncidents": 2,
        "memory": {"hostConsumedPercent": 70, "replica": "vllm-0"},
        "workloads": [{"name": "p", "roles": ["Prefill"]}, {"name": "d", "roles": ["Decode"]}, {}],
        "conditions": [
            {"type": "Ready", "status": "True", "reason": "PartlySupervised"},
            {"type": "Conflicting", "status": "False", "reason": "NoConflict"},
        ],
    },
}  # fmt: skip


def test_top_names_a_slow_leak_of_what_is_ready() -> None:
    def state(row: Any, **conditions: str) -> str:
        found = [{"type": k, "status": v, "reason": k} for k, v in conditions.items()]
        return str(row({**SERVICE, "status": {"conditions": found}}).state)

    assert state(make_service_row, Ready="True", SlowLeak="True") == "SlowLeak"
    assert state(make_service_row, Ready="True", SlowLeak="Unknown") == "Ready"
    assert state(make_service_row, Ready="True", MemoryNearLimit="True") == "MemoryNearLimit"
    assert state(make_policy_row, Ready="True", MemoryNearLimit="True") == "MemoryNearLimit"
    for row in (make_service_row, make_policy_row):
        unseen = [
            {"type": "Ready", "status": "True", "reason": "Supervised"},
            {"type": "EngineObserved", "status": "False", "reason": "MetricsUnauthorized"},
        ]
        item = {**SERVICE, "status": {"conditions": unseen}}
        assert row(item).state == "MetricsUnauthorized"
    assert state(make_service_row, Ready="False", SlowLeak="True") == "Ready", (
        "its reason comes first"
    )
    assert state(make_policy_row, Ready="True", SlowLeak="True") == "SlowLeak"


def test_top_shows_what_a_person_drained() -> None:
    ready = {"type": "Ready", "status": "True", "reason": "ReplicasReady"}
    for drained, state in ((2, "Drained(2)"), (0, "Ready"), (None, "Ready")):
        status = {"conditions": [ready], "drained": drained}
        row = make_service_row({**SERVICE, "status": status})
        assert (row.state, row.drained) == (state, drained)
    assert make_policy_row({**POLICY, "status": {**POLICY["status"], "drained": 1}}).state == (
        "Drained(1)"
    )


def test_top_shows_policies_beside_services_of_the_same_name() -> None:
    service, policy = make_service_row(SERVICE), make_policy_row(POLICY)
    assert sort_rows_worst_first([service, policy]) == [policy, service]
    shown = [str(cell) for cell in make_cells(policy, None, True, 0, True)]
    assert shown == [
        "ml/qwen", "SupervisionPolicy", "2/3", "70%", "?", "?", "2", "PartlySupervised",
        "Observe", "Decode, Prefill", "vllm-0", "",
    ]  # fmt: skip
    history = BudgetHistory()
    history.add([service, policy])
    history.add([service])
    assert list(history.values) == [service.key], "the policy is gone, the service stays"
    new = make_policy_row({"metadata": {"name": "new", "namespace": "ml"}})
    assert (new.ready, new.replicas, new.restarts, new.state) == (None, None, None, "Unknown")
    assert "?/?" in [str(cell) for cell in make_cells(new, None, False, 0, True)]
    conflict = {"type": "Conflicting", "status": "True", "reason": "PodsSelectedTwice"}
    status = {**POLICY["status"], "conditions": [conflict]}
    assert make_policy_row({**POLICY, "status": status}).state == "Conflicting"


@pytest.mark.parametrize(
    ("method", "path", "rule"),
    [
        ("GET", "/apis/plimsoll.dev/v1alpha1/leakincidents",
         ("list", "plimsoll.dev", "leakincidents", None)),
        ("GET", "/apis/plimsoll.dev/v1alpha1/namespaces/a/leakincidents/b",
         ("get", "plimsoll.dev", "leakincidents", "a")),
        ("POST", "/api/v1/namespaces/a/pods/p/exec", ("create", "", "pods/exec", "a")),
        ("GET", "/api/v1/namespaces/a/pods", ("list", "", "pods", "a")),
    ],
)  # fmt: skip
def test_the_rule_that_is_missing(
    method: str, path: str, rule: tuple[str, str, str, str | None]
) -> None:
    assert get_required_rule(method, path) == rule
    verb, group, resource, namespace = rule
    message = format_denied_message(method, path)
    assert f"you are not allowed to {verb} {resource}" in message
    head, _, body = message.partition("\n\n")
    assert ("a Role" if namespace else "a ClusterRole") in head
    wanted = {"apiGroups": [group], "resources": [resource], "verbs": [verb]}
    assert yaml.safe_load(body) == {"rules": [wanted]}
