"""Tool calls come out of a text the same however it is cut, and nothing else is lost.

Tests ``api/tool_calls.py``, ``api/tool_families.py``, ``api/tool_arguments.py`` and
``api/json_pieces.py``.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from plimsoll_engine.api import forced_calls, tool_families
from plimsoll_engine.api.tool_arguments import END_HERMES_TAG as END_HERMES
from plimsoll_engine.api.tool_arguments import HERMES_TAG as HERMES
from plimsoll_engine.api.tool_calls import ParsedOutput, ToolCall
from plimsoll_engine.api.tool_families import (
    DEEPSEEK_CALL_TAGS as DEEPSEEK_CALL,
)
from plimsoll_engine.api.tool_families import (
    DEEPSEEK_SEPARATOR_TAG as DEEPSEEK_SEPARATOR,
)
from plimsoll_engine.api.tool_families import (
    DEEPSEEK_TAGS as DEEPSEEK,
)
from plimsoll_engine.http.api_flags import TOOL_CALL_PARSERS

Call = tuple[str, dict[str, Any]]


def hermes(calls: list[Call]) -> str:
    return "\n".join(
        f"{HERMES}\n{json.dumps({'name': name, 'arguments': given})}\n{END_HERMES}"
        for name, given in calls
    )


def llama(calls: list[Call]) -> str:
    return "; ".join(json.dumps({"name": name, "parameters": given}) for name, given in calls)


def mistral(calls: list[Call]) -> str:
    listed = [{"name": name, "arguments": given} for name, given in calls]
    return f"[TOOL_CALLS] {json.dumps(listed, ensure_ascii=False)}"


def tekken(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(given)}" for name, given in calls)


def qwen_coder(calls: list[Call]) -> str:
    def value(one: object) -> str:
        return one if isinstance(one, str) else json.dumps(one)

    return "\n".join(
        f"{HERMES}\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{value(one)}\n</parameter>\n" for key, one in given.items())
        + f"</function>\n{END_HERMES}"
        for name, given in calls
    )


def glm(calls: list[Call]) -> str:
    def value(one: object) -> str:
        return one if isinstance(one, str) else json.dumps(one)

    return "".join(
        f"\n{HERMES}{name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{value(one)}</arg_value>\n"
            for key, one in given.items()
        )
        + END_HERMES
        for name, given in calls
    )


def deepseek(calls: list[Call]) -> str:
    return (
        DEEPSEEK[0]
        + "\n".join(
            f"{DEEPSEEK_CALL[0]}function{DEEPSEEK_SEPARATOR}{name}\n```json\n{json.dumps(given)}\n"
            f"```{DEEPSEEK_CALL[1]}"
            for name, given in calls
        )
        + DEEPSEEK[1]
    )


def deepseek_31(calls: list[Call]) -> str:
    listed = [
        f"{DEEPSEEK_CALL[0]}{name}{DEEPSEEK_SEPARATOR}{json.dumps(given)}{DEEPSEEK_CALL[1]}"
        for name, given in calls
    ]
    return DEEPSEEK[0] + "".join(listed) + DEEPSEEK[1]


def pythonic(calls: list[Call]) -> str:
    listed = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"
        for name, given in calls
    ]
    return f"[{', '.join(listed)}]"


def harmony(calls: list[Call]) -> str:
    written = [
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(given)}"
        for name, given in calls
    ]
    thought = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"
    return thought + "<|call|><|start|>assistant".join(written) + "<|call|>"


WRITERS: list[tuple[str, Callable[[list[Call]], str]]] = [
    ("hermes", hermes), ("llama3_json", llama), ("mistral", mistral), ("mistral", tekken),
    ("qwen3_coder", qwen_coder), ("glm45", glm), ("deepseek_v3", deepseek),
    ("deepseek_v3", deepseek_31), ("pythonic", pythonic), ("openai", harmony),
]  # fmt: skip
FUNCTIONS = ["tide", "get_wind", "ship.find", "f"]
PRESCRIBED: list[tuple[str, str, Callable[[list[Call]], str]]] = [
    ("hermes", "", hermes),
    ("llama3_json", "", llama),
    ("mistral", "", lambda calls: mistral(calls).replace("] [", "][", 1)),
    ("mistral", "[ARGS]", tekken),
    ("deepseek_v3", "```json", deepseek),
    ("deepseek_v3", "", deepseek_31),
    ("openai", "", lambda calls: harmony(calls[:1]).partition("assistant")[2]),
]
"""Family, what its template holds, and the text that its grammar prescribes."""
WORDS = [
    "Hull", "say </tool_call> now", "a\nb", 'quoted "text"', "back\\slash", "漢字 é 😀", "{", "]",
    "</parameter>", "</arg_value>", "x</parameter>\ny",
    "it's", "[TOOL_CALLS]", "", " ", "<|call|>", "; {", "(1)",
    "<function=f>", "```", "null", "7", "true",
]  # fmt: skip


def parse(family: str, pieces: list[str], texts: Any = None) -> tuple[str, str, list[Call]]:
    parser = tool_families.create_parser(family, texts or {})
    *most, last = pieces or [""]
    found = [*map(parser.push, most), parser.push(last, is_last=True)]
    assert parser.push("", is_last=True).text == ""
    return (
        "".join(one.text for one in found),
        "".join(one.reasoning for one in found),
        [(one.name, loaded(one.arguments)) for one in joined(found)],
    )


def joined(found: list[ParsedOutput]) -> list[ToolCall]:
    """Return the calls whose parts these are."""
    calls: list[ToolCall] = []
    for part in (one for parsed in found for one in parsed.calls):
        if part.id:
            assert part.name
            calls.append(part)
        else:
            assert calls[-1].more, "a part of a call that had ended"
            given = calls[-1].arguments + part.arguments
            calls[-1] = calls[-1]._replace(arguments=given, more=part.more)
    return calls


def loaded(arguments: str) -> Any:
    """Return arguments, or their text where it is no JSON."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def parse_forced(family: str, template: str, pieces: list[str]) -> tuple[str, list[Call], int]:
    """Return text, calls, and in how many parts they came."""
    parser = forced_calls.create_forced_call_parser(family, template, FUNCTIONS, {}, True)
    found = [*map(parser.push, pieces), parser.push("", is_last=True)]
    calls = joined(found)
    assert not any(one.more for one in calls), "none is left open"
    return (
        "".join(one.text for one in found),
        [(one.name, loaded(one.arguments)) for one in calls],
        sum(len(one.calls) for one in found),
    )


