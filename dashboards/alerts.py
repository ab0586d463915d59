"""Alert rules, as a plain rules file and as a PrometheusRule.

The modules beside this one have the dashboards. PlimsollMemoryNearLimit is the alert for what the
condition ``MemoryNearLimit`` of a status says (:mod:`plimsoll_operator.status.conditions`).

Those on leak budgets come from :mod:`plimsoll_operator.render.monitoring`: PromQL needs literal
ranges, so there is one rule for each class of windows.
"""

from __future__ import annotations

from typing import Any

import yaml

from plimsoll_api.memory_policy import NEAR_LIMIT_RATIO
from plimsoll_operator.fleet.supervisor_metrics import SIGNAL_MISSING_S
from plimsoll_operator.render.monitoring import (
    FAST_BURN,
    RUNBOOKS_URL,
    SLOW_BURN,
    WINDOWS_S,
    BurnAlert,
    make_burn_rule,
)
from plimsoll_operator.render.monitoring import make_alert as _alert


def _of_class(rule: BurnAlert, index: int) -> dict[str, Any]:
    """The rule for the budgets whose window is in the ``index``-th class."""
    window = WINDOWS_S[index]
    least = "> 0" if index == 0 else f">= {window}"
    most = f" < {WINDOWS_S[index + 1]}" if index + 1 < len(WINDOWS_S) else ""
    return make_burn_rule(rule, window, window=f" {least}{most}")


def rules() -> list[dict[str, Any]]:
    """Every alert."""
    burns = [
        _of_class(rule, index) for rule in (FAST_BURN, SLOW_BURN) for index in range(len(WINDOWS_S))
    ]
    return [*burns, *_supervisor(), *_operator()]


def _count_late(counter: str, span: str, own_labels: str, scrapes: str) -> str:
    """Return the increase of a counter that appears only when it first counts.

    Its first value has no increase: it counts if its target was scraped more often than it was
    seen. ``own_labels`` are those that its target lacks, ``scrapes`` is the number of its scrapes.
    """
    return (
        f"  increase({counter}[{span}]) > 0\n"
        f"  or {counter} and (\n"
        f"    count_over_time({counter}[{span}])\n"
        f"    < ignoring ({own_labels}) group_left () {scrapes}\n"
        "  )"
    )


