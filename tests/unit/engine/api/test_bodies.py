"""A body that is no request: the error names the field, or says that it is about the body.

Tests ``api/protocol.py``.
"""

from __future__ import annotations

import pytest

from plimsoll_engine.api.decoding import decode
from plimsoll_engine.api.errors import ApiError
from plimsoll_engine.api.protocol import CompletionRequest


@pytest.mark.parametrize(
    ("body", "param"),
    [
        pytest.param(b"[]", None, id="array"),
        pytest.param(b"null", None, id="null"),
        pytest.param(b'{"": 1, "model": "m", "prompt": "a"}', None, id="nameless-field"),
        pytest.param(b'{"model": 1, "prompt": "a"}', "model", id="type"),
        pytest.param(b'{"model": "m"}', "prompt", id="missing"),
        pytest.param(b'{"model": "m", "prompt": "a", "x": 1}', "x", id="unknown"),
        pytest.param(
            b'{"model": "m", "prompt": "a", "stream_options": {"": 1}}', "stream_options",
            id="nameless-field-inside",
        ),
        pytest.param(
            b'{"model": "m", "prompt": "a", "metadata": {"a": 1}}', "metadata[...]",
            id="value-in-map",
        ),
        pytest.param(
            b'{"model": "m", "prompt": "a", "logit_bias": {"7": 101}}', "logit_bias[...]",
            id="range-in-map",
        ),
    ],
)  # fmt: skip
def test_an_error_names_the_field_or_the_body(body: bytes, param: str | None) -> None:
    with pytest.raises(ApiError) as raised:
        decode(body, CompletionRequest)
    assert raised.value.status == 400
    assert raised.value.param == param
    assert param is not None or str(raised.value).startswith("the body: ")
