"""The repository's own rules: where packages lie and what the small parts must never import."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOP_FOLDERS = (
    "operator", "sidecar", "engine_image", "crds", "cli", "probe", "faults", "charts", "research",
    "tests",
)  # fmt: skip


@pytest.mark.parametrize("folder", TOP_FOLDERS)
def test_top_folders_are_not_packages(folder: str) -> None:
    """``operator/__init__.py`` would shadow the standard library's operator module."""
    assert not (ROOT / folder / "__init__.py").exists()


def test_the_standard_operator_module_wins_in_the_checkout() -> None:
    out = subprocess.run(
        [sys.executable, "-c", "import operator; print(operator.__file__)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(ROOT) not in out.stdout


@pytest.mark.parametrize(
    ("module", "banned"),
    [
        (
            "plimsoll_sidecar.main",
            {"torch", "numpy", "kopf", "pydantic", "kubernetes", "aiohttp", "fastapi"},
        ),
        (
            "plimsoll_sidecar.launcher",
            {"torch", "numpy", "pydantic", "urllib3", "sqlite3", "prometheus_client", "msgspec"},
        ),
        ("plimsoll_engine.__main__", {"torch", "transformers", "numpy", "fastapi"}),
        ("plimsoll_operator.render", {"kopf", "kubernetes", "aiohttp"}),
        ("plimsoll_cli.main", {"torch", "kopf", "kubernetes", "matplotlib", "pydantic", "httpx"}),
    ],
)
def test_import_cost(module: str, banned: set[str]) -> None:
    """What must start fast or stay small imports nothing heavy, not even indirectly."""
    program = f"import sys, {module}; print('\\n'.join(m.split('.')[0] for m in sys.modules))"
    out = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert banned.isdisjoint(out.stdout.split())


PACKAGES = (
    "crds/plimsoll_api",
    "operator/plimsoll_operator",
    "sidecar/plimsoll_sidecar",
    "engine_image/plimsoll_engine",
    "faults/plimsoll_faults",
    "cli/plimsoll_cli",
    "probe/plimsoll_probe",
)
ROOTS = (ROOT, *(ROOT / package for package in PACKAGES), *(ROOT / p for p in TOP_FOLDERS))
UNIT = ROOT / "tests" / "unit"
PARTS = ("api", "cli", "engine", "operator", "probe")
"""Folders of a package each; the others are a room of the supervisor, or a folder of the root."""


def mirrored(test: Path) -> str:
    """The module with a test's name and folder: ``api/body.py`` of ``engine/api/test_body.py``."""
    folder = test.relative_to(UNIT).parent.parts
    rooms = folder[1:] if folder[0] in PARTS else folder
    return str(Path(*rooms, test.name.removeprefix("test_")))


@pytest.mark.parametrize(
    "test", sorted(UNIT.glob("*/**/test_*.py")), ids=lambda path: str(path.relative_to(UNIT))
)
def test_a_test_has_the_name_of_a_module_or_names_what_it_tests(test: Path) -> None:
    text = ast.get_docstring(ast.parse(test.read_text())) or ""
    named = re.findall(r"``([\w./-]+\.(?:py|md|yaml))``", text) or re.findall(
        r"[\w./-]+\.(?:py|md|yaml)", text
    )
    named = named or [mirrored(test)]
    absent = [name for name in named if not any((root / name).is_file() for root in ROOTS)]
    assert absent == [], (
        f"{test.relative_to(ROOT)}: begin it with a docstring that names the files it tests, as in "
        "``govern/event_incidents.py``, or give it the name and folder of its module"
    )


def test_folders_of_the_engines_tests_are_rooms_of_the_engine() -> None:
    rooms = {path.name for path in (ROOT / "engine_image" / "plimsoll_engine").iterdir()}
    folders = {path.name for path in (UNIT / "engine").glob("*/") if path.name != "__pycache__"}
    assert folders <= rooms
