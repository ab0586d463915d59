"""From a file or a data URL to pixels: bounded before anything is decoded."""

from __future__ import annotations

import base64
import binascii
import io
import re
import warnings

from PIL import Image, ImageOps, UnidentifiedImageError

from plimsoll_engine.multimodal.processor import MediaError
from plimsoll_engine.process.addresses import without_addresses

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_BYTES = 20 << 20
"""Of one image file, as OpenAI takes them."""
MAX_PIXELS = 40_000_000
"""What one image may decode to: 160 MB as RGBA. A camera's 8K frame is 33 million."""
MAX_RATIO = 200
"""Of the longer side to the shorter one: beyond it the resized image is larger than the original,
and nothing is left to see."""

_DATA_URL = re.compile(r"data:image/[a-z0-9.+-]+;base64,", re.IGNORECASE)


def from_data_url(url: str) -> bytes:
    """Return the file in a ``data:image/...;base64,`` URL. Raises :class:`MediaError`."""
    match = _DATA_URL.match(url[:100])
    if match is None:
        if re.match(r"https?://", url[:10], re.IGNORECASE):
            raise MediaError(
                "this engine fetches no URLs: send the image as data:image/png;base64,...",
                "remote_url_refused",
            )
        raise MediaError(
            "the image's url is no data URL of the form data:image/png;base64,...", "invalid_url"
        )
    if len(url) > MAX_BYTES * 4 // 3 + 200:
        raise MediaError(f"the image is larger than {MAX_BYTES} bytes", "image_too_large")
    try:
        data = base64.b64decode(url[match.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"the image's data URL is not base64: {error}", "invalid_base64") from None
    if not data:
        raise MediaError("the image's data URL is empty", "invalid_image")
    return data


def decode(data: bytes) -> Image.Image:
    """Return the first frame as RGB, turned as its EXIF says. Raises :class:`MediaError`.

    The size is checked from the file's header, before a pixel is decoded.
    """
    if len(data) > MAX_BYTES:
        raise MediaError(f"the image is larger than {MAX_BYTES} bytes", "image_too_large")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise MediaError(
            f"the image has more than {MAX_PIXELS} pixels", "image_too_large"
        ) from None
    except UnidentifiedImageError:  # its message is the name of our buffer
        raise _corrupt("its format is unknown") from None
    except Exception as error:  # noqa: BLE001 - a broken file makes Pillow raise anything
        raise _corrupt(str(error)) from None
    with image:
        _check_size(*image.size)
        try:
            return ImageOps.exif_transpose(image).convert("RGB")
        except Exception as error:  # noqa: BLE001
            raise _corrupt(str(error)) from None


def _check_size(width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise MediaError(f"the image is {width} x {height} pixels", "invalid_image")
    if width * height > MAX_PIXELS:
        raise MediaError(
            f"the image is {width} x {height} pixels; at most {MAX_PIXELS} are decoded: scale it"
            " down",
            "image_too_large",
        )
    if max(width, height) > MAX_RATIO * min(width, height):
        raise MediaError(
            f"the image is {width} x {height} pixels; one side may be at most {MAX_RATIO} times the"
            " other",
            "invalid_image",
        )


def _corrupt(why: str) -> MediaError:
    kinds = ", ".join(FORMATS)
    return MediaError(
        f"the image cannot be decoded ({without_addresses(why)}); formats are {kinds}",
        "invalid_image",
    )
