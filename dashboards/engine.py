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
        board("engine", "Engine", "Throughput, latency and memory.", "namespace", "service", "pod")
        .with_panel(lines("Tokens", RATE, "Prompt tokens and generated tokens per second.",
                          (_rate("prompt_tokens_total"), "prompt"),
                          (_rate("generation_tokens_total"), "generated"), width=THIRD))
        .with_panel(lines("Requests ended", RATE, "By the reason for which they ended.",
                          ("sum by (finished_reason) (rate(plimsoll_engine_requests_total"
                           f"{{{AT}}}[$__rate_interval]))", "{{finished_reason}}"), width=THIRD))
        .with_panel(lines("Requests", COUNT, "Running, waiting and in flight.",
                          (f"sum(plimsoll_engine_num_requests_running{{{AT}}})", "running"),
                          (f"sum(plimsoll_engine_num_requests_waiting{{{AT}}})", "waiting"),
                          (f"sum(plimsoll_engine_num_requests_compiling{{{AT}}})",
                           "waiting for a grammar"),
                          (f"sum(plimsoll_engine_num_requests_inflight{{{AT}}})", "in flight"),
                          width=THIRD))
        .with_panel(lines("Time to first token", SECONDS, "From admission to the first token.",
                          *_quantiles("time_to_first_token_seconds"), width=THIRD))
        .with_panel(lines("Inter-token latency", SECONDS, "Time between two tokens of a request.",
                          *_quantiles("inter_token_latency_seconds"), width=THIRD))
        .with_panel(lines("Request latency", SECONDS, "From admission to the last token.",
                          *_quantiles("e2e_request_latency_seconds"), width=THIRD))
        .with_panel(lines("KV cache in use", SHARE, "Share of the blocks that requests hold.",
                          (f"plimsoll_engine_kv_cache_usage_perc{{{AT}}}", "{{pod}}"),
                          width=THIRD))
        .with_panel(lines("Prefix cache hits", SHARE, "Share of prompt tokens found in the cache.",
                          (f"{_rate('prefix_cache_hits_total')} / "
                           f"({_rate('prefix_cache_queries_total')} > 0)", "hit rate"),
                          width=THIRD))
        .with_panel(lines("Preemptions", RATE, "Requests that lost their blocks to others.",
                          (_rate("num_preemptions_total"), "preemptions"), width=THIRD))
        .with_panel(lines("Event loop blocked", SECONDS,
                          "The longest block of the last minute. No stream advances meanwhile. cpu"
                          " is the part in which the engine itself was computing.",
                          ("max by (pod, clock) (plimsoll_engine_event_loop_block_max_seconds"
                           f"{{{AT}}})", "{{pod}} ({{clock}})"), width=THIRD))
        .with_panel(lines("Connections", COUNT, "Open connections and their limit.",
                          ("sum by (pod) (plimsoll_engine_http_connections"
                           f'{{{AT},server="serving"}})', "{{pod}}"),
                          ("sum by (pod) (plimsoll_engine_http_connections_limit"
                           f'{{{AT},server="serving"}})', "{{pod}} limit"), width=THIRD))
        .with_panel(lines("Connections ended by the engine", RATE, "By the reason.",
                          ("sum by (reason) (rate(plimsoll_engine_http_connections_closed_total"
                           f"{{{AT}}}[$__rate_interval]))", "{{reason}}"), width=THIRD))
        .with_panel(lines("Ledger", BYTES, "Memory that each owner declares.",
                          (f"sum by (owner, kind) (plimsoll_engine_ledger_bytes{{{AT}}})",
                           "{{owner}} ({{kind}})"), width=FULL, stacked=True))
        .with_panel(lines("Ledger, share of the bound", SHARE, "1 is the declared bound.",
                          (f"max by (owner, kind) (plimsoll_engine_ledger_bytes{{{AT}}} / "
                           f"(plimsoll_engine_ledger_bound_bytes{{{AT}}} > 0))",
                           "{{owner}} ({{kind}})"), width=THIRD))
        .with_panel(lines("State", COUNT, "Replicas in each state.",
                          (f"sum by (state) (plimsoll_engine_state{{{AT}}}) > 0", "{{state}}"),
                          width=THIRD, stacked=True))
        .with_panel(lines("Worker starts", COUNT, "At the start, on request, and after a crash.",
                          (f"sum by (reason) (plimsoll_engine_worker_starts_total{{{AT}}})",
                           "{{reason}}"), width=THIRD))
        .with_panel(lines("Drafts accepted", SHARE, "Share of the drafts that were right.",
                          (f"{_rate('spec_decode_num_accepted_tokens_total')} / "
                           f"({_rate('spec_decode_num_draft_tokens_total')} > 0)", "accepted"),
                          width=THIRD))
    )  # fmt: skip


def _rate(name: str) -> str:
    return f"sum(rate(plimsoll_engine_{name}{{{AT}}}[$__rate_interval]))"


def _quantiles(name: str) -> list[Query]:
    rate = f"sum by (le) (rate(plimsoll_engine_{name}_bucket{{{AT}}}[$__rate_interval]))"
    return [(f"histogram_quantile({q}, {rate})", f"p{q * 100:.0f}") for q in (0.5, 0.9, 0.99)]
