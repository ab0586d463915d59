"""Keys are compared as digests of one length, so that time tells neither content nor length.

Tests ``api/secret.py``.
"""

from __future__ import annotations

import hmac
from typing import Any

import pytest

from plimsoll_engine.api.secret import Secret


def test_what_is_compared_has_one_length_whatever_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = set()
    real = hmac.compare_digest

    def compare(a: Any, b: Any) -> bool:
        lengths.add((len(a), len(b)))
        return real(a, b)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    secret = Secret(b"Bearer one-key")
    given = [b"", b"B", b"Bearer one-ke", b"Bearer one-kez", b"x" * 5000, b"Bearer one-key"]
    assert [secret.is_equal(value) for value in given] == [False] * 5 + [True]
    assert lengths == {(32, 32)}