def cut(text: str, places: list[int]) -> list[str]:
    inner = sorted({0, len(text), *(place for place in places if place < len(text))})
    return [text[a:b] for a, b in pairwise(inner)]


def value(rng: random.Random, depth: int = 0) -> Any:
    kinds = 8 if depth < 2 else 6
    kind = rng.randrange(kinds)
    if kind < 3:
        return "".join(rng.choices(WORDS, k=rng.randint(1, 3)))
    if kind < 6:
        return [rng.randint(-9, 10**6), rng.random(), rng.random() < 0.5][kind - 3]
    if kind == 6:
        return [value(rng, depth + 1) for _ in range(rng.randrange(3))]
    return {f"k{number}": value(rng, depth + 1) for number in range(rng.randrange(3))}


@pytest.mark.parametrize(("family", "write"), WRITERS)
def test_no_call_is_lost_however_the_text_is_cut(
    family: str, write: Callable[[list[Call]], str]
) -> None:
    """Simple, nested, parallel, several functions, none needed: 2,000 texts of all families."""
    rng = random.Random(family + write.__name__)
    for _ in range(200):
        calls = [
            (
                rng.choice(FUNCTIONS),
                {f"arg{number}": value(rng) for number in range(rng.randrange(4))},
            )
            for _ in range(rng.choice([1, 1, 2, 5]))
        ]
        texts = {
            name: {
                key: True
                for _, given in calls
                for key, one in given.items()
                if isinstance(one, str)
            }
            for name, _ in calls
        }
        if family in (
            "qwen3_coder",
            "glm45",
        ):  # a name is text in one call and a number in another: no schema
            calls = [calls[0]]
            strings = (k for k, one in calls[0][1].items() if isinstance(one, str))
            texts = {calls[0][0]: dict.fromkeys(strings, True)}
        text = write(calls)
        whole = parse(family, [text], texts)
        assert whole[2] == calls, text
        assert whole[0].strip() == ""
        for _ in range(3):
            places = [rng.randrange(len(text)) for _ in range(rng.randrange(1, 40))]
            assert parse(family, cut(text, places), texts) == whole
        assert parse(family, list(text), texts) == whole
        parser = tool_families.create_parser(family, texts)
        parts = [one for letter in text for one in parser.push(letter).calls]
        assert [one.name for one in parts if one.id] == [name for name, _ in calls]
        if family in ("pythonic", "qwen3_coder", "glm45"):  # which must see the end of a value
            assert len(parts) >= sum(len(given) for _, given in calls)
        else:
            assert len(parts) >= letters(calls)


