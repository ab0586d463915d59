"""What ``/tokenizer_info`` tells: the checkpoint's settings of its tokenizer, as in vLLM."""

from __future__ import annotations

from pathlib import Path

import msgspec

from plimsoll_engine.checkpoint import read_json


def of(model: Path, chat_template: str | None) -> bytes:
    """Return the JSON object of ``tokenizer_config.json``, with the chat template in use.

    Raises UsageError where the file cannot be read.
    """
    settings = read_json(model / "tokenizer_config.json")
    told = {"tokenizer_class": "PreTrainedTokenizerFast"} | settings
    return msgspec.json.encode(told | {"chat_template": chat_template})
