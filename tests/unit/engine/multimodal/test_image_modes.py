"""What a model sees of an image, whatever its URL, its part and its mode.

Tests ``multimodal/images.py`` and ``api/chat_images.py``.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from plimsoll_engine.api import chat_images
from plimsoll_engine.api.errors import ApiError
from plimsoll_engine.api.protocol import Message
from plimsoll_engine.multimodal import images

WHITE, GREY = (255, 255, 255), (127, 127, 127)


def one_colour(mode: str, colour: Any) -> Image.Image:
    return Image.new(mode, (8, 8), colour)


def grey16(value: int) -> Image.Image:
    return Image.fromarray(np.full((8, 8), value, np.uint16))


def palette() -> Image.Image:
    image = one_colour("P", 0)
    image.putpalette([0, 0, 0, 255, 0, 0])
    return image


@pytest.mark.parametrize(
    ("image", "kind", "options", "seen"),
    [
        (one_colour("RGB", (9, 8, 7)), "PNG", {}, (9, 8, 7)),
        (one_colour("L", 77), "PNG", {}, (77, 77, 77)),
        (one_colour("1", 1), "PNG", {}, WHITE),
        (one_colour("CMYK", (0, 255, 255, 0)), "JPEG", {}, (255, 0, 0)),
        (one_colour("RGBA", (0, 0, 0, 0)), "PNG", {}, WHITE),
        (one_colour("RGBA", (0, 0, 0, 128)), "PNG", {}, GREY),
        (one_colour("RGBA", (0, 0, 0, 0)), "WEBP", {"lossless": True}, WHITE),
        (one_colour("LA", (0, 0)), "PNG", {}, WHITE),
        (one_colour("RGB", 0), "PNG", {"transparency": (0, 0, 0)}, WHITE),
        (palette(), "PNG", {"transparency": 0}, WHITE),
        (palette(), "PNG", {"transparency": 1}, (0, 0, 0)),
        (palette(), "GIF", {"transparency": 0}, WHITE),
        (grey16(0), "PNG", {}, (0, 0, 0)),
        (grey16(30_000), "PNG", {}, (117, 117, 117)),
        (grey16(65_535), "PNG", {}, WHITE),
        (grey16(65_535), "PNG", {"transparency": 0}, WHITE),
    ],
)
def test_what_is_transparent_is_white_and_grey_keeps_its_scale(
    image: Image.Image, kind: str, options: dict[str, Any], seen: tuple[int, int, int]
) -> None:
    file = io.BytesIO()
    image.save(file, kind, **options)
    pixels = np.asarray(images.decode(file.getvalue()))
    assert pixels.shape == (8, 8, 3)
    assert np.abs(pixels.astype(int) - seen).max() <= 1  # JPEG rounds


def test_the_first_frame_is_turned_as_exif_says() -> None:
    frames = [Image.new("RGB", (8, 4), colour) for colour in ("red", "lime")]
    frames[0].putpixel((0, 0), (0, 0, 255))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright
    file = io.BytesIO()
    frames[0].save(file, "PNG", save_all=True, append_images=frames[1:], exif=exif)
    seen = images.decode(file.getvalue())
    assert seen.size == (4, 8)
    assert (seen.getpixel((3, 0)), seen.getpixel((0, 7))) == ((0, 0, 255), (255, 0, 0))


@pytest.mark.parametrize(
    "before",
    [
        "image/png",
        "",
        "application/octet-stream",
        "image/png;charset=utf-8",
        "image/png;name=a.png",
    ],
)
def test_the_type_of_a_data_url_says_nothing(before: str) -> None:
    assert images.decode_data_url(f"data:{before};base64,QUJD") == b"ABC"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:"}},
        {"type": "image_url", "image_url": "data:"},
        {"type": "input_image", "image_url": "data:", "detail": "auto"},
    ],
)
def test_a_chat_takes_the_image_parts_of_both_paths(part: dict[str, Any]) -> None:
    text = {"type": "text", "text": "What is this?"}
    message = Message(role="user", content=[part, text])
    assert chat_images.list_image_urls([message]) == ["data:"]
    assert chat_images.make_template_parts([part, text], True) == [{"type": "image"}, text]
    with pytest.raises(ApiError, match="accepts only text"):
        chat_images.make_template_parts([part, text], False)
