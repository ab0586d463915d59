"""Prompts that make a Whisper model transcribe audio."""

from __future__ import annotations

from pathlib import Path

from plimsoll_engine.multimodal.json_file import JsonFile

DEFAULT_LANGUAGE = "en"


class WhisperPrompt:
    """Builder of transcription prompts."""

    def __init__(self, folder: Path) -> None:
        settings = JsonFile(folder / "generation_config.json")
        self._start = settings.get_positive_int("decoder_start_token_id")
        self._plain = settings.get_positive_int("no_timestamps_token_id")
        self._task: list[int] = []
        self._languages: dict[str, int] = {}
        if settings.get("is_multilingual", False):
            self._task = [settings.get_positive_int("task_to_id.transcribe")]
            languages = settings.get("lang_to_id")
            if not isinstance(languages, dict) or not languages:
                raise settings.make_error(
                    "lang_to_id", "must have the languages of a multilingual model"
                )
            self._languages = {name.strip("<|>"): token for name, token in languages.items()}
        suppressed = settings.get("suppress_tokens", [])
        if not isinstance(suppressed, list):
            raise settings.make_error("suppress_tokens", "must be a list of tokens")
        # IDs of tokens that must not be generated.
        self.suppressed: list[int] = suppressed

    @property
    def languages(self) -> list[str]:
        """ISO 639-1 codes of the supported languages."""
        return sorted(self._languages) or [DEFAULT_LANGUAGE]

    def build_token_ids(self, language: str) -> list[int]:
        """Return the prompt for ``language``, which must be in :attr:`languages`."""
        spoken = [self._languages[language]] if self._languages else []
        return [self._start, *spoken, *self._task, self._plain]
