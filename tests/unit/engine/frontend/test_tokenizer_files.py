"""What the frontend reads from a checkpoint's tokenizer files.

Tests ``frontend/requests/tokenizer.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plimsoll_engine.checkpoint import eos_ids
from plimsoll_engine.errors import UsageError
from plimsoll_engine.frontend.requests.tokenizer import TemplateError, Tokenizer
from plimsoll_faults.models import tiny_text
from tests.byte_text import llama_2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_text.write(tiny_text.train(), tmp_path)
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({}, tiny_text.VOCABULARY),
        ({"vocab_size": 9_999}, tiny_text.VOCABULARY),
        ({"vocab_size": 300}, 300),
        ({"vocab_size": 9, "text_config": {"vocab_size": 400}}, 400),
    ],
)
def test_the_vocabulary_is_what_tokenizer_and_model_both_know(
    folder: Path, config: dict[str, object], size: int
) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    assert Tokenizer(folder).vocab_size == size


def test_templates_get_tools_and_variables_and_cannot_be_nested_to_death(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(
        "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
        "{{ 'thinks' if enable_thinking else 'speaks' }}{{ messages | length }}{{ eos_token }}"
    )
    tokenizer = Tokenizer(folder)
    assert tokenizer.render([{}, {}]) == "speaks2<|im_end|>"
    assert tokenizer.render([], [{"a": "é"}], {"enable_thinking": True, "tools": [1]}) == (
        '{"a": "é"}thinks0<|im_end|>'
    )
    deep: dict[str, object] = {}
    for _ in range(10_000):
        deep = {"a": deep}
    with pytest.raises(TemplateError, match="refuses"):
        tokenizer.render([], [deep])


def test_the_ends_of_a_text_are_of_the_generation_config_first(folder: Path) -> None:
    assert eos_ids(folder) == [2, 0]
    (folder / "generation_config.json").unlink()
    assert eos_ids(folder) == []
    (folder / "config.json").write_text('{"eos_token_id": 7}')
    assert eos_ids(folder) == [7]
    (folder / "config.json").write_text("[]")
    with pytest.raises(UsageError, match="expected a JSON object"):
        eos_ids(folder)


def test_without_a_chat_template_completions_are_named(folder: Path) -> None:
    edit(folder, "tokenizer_config.json", chat_template=None)
    with pytest.raises(TemplateError, match="use /v1/completions"):
        Tokenizer(folder).render([{"role": "user", "content": "Ahoy"}])


def edit(folder: Path, name: str, **fields: object) -> None:
    body = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(body | fields))


def test_a_file_takes_the_place_of_the_template(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "chosen.jinja"
    file.write_text("{{ messages[0].content }}!")
    (folder / "chat_template.jinja").write_text("the checkpoint's own")
    chosen = Tokenizer(folder, file)
    assert chosen.chat_template == "{{ messages[0].content }}!"
    assert chosen.render([{"role": "user", "content": "Ahoy"}]) == "Ahoy!"
    assert Tokenizer(folder).chat_template == "the checkpoint's own"
    for damaged, told in ((b"{% if %}", "malformed"), (b"\xff", "cannot be read")):
        file.write_bytes(damaged)
        with pytest.raises(UsageError, match=rf"chosen\.jinja: the chat template .*{told}"):
            Tokenizer(folder, file)


BROKEN: list[tuple[Callable[[Path], Any], str]] = [
    (lambda f: (f / "tokenizer.json").write_text("{}"), r"tokenizer\.json: not a tokenizer"),
    (lambda f: (f / "tokenizer.json").unlink(), r"tokenizer\.json: not a tokenizer"),
    (lambda f: (f / "tokenizer_config.json").write_text("{"), r"tokenizer_config\.json"),
    (lambda f: edit(f, "tokenizer_config.json", eos_token={"text": 1}), "field eos_token"),
    (lambda f: edit(f, "tokenizer_config.json", chat_template="{% if %}"), "malformed"),
    (lambda f: edit(f, "tokenizer_config.json", chat_template=[{"x": 1}]), "cannot be read"),
    (lambda f: (f / "chat_template.jinja").write_bytes(b"\xff"), "cannot be read"),
    (
        lambda f: edit(f, "generation_config.json", eos_token_id=["</s>"]),
        r"generation_config\.json: field eos_token_id",
    ),
]


@pytest.mark.parametrize(("damage", "message"), BROKEN)
def test_a_broken_file_is_named(damage: Callable[[Path], Any], message: str, folder: Path) -> None:
    damage(folder)
    with pytest.raises(UsageError, match=message):
        Tokenizer(folder)


def test_a_token_alone_reads_as_in_the_middle_of_a_text(tmp_path: Path) -> None:
    made = llama_2(["▁hi", "ä"])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    for text, shown in (
        ("▁hi", " hi"),
        ("ä", "ä"),
        ("▁", " "),
        ("<0xE2>", "\ufffd"),
        ("</s>", "</s>"),
    ):
        token = made.token_to_id(text)
        assert token is not None
        assert tokenizer.token_text(token) == shown
