"""The engine with published tokenizers and chat templates, and a tiny model with random weights.

Tests ``api/output_grammar.py``, ``api/tool_families.py`` and ``frontend/requests/tokenizer.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.conformance import published
from tests.integration.engine.conftest import MODEL, Engine

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
FLAGS = {
    "llama3_1": ("--tool-call-parser", "llama3_json"),  # its package's template writes no tools
}
EMOJI = "👨‍👩‍👧‍👦 on a 🛟, 🇳🇴 to 🏴󠁧󠁢󠁳󠁣󠁴󠁿: naïve 北京 ₿"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "tide",
        "description": "Tell the depth of the water.",
        "parameters": {
            "type": "object",
            "properties": {
                "port": {"type": "string", "enum": ["Hull", "</tool_call>", EMOJI]},
                "hours": {"type": "array", "items": {"type": "integer", "minimum": 0,
                          "maximum": 23}, "minItems": 1, "maxItems": 3},
            },
            "required": ["port", "hours"],
            "additionalProperties": False,
        },
    },
}  # fmt: skip
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"const": f'{EMOJI} "<|im_end|>" </s>'},
        "depth": {"type": "integer", "minimum": -9, "maximum": 9},
        "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "depth", "flags"],
    "additionalProperties": False,
}
EXTRA = {"structured_outputs"}
"""Fields that OpenAI's client does not know."""
USER = {"role": "user", "content": "How deep is it?"}


class Family:
    """An engine with one tokenizer, and transformers' own beside it."""

    def __init__(self, name: str, engine: Engine, tokenizer: Any) -> None:
        self.name, self.engine, self.tokenizer = name, engine, tokenizer

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        status, answer = self.engine.post(path, json.dumps({"model": MODEL} | body).encode())
        assert status == 200, answer
        return answer

    def chat(self, **body: Any) -> dict[str, Any]:
        if self.tokenizer.chat_template is None:
            pytest.skip("the package has no chat template")
        body = {"messages": [USER], "max_tokens": 400, "temperature": 1, "seed": 1} | body
        return dict(self.post("/v1/chat/completions", **body)["choices"][0])

    def completion(self, **body: Any) -> dict[str, Any]:
        body = {"prompt": "The tide", "max_tokens": 400, "temperature": 1, "seed": 1} | body
        return dict(self.post("/v1/completions", **body)["choices"][0])

    def streamed(self, **body: Any) -> tuple[str, list[Any], str]:
        """Return text, calls and reason of a streamed chat."""
        if self.tokenizer.chat_template is None:
            pytest.skip("the package has no chat template")
        body["extra_body"] = {name: body.pop(name) for name in EXTRA & body.keys()}
        text, calls, reason = "", dict[int, dict[str, str]](), ""
        client: Any = self.engine.client
        for chunk in client.chat.completions.create(
            model=MODEL, stream=True,
            **{"messages": [USER], "max_tokens": 400, "temperature": 1, "seed": 1} | body,
        ):  # fmt: skip
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reason = choice.finish_reason or reason
                for call in choice.delta.tool_calls or ():
                    whole = calls.setdefault(call.index, {"name": "", "arguments": ""})
                    whole["name"] += call.function.name or ""
                    whole["arguments"] += call.function.arguments or ""
        return text, list(calls.values()), reason

    @property
    def names(self) -> list[str]:
        """Some of its added tokens, special ones among them, and none that is a blank."""
        added = self.tokenizer.added_tokens_decoder.values()
        written = [
            str(one) for one in added if str(one).strip(" \t\n\u2581") and "unused" not in str(one)
        ]
        special = [str(one) for one in added if one.special and str(one) in written]
        plain = [one for one in written if one not in special]
        return [*special[:3], *special[-2:], *plain[:3]]


