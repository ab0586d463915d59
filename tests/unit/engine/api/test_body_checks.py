"""Wishes that exclude each other, or that this engine does not fulfil: an error names the field.

Tests ``api/validation.py``.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from plimsoll_engine.api.errors import ApiError
from plimsoll_engine.api.protocol import (
    BatchChatRequest,
    ChatRequest,
    CompletionRequest,
    get_part_text,
)
from plimsoll_engine.api.validation import decode_body

USER = {"role": "user", "content": "Ahoy"}
SELF = {"role": "assistant", "content": "Aye"}
TOOL = {"type": "function", "function": {"name": "a"}}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER]} | fields


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (CompletionRequest, {"prompt": "a", "use_beam_search": True}, "use_beam_search"),
        (CompletionRequest, {"prompt": "a", "length_penalty": 2.0}, "length_penalty"),
        (CompletionRequest, {"prompt": "a", "logprob_token_ids": [1]}, "logprob_token_ids"),
        (CompletionRequest, {"prompt": "a", "truncation_side": "left"}, "truncation_side"),
        (CompletionRequest, {"prompt": "a", "truncate_prompt_tokens": -2},
         "truncate_prompt_tokens"),
        (ChatRequest, chat(truncate_prompt_tokens=0), "truncate_prompt_tokens"),
        (CompletionRequest, {"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids"),
        (CompletionRequest, {"prompt": "a", "allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
        (CompletionRequest, {"prompt": "a", "bad_words": [""]}, "bad_words[0]"),
        (CompletionRequest, {"prompt": "a", "bad_words": ["a"] * 129}, "bad_words"),
        (CompletionRequest, {"prompt": "a", "skip_special_tokens": False,
                             "spaces_between_special_tokens": False},
         "spaces_between_special_tokens"),
        (CompletionRequest, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        (CompletionRequest, {"prompt": "a", "cache_salt": ""}, "cache_salt"),
        (ChatRequest, chat(max_tokens=0), "max_tokens"),
        (ChatRequest, chat(logprob_token_ids=[1]), "logprob_token_ids"),
        (ChatRequest, chat(logprobs=True, logprob_token_ids=[1] * 129), "logprob_token_ids"),
        (ChatRequest, chat(add_generation_prompt=True, continue_final_message=True),
         "continue_final_message"),
        (ChatRequest, chat(echo=True), "echo"),
        (ChatRequest, chat(reasoning_effort="extreme"), "reasoning_effort"),
        (ChatRequest, chat(messages=[{"role": "two words", "content": ""}]),
         "messages[0].role"),
        (ChatRequest, chat(messages=[{"role": "observer"}]), "messages[0].content"),
        (BatchChatRequest, chat(), "messages[0]"),
        (BatchChatRequest, {"messages": []}, "messages"),
        (BatchChatRequest, {"messages": [[]]}, "messages[0]"),
        (BatchChatRequest, {"messages": [[USER], [USER, {"role": "user"}]]},
         "messages[1][1].content"),
        (BatchChatRequest, {"messages": [[USER]], "stream": True}, "stream"),
        (BatchChatRequest, {"messages": [[USER]], "n": 2}, "n"),
        (BatchChatRequest, {"messages": [[USER]], "tools": [TOOL]}, "tools"),
        (BatchChatRequest, {"messages": [[USER]], "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)  # fmt: skip
def test_an_error_names_the_field(kind: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as told:
        decode_body(msgspec.json.encode({"model": "m"} | fields), kind)
    assert (told.value.status, told.value.param) == (400, param)


@pytest.mark.parametrize(
    "fields",
    [
        {"use_beam_search": False, "length_penalty": 1.0, "spaces_between_special_tokens": True},
        {"spaces_between_special_tokens": False},
        {"truncate_prompt_tokens": -1, "truncation_side": "right"},
        {"echo": True, "continue_final_message": True, "messages": [USER, SELF]},
        {"add_generation_prompt": False},
        {"logprobs": True, "logprob_token_ids": [1], "top_logprobs": None},
        {"messages": [{"role": "ipython", "content": "4"}, USER]},
        {"reasoning_effort": "max"},
    ],
)
def test_a_wish_that_can_be_fulfilled_is_no_error(fields: dict[str, Any]) -> None:
    decode_body(msgspec.json.encode({"model": "m"} | chat() | fields), ChatRequest)


def test_a_part_without_its_text_is_told_of() -> None:
    with pytest.raises(ApiError, match="a part of type text has no text: add a string"):
        get_part_text({"type": "text"})
