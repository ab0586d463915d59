"""The engine: throughput, latency, KV cache and ledger."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.panels import (
    BYTES,
    COUNT,
    FULL,
    RATE,
    SECONDS,
    SHARE,
    THIRD,
    Query,
    board,
    lines,
)  # fmt: skip

AT = 'namespace=~"$namespace",service=~"$service",pod=~"$pod"'


def engine() -> Dashboard:
    return (
        board("engine", "Engine", "Serving.", "namespace", "service", "pod")
        .with_panel(lines("Tokens", RATE, "Prompt tokens taken in, tokens generated, a second.",
                          (_rate("prompt_tokens_total"), "prompt"),
                          (_rate("generation_tokens_total"), "generated"), width=THIRD))
        .with_panel(lines("Requests ended", RATE, "By how they ended.",
                          ("sum by (finished_reason) (rate(plimsoll_engine_requests_total"
                           f"{{{AT}}}[$__rate_interval]))", "{{finished_reason}}"), width=THIRD))
        .with_panel(lines("Requests", COUNT, "Now.",
                          (f"sum(plimsoll_engine_num_requests_running{{{AT}}})", "running"),
                          (f"sum(plimsoll_engine_num_requests_waiting{{{AT}}})", "waiting"),
                          (f"sum(plimsoll_engine_num_requests_inflight{{{AT}}})", "in flight"),
                          width=THIRD))
        .with_panel(lines("Time to first token", SECONDS, "From admission.",
                          *_quantiles("time_to_first_token_seconds"), width=THIRD))
        .with_panel(lines("Inter-token latency", SECONDS, "Between two tokens of a request.",
                          *_quantiles("inter_token_latency_seconds"), width=THIRD))
        .with_panel(lines("Request latency", SECONDS, "Admission to the last token.",
                          *_quantiles("e2e_request_latency_seconds"), width=THIRD))
        .with_panel(lines("KV cache in use", SHARE, "Blocks held by requests.",
                          (f"plimsoll_engine_kv_cache_usage_perc{{{AT}}}", "{{pod}}"),
                          width=THIRD))
        .with_panel(lines("Prefix cache hits", SHARE, "Share of looked-up prompt tokens.",
                          (f"{_rate('prefix_cache_hits_total')} / "
                           f"({_rate('prefix_cache_queries_total')} > 0)", "hit rate"),
                          width=THIRD))
        .with_panel(lines("Preemptions", RATE, "Requests that had to give their blocks back.",
                          (_rate("num_preemptions_total"), "preemptions"), width=THIRD))
        .with_panel(lines("Ledger", BYTES, "Who says to hold how much.",
                          (f"sum by (owner, kind) (plimsoll_engine_ledger_bytes{{{AT}}})",
                           "{{owner}} ({{kind}})"), width=FULL, stacked=True))
        .with_panel(lines("Ledger, share of the bound", SHARE, "1 is the most it declared.",
                          (f"max by (owner, kind) (plimsoll_engine_ledger_bytes{{{AT}}} / "
                           f"(plimsoll_engine_ledger_bound_bytes{{{AT}}} > 0))",
                           "{{owner}} ({{kind}})"), width=THIRD))
        .with_panel(lines("State", COUNT, "Replicas in each state.",
                          (f"sum by (state) (plimsoll_engine_state{{{AT}}}) > 0", "{{state}}"),
                          width=THIRD, stacked=True))
        .with_panel(lines("Worker starts", COUNT, "Initial, asked for, after a crash.",
                          (f"sum by (reason) (plimsoll_engine_worker_starts_total{{{AT}}})",
                           "{{reason}}"), width=THIRD))
    )  # fmt: skip


def _rate(name: str) -> str:
    return f"sum(rate(plimsoll_engine_{name}{{{AT}}}[$__rate_interval]))"


def _quantiles(name: str) -> list[Query]:
    rate = f"sum by (le) (rate(plimsoll_engine_{name}_bucket{{{AT}}}[$__rate_interval]))"
    return [(f"histogram_quantile({q}, {rate})", f"p{q * 100:.0f}") for q in (0.5, 0.9, 0.99)]
