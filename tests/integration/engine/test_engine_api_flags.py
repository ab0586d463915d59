"""``--chat-template`` and the other flags of answers, on a real engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from plimsoll_api.version import version

CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Ahoy"}],
    "max_tokens": 3,
}
FLAGS = (
    "--return-tokens-as-token-ids", "--enable-force-include-usage",
    "--enable-tokenizer-info-endpoint",
)  # fmt: skip


def post(engine: Any, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, answer = engine.post(path, json.dumps(body).encode())
    assert status == 200, answer
    return dict(answer)


def test_the_flags_hold_for_requests_that_say_nothing(start_engine: Any, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}")
    engine = start_engine(*FLAGS, "--chat-template", str(template)).wait_ready()

    for messages in (CHAT["messages"], [{"role": "user", "content": "Ahoy " * 1200}]):
        tokens = post(engine, "/tokenize", {"messages": messages})["tokens"]
        text = post(engine, "/detokenize", {"tokens": tokens})["prompt"]
        assert text == f"user: {messages[0]['content']};"  # the large one by the other process

    own = post(engine, "/v1/chat/completions", CHAT | {"logprobs": True})
    (entry, *_) = own["choices"][0]["logprobs"]["content"]
    assert entry["token"].startswith("token_id:")
    asked = CHAT | {"logprobs": True, "return_tokens_as_token_ids": False}
    (entry, *_) = post(engine, "/v1/chat/completions", asked)["choices"][0]["logprobs"]["content"]
    assert not entry["token"].startswith("token_id:")

    chunks = list(engine.client.chat.completions.create(**CHAT, stream=True))
    assert chunks[-1].choices == []
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert (counts[0], counts[-1]) == (0, 3)

    status, text = engine.get("/tokenizer_info")
    assert status == 200
    assert json.loads(text)["chat_template"] == template.read_text()
    engine.clean()


def test_without_the_flags_there_is_the_version_alone(engine: Any) -> None:
    assert engine.get("/tokenizer_info")[0] == 404
    assert json.loads(engine.get("/version")[1]) == {"version": version()}
