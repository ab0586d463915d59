"""The text features of the OpenAI API, as the real client sees them."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

MODEL = "tiny"
ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Where to?"}]}


def test_many_prompts_and_choices_each_have_their_text(engine: Any) -> None:
    asked: dict[str, Any] = {
        "model": MODEL, "prompt": ["The ship", "A harbour"], "n": 3, "max_tokens": 8,
        "temperature": 2, "seed": 5, "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    whole = engine.client.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == list(range(6))
    texts = [choice.text for choice in whole.choices]
    assert len(set(texts)) == 6
    assert whole.usage.completion_tokens == 48
    prompts = [engine.client.completions.create(model=MODEL, prompt=p, max_tokens=1).usage
               for p in asked["prompt"]]  # fmt: skip
    assert whole.usage.prompt_tokens == sum(usage.prompt_tokens for usage in prompts)
    streamed = [""] * 6
    reasons: dict[int, str] = {}
    for chunk in engine.client.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
        usage = chunk.usage
    assert streamed == texts
    assert reasons == dict.fromkeys(range(6), "length")
    assert usage.completion_tokens == 48
    alone = engine.client.completions.create(**{**asked, "prompt": "The ship", "n": 1})
    assert alone.choices[0].text == texts[0]
    engine.clean()


def test_a_client_that_leaves_ends_all_choices(engine: Any) -> None:
    stream = engine.client.chat.completions.create(**ASK, n=5, max_tokens=4000, stream=True)
    next(iter(stream))
    assert engine.status()["load"]["inflight"] == 5
    stream.close()
    engine.until(lambda: engine.status()["load"]["inflight"] == 0, "an end of all choices")
    engine.clean()


def test_logprobs_of_a_chat(engine: Any) -> None:
    asked = {**ASK, "max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    whole = engine.client.chat.completions.create(**asked).choices[0]
    tokens = whole.logprobs.content
    assert len(tokens) == 6
    assert "".join(token.token for token in tokens) == whole.message.content
    for token in tokens:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token
        assert bytes(token.bytes).decode() == token.token
        assert -1 < token.logprob == token.top_logprobs[0].logprob <= 0
        assert sum(math.exp(one.logprob) for one in token.top_logprobs) <= 1.0001
    streamed = [
        token
        for chunk in engine.client.chat.completions.create(**asked, stream=True)
        for choice in chunk.choices
        if choice.logprobs is not None
        for token in choice.logprobs.content
    ]
    assert [t.token for t in streamed] == [t.token for t in tokens]
    assert [t.logprob for t in streamed] == pytest.approx([t.logprob for t in tokens], abs=1e-4)


def test_logprobs_of_a_completion(engine: Any) -> None:
    choice = engine.client.completions.create(
        model=MODEL, prompt="Salt water", max_tokens=5, temperature=0, logprobs=2
    ).choices[0]
    told = choice.logprobs
    assert "".join(told.tokens) == choice.text
    for offset, token in zip(told.text_offset, told.tokens, strict=True):
        assert choice.text[offset:].startswith(token)
    assert [len(top) for top in told.top_logprobs] == [2] * 5
    only = engine.client.completions.create(
        model=MODEL, prompt="Salt water", max_tokens=5, temperature=0, logprobs=0
    ).choices[0].logprobs  # fmt: skip
    assert only.token_logprobs == pytest.approx(told.token_logprobs, abs=1e-4)
    assert [len(top) for top in only.top_logprobs] == [1] * 5


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_puts_the_prompt_before_the_text(engine: Any, stream: bool) -> None:
    ids = tokens_of(engine, "A harbour")
    asked: dict[str, Any] = {
        "model": MODEL, "prompt": ["The ship — 吃水", "A harbour"], "n": 2, "max_tokens": 4,
        "temperature": 0, "extra_body": {"ignore_eos": True},
    }  # fmt: skip

    def texts(**fields: Any) -> list[str]:
        answer = engine.client.completions.create(**asked, **fields)
        found = [""] * 4
        for chunk in answer if fields.get("stream") else [answer]:
            for choice in chunk.choices:
                found[choice.index] += choice.text
        return found

    plain = texts()
    echoed = [prompt + text for prompt, text in zip(
        (prompt for prompt in asked["prompt"] for _ in range(2)), plain, strict=True)]  # fmt: skip
    assert texts(echo=True, stream=stream) == echoed
    status, body = engine.post(
        "/v1/completions",
        json.dumps({"model": MODEL, "prompt": ids, "echo": True, "max_tokens": 1}).encode(),
    )
    assert status == 200, body
    assert body["choices"][0]["text"].startswith("A harbour")
    alone = asked | {"max_tokens": 0, "stream": stream, "logprobs": None if stream else 2}
    if stream:
        alone["stream_options"] = {"include_usage": True}
    answer = engine.client.completions.create(**alone, echo=True)
    *chunks, last = list(answer) if stream else [answer, answer]
    assert last.usage.completion_tokens == 0
    found = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(one.text for one in found if one.index == 3) == "A harbour"
    assert {one.finish_reason for one in found} - {None} == {"length"}
    if not stream:
        assert [len(one.logprobs.tokens) for one in found[2:]] == [len(ids)] * 2


def test_each_chunk_has_the_usage_so_far(engine: Any) -> None:
    asked = {**ASK, "max_tokens": 5, "stream": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    used = [
        chunk.usage.completion_tokens
        for chunk in engine.client.chat.completions.create(**asked, stream_options=options)
    ]
    assert used == sorted(used)
    assert used[-1] == 5
    alone = engine.client.chat.completions.create(
        **asked, stream_options={"continuous_usage_stats": True}
    )
    assert {chunk.usage for chunk in alone} == {None}


CALLED: dict[str, Any] = {
    "role": "assistant",
    "tool_calls": [{"id": "call_1", "type": "function",
                    "function": {"name": "get_tide", "arguments": "{}"}}],
}  # fmt: skip


def test_content_of_an_assistant_may_be_null(engine: Any) -> None:
    def prompt(message: dict[str, Any]) -> list[int]:
        asked = {"messages": [*ASK["messages"], message, {"role": "tool", "content": "high"}]}
        status, body = engine.post("/tokenize", json.dumps(asked).encode())
        assert status == 200, body
        answer = engine.client.chat.completions.create(model=MODEL, max_tokens=1, **asked)
        assert answer.usage.prompt_tokens == body["count"]
        return list(body["tokens"])

    null = prompt(CALLED | {"content": None})
    assert null == prompt(CALLED) == prompt(CALLED | {"content": ""})
    assert null != prompt(CALLED | {"content": "None"})
    with pytest.raises(openai.BadRequestError, match="role user is null") as error:
        engine.client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": None}]
        )
    assert error.value.param == "messages[0].content"


def test_responses_are_the_chat_of_their_input(engine: Any) -> None:
    text: str = engine.client.chat.completions.create(
        model=MODEL, max_tokens=9, temperature=0,
        messages=[{"role": "system", "content": "Be brief."}, *ASK["messages"]],
    ).choices[0].message.content  # fmt: skip
    asked: dict[str, Any] = {
        "model": MODEL, "instructions": "Be brief.", "input": "Where to?", "temperature": 0,
        "max_output_tokens": 9, "store": False,
    }  # fmt: skip
    whole = engine.client.responses.create(**asked)
    assert (whole.output_text, whole.status) == (text, "incomplete")
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert (whole.usage.output_tokens, whole.instructions) == (9, "Be brief.")
    events = list(engine.client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.incomplete"
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == events[-1].response.output_text == text
    history = [
        {"role": "user", "content": [{"type": "input_text", "text": "Where to?"}]},
        *(item.model_dump(exclude={"logprobs"}) for item in whole.output),
        {"role": "user", "content": "And then?"},
    ]
    more = engine.client.responses.create(**asked | {"input": history})
    assert more.usage.input_tokens > whole.usage.input_tokens
    short = {"input": "a", "max_output_tokens": 1, "chat_template_kwargs": {"a": 1}}
    status, body = engine.post("/v1/responses", json.dumps(short).encode())
    assert (status, body["model"]) == (200, MODEL), "a body without model is for the one served"
    told = engine.client.responses.create(
        **asked, top_logprobs=2, include=["message.output_text.logprobs"]
    )
    assert [len(one.top_logprobs) for one in told.output[0].content[0].logprobs] == [2] * 9
    engine.clean()


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_calls_the_function_that_is_forced(engine: Any, stream: bool) -> None:
    tool = {"type": "function", **TOOLS[0]["function"]}
    asked: dict[str, Any] = {
        "model": MODEL, "input": "The tide?", "tools": [tool], "tool_choice": "required",
        "parallel_tool_calls": False, "temperature": 0.8, "max_output_tokens": 900,
        "extra_body": {"seed": 3},
    }  # fmt: skip
    answer = engine.client.responses.create(**asked, stream=stream)
    if stream:
        events = list(answer)
        (done,) = [e for e in events if e.type == "response.function_call_arguments.done"]
        answer = events[-1].response
        assert done.arguments == answer.output[-1].arguments
    (call,) = answer.output
    assert (call.type, call.name, answer.status) == ("function_call", "get_tide", "completed")
    assert json.loads(call.arguments)["port"] in ("Hull", "Leith")
    given = {"type": "function_call_output", "call_id": call.call_id, "output": "high at nine"}
    then = engine.client.responses.create(
        model=MODEL, max_output_tokens=2, tools=[tool], input=[call.model_dump(), given]
    )
    assert then.output[0].type == "message"


def test_what_needs_a_stored_response_or_a_pooling_model_is_refused(engine: Any) -> None:
    for field, value in (("previous_response_id", "resp-1"), ("store", True), ("background", True)):
        with pytest.raises(openai.BadRequestError, match="stores no responses") as error:
            engine.client.responses.create(model=MODEL, input="a", **{field: value})
        assert (error.value.param, error.value.code) == (field, "unsupported_value")
    with pytest.raises(openai.BadRequestError, match="context") as error:
        engine.client.responses.create(model=MODEL, input="a", max_output_tokens=1 << 30)
    assert error.value.param == "input"
    with pytest.raises(openai.NotFoundError, match="pooling model") as absent:
        engine.client.embeddings.create(model=MODEL, input="a")
    assert absent.value.code == "unsupported_model"
    for path in ("/v1/rerank", "/rerank", "/v1/score"):
        assert engine.post(path, b"{}")[0] == 404


def test_penalties_and_bias_change_the_text(engine: Any) -> None:
    def ask(**fields: Any) -> str:
        extra = {k: fields.pop(k) for k in ("repetition_penalty", "min_tokens") if k in fields}
        answer = engine.client.chat.completions.create(
            **ASK, max_tokens=30, temperature=0, extra_body=extra, **fields
        )
        return str(answer.choices[0].message.content)

    plain = ask()
    assert ask(presence_penalty=2, frequency_penalty=2) == ask(
        presence_penalty=2, frequency_penalty=2
    )
    assert ask(repetition_penalty=5.0) != plain
    (token,) = tokens_of(engine, "x")
    assert ask(logit_bias={str(token): 100}) == "x" * 30
    word = plain.split()[1]
    assert word in ask(stop=[word], min_tokens=30)
    assert word not in ask(stop=[word])


def test_prefix_cache_hits_are_reported_and_separated_by_salt(engine: Any) -> None:
    def cached(salt: str) -> int:
        usage = engine.client.completions.create(
            model=MODEL, prompt="ballast " * 60, max_tokens=1, extra_body={"cache_salt": salt}
        ).usage
        return int(usage.prompt_tokens_details.cached_tokens)

    assert cached("mine") == 0
    assert cached("mine") > 0
    assert cached("yours") == 0


def tokens_of(engine: Any, text: str) -> list[int]:
    status, body = engine.post("/tokenize", json.dumps({"prompt": text}).encode())
    assert status == 200, body
    return list(body["tokens"])


def test_tokenize_and_detokenize(engine: Any) -> None:
    text = "Plimsoll line — 吃水"
    asked = {"model": MODEL, "prompt": text, "return_token_strs": True}
    status, body = engine.post("/tokenize", json.dumps(asked).encode())
    assert status == 200
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert "".join(body["token_strs"]).startswith("PlimsollĠlineĠ")  # as the vocabulary has them
    assert body["max_model_len"] > 0
    back = engine.post("/detokenize", json.dumps({"tokens": body["tokens"]}).encode())
    assert back == (200, {"prompt": text})
    chat = {"messages": ASK["messages"]}
    status, body = engine.post("/tokenize", json.dumps(chat).encode())
    usage = engine.client.chat.completions.create(**ASK, max_tokens=1).usage
    assert (status, body["count"]) == (200, usage.prompt_tokens)
    for path, bad, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "gpt"}, "model"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ):
        status, body = engine.post(path, json.dumps(bad).encode())
        assert (status in (400, 404), body["error"]["param"]) == (True, param)


SCHEMA = {
    "type": "object",
    "properties": {"port": {"enum": ["Hull", "Leith"]}, "deep": {"type": "boolean"}},
    "required": ["port", "deep"],
    "additionalProperties": False,
}
NO_BLANKS = {"temperature": 0.8, "seed": 3, "max_tokens": 400}


def no_blanks(engine: Any) -> dict[str, int]:
    """JSON allows any number of blanks, and a random model loves them."""
    return {str(tokens_of(engine, blank)[0]): -100 for blank in " \n\t\r"}


def test_json_schema_and_choices_hold(engine: Any) -> None:
    bias = no_blanks(engine)
    answer = engine.client.chat.completions.create(
        **ASK, **NO_BLANKS, logit_bias=bias,
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
    )  # fmt: skip
    found = json.loads(answer.choices[0].message.content)
    assert set(found) == {"port", "deep"}
    assert answer.choices[0].finish_reason == "stop"
    for body, pattern in (
        ({"choice": ["starboard", "larboard side"]}, "starboard|larboard side"),
        ({"regex": "[0-9]{2}m"}, "[0-9]{2}m"),
        ({"json": {"type": "boolean"}}, "true|false"),
        ({"grammar": 'start: "deck" /[1-9]/'}, "deck[1-9]"),
    ):
        chunks = engine.client.completions.create(
            model=MODEL, prompt="The", **NO_BLANKS, stream=True,
            extra_body={"structured_outputs": body},
        )  # fmt: skip
        text = "".join(chunk.choices[0].text for chunk in chunks)
        assert re.fullmatch(pattern, text), (body, text)
    with pytest.raises(openai.BadRequestError, match="unknown name") as error:
        engine.client.completions.create(
            model=MODEL, prompt="The", extra_body={"structured_outputs": {"grammar": "start: a"}}
        )
    assert error.value.param == "structured_outputs.grammar"
    engine.clean()


TOOLS: Any = [
    {"type": "function", "function": {
        "name": name,
        "description": "Says when the tide turns.",
        "parameters": {
            "type": "object", "properties": {"port": {"enum": ["Hull", "Leith"]}},
            "required": ["port"], "additionalProperties": False,
        },
    }}
    for name in ("get_tide", "get_wind")
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "function": {"name": "get_wind"}},
        {"type": "allowed_tools", "allowed_tools": {
            "mode": "required", "tools": [{"type": "function", "function": {"name": "get_wind"}}]}},
    ],
)  # fmt: skip
def test_a_forced_tool_call_is_a_tool_call(engine: Any, choice: Any, stream: bool) -> None:
    asked = {
        **ASK, **NO_BLANKS, "logit_bias": no_blanks(engine), "tools": TOOLS, "tool_choice": choice,
        "parallel_tool_calls": False, "stream": stream,
    }  # fmt: skip
    answer = engine.client.chat.completions.create(**asked)
    if stream:
        chunks = [chunk.choices[0] for chunk in answer]
        (first, *more) = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
        first.function.arguments += "".join(piece.function.arguments for piece in more)
        assert {piece.id for piece in more} == {None}
        calls = [first]
        assert "".join(chunk.delta.content or "" for chunk in chunks) == ""
        reason = chunks[-1].finish_reason
    else:
        calls, reason = answer.choices[0].message.tool_calls, answer.choices[0].finish_reason
        assert answer.choices[0].message.content is None
    (call,) = calls
    assert reason == "tool_calls"
    assert call.function.name in (
        ("get_wind",) if choice != "required" else ("get_tide", "get_wind")
    )
    assert json.loads(call.function.arguments)["port"] in ("Hull", "Leith")
    assert call.id.startswith("call_")


def test_arguments_are_an_object_where_their_schema_has_no_type(engine: Any) -> None:
    """Such a schema allows any value, and the text of a hot model is one of them."""
    parameters = {"properties": {"port": {"enum": ["Hull"]}}, "required": ["port"]}
    tool = {"type": "function", "function": {"name": "tide", "parameters": parameters}}
    answer = engine.client.chat.completions.create(
        **ASK | {"temperature": 2.0, "n": 8, "max_tokens": 40},
        tools=[tool],
        tool_choice="required",
        stream=True,
    )
    given = dict.fromkeys(range(8), "")
    for choice in (choice for chunk in answer for choice in chunk.choices):
        for call in choice.delta.tool_calls or []:
            given[choice.index] += call.function.arguments
    assert all(one == "" or one.lstrip().startswith("{") for one in given.values()), given
    assert any(given.values())


def test_tools_that_are_not_called_change_nothing_else(engine: Any) -> None:
    answer = engine.client.chat.completions.create(
        **ASK, tools=TOOLS, tool_choice="auto", max_tokens=9, temperature=0
    ).choices[0]  # fmt: skip
    assert answer.message.tool_calls is None
    assert answer.message.content
    history: Any = [
        *ASK["messages"],
        {"role": "assistant", "content": "wait", "tool_calls": [
            {"id": "call_1", "type": "function",
             "function": {"name": "get_tide", "arguments": '{"port": "Hull"}'}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "in an hour"},
    ]  # fmt: skip
    assert engine.client.chat.completions.create(
        model=MODEL, messages=history, max_tokens=2
    ).choices  # fmt: skip
    for bad, param in (
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
         "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "two words"}}]},
         "tools[0].function.name"),
    ):  # fmt: skip
        with pytest.raises(openai.BadRequestError) as error:
            engine.client.chat.completions.create(**{**ASK, **bad})
        assert error.value.param == param


def test_a_deadline_is_a_typed_error_that_is_not_retried(engine: Any) -> None:
    client = openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=3)
    before = engine.status()["load"]["requests_total"]
    with pytest.raises(openai.APIStatusError, match="deadline") as error:
        client.completions.create(
            model=MODEL, prompt="Tide", max_tokens=4000, extra_body={"deadline_s": 0.3}
        )
    assert (error.value.status_code, error.value.code) == (504, "deadline_exceeded")
    assert engine.status()["load"]["requests_total"] == before + 1
    engine.clean()


def test_a_deadline_holds_while_the_worker_hangs(engine: Any) -> None:
    pid = engine.worker_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        begun = time.monotonic()
        with pytest.raises(openai.APIStatusError, match="deadline"):
            engine.client.completions.create(
                model=MODEL, prompt="Tide", extra_body={"deadline_s": 0.2}
            )
        assert time.monotonic() - begun < 5
    finally:
        os.kill(pid, signal.SIGCONT)
    engine.clean()


def test_keys_are_tenants_and_a_higher_priority_overtakes(start_engine: Any, tmp_path: Any) -> None:
    """One place in the batch; the keys rotate while it serves."""
    file = tmp_path / "keys"
    file.write_text("first-key\nsecond-key\n")
    engine = start_engine(
        "--max-num-seqs", "1", "--api-key-file", str(file), "--priority-range=-1:5",
        "--priority-keys", "1",
    ).wait_ready()  # fmt: skip
    ends: dict[str, float] = {}

    def client(key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{engine.url}/v1", api_key=key, max_retries=0)

    def ask(name: str, key: str, priority: int, tokens: int) -> None:
        client(key).completions.create(
            model=MODEL, prompt=name, max_tokens=tokens, extra_body={"priority": priority}
        )
        ends[name] = time.monotonic()

    with ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(ask, "runs", "first-key", 5, 300)]
        engine.until(lambda: engine.status()["load"].get("running") == 1, "a running request")
        worker = engine.worker_pid()
        os.kill(worker, signal.SIGSTOP)  # it sees the others all at once
        for count, (name, key, priority) in enumerate(
            (
                ("second", "first-key", 5),
                ("third", "first-key", 5),
                ("other", "second-key", 0),
                ("urgent", "first-key", -1),
            ),
            2,
        ):
            futures.append(pool.submit(ask, name, key, priority, 40))
            engine.until(lambda n=count: engine.status()["load"]["inflight"] == n, "a queue")
        os.kill(worker, signal.SIGCONT)
        for future in futures:
            future.result(60)
    # The running one was stopped for the urgent one of its own key, and then waited like a new one:
    # the tenant that had less came first.
    assert sorted(ends, key=lambda name: ends[name]) == [
        "urgent", "other", "runs", "second", "third",
    ]  # fmt: skip
    for key, priority, status in (("second-key", 1, 403), ("first-key", -2, 400)):
        with pytest.raises(openai.APIStatusError) as refused:
            ask("refused", key, priority, 1)
        assert (refused.value.status_code, refused.value.param) == (status, "priority")
    text = engine.get("/metrics")[1]
    assert "plimsoll_engine_request_queue_time_seconds_count" in text
    engine.clean()

    for path in ("/v1/models", "/tokenize", "/unknown"):
        assert engine.get(path)[0] == 401
    with pytest.raises(openai.AuthenticationError, match="API key") as error:
        client("first-ke").models.list()
    assert error.value.code == "invalid_api_key"
    file.write_text("third-key\n")
    assert client("third-key").models.list().data
    with pytest.raises(openai.AuthenticationError):
        client("first-key").models.list()


CARRIED: list[dict[str, Any]] = [
    {"temperature": 0, "frequency_penalty": 1.5, "extra_body": {"repetition_penalty": 1.2}},
    {"temperature": 1.2, "seed": 4, "n": 2, "presence_penalty": 1},
    {"temperature": 0.9, "seed": 6,
     "extra_body": {"structured_outputs": {"regex": "([a-z]{3,9} ){90}[a-z]{9}"}}},
    {"temperature": 0, "logprobs": 2},
]  # fmt: skip


def test_choices_penalties_and_grammars_go_on_over_a_restart(engine: Any) -> None:
    """Every text is that of the run without one; so are the log probabilities."""

    def ask(fields: dict[str, Any], begun: threading.Semaphore | None) -> Any:
        texts: dict[int, str] = {}
        logprobs: list[float] = []
        for chunk in engine.client.completions.create(
            model=MODEL, prompt="Under way", max_tokens=300, stream=True, **fields
        ):
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + choice.text
                logprobs += choice.logprobs.token_logprobs if choice.logprobs else []
            if begun is not None:
                begun.release()
                begun = None
        return texts, logprobs

    expected = [ask(fields, None) for fields in CARRIED]

    def carried(number: int) -> int:
        begun = threading.Semaphore(0)
        with ThreadPoolExecutor(len(CARRIED)) as pool:
            futures = [pool.submit(ask, fields, begun) for fields in CARRIED]
            for _ in CARRIED:
                assert begun.acquire(timeout=60)
            engine.begin("restart", f"carry-features-{number}")
            operation = engine.finish(f"carry-features-{number}", 60)
            found = [future.result(120) for future in futures]
        assert operation["state"] == "succeeded", operation
        for (texts, logprobs), (whole_texts, whole_logprobs) in zip(found, expected, strict=True):
            assert texts == whole_texts
            assert logprobs == pytest.approx(whole_logprobs, abs=1e-3)
        return int(operation["carried_requests"])

    # On a busy machine, the engine may end all requests before this process begins the restart.
    assert any(carried(number) >= 4 for number in range(5))
    engine.clean()


def test_an_answer_that_may_become_too_large_is_refused_by_its_fields(engine: Any) -> None:
    """Each of the fields alone is within its own limit, their product is not."""
    asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Tides"}]}
    asked |= {"n": 32, "logprobs": True, "top_logprobs": 20}
    status, body = engine.post("/v1/chat/completions", json.dumps(asked).encode())
    assert status == 400, body
    assert (body["error"]["code"], body["error"]["param"]) == ("answer_too_large", "n")
    assert "lower n, max_completion_tokens or top_logprobs" in body["error"]["message"]
    asked |= {"max_completion_tokens": 4}
    status, body = engine.post("/v1/chat/completions", json.dumps(asked).encode())
    assert status == 200, body
    assert len(body["choices"]) == 32

    (owner,) = [one for one in engine.status()["ledger"] if one["owner"] == "http_answers"]
    assert owner["bound"] > owner["bytes"] >= 0
    engine.clean()


def test_the_requests_that_wait_for_their_grammar_are_a_gauge(engine: Any) -> None:
    value = [
        line.rpartition(" ")[2]
        for line in engine.get("/metrics")[1].splitlines()
        if line.startswith("plimsoll_engine_num_requests_compiling{")
    ]
    assert value == ["0.0"]
