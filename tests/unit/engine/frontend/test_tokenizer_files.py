"""What the frontend reads from a checkpoint's tokenizer files.

Tests ``checkpoint.py`` and ``frontend/requests/tokenizer.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from plimsoll_engine.api.protocol import CompletionRequest
from plimsoll_engine.api.sampling_params import create_sampling_params
from plimsoll_engine.checkpoint import Checkpoint
from plimsoll_engine.errors import UsageError
from plimsoll_engine.frontend.requests.tokenizer import TemplateError, Tokenizer
from plimsoll_faults.models import tiny_text
from tests.byte_text import llama_2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_text.write_tokenizer(tiny_text.train_tokenizer(), tmp_path)
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({}, tiny_text.VOCABULARY_SIZE),
        ({"vocab_size": 9_999}, tiny_text.VOCABULARY_SIZE),
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
    with pytest.raises(TemplateError, match="rejects"):
        tokenizer.render([], [deep])


def test_the_ends_of_a_text_are_of_the_first_file_and_special_ones_of_all(
    folder: Path,
) -> None:
    def ends() -> tuple[list[int], str]:
        read = Checkpoint.read(folder)
        return read.stop_token_ids, read.sources["stop_token_ids"]

    end = tiny_text.train_tokenizer().token_to_id(tiny_text.EOS)
    assert ends() == ([2, 0], "generation_config.json")
    edit(folder, "generation_config.json", eos_token_id=[0])
    assert ends() == ([0, end], "generation_config.json, tokenizer_config.json")
    start = tiny_text.train_tokenizer().token_to_id(tiny_text.CHAT_START)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": [start, 7]}))  # 7 is a letter
    sources = "generation_config.json, config.json, tokenizer_config.json"
    assert ends() == ([0, start, end], sources)
    (folder / "config.json").write_text("{}")
    (folder / "generation_config.json").unlink()
    assert ends() == ([end], "tokenizer_config.json")
    (folder / "config.json").write_text('{"text_config": {"eos_token_id": [7, 8]}}')
    assert ends() == ([7, 8, end], "config.json, tokenizer_config.json")
    (folder / "config.json").write_text('{"eos_token_id": 7}')
    assert ends() == ([7, end], "config.json, tokenizer_config.json")
    edit(folder, "tokenizer_config.json", eos_token=None)
    assert ends() == ([7], "config.json")
    (folder / "config.json").write_text("[]")
    with pytest.raises(UsageError, match="must contain a JSON object"):
        ends()


def test_truncation_and_padding_of_the_tokenizer_are_off(folder: Path) -> None:
    whole = Tokenizer(folder).encode("gull " * 200)
    library = tiny_text.train_tokenizer()
    library.enable_truncation(32)
    library.enable_padding(length=64)
    library.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer(folder)
    assert tokenizer.encode("gull " * 200) == whole
    assert len(tokenizer.encode("x")) < 64


@pytest.mark.parametrize(
    "settings",
    [
        {"added_tokens_decoder": {"300": {"content": "<repo>", "special": True}}},
        {"additional_special_tokens": ["<repo>"]},
        {"extra_special_tokens": {"repo_token": {"content": "<repo>"}}},
        {"mask_token": "<repo>"},
    ],
)
def test_what_the_tokenizer_config_calls_special_is_no_text(
    folder: Path, settings: dict[str, Any]
) -> None:
    library = tiny_text.train_tokenizer()
    library.add_tokens([AddedToken("<repo>", special=False, normalized=False)])
    library.save(str(folder / "tokenizer.json"))
    number = library.token_to_id("<repo>")
    assert number is not None

    def text(ids: list[int]) -> str:
        decoder = Tokenizer(folder).create_detokenizer_factory([])()
        return "".join(map(decoder.push, ids))

    letters = library.encode("a").ids
    assert text([*letters, number]) == "a<repo>"
    edit(folder, "tokenizer_config.json", **settings)
    assert text([*letters, number, *letters]) == "aa"
    assert Tokenizer(folder).encode("a<repo>a") == [*letters, number, *letters]


def test_the_largest_number_of_a_token_counts_and_not_how_many_there_are(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.__getitem__)
    vocabulary[last] = 900
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert Tokenizer(folder).vocab_size == 901
    (folder / "config.json").write_text('{"vocab_size": 700}')
    assert Tokenizer(folder).vocab_size == 700


def test_sampling_defaults_are_of_the_generation_config(folder: Path) -> None:
    edit(folder, "generation_config.json", temperature=0.6, top_k=20, top_p=None, max_length=9)
    read = Checkpoint.read(folder)
    assert read.sampling_defaults == {"temperature": 0.6, "top_k": 20}
    assert read.sources["sampling"] == "generation_config.json"
    assert Checkpoint.read(folder, generation_config="vllm").sampling_defaults == {}

    def made(**fields: Any) -> tuple[float, int, float]:
        body = CompletionRequest(model="m", prompt="x", **fields)
        asked = create_sampling_params(body, 4, [], 9, None, [], read.sampling_defaults)
        return asked.temperature, asked.top_k, asked.top_p

    assert made() == (0.6, 20, 1.0)
    assert made(temperature=0.0, top_k=-1, top_p=0.5) == (0.0, 0, 0.5)


def test_the_template_of_a_processor_comes_before_the_tokenizer_s(folder: Path) -> None:
    (folder / "chat_template.json").write_text('{"chat_template": "of the processor"}')
    assert Tokenizer(folder).chat_template == "of the processor"
    (folder / "chat_template.jinja").write_text("of its own file")
    assert Checkpoint.read(folder).sources["chat_template"] == "chat_template.jinja"


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
    for damaged, message in (
        (b"{% if %}", r"chosen\.jinja: the chat template .*malformed"),
        (b"\xff", r"cannot read the chat template in .*chosen\.jinja"),
    ):
        file.write_bytes(damaged)
        with pytest.raises(UsageError, match=message):
            Tokenizer(folder, file)


BROKEN: list[tuple[Callable[[Path], Any], str]] = [
    (
        lambda f: (f / "tokenizer.json").write_text("{}"),
        r"cannot load the tokenizer .*tokenizer\.json",
    ),
    (lambda f: (f / "tokenizer.json").unlink(), r"cannot load the tokenizer .*tokenizer\.json"),
    (lambda f: (f / "tokenizer_config.json").write_text("{"), r"tokenizer_config\.json"),
    (lambda f: edit(f, "tokenizer_config.json", eos_token={"text": 1}), "field eos_token"),
    (lambda f: edit(f, "tokenizer_config.json", chat_template="{% if %}"), "malformed"),
    (lambda f: edit(f, "tokenizer_config.json", chat_template=[{"x": 1}]), "cannot read"),
    (lambda f: (f / "chat_template.jinja").write_bytes(b"\xff"), "cannot read"),
    (
        lambda f: edit(f, "generation_config.json", eos_token_id=["</s>"]),
        r"generation_config\.json: field eos_token_id",
    ),
    (
        lambda f: edit(f, "generation_config.json", max_new_tokens=0),
        r"generation_config\.json: field max_new_tokens .*, got 0; .* --generation-config vllm",
    ),
    (
        lambda f: edit(f, "generation_config.json", temperature=-1),
        r"generation_config\.json: field temperature .*, got -1; .* --generation-config vllm",
    ),
    (
        lambda f: edit(f, "tokenizer_config.json", additional_special_tokens=[3]),
        "field additional_special_tokens",
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
        assert tokenizer.decode_token(token) == shown


def test_special_tokens_that_are_shown_have_their_text(folder: Path) -> None:
    """Tags of tool calls may be special: a parser must see them, and no other ones."""
    numbers = tiny_text.add_tokens(folder, ["<call>", "<other>"], special=["<call>", "<other>"])
    tokenizer = Tokenizer(folder)
    (letter,) = tokenizer.encode_rendered("a")
    ids = [letter, numbers["<call>"], numbers["<other>"], 2, letter]

    def text(**how: Any) -> str:
        decoder = tokenizer.create_detokenizer_factory([letter, 2], **how)()
        return "".join(map(decoder.push, ids)) + decoder.finish()

    assert text() == "aa"
    assert text(shown_tokens=["<call>", "<unknown>"]) == "a<call>a"
    assert text(skip_special_tokens=False) == "a<call><other><|im_end|>a"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("a\n{{ 1 // 0 }}", "in line 2: ZeroDivisionError"),
        ("a\nb\n{{ messages[0] }}{{ [][7] | length + {} }}", "in line 3: "),
        ("{{ 'x'.join(5) }}", "in line 1: TypeError"),
        ("\n\n{{ raise_exception('no such role') }}", "in line 3: no such role"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "in line 1: .*unsafe"),
    ],
)
def test_an_error_of_a_template_names_its_line(folder: Path, template: str, why: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(TemplateError, match=why):
        Tokenizer(folder).render([{"role": "user", "content": "a"}])


def test_templates_have_the_tags_and_filters_of_transformers(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{{ m | tojson(ensure_ascii=False, separators=(',', ':'), sort_keys=true) }}"
        "{% if loop.first %}{% continue %}{% endif %}{% endfor %}{{ dict(a=1).a }}"
        "{% set n = namespace(x=2) %}{{ n.x }}{{ strftime_now('%Y') | length }}"
    )
    text = Tokenizer(folder).render([{"role": "user", "content": "é"}])
    assert text == 'é{"content":"é","role":"user"}124'


@pytest.mark.parametrize("form", ["config", "processor", "folder"])
def test_chats_with_tools_have_a_template_of_their_own(folder: Path, form: str) -> None:
    plain, tools = "{{ messages[0].content }}", "{{ tools[0].a }} {{ messages[0].content }}"
    named = [{"name": "default", "template": plain}, {"name": "tool_use", "template": tools}]
    if form == "config":
        edit(folder, "tokenizer_config.json", chat_template=named)
    elif form == "processor":
        sources = {one["name"]: one["template"] for one in named}
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": sources}))
    else:
        (folder / "chat_template.jinja").write_text(plain)
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(tools)
    tokenizer = Tokenizer(folder)
    message = {"role": "user", "content": "hi"}
    assert tokenizer.render([message]) == "hi"
    assert tokenizer.render([message], [{"a": "tide"}]) == "tide hi"
    assert tokenizer.get_template_source(has_tools=True) == tools


def test_the_bytes_of_tokens_are_those_of_the_text(folder: Path) -> None:
    """A character that several tokens spell is no replacement character in any of them."""
    numbers = tiny_text.add_tokens(folder, ["<漢>"])
    tokenizer = Tokenizer(folder)
    text = "a 😀é漢𓀀\n\t\x7f­ <|im_end|>"
    ids = tokenizer.encode_rendered(text)
    assert b"".join(map(tokenizer.decode_token_bytes, ids)).decode() == text
    assert tokenizer.decode_token_bytes(numbers["<漢>"]) == "<漢>".encode()


def test_byte_tokens_have_their_byte(tmp_path: Path) -> None:
    llama_2(["▁there"]).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")
    tokenizer = Tokenizer(tmp_path)
    (number,) = (tokenizer.get_token_id("<0xF0>"),)
    assert number is not None
    assert tokenizer.decode_token_bytes(number) == b"\xf0"
    there = tokenizer.get_token_id("▁there")
    assert there is not None
    assert tokenizer.decode_token_bytes(there) == b" there"
