"""Grammar of the output, from response_format, structured_outputs and tool_choice."""

from __future__ import annotations

import json
from typing import Any

from llguidance.gbnf_to_lark import any_to_lark

from plimsoll_engine.api import forced_calls, tool_families
from plimsoll_engine.api.errors import make_invalid_error
from plimsoll_engine.api.protocol import (
    AllowedToolsChoice,
    ChatRequest,
    CompletionRequest,
    NamedTool,
    StructuredOutputs,
    Tool,
)
from plimsoll_engine.frontend.requests.tokenizer import Tokenizer
from plimsoll_engine.messages.worker_ipc import Grammar

# The time to compile a regular expression grows with the square of its length. For other grammars,
# the depth of recursion grows with the length (plimsoll_engine.core.grammar.grammars).
MAX_GRAMMAR_CHARACTERS = {
    "regex": 8 << 10,
    "lark": 64 << 10,
    "json_schema": 64 << 10,
    "json_object": 0,
}


def build_grammar(
    body: CompletionRequest | ChatRequest, tokenizer: Tokenizer, family: str
) -> Grammar | None:
    """Return the grammar that the output must match; None without one. Raises ApiError.

    Forced tool calls have the format of ``family``.
    """
    call = (
        _build_tool_call_grammar(body, tokenizer, family) if isinstance(body, ChatRequest) else None
    )
    text = _get_response_format(body)  # does not apply to a forced call
    found = [text if call is None else call, _get_structured_outputs(body.structured_outputs)]
    given = [one for one in found if one is not None]
    if not given:
        return None
    if len(given) > 1:
        fields = " and ".join(one.field.partition(".")[0] for one in given)
        raise make_invalid_error(f"{fields} cannot be combined: omit one", given[1].field)
    (grammar,) = given
    if len(grammar.text) > (limit := MAX_GRAMMAR_CHARACTERS[grammar.kind]):
        raise make_invalid_error(
            f"the grammar has more than the maximum of {limit} characters: shorten the grammar",
            grammar.field,
        )
    return grammar


def _get_response_format(body: CompletionRequest | ChatRequest) -> Grammar | None:
    given = body.response_format
    match given:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object", "schema": dict() as schema}:  # llama.cpp's form
            return Grammar("json_schema", _format_canonically(schema), "response_format.schema")
        case {"type": "json_object", "schema": wrong} if wrong is not None:
            raise make_invalid_error(
                "the schema is not a JSON object: send an object", "response_format.schema"
            )
        case {"type": "json_object"}:
            return Grammar("json_object", field="response_format")
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
            return Grammar(
                "json_schema", _format_canonically(schema), "response_format.json_schema.schema"
            )
        case {"type": "json_schema"}:
            raise make_invalid_error(
                "json_schema has no schema: set it to a JSON Schema object",
                "response_format.json_schema.schema",
            )
    raise make_invalid_error(
        "the type of the output format must be text, json_object or json_schema",
        "response_format.type",
    )


def _get_structured_outputs(structured_outputs: StructuredOutputs | None) -> Grammar | None:
    if structured_outputs is None:
        return None
    named = [
        field
        for field in ("json", "regex", "choice", "grammar", "json_object")
        if getattr(structured_outputs, field) not in (None, False)
    ]
    if len(named) != 1:
        raise make_invalid_error(
            "structured_outputs must set exactly one of json, regex, choice, grammar and"
            " json_object",
            "structured_outputs",
        )
    field = f"structured_outputs.{named[0]}"
    if structured_outputs.json is not None:
        schema = structured_outputs.json
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise make_invalid_error(f"the schema is not JSON: {error}", field) from None
            if not isinstance(schema, dict):
                raise make_invalid_error("the schema is not a JSON object: send an object", field)
        return Grammar("json_schema", _format_canonically(schema), field)
    if structured_outputs.regex is not None:
        return Grammar("regex", structured_outputs.regex, field)
    if structured_outputs.choice is not None:
        options = " | ".join(map(forced_calls.format_literal, structured_outputs.choice))
        # A terminal, because a rule may have at most 2,000 alternatives.
        return Grammar("lark", f"start: CHOICE\nCHOICE: {options}", field)
    if structured_outputs.grammar is not None:
        return Grammar("lark", _convert_to_lark(structured_outputs.grammar, field), field)
    return Grammar("json_object", field=field)


