"""What clients are told holds no address of this process's memory.

Tests ``process/addresses.py``.
"""

from __future__ import annotations

import io
import wave

import pytest

from plimsoll_engine.api.errors import ApiError
from plimsoll_engine.multimodal import audio, images
from plimsoll_engine.multimodal.processor import MediaError
from plimsoll_engine.process.addresses import remove_addresses


@pytest.mark.parametrize("data", [b"no image", b"\x89PNG\r\n\x1a\n" + b"\0" * 40, b"GIF89a"])
def test_a_broken_image(data: bytes) -> None:
    with pytest.raises(MediaError) as told:
        images.decode(data)
    assert "0x" not in str(told.value)
    assert ": use " in str(told.value)


def test_a_broken_sound() -> None:
    whole = io.BytesIO()
    with wave.open(whole, "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(b"\0\0" * 100)
    for data in (b"no sound", whole.getvalue()[:30], b"fLaC" + b"\0" * 40):
        with pytest.raises(MediaError) as told:
            audio.decode(data, 16_000)
        assert "0x" not in str(told.value)
        assert ": use " in str(told.value)


def test_whatever_a_library_says_an_answer_holds_no_address() -> None:
    said = "no image: <_io.BytesIO object at 0x7f2e4c0b1a90>, <function f.<locals>.g at 0x7f00aa11>"
    assert "0x7f" not in remove_addresses(said)
    assert "0x7f" not in ApiError(400, said).encode_body().decode()
    assert remove_addresses("limit 0x10, token <s>") == "limit 0x10, token <s>"
