"""``/v1/audio/transcriptions``: transcription of an audio file, window by window.

The windows are independent requests, which run in parallel.
"""

from __future__ import annotations

import asyncio
import math
import secrets

import msgspec
from starlette.responses import Response

from plimsoll_engine.api import batch, errors
from plimsoll_engine.api.answer import GenerationResponse
from plimsoll_engine.api.batch import Batch
from plimsoll_engine.api.errors import ApiError, make_invalid_error
from plimsoll_engine.api.response_bodies import CompletionChoice
from plimsoll_engine.frontend.async_engine import AsyncEngine
from plimsoll_engine.frontend.requests.request_log import (
    Admission,
    Generation,
    QueueFullError,
    StopRules,
)
from plimsoll_engine.messages.worker_ipc import Sampling
from plimsoll_engine.multimodal.processor import MediaError
from plimsoll_engine.multimodal.whisper_prompt import DEFAULT_LANGUAGE, WhisperPrompt

RESPONSE_FORMATS = ("json", "text", "verbose_json")
SUPPORTED_FIELDS = ("model", "language", "response_format", "temperature", "stream")
# Finite, so that sampling stays defined.
SUPPRESSION_LOGIT_BIAS = -1e30


class TranscriptionResponse(GenerationResponse):
    """Response with the text of all windows.

    ``durations_s`` has the duration of each window in seconds.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        batch: Batch,
        durations_s: list[float],
        language: str,
        response_format: str,
    ) -> None:
        get_token_text = engine.tokenizer.decode_token
        choices = [CompletionChoice(i, get_token_text) for i in range(len(batch.generations))]
        super().__init__(engine, batch, choices, stream=False, include_usage=False)
        self._durations_s = durations_s
        self._language = language
        self._kind = response_format
        if response_format == "text":
            self.media_type_whole = b"text/plain; charset=utf-8"

    def encode_whole_response(self) -> bytes:
        """Return the response body with the text of all windows."""
        texts = [
            str(whole["text"]).strip() for whole in (choice.to_object() for choice in self._choices)
        ]
        text = " ".join(filter(None, texts))
        if self._kind == "text":
            return text.encode() + b"\n"
        if self._kind == "json":
            return msgspec.json.encode({"text": text})
        segments, start = [], 0.0
        for number, (piece, length) in enumerate(zip(texts, self._durations_s, strict=True)):
            segments.append({"id": number, "start": start, "end": start + length, "text": piece})
            start += length
        whole = {"task": "transcribe", "language": self._language, "duration": start, "text": text}
        return msgspec.json.encode(whole | {"segments": segments})


async def transcribe(
    engine: AsyncEngine, data: bytes, fields: dict[str, str], tenant: str
) -> Response:
    """Return the response to the audio file ``data`` and the form ``fields``. Raises ApiError."""
    batch.find_requested_adapter(engine, fields.get("model", ""))
    processor, prompt = engine.media.processors.audio, engine.media.processors.speech
    if processor is None or prompt is None:
        raise make_invalid_error("this model does not accept audio", "model", "unsupported_value")
    kind, language, temperature = _parse_fields(fields, prompt)
    try:
        windows = await engine.media.run(lambda: processor.process_windows(data))
    except MediaError as error:
        raise make_invalid_error(str(error), "file", error.code) from None
    except QueueFullError as error:
        raise errors.convert_exception(error) from None
    if len(windows) > engine.settings.max_queued:
        raise make_invalid_error(
            f"the audio has {len(windows)} windows, but the maximum is "
            f"{engine.settings.max_queued} (--max-queued): split the file",
            "file",
            "audio_too_large",
        )
    ids = prompt.build_token_ids(language)
    tokenizer = engine.tokenizer
    params = Sampling(
        max_tokens=batch.compute_output_limit(engine, ids, None, "file"),
        temperature=temperature,
        seed=secrets.randbits(63),
        stop_token_ids=list(tokenizer.eos_ids),
        logit_bias={
            t: SUPPRESSION_LOGIT_BIAS for t in prompt.suppressed if 0 <= t < tokenizer.vocab_size
        },
        min_tokens=1,
    )
    served = engine.settings.served_model_name
    window_batch = Batch(f"transcr-{secrets.token_hex(12)}", 1, [], asyncio.Event(), served)
    admission, text = Admission(tenant=tenant), tokenizer.create_detokenizer_factory(ids)
    for number, (_, window) in enumerate(windows):
        media = [window.to_media(0, processor.placeholders, processor.tokens)]
        name = f"{window_batch.request_id}-{number}"
        window_batch.generations.append(
            Generation(name, ids, params, text(), StopRules(), admission, window_batch.wake, media)
        )
    return TranscriptionResponse(
        engine, window_batch, [seconds for seconds, _ in windows], language, kind
    )


def _parse_fields(fields: dict[str, str], prompt: WhisperPrompt) -> tuple[str, str, float]:
    for name, value in fields.items():
        if name not in SUPPORTED_FIELDS and value:
            raise make_invalid_error(
                f"the field {name} is not supported: use file, {', '.join(SUPPORTED_FIELDS)}",
                name,
                "unsupported_value",
            )
    if fields.get("stream", "false").lower() != "false":
        raise make_invalid_error("transcriptions do not support stream: omit stream", "stream")
    kind = fields.get("response_format") or "json"
    if kind not in RESPONSE_FORMATS:
        raise make_invalid_error(
            f"response_format {kind!r} is not supported: use {', '.join(RESPONSE_FORMATS)}",
            "response_format",
        )
    language = fields.get("language") or DEFAULT_LANGUAGE
    if language not in prompt.languages:
        raise make_invalid_error(
            f"language {language!r} is not supported: use {', '.join(prompt.languages)}", "language"
        )
    return kind, language, _parse_temperature(fields.get("temperature") or "0")


def _parse_temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise ApiError(
            400, f"temperature must be a number from 0 to 1, got {text!r}", param="temperature",
            code="invalid_value",
        )  # fmt: skip
    return value