def _convert_to_lark(text: str, field: str) -> str:
    # llama.cpp's GBNF has ``::=``.
    if "::=" not in text:
        return text
    try:
        return str(any_to_lark(text))
    except RecursionError:
        raise make_invalid_error(
            "the grammar is nested too deeply: use fewer levels", field
        ) from None
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception
        raise make_invalid_error(
            f"the grammar is not valid as Lark or GBNF: {str(error)[:200]}", field
        ) from None


def list_offered_tools(body: ChatRequest) -> list[Tool]:
    """Return the tools in the prompt: the allowed tools if the request names them, else all.

    The list is empty if ``tool_choice`` is ``none``.
    """
    choice, tools = body.tool_choice, body.tools or []
    if isinstance(choice, AllowedToolsChoice):
        allowed = {tool.function.name for tool in choice.allowed_tools.tools}
        return [tool for tool in tools if tool.function.name in allowed]
    return [] if choice == "none" else tools


def list_forced_tools(body: ChatRequest) -> list[Tool]:
    """Return the tools of which the model must call at least one; empty if no call is required."""
    choice, tools = body.tool_choice, list_offered_tools(body)
    if isinstance(choice, NamedTool):
        return [tool for tool in tools if tool.function.name == choice.function.name]
    mode = choice.allowed_tools.mode if isinstance(choice, AllowedToolsChoice) else choice
    return tools if mode == "required" else []


def _build_tool_call_grammar(
    body: ChatRequest, tokenizer: Tokenizer, family: str
) -> Grammar | None:
    if not (tools := list_forced_tools(body)):
        return None
    one_function = isinstance(body.tool_choice, NamedTool)
    several = not one_function and body.parallel_tool_calls is not False

    def format_tag(text: str) -> str:
        number = tokenizer.find_added_token(text) if text in tool_families.TAGS else None
        return forced_calls.format_literal(text) if number is None else f"<[{number}]>"

    named = [(one.function.name, _get_parameters(body, one)) for one in tools]
    fields = tuple(f"{_get_tool_field(body, one)}.function.parameters" for one in tools)
    field = fields[0] if len(fields) == 1 else "tools"
    try:
        template = tokenizer.get_template_source(has_tools=True)
        text = forced_calls.build_call_grammar(family, template, named, several, format_tag)
    except RecursionError:
        raise make_invalid_error(
            "the parameters of a tool are nested too deeply: use fewer levels", field
        ) from None
    return Grammar("lark", text, field, fields)


def _get_tool_field(body: ChatRequest, tool: Tool) -> str:
    return f"tools[{(body.tools or []).index(tool)}]"


def _get_parameters(body: ChatRequest, tool: Tool) -> dict[str, Any]:
    # If the tool declares no properties, only the required arguments are allowed. A null keyword
    # counts as missing, because Go clients write null.
    parameters = tool.function.parameters or {}
    schema = {key: value for key, value in parameters.items() if value is not None}
    kinds = schema.get("type") or "object"
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        place = f"{_get_tool_field(body, tool)}.function.parameters.type"
        raise make_invalid_error("the parameters of a tool must be an object", place)
    given = schema | {"type": "object"}
    if not schema or not parameters.get("properties", True):
        closed = {"type": "object", "properties": {}, "additionalProperties": False} | given
        required = schema.get("required")
        if isinstance(required, list) and "additionalProperties" not in schema:
            # A required argument without a schema of its own has any value.
            closed["properties"] = {one: {} for one in required if isinstance(one, str)}
        return closed
    return given


def _format_canonically(schema: dict[str, Any]) -> str:
    # Properties keep their order, because the output has the same order. Half of a surrogate pair,
    # which a schema sent as a text may escape, becomes U+FFFD: messages to the worker are UTF-8.
    written = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    return written.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
