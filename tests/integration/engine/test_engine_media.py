"""Images and sounds through real engine processes, by the real OpenAI client."""

from __future__ import annotations

import base64
import io
import json
import math
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import soundfile
from PIL import Image

from tests.integration.engine.conftest import Engine

MODEL = "tiny"
RATE = 16_000


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two tiny checkpoints, each in a folder of its kind."""
    folder = tmp_path_factory.mktemp("media")
    command = [sys.executable, "-m", "plimsoll_faults.models.tiny_media", "all", str(folder)]
    subprocess.run(command, check=True, timeout=600)
    return folder


@pytest.fixture(scope="module")
def sees(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    one = Engine(checkpoints / "llava", tmp_path_factory.mktemp("run-llava"), warm=True)
    try:
        yield one.wait_ready()
    finally:
        one.end()


@pytest.fixture(scope="module")
def hears(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    one = Engine(checkpoints / "whisper", tmp_path_factory.mktemp("run-whisper"), warm=True)
    try:
        yield one.wait_ready()
    finally:
        one.end()


def png(width: int, height: int, seed: int = 1) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def header(width: int, height: int) -> bytes:
    """A PNG that says its size and ends where its pixels would begin."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + check

    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", b"")


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def messages(*urls: str, text: str = "What is this?") -> list[Any]:
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


def ask(engine: Any, *urls: str, **fields: Any) -> Any:
    fields = {"max_tokens": 12, "temperature": 0, **fields}
    return engine.client.chat.completions.create(model=MODEL, messages=messages(*urls), **fields)


def test_an_image_is_seen_and_the_same_again(sees: Any) -> None:
    first = ask(sees, data_url(png(90, 60)))
    again = ask(sees, data_url(png(90, 60)))
    other = ask(sees, data_url(png(90, 60, seed=2)))
    assert first.choices[0].message.content == again.choices[0].message.content
    assert first.choices[0].message.content != other.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    two = ask(sees, data_url(png(90, 60)), data_url(png(90, 60, seed=2)))
    assert two.usage.prompt_tokens == first.usage.prompt_tokens + 16
    sees.clean()


def test_an_image_of_one_pixel_is_seen(sees: Any) -> None:
    assert ask(sees, data_url(png(1, 1))).usage.completion_tokens == 12
    sees.clean()


