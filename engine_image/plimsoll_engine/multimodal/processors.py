"""Which processors a checkpoint needs, by its ``config.json``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from plimsoll_engine.multimodal.json_file import JsonFile

if TYPE_CHECKING:
    from plimsoll_engine.multimodal.clip import ClipProcessor
    from plimsoll_engine.multimodal.whisper_features import WhisperProcessor
    from plimsoll_engine.multimodal.whisper_prompt import WhisperPrompt


@dataclass(frozen=True)
class Processors:
    """What the model takes beside text."""

    image: ClipProcessor | None = None
    audio: WhisperProcessor | None = None
    speech: WhisperPrompt | None = None
    """How the model is asked for a text, where it takes audio."""


def processors(folder: Path) -> Processors:
    """Those of the checkpoint in ``folder``; UnsupportedError names the file and field at fault.

    The libraries behind them are imported only where they are needed: a text model's frontend stays
    as small as it was.
    """
    kind = JsonFile(folder / "config.json").get("model_type")
    if kind == "llava":
        from plimsoll_engine.multimodal.clip import ClipProcessor

        return Processors(image=ClipProcessor(folder))
    if kind == "whisper":
        from plimsoll_engine.multimodal.whisper_features import WhisperProcessor
        from plimsoll_engine.multimodal.whisper_prompt import WhisperPrompt

        return Processors(audio=WhisperProcessor(folder), speech=WhisperPrompt(folder))
    return Processors()
