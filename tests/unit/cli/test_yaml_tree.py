"""Documents of a file: the text is kept, and what is read of it has bounds."""

from __future__ import annotations

import time

import pytest

from plimsoll_cli.yaml_text import YamlError
from plimsoll_cli.yaml_tree import (
    MAX_DOCUMENT_BYTES,
    MAX_EXPANDED_VALUES,
    MAX_FILE_BYTES,
    MAX_NESTING_LEVELS,
    split_documents,
)

LAUGHS = "x0: &x0 [a,a,a,a,a,a,a,a,a,a]\n" + "".join(
    f"x{at}: &x{at} [{','.join([f'*x{at - 1}'] * 10)}]\n" for at in range(1, 9)
)


def read(text: str) -> None:
    for one in split_documents(text):
        if (root := one.parse_root()) is not None:
            root.read_value()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a: 1",
        "# only a comment\n---\n---\n\n--- # next\r\na: 1\r\n---\nb: 2",
        "\ufeffa: 1\n...\n",
        '{"a": 1}\n{"b": "\\ud83d\\ude00"}\n',
        '{"a": 1}\n---\nb: 2\n',
    ],
)
def test_the_documents_are_the_file(text: str) -> None:
    assert "".join(one.separator + one.text for one in split_documents(text)) == text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (LAUGHS, f"aliases expand to more than {MAX_EXPANDED_VALUES} values"),
        (
            "a: &a " + "{k: " * 9 + "v" + "}" * 9 + "\n" + "b: [" + "*a, " * 20_000 + "]\n",
            "aliases expand to more",
        ),
        (
            "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 200)).replace("*a0", "1"),
            "nested",
        ),
        ("[" * (MAX_NESTING_LEVELS + 1) + "]" * (MAX_NESTING_LEVELS + 1), "nested in more than"),
        ("[" * 1_000_000, "nested in more than|not valid YAML"),
        ("- " * 1_000_000, "nested in more than|not valid YAML"),
        ("a: &a {b: *a}", "the alias 'a' refers to the value that contains it"),
        ("a: *b", "anchor 'b', which is not defined"),
        ("a: " + "1" * (MAX_DOCUMENT_BYTES + 1), "larger than 3 MiB"),
        ("#" * (MAX_FILE_BYTES + 1), "larger than 16 MiB"),
        ("a: .inf", "cannot be written as a number in JSON"),
        ("a: <<\n<<: [1]", "<< needs a mapping"),
        ("[a]: b", "a key must be a string or a number"),
        ("--- a\n", "move the text after --- to its own line"),
        ('{"a": "' + "x" * 9 + '"}{"b": 1}{', "not JSON"),
    ],
)
def test_a_hostile_text_is_refused_soon(text: str, problem: str) -> None:
    began = time.process_time()
    with pytest.raises(YamlError, match=problem):
        read(text)
    assert time.process_time() - began < 10


def test_five_thousand_documents_and_a_comment_of_ten_mebibytes_take_seconds() -> None:
    began = time.process_time()
    for text in (
        "---\napiVersion: v1\nkind: X\ndata: {a: b}\n" * 5000,
        "a: 1\n#" + "x" * (10 << 20),
    ):
        for one in split_documents(text):
            if len(one.text) < MAX_DOCUMENT_BYTES:
                one.parse_root()
    assert time.process_time() - began < 60


def test_a_place_is_that_in_the_file() -> None:
    with pytest.raises(YamlError) as caught:
        [one.parse_root() for one in split_documents("a: 1\n---\n# c\nb: c: d\n")]
    assert caught.value.position == (4, 5)


def test_a_key_that_stands_twice_is_refused_where_that_is_asked_for() -> None:
    (document,) = split_documents("a: 1\na: 2\n")
    root = document.parse_root()
    assert root is not None
    assert root.read_value() == {"a": 2}
    with pytest.raises(YamlError, match="contains the key a twice: remove one"):
        root.read_value(strict=True)
