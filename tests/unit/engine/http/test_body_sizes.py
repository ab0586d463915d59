"""How large a body may be follows from the model.

Tests ``api/body_sizes.py``.
"""

from __future__ import annotations

from plimsoll_engine.api.body_sizes import FORM_BYTES, MEDIA_BYTES, MIB, BodySizes


def test_text_follows_the_context() -> None:
    text = BodySizes(accepts_images=False, accepts_audio=False)
    assert text.text(None) == text.text(8192) == text.chat(8192) == text.form == MIB
    assert text.text(131_072) == 4 * MIB
    assert text.buffer_bytes(8192) == 64 * MIB
    assert text.buffer_bytes(1 << 20) == 128 * MIB


def test_media_come_on_top_where_the_model_takes_them() -> None:
    assert BodySizes(accepts_images=True, accepts_audio=False).chat(8192) == MIB + MEDIA_BYTES
    assert BodySizes(accepts_images=True, accepts_audio=False).text(8192) == MIB
    assert BodySizes(accepts_images=False, accepts_audio=True).form == FORM_BYTES


def test_the_flag_holds_instead() -> None:
    sizes = BodySizes(accepts_images=True, accepts_audio=True, max_bytes=2 * MIB)
    assert {sizes.text(8192), sizes.chat(1 << 20), sizes.form} == {2 * MIB}
