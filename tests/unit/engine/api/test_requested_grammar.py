"""Which grammar a body asks for; llguidance itself accepts each of them.

Tests ``api/output_grammar.py``.
"""

from __future__ import annotations

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


def ask(**fields: Any) -> Grammar | None:
    body = msgspec.json.encode({"model": "m", "messages": MESSAGES, **fields})
    return output_grammar.of(decode(body, protocol.ChatRequest))


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
    assert ('"f"' in found.text) == (fields["tool_choice"] == "required")
    source = LLMatcher.grammar_from_lark(found.text)
    assert LLMatcher.validate_grammar(source) == ""


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
         "structured_outputs.regex"),
        ({"response_format": {"type": "json_object"}, "tools": TOOLS, "tool_choice": "required"},
         "tools"),
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


def test_parameters_may_refer_to_their_own_definitions() -> None:
    """As pydantic writes them: the references are to the root, which is not the parameters'."""
    parameters = {
        "$defs": {"Unit": {"enum": ["celsius"]}},
        "type": "object",
        "properties": {"unit": {"$ref": "#/$defs/Unit"}, "again": {"$ref": "#"}},
        "required": ["unit"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": n, "parameters": parameters}} for n in "fg"]
    found = ask(tools=tools, tool_choice="required")
    assert found is not None
    assert LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(found.text)) == ""
    assert "#/anyOf/1/properties/arguments/$defs/Unit" in found.text


def test_parameters_that_are_nested_too_deeply_are_refused() -> None:
    nested: dict[str, Any] = {}
    for _ in range(600):
        nested = {"not": nested}
    tools = [{"type": "function", "function": {"name": "f", "parameters": nested}}]
    with pytest.raises(ApiError, match="nested too deeply") as error:
        ask(tools=tools, tool_choice="required")
    assert error.value.param == "tools"
