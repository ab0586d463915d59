"""Grammars of the tool calls that ``tool_choice`` requires, in llguidance's dialect of Lark.

A call has the format of its family (:mod:`plimsoll_engine.api.tool_families`). If that format
cannot express a tool's schema, the arguments are JSON, which the family's parser accepts as well.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from plimsoll_engine.api import tool_families
from plimsoll_engine.api.tool_arguments import (
    END_FUNCTION_TAG,
    END_HERMES_TAG,
    END_KEY_TAG,
    END_PARAMETER_TAG,
    END_VALUE_TAG,
    FUNCTION_TAG,
    HERMES_TAG,
    KEY_TAG,
    PARAMETER_TAG,
    VALUE_TAG,
    StringArguments,
)
from plimsoll_engine.api.tool_calls import Reader, Steps, ToolCallParser, create_call_id
from plimsoll_engine.api.tool_families import (
    ARGS_TAG,
    CHANNEL_TAG,
    CONSTRAIN_TAG,
    DEEPSEEK_CALL_TAGS,
    DEEPSEEK_SEPARATOR_TAG,
    DEEPSEEK_TAGS,
    MESSAGE_TAG,
    MISTRAL_TAG,
)

TagFormatter = Callable[[str], str]
"""Function that returns a tag as a grammar writes it: as a special token, or as its text."""


class CallFormat(NamedTuple):
    """Format of forced calls, as sequences of strings and tags.

    In a string, ``{}`` stands for the tool's name, and ``{"…"}`` for the name as a JSON string.

    Attributes:
        head, tail: Text before and after the JSON arguments of a call.
        begin, end: Text before the first and after the last call.
        between: Text between two calls, as one string.

    """

    head: Sequence[str]
    tail: Sequence[str]
    begin: Sequence[str] = ()
    between: str = ""
    end: Sequence[str] = ()


_FAMILIES_WITHOUT_JSON = ("qwen3_coder", "glm45", "pythonic")
_HERMES_FORMAT = CallFormat(
    [HERMES_TAG, '\n{"name": {"…"}, "arguments": '], ["}\n", END_HERMES_TAG], between="\n"
)


def _get_call_format(family: str, template: str) -> CallFormat:
    match family:
        case "llama3_json":
            return CallFormat(['{"name": {"…"}, "parameters": '], ["}"], between="; ")
        case "mistral" if ARGS_TAG in template:
            return CallFormat([MISTRAL_TAG, "{}", ARGS_TAG], [])
        case "mistral" | "pythonic":
            begin = [MISTRAL_TAG, "["] if family == "mistral" else ["["]
            head = ['{"name": {"…"}, "arguments": ']
            return CallFormat(head, ["}"], begin, ", ", ["]"])
        case "deepseek_v3":
            block = "```json" in template
            head = [DEEPSEEK_CALL_TAGS[0], "{}", DEEPSEEK_SEPARATOR_TAG]
            tail = [DEEPSEEK_CALL_TAGS[1]]
            if block:
                head[1:] = ["function", DEEPSEEK_SEPARATOR_TAG, "{}\n```json\n"]
                tail = ["\n```", *tail]
            between = "\n" if block else ""
            return CallFormat(head, tail, [DEEPSEEK_TAGS[0]], between, [DEEPSEEK_TAGS[1]])
        case "openai":
            head = [CHANNEL_TAG, "commentary to=functions.{} ", CONSTRAIN_TAG, "json", MESSAGE_TAG]
            return CallFormat(head, ["<|call|>"])
    return _HERMES_FORMAT


def build_call_grammar(
    family: str,
    template: str,
    tools: Sequence[tuple[str, dict[str, Any]]],
    allow_several: bool,
    format_tag: TagFormatter,
) -> str:
    """Return the grammar of one call or, if ``allow_several`` is True, of one or more calls.

    ``tools`` has the name and the schema of each tool. Raises RecursionError if a schema is nested
    too deeply.
    """
    form = _get_call_format(family, template)
    allow_several = allow_several and family != "openai"  # its first call ends the output
    rules = [f"tool_{number}" for number in range(len(tools))]
    more = f" ({_build_sequence([form.between], format_tag)} call)*" if allow_several else ""
    lines = [
        " ".join(filter(None, ["start:", _build_sequence(form.begin, format_tag), f"call{more}",
                               _build_sequence(form.end, format_tag)])),
        f"call: {' | '.join(rules)}",
    ]  # fmt: skip
    native_rules = [
        _build_native_rules(family, template, rule, *tool, format_tag)
        for rule, tool in zip(rules, tools, strict=True)
    ]
    if family == "pythonic" and not all(native_rules):
        native_rules = [[] for _ in native_rules]  # a list is either all Python or all JSON
    for rule, (name, schema), native in zip(rules, tools, native_rules, strict=True):
        head, tail = (
            _build_sequence(form.head, format_tag, name),
            _build_sequence(form.tail, format_tag),
        )
        lines += native or [
            f"{rule}: {head} {rule}_arguments {tail}",
            f"{rule}_arguments: %json {_format_schema(schema)}",
        ]
    return "\n".join(lines)


def create_forced_call_parser(
    family: str,
    template: str,
    tool_names: Sequence[str],
    string_arguments: StringArguments,
    allow_several: bool,
) -> ToolCallParser:
    """Return a parser for the output of :func:`build_call_grammar` with these tools."""
    read_unforced_calls = tool_families.get_call_reader(family, string_arguments)
    if family in _FAMILIES_WITHOUT_JSON:
        return ToolCallParser(read_unforced_calls, allow_several)
    form = _get_call_format(family, template)
    heads = {_join_with_name(form.head, name): name for name in tool_names}
    begin, tail, end = map(_join_with_name, (form.begin, form.tail, form.end))
    create_id = tool_families.create_short_id if family == "mistral" else create_call_id

    def read_forced_calls(reader: Reader) -> Steps[None]:
        head = yield from reader.take_mark(*(begin + head for head in heads))
        if not head:
            yield from read_unforced_calls(reader)
            return
        head = head.removeprefix(begin)
        while head and (yield from reader.read_json_call(heads[head], create_id())):
            yield from reader.drop_mark(tail)
            if not (yield from reader.peek_mark(*(form.between + head for head in heads))):
                break
            yield from reader.drop_mark(form.between)
            head = yield from reader.take_mark(*heads)
        yield from reader.drop_mark(end)
        yield from reader.read_content([])

    return ToolCallParser(read_forced_calls)


def _join_with_name(texts: Sequence[str], name: str = "") -> str:
    return "".join(_insert_name(texts, name))


def _build_sequence(texts: Sequence[str], format_tag: TagFormatter, name: str = "") -> str:
    return " ".join(map(format_tag, _insert_name(texts, name)))


def _insert_name(texts: Sequence[str], name: str) -> list[str]:
    return [one.replace('{"…"}', json.dumps(name)).replace("{}", name) for one in texts if one]


def format_literal(text: str) -> str:
    """Return ``text`` as a string in a grammar."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _format_schema(schema: Any) -> str:
    return json.dumps(schema, ensure_ascii=False)