def letters(calls: list[Call]) -> int:
    """Return the length of the texts among the arguments."""
    return sum(len(one) for _, given in calls for one in given.values() if isinstance(one, str))


@pytest.mark.parametrize(("family", "template", "write"), PRESCRIBED)
def test_arguments_of_forced_calls_come_in_pieces(
    family: str, template: str, write: Callable[[list[Call]], str]
) -> None:
    """Joined they are the whole, however the text is cut: 2,000 calls of all families."""
    rng, count = random.Random(family + template), 0
    while count < 290:
        calls = [
            (
                rng.choice(FUNCTIONS),
                {f"arg{number}": value(rng) for number in range(rng.randrange(4))},
            )
            for _ in range(1 if family == "openai" else rng.choice([1, 1, 2, 5]))
        ]
        count += len(calls)
        text = write(calls)
        for _ in range(3):
            places = [rng.randrange(len(text)) for _ in range(rng.randrange(1, 40))]
            found = parse_forced(family, template, cut(text, places))
            assert found[:2] == ("", calls), text
        assert parse_forced(family, template, [text]) == ("", calls, len(calls))
        said, listed, parts = parse_forced(family, template, list(text))
        assert (said, listed) == ("", calls)
        assert parts > letters(calls)


@pytest.mark.parametrize(("family", "template", "write"), PRESCRIBED)
def test_a_forced_call_that_is_cut_is_given_out_as_far_as_it_came(
    family: str, template: str, write: Callable[[list[Call]], str]
) -> None:
    given = {"port": "say </tool_call> {", "hours": [1, 2]}
    text = write([("tide", given)])
    written = json.dumps(given)
    begin = text.index(written)
    for place in range(1, len(text)):
        parser = forced_calls.create_forced_call_parser(family, template, ["tide"], {}, True)
        parsed = [parser.push(text[:place]), parser.push("", is_last=True)]
        calls = [one for parts in parsed for one in parts.calls]
        said = "".join(one.text for one in parsed)
        if place >= begin:
            assert "".join(one.arguments for one in calls) == written[: place - begin]
            assert [one.name for one in calls if one.id] == ["tide"]
            assert calls[-1].more is (place < begin + len(written))
            assert said == ""
        elif not calls and family != "openai":  # the call is not begun: nothing is lost
            assert said == text[:place]


@pytest.mark.parametrize(("family", "template", "write"), PRESCRIBED)
@pytest.mark.parametrize("value", ["5", '"Hull"', "null", "true", "", "}", "(1)"])
def test_a_forced_call_whose_arguments_are_no_object_raises_nothing(
    family: str, template: str, write: Callable[[list[Call]], str], value: str
) -> None:
    text = write([("tide", {"port": 7})]).replace('{"port": 7}', value)
    for pieces in ([text], list(text)):
        parser = forced_calls.create_forced_call_parser(family, template, ["tide"], {}, True)
        parsed = [*map(parser.push, pieces), parser.push("", is_last=True)]
        calls = [one for parts in parsed for one in parts.calls]
        assert [(one.name, one.arguments) for one in calls] == [("tide", "")]
        assert value in "".join(one.text for one in parsed)