@pytest.mark.parametrize(
    ("url", "code"),
    [
        (data_url(header(10_000, 10_000)), "image_too_large"),
        (data_url(header(2_000, 5)), "invalid_image"),
        (data_url(png(40, 40)[:300]), "invalid_image"),
        (data_url(b"no image"), "invalid_image"),
        ("data:image/png;base64,", "invalid_image"),
        ("data:image/png;base64,%%%", "invalid_base64"),
        ("https://example.org/ship.png", "remote_url_refused"),
        ("file:///etc/passwd", "invalid_url"),
        (data_url(bytes(21 << 20)), "image_too_large"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_image_is_refused(sees: Any, url: str, code: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(sees, url)
    assert (caught.value.code, caught.value.param) == (code, "messages")
    assert ask(sees, data_url(png(8, 8))).usage.completion_tokens == 12
    sees.clean()


def test_a_placeholder_in_the_text_stands_for_no_image(sees: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="1 image placeholders"):
        sees.client.chat.completions.create(
            model=MODEL, messages=messages(text="<image> hello"), max_tokens=4
        )
    sees.clean()


def test_a_text_model_refuses_images_and_sounds(engine: Any) -> None:
    with pytest.raises(openai.BadRequestError):
        ask(engine, data_url(png(8, 8)))
    with pytest.raises(openai.BadRequestError, match="does not accept audio"):
        transcribe(engine, sound(0.5))
    engine.clean()


def test_images_are_carried_over_a_restart(sees: Any) -> None:
    asked = {"max_tokens": 400, "extra_body": {"ignore_eos": True}}
    url = data_url(png(70, 70, seed=7))
    whole = ask(sees, url, **asked).choices[0].message.content
    text = ""
    with ask(sees, url, stream=True, **asked) as chunks:
        for number, chunk in enumerate(chunks):
            if number == 3:
                sees.begin("restart", "restart-media", deadline_s=20, scope="worker")
            text += chunk.choices[0].delta.content or ""
    assert sees.finish("restart-media")["state"] == "succeeded"
    assert text == whole
    sees.clean()
    assert ask(sees, url).usage.completion_tokens == 12  # the new worker lacks nothing
    sees.clean()


def test_a_trim_empties_both_caches_and_the_next_request_is_served(sees: Any) -> None:
    url = data_url(png(33, 44, seed=9))
    before = ask(sees, url).choices[0].message.content
    sees.begin("trim", "trim-media")
    trimmed = sees.finish("trim-media")
    steps = {step["name"]: step for step in trimmed["steps"]}
    for name in ("processor_cache_flush", "receiver_cache_flush"):
        assert steps[name]["before_bytes"] >= 3 * 56 * 56 * 4
        assert steps[name]["after_bytes"] == 0
    sees.clean()
    assert ask(sees, url).choices[0].message.content == before
    sees.clean()


def sound(seconds: float, rate: int = RATE, kind: str = "WAV", seed: int = 1) -> bytes:
    time = np.arange(int(rate * seconds)) / rate
    tones = np.random.default_rng(seed).uniform(200, 3_000, 4)
    wave = sum(np.sin(2 * math.pi * tone * time) for tone in tones) / 8
    file = io.BytesIO()
    soundfile.write(file, np.asarray(wave, np.float32), rate, format=kind)
    return file.getvalue()


def transcribe(engine: Any, data: bytes, **fields: Any) -> Any:
    fields = {"response_format": "json", **fields}
    return engine.client.audio.transcriptions.create(model=MODEL, file=("sound", data), **fields)


@pytest.mark.parametrize("kind", ["WAV", pytest.param("FLAC", marks=pytest.mark.long), "MP3"])
def test_a_sound_has_a_text(hears: Any, kind: str) -> None:
    data = sound(0.8, 22_050, kind)
    text = transcribe(hears, data).text
    assert text
    assert transcribe(hears, data).text == text
    assert transcribe(hears, sound(0.8, seed=2)).text != text
    hears.clean()


def test_formats_of_a_transcription(hears: Any) -> None:
    data = sound(2.5)  # three windows of the tiny model
    text = transcribe(hears, data).text
    assert transcribe(hears, data, response_format="text").strip() == text
    raw = hears.client.audio.transcriptions.with_raw_response.create(
        model=MODEL, file=("sound", data), response_format="text"
    )
    assert raw.headers["content-type"] == "text/plain; charset=utf-8"
    whole = transcribe(hears, data, response_format="verbose_json", language="en")
    assert whole.text == text
    assert whole.duration == pytest.approx(2.5)
    assert len(whole.segments) >= 3
    assert whole.segments[0].start == 0
    assert whole.segments[-1].end == pytest.approx(2.5)
    hears.clean()


@pytest.mark.parametrize(
    ("data", "fields", "param", "code"),
    [
        (b"", {}, "file", "invalid_audio"),
        (b"no sound at all", {}, "file", "invalid_audio"),
        (sound(0.5)[:30], {}, "file", "invalid_audio"),
        (sound(601, 1_000), {}, "file", "audio_too_large"),
        (sound(0.5), {"language": "xx"}, "language", "invalid_value"),
        (sound(0.5), {"temperature": 7}, "temperature", "invalid_value"),
        (sound(0.5), {"response_format": "srt"}, "response_format", "invalid_value"),
        (sound(0.5), {"prompt": "Ahoy"}, "prompt", "unsupported_value"),
    ],
    ids=["empty", "text", "cut", "long", "language", "temperature", "format", "prompt"],
)
def test_a_bad_transcription_is_refused(
    hears: Any, data: bytes, fields: dict[str, Any], param: str, code: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        transcribe(hears, data, **fields)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert transcribe(hears, sound(0.5)).text
    hears.clean()


def test_a_sound_of_too_many_bytes_is_refused(hears: Any) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        transcribe(hears, bytes(27 << 20))
    assert (caught.value.status_code, caught.value.code) == (413, "body_too_large")
    hears.clean()


def test_a_malformed_form_is_refused(hears: Any) -> None:
    for kind in ("application/json", "multipart/form-data", "multipart/form-data; boundary=x"):
        status, body = hears.call(
            "POST", hears.url + "/v1/audio/transcriptions", b"{}", {"Content-Type": kind}, 10
        )
        assert status == 400, body
    hears.clean()
    for line in hears.log.read_text().splitlines():
        assert json.loads(line)["message"]  # no warning of the parser beside the log


def test_a_transcriber_does_not_chat(hears: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="transcri"):
        hears.client.completions.create(model=MODEL, prompt="Hello", max_tokens=2)
    hears.clean()
