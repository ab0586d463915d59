"""The soak in small: nothing is left of a request, and the bench would see it if it were."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

KEPT = 64 << 10


def soaked(
    requests: int, block: int, concurrency: int, seed: int, inject: str = "", kind: str = "media"
) -> dict[str, Any]:
    """The figures of a soak."""
    from bench.soak import soak  # SciPy takes a second, in every worker that collects tests

    found = asyncio.run(soak(requests, block, concurrency, seed, inject, kind))
    return dict(found["figures"])


@pytest.mark.timeout(300)
def test_two_thousand_requests_leave_nothing() -> None:
    figures = soaked(2_000, 200, 100, seed=1)

    assert figures["requests_count"] == 2_000
    assert min(figures[f"{kind}_requests_count"] for kind in ("text", "image", "audio")) > 200
    assert figures["aborted_count"] >= 300
    assert figures["grammar_requests_count"] > 50
    assert figures["refused_count"] > 10
    assert figures["audit_violations_count"] == 0
    assert figures["gen2_collected_count"] == 0
    # Caches still fill here; what one lost request keeps would be more.
    assert figures["growth_bytes_per_request"] < KEPT / 16


@pytest.mark.long
@pytest.mark.timeout(180)
def test_what_requests_leave_behind_is_measured() -> None:
    fault = f"append_list:bytes_per_request={KEPT}"
    figures = soaked(600, 100, 50, seed=1, inject=fault)

    finished = 1 - figures["aborted_count"] / figures["requests_count"]
    assert figures["growth_low_bytes_per_request"] > KEPT * finished * 0.5


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_requests() -> None:
    figures = soaked(100_000, 5_000, 256, seed=2)

    assert figures["audit_violations_count"] == 0
    assert figures["gen2_collected_count"] == 0
    assert figures["growth_high_bytes_per_request"] < 10


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_thirty_thousand_texts_with_drafts_experts_and_fp8() -> None:
    figures = soaked(30_000, 1_500, 128, seed=3, kind="text")

    assert min(figures[f"{kind}_requests_count"] for kind in ("experts", "fp8")) > 14_000
    assert figures["audit_violations_count"] == 0
    assert figures["gen2_collected_count"] == 0
    assert figures["growth_high_bytes_per_request"] < 40
