"""YAML is read, and written, as kubectl takes it. ``as_kubectl_reads.json`` has its answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plimsoll_cli.yaml_text import dump
from tests.manifests.kubectl import Kubectl, read, shown

ANSWERS = json.loads((Path(__file__).parent / "as_kubectl_reads.json").read_text())
PARTS = (
    "a", "b: ", "- ", "  ", "\n", "\n  ", "\n- ", '"', "'", "[", "]", "{", "}", ", ", ": ", "#",
    " # c", "|", ">", "|+", "|-", "&x ", "*x", "<<: ", "!!str ", "!t ", "1", "0x1", "y", "~", "\t",
    "---\n", "? ", "é", "😀", "\\u00e9", "\\n", "\r\n", "%", "@", "`", "-", ":", "=", ".5", "1e3",
    "22:30", "0o17", "\\ud83d\\ude00", "{<<: *x}", "on",
)  # fmt: skip
FEW = settings(max_examples=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def kubectl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubectl]:
    """The reader of kubectl; skips where Go or its modules are missing."""
    made = Kubectl(tmp_path_factory.mktemp("kubectl"))
    yield made
    made.close()


@pytest.mark.parametrize(("text", "expected"), ANSWERS)
def test_what_kubectl_answered(text: str, expected: list[object] | None) -> None:
    assert shown(read(text)) == shown(expected)


def test_the_answers_are_still_kubectls(kubectl: Kubectl) -> None:
    for text, expected in ANSWERS:
        assert shown(kubectl.read(text)) == shown(expected), text


@FEW
@given(parts=st.lists(st.sampled_from(PARTS), max_size=16), keyed=st.booleans())
def test_any_text_is_read_as_kubectl_reads_it(
    kubectl: Kubectl, parts: list[str], keyed: bool
) -> None:
    text = "a: " * keyed + "".join(parts)
    theirs = kubectl.read(text)
    # A text that begins with a brace may be JSON or YAML to kubectl, from one object to the next.
    if not text.lstrip().startswith("{"):
        assert shown(read(text)) == shown(theirs)


@FEW
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.text()
        | st.sampled_from(["y", "on", "0o17", "1_0", "22:30", "=", "<<", "1e3", "a\n b\n", ""]),
        lambda inner: st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=8,
    )
)  # fmt: skip
def test_what_we_write_is_read_as_it_was_meant(kubectl: Kubectl, value: object) -> None:
    text = dump({"v": value})
    assert shown(read(text)) == shown([{"v": value}])
    if "\x85" not in text:
        assert shown(kubectl.read(text)) == shown([{"v": value}])
