"""``--speculative-config`` in vLLM's words; each error names the field.

Tests ``messages/speculative.py`` and ``plimsoll_engine/settings.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from plimsoll_engine.__main__ import _parser
from plimsoll_engine.errors import UsageError
from plimsoll_engine.messages.speculative import Speculative
from plimsoll_engine.settings import Settings, from_flags


def settings(tmp_path: Path, *flags: str) -> Settings:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (model / name).write_text("{}")
    serve = ["serve", "--model", str(model), "--run-dir", str(tmp_path / "run")]
    return from_flags(_parser().parse_args([*serve, *flags]), {})


def test_drafts_are_off_by_default(tmp_path: Path) -> None:
    assert settings(tmp_path).worker_config().speculative is None


@pytest.mark.parametrize(
    ("fields", "lookup"),
    [
        ("", (5, 5)),
        (', "prompt_lookup_max": 4', (4, 4)),
        (', "prompt_lookup_min": 2', (2, 2)),
        (', "prompt_lookup_max": 4, "prompt_lookup_min": 2', (2, 4)),
    ],
)
def test_prompt_lookup_reaches_the_worker(
    tmp_path: Path, fields: str, lookup: tuple[int, int]
) -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 4' + fields + "}"
    found = settings(tmp_path, "--speculative-config", text).worker_config().speculative
    assert isinstance(found, Speculative)
    assert (found.num_speculative_tokens, found.lookup) == (4, lookup)


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
        (NGRAM + '"prompt_lookup_min": 5, "prompt_lookup_max": 4}', "field prompt_lookup_min: 5"),
        (NGRAM + '"quantization": "fp8"}', "unknown field `quantization`"),
        ("[" * 100_000, "."),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match="--speculative-config: .*" + message):
        settings(tmp_path, "--speculative-config", text)
