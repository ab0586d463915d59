"""Image and sound files, through their libraries, up to the tensor."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from PIL import Image

from plimsoll_engine.multimodal.clip import ClipProcessor
from plimsoll_engine.multimodal.processor import MediaError
from plimsoll_engine.multimodal.whisper_features import WhisperProcessor
from tests.fuzz.targets import make_models
from tests.fuzz.watched import Bounds, Target

IMAGES = Bounds(cpu_s=5.0, growth_bytes=512 << 20)
"""A small file may be an image of MAX_PIXELS: 160 MB as RGBA and 120 MB as RGB at a time, and
seconds to inflate, in one of two threads beside the loop."""
SOUNDS = Bounds(cpu_s=10.0, growth_bytes=768 << 20)
"""A small file may be MAX_SAMPLES of silence: 240 MB, then once more while it is mixed down, and
ten minutes of it are 600 windows of this model."""


def make(name: str, folder: Path) -> Target:
    make_models(folder)
    if name == "images":
        image = ClipProcessor(folder / "llava")
        return Target(_taking(image.process), ("IHDR", "IDAT", "PLTE", "Exif", "RIFF", "WEBP"),
                      _large_images, IMAGES)  # fmt: skip
    sound = WhisperProcessor(folder / "whisper")
    marks = ("RIFF", "WAVE", "fmt ", "data", "fLaC", "OggS", "ID3")
    return Target(_taking(sound.process_windows), marks,
                  _large_sounds, SOUNDS)  # fmt: skip


def _taking(take: Callable[[bytes], Any]) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        try:
            take(data)
        except MediaError as error:
            text = str(error)
            assert " object at " not in text, text
            assert "0x" not in text, text

    return run


def _large_images() -> Iterator[bytes]:
    for kind, mode, side in (("PNG", "RGBA", 6300), ("GIF", "P", 6300), ("WEBP", "RGB", 4000)):
        file = io.BytesIO()
        Image.new(mode, (side, side)).save(file, kind)
        yield file.getvalue()


def _large_sounds() -> Iterator[bytes]:
    """Ten minutes of silence."""
    for kind, rate, channels in (("FLAC", 8000, 1), ("OGG", 8000, 1), ("FLAC", 48_000, 2)):
        file = io.BytesIO()
        second = np.zeros((rate, channels), np.float32)
        with soundfile.SoundFile(file, "w", rate, channels, format=kind) as writer:
            for _ in range(590):  # one write of all crashes libsndfile's Vorbis encoder
                writer.write(second)
        yield file.getvalue()
