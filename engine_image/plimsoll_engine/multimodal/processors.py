"""Select the media processors of a checkpoint."""

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
    """Media processors of a model; None for each kind of media that it does not accept."""

    image: ClipProcessor | None = None
    audio: WhisperProcessor | None = None
    speech: WhisperPrompt | None = None


def load_processors(folder: Path) -> Processors:
    """Import and return the media processors that the checkpoint in ``folder`` needs.

    Raises UnsupportedCheckpointError.
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
