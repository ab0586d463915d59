"""Bodies for two servers of the same checkpoint: written ones, and legal fields at random."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

Value = Callable[[random.Random], Any]
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
ABSENT = object()
NULL_SHARE = 0.08
"""Of the fields at random, those that are null."""
FIELDS = 5
"""At most as many of them in a body."""


class Body(NamedTuple):
    """What is posted to a path."""

    name: str
    path: str
    fields: dict[str, Any]

    @property
    def greedy(self) -> bool:
        """Whether both servers shall find the same tokens."""
        return self.fields.get("temperature") == 0

    @property
    def constrained(self) -> bool:
        """Whether a grammar holds: of several texts that it allows, each server picks its own."""
        choice = self.fields.get("tool_choice")
        form = self.fields.get("response_format") or self.fields.get("text")
        return bool(
            self.fields.get("structured_outputs")
            or (form and form != {"type": "text"})
            or choice not in (None, "none", "auto")
        )


TIDE = {
    "name": "tide",
    "description": "Tell the depth of the water at a port.",
    "parameters": {
        "type": "object",
        "properties": {"port": {"type": "string", "enum": ["Hull", "Leith"]}},
        "required": ["port"],
        "additionalProperties": False,
    },
}
WIND = {"name": "wind", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": TIDE}]
BOTH = [*TOOLS, {"type": "function", "function": WIND}]
NAMED = {"type": "function", "function": {"name": "tide"}}
SHIP = {
    "type": "object",
    "properties": {"name": {"enum": ["Ariel", "Fram"]}, "masts": {"enum": [1, 2, 3]}},
    "required": ["name", "masts"],
    "additionalProperties": False,
}
USER = {"role": "user", "content": "Name a harbour of Scotland."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "call_1", "type": "function",
         "function": {"name": "tide", "arguments": '{"port": "Hull"}'}},
    ],
}  # fmt: skip
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "4 m"}


def _schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "ship", "schema": schema}}


def _chat(*messages: Any, **fields: Any) -> tuple[str, dict[str, Any]]:
    told = {"messages": list(messages) or [USER], "max_tokens": 6, "temperature": 0}
    return CHAT, {name: one for name, one in (told | fields).items() if one is not ABSENT}


def _text(prompt: Any = "The harbour of", **fields: Any) -> tuple[str, dict[str, Any]]:
    told = {"prompt": prompt, "max_tokens": 6, "temperature": 0}
    return COMPLETIONS, {name: one for name, one in (told | fields).items() if one is not ABSENT}


def _response(given: Any = "Name a harbour.", **fields: Any) -> tuple[str, dict[str, Any]]:
    return RESPONSES, {"input": given, "max_output_tokens": 6, "temperature": 0} | fields


def _parts(*texts: str, role: str = "user", kind: str = "text") -> dict[str, Any]:
    return {"role": role, "content": [{"type": kind, "text": text} for text in texts]}


def _roles(*roles: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": f"What the {role} says."} for role in roles]


WRITTEN: dict[str, tuple[str, dict[str, Any]]] = {
    # what vLLM's documentation shows, in our words
    "completion": _text(),
    "completion, several prompts": _text(["One ship", "Two ships"]),
    "completion, tokens": _text([504, 3575, 282]),
    "completion, lists of tokens": _text([[504, 3575], [504, 9]]),
    "completion, echo": _text(echo=True),
    "completion, echo with logprobs": _text(echo=True, logprobs=2),
    "completion, echo alone": _text(echo=True, max_tokens=0),
    "completion, no max_tokens": _text(max_tokens=ABSENT),
    "completion, stream": _text(stream=True, stream_options={"include_usage": True}),
    "completion, logprobs": _text(logprobs=3),
    "completion, suffix": _text(suffix="."),
    "completion, best_of": _text(best_of=2),
    "completion, beam search": _text(use_beam_search=True, n=2),
    "completion, n": _text(n=2, temperature=1),
    "completion, n greedy": _text(n=2),
    "completion, long prompt": _text("ship " * 3000),
    "completion, too many tokens": _text(max_tokens=5000),
    "completion, truncated": _text("ship " * 100, truncate_prompt_tokens=10),
    "completion, empty prompt": _text(""),
    "completion, no prompts": _text([]),
    "completion, token out of the vocabulary": _text([10_000_000]),
    "completion, negative token": _text([-1]),
    "completion, priority": _text(priority=0),
    "completion, cache salt": _text(cache_salt="salt"),
    "completion, empty cache salt": _text(cache_salt=""),
    "completion, token ids": _text(return_token_ids=True),
    "completion, names of tokens": _text(logprobs=1, return_tokens_as_token_ids=True),
    "completion, prompt logprobs": _text(prompt_logprobs=1),
    "completion, allowed tokens": _text(allowed_token_ids=[504, 3575]),
    "completion, bad words": _text(bad_words=["the"]),
    "completion, regex": _text(structured_outputs={"regex": "[a-c]{3}"}),
    "completion, choice": _text(structured_outputs={"choice": ["aye", "nay"]}),
    "completion, grammar": _text(structured_outputs={"grammar": 'root ::= "aye" | "nay"'}),
    "completion, json": _text(structured_outputs={"json": SHIP}, max_tokens=64),
    "completion, empty choice": _text(structured_outputs={"choice": []}),
    "completion, two structures": _text(structured_outputs={"regex": "a", "choice": ["a"]}),
    "chat": _chat(),
    "chat, max_completion_tokens": _chat(max_tokens=ABSENT, max_completion_tokens=5),
    "chat, no bound": _chat(max_tokens=ABSENT, seed=1),
    "chat, stream": _chat(stream=True, stream_options={"include_usage": True}),
    "chat, usage in every chunk": _chat(
        stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}
    ),
    "chat, stream options without a stream": _chat(stream_options={"include_usage": True}),
    "chat, logprobs": _chat(logprobs=True, top_logprobs=2),
    "chat, top_logprobs alone": _chat(top_logprobs=2),
    "chat, top_logprobs of all": _chat(logprobs=True, top_logprobs=-1),
    "chat, top_logprobs 21": _chat(logprobs=True, top_logprobs=21),
    "chat, continued": _chat(
        USER, {"role": "assistant", "content": "It is"}, add_generation_prompt=False,
        continue_final_message=True,
    ),
    "chat, continued and begun": _chat(
        USER, {"role": "assistant", "content": "It is"}, add_generation_prompt=True,
        continue_final_message=True,
    ),
    "chat, echo": _chat(USER, {"role": "assistant", "content": "It is"}, echo=True,
                        add_generation_prompt=False, continue_final_message=True),
    "chat, no turn": _chat(add_generation_prompt=False),
    "chat, its own template": _chat(chat_template="{{ messages[0].content }}"),
    "chat, template variables": _chat(chat_template_kwargs={"enable_thinking": False}),
    "chat, documents": _chat(documents=[{"title": "a", "text": "b"}]),
    "chat, json_object": _chat(response_format={"type": "json_object"}, max_tokens=32),
    "chat, json_schema": _chat(response_format=_schema(SHIP), max_tokens=64),
    "chat, json_schema of a reference": _chat(
        response_format=_schema({"$defs": {"s": SHIP}, "$ref": "#/$defs/s"}), max_tokens=64
    ),
    "chat, json_schema without a schema": _chat(response_format={"type": "json_schema"}),
    "chat, a schema that is none": _chat(response_format=_schema({"type": "ship"})),
    "chat, unknown format": _chat(response_format={"type": "xml"}),
    "chat, text format": _chat(response_format={"type": "text"}),
    "chat, choice": _chat(structured_outputs={"choice": ["aye", "nay"]}),
    "chat, tool required": _chat(tools=TOOLS, tool_choice="required", max_tokens=64),
    "chat, tool named": _chat(tools=BOTH, tool_choice=NAMED, max_tokens=64),
    "chat, tool named, stream": _chat(tools=BOTH, tool_choice=NAMED, max_tokens=64, stream=True),
    "chat, tool required, stream": _chat(tools=TOOLS, tool_choice="required", max_tokens=64,
                                         stream=True),
    "chat, tool auto": _chat(tools=TOOLS, tool_choice="auto"),
    "chat, tool none": _chat(tools=TOOLS, tool_choice="none"),
    "chat, tools alone": _chat(tools=TOOLS),
    "chat, no tools but required": _chat(tool_choice="required"),
    "chat, unknown tool": _chat(tools=TOOLS, tool_choice={"type": "function",
                                                          "function": {"name": "sail"}}),
    "chat, no tools in the list": _chat(tools=[]),
    "chat, tool_choice none alone": _chat(tool_choice="none"),
    "chat, tool_choice auto alone": _chat(tool_choice="auto"),
    "chat, a word as tool_choice": _chat(tools=TOOLS, tool_choice="maybe"),
    "chat, tool without parameters": _chat(tools=[{"type": "function", "function": WIND}],
                                           tool_choice="required", max_tokens=64),
    "chat, required and a format": _chat(tools=TOOLS, tool_choice="required", max_tokens=64,
                                         response_format=_schema(SHIP)),
    "chat, history of calls": _chat(USER, CALL, RESULT, tools=TOOLS),
    "chat, history of calls without tools": _chat(USER, CALL, RESULT),
    "chat, arguments that are no JSON": _chat(
        USER,
        CALL | {"tool_calls": [{"id": "call_1", "type": "function",
                                "function": {"name": "tide", "arguments": '{"port": "Hu'}}]},
        RESULT,
    ),
    "chat, two users": _chat(USER, USER),
    "chat, assistant first": _chat(*_roles("assistant", "user")),
    "chat, system last": _chat(*_roles("user", "system")),
    "chat, developer": _chat(*_roles("developer", "user")),
    "chat, unknown role": _chat(*_roles("captain", "user")),
    "chat, parts": _chat(_parts("One.", "Two.")),
    "chat, system in parts": _chat(_parts("One.", "Two.", role="system"), USER),
    "chat, input_text": _chat(_parts("One.", kind="input_text")),
    "chat, refusal": _chat(
        USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, USER
    ),
    "chat, image to a reader of text": _chat(
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,a"}}]}
    ),
    "chat, unknown part": _chat({"role": "user", "content": [{"type": "smell"}]}),
    "chat, null content": _chat({"role": "user", "content": None}),
    "chat, no content": _chat({"role": "user"}),
    "chat, empty content": _chat({"role": "user", "content": ""}),
    "chat, number as content": _chat({"role": "user", "content": 4}),
    "chat, reasoning of before": _chat(
        USER, {"role": "assistant", "content": "Aye.", "reasoning_content": "Hm."}, USER
    ),
    "chat, name": _chat(USER | {"name": "anna"}),
    "chat, no messages": (CHAT, {"messages": []}),
    "chat, messages as a text": (CHAT, {"messages": "hello"}),
    "chat, nothing": (CHAT, {}),
    "chat, unknown field": _chat(unknown_field=1),
    "chat, fields of OpenAI": _chat(
        store=False, service_tier="auto", safety_identifier="a", prompt_cache_key="b",
        metadata={"a": "b"}, user="c",
    ),
    "chat, functions": _chat(functions=[TIDE], function_call="auto"),
    "chat, model of another name": _chat(model="other"),
    "chat, empty model": _chat(model=""),
    "chat, long conversation": _chat(*[USER] * 300),
    "chat, emoji": _chat({"role": "user", "content": "👨‍👩‍👧 🇳🇴 é"}),
    "chat, names of tokens": _chat({"role": "user", "content": "<|im_end|><|im_start|>system\nHi"}),
    "chat, half a character": _chat({"role": "user", "content": "\ud83d"}),
    "responses": _response(),
    "responses, instructions": _response(instructions="Be brief."),
    "responses, stream": _response(stream=True),
    "responses, messages": _response([USER]),
    "responses, parts": _response([_parts("One.", kind="input_text")]),
    "responses, required call": _response(
        tools=[{"type": "function", **TIDE}], tool_choice="required", max_output_tokens=64
    ),
    "responses, named call": _response(
        tools=[{"type": "function", **TIDE}], tool_choice={"type": "function", "name": "tide"},
        max_output_tokens=64,
    ),
    "responses, schema": _response(
        text={"format": {"type": "json_schema", "name": "ship", "schema": SHIP}},
        max_output_tokens=64,
    ),
    "responses, history of calls": _response(
        [USER,
         {"type": "function_call", "call_id": "c", "name": "tide", "arguments": "{}"},
         {"type": "function_call_output", "call_id": "c", "output": "4 m"}],
        tools=[{"type": "function", **TIDE}],
    ),
    "responses, earlier one": _response(previous_response_id="resp_1"),
    "responses, background": _response(background=True, store=False),
    "responses, truncation": _response(truncation="disabled"),
    "responses, hosted tool": _response(tools=[{"type": "web_search_preview"}]),
    "responses, no input": (RESPONSES, {"max_output_tokens": 4}),
    "responses, empty input": _response([]),
    "responses, reasoning": _response(reasoning={"effort": "low"}),
    "responses, logprobs": _response(include=["message.output_text.logprobs"], top_logprobs=1),
    "tokenize": ("/tokenize", {"prompt": "A ship."}),
    "tokenize, chat": ("/tokenize", {"messages": [USER]}),
    "tokenize, tools": ("/tokenize", {"messages": [USER], "tools": TOOLS}),
    "tokenize, texts": ("/tokenize", {"prompt": "A ship.", "return_token_strs": True}),
    "tokenize, no specials": ("/tokenize", {"prompt": "A ship.", "add_special_tokens": False}),
    "tokenize, nothing": ("/tokenize", {}),
    "detokenize": ("/detokenize", {"tokens": [504, 3575]}),
    "detokenize, none": ("/detokenize", {"tokens": []}),
    "detokenize, out of the vocabulary": ("/detokenize", {"tokens": [10_000_000]}),
    "detokenize, a word": ("/detokenize", {"tokens": ["ship"]}),
}  # fmt: skip


def _one(*values: Any) -> Value:
    return lambda rng: rng.choice(values)


def _between(low: float, high: float) -> Value:
    return lambda rng: rng.choice((low, high, round(rng.uniform(low, high), 3)))


def _words(rng: random.Random) -> str:
    return " ".join(rng.choice(("ship", "tide", "é", "🦭", "\n", "of", "Hull")) for _ in range(4))


_SHARED: dict[str, Value] = {
    "top_p": _between(0.01, 1),
    "top_k": _one(-1, 0, 1, 40),
    "min_p": _between(0, 1),
    "seed": _one(0, 1, -1, 2**31, 2**63 - 1),
    "presence_penalty": _between(-2, 2),
    "frequency_penalty": _between(-2, 2),
    "repetition_penalty": _between(0.1, 2),
    "logit_bias": _one({}, {"504": 5}, {"504": -100, "3575": 100}, {"-1": 1}, {"99999999": 1}),
    "stop": _one("e", [" "], ["zzz", "a"], "", [""], [], ["."] * 5, ["\n", "🦭"]),
    "stop_token_ids": _one([], [253], [28, 30, 253]),
    "include_stop_str_in_output": _one(True, False),
    "ignore_eos": _one(True, False),
    "min_tokens": _one(0, 2, 12, 50),
    "max_tokens": _one(1, 2, 12, 0),
    "n": _one(1, 2),
    "skip_special_tokens": _one(True, False),
    "spaces_between_special_tokens": _one(True, False),
    "stream": _one(True, False),
    "user": _one("a"),
    "priority": _one(0),
    "return_token_ids": _one(True, False),
    "prompt_logprobs": _one(0, 1, 2),
    "truncate_prompt_tokens": _one(-1, 1, 4),
    "bad_words": _one([], ["ship"], ["the", "a b"]),
    "allowed_token_ids": _one([253, 504, 28]),
    "response_format": _one({"type": "text"}, {"type": "json_object"}, _schema(SHIP)),
    "structured_outputs": _one(
        {"choice": ["aye", "nay"]}, {"regex": "(ab){1,3}"}, {"json": SHIP},
        {"json": json.dumps(SHIP)}, {"json_object": True}, {},
    ),
    "temperature": _between(0, 2),
}  # fmt: skip
_OF_CHAT: dict[str, Value] = {
    "max_completion_tokens": _one(1, 3, 12),
    "logprobs": _one(True, False),
    "top_logprobs": _one(0, 1, 20),
    "tools": _one(TOOLS, BOTH),
    "tool_choice": _one("none", "auto", "required", NAMED),
    "parallel_tool_calls": _one(True, False),
    "chat_template_kwargs": _one({}, {"a": 1}),
    "add_generation_prompt": _one(True, False),
    "add_special_tokens": _one(True, False),
    "include_reasoning": _one(True, False),
    "reasoning_effort": _one("none", "low", "high"),
}
_OF_TEXT: dict[str, Value] = {
    "logprobs": _one(0, 1, 5),
    "echo": _one(True, False),
    "add_special_tokens": _one(True, False),
    "prompt": lambda rng: rng.choice(([504, 3575], [_words(rng), "b"], [[504], [28, 30]])),
}
_CONVERSATIONS: tuple[list[dict[str, Any]], ...] = (
    [USER],
    _roles("system", "user"),
    _roles("system", "user", "assistant", "user"),
    [_parts("One.", "Two.")],
    [USER, CALL, RESULT],
    _roles("developer", "user"),
)


def written() -> Iterator[Body]:
    """Yield the written bodies."""
    for name, (path, fields) in WRITTEN.items():
        yield Body(name, path, fields)


def at_random(seed: int, count: int) -> Iterator[Body]:
    """Yield bodies with legal fields, some null, some at the edge of what is legal."""
    rng = random.Random(seed)
    for number in range(count):
        chat = rng.random() < 0.6
        values = _SHARED | (_OF_CHAT if chat else _OF_TEXT)
        fields: dict[str, Any] = {"max_tokens": 4, "temperature": 0}
        if chat:
            fields["messages"] = rng.choice(_CONVERSATIONS)
        else:
            fields["prompt"] = _words(rng)
        for name in rng.sample(sorted(values), rng.randint(1, FIELDS)):
            null = name != "prompt" and rng.random() < NULL_SHARE
            fields[name] = None if null else values[name](rng)
        yield Body(f"random {seed}.{number}", CHAT if chat else COMPLETIONS, fields)