@pytest.fixture(scope="module", params=published.FAMILIES)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Family]:
    name = request.param
    folder = published.family(name)
    if not (folder / "config.json").exists():
        pytest.skip("not made: make engines")
    engine = Engine(folder, tmp_path_factory.mktemp(name), *FLAGS.get(name, ()))
    try:
        engine.wait_ready()
        yield Family(name, engine, AutoTokenizer.from_pretrained(folder))
    finally:
        engine.end()


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "tide"}}])
def test_a_forced_call_comes_whole_and_in_pieces(family: Family, choice: Any) -> None:
    for seed in range(4):
        asked = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False, "seed": seed}
        whole = family.chat(**asked)
        (call,) = whole["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert call["function"]["name"] == "tide"
        assert arguments["port"] in TOOL["function"]["parameters"]["properties"]["port"]["enum"]
        assert 1 <= len(arguments["hours"]) <= 3
        assert not whole["message"]["content"]
        text, calls, reason = family.streamed(**asked)
        assert [json.loads(one["arguments"]) for one in calls] == [arguments]
        assert (text, reason) == ("", whole["finish_reason"])


def test_an_object_matches_its_schema(family: Family) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    for seed in range(4):
        whole = family.chat(response_format=form, seed=seed)
        assert whole["finish_reason"] == "stop"
        found = json.loads(whole["message"]["content"])
        assert found["name"] == SCHEMA["properties"]["name"]["const"]
        assert -9 <= found["depth"] <= 9
        text, _, reason = family.streamed(response_format=form, seed=seed)
        assert (text, reason) == (whole["message"]["content"], "stop")


def test_a_stop_string_ends_a_text(family: Family) -> None:
    for seed in range(4):
        asked = {"seed": seed, "max_tokens": 48, "ignore_eos": True}
        text = family.completion(**asked)["text"]
        half = len(text) // 2
        stop = text[half : half + 3]
        if not stop.strip() or "\ufffd" in text[: half + 8]:
            continue
        cut = family.completion(**asked, stop=[stop])
        assert cut["text"] == text[: text.index(stop)]
        assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)


def test_names_of_added_tokens_are_text_where_the_text_needs_them(family: Family) -> None:
    """In an answer, and in a prompt that says them: as transformers reads them."""
    for name in family.names:
        text = f"say {name}, then {name}{name}."
        for choices in ([text], [text, "aye"]):
            found = family.completion(structured_outputs={"choice": choices})
            assert found["finish_reason"] == "stop"
            assert found["text"] in choices
        found = family.chat(structured_outputs={"choice": [text]})
        assert (found["message"]["content"], found["finish_reason"]) == (text, "stop")


def test_emoji_come_whole(family: Family) -> None:
    for text in (EMOJI, *EMOJI.split(), "🏴󠁧󠁢󠁳󠁣󠁴󠁿" * 3):
        found = family.completion(structured_outputs={"choice": [text]}, logprobs=1)
        assert (found["text"], found["finish_reason"]) == (text, "stop")
        got, _, _ = family.streamed(structured_outputs={"choice": [text]})
        assert got == text
        echo = family.completion(prompt=text, echo=True, max_tokens=1, ignore_eos=True)
        assert echo["text"].strip().startswith(text)


def test_prompts_are_those_of_transformers(family: Family) -> None:
    if family.tokenizer.chat_template is None:
        pytest.skip("the package has no chat template")
    if family.name == "chatglm3":
        pytest.skip(
            "tokens of its tokenizer are in the checkpoint's own code, and in no vocabulary"
        )
    said = {"role": "user", "content": f"{EMOJI} {' '.join(family.names)}  \n é"}
    turn = [
        USER,
        {
            "role": "assistant",
            "content": "4 m",
        },
        said,
    ]
    for tools in (None, [TOOL]):
        for messages in ([USER], [said], turn, [{"role": "system", "content": "Pilot."}, said]):
            try:
                expected = family.tokenizer.apply_chat_template(
                    messages, tools=tools, add_generation_prompt=True, tokenize=True,
                    return_dict=False,
                )  # fmt: skip
            except Exception:  # a template that refuses: what ours does then has its own tests
                continue
            found = family.post(
                "/tokenize", messages=messages, add_generation_prompt=True,
                **({"tools": tools} if tools else {}),
            )  # fmt: skip
            assert found["tokens"] == list(expected), (messages, tools)


def test_a_conversation_with_calls_goes_on(family: Family) -> None:
    if family.name == "gemma3":
        pytest.skip("its template knows neither calls nor their results")
    messages: list[Any] = [USER]
    for turn in range(3):
        answer = family.chat(
            messages=messages, tools=[TOOL], tool_choice="required", seed=turn,
            parallel_tool_calls=False,
        )  # fmt: skip
        (call,) = answer["message"]["tool_calls"]
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": f"{turn} m {EMOJI}"},
        ]
    last = family.chat(messages=messages, tools=[TOOL], tool_choice="none", max_tokens=8)
    assert last["message"].get("tool_calls") in (None, [])