def _supervisor() -> list[dict[str, Any]]:
    return [
        _alert(
            "PlimsollBudgetExhaustionPredicted",
            "plimsoll_memory_budget_exhaustion_seconds < 1800\n"
            "and plimsoll_memory_budget_consumed_ratio > 0.25",
            "warning",
            "{{ $labels.service }} spends its leak budget in {{ $value | humanizeDuration }}",
            "The {{ $labels.kind }} memory of {{ $labels.pod }} grows and will spend the leak"
            " budget within half an hour. In mode Recover, the supervisor will act.",
            wait="2m",
        ),
        _alert(
            "PlimsollMemoryNearLimit",
            f"plimsoll_cgroup_memory_limit_ratio > {NEAR_LIMIT_RATIO}",
            "warning",
            "{{ $labels.service }} uses {{ $value | humanizePercentage }} of its memory limit",
            "Of the memory of the engine's container in {{ $labels.pod }}, this share of the limit"
            " cannot be reclaimed. At the limit, the kernel kills the engine.",
            wait="5m",
        ),
        *(_slow_leak(*one) for one in (("warning", 604800, 86400), ("critical", 86400, None))),
        _alert(
            "PlimsollIncidentUnresolved",
            "sum by (cluster, namespace, service, pod, kind, outcome) (\n"
            + _count_late(
                'plimsoll_incidents_ended_total{phase="Unresolved"}',
                "1h",
                "kind, phase, outcome",
                "count_over_time(plimsoll_supervisor_samples_total[1h])",
            )
            + "\n)",
            "critical",
            "An incident of {{ $labels.service }} ended unresolved: {{ $labels.outcome }}",
            "The supervisor of {{ $labels.pod }} could not resolve the {{ $labels.kind }}. Run"
            " plimsoll explain to see what it tried.",
        ),
        _alert(
            "PlimsollRestartBudgetExhausted",
            "plimsoll_restart_budget_exhausted == 1",
            "critical",
            "The restart budget of {{ $labels.pod }} is spent",
            "The supervisor only records leaks and stalls of {{ $labels.service }} until you reset"
            " the budget with plimsoll resume.",
        ),
        _alert(
            "PlimsollEngineStalled",
            "plimsoll_engine_stalled == 1",
            "critical",
            "The engine of {{ $labels.pod }} hangs",
            "Requests wait and no step completes, although the health endpoint may return 200. In"
            " mode Recover, the supervisor saves stacks and restarts the worker, within the restart"
            " budget.",
            wait="1m",
        ),
        _alert(
            "PlimsollEngineLoopBlocked",
            "max by (cluster, namespace, service, pod)"
            ' (plimsoll_engine_event_loop_block_max_seconds{clock="wall"}) > 0.5',
            "warning",
            "The streams of {{ $labels.pod }} keep pausing",
            "Something blocked the event loop of the engine's frontend for"
            " {{ $value | humanizeDuration }}. Streams and probes waited.",
            wait="5m",
        ),
        _alert(
            "PlimsollEngineOpenFilesHigh",
            "plimsoll_engine_open_fds / plimsoll_engine_max_fds > 0.8",
            "warning",
            "The engine of {{ $labels.pod }} is near its limit of open files",
            "A process of the engine has used {{ $value | humanizePercentage }} of the file"
            " descriptors that it may open. At its limit, it accepts no connection.",
            wait="5m",
        ),
        _alert(
            "PlimsollJournalNotWritable",
            "plimsoll_supervisor_journal_writable == 0",
            "critical",
            "The supervisor of {{ $labels.pod }} cannot write its journal",
            "Its state volume is full or read-only. Until the supervisor can write, it takes no"
            " action on leaks and stalls of {{ $labels.service }}.",
            wait="1m",
        ),
        _alert(
            "PlimsollJournalDamaged",
            # A journal is read at the start, before the first scrape, and may be as damaged as at
            # the last start. A sample a second: this supervisor is younger than an hour.
            "sum by (cluster, namespace, service, pod, part) (\n"
            "  increase(plimsoll_supervisor_journal_damaged_total[1h]) > 0\n"
            "  or plimsoll_supervisor_journal_damaged_total > 0\n"
            "    and ignoring (part) plimsoll_supervisor_samples_total < 3600\n"
            ")",
            "warning",
            "The journal of {{ $labels.pod }} is damaged",
            "The supervisor could not read a {{ $labels.part }} of its journal and moved it to"
            " set-aside. Incidents of {{ $labels.service }} may be missing. The supervisor keeps"
            " working.",
        ),
        _alert(
            "PlimsollSupervisorBlind",
            f'plimsoll_signal_age_seconds{{signal=~"engine|host"}} > {SIGNAL_MISSING_S:g}',
            "warning",
            "The supervisor of {{ $labels.pod }} cannot read its {{ $labels.signal }} signal",
            "The signal has been unknown for {{ $value | humanizeDuration }}. The supervisor can"
            " neither detect a leak nor act on one.",
            wait="3m",
        ),
        _alert(
            "PlimsollEngineMetricsUnusable",
            'plimsoll_signal_age_seconds{signal="metrics"} > 600',
            "warning",
            "The supervisor of {{ $labels.pod }} cannot use the metrics page of its engine",
            "The load of {{ $labels.service }} has been unknown for"
            " {{ $value | humanizeDuration }}. The supervisor still finds leaks, but neither stalls"
            " nor lost capacity.",
            wait="5m",
        ),
        _alert(
            "PlimsollSupervisorDown",
            # One that crashes again and again answers now and then, and its pod stays ready. A pod
            # that starts may have the address of an earlier one.
            "max by (cluster, namespace, service, pod) (\n"
            "  avg_over_time(up[10m]) < 0.5\n"
            "  and on (cluster, namespace, pod, job, instance)\n"
            "    last_over_time(plimsoll_supervisor_samples_total[1d])\n"
            ")",
            "warning",
            "The supervisor of {{ $labels.pod }} does not answer",
            "Most scrapes of the last ten minutes got no answer from it. The memory"
            " of {{ $labels.pod }} is not watched; its engine keeps serving.",
            wait="5m",
        ),
        _alert(
            "PlimsollSupervisorPartFailing",
            "min by (cluster, namespace, service, pod, part) (plimsoll_supervisor_part_ok) == 0",
            "warning",
            "A part of the supervisor of {{ $labels.pod }} keeps failing: {{ $labels.part }}",
            "The part {{ $labels.part }} has not succeeded for ten minutes. The supervisor's log"
            " says why.",
            wait="10m",
        ),
    ]  # fmt: skip


