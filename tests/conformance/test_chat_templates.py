"""Prompts of published chat templates are those of transformers. Tests ``api/chat_prompt.py``."""

from __future__ import annotations

import pytest

from tests.conformance import chat_templates

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not chat_templates.TEMPLATES.exists(), reason="not fetched: make engines"),
]


def test_prompts_are_those_of_transformers() -> None:
    found = list(chat_templates.outcomes())
    assert len(found) >= 300 * len(chat_templates.CHATS)
    assert [one for one in found if one.told == chat_templates.DIFFERENT] == []
