"""The generated pages are what the code says, and labels stay bounded.

Tests ``docs/generate.py``.
"""

from __future__ import annotations

import re

from docs import generate
from docs.tools import metrics
from docs.tools.blocks import ROOT

UNBOUNDED = {"request", "request_id", "pid", "incident", "epoch", "operation_id", "trace_id"}
FOR_PICKERS = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info", "vllm:lora_requests_info",
}  # fmt: skip


def test_pages_are_what_the_code_says() -> None:
    assert generate.drift() == [], "run: python -m docs.generate"


def test_every_metric_is_described_and_named_by_the_rules() -> None:
    families = metrics.every()
    assert len({family.name for family in families}) == len(families) > 40
    for family in families:
        assert family.name.startswith("plimsoll_") or family.name in FOR_PICKERS
        assert family.text.endswith("."), family.name
        assert not UNBOUNDED & set(family.labels), family.name
        assert family.name.endswith("_total") == (family.kind == "counter")


def test_what_is_compared_exists() -> None:
    assert set(metrics.SAME_AS) <= {family.name for family in metrics.every()}


def test_metrics_that_descriptions_of_fields_name_exist() -> None:
    known = {family.name for family in metrics.every()}
    named = {
        name
        for path in sorted((ROOT / "crds").glob("*.yaml"))
        for name in re.findall(r"`(plimsoll_\w+)`", path.read_text())
    }
    assert named, "autoscaling by a metric names one"
    assert named <= known
