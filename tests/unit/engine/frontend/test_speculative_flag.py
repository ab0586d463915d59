"""``--speculative-config`` in vLLM's words; each error names the field.

Tests ``messages/speculative.py`` and ``plimsoll_engine/settings.py``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plimsoll_engine.__main__ import _build_parser
from plimsoll_engine.errors import UsageError
from plimsoll_engine.messages.speculative import Speculative
from plimsoll_engine.settings import Settings, create_settings


def checkpoint(folder: Path, tokenizer: str = "{}") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text(tokenizer)
    return folder


def settings(tmp_path: Path, *flags: str, tokenizer: str = "{}") -> Settings:
    model = checkpoint(tmp_path / "model", tokenizer)
    serve = ["serve", "--model", str(model), "--run-dir", str(tmp_path / "run")]
    return create_settings(_build_parser().parse_args([*serve, *flags]), {})


def test_drafts_are_off_by_default(tmp_path: Path) -> None:
    assert settings(tmp_path).worker.speculative is None


@pytest.mark.parametrize(
    ("fields", "ngram_lengths"),
    [
        ("", (5, 5)),
        (', "prompt_lookup_max": 4', (4, 4)),
        (', "prompt_lookup_min": 2', (2, 2)),
        (', "prompt_lookup_max": 4, "prompt_lookup_min": 2', (2, 4)),
    ],
)
def test_prompt_lookup_reaches_the_worker(
    tmp_path: Path, fields: str, ngram_lengths: tuple[int, int]
) -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 4' + fields + "}"
    found = settings(tmp_path, "--speculative-config", text).worker.speculative
    assert isinstance(found, Speculative)
    assert (found.num_speculative_tokens, found.ngram_lengths) == (4, ngram_lengths)


TOKENS = '{"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": []}'


def drafts(model: Path) -> str:
    return json.dumps({"method": "draft_model", "model": str(model), "num_speculative_tokens": 3})


def test_a_draft_model_reaches_the_worker(tmp_path: Path) -> None:
    """Its tokenizer.json may say other things that number no token."""
    draft = checkpoint(tmp_path / "draft", TOKENS.replace("}, ", '}, "version": "1.0", ', 1))
    found = settings(tmp_path, "--speculative-config", drafts(draft), tokenizer=TOKENS)
    config = found.worker
    assert config.draft_model == str(draft)
    assert config.speculative == Speculative("draft_model", 3, model=str(draft))


@pytest.mark.parametrize(
    ("tokenizer", "flags", "message"),
    [
        (TOKENS.replace('"b"', '"c"'), (), "has another tokenizer.json than --model"),
        ("[", (), ": cannot read .*tokenizer.json"),
        ("[]", (), ": cannot read .*tokenizer.json"),
        (TOKENS, ("--tensor-parallel-size", "2"), "supports only one GPU"),
        (None, (), "has no config.json"),
    ],
)
def test_a_wrong_draft_model_is_refused(
    tmp_path: Path, tokenizer: str | None, flags: tuple[str, ...], message: str
) -> None:
    draft = tmp_path / "draft"
    if tokenizer is not None:
        checkpoint(draft, tokenizer)
    with pytest.raises(UsageError, match=r"the draft model .* of --speculative-config.*" + message):
        settings(tmp_path, "--speculative-config", drafts(draft), *flags, tokenizer=TOKENS)


NGRAM = '{"method": "ngram", "num_speculative_tokens": 4, '


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "truncated"),
        ("[]", "Expected `object`"),
        ("{}", "missing required field `method`"),
        ('{"method": "ngram"}', "missing required field `num_speculative_tokens`"),
        ('{"method": "medusa", "num_speculative_tokens": 4}', r"\$\.method"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', r"\$\.num_speculative_tokens"),
        ('{"method": "ngram", "num_speculative_tokens": 65}', r"\$\.num_speculative_tokens"),
        ('{"method": "ngram", "num_speculative_tokens": "4"}', r"\$\.num_speculative_tokens"),
        (NGRAM + '"prompt_lookup_min": 0}', r"\$\.prompt_lookup_min"),
        (NGRAM + '"prompt_lookup_max": 1e9}', r"\$\.prompt_lookup_max"),
        (
            NGRAM + ('"prompt_lookup_min": 5, "prompt_lookup_max": 4}'),
            "field prompt_lookup_min must be at most",
        ),
        (NGRAM + '"model": "m"}', "field model applies only to method 'draft_model'"),
        (
            '{"method": "draft_model", "num_speculative_tokens": 4}',
            "'model' must be the folder of a checkpoint",
        ),
        (
            '{"method": "draft_model", "model": "m", "num_speculative_tokens": 4,'
            ' "prompt_lookup_max": 4}',
            "field prompt_lookup_max applies only to method 'ngram'",
        ),
        (NGRAM + '"quantization": "fp8"}', "unknown field `quantization`"),
        ("[" * 100_000, "."),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match="--speculative-config: .*" + message):
        settings(tmp_path, "--speculative-config", text)
