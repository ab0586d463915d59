"""Which grammar a body asks for; llguidance itself accepts each of them.

Tests ``api/output_grammar.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher, LLTokenizer

from plimsoll_engine.api import forced_calls, output_grammar, protocol, tool_families
from plimsoll_engine.api.errors import ApiError
from plimsoll_engine.api.tool_calls import ToolCall
from plimsoll_engine.api.validation import decode_body
from plimsoll_engine.core.grammar.grammars import Vocabulary
from plimsoll_engine.frontend.requests.tokenizer import Tokenizer
from plimsoll_engine.messages.worker_ipc import Grammar
from plimsoll_faults.models import tiny_text

MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("f", "g")
]
SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> list[Tokenizer]:
    """Without and with added tokens for the tags of calls."""
    found = []
    for name in ("plain", "added"):
        folder = tmp_path_factory.mktemp(name)
        tiny_text.write_tokenizer(tiny_text.train_tokenizer(), folder)
        if name == "added":
            tiny_text.add_tokens(folder, sorted(tool_families.TAGS))
        found.append(Tokenizer(folder))
    return found


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.fixture
def ask(tokenizers: list[Tokenizer]) -> Callable[..., Grammar | None]:
    def asked(family: str = "hermes", added: bool = False, **fields: Any) -> Grammar | None:
        body = msgspec.json.encode({"model": "m", "messages": MESSAGES, **fields})
        request = decode_body(body, protocol.ChatRequest)
        return output_grammar.build_grammar(request, tokenizers[added], family)

    return asked


Ask = Callable[..., Grammar | None]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "auto"},
        {"tools": TOOLS, "tool_choice": "none", "parallel_tool_calls": True},
        {"tools": TOOLS, "tool_choice": allowed("auto", "g")},
    ],
)
def test_nothing_is_asked_for(fields: dict[str, Any], ask: Ask) -> None:
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
        ({"structured_outputs": {"json": r'{"const": "\ud800\ud83e\udd8a"}'}}, "json_schema",
         '{"const":"\ufffd\U0001f98a"}', "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ['a"b', "ü\n"]}}, "lark",
         'start: CHOICE\nCHOICE: "a\\"b" | "ü\\n"', "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "start: /a/"}}, "lark", "start: /a/",
         "structured_outputs.grammar"),
        ({"structured_outputs": {"json_object": True}}, "json_object", "",
         "structured_outputs.json_object"),
    ],
)  # fmt: skip
def test_what_is_asked_for(
    fields: dict[str, Any], kind: Any, text: str, field: str, ask: Ask
) -> None:
    assert ask(**fields) == Grammar(kind, text, field)


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"tool_choice": "required"}, 'start: call ("\\n" call)*'),
        ({"tool_choice": "required", "parallel_tool_calls": False}, "start: call"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "start: call"),
        ({"tool_choice": allowed("required", "f", "g")}, 'start: call ("\\n" call)*'),
        ({"tool_choice": allowed("required", "g")}, 'start: call ("\\n" call)*'),
        ({"tool_choice": allowed("required", "g"), "parallel_tool_calls": False}, "start: call"),
    ],
)
def test_a_forced_call_is_a_grammar(fields: dict[str, Any], rule: str, ask: Ask) -> None:
    found = ask(tools=TOOLS, **fields)
    assert found is not None
    assert found.text.splitlines()[0].strip() == rule
    choice = fields["tool_choice"]
    wants_f = choice == "required" or choice == allowed("required", "f", "g")
    assert ('\\"f\\"' in found.text) == wants_f
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
        ({"structured_outputs": {"grammar": "root ::= ship"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": "root ::= \"\\"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": "root ::= " + "(" * 60_000}},
         "structured_outputs.grammar"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_names_its_field(fields: dict[str, Any], param: str, ask: Ask) -> None:
    with pytest.raises(ApiError) as error:
        ask(**fields)
    assert (error.value.status, error.value.param) == (400, param)


def test_a_grammar_may_be_written_as_for_llama_cpp(ask: Ask) -> None:
    """As those of vLLM are."""
    given = 'root ::= "SELECT " column ("," column)*\ncolumn ::= [a-z]+ | "1"'
    found = ask(structured_outputs={"grammar": given})
    assert found is not None
    assert LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(found.text)) == ""
    assert "start:" in found.text


def test_a_call_is_no_answer_that_has_a_format(ask: Ask) -> None:
    wanted = {"type": "json_object"}
    found = ask(tools=TOOLS, tool_choice="required", response_format=wanted)
    assert found is not None
    assert found.field == "tools"
    assert found.tool_fields == tuple(f"tools[{n}].function.parameters" for n in range(2))
    only = ask(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "g"}})
    assert only is not None
    assert only.field == "tools[1].function.parameters"


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("family", tool_families.FAMILY_NAMES)
@pytest.mark.parametrize("several", [False, True])
def test_what_is_prescribed_is_what_the_family_reads(
    family: str, several: bool, added: bool, ask: Ask, tokenizers: list[Tokenizer]
) -> None:
    """The likeliest text of the grammar, with tags as tokens where they are added ones."""
    parameters = {"type": "object", "properties": {"port": {"const": "Hull"}}, "required": ["port"],
                  "additionalProperties": False}  # fmt: skip
    tools = [{"type": "function", "function": {"name": "tide", "parameters": parameters}}]
    found = ask(family, added, tools=tools, tool_choice="required", parallel_tool_calls=several)
    assert found is not None
    vocabulary = Vocabulary.load(tokenizers[added].checkpoint.folder)
    assert vocabulary is not None
    matcher, ids = vocabulary.compile(found), list[int]()
    parts: list[ToolCall] = []
    parser = tool_families.create_parser(family, {})
    template = tokenizers[added].get_template_source(has_tools=True)
    forced = forced_calls.create_forced_call_parser(family, template, ["tide"], {}, several)
    pieces: list[ToolCall] = []
    decoder = tokenizers[added].create_detokenizer_factory([], shown_tokens=tool_families.TAGS)()
    while not matcher.is_stopped() and len(ids) < 400:
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        ids.append(next(n for n in reversed(range(512)) if mask >> n & 1))
        assert matcher.consume_token(ids[-1]), matcher.get_error()
        text = decoder.push(ids[-1])
        parts += parser.push(text).calls
        pieces += forced.push(text).calls
        if sum(not one.more for one in parts) > 2 * several:
            break
    parts += parser.push("", is_last=True).calls
    pieces += forced.push("", is_last=True).calls
    for given in (parts, pieces):
        assert {one.name for one in given if one.id} == {"tide"}
        written = "".join(one.arguments for one in given).replace(" ", "")
        count = sum(not one.more for one in given)
        assert written.startswith('{"port":"Hull"}' * count)  # the next may have begun
        assert len(given) > count or family == "pythonic", "they come in pieces"


TIDE: dict[str, Any] = {
    "type": "object",
    "$defs": {"unit": {"enum": ["m", "ft"]}},
    "properties": {
        "port": {"type": "string", "description": "Where"},
        "hour": {"type": "integer"},
        "unit": {"$ref": "#/$defs/unit"},
        "kind": {"type": "string", "enum": ["high", "low"]},
        "where": {"type": "object", "properties": {"lat": {"type": "number"}}},
    },
    "required": ["port", "unit"],
    "additionalProperties": False,
}
OWN_FORMS = {
    "qwen3_coder": (
        "<tool_call>\n<function=tide>\n<parameter=port>\nKing's </tool_call> Lynn\n\n</parameter>\n"
        '<parameter=unit>\n"ft"\n</parameter>\n<parameter=kind>\nlow\n</parameter>\n'
        '<parameter=where>\n{"lat": 1.5}\n</parameter>\n</function>\n</tool_call>'
    ),
    "glm45": (
        "<tool_call>tide<arg_key>port</arg_key><arg_value>King's </tool_call> Lynn\n</arg_value>"
        '<arg_key>unit</arg_key><arg_value>"ft"</arg_value><arg_key>kind</arg_key><arg_value>low'
        '</arg_value><arg_key>where</arg_key><arg_value>{"lat": 1.5}</arg_value></tool_call>'
    ),
    "pythonic": (
        '[tide(port="King\'s </tool_call> Lynn\\n", unit="ft", kind="low", where={"lat": 1.5})]'
    ),
}
TIDE_CALL = {
    "port": "King's </tool_call> Lynn\n", "unit": "ft", "kind": "low", "where": {"lat": 1.5},
}  # fmt: skip


def accepts(grammar: Grammar, text: str, tokenizer: Tokenizer) -> bool:
    vocabulary = Vocabulary.load(tokenizer.checkpoint.folder)
    assert vocabulary is not None
    matcher = vocabulary.compile(grammar)
    ids = tokenizer.encode_rendered(text)
    return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())


@pytest.mark.parametrize("family", OWN_FORMS)
def test_forced_calls_have_the_form_of_their_family(
    family: str, ask: Ask, tokenizers: list[Tokenizer]
) -> None:
    tools = [{"type": "function", "function": {"name": "tide", "parameters": TIDE}}]
    found = ask(family, tools=tools, tool_choice="required")
    assert found is not None
    text = OWN_FORMS[family]
    assert accepts(found, text, tokenizers[0])
    several = {"pythonic": f"{text[:-1]}, {text[1:]}"}.get(family, f"{text}\n{text}")
    assert accepts(found, several, tokenizers[0])
    for wrong in ("ft", "low", "tide"):
        assert not accepts(found, text.replace(wrong, "x"), tokenizers[0])
    parsed = tool_families.create_parser(family, {"tide": {"port": True, "kind": True}}).push(
        several, is_last=True
    )
    assert [json.loads(one.arguments) for one in parsed.calls] == [TIDE_CALL] * 2


@pytest.mark.parametrize(
    ("properties", "more", "families"),
    [
        ({"a": {"type": "string", "pattern": "^a+$"}}, {}, "qwen3_coder glm45"),
        ({"a": {"type": "string", "enum": [" x ", "</a>"]}}, {}, "qwen3_coder glm45"),
        (
            {"a": {"type": "string", "enum": ["b"]}},
            {"required": ["c"]},
            "qwen3_coder glm45 pythonic",
        ),
        ({"class": {"type": "string"}}, {}, "pythonic"),
        ({"a b": {"type": "string"}}, {}, "qwen3_coder glm45 pythonic"),
        ({"a": {"$ref": "#/properties/b"}, "b": {}}, {}, "qwen3_coder glm45 pythonic"),
        ({"a": {}}, {"additionalProperties": {}}, "qwen3_coder glm45 pythonic"),
        ({"a": {}}, {"anyOf": [{"required": ["a"]}]}, "qwen3_coder glm45 pythonic"),
    ],
)
def test_schemas_that_a_form_cannot_say_are_json(
    properties: dict[str, Any], more: dict[str, Any], families: str, ask: Ask
) -> None:
    schema = {"type": "object", "properties": properties} | more
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    for family in OWN_FORMS:
        found = ask(family, tools=tools, tool_choice="required")
        assert found is not None
        assert LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(found.text)) == ""
        assert (f"%json {json.dumps(schema)}" in found.text) == (family in families.split())


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "string", "enum": 5}}}, {"properties": 5},
        {"properties": {"a": {"type": "string", "enum": []}}}, {"required": [{}]}, {"required": 5},
        {"properties": {"a": 5}}, {"properties": {"a": {"type": "string", "const": None}}},
        {"properties": {"a": {}}, "$defs": 5}, {"properties": {"": {}}},
    ],
)  # fmt: skip
def test_schemas_that_are_none_are_left_to_the_compiler(schema: dict[str, Any], ask: Ask) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    for family in tool_families.FAMILY_NAMES:
        found = ask(family, tools=tools, tool_choice="required")
        assert found is not None
        LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(found.text))  # raises nothing


@pytest.mark.parametrize("family", tool_families.FAMILY_NAMES)
@pytest.mark.parametrize("properties", [{}, None])
def test_a_required_argument_without_a_schema_has_any_value(
    family: str, properties: Any, ask: Ask
) -> None:
    schema = {"type": "object", "properties": properties, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    found = ask(family, tools=tools, tool_choice="required")
    assert found is not None
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(found.text), log_level=0)
    assert matcher.get_error() == ""


@pytest.mark.parametrize(
    ("arguments", "taken"),
    [('{"ab": "x"}', True), ('{"ab": 1}', False), ('{"ac": "x"}', False), ("{}", False)],
)
def test_a_required_argument_may_have_the_schema_of_a_pattern(
    arguments: str, taken: bool, ask: Ask
) -> None:
    patterns = {"patternProperties": {"^a": {"type": "string"}}, "required": ["ab"]}
    mores: list[dict[str, Any]] = [{}, {"properties": {}}, {"additionalProperties": False}]
    for more in mores:
        schema = {"type": "object"} | patterns | more
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        found = ask("llama3_json", tools=tools, tool_choice="required")
        assert found is not None
        grammar = LLMatcher.grammar_from_lark(found.text)
        matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
        call = list(f'{{"name": "f", "parameters": {arguments}}}'.encode())
        assert (matcher.try_consume_tokens(call) == len(call)) == taken


def test_calls_without_arguments_are_of_their_form(ask: Ask, tokenizers: list[Tokenizer]) -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    for family, text in (
        ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>"),
        ("glm45", "<tool_call>now</tool_call>"),
        ("pythonic", "[now()]"),
    ):
        found = ask(family, tools=tools, tool_choice="required")
        assert found is not None
        assert accepts(found, text, tokenizers[0])
        (call,) = tool_families.create_parser(family, {}).push(text, is_last=True).calls
        assert (call.name, call.arguments) == ("now", "{}")


@pytest.mark.parametrize(
    ("parameters", "allowed"),
    [
        (None, False),
        ({}, False),
        ({"type": "object", "properties": {}}, False),
        ({"type": "object", "properties": {}, "additionalProperties": True}, True),
        ({"type": "object"}, True),
    ],
)
def test_a_function_that_lists_no_parameters_gets_none(
    parameters: Any, allowed: bool, ask: Ask, tokenizers: list[Tokenizer]
) -> None:
    tools = [{"type": "function", "function": {"name": "now", "parameters": parameters}}]
    found = ask(tools=tools, tool_choice="required")
    assert found is not None
    for given, fits in (("{}", True), ('{"a": 1}', allowed)):
        text = f'<tool_call>\n{{"name": "now", "arguments": {given}}}\n</tool_call>'
        assert accepts(found, text, tokenizers[0]) is fits


@pytest.mark.parametrize("more", [{}, {"$id": "https://example.com/now"}])
def test_parameters_go_in_as_they_were_sent(more: dict[str, Any], ask: Ask) -> None:
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


PORT = {"properties": {"port": {"type": "string"}}, "required": ["port"]}


@pytest.mark.parametrize(
    "parameters",
    [
        PORT, PORT | {"type": None}, PORT | {"type": ["null", "object"]}, {"anyOf": [PORT]},
        {"description": "x"}, {"$ref": "#/$defs/a", "$defs": {"a": PORT}},
    ],
)  # fmt: skip
@pytest.mark.parametrize("family", sorted({*tool_families.FAMILY_NAMES} - {*OWN_FORMS}))
def test_arguments_are_an_object_whatever_their_schema_leaves_open(
    parameters: dict[str, Any], family: str, ask: Ask, tokenizers: list[Tokenizer]
) -> None:
    """A schema without a type allows any value, and a call has none but an object."""
    tools = [{"type": "function", "function": {"name": "tide", "parameters": parameters}}]
    found = ask(family, tools=tools, tool_choice="required")
    assert found is not None
    (body,) = re.findall(r"%json .*", found.text)
    arguments = Grammar("lark", f"start: a\na: {body}", "tools")
    assert accepts(arguments, '{"port": "Hull"}', tokenizers[0])
    for wrong in ('"Hull"', "5", "null", '["Hull"]', "true"):
        assert not accepts(arguments, wrong, tokenizers[0]), wrong


@pytest.mark.parametrize("kind", ["string", "array", ["null"], 5])
def test_arguments_of_another_type_name_their_place(kind: Any, ask: Ask) -> None:
    tools = [*TOOLS, {"type": "function", "function": {"name": "h", "parameters": {"type": kind}}}]
    with pytest.raises(ApiError, match="object") as error:
        ask(tools=tools, tool_choice="required")
    assert (error.value.status, error.value.param) == (400, "tools[2].function.parameters.type")


def test_parameters_that_are_nested_too_deeply_are_no_grammar(ask: Ask) -> None:
    nested: dict[str, Any] = {}
    for _ in range(600):
        nested = {"not": nested}
    tools = [{"type": "function", "function": {"name": "f", "parameters": nested}}]
    found = ask(tools=tools, tool_choice="required")
    assert found is not None
    assert LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(found.text)) != ""


def test_a_choice_may_have_any_character(ask: Callable[..., Grammar | None]) -> None:
    for text in ("\x7f", "\x00\x1f\x85\u2028\ufffe", '"\\/\n', "😀"):
        grammar = ask(structured_outputs={"choice": [text, "b"]})
        assert grammar is not None
        assert LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(grammar.text)) == ""


def test_as_many_choices_are_compiled_as_a_request_may_have(
    ask: Ask, tokenizers: list[Tokenizer]
) -> None:
    choices = [f"{number:x} knots" for number in range(4096)]
    found = ask(structured_outputs={"choice": choices})
    assert found is not None
    for text in (choices[0], choices[4095]):
        assert accepts(found, text, tokenizers[0])
    assert not accepts(found, "1000 knots", tokenizers[0])


@pytest.mark.parametrize("family", ["hermes", "qwen3_coder", "pythonic"])
@pytest.mark.parametrize("parameters", [None, {}, {"type": "object", "properties": {}}])
def test_null_in_a_schema_stands_for_a_missing_keyword(
    family: str, parameters: Any, ask: Ask
) -> None:
    def asked(parameters: Any) -> Grammar | None:
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        return ask(family, tools=tools, tool_choice="required")

    nulls = {"type": None, "properties": None, "required": None, "description": None}
    assert asked(nulls) == asked(parameters)
