"""Calls in the forms that models write beside their template's own are read, and answers stay text.

Tests ``api/tool_calls.py``, ``api/tool_families.py`` and ``api/tool_arguments.py``.
"""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest

from plimsoll_engine.api import tool_families
from plimsoll_engine.api.tool_arguments import END_HERMES_TAG as END_HERMES
from plimsoll_engine.api.tool_arguments import HERMES_TAG as HERMES
from plimsoll_engine.api.tool_arguments import find_string_arguments
from plimsoll_engine.api.tool_calls import ParsedOutput, ToolCall
from plimsoll_engine.api.tool_families import DEEPSEEK_CALL_TAGS as DEEPSEEK_CALL
from plimsoll_engine.api.tool_families import DEEPSEEK_SEPARATOR_TAG as DEEPSEEK_SEPARATOR
from plimsoll_engine.api.tool_families import DEEPSEEK_TAGS as DEEPSEEK


def parse(family: str, pieces: list[str], texts: Any = None) -> tuple[str, list[ToolCall], bool]:
    """Return the text, the calls, and whether text after a tag is no call."""
    parser = tool_families.create_parser(family, texts or {})
    *most, last = pieces
    found: list[ParsedOutput] = [
        *map(parser.push, most),
        parser.push(last, is_last=True, is_finished=True),
    ]
    calls: list[ToolCall] = []
    for part in (one for parsed in found for one in parsed.calls):
        if part.id:
            calls.append(part)
        else:
            whole = calls[-1].arguments + part.arguments
            calls[-1] = calls[-1]._replace(arguments=whole, more=part.more)
    return "".join(one.text for one in found), calls, parser.has_unparsed_call


F = '{"name": "f", "arguments": {"a": 1}}'
G = '{"name": "g", "parameters": {"a": 2}}'
BOTH: list[tuple[str, dict[str, Any]]] = [("f", {"a": 1}), ("g", {"a": 2})]
ONE = BOTH[:1]
AS_TEXT = json.dumps('{"a": 1}')
ROLE = " to=functions.f<|channel|>commentary json<|message|>"


@pytest.mark.parametrize(
    ("family", "text", "calls"),
    [
        *(("hermes", f"{HERMES}{F}{between}{G}{END_HERMES}", BOTH) for between in ("", "\n", ", ")),
        ("hermes", HERMES + '{"arguments": {"a": True, "b": [1,],}, "name": "f"}' + END_HERMES,
         [("f", {"a": True, "b": [1]})]),
        ("hermes", HERMES + '{"name": "f", "arguments": "{\\"a\\": None,}"}' + END_HERMES,
         [("f", {"a": None})]),
        ("hermes", HERMES + '{"name": "f", "arguments": {"a": 1, ' + END_HERMES, ONE),
        *(("llama3_json", f"{F}{between}{G}", BOTH) for between in ("\n", ", ", "; ")),
        ("mistral", f"[TOOL_CALLS]f[ARGS]{AS_TEXT}", ONE),
        ("mistral", "[TOOL_CALLS]f[ARGS]null", [("f", {})]),
        ("glm45", HERMES + 'f{"a": 1}' + END_HERMES, ONE),
        ("deepseek_v3", f'{DEEPSEEK_CALL[0]}f{DEEPSEEK_SEPARATOR}{{"a": 1}}{DEEPSEEK_CALL[1]}',
         ONE),
        ("deepseek_v3",
         f"{DEEPSEEK[0]}{DEEPSEEK_CALL[0]}f{DEEPSEEK_SEPARATOR}{AS_TEXT}{DEEPSEEK_CALL[1]}", ONE),
        ("pythonic", '[f(a="x\ny\t\x00")]', [("f", {"a": "x\ny\t\x00"})]),
        ("pythonic", "[f(a=1e999, b=[NaN, -1e999])]", [("f", {"a": None, "b": [None, None]})]),
        ("pythonic", '[f(a=[1, {"b": 2', [("f", {"a": [1, {"b": 2}]})]),
        ("openai", f'{ROLE}{{"a": 1}}<|call|>', ONE),
        ("openai", f"{ROLE}{AS_TEXT}<|call|>", ONE),
        ("openai", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
         f'{ROLE}{{"a": 1}}<|call|>', ONE),
    ],
)  # fmt: skip
def test_calls_in_other_forms_are_read(
    family: str, text: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    for pieces in ([text], list(text)):
        said, found, _ = parse(family, pieces)
        assert [(one.name, json.loads(one.arguments), one.more) for one in found] == [
            (*call, False) for call in calls
        ]
        assert said == ""


@pytest.mark.parametrize("family", ["llama3_json", "pythonic"])
@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Anna", "age": 3}',
        '[{"name": "Anna"}, {"name": "Ben"}]',
        '{"function": {"name": "sin"}}',
    ],
)
def test_an_answer_in_json_that_has_a_name_is_no_call(family: str, text: str) -> None:
    for pieces in ([text], list(text)):
        assert parse(family, pieces) == (text, [], False)


