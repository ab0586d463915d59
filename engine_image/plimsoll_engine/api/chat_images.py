"""Images in the messages of a chat: each becomes placeholder tokens and a tensor."""

from __future__ import annotations

from typing import Any

from plimsoll_engine.api import errors
from plimsoll_engine.api.errors import invalid
from plimsoll_engine.api.protocol import Message, part_text
from plimsoll_engine.frontend.requests.media_reader import MediaReader
from plimsoll_engine.frontend.requests.request_log import QueueFull
from plimsoll_engine.messages.worker_ipc import Media
from plimsoll_engine.multimodal.processor import MediaError, Processor

MAX_IMAGES = 32
"""Of one request; the context bounds them as well."""


def urls(messages: list[Message]) -> list[str]:
    """Return the urls of all image parts, in order. Raises ApiError for a part of another shape."""
    found = []
    for message in messages:
        for part in message.content if isinstance(message.content, list) else []:
            if part.get("type") != "image_url":
                continue
            image = part.get("image_url")
            url = image.get("url") if isinstance(image, dict) else image
            if not isinstance(url, str):
                raise invalid("a part of type image_url has no url", "messages")
            found.append(url)
    return found


def parts(content: list[dict[str, Any]], sees: bool) -> list[dict[str, Any]]:
    """Return a message's content as chat templates read parts; images where the model ``sees``.

    Raises ApiError for a part of another type.
    """
    return [
        {"type": "image"}
        if sees and part.get("type") == "image_url"
        else {"type": "text", "text": part_text(part)}
        for part in content
    ]


def files(urls: list[str]) -> list[bytes]:
    """Return the files in data URLs. Raises ApiError."""
    from plimsoll_engine.multimodal.images import from_data_url  # Pillow: for models that see only

    if len(urls) > MAX_IMAGES:
        raise invalid(f"{len(urls)} images; the limit is {MAX_IMAGES}", "messages")
    try:
        return [from_data_url(url) for url in urls]
    except MediaError as error:
        raise invalid(str(error), "messages", error.code) from None


async def place(
    reader: MediaReader, processor: Processor, ids: list[int], images: list[bytes]
) -> tuple[list[int], list[Media]]:
    """Return the prompt ``ids`` with each image's one placeholder multiplied, and the images.

    The images are files.

    Raises ApiError: the placeholder's text in a message would stand for an image that is not there.
    """
    marked = ids.count(processor.placeholder) if processor.placeholder is not None else 0
    if marked != len(images):
        raise invalid(
            f"the messages have {len(images)} images and {marked} image placeholders: leave the"
            " model's placeholder text out of the messages",
            "messages",
        )
    try:
        read = [await reader.read(processor, data) for data in images]
    except MediaError as error:
        raise invalid(str(error), "messages", error.code) from None
    except QueueFull as error:
        raise errors.from_exception(error) from None
    prompt: list[int] = []
    media: list[Media] = []
    for token in ids:
        if token != processor.placeholder:
            prompt.append(token)
            continue
        item = read[len(media)].media(len(prompt), processor.placeholders, processor.tokens)
        media.append(item)
        prompt += [token] * processor.placeholders
    return prompt, media
