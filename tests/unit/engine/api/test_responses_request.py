"""The body of ``/v1/responses`` becomes a chat, or an error that names its field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from plimsoll_engine.api.errors import ApiError, make_invalid_error
from plimsoll_engine.api.output_grammar import list_forced_tools
from plimsoll_engine.api.protocol import ChatRequest, Message
from plimsoll_engine.api.responses_request import (
    AllowedFunctions,
    ResponsesRequest,
    convert_to_chat,
    drop_hosted_tools,
    get_echoed_fields,
    rename_field,
)
from plimsoll_engine.api.validation import decode_body

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
CALL = {"type": "function_call", "name": "f", "call_id": "c1", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "high"}


def chat(**fields: Any) -> ChatRequest:
    raw = json.dumps({"model": "m", "input": "hi"} | fields).encode()
    body = decode_body(raw, ResponsesRequest, strict=True)
    drop_hosted_tools(body, False, [])
    return convert_to_chat(body, strict=True)


def part(given: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [given]}]}


def allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": list(tools)}


def test_items_become_messages() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    wanted = [
        {"role": "user", "content": [{"type": "input_text", "text": "see"}, image]},
        {"type": "message", "role": "assistant", "id": "msg-1", "status": "completed",
         "content": [{"type": "output_text", "text": "I look", "annotations": []}]},
        CALL,
        CALL | {"call_id": "c2", "id": "fc-1", "status": "completed"},
        OUTPUT,
        CALL | {"call_id": "c3"},
    ]  # fmt: skip
    messages = chat(instructions="Be brief.", input=wanted).messages

    def call(name: str) -> dict[str, Any]:
        return {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}}

    assert messages == [
        Message(role="system", content="Be brief."),
        Message(role="user", content=[
            {"type": "text", "text": "see"},
            {"type": "image_url", "image_url": {"url": image["image_url"]}},
        ]),
        Message(role="assistant", content=[{"type": "text", "text": "I look"}],
                tool_calls=[call("c1"), call("c2")]),
        Message(role="tool", tool_call_id="c1", content="high"),
        Message(role="assistant", tool_calls=[call("c3")]),
    ]  # fmt: skip


def test_options_become_those_of_a_chat() -> None:
    schema = {"type": "object"}
    asked = chat(
        max_output_tokens=5, top_logprobs=3, include=["message.output_text.logprobs"],
        text={"format": {"type": "json_schema", "name": "s", "schema": schema}},
        tools=[TOOL], tool_choice={"type": "function", "name": "f"}, store=False, reasoning=None,
        truncation="disabled", metadata={"a": "b"},
    )  # fmt: skip
    assert (asked.max_completion_tokens, asked.logprobs, asked.top_logprobs) == (5, True, 3)
    assert asked.response_format == {"type": "json_schema", "json_schema": {"schema": schema}}
    either = chat(text={"format": {"type": "json_object", "schema": schema}})
    assert either.response_format == {"type": "json_object", "schema": schema}
    assert asked.tools is not None
    assert asked.tools[0].function.name == "f"
    told = get_echoed_fields(ResponsesRequest(model="m", input="hi", metadata={"a": "b"}), {})
    assert (told["metadata"], told["tools"], told["tool_choice"]) == ({"a": "b"}, [], "auto")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [{"type": "reasoning", "id": "a", "summary": []}]}, "input"),
        ({"input": [{"type": "reasoning", "summary": 5, "content": {}}] * 2}, "input[0].summary"),
        ({"input": [{"type": "reasoning", "content": "Hm."}]}, "input[0].content"),
        ({"store": True}, "store"),
        ({"previous_response_id": "resp-1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"truncation": "auto"}, "truncation"),
        ({"wings": 2}, "wings"),
        ({"input": []}, "input"),
        ({"input": [{"role": "the captain", "content": "a"}]}, "input[0]"),
        ({"input": [{"content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "assistant", "content": None}]}, "input[0].content"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
        (part("a"), "input[0].content[0]"),
        (part({"type": "input_file", "file_id": "f"}), "input[0].content[0].type"),
        (part({"type": "input_image", "file_id": "f"}), "input[0].content[0].image_url"),
        (part({"type": "input_text"}), "input[0].content[0].text"),
        (part({"type": "input_text", "text": "a", "bold": True}), "input[0].content[0].bold"),
        ({"input": [OUTPUT | {"output": [{"type": "text"}]}]}, "input[0].output[0].text"),
        ({"input": [{"role": "user", "content": "a", "name": "b"}]}, "input[0].name"),
        ({"input": [CALL | {"namespace": "n"}]}, "input[0].namespace"),
        ({"tools": [TOOL | {"defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].function"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": ["message"]}]}, "input[0].type"),
        ({"input": [OUTPUT | {"output": 7}]}, "input[0].output"),
        ({"input": [CALL | {"arguments": {}}]}, "input[0].arguments"),
        ({"input": [{"role": "user", "content": None}]}, "input[0].content"),
        ({"tools": [TOOL | {"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": allowed("auto", {"type": "mcp"})},
            "tool_choice.tools[0]",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "custom", "name": "f"}}, "tool_choice.type"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as error:
        chat(**fields)
    assert (error.value.status, error.value.param) == (400, param)


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("tools[1].function.parameters", "tools[1].parameters"),
        ("response_format.json_schema.schema", "text.format.schema"),
        ("messages", "input"),
        ("messages[0].content", "instructions"),
        ("messages[2].content[1]", "input[2].content[1]"),
        ("messages[2].tool_calls[1].function.arguments", "input[4].arguments"),
        ("messages[3].content[0]", "input[5].output[0]"),
        (None, None),
    ],
)
def test_an_error_of_the_chat_has_the_name_of_the_response(
    field: str | None, name: str | None
) -> None:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "a"}, {"type": "reasoning", "summary": [{"text": "b"}]},
        {"role": "assistant", "content": "c"}, CALL, CALL, OUTPUT,
    ]  # fmt: skip
    origins: dict[str, str] = {}
    convert_to_chat(ResponsesRequest(input=items, instructions="d"), origins=origins)
    error = make_invalid_error(f"{field}: required is no list", field)
    rename_field(error, origins)
    assert (error.param, str(error)) == (name, f"{name}: required is no list")


@pytest.mark.parametrize(
    "fields",
    [
        {"include": ["reasoning.encrypted_content"]},
        {"client_metadata": {"a": "b"}},
        {"text": {"verbosity": "low"}},
        {"tools": [], "tool_choice": "auto"},
        {"reasoning": {"summary": "detailed"}},
        {"prompt_cache_key": None, "safety_identifier": "x", "prompt_cache_retention": "24h"},
    ],
)
def test_what_asks_for_nothing_is_taken(fields: dict[str, Any]) -> None:
    asked = chat(**fields)
    assert (asked.logprobs, asked.response_format) == (None, None)


def test_tools_that_only_openai_runs_are_left_out_where_that_is_wanted() -> None:
    body = ResponsesRequest(input="hi", tools=[{"type": "web_search"}, TOOL], tool_choice="auto")
    warnings: list[str] = []
    drop_hosted_tools(body, True, warnings)
    assert body.tools == [TOOL]
    assert warnings == ["tools of these types are ignored: web_search"]
    alone = ResponsesRequest(input="hi", tools=[{"type": "web_search"}], tool_choice="auto")
    drop_hosted_tools(alone, True, warnings)
    assert convert_to_chat(alone).tools is None


def test_allowed_tools_are_those_of_a_chat_and_repeated() -> None:
    choice = allowed("required", {"type": "function", "name": "g"})
    raw = {"input": "hi", "tools": [TOOL, TOOL | {"name": "g"}], "tool_choice": choice}
    body = decode_body(json.dumps(raw).encode(), ResponsesRequest, strict=True)
    assert [tool.function.name for tool in list_forced_tools(convert_to_chat(body))] == ["g"]
    assert get_echoed_fields(body, {})["tool_choice"] == choice


def test_hosted_tools_leave_the_allowed_ones_too() -> None:
    for others, wanted in (([TOOL], [TOOL]), ([], "none")):
        hosted = {"type": "web_search"}
        raw = {
            "input": "hi",
            "tools": [TOOL, hosted],
            "tool_choice": allowed("auto", hosted, *others),
        }
        body = decode_body(json.dumps(raw).encode(), ResponsesRequest)
        drop_hosted_tools(body, True, [])
        found = body.tool_choice
        assert (found.tools if isinstance(found, AllowedFunctions) else found) == wanted


def test_fields_that_are_lost_are_in_a_warning() -> None:
    items: list[dict[str, Any]] = [
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"type": None, "role": "user", "content": "a", "name": "b", "id": None},
    ]
    warnings: list[str] = []
    convert_to_chat(ResponsesRequest(input=items, tools=[TOOL | {"cache": 1}]), warnings=warnings)
    assert warnings == [
        "unknown fields are ignored: input[0].encrypted_content, input[1].name, tools[0].cache"
    ]


@pytest.mark.parametrize(
    ("item", "field", "instead"),
    [
        ({"role": "assistant", "tool_calls": [{"id": "c1"}]}, "tool_calls", "type function_call"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "function_call", "function_call"),
        ({"role": "tool", "tool_call_id": "c1"}, "tool_call_id", "type function_call_output"),
        ({"role": "assistant", "reasoning_content": "Hm."}, "reasoning_content", "type reasoning"),
        ({"role": "assistant", "refusal": "No."}, "refusal", "type refusal in content"),
    ],
)
def test_a_message_of_a_chat_names_the_item_to_send(item: Any, field: str, instead: str) -> None:
    with pytest.raises(ApiError, match=f"{instead} instead") as refused:
        chat(input=[item])
    assert refused.value.param == f"input[0].{field}"


def test_reasoning_items_in_a_row_are_one_message() -> None:
    items: list[dict[str, Any]] = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}
        for text in ("Hm.", "So.")
    ]
    (message,) = chat(input=[*items, {"role": "assistant", "content": "No."}]).messages
    assert (message.content, message.extra) == ("No.", {"reasoning_content": "Hm.\nSo."})


def test_reasoning_belongs_to_the_answer_or_call_behind_it() -> None:
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So."}]}
    answer = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    messages = chat(input=[thought, CALL, OUTPUT, summary, answer]).messages
    assert [(one.role, one.extra) for one in messages] == [
        ("assistant", {"reasoning_content": "Hm."}), ("tool", {}),
        ("assistant", {"reasoning_content": "So."}),
    ]  # fmt: skip
    assert messages[0].tool_calls is not None
    assert messages[2].content == [{"type": "text", "text": "No."}]
