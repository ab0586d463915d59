"""``--chat-template`` and the other flags of answers, and HTTP as clients speak it."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

import pytest

from plimsoll_api.version import get_version

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
    assert json.loads(engine.get("/version")[1]) == {"version": get_version()}


def ask(
    engine: Any, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers with lower-case names, and body; ``content_type`` is sent with a dash."""
    connection = http.client.HTTPConnection(engine.url.removeprefix("http://"), timeout=60)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, None if body is None else json.dumps(body), named)
    answer = connection.getresponse()
    found = {name.lower(): value for name, value in answer.getheaders()}
    data = answer.read()
    connection.close()
    return answer.status, found, data


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/tiny", "/health", "/ready", "/version"])
def test_what_can_be_read_has_a_head(engine: Any, path: str) -> None:
    status, headers, data = ask(engine, "HEAD", path)
    assert (status, data) == (200, b"")
    assert headers["content-type"] == "application/json"


def test_options_name_the_methods_of_a_path(engine: Any) -> None:
    status, headers, data = ask(engine, "OPTIONS", "/v1/chat/completions")
    assert (status, headers["allow"], data) == (204, "POST", b"")
    assert "access-control-allow-origin" not in headers
    status, headers, data = ask(engine, "GET", "/v1/chat/completions")
    assert (status, headers["allow"]) == (405, "POST")
    assert json.loads(data)["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/tokenize"])
@pytest.mark.parametrize(
    ("kind", "page", "status"),
    [
        ("application/json", True, 200),
        ("application/json; charset=utf-8", True, 200),
        ("Application/JSON", False, 200),
        ("", False, 200),
        # curl and urllib say so of any body; a page that does is a form.
        ("application/x-www-form-urlencoded", False, 200),
        ("application/x-www-form-urlencoded", True, 415),
        ("text/plain", False, 415),
        ("multipart/form-data; boundary=a", True, 415),
    ],
)
def test_a_body_that_is_not_json_is_refused_by_its_type(
    engine: Any, path: str, kind: str, page: bool, status: int
) -> None:
    """None of them names a model: it is the one that is served."""
    body = {"max_output_tokens": 1, "input": "Ahoy"}
    if path != "/v1/responses":
        body = {"messages": CHAT["messages"]} | ({} if path == "/tokenize" else {"max_tokens": 1})
    headers = {"content_type": kind} if kind else {}
    headers |= {"origin": "https://page.example"} if page else {}
    found, _, data = ask(engine, "POST", path, body, **headers)
    answer = json.loads(data)
    assert found == status, answer
    if status == 415:
        assert answer["error"]["code"] == "unsupported_media_type"
    elif path != "/tokenize":
        assert answer["model"] == "tiny"


def test_a_compressed_body_is_refused_by_its_coding(engine: Any) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    assert ask(engine, "POST", "/v1/completions", body, content_encoding="Identity")[0] == 200
    status, _, data = ask(engine, "POST", "/v1/completions", body, content_encoding="gzip")
    error = json.loads(data)["error"]
    assert (status, error["code"]) == (415, "unsupported_media_type")
    assert "content-encoding 'gzip'" in error["message"]


def test_pages_of_allowed_origins_may_send_requests(start_engine: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key\n")
    engine = start_engine(
        "--allowed-origins", "https://page.example", "--api-key-file", str(keys),
        "--strict-requests",
    ).wait_ready()  # fmt: skip
    page = {"origin": "https://page.example", "content_type": "application/json"}
    asks = {
        "access_control_request_method": "POST",
        "access_control_request_headers": "authorization,content-type",
    }
    status, headers, _ = ask(engine, "OPTIONS", "/v1/chat/completions", None, **page, **asks)
    assert status == 200
    assert headers["access-control-allow-origin"] == "https://page.example"
    assert "authorization" in headers["access-control-allow-headers"].lower()
    other = page | {"origin": "https://other.example"}
    assert ask(engine, "OPTIONS", "/v1/chat/completions", None, **other, **asks)[0] == 400

    path = "/v1/chat/completions"
    for scheme in ("Bearer", "bearer", "BEARER"):
        key = {"authorization": f"{scheme} key"}
        status, headers, _ = ask(engine, "POST", path, CHAT, **page, **key)
        assert status == 200
        assert headers["access-control-allow-origin"] == "https://page.example"
    status, headers, data = ask(engine, "POST", path, CHAT, **page)
    assert (status, json.loads(data)["error"]["type"]) == (401, "authentication_error")
    assert headers["access-control-allow-origin"] == "https://page.example"
    status, _, data = ask(engine, "POST", path, CHAT | {"wings": 2}, **page, **key)
    error = json.loads(data)["error"]
    assert (status, error["param"], error["type"]) == (400, "wings", "invalid_request_error")
    engine.clean()


def test_unknown_fields_are_named_in_a_header(engine: Any) -> None:
    more = {"wings": 2, "stream_options": {"sails": 3}, "stream": True}
    status, headers, _ = ask(engine, "POST", "/v1/chat/completions", CHAT | more,
                             content_type="application/json")  # fmt: skip
    assert status == 200
    warning = headers["x-plimsoll-warning"]
    assert warning == "unknown fields are ignored: wings, stream_options.sails"


@pytest.mark.parametrize("name", ["", "wings ", "wi\r\nngs", "wi\x7fngs", "w" * 63 + " s"])
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"prompt": "Hull", "max_tokens": 1}), ("/tokenize", {"prompt": "Hull"})],
)
def test_an_unknown_field_whose_name_no_header_may_have_is_answered(
    engine: Any, path: str, body: dict[str, Any], name: str
) -> None:
    status, headers, _ = ask(
        engine, "POST", path, body | {name: 1}, content_type="application/json"
    )
    assert status == 200
    assert headers["x-plimsoll-warning"].startswith("unknown fields are ignored:")
    assert "\r" not in headers["x-plimsoll-warning"]
