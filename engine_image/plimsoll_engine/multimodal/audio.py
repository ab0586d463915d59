"""Decoder of audio files to mono samples. Limits are checked before decoding."""

from __future__ import annotations

import io

import numpy as np
import soundfile
import soxr

from plimsoll_engine.multimodal.processor import MediaError
from plimsoll_engine.process.addresses import remove_addresses

SUPPORTED_FORMATS = ("WAV", "WAVEX", "FLAC", "MP3", "OGG")
# As in OpenAI's API.
MAX_FILE_BYTES = 25 << 20
MAX_DURATION_S = 600.0
MAX_CHANNELS = 8
# 240 MB for all channels. Ten minutes of stereo at 48 kHz have 58 million samples.
MAX_SAMPLES = 60_000_000
SAMPLE_RATES_HZ = (1_000, 384_000)
# Full scale is 1. The square of a spectrum stays finite far beyond this.
MAX_AMPLITUDE = 1e9

Samples = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


def decode(data: bytes, rate_hz: int) -> Samples:
    """Return an audio file as mono float32 samples [n] at ``rate_hz``. Raises MediaError."""
    if not data:
        raise MediaError("the audio file is empty", "invalid_audio")
    if len(data) > MAX_FILE_BYTES:
        raise MediaError(
            f"the audio file is larger than the maximum of {MAX_FILE_BYTES} bytes: split the file",
            "audio_too_large",
        )
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            _check_header(file)
            frames = file.read(
                int(MAX_DURATION_S * file.samplerate), dtype="float32", always_2d=True
            )
            own_rate = file.samplerate
    except (soundfile.SoundFileError, RuntimeError, ValueError, TypeError, OSError) as error:
        # str(error) would start with the buffer's name; error_string is libsndfile's message.
        why = remove_addresses(getattr(error, "error_string", str(error))).rstrip(".")
        raise MediaError(
            f"cannot decode the audio ({why}): use wav, flac, mp3 or ogg",
            "invalid_audio",
        ) from None
    if not len(frames):
        raise MediaError("the audio file contains no samples", "invalid_audio")
    if not -MAX_AMPLITUDE <= frames.min() <= frames.max() <= MAX_AMPLITUDE:  # false for NaN
        raise MediaError(
            f"the audio has samples that are not numbers from {-MAX_AMPLITUDE:g} to "
            f"{MAX_AMPLITUDE:g}: scale it to 1",
            "invalid_audio",
        )
    mono: Samples = frames.mean(axis=1, dtype=np.float32)
    if own_rate == rate_hz:
        return mono
    resampled: Samples = soxr.resample(mono, own_rate, rate_hz).astype(np.float32, copy=False)
    return resampled


def _check_header(file: soundfile.SoundFile) -> None:
    if file.format not in SUPPORTED_FORMATS:
        raise MediaError(
            f"the audio format {file.format} is not supported: use wav, flac, mp3 or ogg",
            "invalid_audio",
        )
    if not SAMPLE_RATES_HZ[0] <= file.samplerate <= SAMPLE_RATES_HZ[1]:
        raise MediaError(
            f"the sample rate of the audio must be from {SAMPLE_RATES_HZ[0]} to "
            f"{SAMPLE_RATES_HZ[1]} Hz, got {file.samplerate} Hz",
            "invalid_audio",
        )
    if file.channels > MAX_CHANNELS:
        raise MediaError(
            f"the audio must have at most {MAX_CHANNELS} channels, got {file.channels}",
            "invalid_audio",
        )
    seconds = file.frames / file.samplerate
    if seconds > MAX_DURATION_S:
        raise MediaError(
            f"the audio is {seconds:.0f} s long, but the maximum is {MAX_DURATION_S:.0f} s: "
            "split the audio",
            "audio_too_large",
        )
    if file.frames * file.channels > MAX_SAMPLES:
        raise MediaError(
            f"the audio has {file.channels} channels of {file.frames} samples, but the "
            f"maximum is {MAX_SAMPLES} in total: send one channel at 16 kHz",
            "audio_too_large",
        )


def split_samples(samples: Samples, max_samples: int, rate_hz: int) -> list[Samples]:
    """Return ``samples`` [n] in pieces of at most ``max_samples``, cut where it is quiet."""
    pieces: list[Samples] = []
    search = max(1, rate_hz // 10)
    while len(samples) > max_samples:
        tail = samples[max_samples - max_samples // 5 : max_samples]
        energy = np.convolve(tail**2, np.ones(search, np.float32), "valid")
        cut = max_samples - max_samples // 5 + int(energy.argmin()) + search // 2
        pieces.append(samples[:cut])
        samples = samples[cut:]
    pieces.append(samples)
    return pieces
