"""Tool calls that a client demands, as grammars in llguidance's notation of Lark. Pure.

Each is in the form of its family (:mod:`plimsoll_engine.api.tool_families`). Where that form has no
place for what a tool's schema says, as a pattern of a text without quotes, the arguments are JSON,
which the family's parser takes as well.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from plimsoll_engine.api import tool_families
from plimsoll_engine.api.tool_arguments import (
    END_FUNCTION,
    END_HERMES,
    END_KEY,
    END_PARAMETER,
    END_VALUE,
    FUNCTION,
    HERMES,
    KEY,
    PARAMETER,
    VALUE,
    Texts,
)
from plimsoll_engine.api.tool_calls import Reader, Steps, ToolCallParser, new_id
from plimsoll_engine.api.tool_families import (
    ARGS,
    CHANNEL,
    CONSTRAIN,
    DEEPSEEK,
    DEEPSEEK_CALL,
    DEEPSEEK_SEPARATOR,
    MESSAGE,
    MISTRAL,
)

Tag = Callable[[str], str]
"""What stands for a tag in a grammar: the token, where one is added for it, else its text."""


class Shape(NamedTuple):
    """Forced calls: ``begin``, calls that are parted by ``between``, ``end``.

    A call is its arguments in JSON between ``head`` and ``tail``, which are strings and tags. In
    them ``{}`` stands for the name of the tool, and ``{"…"}`` for that name in JSON.
    """

    head: Sequence[str]
    tail: Sequence[str]
    begin: Sequence[str] = ()
    between: str = ""
    end: Sequence[str] = ()


_OWN = ("qwen3_coder", "glm45", "pythonic")
"""Families that do not write their arguments in JSON."""
_HERMES = Shape([HERMES, '\n{"name": {"…"}, "arguments": '], ["}\n", END_HERMES], between="\n")


def _shape(family: str, template: str) -> Shape:
    match family:
        case "llama3_json":
            return Shape(['{"name": {"…"}, "parameters": '], ["}"], between="; ")
        case "mistral" if ARGS in template:
            return Shape([MISTRAL, "{}", ARGS], [])
        case "mistral" | "pythonic":
            begin = [MISTRAL, "["] if family == "mistral" else ["["]
            head = ['{"name": {"…"}, "arguments": ']
            return Shape(head, ["}"], begin, ", ", ["]"])
        case "deepseek_v3":
            block = "```json" in template
            head = [DEEPSEEK_CALL[0], "{}", DEEPSEEK_SEPARATOR]
            tail = [DEEPSEEK_CALL[1]]
            if block:
                head[1:] = ["function", DEEPSEEK_SEPARATOR, "{}\n```json\n"]
                tail = ["\n```", *tail]
            between = "\n" if block else ""
            return Shape(head, tail, [DEEPSEEK[0]], between, [DEEPSEEK[1]])
        case "openai":
            head = [CHANNEL, "commentary to=functions.{} ", CONSTRAIN, "json", MESSAGE]
            return Shape(head, ["<|call|>"])
    return _HERMES


def grammar(
    family: str, template: str, tools: Sequence[tuple[str, dict[str, Any]]], several: bool, tag: Tag
) -> str:
    """Return the grammar of one call, or of one or more, of ``tools`` (name and schema).

    Each schema is a grammar of its own, so that its references mean what they say. Raises
    RecursionError where one is nested too deeply.
    """
    shape = _shape(family, template)
    several = several and family != "openai"  # whose first call ends the text
    rules = [f"tool_{number}" for number in range(len(tools))]
    more = f" ({_row([shape.between], tag)} call)*" if several else ""
    lines = [
        " ".join(filter(None, ["start:", _row(shape.begin, tag), f"call{more}",
                               _row(shape.end, tag)])),
        f"call: {' | '.join(rules)}",
    ]  # fmt: skip
    owns = [
        _own(family, template, rule, *tool, tag) for rule, tool in zip(rules, tools, strict=True)
    ]
    if family == "pythonic" and not all(owns):
        owns = [[] for _ in owns]  # a list is of one kind
    for rule, (name, schema), own in zip(rules, tools, owns, strict=True):
        head, tail = _row(shape.head, tag, name), _row(shape.tail, tag)
        lines += own or [
            f"{rule}: {head} {rule}_arguments {tail}",
            f"{rule}_arguments: %json {_schema(schema)}",
        ]
    return "\n".join(lines)


def parser(
    family: str, template: str, names: Sequence[str], texts: Texts, parallel: bool
) -> ToolCallParser:
    """Return a parser of a text that matches the grammar of calls of tools with these ``names``.

    Another text is read as the family writes its calls freely.
    """
    free = tool_families.reader(family, texts)
    if family in _OWN:
        return ToolCallParser(free, parallel)
    shape = _shape(family, template)
    heads = {_plain(shape.head, name): name for name in names}
    begin, tail, end = map(_plain, (shape.begin, shape.tail, shape.end))
    new = tool_families.short_id if family == "mistral" else new_id

    def read(text: Reader) -> Steps[None]:
        head = yield from text.takes(*(begin + head for head in heads))
        if not head:
            yield from free(text)
            return
        head = head.removeprefix(begin)
        while head and (yield from text.streams(heads[head], new())):
            yield from text.drops(tail)
            if not (yield from text.follows(*(shape.between + head for head in heads))):
                break
            yield from text.drops(shape.between)
            head = yield from text.takes(*heads)
        yield from text.drops(end)
        yield from text.content([])

    return ToolCallParser(read)


def _plain(texts: Sequence[str], name: str = "") -> str:
    return "".join(_named(texts, name))


def _row(texts: Sequence[str], tag: Tag, name: str = "") -> str:
    return " ".join(map(tag, _named(texts, name)))


def _named(texts: Sequence[str], name: str) -> list[str]:
    return [one.replace('{"…"}', json.dumps(name)).replace("{}", name) for one in texts if one]


def _schema(schema: Any) -> str:
    return json.dumps(schema, ensure_ascii=False)


# ---- arguments one by one


class _Argument(NamedTuple):
    """``value`` is a schema, or the texts that it may be; None for any text."""

    key: str
    value: dict[str, Any] | list[str] | None
    required: bool


def _own(
    family: str, template: str, rule: str, name: str, schema: dict[str, Any], tag: Tag
) -> list[str]:
    """Return the rules of a call in the form of its family; none where only JSON will do."""
    if family not in _OWN:
        return []
    python = family == "pythonic"
    arguments = _arguments(schema, texts=not python)
    if arguments is None:
        return []
    if python:
        return _python(rule, name, arguments)
    if family == "qwen3_coder":
        begin, end = [HERMES, f"\n{FUNCTION}{name}>\n"], [f"{END_FUNCTION}\n", END_HERMES]
        before, after = ([PARAMETER, "{}>\n"], ["\n" + END_PARAMETER, "\n"])
    else:
        line = "\n" if f"\n{KEY}" in template else ""
        begin, end = [HERMES, f"{name}{line}"], [END_HERMES]
        before, after = ([KEY, "{}", END_KEY, line, VALUE], [END_VALUE, line])
    parts, lines = [], []
    for number, one in enumerate(arguments):
        part = f"{rule}_{number}"
        parts.append(part if one.required else f"{part}?")
        close = _row(after, tag)
        if one.value is None:
            closing = tag(after[0])
            ended = f"[suffix={closing}]" if closing.startswith('"') else ""
            lines.append(f"{part}_value{ended}: /(?s:.*)/")
            close = _row(after[1:] if ended else after, tag)
        elif isinstance(one.value, list):
            lines.append(f"{part}_value: {' | '.join(map(_schema, one.value))}")
        else:
            lines.append(f"{part}_value: %json {_schema(one.value)}")
        lines.append(f"{part}: {_row(before, tag, one.key)} {part}_value {close}")
    return [f"{rule}: {_row(begin, tag)} {' '.join(parts)} {_row(end, tag)}", *lines]


def _python(rule: str, name: str, arguments: list[_Argument]) -> list[str]:
    """Return the rules of ``NAME(KEY=VALUE, …)`` with values in JSON, whose texts are Python's."""
    if not all(one.key.isidentifier() and not keyword.iskeyword(one.key) for one in arguments):
        return []
    if not all(part.isidentifier() for part in name.split(".")):
        return []
    lines, firsts = [], []
    for number, one in enumerate(arguments):
        part = f"{rule}_{number}"
        lines.append(f"{part}: {_schema(one.key + '=')} {part}_value")
        lines.append(f"{part}_value: %json {_schema(one.value)}")
        rest = f"{rule}_after_{number + 1}" if number + 1 < len(arguments) else ""
        if number:
            another = f'(", " {part})' + ("" if one.required else "?")
            lines.append(f"{rule}_after_{number}: {another} {rest}")
        if not any(before.required for before in arguments[:number]):
            firsts.append(f"{part} {rest}")
    optional = "" if any(one.required for one in arguments) else "?"
    inside = f"({' | '.join(firsts)}){optional}" if firsts else ""
    return [f'{rule}: {_schema(name + "(")} {inside} ")"', *lines]


