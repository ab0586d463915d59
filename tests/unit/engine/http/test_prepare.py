"""Bodies become prompts within their bounds; the process that does it survives what it is sent.

Tests ``api/prepare.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from plimsoll_engine.api import prepare
from plimsoll_engine.api.batch import list_parser_tags
from plimsoll_engine.api.errors import ApiError
from plimsoll_engine.api.prepare import EngineLimits, PreparedBody, RequestPreparer
from plimsoll_engine.api.prepare_messages import PreparationDone, PreparationJob, PreparationRefused
from plimsoll_engine.api.preparer_process import run_job
from plimsoll_engine.api.protocol import ChatRequest, CompletionRequest
from plimsoll_engine.frontend.requests.tokenizer import Tokenizer
from plimsoll_faults.models import tiny

CONTEXT = EngineLimits(max_model_len=128, max_queued=8, max_json_values=1000)


@pytest.fixture(scope="module")
def preparation(tmp_path_factory: pytest.TempPathFactory) -> RequestPreparer:
    folder: Path = tmp_path_factory.mktemp("tiny")
    tiny.write_checkpoint(folder)
    return RequestPreparer(Tokenizer(folder), None)


def body(**fields: Any) -> bytearray:
    return bytearray(json.dumps({"model": "tiny"} | fields).encode())


def test_what_is_prepared_crosses_to_the_frontend_whole(preparation: RequestPreparer) -> None:
    raw = body(prompt=["Hull", [5, 6]], n=2, stop="x", logit_bias={"5": 1}, seed=7)
    here = preparation.prepare_completion(raw, CONTEXT)
    outcome = run_job(preparation, PreparationJob("completion", CONTEXT), raw)
    assert isinstance(outcome, PreparationDone)
    there = msgspec.msgpack.decode(outcome.result, type=PreparedBody[CompletionRequest])
    assert there == here
    assert there.prompts[1] == [5, 6]
    assert (there.body.n, there.body.stop, there.body.seed) == (2, "x", 7)


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
TEXT = {"type": "input_text", "text": "Ahoy"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([{"role": "user", "content": [TEXT, IMAGE]}], "input[0].content[1]"),
        (
            [
                {"role": "user", "content": "Ahoy"}, CALL, CALL,
                {"type": "function_call_output", "call_id": "c", "output": [TEXT, IMAGE]},
            ],
            "input[3].output[1]",
        ),
        (
            [
                {"type": "reasoning", "summary": [{"text": "Hm."}]},
                {"role": "assistant", "content": "Ahoy"}, CALL,
                {"role": "user", "content": [IMAGE]},
            ],
            "input[3].content[0]",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("instructions", [None, "Be brief."])
def test_an_error_in_a_part_of_an_item_names_the_part(
    items: list[Any], param: str, instructions: str | None, preparation: RequestPreparer
) -> None:
    with pytest.raises(ApiError) as error:
        preparation.prepare_responses(body(input=items, instructions=instructions), CONTEXT)
    assert (error.value.status, error.value.param) == (400, param)


def test_parsers_see_their_tags_where_these_are_special_tokens(
    preparation: RequestPreparer,
) -> None:
    tool = {"type": "function", "function": {"name": "a"}}
    messages = [{"role": "user", "content": "Ahoy"}]
    plain = preparation.prepare_chat(body(messages=messages), CONTEXT)
    calls = preparation.prepare_chat(body(messages=messages, tools=[tool]), CONTEXT)
    assert list_parser_tags(plain, False) == []
    assert list_parser_tags(plain, True) == ["<think>", "</think>"]
    assert {"<tool_call>", "</tool_call>", "<think>"} <= {*list_parser_tags(calls, True)}
    assert "<think>" not in list_parser_tags(calls, False)


def test_a_chat_leaves_its_messages_and_tools_behind(preparation: RequestPreparer) -> None:
    tool = {"type": "function", "function": {"name": "a", "parameters": {"x": "y" * 1000}}}
    raw = body(messages=[{"role": "user", "content": "Ahoy"}], tools=[tool], tool_choice="required")
    outcome = run_job(preparation, PreparationJob("chat", CONTEXT), raw)
    assert isinstance(outcome, PreparationDone)
    there = msgspec.msgpack.decode(outcome.result, type=PreparedBody[ChatRequest])
    assert there.family == "hermes"
    assert there.grammar is not None
    assert there.body.tools is None
    assert len(there.prompts[0]) > 0


def test_each_chat_of_a_batch_is_the_chat_alone(preparation: RequestPreparer) -> None:
    chats = [[{"role": "user", "content": text}] for text in ("Ahoy", "Where to?")]
    raw = body(messages=chats, max_tokens=3, logprobs=True)
    outcome = run_job(preparation, PreparationJob("chats", CONTEXT), raw)
    assert isinstance(outcome, PreparationDone)
    there = msgspec.msgpack.decode(outcome.result, type=PreparedBody[ChatRequest])
    alone = [preparation.prepare_chat(body(messages=one, max_tokens=3), CONTEXT) for one in chats]
    assert there.prompts == [one.prompts[0] for one in alone]
    assert there.reasoning_prompts == [0, 1]
    assert (there.body.max_tokens, there.body.logprobs) == (3, True)


def test_a_bad_word_is_banned_at_the_beginning_and_after_a_space(
    preparation: RequestPreparer,
) -> None:
    prepared = preparation.prepare_completion(
        body(prompt="a", bad_words=["ship", " ship"]), CONTEXT
    )
    encode = Tokenizer.encode_rendered
    words = [encode(preparation._tokenizer, text) for text in ("ship", " ship")]
    assert prepared.bad_words == words
    assert prepared.body.bad_words is None
    with pytest.raises(ApiError, match="blank"):
        preparation.prepare_completion(body(prompt="a", bad_words=["  "]), CONTEXT)


def test_a_cut_prompt_fits_and_its_echo_is_what_is_left(preparation: RequestPreparer) -> None:
    fields = {"prompt": [[5] * 200 + [6, 7]], "truncate_prompt_tokens": 2, "echo": True}
    prepared = preparation.prepare_completion(body(**fields), CONTEXT)
    assert prepared.prompts == [[6, 7]]
    assert prepared.echoes == [preparation._tokenizer.decode([6, 7])]


def test_reasoning_that_the_resumed_message_has_ended_is_over(preparation: RequestPreparer) -> None:
    def reasons(text: str, **fields: Any) -> list[int]:
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
        return preparation.prepare_chat(body(messages=chat, **fields), CONTEXT).reasoning_prompts

    assert reasons("<think>a</think> So", continue_final_message=True) == []
    assert reasons("<think>a", continue_final_message=True) == [0]
    assert reasons("<think>a</think> So") == [0]
    assert reasons("a", reasoning_effort="none") == []


def test_only_the_allowed_tools_are_offered(preparation: RequestPreparer) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    for mode, names in (("auto", ["f"]), ("required", ["g"]), ("auto", [])):
        allowed = [{"type": "function", "function": {"name": name}} for name in names]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
        chat = [{"role": "user", "content": "Ahoy"}]
        found = preparation.prepare_chat(
            body(messages=chat, tools=tools, tool_choice=choice), CONTEXT
        )
        assert list(found.string_arguments) == names
        assert found.forced_tools == (names if mode == "required" else [])


def test_tokens_of_a_chat_have_the_turn_that_is_wanted(preparation: RequestPreparer) -> None:
    def tokens(**fields: Any) -> list[int]:
        chat = [{"role": "user", "content": "Ahoy"}]
        text = preparation.tokenize(body(messages=chat, **fields), CONTEXT)
        return list(json.loads(text.answer)["tokens"])

    begun, bare = tokens(), tokens(add_generation_prompt=False)
    assert begun[: len(bare)] == bare
    assert len(begun) > len(bare)
    open_ended = tokens(continue_final_message=True)
    assert bare[: len(open_ended)] == open_ended
    assert len(open_ended) < len(bare)


@pytest.mark.parametrize(
    ("kind", "fields", "status", "param", "code"),
    [
        ("completion", {"prompt": [[1]] * 600}, 413, None, "body_too_complex"),
        ("completion", {"prompt": ["a"] * 9}, 400, "prompt", "invalid_value"),
        ("completion", {"prompt": "a" * 9000}, 400, "prompt", "context_length_exceeded"),
        ("completion", {"prompt": [5] * 129}, 400, "prompt", "context_length_exceeded"),
        ("chat", {"messages": [{"role": "user", "content": "a" * 9000}]}, 400, "messages",
         "context_length_exceeded"),
        ("chat", {"messages": [{"role": "user", "content": "a"}], "n": 9}, 400, "n",
         "invalid_value"),
        ("chats", {"messages": [[{"role": "user", "content": "a"}]] * 9}, 400, "messages",
         "invalid_value"),
        ("detokenize", {"tokens": [5] * 129}, 400, "tokens", "context_length_exceeded"),
        ("detokenize", {"tokens": [10**9]}, 400, "tokens", "invalid_value"),
    ],
)  # fmt: skip
def test_each_bound_has_an_error_that_names_it(
    preparation: RequestPreparer, kind: Any, fields: Any, status: int, param: str | None, code: str
) -> None:
    outcome = run_job(preparation, PreparationJob(kind, CONTEXT), body(**fields))
    assert isinstance(outcome, PreparationRefused)
    assert (outcome.status, outcome.param, outcome.code) == (status, param, code)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user"}] * 4097},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 1025}]},
        {"messages": [{"role": "user"}], "chat_template_kwargs": {str(n): 1 for n in range(65)}},
        {"messages": [{"role": "user"}], "metadata": {str(n): "" for n in range(65)}},
        {"messages": [{"role": "user"}], "logit_bias": {str(n): 1 for n in range(1025)}},
        {"messages": [{"role": "user"}], "stop": ["a"] * 17},
    ],
)
def test_counts_are_bounded(preparation: RequestPreparer, fields: Any) -> None:
    with pytest.raises(ApiError, match="length") as told:
        preparation.prepare_chat(body(**fields), CONTEXT)
    assert told.value.status == 400
    assert told.value.param is not None


def test_memory_that_runs_out_is_the_bodys_own_error(
    preparation: RequestPreparer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(prepare, "decode_body", exhausted)
    outcome = run_job(preparation, PreparationJob("chat", CONTEXT), body())
    assert isinstance(outcome, PreparationRefused)
    assert outcome.code == "body_too_complex"


PAGE = Path(__file__).parents[4] / "docs" / "engine-api.md"
FUNCTION = {"name": "tide", "parameters": {"type": "object", "properties": {}}}
ROW = re.compile(r"^\| `({?\".*)` \| [^|]+ \| (used|taken|warning|400) \|$", re.MULTILINE)


def rows() -> Iterator[tuple[str, str, str]]:
    """Each row of "Fields of clients": its path, its fields in JSON, and what they do."""
    _, _, section = PAGE.read_text().partition("\n## Fields of clients\n")
    section, _, _ = section.partition("\n## ")
    for table in section.split("| In ")[1:]:
        path = table.split("`")[1]
        for fields, does in ROW.findall(table):
            tool = {"type": "function", "function": FUNCTION}
            flat = {"type": "function"} | FUNCTION
            given = fields.replace("[TOOL]", json.dumps([tool]))
            yield path, "{" + given.replace("[FUNCTION]", json.dumps([flat])) + "}", does


@pytest.mark.parametrize(("path", "fields", "does"), list(rows()))
def test_fields_of_clients_do_what_the_page_says(
    preparation: RequestPreparer, path: str, fields: str, does: str
) -> None:
    chat = path == "/v1/chat/completions"
    least = {"messages": [{"role": "user", "content": "Ahoy"}]} if chat else {"input": "Ahoy"}
    prepare_one = preparation.prepare_chat if chat else preparation.prepare_responses
    sent = json.loads(fields)

    def prepared(
        more: dict[str, Any], context: EngineLimits = CONTEXT
    ) -> PreparedBody[ChatRequest]:
        return prepare_one(bytearray(json.dumps(least | more).encode()), context)

    strict = msgspec.structs.replace(CONTEXT, strict=True)
    if does == "400":
        with pytest.raises(ApiError) as error:
            prepared(sent)
        assert error.value.status == 400
        assert (error.value.param or "").split("[")[0] in sent
        assert "unknown" not in str(error.value)
        return
    with_it, without = prepared(sent), prepared({})
    unknown = [one for one in with_it.warnings if "unknown" in one]
    assert bool(unknown) is (does == "warning")
    if does == "warning":
        with pytest.raises(ApiError):
            prepared(sent, strict)
    else:
        prepared(sent, strict)
    with_it.warnings, without.warnings = [], []
    if does != "used":  # what the answer repeats of it apart
        with_it.response_fields = without.response_fields
        for name in {*sent} & {"store", "metadata", "service_tier", "stop", "logit_bias"}:
            setattr(with_it.body, name, None)
    assert (with_it == without) is (does != "used")


def test_the_page_has_the_fields_of_all_clients() -> None:
    assert len(list(rows())) > 45
