"""Which samples of a sound a model can hear.

Tests ``multimodal/audio.py``.
"""

from __future__ import annotations

import io

import numpy as np
import pytest
import soundfile

from plimsoll_engine.multimodal import audio
from plimsoll_engine.multimodal.processor import MediaError

RATE = 16_000


def constant(value: float, channels: int = 1) -> bytes:
    file = io.BytesIO()
    samples = np.full((RATE // 10, channels), value, np.float32)
    soundfile.write(file, samples, RATE, format="WAV", subtype="FLOAT")
    return file.getvalue()


@pytest.mark.parametrize("value", [0.0, 1.0, -32_768.0])
def test_samples_of_any_usual_scale_are_taken(value: float) -> None:
    assert (audio.decode(constant(value, 2), RATE) == value).all()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30, -3e38])
def test_samples_whose_spectrum_has_no_end_are_refused(value: float) -> None:
    with pytest.raises(MediaError, match="scale it to 1") as told:
        audio.decode(constant(value, 8), RATE)
    assert told.value.code == "invalid_audio"
