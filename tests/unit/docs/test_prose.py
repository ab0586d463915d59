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
    monkeypatch.setattr(texts, "code_texts", lambda: iter(()))
    assert prose.check_texts() == 1
    out = capfd.readouterr().out
    assert "part/file.py:3: " in out
    assert "nobody" not in out


@pytest.mark.parametrize(
    ("source", "line", "finding"),
    [
        ('"""Whether it is there."""', 1, "Code.Openings"),
        ('X = 1\n"""Of one namespace: its policies."""', 2, "Code.Openings"),
        ('def f():\n    """Return it.\n\n    What it lacks is empty."""', 2, "Code.Openings"),
        ('"""Return the objects; everybody may write them."""', 1, "Code.Words"),
        ("x = 1\n# a list that a lock guards\n# for ever", 2, "Code.Words"),
        (f'"""Return {"one and " * 15}none."""', 1, "Code.Sentences"),
        ('"""Return the suprevisor."""', 1, "Plimsoll.Spelling"),
    ],
)
def test_odd_docstrings_and_comments_are_found(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    source: str,
    line: int,
    finding: str,
) -> None:
    found = [*texts.docstrings(source, "part/file.py"), *texts.comments(source, "part/file.py")]
    monkeypatch.setattr(texts, "texts", lambda: iter(()))
    monkeypatch.setattr(texts, "code_texts", lambda: iter(found))
    assert prose.check_texts() == 1
    out = capfd.readouterr().out
    assert f"part/file.py:{line}: " in out
    assert finding in out


def test_tables_roles_and_directives_are_left_out() -> None:
    source = '"""Return :class:`X`.\n\n===  ===\na    b\n===  ===\n"""\nx = 1  # noqa: E501\n'
    assert list(texts.docstrings(source, "f")) == [("f:1", "Return `X`.")]
    assert not list(texts.comments(source, "f"))


def test_revised_packages_exist() -> None:
    sources = [source for source, _ in texts.code_texts()]
    for package in texts.REVISED:
        assert any(source.startswith(f"{package}/") for source in sources)
