"""The assistant's turn of a prompt: begun, left out, or continued. Tests ``api/chat_prompt.py``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from plimsoll_engine.api.chat_prompt import MARK, ChatPrompt
from plimsoll_engine.api.protocol import Message
from plimsoll_engine.frontend.requests.tokenizer import TemplateError, Tokenizer
from plimsoll_faults.models import tiny

USER = "<|im_start|>user\nAhoy<|im_end|>\n"
OPEN = "<|im_start|>assistant\n"


def tokenizer(folder: Path, template: str | None = None) -> Tokenizer:
    tiny.write_checkpoint(folder)
    if template is not None:
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def prompt(tmp_path_factory: pytest.TempPathFactory) -> ChatPrompt:
    return ChatPrompt(tokenizer(tmp_path_factory.mktemp("tiny")), sees=False)


def messages(*given: tuple[str, Any]) -> list[Message]:
    return [Message(role=role, content=content) for role, content in given]


def render(prompt: ChatPrompt, *given: tuple[str, Any], **turn: Any) -> str:
    return prompt.render(messages(*given), [], {}, 10_000, **turn)


def test_the_turn_is_begun_unless_it_is_not_wanted(prompt: ChatPrompt) -> None:
    assert render(prompt, ("user", "Ahoy")) == USER + OPEN
    assert render(prompt, ("user", "Ahoy"), begin=True) == USER + OPEN
    assert render(prompt, ("user", "Ahoy"), begin=False) == USER


@pytest.mark.parametrize("text", ["Sure,", "Sure, ", "", f"a {MARK}", "<|im_end|>\n"])
def test_the_last_message_stays_open(prompt: ChatPrompt, text: str) -> None:
    given = (("user", "Ahoy"), ("assistant", text))
    assert render(prompt, *given, resume=True) == USER + OPEN + text
    parts = (("user", "Ahoy"), ("assistant", [{"type": "text", "text": text}]))
    assert render(prompt, *parts, resume=True) == USER + OPEN + text


def test_a_model_that_sees_continues_as_well(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{% for part in m.content %}{{ part.text }}{% endfor %}"
        ";{% endfor %}"
    )
    seeing = ChatPrompt(tokenizer(tmp_path, template), sees=True)
    given = (("user", "Ahoy"), ("assistant", "Aye, "))
    assert render(seeing, *given, resume=True) == "user:Ahoy;assistant:Aye, "


def test_a_template_without_the_last_message_is_told(tmp_path: Path) -> None:
    short = ChatPrompt(tokenizer(tmp_path, "{{ messages[0].content }}"), sees=False)
    with pytest.raises(TemplateError, match="leaves the last message out"):
        render(short, ("user", "Ahoy"), ("assistant", "Aye"), resume=True)


@pytest.mark.parametrize(
    ("given", "effort", "found"),
    [
        (None, None, {}),
        ({"a": 1}, None, {"a": 1}),
        (None, "low", {"reasoning_effort": "low", "enable_thinking": True}),
        (None, "none", {"reasoning_effort": "none", "enable_thinking": False}),
        ({"enable_thinking": True}, "none", {"reasoning_effort": "none", "enable_thinking": True}),
    ],
)
def test_an_effort_is_a_variable_of_the_template(given: Any, effort: Any, found: Any) -> None:
    assert ChatPrompt.variables(given, effort) == found
    assert msgspec.json.encode(given or {}) == msgspec.json.encode(dict(given or {}))
