"""Decoder of images from data URLs to RGB pixels. Limits are checked before decoding."""

from __future__ import annotations

import base64
import binascii
import io
import re
import warnings

from PIL import Image, ImageOps, UnidentifiedImageError

from plimsoll_engine.multimodal.processor import MediaError
from plimsoll_engine.process.addresses import remove_addresses

SUPPORTED_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
# As in OpenAI's API.
MAX_FILE_BYTES = 20 << 20
# 160 MB as RGBA. An 8K frame has 33 million pixels.
MAX_PIXELS = 40_000_000
# Resizing an image with a higher ratio would take too much memory.
MAX_ASPECT_RATIO = 200

# The media type and its parameters may be anything: the file itself tells its format.
_DATA_URL_PATTERN = re.compile(r"data:[^,]*;base64,", re.IGNORECASE)


def decode_data_url(url: str) -> bytes:
    """Return the bytes in a ``data:...;base64,`` URL. Raises MediaError."""
    match = _DATA_URL_PATTERN.match(url[:200])
    if match is None:
        if re.match(r"https?://", url[:10], re.IGNORECASE):
            raise MediaError(
                "remote images are not fetched: send a data URL (data:image/png;base64,...)",
                "remote_url_refused",
            )
        raise MediaError(
            "the image's url is not a data URL in base64: send data:image/png;base64,...",
            "invalid_url",
        )
    if len(url) > MAX_FILE_BYTES * 4 // 3 + 200:
        raise MediaError(
            f"the image is larger than the maximum of {MAX_FILE_BYTES} bytes: scale the image down",
            "image_too_large",
        )
    try:
        data = base64.b64decode(url[match.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(
            f"the image's data URL is not valid base64: {error}", "invalid_base64"
        ) from None
    if not data:
        raise MediaError("the image's data URL contains no data", "invalid_image")
    return data


def decode(data: bytes) -> Image.Image:
    """Return the first frame of an image file as RGB, rotated as EXIF says. Raises MediaError."""
    if len(data) > MAX_FILE_BYTES:
        raise MediaError(
            f"the image is larger than the maximum of {MAX_FILE_BYTES} bytes: scale the image down",
            "image_too_large",
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=SUPPORTED_FORMATS)
    except Image.DecompressionBombError:
        raise MediaError(
            f"the image has more than the maximum of {MAX_PIXELS} pixels: scale the image down",
            "image_too_large",
        ) from None
    except UnidentifiedImageError:  # the exception's message only names the buffer
        raise _make_decode_error("unknown format") from None
    except Exception as error:  # noqa: BLE001 - a broken file makes Pillow raise anything
        raise _make_decode_error(str(error)) from None
    with image:
        _check_size(*image.size)
        try:
            ImageOps.exif_transpose(image, in_place=True)  # a copy would take as much again
            return _convert_to_rgb(image)
        except Exception as error:  # noqa: BLE001
            raise _make_decode_error(str(error)) from None


def _convert_to_rgb(image: Image.Image) -> Image.Image:
    # As in vLLM, what is transparent is white. Pillow would show the colour below it, mostly black,
    # and cut 16-bit grey off at 255.
    if image.mode.startswith("I;16"):
        image = image.point(lambda value: value / 256).convert("L")
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=image.getchannel("A"))
    return white


def _check_size(width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise MediaError(
            f"the image has no pixels: its size is {width} x {height}", "invalid_image"
        )
    if width * height > MAX_PIXELS:
        raise MediaError(
            f"the image has {width} x {height} pixels, but the maximum is {MAX_PIXELS} "
            "pixels: scale the image down",
            "image_too_large",
        )
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise MediaError(
            f"the image has {width} x {height} pixels, but the longer side may be at most "
            f"{MAX_ASPECT_RATIO} times the shorter side",
            "invalid_image",
        )


def _make_decode_error(reason: str) -> MediaError:
    kinds = ", ".join(SUPPORTED_FORMATS)
    return MediaError(
        f"cannot decode the image ({remove_addresses(reason)}): use {kinds}",
        "invalid_image",
    )
