"""Drafts in a real engine: the same texts, also over a restart, and nothing is left of them.

Tests ``core/speculation.py`` from outside.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

STREAMS = 4
TOKENS = 120
CONFIG = {
    "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
}  # fmt: skip
KINDS: list[dict[str, Any]] = [
    {},
    {"logit_bias": {"40": 60, "41": 59}},  # greedy a loop, sampled two tokens in turn
    {"frequency_penalty": 0.5, "extra_body": {"repetition_penalty": 1.2}, "logprobs": 2},
]


def counted(engine: Any, name: str) -> float:
    series = f'plimsoll_engine_spec_decode_num_{name}_total{{model_name="tiny"}} '
    lines = engine.get("/metrics")[1].splitlines()
    return sum(float(line.removeprefix(series)) for line in lines if line.startswith(series))


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_texts_over_a_restart_are_those_without_drafts(
    kind: int, engine: Any, speculating: Any
) -> None:
    fields = KINDS[kind]
    with engine.streams(STREAMS, TOKENS, **fields) as futures:
        expected = [future.result(120) for future in futures]
    before = counted(speculating, "accepted_tokens")
    with speculating.streams(STREAMS, TOKENS, **fields) as futures:
        speculating.begin("restart", f"restart-{kind}")
        operation = speculating.finish(f"restart-{kind}")
        found = [future.result(120) for future in futures]
    assert operation["state"] == "succeeded", operation
    assert operation["kv_handover"] == "handed_over"
    assert operation["carried_prefill_tokens"] == 0
    for one, other in zip(found, expected, strict=True):
        assert one.text == other.text
        assert one.finish_reason == other.finish_reason
        assert one.usage.completion_tokens == other.usage.completion_tokens
    speculating.clean()
    if "logit_bias" in fields:
        speculating.until(
            lambda: counted(speculating, "accepted_tokens") > before + TOKENS / 2, "accepted drafts"
        )
        assert counted(speculating, "draft_tokens") > counted(speculating, "drafts") > 0


@pytest.fixture(scope="module")
def speculating(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tests.integration.engine.conftest import Engine

    folder = tmp_path_factory.mktemp("speculating")
    one = Engine(tiny, folder, "--speculative-config", json.dumps(CONFIG), warm=True)
    try:
        yield one.wait_ready()
    finally:
        one.end()
