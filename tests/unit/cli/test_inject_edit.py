"""A change touches only its own place, and is taken back to the byte.

Tests ``plimsoll_cli/inject/edit.py``.
"""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll_cli.inject.edit import (
    EditError,
    apply_changes,
    find_changes,
    find_reversals,
    format_record,
    is_json_equal,
)
from plimsoll_cli.yaml_tree import Node, split_documents

Object = dict[str, Any]


def root_of(text: str) -> Node:
    document = split_documents(text)[0]
    root = document.parse_root()
    assert root is not None
    return root


def edited(text: str, wanted: Object) -> str:
    """``text`` that means ``wanted``; it is checked that the way back leads to ``text``."""
    document = split_documents(text)[0]
    made = find_changes(text, root_of(text), wanted, document.is_json)
    changed = apply_changes(text, made)
    assert is_json_equal(root_of(changed).read_value(), wanted), changed
    assert (
        apply_changes(changed, find_reversals(changed, root_of(changed), format_record(made)))
        == text
    )
    return changed


@pytest.mark.parametrize(
    ("text", "wanted", "expected"),
    [
        ("a: 1 # c\n", {"a": 1, "b": {"c": [1]}}, "a: 1 # c\nb:\n  c:\n    - 1\n"),
        ("a: 1", {"a": 1, "b": 2}, "a: 1\nb: 2"),
        ("a: 1\r\n", {"a": 1, "b": {"c": 2}}, "a: 1\r\nb:\r\n  c: 2\r\n"),
        ("a:\n- x\n", {"a": ["x", {"name": "z", "v": 1}]}, "a:\n- x\n- name: z\n  v: 1\n"),
        ("a:\n    b: 1\n    # of b\n# of a\n", {"a": {"b": 1, "c": 2}},
         "a:\n    b: 1\n    # of b\n    c: 2\n# of a\n"),
        ("a: {b: 1, c: [x]}\n", {"a": {"b": 1, "c": ["x", "z"], "d": "m"}},
         "a: {b: 1, c: [x, z], d: m}\n"),
        ("a:\n- name: x\n  v: 1\n# of u\n- # deeper\n  name: u\n",
         {"a": [{"name": "w"}, {"name": "x", "v": 1}, {"name": "z"}, {"name": "u"}]},
         "a:\n- name: w\n- name: x\n  v: 1\n- name: z\n# of u\n- # deeper\n  name: u\n"),
        ("a: [ {name: x},{name: u} ]\n",
         {"a": [{"name": "v"}, {"name": "w"}, {"name": "x"}, {"name": "z"}, {"name": "u"}]},
         "a: [ {name: v}, {name: w}, {name: x}, {name: z},{name: u} ]\n"),
        ("a: {}\nb: []\n", {"a": {"c": 1, "d": 2}, "b": [1, 2]}, "a: {c: 1, d: 2}\nb: [1, 2]\n"),
        ("a: # c\nb: ~\n", {"a": {"c": 1}, "b": [1]}, "a: {c: 1} # c\nb: [1]\n"),
        ("a:  false # c\n", {"a": True}, "a: true # c\n"),
        ('{"a": {"b": null}}', {"a": {"b": [1]}, "c": "é"},
         '{"a": {"b": [1]}, "c": "\\u00e9"}'),
        ("a: |\n  x\n\nb: |+\n  y\n\n", {"a": "x\n", "b": "y\n\n", "c": 1},
         "a: |\n  x\n\nb: |+\n  y\n\nc: 1\n"),
        ("a: &l {x: 1}\nb: *l\n", {"a": {"x": 1}, "b": {"x": 1, "z": 2}},
         "a: &l {x: 1}\nb: {x: 1, z: 2}\n"),
        ("a: &l\n  x: 1\nb: *l\n", {"a": {"x": 1, "z": 2}, "b": {"x": 1}},
         "a: &l\n  x: 1\n  z: 2\nb: {x: 1}\n"),
        ("m: &m {x: 1}\na:\n  <<: *m\n", {"m": {"x": 1}, "a": {"x": [2]}},
         "m: &m {x: 1}\na:\n  <<: *m\n  x:\n    - 2\n"),
        ("a:\n  - &e {name: x}\n  - *e\n", {"a": [{"name": "x", "v": 1}, {"name": "x"}]},
         "a:\n  - &e {name: x, v: 1}\n  - {name: x}\n"),
    ],
)  # fmt: skip
def test_what_changes(text: str, wanted: Object, expected: str) -> None:
    assert edited(text, wanted) == expected


@pytest.mark.parametrize(
    ("text", "wanted"), [("? a\n: b\n", {"a": "b", "c": 1}), ("a: 1\n", {"a": 1, 2: "x"})]
)
def test_a_form_that_cannot_be_extended_is_an_error_or_right(text: str, wanted: Object) -> None:
    try:
        changed = apply_changes(text, find_changes(text, root_of(text), wanted))
    except EditError:
        return
    assert root_of(changed).read_value() == {str(key): value for key, value in wanted.items()}


def test_what_is_gone_is_not_taken_back() -> None:
    assert find_reversals("a: 1\n", root_of("a: 1\n"), ["+ /b/c", '= /d/name=x "1"']) == []
