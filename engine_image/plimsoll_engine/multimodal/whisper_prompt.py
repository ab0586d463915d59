"""The tokens that ask a Whisper model for the text of a sound."""

from __future__ import annotations

from pathlib import Path

from plimsoll_engine.multimodal.json_file import JsonFile

DEFAULT_LANGUAGE = "en"


class WhisperPrompt:
    """From ``generation_config.json`` of a checkpoint; UnsupportedError names a field."""

    def __init__(self, folder: Path) -> None:
        own = JsonFile(folder / "generation_config.json")
        self._start = own.integer("decoder_start_token_id")
        self._plain = own.integer("no_timestamps_token_id")
        self._task: list[int] = []
        self._languages: dict[str, int] = {}
        if own.get("is_multilingual", False):
            self._task = [own.integer("task_to_id.transcribe")]
            languages = own.get("lang_to_id")
            if not isinstance(languages, dict) or not languages:
                raise own.wrong("lang_to_id", "a multilingual model needs its languages")
            self._languages = {name.strip("<|>"): token for name, token in languages.items()}
        suppressed = own.get("suppress_tokens", [])
        if not isinstance(suppressed, list):
            raise own.wrong("suppress_tokens", "expected a list of tokens")
        self.suppressed: list[int] = suppressed
        """Tokens that are never text."""

    @property
    def languages(self) -> list[str]:
        """ISO 639-1 codes; an English-only model knows one."""
        return sorted(self._languages) or [DEFAULT_LANGUAGE]

    def ids(self, language: str) -> list[int]:
        """Return the prompt for speech in ``language``, which is one of :attr:`languages`."""
        spoken = [self._languages[language]] if self._languages else []
        return [self._start, *spoken, *self._task, self._plain]
