"""Audio processor for Whisper: log-mel spectrograms of fixed windows.

It follows the model's paper and reference code. A Hann window of ``n_fft`` samples every ``hop``
gives the power spectrum. Slaney's mel filters with area normalisation and log10 follow, clipped 8
(80 dB) below the peak.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from plimsoll_engine.multimodal import audio
from plimsoll_engine.multimodal.json_file import JsonFile, content_key, settings_key
from plimsoll_engine.multimodal.processor import Kind, Processed

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
MAX_HZ = 8000.0
MIN_POWER = 1e-10
DYNAMIC_RANGE = 8.0


class WhisperProcessor:
    """Audio processor of Whisper checkpoints.

    Raises UnsupportedError that names the unsupported field.
    """

    kind: Kind = "audio"
    placeholder: int | None = None
    placeholders = 0

    def __init__(self, folder: Path) -> None:
        config = JsonFile(folder / "config.json")
        settings = JsonFile(folder / "preprocessor_config.json")
        if settings.get("do_normalize", False) or settings.get("dither", 0.0):
            raise settings.error("do_normalize, dither", "only false and 0 are supported")
        self.rate = settings.integer("sampling_rate", 16_000)
        self._hop = settings.integer("hop_length", 160)
        self._n_fft = settings.integer("n_fft", 400)
        self.window = settings.integer("chunk_length", 30) * self.rate
        """Samples in a window."""
        bins = settings.integer("feature_size", 80)
        self.tokens = config.integer("max_source_positions")
        frames = self.window // self._hop
        if bins != config.integer("num_mel_bins") or frames != 2 * self.tokens:
            raise settings.error(
                "feature_size, chunk_length",
                "these values do not match num_mel_bins and max_source_positions of config.json",
            )
        self.shape = [bins, frames]
        self._hann = np.hanning(self._n_fft + 1)[:-1].astype(np.float32)
        self._mel = mel_filters(bins, self._n_fft, self.rate)
        self._settings = settings_key("whisper", self.rate, self._hop, self._n_fft, self.shape)

    def key(self, data: bytes) -> bytes:
        """Return the cache key of an audio file: a hash of its content and the processing."""
        return content_key(self._settings, data)

    def process(self, data: bytes) -> Processed:
        """Return the features of the file's first window. Raises MediaError."""
        return self.process_window(audio.decode(data, self.rate)[: self.window])

    def windows(self, data: bytes) -> list[tuple[float, Processed]]:
        """Return the seconds and the features of each window of the file. Raises MediaError."""
        samples = audio.decode(data, self.rate)
        return [
            (len(piece) / self.rate, self.process_window(piece))
            for piece in audio.split(samples, self.window, self.rate)
        ]

    def process_window(self, samples: Floats) -> Processed:
        """Return the features of at most piece window of samples; their hash is the key."""
        data = self.features(samples).tobytes()
        return Processed("audio", self.key(samples.tobytes()), self.shape, data)

    def features(self, samples: Floats) -> Floats:
        """Return the spectrogram [mel bins, frames] of ``samples`` [n], padded with silence."""
        padded = np.zeros(self.window, np.float32)
        padded[: len(samples)] = samples
        edge = self._n_fft // 2
        padded = np.pad(padded, edge, mode="reflect")
        frames = np.lib.stride_tricks.sliding_window_view(padded, self._n_fft)[:: self._hop]
        spectrum = np.fft.rfft(frames[: self.shape[1]] * self._hann, axis=1)
        power = (spectrum.real**2 + spectrum.imag**2).astype(np.float32)
        mel = np.log10(np.maximum(self._mel @ power.T, MIN_POWER))
        mel = np.maximum(mel, mel.max() - DYNAMIC_RANGE)
        return np.ascontiguousarray((mel + 4.0) / 4.0, dtype="<f4")


def mel_filters(bins: int, n_fft: int, rate: int) -> Floats:
    """Return float [bins, n_fft // 2 + 1]: triangular filters on Slaney's mel scale.

    The scale is linear below 1 kHz and logarithmic above. The filters span 0 to 8 kHz, each of area
    1.
    """
    edges = _hertz(np.linspace(0.0, _mel(MAX_HZ), bins + 2))
    frequencies = np.linspace(0.0, rate / 2, n_fft // 2 + 1)
    widths = np.diff(edges)
    distance = edges[:, None] - frequencies[None, :]
    rising = -distance[:-2] / widths[:-1, None]
    falling = distance[2:] / widths[1:, None]
    triangles = np.maximum(0.0, np.minimum(rising, falling))
    heights = (2.0 / (edges[2:] - edges[:-2]))[:, None]
    return np.asarray(triangles * heights, dtype=np.float32)


_LINEAR_HZ = 200.0 / 3.0
_BREAK_HZ = 1000.0
_LOG_STEP = np.log(6.4) / 27.0


def _mel(hertz: float) -> float:
    return float(_BREAK_HZ / _LINEAR_HZ + np.log(hertz / _BREAK_HZ) / _LOG_STEP)


def _hertz(
    mel: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    start = _BREAK_HZ / _LINEAR_HZ
    return np.where(mel < start, mel * _LINEAR_HZ, _BREAK_HZ * np.exp(_LOG_STEP * (mel - start)))
