"""How large a body may be follows from the model.

Tests ``api/body_sizes.py``.
"""

from __future__ import annotations

from plimsoll_engine.api.body_sizes import MAX_FORM_BYTES, MAX_MEDIA_BYTES, MIB, BodySizes


def test_text_follows_the_context() -> None:
    text = BodySizes(accepts_images=False, accepts_audio=False)
    assert (
        text.compute_text_limit(None)
        == text.compute_text_limit(8192)
        == text.compute_chat_limit(8192)
        == text.form_limit
        == MIB
    )
    assert text.compute_text_limit(131_072) == 4 * MIB
    assert text.compute_buffer_bytes(8192) == 64 * MIB
    assert text.compute_buffer_bytes(1 << 20) == 128 * MIB


def test_media_come_on_top_where_the_model_takes_them() -> None:
    assert (
        BodySizes(accepts_images=True, accepts_audio=False).compute_chat_limit(8192)
        == MIB + MAX_MEDIA_BYTES
    )
    assert BodySizes(accepts_images=True, accepts_audio=False).compute_text_limit(8192) == MIB
    assert BodySizes(accepts_images=False, accepts_audio=True).form_limit == MAX_FORM_BYTES


def test_the_flag_holds_instead() -> None:
    sizes = BodySizes(accepts_images=True, accepts_audio=True, max_bytes=2 * MIB)
    assert {
        sizes.compute_text_limit(8192),
        sizes.compute_chat_limit(1 << 20),
        sizes.form_limit,
    } == {2 * MIB}
