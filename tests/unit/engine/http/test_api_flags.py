"""The flags of the serving API's answers, and what ``/tokenizer_info`` tells.

Tests ``http/api_flags.py`` and ``api/tokenizer_info.py``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plimsoll_engine.__main__ import _build_parser
from plimsoll_engine.api import tokenizer_info
from plimsoll_engine.errors import UsageError
from plimsoll_engine.http.api_flags import ApiSettings
from plimsoll_engine.settings import create_settings
from plimsoll_faults.models import tiny


def settings(folder: Path, *flags: str) -> ApiSettings:
    model = folder / "model"
    model.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json"):
        (model / name).write_text("{}")
    serve = ["serve", "--model", str(model), "--run-dir", str(folder / "run")]
    return create_settings(_build_parser().parse_args([*serve, *flags]), {}).api


def test_nothing_changes_by_default(tmp_path: Path) -> None:
    assert settings(tmp_path) == ApiSettings()


def test_each_flag_has_its_setting(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.touch()
    found = settings(
        tmp_path, "--chat-template", str(template), "--return-tokens-as-token-ids",
        "--enable-force-include-usage", "--enable-tokenizer-info-endpoint",
    )  # fmt: skip
    assert found == ApiSettings(
        chat_template=template.resolve(), return_tokens_as_token_ids=True,
        force_include_usage=True, tokenizer_info=True,
    )  # fmt: skip


def test_a_template_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.jinja \(--chat-template\) does not exist"):
        settings(tmp_path, "--chat-template", str(tmp_path / "none.jinja"))


def test_the_tokenizer_is_told_with_the_template_in_use(tmp_path: Path) -> None:
    tiny.write_checkpoint(tmp_path)
    told = json.loads(tokenizer_info.read_tokenizer_info(tmp_path, "{{ messages }}"))
    assert told["chat_template"] == "{{ messages }}"
    assert told["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert told["model_max_length"] == 8192