@pytest.mark.parametrize(("family", "write"), WRITERS)
def test_a_forced_text_of_another_form_is_read_as_the_family_writes_it(
    family: str, write: Callable[[list[Call]], str]
) -> None:
    calls: list[Call] = [("tide", {"port": 7}), ("f", {})]
    text = " " + write(calls) if family != "pythonic" else write(calls)
    for pieces in ([text], list(text)):
        said, found, _ = parse_forced(family, "", pieces)
        assert (said.strip(), found) == ("", calls)


PARTS = st.sampled_from(
    [
        HERMES, END_HERMES, "<tool", "_call>", "</", "<", "\n", " ", "text", "é", "[TOOL_CALLS]",
        '{"name": "f", "arguments": {"a": [1, "</x>"]}}', '{"name": "g"}', '{"name": 7}', "{", "[",
        hermes([("h", {})]), *DEEPSEEK, *DEEPSEEK_CALL, DEEPSEEK_SEPARATOR, "f", "[ARGS]", "{}",
        "<function=f>", "<parameter=a>", "</parameter>", "</function>", "[f(a=1)]", "f(", ")", '"',
        "<|channel|>", "analysis", "final", "<|message|>", "<|end|>", "commentary to=functions.f",
        "<|start|>assistant", "<|call|>", "<|python_tag|>", "; ", "```json\n", "```", "\\", "NaN",
        '{"name": "f", "arguments": {', '{"name": "f", "arguments": {"a": "', "\\u", "'", ", ", "]",
        "<arg_key>a</arg_key>", "<arg_value>", "</arg_value>", "\x01", "[f(a=", '"id": 5', "1e999",
    ]
)  # fmt: skip


@given(
    family=st.sampled_from(tool_families.FAMILY_NAMES),
    parts=st.lists(PARTS, max_size=12),
    cuts=st.lists(st.integers(0, 200), max_size=12),
)
@example(
    family="hermes", parts=[HERMES, '{"name": "g"}', END_HERMES, "\n"], cuts=[5, 12, 20, 24, 27]
)
@example(family="hermes", parts=["a", "\n", hermes([("f", {})]), "\n", "b"], cuts=[2, 3, 60, 61])
@example(family="glm45", parts=[HERMES, "f<arg_key>a", hermes([("g", {})]), "b"], cuts=[70])
@example(family="hermes", parts=[HERMES, '{"a": "', hermes([("g", {})]), "b"], cuts=[70])
def test_the_cuts_do_not_matter(family: str, parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    whole = parse(family, [text])
    assert parse(family, cut(text, cuts)) == whole
    if not whole[2] and family != "openai":  # whose channels are no text
        assert whole[0] == text


def test_calls_between_texts() -> None:
    text = "Let me see.\n" + hermes([("tide", {"port": "Hüll"}), ("wind", {})]) + "\n"
    assert parse("hermes", [text]) == (
        "Let me see.\n",
        "",
        [("tide", {"port": "Hüll"}), ("wind", {})],
    )


WHOLE = '{"name": "f", "arguments": {"a": 1}}'


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (HERMES + WHOLE, [{"a": 1}]),
        (HERMES + WHOLE + "}\n" + END_HERMES, [{"a": 1}]),
        (HERMES + WHOLE[:-1] + "\n" + END_HERMES, [{"a": 1}]),
        (HERMES + f"[{WHOLE}, {WHOLE}]" + END_HERMES, [{"a": 1}] * 2),
        (HERMES + '{"name": "f", "arguments": {"a": "x\ny"}}' + END_HERMES, [{"a": "x\ny"}]),
        (HERMES + '{"name": "f", "arguments": "{\\"a\\": 1}"}' + END_HERMES, [{"a": 1}]),
        (HERMES + '{"name": "f", "arguments": {"a": NaN, "b": 1e999}}', [{"a": None, "b": None}]),
        (HERMES + '{"name": "f", "arguments": null}' + END_HERMES, [{}]),
        (HERMES + '{"function": {"name": "f", "parameters": {"a": 1}}}', [{"a": 1}]),
        (HERMES + '{"name": "broken", "arg' + HERMES + WHOLE, [{"a": 1}]),
        (HERMES + '{"name": "f", "arguments": {"a": [1, {"b": 2}\n' + END_HERMES,
         [{"a": [1, {"b": 2}]}]),
        (HERMES + '{"name": "f", "arguments": {"a": [1}, "b": 2]}}' + END_HERMES,
         [{"a": [1]}]),
        (HERMES + '{"name": "f", "arguments": {"a": [1, ], "b": 2, }}' + END_HERMES,
         [{"a": [1], "b": 2}]),
        (HERMES + '{"name": "f", "arguments": {"a": True, "b": None, "c": -Infinity}}',
         [{"a": True, "b": None, "c": None}]),
        (HERMES + '{"name": "f", "arguments": {"a": "it\\\'s C:\\data \\u12"}}' + END_HERMES,
         [{"a": "it's C:\\data \\u12"}]),
        (HERMES + '{"arguments": {"a": 1}, "name": "f"}' + END_HERMES, [{"a": 1}]),
        (HERMES + '{"name": "f", "arguments": {"a": 1}, "id": "x"}' + END_HERMES, [{"a": 1}]),
    ],
)  # fmt: skip
def test_what_models_get_wrong_is_repaired(text: str, arguments: list[dict[str, Any]]) -> None:
    for pieces in ([text], list(text)):
        assert [given for _, given in parse("hermes", pieces)[2]] == arguments


