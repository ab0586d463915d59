"""The table of figures in the README, from what the benchmarks wrote."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "README.md"
RESULTS = ROOT / "bench" / "results"
BLOCK = re.compile(r"(<!-- figures -->\n).*?(<!-- /figures -->)", re.DOTALL)
ROWS = (
    (
        "pause of a stream during a worker restart, 8 streams: 2 CPU cores / one H200",
        "{demo.pause_p50_s:.2f} s / {demo_h200.pause_p50_s:.2f} s",
        "`make demo` / `plimsoll demo --device cuda`",
    ),
    (
        "broken streams, failed requests, different texts: CPU; H200",
        "{demo.streams_broken_count}, {demo.requests_failed_count}, {demo.texts_different_count};"
        " {demo_h200.streams_broken_count}, {demo_h200.requests_failed_count},"
        " {demo_h200.texts_different_count}",
        "both",
    ),
    (
        "host memory that grew / came back: CPU; H200",
        "{demo.growth_bytes:MiB} / {demo.returned_bytes:MiB} MiB; {demo_h200.growth_bytes:MiB} /"
        " {demo_h200.returned_bytes:MiB} MiB",
        "both",
    ),
    (
        "detection on a blind, generated test split: recall / precision (goal 0.98,"
        " [met](docs/detection.md))",
        "{detection.recall_ratio:.3f} / {detection.precision_ratio:.3f}",
        "`python -m bench.detection`",
    ),
    (
        "restarts of healthy replicas in {detection.negative_replica_hours:,.0f} generated hours"
        " (goal 0)",
        "{detection.false_actions_count}",
        "`python -m bench.detection`",
    ),
    (
        "two leaking replicas restarted {remediation.remediations_count} times under load:"
        " requests / failed; streams / broken",
        "{remediation.requests_count:,} / {remediation.requests_failed_count};"
        " {remediation.streams_count:,} / {remediation.streams_broken_count}",
        "`python -m bench.remediation`",
    ),
    (
        "a supervisor: resident memory; share of a core",
        "{supervisor_cost.rss_mib:.0f} MiB; {supervisor_cost.cpu_core_ratio:.1%}",
        "`python -m bench.supervisor_cost`",
    ),
    (
        "abuse by one client, {abuse.classes_count} classes, {abuse.attempts_count:,} attempts:"
        " failed requests of other clients / restarts caused",
        "{abuse.requests_of_others_failed_count} / {abuse.restarts_provoked_count}",
        "`python -m bench.abuse`",
    ),
    (
        "{operator.services_count:,.0f} (5,000) services on two cores: memory of the operator;"
        " change of a service → change of its child, median; writes at rest",
        "{operator.rss_mib:.0f} ({operator.rss_5000_mib:.0f}) MiB; {operator.change_p50_s:ms} ms;"
        " {operator.steady_writes_count} ({operator.steady_5000_writes_count})",
        "`python -m bench.operator_scale`",
    ),
    (
        "{fleet.supervisors_count:,} supervisors with the same leak, limit"
        " {fleet.breaker_limit_count}: most slots held; GET on the API server, p99",
        "{fleet.slots_held_most_count}; {fleet.get_p99_s:.2f} s",
        "`python -m bench.fleet --seconds 300`",
    ),
    (
        "streams through the server, one H200, 8B shape, 16 requests per second (vLLM 0.26 on the"
        " same GPU): wait between tokens, p50; time to first token, p50",
        "{online_h200.plimsoll_8b_16rps_itl_p50_s:ms} ms"
        " ({online_h200.vllm_8b_16rps_itl_p50_s:ms});"
        " {online_h200.plimsoll_8b_16rps_ttft_p50_s:ms} ms"
        " ({online_h200.vllm_8b_16rps_ttft_p50_s:ms})",
        "`python -m bench.online`",
    ),
    (
        "tokens per second, one H200, Qwen3-0.6B shape: mixed / one request / 256 decoding /"
        " shared prefix",
        "{engine_h200.mixed256_06b_tok_s:,.0f} / {engine_h200.decode1_06b_tok_s:,.0f} /"
        " {engine_h200.decode256_06b_tok_s:,.0f} / {engine_h200.prefix256_06b_tok_s:,.0f}",
        "`python -m bench.engine`",
    ),
    (
        "worker restart, one H200, 8B shape, weights kept: longest gap in a stream, p50; admin"
        " call → next token, p50; the same with a standby worker",
        "{restart_h200.stream_gap_p50_s:.2f} s; {restart_h200.restart_first_token_p50_s:.2f} s;"
        " {restart_h200.standby_stream_gap_p50_s:.2f} s;"
        " {restart_h200.standby_first_token_p50_s:.2f} s",
        "`python -m bench.restart`",
    ),
    (
        "{shutdown_h200.cycles_count:,} cycles of start, serve, shutdown, one H200: bytes left in"
        " torch; MiB left by NVML",
        "{shutdown_h200.allocated_left_bytes}; {shutdown_h200.nvml_left_mib:.0f}",
        "`python -m bench.shutdown`",
    ),
)
"""What, its figures and its command: fields are RESULT.KEY of ``bench/results``, ``-`` as ``_``."""


class Figure(float):
    """A figure of a result, which can also be written in MiB or in milliseconds."""

    def __format__(self, form: str) -> str:
        if form == "MiB":
            return f"{self / (1 << 20):,.0f}"
        if form == "ms":
            return f"{self * 1000:.{0 if self >= 0.01 else 1}f}"
        return format(int(self) if self.is_integer() and form in ("", ",") else float(self), form)


def page() -> str:
    """The README with its table as the results are now."""
    return BLOCK.sub(lambda found: f"{found[1]}{table()}\n{found[2]}", PAGE.read_text())


def table() -> str:
    """One row for each of ROWS. Raises AttributeError for a figure that no result has."""
    results = {
        path.stem.replace("-", "_"): SimpleNamespace(**_figures(path))
        for path in RESULTS.glob("*.json")
    }
    rows = [(what.format(**results), shown.format(**results), by) for what, shown, by in ROWS]
    lines = [f"| {what} | {shown} | {by} |" for what, shown, by in rows]
    return "\n".join(["| What | Figure | Command |", "|---|---|---|", *lines])


def _figures(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text()).get("figures") or {}
    return {key: Figure(one) for key, one in found.items() if isinstance(one, int | float)}
