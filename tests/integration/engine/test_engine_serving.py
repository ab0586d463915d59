"""The OpenAI API: answers, streams, limits, and what bad input gets."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

MODEL = "tiny"


def test_models(engine: Any) -> None:
    models = engine.client.models.list().data
    assert [model.id for model in models] == [MODEL]
    assert engine.client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        engine.client.models.retrieve("org/other")


def test_chat_streams_what_it_answers_at_once(engine: Any) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": "You are a ship."},
            {"role": "user", "content": [{"type": "text", "text": "Where to?"}]},
        ],
        "temperature": 0,
        "max_completion_tokens": 24,
    }
    whole = engine.client.chat.completions.create(**asked)
    chunks = list(engine.client.chat.completions.create(**asked, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert whole.choices[0].message.content == text != ""
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 24
    assert all(chunk.usage is None for chunk in chunks)


def test_a_seed_decides_the_text(engine: Any) -> None:
    def ask(seed: int) -> str:
        answer = engine.client.completions.create(
            model=MODEL, prompt="Tide", max_tokens=40, temperature=2, seed=seed, top_p=0.999
        )
        return str(answer.choices[0].text)

    assert ask(1) == ask(1)


def test_token_ids_are_a_prompt_and_a_stop(engine: Any) -> None:
    answer = engine.client.completions.create(
        model=MODEL, prompt=[5, 6, 7], max_tokens=4, temperature=0
    )
    assert answer.usage.prompt_tokens == 3
    nested = engine.client.completions.create(
        model=MODEL, prompt=[[5, 6, 7]], max_tokens=4, temperature=0
    )
    assert nested.choices[0].text == answer.choices[0].text


GOOD = {"model": MODEL, "prompt": "a", "max_tokens": 2}


def still_serves(engine: Any) -> None:
    """Nothing stays of what was refused, and the next request is answered."""
    engine.clean()
    status, body = engine.post("/v1/completions", json.dumps(GOOD).encode())
    assert (status, body["usage"]["completion_tokens"]) == (200, 2)


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"prompt": ""}, "prompt", "empty_prompt"),
        ({"prompt": []}, "prompt", "empty_prompt"),
        ({"prompt": ["a", ""]}, "prompt", "empty_prompt"),
        ({"prompt": ["a"] * 40}, "prompt", "invalid_value"),
        ({"prompt": [1, "b"]}, "prompt", "invalid_value"),
        ({"prompt": [10**9]}, "prompt", "invalid_value"),
        ({"prompt": [-1]}, None, "invalid_value"),
        ({"prompt": 7}, "prompt", "invalid_value"),
        ({"prompt": "word " * 20_000}, "prompt", "context_length_exceeded"),
        ({"prompt": "x" * 600_000}, "prompt", "context_length_exceeded"),
        ({"max_tokens": 10**6}, "prompt", "context_length_exceeded"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": 1.5}, "max_tokens", "invalid_value"),
        ({"temperature": -0.1}, "temperature", "invalid_value"),
        ({"temperature": 1e300}, "temperature", "invalid_value"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"top_k": -2}, "top_k", "invalid_value"),
        ({"min_p": 2}, "min_p", "invalid_value"),
        ({"seed": 2**64}, "seed", "invalid_value"),
        ({"stop": ""}, "stop", "invalid_value"),
        ({"stop": ["a"] * 17}, "stop", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 129}, "n", "invalid_value"),
        ({"n": 40}, "prompt", "invalid_value"),
        ({"best_of": 2}, "best_of", "unsupported_value"),
        ({"logprobs": 21}, "logprobs", "invalid_value"),
        ({"logprobs": True}, "logprobs", "invalid_value"),
        ({"presence_penalty": 2.5}, "presence_penalty", "invalid_value"),
        ({"frequency_penalty": "much"}, "frequency_penalty", "invalid_value"),
        ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"ship": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"999999": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"0" * 20 + "5": 1}}, "logit_bias", "invalid_value"),
        ({"stop_token_ids": [10**7]}, "stop_token_ids", "invalid_value"),
        ({"min_tokens": 9}, "min_tokens", "invalid_value"),
        ({"priority": 2**40}, "priority", "invalid_value"),
        ({"deadline_s": 0}, "deadline_s", "invalid_value"),
        ({"user": "u" * 1000}, "user", "invalid_value"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema.schema",
            "invalid_value",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
        (
            {"structured_outputs": {"regex": "a", "json_object": True}},
            "structured_outputs",
            "invalid_value",
        ),
        ({"structured_outputs": {"json": "[1]"}}, "structured_outputs.json", "invalid_value"),
        (
            {"structured_outputs": {"regex": "(" * 300}},
            "structured_outputs.regex",
            "invalid_request",
        ),
        (
            {"structured_outputs": {"json": {"type": "objct"}}},
            "structured_outputs.json",
            "invalid_request",
        ),
        (
            {"structured_outputs": {"regex": "x" * (1 << 14)}},
            "structured_outputs.regex",
            "invalid_value",
        ),
        ({"guided_regex": "a"}, "guided_regex", "unsupported_value"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ],
)
def test_bad_values_name_their_field(
    engine: Any, change: dict[str, Any], param: str | None, code: str
) -> None:
    status, body = engine.post("/v1/completions", json.dumps(GOOD | change).encode())
    error = body["error"]
    assert (status, error["type"], error["code"]) == (400, "invalid_request_error", code), error
    if param is not None:
        assert error["param"] is not None
        assert error["param"].split("[")[0] == param, error
    assert error["message"]
    still_serves(engine)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', "invalid_json"),
        (b'{"model": "tiny", "prompt": "\xff"}', "invalid_utf8"),
        *(
            ('{"model": "tiny", "prompt": "a"}'.encode(encoding), "invalid_utf8")
            for encoding in ("utf-16", "utf-16-be", "utf-32", "utf-32-le")
        ),
        (b"[]", "invalid_value"),
        (b"[" * 60_000, "invalid_value"),
        (
            b'{"model": "tiny", "prompt": "a", "structured_outputs": {"json": "'
            + b"[" * 60_000
            + b'"}}',
            "invalid_value",
        ),
        (
            b'{"model": "tiny", "prompt": "a", "structured_outputs": {"json": '
            + b'{"a":' * 60_000
            + b"1"
            + b"}" * 60_000
            + b"}}",
            "invalid_json",
        ),
        (b'{"model": "tiny"}', "invalid_value"),
    ],
)
def test_bodies_that_cannot_be_read(engine: Any, body: bytes, code: str) -> None:
    status, answer = engine.post("/v1/completions", body)
    assert (status, answer["error"]["code"]) == (400, code)
    still_serves(engine)


def test_a_byte_order_mark_is_ignored(engine: Any) -> None:
    for size in (0, 5000):  # prepared in the frontend, and in a process of its own
        body = '{"prompt": "a", "max_tokens": 1}' + " " * size
        status, answer = engine.post("/v1/completions", body.encode("utf-8-sig"))
        assert status == 200, answer


def test_the_wrong_model_and_path(engine: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="use 'tiny'"):
        engine.client.completions.create(model="gpt", prompt="a")
    status, body = engine.post("/v1/moderations", b"{}")
    assert (status, body["error"]["code"]) == (404, "not_found")
    status, body = engine.post("/v1/embeddings", b"{}")
    assert (status, body["error"]["code"]) == (404, "unsupported_model")
    assert engine.get("/v1/completions")[0] == 405


def test_images_are_refused_by_a_text_model(engine: Any) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    with pytest.raises(openai.BadRequestError, match="accepts only text"):
        engine.client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": [image]}]
        )


def test_requests_above_the_bound_get_429_and_retry_after(engine: Any) -> None:
    """The engine of these tests holds 32 requests."""

    def ask(number: int) -> Any:
        return engine.client.completions.with_raw_response.create(
            model=MODEL, prompt=f"{number}", max_tokens=100
        )

    with ThreadPoolExecutor(40) as pool:
        futures = [pool.submit(ask, number) for number in range(40)]
    refused = [error for future in futures if (error := future.exception()) is not None]
    assert 1 <= len(refused) <= 8
    for error in refused:
        assert isinstance(error, openai.RateLimitError)
        assert error.code == "queue_full"
        assert error.response.headers["retry-after"] == "1"
    engine.clean()


def test_metrics_have_the_names_that_dashboards_read(engine: Any) -> None:
    engine.stream(1, 5, False)
    status, text = engine.get("/metrics")
    assert status == 200
    for name in (
        "num_requests_running{", "num_requests_waiting{", "prompt_tokens_total{",
        "generation_tokens_total{", "time_to_first_token_seconds_bucket{",
        "inter_token_latency_seconds_bucket{", "requests_total{", "worker_starts_total{",
        "kv_cache_usage_perc{", "ledger_bytes{", "ledger_bound_bytes{",
    ):  # fmt: skip
        assert f"plimsoll_engine_{name}" in text
    # Read by endpoint pickers with their default flags.
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert f'\nvllm:{name}{{model_name="tiny"}} ' in text
    assert 'plimsoll_engine_state{model_name="tiny",state="serving"} 1.0' in text
