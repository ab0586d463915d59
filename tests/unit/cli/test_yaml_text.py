"""A text stays a text in both versions of YAML."""

from __future__ import annotations

import pytest
import yaml

from plimsoll_cli import yaml_text


@pytest.mark.parametrize(
    "text", ["215131e209", "1e3", "12E4", "+7e1", "-3e-2", "0o17", "1.5", "017", "12", "yes", "1_0"]
)
def test_a_text_that_looks_like_a_number_is_quoted(text: str) -> None:
    assert yaml_text.dump({"a": text}) in (f"a: '{text}'\n", f'a: "{text}"\n')


@pytest.mark.parametrize("text", ["20f6deb50654", "v1e3", "1e", "e9", "0o8", "1.2.3", "10Gi"])
def test_other_texts_stay_plain(text: str) -> None:
    assert yaml_text.dump({"a": text}) == f"a: {text}\n"


def test_numbers_stay_numbers() -> None:
    values = [1, -1, 0, 1.5, 1e16, 1e300, 17, True, None, float("inf")]
    text = yaml_text.dump_all([values], explicit_start=True)
    assert yaml.safe_load(text) == values
    assert "'" not in text
