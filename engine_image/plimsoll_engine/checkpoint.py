"""Small files of a checkpoint that both the frontend and the worker read."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from plimsoll_engine.errors import UsageError


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in ``file``, empty where there is none; UsageError for anything else."""
    try:
        data = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise UsageError(f"{file}: expected a JSON object")
    return data


def model_vocab_size(model: Path) -> int:
    """Tokens that the model knows, of config.json; the largest number where it does not say."""
    config = read_json(model / "config.json")
    text = config.get("text_config")
    size = (text if isinstance(text, dict) else config).get("vocab_size")
    return size if isinstance(size, int) else sys.maxsize


def eos_ids(model: Path) -> list[int]:
    """Return the tokens that end a text: of generation_config.json, else of config.json.

    UsageError where they are no token numbers.
    """
    for name in ("generation_config.json", "config.json"):
        value = read_json(model / name).get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(isinstance(one, int) for one in ids):
                raise UsageError(
                    f"{model / name}: field eos_token_id: {value!r} is no token number"
                )
            return list(ids)
    return []
