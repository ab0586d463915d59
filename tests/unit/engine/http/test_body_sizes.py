"""How large a body may be follows from the model.

Tests ``api/body_sizes.py``.
"""

from __future__ import annotations

from plimsoll_engine.api.body_sizes import FORM_BYTES, MEDIA_BYTES, MIB, BodySizes


def test_text_follows_the_context() -> None:
    text = BodySizes(sees=False, hears=False)
    assert text.text(None) == text.text(8192) == text.chat(8192) == text.form == MIB
    assert text.text(131_072) == 4 * MIB
    assert text.in_work(8192) == 64 * MIB
    assert text.in_work(1 << 20) == 128 * MIB


def test_media_come_on_top_where_the_model_takes_them() -> None:
    assert BodySizes(sees=True, hears=False).chat(8192) == MIB + MEDIA_BYTES
    assert BodySizes(sees=True, hears=False).text(8192) == MIB
    assert BodySizes(sees=False, hears=True).form == FORM_BYTES


def test_the_flag_holds_instead() -> None:
    sizes = BodySizes(sees=True, hears=True, max_bytes=2 * MIB)
    assert {sizes.text(8192), sizes.chat(1 << 20), sizes.form} == {2 * MIB}
