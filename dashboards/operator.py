"""The operator: whether it works and keeps up, and what it writes."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.panels import COUNT, HALF, RATE, SECONDS, board, lines, number

OR_ZERO = " or 0 * max(plimsoll_operator_leader)"
"""For series that appear late: nothing is zero as long as an operator is scraped."""


def operator() -> Dashboard:
    return (
        board("operator", "Operator", "Health of the operator.")
        .with_panel(number("Services", COUNT, "InferenceServices in the cache of the operator.",
                           "max(plimsoll_operator_services)", width=6))
        .with_panel(number("Queue", COUNT, "Services that wait in the queue.",
                           "sum(plimsoll_operator_queue_length)", width=6))
        .with_panel(number("Canary", SECONDS, "Time since the API server last answered a read.",
                           "max(plimsoll_operator_canary_age_seconds)", width=6))
        .with_panel(number("Last event", SECONDS, "Time since the last watch event.",
                           f"max({_of_leader('watch_age_seconds')})", width=6))
        .with_panel(lines("Reconciles", RATE, "All reconciles, and failed ones.",
                          (_rate("reconciles_total"), "all"),
                          (_rate("reconcile_failures_total"), "failed")))
        .with_panel(lines("Writes to the API server", RATE,
                          "By verb and kind. Zero while nothing changes.",
                          ("sum by (verb, kind) (rate(plimsoll_operator_writes_total"
                           "[$__rate_interval]))", "{{verb}} {{kind}}")))
        .with_panel(lines("Watch events", RATE, "From all watches.",
                          (_rate("watch_events_total"), "events")))
        .with_panel(lines("Ages", SECONDS, "Canary and last event. The canary's must stay small.",
                          ("max(plimsoll_operator_canary_age_seconds)", "canary"),
                          (f"max({_of_leader('watch_age_seconds')})", "last event")))
        .with_panel(lines("Failed scrapes", RATE, "Supervisors that did not answer.",
                          (_rate("scrape_failures_total"), "failures"), width=HALF))
        .with_panel(lines("Queue", COUNT, "Services that wait in the queue.",
                          ("sum(plimsoll_operator_queue_length)", "waiting"), width=HALF))
        .with_panel(lines("Duration of a reconcile", SECONDS, "And the wait before it.",
                          (_quantile(0.5, "reconcile_seconds"), "p50"),
                          (_quantile(0.99, "reconcile_seconds"), "p99"),
                          (_quantile(0.99, "queue_wait_seconds"), "p99 of the wait")))
        .with_panel(lines("Failures by reason", RATE, "By the reason that the API server gave.",
                          ("sum by (reason) (rate(plimsoll_operator_reconcile_errors_total"
                           f"[$__rate_interval])){OR_ZERO}", "{{reason}}")))
        .with_panel(lines("Requests", RATE, "Sent, refused, and delayed by the client's own limit.",
                          (_rate("requests_total"), "requests"),
                          (_rate("lease_requests_total"), "election"),
                          (_rate("throttled_requests_total"), "refused (429)"),
                          (_rate("throttled_seconds_total"), "delay, seconds per second")))
        .with_panel(lines("Circuit breaker", COUNT, "Slots, suspect revisions, those that leak.",
                          ("max(plimsoll_operator_slots_held)", "held"),
                          ("max(plimsoll_operator_slots_closed)", "closed"),
                          (f"count(plimsoll_operator_suspect_revisions){OR_ZERO}",
                           "suspect revisions"),
                          ('sum(max by (inferenceservice, supervisionpolicy, workload, revision)'
                           ' (plimsoll_operator_revision_verdict{leaks="Yes"}))'
                           f"{OR_ZERO}",
                           "revisions that leak")))
        .with_panel(lines("Pods of policies", COUNT, "Selected pods, by state.",
                          ("sum by (state) (max by (supervisionpolicy, state)"
                           " (plimsoll_operator_policy_pods))", "{{state}}"),
                          (f"count(plimsoll_operator_injection_stopped == 1){OR_ZERO}",
                           "policies without injection")))
        .with_panel(lines("Drained pods", COUNT, "Kept out of service by a person.",
                          ("sum(max by (inferenceservice, supervisionpolicy)"
                           f" (plimsoll_operator_drained_pods)){OR_ZERO}", "drained")))
        .with_panel(lines("Missed events", COUNT, "Changes that no watch event reported.",
                          (f"sum by (kind) (plimsoll_operator_watch_missed_total){OR_ZERO}",
                           "missed {{kind}}"),
                          ("sum(plimsoll_operator_leader)", "leaders")))
        .with_panel(lines("Failures of background tasks", RATE, "Each task restarts after a delay.",
                          ("sum by (part) (rate(plimsoll_operator_part_failures_total"
                           f"[$__rate_interval])){OR_ZERO}", "{{part}}")))
        .with_panel(lines("Admission", RATE, "Pods that the webhook reviewed, by result.",
                          ("sum by (result) (rate(plimsoll_operator_admissions_total"
                           f"[$__rate_interval])){OR_ZERO}", "{{result}}")))
        .with_panel(lines("Webhook", COUNT, "Replicas whose webhook can answer, and that cannot.",
                          (f"sum(plimsoll_operator_webhook_ready){OR_ZERO}", "ready"),
                          (f"count(plimsoll_operator_webhook_ready == 0){OR_ZERO}",
                           "not ready")))
        .with_panel(lines("Webhook certificate", SECONDS, "Time until it expires.",
                          ("min by (secret) (plimsoll_operator_webhook_certificate_expiry_timestamp"
                           "_seconds) - time()", "{{secret}}")))
        .with_panel(lines("Last event by kind", SECONDS, "Time since the last event of each watch.",
                          (f"max by (kind) ({_of_leader('watch_kind_age_seconds')})",
                           "{{kind}}")))
        .with_panel(lines("Refused evictions", RATE, "Tried again every 15 seconds.",
                          ("sum by (inferenceservice, supervisionpolicy)"
                           " (rate(plimsoll_operator_refused_evictions_total"
                           f"[$__rate_interval])){OR_ZERO}",
                           "{{inferenceservice}}{{supervisionpolicy}}")))
    )  # fmt: skip


def _of_leader(name: str) -> str:
    """Only the leader watches all kinds: the ages of a standby grow for as long as it stands by."""
    return f"plimsoll_operator_{name} and on (job, instance) plimsoll_operator_leader == 1"


def _quantile(share: float, name: str) -> str:
    rates = f"rate(plimsoll_operator_{name}_bucket[$__rate_interval])"
    return f"histogram_quantile({share}, sum by (le) ({rates}))"


def _rate(name: str) -> str:
    return f"sum(rate(plimsoll_operator_{name}[$__rate_interval]))"
