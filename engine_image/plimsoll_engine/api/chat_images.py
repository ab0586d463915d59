"""Images in chat messages, as placeholder tokens in the prompt and tensors for the encoder."""

from __future__ import annotations

from typing import Any

from plimsoll_engine.api import errors
from plimsoll_engine.api.errors import ApiError, make_invalid_error
from plimsoll_engine.api.protocol import Message, get_part_text
from plimsoll_engine.frontend.requests.media_reader import MediaReader
from plimsoll_engine.frontend.requests.request_log import QueueFullError
from plimsoll_engine.messages.worker_ipc import Media
from plimsoll_engine.multimodal.processor import MediaError, Processor

# Per request.
MAX_IMAGES = 32
# Parts of chats, and those of /v1/responses, which vLLM takes in chats as well.
IMAGE_PARTS = ("image_url", "input_image")


def list_image_urls(messages: list[Message]) -> list[str]:
    """Return the URLs of all image parts, in order. Raises ApiError for a part without a URL."""
    image_urls = []
    for message in messages:
        for part in message.content if isinstance(message.content, list) else []:
            if (kind := part.get("type")) not in IMAGE_PARTS:
                continue
            image = part.get("image_url")
            url = image.get("url") if isinstance(image, dict) else image
            if not isinstance(url, str):
                raise make_invalid_error(
                    f"a content part of type {kind} has no url: add a data URL", "messages"
                )
            image_urls.append(url)
    return image_urls


def make_template_parts(
    content: list[dict[str, Any]], accepts_images: bool
) -> list[dict[str, Any]]:
    """Return content parts in the form that chat templates read.

    Raises ApiError for an unsupported part, such as an image if ``accepts_images`` is False.
    """
    found: list[dict[str, Any]] = []
    for number, part in enumerate(content):
        if accepts_images and part.get("type") in IMAGE_PARTS:
            found.append({"type": "image"})
            continue
        try:
            found.append({"type": "text", "text": get_part_text(part)})
        except ApiError as error:
            error.param = f"content[{number}]"
            raise
    return found


def decode_urls(image_urls: list[str]) -> list[bytes]:
    """Return the image files in the data URLs ``image_urls``. Raises ApiError."""
    # Imports Pillow, which only vision models need.
    from plimsoll_engine.multimodal.images import decode_data_url

    if len(image_urls) > MAX_IMAGES:
        raise make_invalid_error(
            f"the request has {len(image_urls)} images, but the maximum is {MAX_IMAGES}: "
            "send fewer images",
            "messages",
        )
    try:
        return [decode_data_url(url) for url in image_urls]
    except MediaError as error:
        raise make_invalid_error(str(error), "messages", error.code) from None


async def expand_placeholders(
    reader: MediaReader, processor: Processor, prompt_ids: list[int], images: list[bytes]
) -> tuple[list[int], list[Media]]:
    """Return the token IDs with each image's placeholder repeated, and the processed images.

    Raises ApiError unless ``prompt_ids`` has one placeholder per image.
    """
    placeholders = (
        prompt_ids.count(processor.placeholder) if processor.placeholder is not None else 0
    )
    if placeholders != len(images):
        raise make_invalid_error(
            f"the messages have {len(images)} images but {placeholders} image placeholders: remove"
            " the model's placeholder text from the messages",
            "messages",
        )
    try:
        processed = [await reader.read(processor, data) for data in images]
    except MediaError as error:
        raise make_invalid_error(str(error), "messages", error.code) from None
    except QueueFullError as error:
        raise errors.convert_exception(error) from None
    prompt: list[int] = []
    media: list[Media] = []
    for token in prompt_ids:
        if token != processor.placeholder:
            prompt.append(token)
            continue
        item = processed[len(media)].to_media(len(prompt), processor.placeholders, processor.tokens)
        media.append(item)
        prompt += [token] * processor.placeholders
    return prompt, media