_PLAIN = frozenset(
    {"type", "properties", "required", "title", "description", "additionalProperties", "$schema",
     "$defs", "definitions"}
)  # fmt: skip
_PLAIN_TEXT = frozenset({"type", "title", "description", "enum", "const", "default", "examples"})


def _arguments(schema: dict[str, Any], texts: bool) -> list[_Argument] | None:
    """Return the arguments that a tool's schema lists; None where it says more than that.

    With ``texts``, texts are written without quotes.
    """
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if (
        not schema.keys() <= _PLAIN
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
            not _NAME.fullmatch(key)
            or not isinstance(given, dict)
            or _ELSEWHERE.search(_schema(given))
        ):
            return None
        value: dict[str, Any] | list[str] | None = shared | given
        if texts and given.get("type") == "string":
            if not given.keys() <= _PLAIN_TEXT:
                return None
            value = given.get("enum", [given["const"]] if "const" in given else None)
            if value is not None and not _plain_texts(value):
                return None
        found.append(_Argument(key, value, key in required))
    return found


_NAME = re.compile(r"[^\s<>=]{1,256}")
_ELSEWHERE = re.compile(r'"\$(ref|dynamicRef)": "(?!#/(\$defs|definitions)/)|"\$(id|anchor)"')
"""What means something else in a part of the schema."""


def _plain_texts(values: Any) -> bool:
    """Whether these are texts that can be written without quotes, so that each is read as it is."""
    return (
        isinstance(values, list)
        and bool(values)
        and all(
            isinstance(one, str) and one != "" and one == one.strip() and "<" not in one
            for one in values
        )
    )