# ---- arguments in the family's own format


class _Argument(NamedTuple):
    # ``value`` is a schema, the allowed strings, or None for any string.
    key: str
    value: dict[str, Any] | list[str] | None
    required: bool


def _build_native_rules(
    family: str,
    template: str,
    rule_name: str,
    tool_name: str,
    schema: dict[str, Any],
    format_tag: TagFormatter,
) -> list[str]:
    # Returns the rules in the family's own format; none if the call must be JSON.
    if family not in _FAMILIES_WITHOUT_JSON:
        return []
    python = family == "pythonic"
    arguments = _list_arguments(schema, has_unquoted_strings=not python)
    if arguments is None:
        return []
    if python:
        return _build_python_rules(rule_name, tool_name, arguments)
    if family == "qwen3_coder":
        begin, end = (
            [HERMES_TAG, f"\n{FUNCTION_TAG}{tool_name}>\n"],
            [f"{END_FUNCTION_TAG}\n", END_HERMES_TAG],
        )
        before, after = ([PARAMETER_TAG, "{}>\n"], ["\n" + END_PARAMETER_TAG, "\n"])
    else:
        line = "\n" if f"\n{KEY_TAG}" in template else ""
        begin, end = [HERMES_TAG, f"{tool_name}{line}"], [END_HERMES_TAG]
        before, after = ([KEY_TAG, "{}", END_KEY_TAG, line, VALUE_TAG], [END_VALUE_TAG, line])
    parts, lines = [], []
    for number, one in enumerate(arguments):
        part = f"{rule_name}_{number}"
        parts.append(part if one.required else f"{part}?")
        close = _build_sequence(after, format_tag)
        if one.value is None:
            closing = format_tag(after[0])
            ended = f"[suffix={closing}]" if closing.startswith('"') else ""
            lines.append(f"{part}_value{ended}: /(?s:.*)/")
            close = _build_sequence(after[1:] if ended else after, format_tag)
        elif isinstance(one.value, list):
            lines.append(f"{part}_value: {' | '.join(map(format_literal, one.value))}")
        else:
            lines.append(f"{part}_value: %json {_format_schema(one.value)}")
        lines.append(f"{part}: {_build_sequence(before, format_tag, one.key)} {part}_value {close}")
    head, tail = _build_sequence(begin, format_tag), _build_sequence(end, format_tag)
    return [f"{rule_name}: {head} {' '.join(parts)} {tail}", *lines]


