"""The style rules find what they are for, and no document breaks them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from docs import prose
from docs.tools import texts, vale
from docs.tools.blocks import ROOT


@pytest.fixture(scope="module", autouse=True)
def _vale() -> None:
    try:
        vale.find()
    except vale.NoValeError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))


def test_documents_have_no_errors(capfd: pytest.CaptureFixture[str]) -> None:
    assert prose.main([]) == 0, capfd.readouterr().out


@pytest.mark.parametrize(
    ("sentence", "finding"),
    [
        ("The engine starts anew.", "Plimsoll.Words"),
        ("The supervisor goes on with its work.", "Plimsoll.Words"),
        ("A growth is believed at half of its budget.", "Plimsoll.Words"),
        ("What is missing is said.", "Plimsoll.Inversions"),
        ("Stalls are not waited with.", "Plimsoll.Inversions"),
        ("Further wishes about its nodes.", "Plimsoll.Inversions"),
    ],
)
def test_an_odd_sentence_is_found(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], sentence: str, finding: str
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# A page\n\nThe supervisor restarts the worker.\n{sentence}\n")
    assert prose.check([f"--config={ROOT / '.vale.ini'}", str(page)]) == 1
    found = [line for line in capfd.readouterr().out.splitlines() if finding in line]
    assert found
    assert all(line.startswith(f"{page}:4:") for line in found)


def test_a_long_sentence_is_a_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# A page\n\n{'The engine runs and ' * 12}the worker serves.\n")
    assert prose.check([f"--config={ROOT / '.vale.ini'}", str(page)]) == 0
    assert "Plimsoll.Sentences" in capfd.readouterr().out


def test_without_go_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert prose.main([]) == 1
    assert "install Go" in capfd.readouterr().err


def test_a_misspelt_word_is_found_and_a_term_is_not(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n\nThe vLLM frontend sets malloc_in_use and growthBudget.\n")
    assert prose.check([f"--config={ROOT / '.vale.ini'}", str(page)]) == 0
    page.write_text("# A page\n\nThe suprevisor restarts the worker.\n")
    assert prose.check([f"--config={ROOT / '.vale.ini'}", str(page)]) == 1
    assert "suprevisor" in capfd.readouterr().out


def test_messages_alerts_crds_and_help_are_checked() -> None:
    sources = "\n".join(source for source, _ in texts.texts())
    for part in ("operator/", "sidecar/", "dashboards/alerts.yaml", "crds/", "plimsoll explain"):
        assert part in sources


def test_an_odd_message_names_its_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    source = '"""What nobody reads."""\n\nraise ValueError(f"the engine {name} starts anew")\n'
    monkeypatch.setattr(texts, "texts", lambda: texts.literals(source, "part/file.py"))
    assert prose.check_texts() == 1
    out = capfd.readouterr().out
    assert "part/file.py:3: " in out
    assert "nobody" not in out
