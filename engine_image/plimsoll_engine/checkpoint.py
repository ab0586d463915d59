"""Reader of a checkpoint's configuration, tokenizer and chat templates.

If several files define the same value, the precedence is that of transformers and vLLM.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from plimsoll_engine.errors import UsageError

# The library's threads do not help for one text at a time, and prevent forks.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

MODEL_CONFIG_FILE, GENERATION_CONFIG_FILE = "config.json", "generation_config.json"
TOKENIZER_FILE, TOKENIZER_CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
DEFAULT_TEMPLATE_NAME, TOOLS_TEMPLATE_NAME = "default", "tool_use"
# Special tokens that chat templates can use as variables.
TEMPLATE_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
# Minimum and maximum of each sampling default in generation_config.json.
SAMPLING_BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (math.ulp(0.0), 1),
    "top_k": (-1, 1_000_000),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "max_new_tokens": (1, 1 << 31),
}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Configuration, tokenizer and chat templates of a checkpoint.

    Attributes:
        num_tokens: The largest valid token ID plus one.
        special_tokens: Text of each special token, by its name in TEMPLATE_TOKEN_NAMES.
        chat_templates: Source of each chat template, by name.
        sampling_defaults: Values of sampling fields for requests that omit them.
        sources: Files that define ``stop_token_ids``, ``chat_template`` and ``sampling``.

    """

    folder: Path
    tokenizer: Tokenizer
    num_tokens: int
    stop_token_ids: list[int]
    special_tokens: dict[str, str]
    chat_templates: dict[str, str]
    sampling_defaults: dict[str, float]
    sources: dict[str, str]

    @classmethod
    def read(
        cls, folder: Path, chat_template: Path | None = None, generation_config: str = "auto"
    ) -> Checkpoint:
        """Read the checkpoint in ``folder``. Raises UsageError.

        The file ``chat_template`` replaces the checkpoint's chat templates. Sampling defaults are
        read only if ``generation_config`` is ``auto``.
        """
        settings = read_json(folder / TOKENIZER_CONFIG_FILE)
        tokenizer = _load_tokenizer(folder, settings)
        special = {
            name: _get_token_text(settings[name], f"{folder / TOKENIZER_CONFIG_FILE}: field {name}")
            for name in TEMPLATE_TOKEN_NAMES
            if settings.get(name)
        }
        templates, template_of = _read_templates(folder, settings, chat_template)
        ends, ends_of = _read_stop_tokens(folder, tokenizer, special.get("eos_token"))
        defaults = _read_sampling_defaults(folder) if generation_config == "auto" else {}
        sources = {
            "stop_token_ids": ends_of,
            "chat_template": template_of,
            "sampling": GENERATION_CONFIG_FILE if defaults else "",
        }
        return cls(
            folder, tokenizer, _count_vocabulary(folder, tokenizer), ends, special, templates,
            defaults, {name: source for name, source in sources.items() if source},
        )  # fmt: skip

    def make_summary(self) -> dict[str, Any]:
        """Return the stop tokens, the sampling defaults, and the files that define them."""
        return {
            "stop_token_ids": self.stop_token_ids,
            "sampling": self.sampling_defaults,
            "sources": self.sources,
        }


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in ``file``; {} if the file does not exist. Raises UsageError."""
    try:
        data = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {file}: {error}") from None
    if not isinstance(data, dict):
        raise UsageError(f"{file} must contain a JSON object")
    return data


def _load_tokenizer(folder: Path, settings: dict[str, Any]) -> Tokenizer:
    file = folder / TOKENIZER_FILE
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception
        raise UsageError(f"cannot load the tokenizer {file}: {error}") from None
    # Training scripts leave truncation and padding behind in the file.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    known = {one.content: one for one in tokenizer.get_added_tokens_decoder().values()}
    marked = []
    for text in dict.fromkeys(_list_special_tokens(folder, settings)):
        token = known.get(text)
        if tokenizer.token_to_id(text) is None or (token is not None and token.special):
            continue
        token = token or AddedToken(text, normalized=False)
        token.special = True
        marked.append(token)
    if marked:
        tokenizer.add_special_tokens(marked)
    return tokenizer


def _list_special_tokens(folder: Path, settings: dict[str, Any]) -> Iterator[str]:
    # A field such as pad_token makes a token special (transformers).
    where = f"{folder / TOKENIZER_CONFIG_FILE}: field"
    for name, value in settings.items():
        if name.endswith("_token") and value and not isinstance(value, bool):
            yield _get_token_text(value, f"{where} {name}")
    for name in ("additional_special_tokens", "extra_special_tokens"):
        value = settings.get(name) or []
        values = value.values() if isinstance(value, dict) else value
        if not isinstance(value, dict | list):
            raise UsageError(f"{where} {name} must be a list of tokens")
        for one in values:
            yield _get_token_text(one, f"{where} {name}")
    added = settings.get("added_tokens_decoder") or {}
    if not isinstance(added, dict):
        raise UsageError(
            f"{where} added_tokens_decoder must be an object that maps token IDs to tokens"
        )
    for number, one in added.items():
        if isinstance(one, dict) and one.get("special"):
            yield _get_token_text(one, f"{where} added_tokens_decoder.{number}")


def _get_token_text(value: Any, field: str) -> str:
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise UsageError(f"{field} must be the text of a token, got {value!r}")
    return text


def _count_vocabulary(folder: Path, tokenizer: Tokenizer) -> int:
    # A larger token ID would cause an error on a GPU, which ends the worker. The vocabulary may
    # have gaps below this number.
    numbers = tokenizer.get_vocab(with_added_tokens=True).values()
    config = read_json(folder / MODEL_CONFIG_FILE)
    size = _get_text_config(config).get("vocab_size", config.get("vocab_size"))
    return min(max(numbers, default=-1) + 1, size if isinstance(size, int) else sys.maxsize)


def _get_text_config(config: dict[str, Any]) -> dict[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _read_stop_tokens(
    folder: Path, tokenizer: Tokenizer, eos_token: str | None
) -> tuple[list[int], str]:
    config = read_json(folder / MODEL_CONFIG_FILE)
    added = tokenizer.get_added_tokens_decoder()
    ids: list[int] = []
    sources: list[str] = []
    for name, where, settings in (
        (GENERATION_CONFIG_FILE, "", read_json(folder / GENERATION_CONFIG_FILE)),
        (MODEL_CONFIG_FILE, "", config),
        (MODEL_CONFIG_FILE, "text_config.", _get_text_config(config)),
    ):
        if (value := settings.get("eos_token_id")) is None:
            continue
        named = list(value) if isinstance(value, list) else [value]
        if not all(type(one) is int and one >= 0 for one in named):
            field = f"{where}eos_token_id"
            raise UsageError(
                f"{folder / name}: field {field} must be a token ID or a list of token IDs, "
                f"got {value!r}"
            )
        if ids:  # an outdated stop token in a later file may be an ordinary word
            named = [one for one in named if one in added and added[one].special]
        if more := [one for one in named if one not in ids]:
            ids += more
            sources.append(name)
    # The tokenizer's eos_token is always a stop token (vLLM).
    own = None if eos_token is None else tokenizer.token_to_id(eos_token)
    if own is not None and own not in ids:
        ids.append(own)
        sources.append(TOKENIZER_CONFIG_FILE)
    return ids, ", ".join(dict.fromkeys(sources))


def _read_sampling_defaults(folder: Path) -> dict[str, float]:
    file = folder / GENERATION_CONFIG_FILE
    found = {}
    for name, value in read_json(file).items():
        if name not in SAMPLING_BOUNDS or value is None:
            continue
        least, most = SAMPLING_BOUNDS[name]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not least <= value <= most:
            raise UsageError(
                f"{file}: field {name} must be from {least} to {most}, got {value!r}; "
                "correct the field, or start the engine with --generation-config vllm"
            )
        found[name] = value
    return found


def _read_templates(
    folder: Path, settings: dict[str, Any], template_file: Path | None
) -> tuple[dict[str, str], str]:
    # Templates by name, and the file of the default template; empty if there is none.
    try:
        if template_file is not None:
            return {
                DEFAULT_TEMPLATE_NAME: template_file.read_text(encoding="utf-8")
            }, template_file.name
        more = {
            file.stem: file.read_text(encoding="utf-8")
            for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))
        }
        file = folder / "chat_template.jinja"
        if file.is_file():
            return {DEFAULT_TEMPLATE_NAME: file.read_text(encoding="utf-8")} | more, file.name
        for name, holder in (
            ("chat_template.json", read_json(folder / "chat_template.json")),
            (TOKENIZER_CONFIG_FILE, settings),
        ):
            source = holder.get("chat_template")
            if isinstance(source, list):
                source = {entry["name"]: entry["template"] for entry in source}
            elif isinstance(source, str):
                source = {DEFAULT_TEMPLATE_NAME: source}
            if isinstance(source, dict) and source:
                for key, template in source.items():
                    if not isinstance(template, str):
                        raise ValueError(
                            f"template {key!r} in the field chat_template must be a string"
                        )
                return source | more, name
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"cannot read the chat template in {template_file or folder}: {error!r}"
        ) from None
    return more, ""
