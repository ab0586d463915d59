"""The repository's own rules: where packages lie and what the small parts must never import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOP_FOLDERS = (
    "operator", "sidecar", "engine_image", "crds", "cli", "probe", "faults", "charts", "tests",
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
