"""The operator: is it working, does it keep up, what does it write."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.panels import COUNT, HALF, RATE, SECONDS, board, lines, number


def operator() -> Dashboard:
    return (
        board("operator", "Operator", "The operator's own health.")
        .with_panel(number("Services", COUNT, "InferenceServices known.",
                           "max(plimsoll_operator_services)", width=6))
        .with_panel(number("Queue", COUNT, "Services that wait for a worker.",
                           "sum(plimsoll_operator_queue_length)", width=6))
        .with_panel(number("Canary", SECONDS, "Since the API server last answered a read.",
                           "max(plimsoll_operator_canary_age_seconds)", width=6))
        .with_panel(number("Last event", SECONDS, "Since the last watch event.",
                           "max(plimsoll_operator_watch_age_seconds)", width=6))
        .with_panel(lines("Reconciles", RATE, "All, and those that failed.",
                          (_rate("reconciles_total"), "all"),
                          (_rate("reconcile_failures_total"), "failed")))
        .with_panel(lines("Writes to the API server", RATE,
                          "By verb and kind. None, while nothing changes.",
                          ("sum by (verb, kind) (rate(plimsoll_operator_writes_total"
                           "[$__rate_interval]))", "{{verb}} {{kind}}")))
        .with_panel(lines("Watch events", RATE, "Of all watches.",
                          (_rate("watch_events_total"), "events")))
        .with_panel(lines("Ages", SECONDS, "Canary and last event. The canary's must stay small.",
                          ("max(plimsoll_operator_canary_age_seconds)", "canary"),
                          ("max(plimsoll_operator_watch_age_seconds)", "last event")))
        .with_panel(lines("Scrapes without an answer", RATE, "Supervisors that did not answer.",
                          (_rate("scrape_failures_total"), "failures"), width=HALF))
        .with_panel(lines("Queue", COUNT, "Services that wait for a worker.",
                          ("sum(plimsoll_operator_queue_length)", "waiting"), width=HALF))
    )  # fmt: skip


def _rate(name: str) -> str:
    return f"sum(rate(plimsoll_operator_{name}[$__rate_interval]))"
