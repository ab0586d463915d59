"""Metrics for endpoint pickers, with vLLM's names: ``frontend/observability/ledger_metrics.py``."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from plimsoll_api.admin import Load
from plimsoll_engine.frontend.observability.ledger_metrics import PickerMetrics


def page(pool: tuple[int, int] | None) -> list[str]:
    registry = CollectorRegistry()
    usage = None if pool is None else 0.5
    made = PickerMetrics("m", Load, lambda: usage, lambda: pool, lambda: ["a", "b"], 4)
    registry.register(made)
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if not line.startswith("#")]


def test_the_size_of_the_cache_and_the_adapters_are_labels() -> None:
    found = page((16, 1024))
    labels = 'block_size="16",model_name="m",num_gpu_blocks="1024"'
    assert f"vllm:cache_config_info{{{labels}}} 1.0" in found
    labels = 'max_lora="4",running_lora_adapters="a,b",waiting_lora_adapters=""'
    assert f"vllm:lora_requests_info{{{labels}}} 1.0" in found
    assert 'vllm:kv_cache_usage_perc{model_name="m"} 0.5' in found


def test_what_is_not_known_yet_is_absent() -> None:
    names = {line.partition("{")[0] for line in page(None)}
    assert not names & {"vllm:cache_config_info", "vllm:kv_cache_usage_perc"}
