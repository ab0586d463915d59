"""Drafts in a real engine: the same texts, also over a restart, and nothing is left of them.

Tests ``core/speculation/drafting.py`` from outside.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.draft_checkpoint import write_draft_checkpoint

STREAMS = 4
TOKENS = 120
KINDS: list[dict[str, Any]] = [
    {},
    {"logit_bias": {"40": 60, "41": 59}},  # greedy a loop, sampled two tokens in turn
    {"frequency_penalty": 0.5, "extra_body": {"repetition_penalty": 1.2}, "logprobs": 2},
]


def counted(engine: Any, name: str) -> float:
    series = f'plimsoll_engine_spec_decode_num_{name}_total{{model_name="tiny"}} '
    lines = engine.get("/metrics")[1].splitlines()
    return sum(float(line.removeprefix(series)) for line in lines if line.startswith(series))


@pytest.mark.parametrize(
    ("method", "kind"),
    [pytest.param("ngram", 0, marks=pytest.mark.long), ("ngram", 1), ("draft_model", 2)],
)
def test_texts_over_a_restart_are_those_without_drafts(
    method: str, kind: int, engine: Any, tiny: Path, start_engine: Any, tmp_path: Path
) -> None:
    fields = KINDS[kind]
    with engine.streams(STREAMS, TOKENS, **fields) as futures:
        expected = [future.result(120) for future in futures]
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 4}
    if method == "ngram":
        config |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    else:
        write_draft_checkpoint(tiny, tmp_path / "draft")
        config["model"] = str(tmp_path / "draft")
    speculating = start_engine("--speculative-config", json.dumps(config)).wait_ready()
    with speculating.streams(STREAMS, TOKENS, **fields) as futures:
        speculating.begin("restart", "r")
        operation = speculating.finish("r")
        found = [future.result(120) for future in futures]
    assert operation["state"] == "succeeded", operation
    assert operation["kv_handover"] == "handed_over"
    assert operation["carried_prefill_tokens"] == 0
    for one, other in zip(found, expected, strict=True):
        assert one.text == other.text
        assert one.finish_reason == other.finish_reason
        assert one.usage.completion_tokens == other.usage.completion_tokens
    text = expected[0].text
    stop = text[len(text) // 2 :][:8]
    stopped = speculating.stream(0, TOKENS, False, **{**fields, "stop": [stop]})
    assert (stopped.text, stopped.finish_reason) == (text[: text.find(stop)], "stop")
    speculating.clean()

    def drafted() -> bool:
        """The streams may have ended before the restart, and a text may give few drafts."""
        speculating.stream(0, TOKENS, False, **fields)
        return counted(speculating, "draft_tokens") > 20

    speculating.until(drafted, "drafts in the metrics", 60)
    assert 0 < counted(speculating, "drafts") < counted(speculating, "draft_tokens")
    if kind:
        assert counted(speculating, "accepted_tokens") > TOKENS / 2
    owners = {entry["owner"]: entry for entry in speculating.status()["ledger"]}
    if method == "draft_model":
        assert owners["draft_kv_pool"]["bytes"] == owners["kv_pool"]["bytes"]
        assert owners["draft_weights"]["bytes"] > 0
        assert {owners[name]["process"] for name in ("draft_kv_pool", "draft_weights")} == {
            "weight_server"
        }