@pytest.mark.parametrize(("family", "write"), WRITERS)
def test_a_call_that_is_cut_is_given_out_as_far_as_it_came(
    family: str, write: Callable[[list[Call]], str]
) -> None:
    given = {"port": "say </tool_call> {", "hours": [1, 2]}
    text = write([("tide", given)])
    whole = json.dumps(given)
    for place in range(1, len(text)):
        found = []
        for pieces in ([text[:place]], list(text[:place])):
            parser = tool_families.create_parser(family, {"tide": {"port": True}})
            parsed = [*map(parser.push, pieces), parser.push("", is_last=True)]
            said = "".join(one.text for one in parsed)
            found.append(([(one.arguments, one.more) for one in joined(parsed)], said))
        assert found[0] == found[1]
        calls, said = found[0]
        for arguments, more in calls:
            # Where no closing tag follows a value, the call may be whole.
            assert whole.startswith(arguments if more else arguments.removesuffix("}"))
            assert more or loaded(arguments).keys() <= given.keys()
        if not calls and family != "openai":
            assert said == text[:place], "nothing is lost"


@pytest.mark.parametrize(
    ("begun", "arguments"),
    [
        ('{"a": [1, {"b": 2', '{"a": [1, {"b": 2}]}'),
        ('{"a": tru', '{"a": tru}'),
        ('{"a": 1, ', '{"a": 1 }'),
        ('{"a": NaN', '{"a": null}'),
        ("{", "{}"),
        ('{"a": "in a text', None),
    ],
)
@pytest.mark.parametrize("step", [1, 7, 1000])
def test_brackets_that_the_model_left_open_are_closed(
    begun: str, arguments: str | None, step: int
) -> None:
    text = HERMES + '{"name": "f", "arguments": ' + begun
    parser = tool_families.create_parser("hermes", {})
    pieces = [text[at : at + step] for at in range(0, len(text), step)]
    found = [*map(parser.push, pieces[:-1]), parser.push(pieces[-1], True, is_finished=True)]
    (call,) = joined(found)
    assert call.arguments == (begun if arguments is None else arguments)
    assert call.more is (arguments is None)


def test_half_a_character_stays_the_escape_that_the_model_wrote() -> None:
    parser = tool_families.create_parser("hermes", {})
    text = HERMES + '{"name": "f", "arguments": {"a": "\\ud83d"}}' + END_HERMES
    assert [one.arguments for one in joined([parser.push(text)])] == ['{"a": "\\ud83d"}']
    name = HERMES + '{"name": "\\ud83d", "arguments": {}}' + END_HERMES
    assert parse("hermes", [name])[2] == []


