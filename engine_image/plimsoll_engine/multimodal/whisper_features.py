"""Audio processor for Whisper: log-mel spectrograms as in the model's paper."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from plimsoll_engine.multimodal import audio
from plimsoll_engine.multimodal.json_file import JsonFile, hash_content, hash_settings
from plimsoll_engine.multimodal.processor import MediaKind, ProcessedMedia

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
MAX_FREQUENCY_HZ = 8000.0
# Avoids the logarithm of 0.
MIN_POWER = 1e-10
# Values this far below the peak (80 dB) are clipped.
DYNAMIC_RANGE_DECADES = 8.0


class WhisperProcessor:
    """Audio processor of Whisper checkpoints."""

    kind: MediaKind = "audio"
    placeholder: int | None = None
    placeholders = 0

    def __init__(self, folder: Path) -> None:
        config = JsonFile(folder / "config.json")
        settings = JsonFile(folder / "preprocessor_config.json")
        if settings.get("do_normalize", False) or settings.get("dither", 0.0):
            raise settings.make_error("do_normalize, dither", "must be false and 0, respectively")
        self.rate = settings.get_positive_int("sampling_rate", 16_000)
        self._hop = settings.get_positive_int("hop_length", 160)
        self._n_fft = settings.get_positive_int("n_fft", 400)
        # Samples per window.
        self.window = settings.get_positive_int("chunk_length", 30) * self.rate
        bins = settings.get_positive_int("feature_size", 80)
        self.tokens = config.get_positive_int("max_source_positions")
        frames = self.window // self._hop
        if bins != config.get_positive_int("num_mel_bins") or frames != 2 * self.tokens:
            raise settings.make_error(
                "feature_size, chunk_length",
                "must match num_mel_bins and max_source_positions in config.json",
            )
        self.shape = [bins, frames]
        self._hann = np.hanning(self._n_fft + 1)[:-1].astype(np.float32)
        self._mel = build_mel_filters(bins, self._n_fft, self.rate)
        self._settings = hash_settings("whisper", self.rate, self._hop, self._n_fft, self.shape)

    def hash_file(self, data: bytes) -> bytes:
        """Return the cache key of an audio file with these settings."""
        return hash_content(self._settings, data)

    def process(self, data: bytes) -> ProcessedMedia:
        """Return the features of the file's first window. Raises MediaError."""
        return self.process_window(audio.decode(data, self.rate)[: self.window])

    def process_windows(self, data: bytes) -> list[tuple[float, ProcessedMedia]]:
        """Return duration in seconds and features of each window. Raises MediaError."""
        samples = audio.decode(data, self.rate)
        return [
            (len(piece) / self.rate, self.process_window(piece))
            for piece in audio.split_samples(samples, self.window, self.rate)
        ]

    def process_window(self, samples: Floats) -> ProcessedMedia:
        """Return the features of ``samples``, which must fit into one window."""
        data = self.compute_features(samples).tobytes()
        return ProcessedMedia("audio", self.hash_file(samples.tobytes()), self.shape, data)

    def compute_features(self, samples: Floats) -> Floats:
        """Return the spectrogram [mel bins, frames] of ``samples`` [n], padded with silence."""
        padded = np.zeros(self.window, np.float32)
        padded[: len(samples)] = samples
        edge = self._n_fft // 2
        padded = np.pad(padded, edge, mode="reflect")
        frames = np.lib.stride_tricks.sliding_window_view(padded, self._n_fft)[:: self._hop]
        spectrum = np.fft.rfft(frames[: self.shape[1]] * self._hann, axis=1)
        power = (spectrum.real**2 + spectrum.imag**2).astype(np.float32)
        mel = np.log10(np.maximum(self._mel @ power.T, MIN_POWER))
        mel = np.maximum(mel, mel.max() - DYNAMIC_RANGE_DECADES)
        return np.ascontiguousarray((mel + 4.0) / 4.0, dtype="<f4")


def build_mel_filters(num_bins: int, n_fft: int, rate_hz: int) -> Floats:
    """Return triangular filters [num_bins, n_fft // 2 + 1] on Slaney's mel scale."""
    edges = _convert_to_hertz(np.linspace(0.0, _convert_to_mel(MAX_FREQUENCY_HZ), num_bins + 2))
    frequencies = np.linspace(0.0, rate_hz / 2, n_fft // 2 + 1)
    widths = np.diff(edges)
    distance = edges[:, None] - frequencies[None, :]
    rising = -distance[:-2] / widths[:-1, None]
    falling = distance[2:] / widths[1:, None]
    triangles = np.maximum(0.0, np.minimum(rising, falling))
    heights = (2.0 / (edges[2:] - edges[:-2]))[:, None]
    return np.asarray(triangles * heights, dtype=np.float32)


_HZ_PER_LINEAR_MEL = 200.0 / 3.0
_LINEAR_SCALE_END_HZ = 1000.0
_LOG_FREQUENCY_PER_MEL = np.log(6.4) / 27.0


def _convert_to_mel(hertz: float) -> float:
    return float(
        _LINEAR_SCALE_END_HZ / _HZ_PER_LINEAR_MEL
        + np.log(hertz / _LINEAR_SCALE_END_HZ) / _LOG_FREQUENCY_PER_MEL
    )


def _convert_to_hertz(
    mel: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    start = _LINEAR_SCALE_END_HZ / _HZ_PER_LINEAR_MEL
    return np.where(
        mel < start,
        mel * _HZ_PER_LINEAR_MEL,
        _LINEAR_SCALE_END_HZ * np.exp(_LOG_FREQUENCY_PER_MEL * (mel - start)),
    )
