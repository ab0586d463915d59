"""From a sound file to samples: bounded before anything is decoded."""

from __future__ import annotations

import io

import numpy as np
import soundfile
import soxr

from plimsoll_engine.multimodal.processor import MediaError
from plimsoll_engine.process.addresses import without_addresses

FORMATS = ("WAV", "WAVEX", "FLAC", "MP3", "OGG")
MAX_BYTES = 25 << 20
"""Of one file, as OpenAI takes them."""
MAX_SECONDS = 600.0
MAX_CHANNELS = 8
MAX_SAMPLES = 60_000_000
"""Of all channels, decoded: 240 MB. Ten minutes of stereo at 48 kHz are 58 million."""
RATES = (1_000, 384_000)

Samples = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


def decode(data: bytes, rate: int) -> Samples:
    """Mono samples float32 [n] at ``rate`` Hz. Raises :class:`MediaError`.

    Length and channels are checked from the file's header, before a sample is decoded.
    """
    if not data:
        raise MediaError("the audio file is empty", "invalid_audio")
    if len(data) > MAX_BYTES:
        raise MediaError(f"the audio file is larger than {MAX_BYTES} bytes", "audio_too_large")
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            _check(file)
            frames = file.read(int(MAX_SECONDS * file.samplerate), dtype="float32", always_2d=True)
            own_rate = file.samplerate
    except (soundfile.SoundFileError, RuntimeError, ValueError, TypeError, OSError) as error:
        # libsndfile's own words: the exception puts the name of our buffer before them.
        why = without_addresses(getattr(error, "error_string", str(error))).rstrip(".")
        raise MediaError(
            f"the audio cannot be decoded ({why}); formats are wav, flac, mp3 and ogg",
            "invalid_audio",
        ) from None
    if not len(frames):
        raise MediaError("the audio file holds no sound", "invalid_audio")
    mono: Samples = frames.mean(axis=1, dtype=np.float32)
    if not np.isfinite(mono).all():
        raise MediaError("the audio holds samples that are no numbers", "invalid_audio")
    if own_rate == rate:
        return mono
    resampled: Samples = soxr.resample(mono, own_rate, rate).astype(np.float32, copy=False)
    return resampled


def _check(file: soundfile.SoundFile) -> None:
    if file.format not in FORMATS:
        raise MediaError(
            f"audio of format {file.format} is not taken; formats are wav, flac, mp3 and ogg",
            "invalid_audio",
        )
    if not RATES[0] <= file.samplerate <= RATES[1]:
        raise MediaError(
            f"the audio has {file.samplerate} samples a second; from {RATES[0]} to {RATES[1]} are"
            " taken",
            "invalid_audio",
        )
    if file.channels > MAX_CHANNELS:
        raise MediaError(
            f"the audio has {file.channels} channels, at most {MAX_CHANNELS} are taken",
            "invalid_audio",
        )
    seconds = file.frames / file.samplerate
    if seconds > MAX_SECONDS:
        raise MediaError(
            f"the audio is {seconds:.0f} s long; at most {MAX_SECONDS:.0f} s are taken: cut it",
            "audio_too_large",
        )
    if file.frames * file.channels > MAX_SAMPLES:
        raise MediaError(
            f"the audio has {file.frames} samples in {file.channels} channels; at most"
            f" {MAX_SAMPLES} in all are decoded: send one channel of 16 kHz",
            "audio_too_large",
        )


def windows(samples: Samples, size: int, rate: int) -> list[Samples]:
    """Yield ``samples`` in pieces of at most ``size``.

    Each is cut at the quietest tenth of a second of its last fifth, so that few words are split.
    """
    pieces: list[Samples] = []
    quiet = max(1, rate // 10)
    while len(samples) > size:
        tail = samples[size - size // 5 : size]
        energy = np.convolve(tail**2, np.ones(quiet, np.float32), "valid")
        cut = size - size // 5 + int(energy.argmin()) + quiet // 2
        pieces.append(samples[:cut])
        samples = samples[cut:]
    pieces.append(samples)
    return pieces