@pytest.mark.parametrize(
    ("family", "text", "said"),
    [
        ("mistral", '[TOOL_CALLS]f({"a": 1})', None),
        ("hermes", HERMES + '{"name": "f{", "arguments": {}}' + END_HERMES, None),
        ("openai", " to=functions.f", None),
        ("openai", "to=day: nine", None),
        ("hermes", f'{HERMES}{F}, {{"b": 1}}{END_HERMES}', f', {{"b": 1}}{END_HERMES}'),
        ("hermes", f'{HERMES}[{F}, {{"name": 7}}]{END_HERMES}', f', {{"name": 7}}]{END_HERMES}'),
        ("hermes", f"{HERMES}{F}, and more", ", and more"),
    ],
)
def test_what_is_no_call_stays_text(family: str, text: str, said: str | None) -> None:
    for pieces in ([text], list(text)):
        content, calls, noted = parse(family, pieces)
        assert content == (text if said is None else said)
        assert len(calls) == (said is not None)
        assert noted == (family != "openai" and not text.endswith("more"))


OR_NULL = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        (OR_NULL, "12345", "12345"),
        (OR_NULL, "true", "true"),
        (OR_NULL, '{"b": 1}', '{"b": 1}'),
        (OR_NULL, "Hull", "Hull"),
        (OR_NULL, '"Hull"', "Hull"),  # as a prescribed call has it
        (OR_NULL, "null", None),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "1e5", "1e5"),
        ({"oneOf": [{"type": "string", "format": "date"}, {"type": "string"}]}, "1", "1"),
        ({"type": "string"}, "null", "null"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "7", 7),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/n"}]}, "7", 7),
        ({"anyOf": 5}, "7", 7),
        ({}, "7", 7),
    ],
)
def test_a_string_that_may_be_null_stays_a_string(schema: Any, written: str, value: Any) -> None:
    """Qwen3-Coder and GLM write strings without quotes; the schema tells them from numbers."""
    texts = {"f": find_string_arguments({"properties": {"a": schema}})}
    for family, text in (
        ("qwen3_coder", f"<function=f>\n<parameter=a>\n{written}\n</parameter>\n</function>"),
        ("glm45", f"{HERMES}f<arg_key>a</arg_key><arg_value>{written}</arg_value>{END_HERMES}"),
    ):
        for pieces in ([text], list(text)):
            _, (call,), _ = parse(family, pieces, texts)
            assert json.loads(call.arguments) == {"a": value}


def qwen(value: str, end: str = "</parameter>") -> str:
    return f"{HERMES}\n<function=f>\n<parameter=a>\n{value}\n{end}</function>\n{END_HERMES}"


def glm(value: str, end: str = "</arg_value>") -> str:
    return f"{HERMES}f\n<arg_key>a</arg_key>\n<arg_value>{value}{end}{END_HERMES}"


@pytest.mark.parametrize("texts", [{"f": {"a": True}}, {}])
@pytest.mark.parametrize(
    ("family", "text", "values"),
    [
        ("qwen3_coder", qwen("x", ""), ["x"]),
        ("qwen3_coder", qwen("x", "").replace("\n", ""), ["x"]),
        ("qwen3_coder", qwen("x", "").removesuffix(END_HERMES), ["x"]),
        ("qwen3_coder", qwen("x", "").replace("tool_call>", "seed:tool_call>"), ["x"]),
        ("qwen3_coder", qwen("x</function>y", ""), ["x</function>y"]),
        ("qwen3_coder", qwen(f"x{END_HERMES}\n{HERMES}y"), [f"x{END_HERMES}\n{HERMES}y"]),
        ("qwen3_coder", "<function=f>\n<parameter=a>x", ["x"]),
        ("qwen3_coder", "<function=f>\n<parameter=a>x</para", ["x"]),
        ("qwen3_coder", "<function=f>\n<parameter=a>a <b", ["a <b"]),
        ("qwen3_coder", qwen("x", "") + "\n" + qwen("y"), ["x", "y"]),
        ("qwen3_coder", qwen("x", "") + qwen("y", "") + "\n", ["x", "y"]),
        ("glm45", glm("x", ""), ["x"]),
        ("glm45", glm("x", "") + "\n", ["x"]),
        ("glm45", glm("x", "").removesuffix(END_HERMES), ["x"]),
        ("glm45", glm("x</function>", ""), ["x</function>"]),
        ("glm45", glm(f"x{END_HERMES}{HERMES}y"), [f"x{END_HERMES}{HERMES}y"]),
        ("glm45", glm("x", "") + "\n" + glm("y", ""), ["x", "y"]),
        ("glm45", glm("x", "") + glm("y"), ["x", "y"]),
    ],
)
def test_a_value_without_its_closing_tag_ends_with_its_call(
    family: str, text: str, values: list[str], texts: Any
) -> None:
    rng = random.Random(text)
    for size in (0, 1, 1, 2, 3, 7, 11):
        cuts = sorted(rng.sample(range(len(text)), 5)) if not size else range(0, len(text), size)
        bounds = [0, *cuts, len(text)]
        said, found, _ = parse(family, [text[a:b] for a, b in itertools.pairwise(bounds)], texts)
        assert [(one.name, json.loads(one.arguments), one.more) for one in found] == [
            ("f", {"a": value}, False) for value in values
        ]
        assert said == ""
    said, found, _ = parse(family, [text], texts)
    assert [json.loads(one.arguments) for one in found] == [{"a": value} for value in values]


def test_a_value_that_a_limit_cuts_stays_open() -> None:
    """The finish reason ``length`` says so, and the arguments are what came."""
    for family, text in (
        ("qwen3_coder", "<function=f>\n<parameter=a>x"),
        ("glm45", glm("x", "")[:-12]),
    ):
        parser = tool_families.create_parser(family, {"f": {"a": True}})
        (call,) = parser.push(text, is_last=True).calls
        assert call.more
        assert call.arguments == '{"a": "x'
