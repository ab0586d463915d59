"""The soak in small: nothing is left of a request, and the bench would see it if it were."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[2] / "bench"
KEPT = 64 << 10


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    sys.path.insert(0, str(BENCH))
    try:
        spec = importlib.util.spec_from_file_location("bench_soak", BENCH / "soak.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCH))
    return module


@pytest.mark.timeout(300)
def test_two_thousand_requests_leave_nothing(bench: ModuleType) -> None:
    figures = asyncio.run(bench.soak(2_000, 200, 100, seed=1))["figures"]

    assert figures["requests_count"] == 2_000
    assert min(figures[f"{kind}_requests_count"] for kind in ("text", "image", "audio")) > 200
    assert figures["aborted_count"] >= 300
    assert figures["audit_violations_count"] == 0
    assert figures["gen2_collected_count"] == 0
    # Caches still fill here; what one lost request keeps would be more.
    assert figures["growth_bytes_per_request"] < KEPT / 16


@pytest.mark.long
@pytest.mark.timeout(180)
def test_what_requests_leave_behind_is_measured(bench: ModuleType) -> None:
    fault = f"append_list:bytes_per_request={KEPT}"
    figures = asyncio.run(bench.soak(600, 100, 50, seed=1, inject=fault))["figures"]

    finished = 1 - figures["aborted_count"] / figures["requests_count"]
    assert figures["growth_low_bytes_per_request"] > KEPT * finished * 0.5


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_requests(bench: ModuleType) -> None:
    figures = asyncio.run(bench.soak(100_000, 5_000, 256, seed=2))["figures"]

    assert figures["audit_violations_count"] == 0
    assert figures["gen2_collected_count"] == 0
    assert figures["growth_high_bytes_per_request"] < 10
