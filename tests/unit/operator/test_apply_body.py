"""The body of a server-side apply is JSON and YAML at once.

Tests ``runtime/client.py``.
"""

from __future__ import annotations

import json

import yaml
from hypothesis import given
from hypothesis import strategies as st

from plimsoll_operator.runtime.client import encode_yaml

TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(TEXT)
def test_every_text_means_the_same_in_both(text: str) -> None:
    body = encode_yaml({"a": text})
    assert json.loads(body) == {"a": text}
    assert yaml.safe_load(body) == {"a": text}
