"""A prompt is cut at the side and to the length that its client names."""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll_engine.api.protocol import ChatRequest, CompletionRequest, Message
from plimsoll_engine.api.truncation import truncate_prompt

IDS = list(range(40))


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ({}, IDS),
        ({"truncate_prompt_tokens": 40}, IDS),
        ({"truncate_prompt_tokens": 4}, [36, 37, 38, 39]),
        ({"truncate_prompt_tokens": 4, "truncation_side": "left"}, [36, 37, 38, 39]),
        ({"truncate_prompt_tokens": 4, "truncation_side": "right"}, [0, 1, 2, 3]),
        ({"truncate_prompt_tokens": 0}, []),
        ({"truncate_prompt_tokens": -1}, IDS[-16:]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 31}, [39]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 99}, [39]),
    ],
)
def test_a_completion(fields: dict[str, Any], left: list[int]) -> None:
    assert truncate_prompt(IDS, CompletionRequest(model="m", prompt="a", **fields), 32) == left


def test_a_chat_leaves_room_for_what_it_asks() -> None:
    def chat(**fields: Any) -> ChatRequest:
        messages = [Message(role="user", content="a")]
        return ChatRequest(model="m", messages=messages, truncate_prompt_tokens=-1, **fields)

    assert len(truncate_prompt(IDS, chat(), 32)) == 31
    assert len(truncate_prompt(IDS, chat(max_tokens=4), 32)) == 28
    assert len(truncate_prompt(IDS, chat(max_tokens=4, max_completion_tokens=10), 32)) == 22


def test_before_the_context_is_known_nothing_is_cut_to_it() -> None:
    asked = CompletionRequest(model="m", prompt="a", truncate_prompt_tokens=-1)
    assert truncate_prompt(IDS, asked, None) == IDS
