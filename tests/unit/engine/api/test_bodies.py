"""A body that is no request: the error names the field, or says that it is about the body.

Tests ``api/validation.py`` and ``api/protocol.py``.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from plimsoll_engine.api.errors import ApiError
from plimsoll_engine.api.protocol import (
    BatchChatRequest,
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
)
from plimsoll_engine.api.responses_request import ResponsesRequest
from plimsoll_engine.api.validation import FIELDS_OF_OTHER_PATHS, REFUSED_FIELDS, decode_body


@pytest.mark.parametrize(
    ("body", "param"),
    [
        pytest.param(b"[]", None, id="array"),
        pytest.param(b"null", None, id="null"),
        pytest.param(b'{"": 1, "model": "m", "prompt": "a"}', None, id="nameless-field"),
        pytest.param(b'{"model": 1, "prompt": "a"}', "model", id="type"),
        pytest.param(b'{"model": "m"}', "prompt", id="missing"),
        pytest.param(b'{"model": "m", "prompt": "a", "x": 1}', "x", id="unknown"),
        pytest.param(
            b'{"model": "m", "prompt": "a", "stream_options": {"": 1}}', "stream_options",
            id="nameless-field-inside",
        ),
        pytest.param(
            b'{"model": "m", "prompt": "a", "metadata": {"a": 1}}', "metadata[...]",
            id="value-in-map",
        ),
        pytest.param(
            b'{"model": "m", "prompt": "a", "logit_bias": {"7": 101}}', "logit_bias[...]",
            id="range-in-map",
        ),
    ],
)  # fmt: skip
def test_an_error_names_the_field_or_the_body(body: bytes, param: str | None) -> None:
    with pytest.raises(ApiError) as raised:
        decode_body(body, CompletionRequest, strict=True)
    assert raised.value.status == 400
    assert raised.value.param == param
    assert param is not None or str(raised.value).startswith("the body ")


def allowed(mode: str, *tools: object) -> dict[str, object]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
        ({"tool_choice": {"function": {"name": "f"}}}, "tool_choice.type"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
    ],
)
def test_an_error_names_the_whole_path_of_a_missing_field(
    fields: dict[str, object], param: str
) -> None:
    body = {"messages": [{"role": "user", "content": "a"}]} | fields
    with pytest.raises(ApiError) as raised:
        decode_body(json.dumps(body).encode(), ChatRequest)
    assert raised.value.param == param


TOOL = {"type": "function", "function": {"name": "f"}}
CUSTOM = {"type": "custom", "custom": {"name": "shell"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOL, CUSTOM]}, "tools[1].type"),
        ({"tools": [TOOL], "tool_choice": CUSTOM}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": allowed("auto", TOOL, CUSTOM)},
         "tool_choice.allowed_tools.tools[1].type"),
    ],
)  # fmt: skip
def test_a_custom_tool_is_refused_with_a_way_out(fields: dict[str, object], param: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}]} | fields
    with pytest.raises(ApiError, match="give a custom tool as a function of one string") as raised:
        decode_body(json.dumps(body).encode(), ChatRequest)
    assert (raised.value.status, raised.value.param) == (400, param)


@pytest.mark.parametrize(
    ("mode", "tools", "param"),
    [
        ("auto", [TOOL, {"type": "function", "function": {"name": "g"}}],
         "tool_choice.allowed_tools.tools[1].function.name"),
        ("required", [], "tool_choice.allowed_tools.tools"),
        ("none", [TOOL], "tool_choice.allowed_tools.mode"),
    ],
)  # fmt: skip
def test_allowed_tools_that_name_no_tool_are_refused(
    mode: str, tools: list[object], param: str
) -> None:
    body = {
        "messages": [{"role": "user", "content": "a"}], "tools": [TOOL],
        "tool_choice": allowed(mode, *tools),
    }  # fmt: skip
    with pytest.raises(ApiError) as raised:
        decode_body(json.dumps(body).encode(), ChatRequest)
    assert (raised.value.status, raised.value.param) == (400, param)


def test_half_a_character_is_replaced() -> None:
    """As JavaScript and Python write one that a client cut; pairs and texts stay."""
    for escaped, text in (
        (r"a\ud83d", "a\ufffd"), (r"\uDE00b", "\ufffdb"), (r"\ud83d\ude00\ud83d", "😀\ufffd"),
        (r"\\ud83d \ud83d", "\\ud83d \ufffd"), (r"\ud83d\n", "\ufffd\n"),
        (r"\ud83d\ud83d\ude00", "\ufffd😀"),
    ):  # fmt: skip
        body = f'{{"messages": [{{"role": "user", "content": "{escaped}"}}]}}'.encode()
        assert decode_body(body, ChatRequest).messages[0].content == text


def test_a_whole_number_may_have_a_fraction_of_zero() -> None:
    """Java's Gson writes all numbers of a map like this, and vLLM takes them."""
    fields = b'{"prompt": "a", "max_tokens": 5.0, "n": 2.000, "seed": -7.0, "temperature": 1.0, '
    body = decode_body(fields + b'"top_k": 3 , "min_p": -0.0}', CompletionRequest)
    assert (body.max_tokens, body.n, body.seed, body.top_k) == (5, 2, -7, 3)
    assert (body.temperature, body.min_p) == (1, 0)
    for wrong in (b"5.5", b'"5.0"', b"5.", b"[5.0]"):
        with pytest.raises(ApiError):
            decode_body(b'{"prompt": "a", "max_tokens": ' + wrong + b"}", CompletionRequest)


