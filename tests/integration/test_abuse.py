"""One client's abuse costs the others nothing: ``research/bench/abuse.py`` in small, and whole."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bench import abuse, abuse_play

SHORT = 0.02
LOOP_BLOCK_S = 0.25
"""The aim is 50 ms. Here other tests run beside, and the time of the frontend's threads counts."""
SERIES = 20
WITHOUT_A_TEST_OF_THEIR_OWN = (
    "slow_headers", "silent_probes", "slow_scrapes", "template_arguments", "large_answers",
    "tokens_without_text", "choices_of_a_long_prompt", "decompression_bombs",
    "regular_expressions", "metric_series", "admin_garbage", "lying_engine",
)  # fmt: skip
"""``integration/engine`` (clients, disconnects, rules, admin) and the fuzzers' corpus test the
other bounds one by one; all of them at once are for the long run."""


def check(found: Mapping[str, Any]) -> None:
    """Every class at once, so that one run says all that is wrong."""
    wrong: dict[str, dict[str, Any]] = {}
    for name, judged in found.items():
        figures, samples = judged.figures, judged.samples
        assert figures["attempts_count"] > 0, name
        bad = {
            key: value
            for key, value in figures.items()
            if not _good(key, value, samples.get("loop_block_by", ""))
        }
        if bad:
            wrong[name] = bad | samples
    assert wrong == {}


def _good(key: str, value: float, loop_block_by: str) -> bool:
    match key:
        case "loop_block_max_s":
            return loop_block_by.startswith("metric") and value <= LOOP_BLOCK_S
        case "memory_returned_ratio":
            return value >= 0.95
        case "series_added_count":
            return value <= SERIES
        case "incidents_count" | "incidents_resolved_count" | "restarts_accepted_count":
            return value == 1
        case (
            "requests_of_others_failed_count"
            | "restarts_provoked_count"
            | "unclear_errors_count"
            | "smuggled_count"
            | "audit_findings_count"
            | "supervisor_deaths_count"
        ):
            return value == 0
    return True


@pytest.mark.timeout(600)
def test_a_little_of_each(tmp_path: Path) -> None:
    assert set(WITHOUT_A_TEST_OF_THEIR_OWN) <= {*abuse_play.CLASSES, "lying_engine"}
    check(asyncio.run(abuse.measure([*WITHOUT_A_TEST_OF_THEIR_OWN], SHORT, tmp_path)))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_all_of_each(tmp_path: Path) -> None:
    check(asyncio.run(abuse.measure(abuse.chosen([]), 1.0, tmp_path)))