def _slow_leak(severity: str, most_s: int, least_s: int | None) -> dict[str, Any]:
    """The rule for the time that is left: a week is for somebody to look, a day to act."""
    least = "" if least_s is None else f"\nand plimsoll_memory_slow_leak_limit_seconds >= {least_s}"
    return _alert(
        "PlimsollSlowLeak",
        f"plimsoll_memory_slow_leak_limit_seconds < {most_s}{least}",
        severity,
        "{{ $labels.service }} leaks slowly and reaches its limit in"
        " {{ $value | humanizeDuration }}",
        "The {{ $labels.kind }} memory of {{ $labels.pod }} has grown for hours, within its leak"
        " budget and without an end. The supervisor takes no action on it.",
        wait="15m",
    )


def _operator() -> list[dict[str, Any]]:
    return [
        _alert(
            "PlimsollOperatorAbsent",
            # Supervisors that plimsoll inject added need no operator: only one that was there can
            # be missed. None leads either while each one waits for the Lease.
            "group by (cluster, namespace) (last_over_time(plimsoll_operator_leader[7d]))\n"
            "unless group by (cluster, namespace) (plimsoll_operator_leader == 1)",
            "warning",
            "No operator works in namespace {{ $labels.namespace }}",
            "No operator has been the leader for ten minutes, or Prometheus cannot scrape it."
            " Supervisors keep working. Changes of specs, status updates and PodReplace wait, and"
            " new pods of SupervisionPolicies may start without a supervisor.",
            wait="10m",
            dashboard="operator",
        ),
        _alert(
            "PlimsollOperatorWatchStale",
            # A quiet cluster sends no events; a list that shows more than the watch is proof.
            "max by (cluster, namespace, pod) (plimsoll_operator_canary_age_seconds) > 120\n"
            "or sum by (cluster, namespace, pod)"
            " (increase(plimsoll_operator_watch_missed_total[15m])) > 0",
            "warning",
            "The operator misses changes from the API server",
            "Its canary read failed for two minutes, or a full list showed changes that no watch"
            " reported. Supervisors keep working; status updates and PodReplace wait.",
            wait="2m",
            dashboard="operator",
        ),
        _alert(
            "PlimsollOperatorPartFailing",
            # A part restarts after 60 s at most: five failures are no hiccup.
            "sum by (cluster, namespace, pod, part)"
            " (increase(plimsoll_operator_part_failures_total[10m])) > 4",
            "warning",
            "A background task of the operator keeps failing: {{ $labels.part }}",
            "It failed {{ $value | humanize }} times in ten minutes and restarted each time. The"
            " operator's log has the traceback.",
            wait="5m",
            dashboard="operator",
        ),
        _alert(
            "PlimsollAdmissionFailing",
            # The API server counts the reviews that the webhook did not answer at all.
            "sum by (cluster)"
            ' (increase(plimsoll_operator_admissions_total{result="failed"}[15m])) > 0\n'
            "or sum by (cluster) (\n"
            + _count_late(
                'apiserver_admission_webhook_fail_open_count{name=~".+[.]pods[.]plimsoll[.]dev"}',
                "15m",
                "name, type",
                "sum_over_time(up[15m])",
            )
            + "\n)",
            "warning",
            "Pods start without the supervisor that a SupervisionPolicy selects for them",
            "The webhook failed or did not answer for {{ $value | humanize }} pods in 15 minutes."
            " They get a supervisor when they are recreated.",
            dashboard="operator",
        ),
        _alert(
            "PlimsollWebhookNotReady",
            "max by (cluster, namespace, pod) (plimsoll_operator_webhook_ready) == 0",
            "warning",
            "The webhook of operator {{ $labels.pod }} cannot answer the API server",
            "If no other replica answers, new pods of SupervisionPolicies start without a"
            " supervisor. /readyz of the operator says what the webhook lacks.",
            wait="10m",
            dashboard="operator",
        ),
        _alert(
            "PlimsollWebhookCertificateExpiring",
            "min by (cluster, secret)"
            " (plimsoll_operator_webhook_certificate_expiry_timestamp_seconds)"
            " - time() < 604800",
            "warning",
            "The webhook's certificate expires soon: Secret {{ $labels.secret }}",
            "It expires in {{ $value | humanizeDuration }} and was not renewed. After that, new"
            " pods of SupervisionPolicies start without a supervisor.",
            wait="15m",
            dashboard="operator",
        ),
        _alert(
            "PlimsollSuspectRevision",
            "max by (cluster, inferenceservice, supervisionpolicy, workload)"
            " (plimsoll_operator_suspect_revisions) == 1",
            "warning",
            "Most replicas of {{ $labels.inferenceservice }}{{ $labels.workload }}"
            " have the same leak",
            "The revision leaks. suspectRevision in the status of the InferenceService, or of the"
            " workload in that of the SupervisionPolicy, names the leak and its start. For an"
            " InferenceService, the operator holds or rolls back a rollout that is under way, as"
            " rollout.onLeak says.",
            dashboard="operator",
        ),
        _alert(
            "PlimsollPodsUnsupervised",
            "sum by (cluster, supervisionpolicy) (max by (cluster, supervisionpolicy, state)\n"
            '  (plimsoll_operator_policy_pods{state!="Supervised"})) > 0',
            "warning",
            "Pods that {{ $labels.supervisionpolicy }} selects run without a supervisor",
            "{{ $value | humanize }} pods have waited for a restart, or were refused, for an hour."
            " Nothing detects their leaks. The policy's status counts them by workload and gives"
            " the reasons.",
            wait="1h",
            dashboard="operator",
        ),
        _alert(
            "PlimsollEvictionRefused",
            "sum by (cluster, inferenceservice, supervisionpolicy)"
            " (increase(plimsoll_operator_refused_evictions_total[10m])) > 0",
            "warning",
            "A pod of {{ $labels.inferenceservice }}{{ $labels.supervisionpolicy }}"
            " cannot be evicted",
            "Its supervisor requests a replacement (PodReplace), and for 15 minutes the API server"
            " has refused the eviction, most often because of a PodDisruptionBudget. The operator"
            " keeps trying, and its log has the reason.",
            wait="15m",
            dashboard="operator",
        ),
        _alert(
            "PlimsollInjectionStopped",
            "max by (cluster, supervisionpolicy) (plimsoll_operator_injection_stopped) == 1",
            "warning",
            "New pods of {{ $labels.supervisionpolicy }} get no supervisor",
            "Several pods do not start with theirs, or the API server refuses pods for it, so the"
            " operator stopped the injection. The condition InjectionStopped of the policy names"
            " the pod or its owner, and the error or the rule that refused it.",
            dashboard="operator",
        ),
    ]


def groups() -> list[dict[str, Any]]:
    return [{"name": "plimsoll", "rules": rules()}]


def rules_file(runbooks: str = RUNBOOKS_URL) -> str:
    """For ``rule_files`` of a plain Prometheus; ``runbooks`` is where the pages are published."""
    return _yaml({"groups": groups()}).replace(f"{RUNBOOKS_URL}/", f"{runbooks}/")


def prometheus_rule() -> str:
    """For prometheus-operator."""
    return _yaml(
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PrometheusRule",
            "metadata": {
                "name": "plimsoll",
                "labels": {"app.kubernetes.io/name": "plimsoll"},
            },
            "spec": {"groups": groups()},
        }
    )


class _Dumper(yaml.SafeDumper):
    """Writes expressions of several lines as blocks."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def _yaml(value: object) -> str:
    head = "# Generated by python -m dashboards.generate\n"
    return head + yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=100)