def test_the_types_of_a_body_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Annotations would be evaluated each time, which took 2 ms of every request."""
    body = b'{"prompt": "x", "stream": true, "stream_options": {"include_usage": true}}'
    decode_body(body, CompletionRequest)

    def read(kind: type) -> None:
        pytest.fail(f"{kind} is read again")

    monkeypatch.setattr(msgspec.structs, "fields", read)
    assert decode_body(body, CompletionRequest).stream_options is not None


def test_unknown_fields_are_named_and_null_is_a_default() -> None:
    warnings: list[str] = []
    body = {
        "model": "m", "prompt": "a", "wings": 2, "é": 1, "ignore_eos": None, "n": None,
        "prompt_cache_key": "k", "safety_identifier": "s", "client_metadata": {}, "stream": True,
        "stream_options": {"include_usage": True, "include_obfuscation": False, "sails": 3},
    }  # fmt: skip
    found = decode_body(json.dumps(body).encode(), CompletionRequest, warnings=warnings)
    assert found.stream_options is not None
    assert found.stream_options.include_usage
    assert found.ignore_eos is False
    assert warnings == ["unknown fields are ignored: wings, ?, stream_options.sails"]


@pytest.mark.parametrize("field", REFUSED_FIELDS)
def test_what_would_change_the_answer_is_refused(field: str) -> None:
    body = {"model": "m", "prompt": "a", field: {}}
    with pytest.raises(ApiError) as raised:
        decode_body(json.dumps(body).encode(), CompletionRequest)
    assert (raised.value.status, raised.value.param) == (400, field)
    assert str(raised.value).endswith(f": {REFUSED_FIELDS[field]}")
    decode_body(json.dumps(body | {field: None}).encode(), CompletionRequest)


@pytest.mark.parametrize("field", FIELDS_OF_OTHER_PATHS)
def test_a_field_of_another_path_is_refused_and_a_value_without_effect_is_not(field: str) -> None:
    least: dict[type[msgspec.Struct], dict[str, Any]] = {
        CompletionRequest: {"prompt": "a"}, ResponsesRequest: {"input": "a"},
        ChatRequest: {"messages": [{"role": "user", "content": "a"}]},
    }  # fmt: skip
    refused = []
    for kind, body in least.items():
        if field not in {one.encode_name for one in msgspec.structs.fields(kind)}:
            refused.append(kind)
            with pytest.raises(ApiError) as raised:
                decode_body(json.dumps(body | {field: {"a": 1}}).encode(), kind)
            assert (raised.value.status, raised.value.param) == (400, field)
            neutral = 1 if field in ("n", "best_of") else False
            decode_body(json.dumps(body | {field: neutral}).encode(), kind)
    assert 1 <= len(refused) <= 2
    if field not in ("messages", "prompt", "tools"):
        decode_body(json.dumps({"prompt": "a", field: 7}).encode(), TokenizeRequest)


@pytest.mark.parametrize(
    ("field", "taken", "refused"),
    [
        ("mirostat_mode", 0, 2), ("dry_multiplier", 0.0, 0.8), ("repeat_penalty", 1.0, 1.1),
        ("typical_p", 1, 0.9), ("do_sample", True, False), ("enable_thinking", None, False),
        ("stop_sequences", [], ["a"]), ("functions", [], [{"name": "f"}]),
        ("system", "", "Be brief"), ("function_call", "none", "auto"),
    ],
)  # fmt: skip
def test_a_value_that_changes_nothing_is_taken(field: str, taken: object, refused: object) -> None:
    body = {"messages": [{"role": "user", "content": "a"}]}
    warnings: list[str] = []
    decode_body(json.dumps(body | {field: taken}).encode(), ChatRequest, True, warnings)
    assert warnings == []
    with pytest.raises(ApiError, match=field):
        decode_body(json.dumps(body | {field: refused}).encode(), ChatRequest)


def test_messages_keep_the_fields_of_their_template() -> None:
    body = {"messages": [{"role": "user", "content": "a", "weather": [1], "name": None}]}
    (message,) = decode_body(json.dumps(body).encode(), ChatRequest).messages
    sent = {"role": None, "content": None, "weather": [1], "name": None}
    assert message.extra == sent
    assert list(message.extra) == list(sent)
    batch = {"messages": [body["messages"], body["messages"]]}
    found = decode_body(json.dumps(batch).encode(), BatchChatRequest).messages
    assert [one.extra for messages in found for one in messages] == [sent] * 2
