"""``/v1/audio/transcriptions``: a sound file to its text, window by window.

The windows of a file are requests of their own that run side by side: none depends on the text of
the one before, and a carried one goes on like any other.
"""

from __future__ import annotations

import asyncio
import math
import secrets

import msgspec
from starlette.responses import Response

from plimsoll_engine.api import batch, errors
from plimsoll_engine.api.answer import Answer
from plimsoll_engine.api.batch import Batch
from plimsoll_engine.api.errors import ApiError, invalid
from plimsoll_engine.api.responses import CompletionChoice
from plimsoll_engine.frontend.async_engine import AsyncEngine
from plimsoll_engine.frontend.requests.request_log import (
    Admission,
    Generation,
    QueueFull,
    TextRules,
)
from plimsoll_engine.messages.worker_ipc import Sampling
from plimsoll_engine.multimodal.processor import MediaError
from plimsoll_engine.multimodal.whisper_prompt import DEFAULT_LANGUAGE, WhisperPrompt

FORMATS = ("json", "text", "verbose_json")
FIELDS = ("model", "language", "response_format", "temperature", "stream")
BANNED = -1e30
"""Added to the logit of a token that is never text; finite, so that sampling stays defined."""


class Transcript(Answer):
    """The text of all windows, which last ``seconds`` each, in one of :data:`FORMATS`."""

    def __init__(
        self, engine: AsyncEngine, batch: Batch, seconds: list[float], language: str, kind: str
    ) -> None:
        text_of = engine.tokenizer.token_text
        choices = [CompletionChoice(i, text_of) for i in range(len(batch.generations))]
        super().__init__(engine, batch, choices, stream=False, usage=False)
        self._seconds = seconds
        self._language = language
        self._kind = kind
        if kind == "text":
            self.whole_type = b"text/plain; charset=utf-8"

    def encoded(self) -> bytes:
        """Return the texts of all windows as one body, in the format that the request named."""
        texts = [
            str(whole["text"]).strip() for whole in (choice.whole() for choice in self._choices)
        ]
        text = " ".join(filter(None, texts))
        if self._kind == "text":
            return text.encode() + b"\n"
        if self._kind == "json":
            return msgspec.json.encode({"text": text})
        segments, start = [], 0.0
        for number, (piece, length) in enumerate(zip(texts, self._seconds, strict=True)):
            segments.append({"id": number, "start": start, "end": start + length, "text": piece})
            start += length
        whole = {"task": "transcribe", "language": self._language, "duration": start, "text": text}
        return msgspec.json.encode(whole | {"segments": segments})


async def answer(engine: AsyncEngine, data: bytes, fields: dict[str, str], tenant: str) -> Response:
    """Return the transcription of the sound file ``data``; raise ApiError."""
    batch.check_model(engine, fields.get("model", ""))
    hears, speech = engine.media.processors.audio, engine.media.processors.speech
    if hears is None or speech is None:
        raise invalid("this model takes no audio", "model", "unsupported_value")
    kind, language, temperature = _checked(fields, speech)
    try:
        windows = await engine.media.run(lambda: hears.windows(data))
    except MediaError as error:
        raise invalid(str(error), "file", error.code) from None
    except QueueFull as error:
        raise errors.from_exception(error) from None
    if len(windows) > engine.settings.max_queued:
        raise invalid(
            f"the audio has {len(windows)} windows; this engine takes {engine.settings.max_queued}"
            " requests at a time (--max-queued): cut it",
            "file",
            "audio_too_large",
        )
    ids = speech.ids(language)
    tokenizer = engine.tokenizer
    how = Sampling(
        max_tokens=batch.output_limit(engine, ids, None, "file"),
        temperature=temperature,
        seed=secrets.randbits(63),
        stop_token_ids=list(tokenizer.eos_ids),
        logit_bias={t: BANNED for t in speech.suppressed if 0 <= t < tokenizer.vocab_size},
        min_tokens=1,
    )
    served = engine.settings.served_model_name
    made = Batch(f"transcr-{secrets.token_hex(12)}", 1, [], asyncio.Event(), served)
    admission, text = Admission(tenant=tenant), tokenizer.continuations(ids)
    for number, (_, window) in enumerate(windows):
        media = [window.media(0, hears.placeholders, hears.tokens)]
        name = f"{made.request_id}-{number}"
        made.generations.append(
            Generation(name, ids, how, text(), TextRules(), admission, made.wake, media)
        )
    return Transcript(engine, made, [seconds for seconds, _ in windows], language, kind)


def _checked(fields: dict[str, str], speech: WhisperPrompt) -> tuple[str, str, float]:
    """Format, language and temperature; ApiError names the field that is wrong."""
    for name, value in fields.items():
        if name not in FIELDS and value:
            raise invalid(
                f"the field {name} is not supported: file, {', '.join(FIELDS)} are",
                name,
                "unsupported_value",
            )
    if fields.get("stream", "false").lower() != "false":
        raise invalid("transcriptions cannot be streamed: leave stream out", "stream")
    kind = fields.get("response_format") or "json"
    if kind not in FORMATS:
        raise invalid(
            f"response_format {kind!r} is none of {', '.join(FORMATS)}", "response_format"
        )
    language = fields.get("language") or DEFAULT_LANGUAGE
    if language not in speech.languages:
        raise invalid(f"language {language!r} is none of {', '.join(speech.languages)}", "language")
    return kind, language, _temperature(fields.get("temperature") or "0")


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise ApiError(
            400, f"temperature {text!r}: a number from 0 to 1", param="temperature",
            code="invalid_value",
        )  # fmt: skip
    return value
