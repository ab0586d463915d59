"""Which grammar a body asks for; llguidance itself accepts each of them.

Tests ``api/output_grammar.py``.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher

from plimsoll_engine.api import output_grammar, protocol
from plimsoll_engine.api.decoding import decode
from plimsoll_engine.api.errors import ApiError
from plimsoll_engine.messages.worker_ipc import Grammar

MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("f", "g")
]
SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}


def ask(added: dict[str, int] | None = None, **fields: Any) -> Grammar | None:
    body = msgspec.json.encode({"model": "m", "messages": MESSAGES, **fields})
    return output_grammar.of(decode(body, protocol.ChatRequest), (added or {}).get)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "auto"},
        {"tools": TOOLS, "tool_choice": "none", "parallel_tool_calls": True},
    ],
)
def test_nothing_is_asked_for(fields: dict[str, Any]) -> None:
    assert ask(**fields) is None


@pytest.mark.parametrize(
    ("fields", "kind", "text", "field"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", "", "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            "json_schema", '{"type":"object","properties":{"b":{},"a":{}}}',
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema",
         '{"type":"object","properties":{"b":{},"a":{}}}', "response_format.schema"),
        ({"response_format": {"type": "json_object", "schema": None}}, "json_object", "",
         "response_format"),
        ({"structured_outputs": {"json": '{"a": 1}'}}, "json_schema", '{"a":1}',
         "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ['a"b', "ü\n"]}}, "lark", 'start: "a\\"b" | "ü\\n"',
         "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "start: /a/"}}, "lark", "start: /a/",
         "structured_outputs.grammar"),
        ({"structured_outputs": {"json_object": True}}, "json_object", "",
         "structured_outputs.json_object"),
    ],
)  # fmt: skip
def test_what_is_asked_for(fields: dict[str, Any], kind: Any, text: str, field: str) -> None:
    assert ask(**fields) == Grammar(kind, text, field)


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"tool_choice": "required"}, "start: call (NEWLINE call)*"),
        ({"tool_choice": "required", "parallel_tool_calls": False}, "start: call"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "start: call"),
    ],
)
def test_a_forced_call_is_a_grammar(fields: dict[str, Any], rule: str) -> None:
    found = ask(tools=TOOLS, **fields)
    assert found is not None
    assert found.text.splitlines()[0] == rule
    assert ("name" in found.text and '\\"f\\"' in found.text) == (
        fields["tool_choice"] == "required"
    )
    source = LLMatcher.grammar_from_lark(found.text)
    assert LLMatcher.validate_grammar(source) == ""


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
         "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a"}, "tools": TOOLS, "tool_choice": "required"},
         "structured_outputs.regex"),
        ({"response_format": {"type": "json_object", "schema": [1]}}, "response_format.schema"),
        ({"response_format": {}}, "response_format.type"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_names_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as error:
        ask(**fields)
    assert (error.value.status, error.value.param) == (400, param)


def test_a_call_is_no_answer_that_has_a_format() -> None:
    wanted = {"type": "json_object"}
    found = ask(tools=TOOLS, tool_choice="required", response_format=wanted)
    assert found is not None
    assert found.field == "tools"


def test_tags_that_are_added_tokens_are_written_as_tokens() -> None:
    found = ask({"<tool_call>": 7, "</tool_call>": 8}, tools=TOOLS, tool_choice="required")
    assert found is not None
    assert found.text.splitlines()[1] == 'call: <[7]> "\\n" (tool_0 | tool_1) "\\n" <[8]>'


@pytest.mark.parametrize("more", [{}, {"$id": "https://example.com/now"}])
def test_parameters_go_in_as_they_were_sent(more: dict[str, Any]) -> None:
    """References are to the root of the schema that they stand in; a constant is no schema."""
    parameters = more | {
        "$defs": {"Unit": {"enum": ["celsius"]}},
        "type": "object",
        "properties": {
            "unit": {"$ref": "#/$defs/Unit"},
            "is": {"const": {"$ref": "#/$defs/Unit"}},
        },
        "required": ["unit"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": n, "parameters": parameters}} for n in "fg"]
    found = ask(tools=tools, tool_choice="required")
    assert found is not None
    assert LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(found.text)) == ""
    assert found.text.count(f"%json {json.dumps(parameters)}") == len(tools)


def test_parameters_that_are_nested_too_deeply_are_no_grammar() -> None:
    nested: dict[str, Any] = {}
    for _ in range(600):
        nested = {"not": nested}
    tools = [{"type": "function", "function": {"name": "f", "parameters": nested}}]
    found = ask(tools=tools, tool_choice="required")
    assert found is not None
    assert LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(found.text)) != ""