def test_only_the_first_call_is_given_out_where_one_is_wanted() -> None:
    parser = tool_families.create_parser("hermes", {}, allow_several=False)
    found = [parser.push(one) for one in hermes([("a", {"c": 1}), ("b", {})])]
    (call,) = joined(found)
    assert (call.name, call.arguments, call.more) == ("a", '{"c": 1}', False)


def test_what_only_looks_like_a_call_stays_text() -> None:
    for text in (
        HERMES + "not json" + END_HERMES,
        HERMES + '{"name": "f", "arguments": "a string"}' + END_HERMES,
        HERMES + '{"name": "cut short", "argu',
        "a <tool",
        HERMES + "[" * 100_000 + END_HERMES,
        HERMES * 3_000,
    ):
        assert parse("hermes", [text]) == (text, "", [])


def test_what_a_tag_began_and_stayed_text_is_noted() -> None:
    for family, text, noted in (
        ("hermes", HERMES + "not json" + END_HERMES, True),
        ("hermes", "text", False),
        ("hermes", hermes([("f", {})]) + " {", False),
        ("llama3_json", '{"name": 1}', False),  # an answer may be JSON
        ("llama3_json", '<|python_tag|>{"name": 1}', True),
        ("deepseek_v3", deepseek([("f", {}), ("g", {})]), False),
        ("openai", harmony([("f", {})]), False),
        ("mistral", "[TOOL_CALLS]", True),
    ):
        parser = tool_families.create_parser(family, {})
        parser.push(text, is_last=True)
        assert parser.has_unparsed_call is noted, text


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("qwen3_coder", '<function=f>{"a": "x</function>"}</function>'),
        ("qwen3_coder", "<seed:tool_call>\n<function=f>\n<parameter=a>x</function></parameter>\n"
         "</function>\n</seed:tool_call>"),
        ("pythonic", '[{"name": "f", "parameters": {"a": "x</function>"}}]'),
        ("pythonic", '{"name": "f", "parameters": {"a": "x</function>"}}'),
        ("llama3_json", '[f(a="x</function>")]'),
        ("glm45", WHOLE.join((HERMES, END_HERMES)).replace("1}", '"x</function>"}')),
    ],
)  # fmt: skip
def test_forms_of_other_checkpoints_of_a_family_are_read(family: str, text: str) -> None:
    for pieces in ([text], list(text)):
        found = parse(family, pieces, {"f": {"a": True}})
        assert found == ("", "", [("f", {"a": "x</function>"})])


def test_mistral_has_ids_that_its_templates_take() -> None:
    (call,) = tool_families.create_parser("mistral", {}).push(mistral([("f", {})])).calls
    assert len(call.id) == 9
    assert call.id.isalnum()


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("<tool_call>\n<function=example_function_name>", "qwen3_coder"),
        ("<tool_call>{name}\n<arg_key>{key}</arg_key>", "glm45"),
        ('<|header_start|> {\\"name\\": function name, \\"parameters\\": …}', "llama3_json"),
        ('{"tool_name": "search", "parameters": {}} <|START_ACTION|>', ""),
        ("<|tool_calls_section_begin|> {{ tools }}", ""),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        ('Respond in the format {"name": function name, "parameters": …}', "llama3_json"),
        ("<|python_tag|>", "llama3_json"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
        ("<|channel|>analysis <tool_call>", "openai"),
        ("", ""),
    ],
)
def test_the_template_tells_the_family(template: str, family: str) -> None:
    assert tool_families.detect_family(template) == family
    assert tool_families.FAMILY_NAMES == TOOL_CALL_PARSERS


def test_a_long_call_takes_time_in_its_length_alone() -> None:
    argument = "word " * 40_000
    call = json.dumps({"name": "f", "arguments": {"text": argument}})
    pieces = [HERMES, *(call[i : i + 3] for i in range(0, len(call), 3)), END_HERMES]
    text, _, calls = parse("hermes", pieces)
    assert text == ""
    assert calls[0][1]["text"] == argument