def _build_python_rules(rule_name: str, tool_name: str, arguments: list[_Argument]) -> list[str]:
    # Returns the rules of NAME(KEY=VALUE, …) with JSON values; none if a name is invalid.
    if not all(one.key.isidentifier() and not keyword.iskeyword(one.key) for one in arguments):
        return []
    if not all(part.isidentifier() for part in tool_name.split(".")):
        return []
    lines, firsts = [], []
    for number, one in enumerate(arguments):
        part = f"{rule_name}_{number}"
        lines.append(f"{part}: {_format_schema(one.key + '=')} {part}_value")
        lines.append(f"{part}_value: %json {_format_schema(one.value)}")
        rest = f"{rule_name}_after_{number + 1}" if number + 1 < len(arguments) else ""
        if number:
            another = f'(", " {part})' + ("" if one.required else "?")
            lines.append(f"{rule_name}_after_{number}: {another} {rest}")
        if not any(before.required for before in arguments[:number]):
            firsts.append(f"{part} {rest}")
    optional = "" if any(one.required for one in arguments) else "?"
    inside = f"({' | '.join(firsts)}){optional}" if firsts else ""
    return [f'{rule_name}: {_format_schema(tool_name + "(")} {inside} ")"', *lines]


_PLAIN_KEYWORDS = frozenset(
    {"type", "properties", "required", "title", "description", "additionalProperties", "$schema",
     "$defs", "definitions"}
)  # fmt: skip
_STRING_KEYWORDS = frozenset(
    {"type", "title", "description", "enum", "const", "default", "examples"}
)


def _list_arguments(schema: dict[str, Any], has_unquoted_strings: bool) -> list[_Argument] | None:
    # Returns None if the native format cannot express the schema.
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if (
        not schema.keys() <= _PLAIN_KEYWORDS
        or schema.get("type", "object") != "object"
        or schema.get("additionalProperties", False) is not False
        or not isinstance(properties, dict)
        or not isinstance(required, list)
        or not all(isinstance(one, str) and one in properties for one in required)
    ):
        return None
    found = []
    shared: dict[str, Any] = {
        name: schema[name] for name in ("$defs", "definitions") if name in schema
    }
    for key, given in properties.items():
        if (
            not _ARGUMENT_NAME_PATTERN.fullmatch(key)
            or not isinstance(given, dict)
            or _EXTERNAL_REFERENCE_PATTERN.search(_format_schema(given))
        ):
            return None
        value: dict[str, Any] | list[str] | None = shared | given
        if has_unquoted_strings and given.get("type") == "string":
            if not given.keys() <= _STRING_KEYWORDS:
                return None
            value = given.get("enum", [given["const"]] if "const" in given else None)
            if value is not None and not _can_be_unquoted(value):
                return None
        found.append(_Argument(key, value, key in required))
    return found


_ARGUMENT_NAME_PATTERN = re.compile(r"[^\s<>=]{1,256}")
# These references cannot be resolved in a part of the schema.
_EXTERNAL_REFERENCE_PATTERN = re.compile(
    r'"\$(ref|dynamicRef)": "(?!#/(\$defs|definitions)/)|"\$(id|anchor)"'
)


def _can_be_unquoted(values: Any) -> bool:
    return (
        isinstance(values, list)
        and bool(values)
        and all(
            isinstance(one, str) and one != "" and one == one.strip() and "<" not in one
            for one in values
        )
    )
