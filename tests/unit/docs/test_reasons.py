"""No reason that the operator gives is missing from the page. Tests ``docs/tools/reasons.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.tools import reasons

CODE = """
LOST = "WasLost"

def judge(failed, refused):
    why = "FirstWord" if failed else LOST
    word = refused.reason if refused else str(refused.word or "SecondWord")
    state = ConditionState(kind, False, why, "A text")
    return [state, ConditionState(kind, True, word), Cause("ThirdWord", "")]
"""


def test_reasons_are_found_where_a_variable_or_a_choice_holds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "status.py").write_text(CODE)
    monkeypatch.setattr(reasons, "OPERATOR", tmp_path)
    assert reasons.reasons() == {"FirstWord", "WasLost", "SecondWord", "ThirdWord"}
    with pytest.raises(ValueError, match="explain FirstWord, SecondWord"):
        reasons.page()


def test_a_reason_that_nothing_gives_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(reasons.WHAT, "Gone", ("It was there.", "Nothing."))
    with pytest.raises(ValueError, match="nothing gives Gone"):
        reasons.page()
