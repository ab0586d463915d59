"""Response of ``/tokenizer_info``: the tokenizer's configuration, as in vLLM."""

from __future__ import annotations

from pathlib import Path

import msgspec

from plimsoll_engine.checkpoint import read_json


def read_tokenizer_info(model: Path, chat_template: str | None) -> bytes:
    """Return ``tokenizer_config.json`` and the chat template in use as JSON. Raises UsageError."""
    settings = read_json(model / "tokenizer_config.json")
    info = {"tokenizer_class": "PreTrainedTokenizerFast"} | settings
    return msgspec.json.encode(info | {"chat_template": chat_template})
