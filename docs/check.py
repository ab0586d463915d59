"""Looks at all documents: ``python -m docs.check`` from the repository's root.

Links, commands, manifests, generated pages, dashboards and alert rules. Prints what is wrong and
exits 1. Nothing is run here but promtool; the tests run what the documents tell to run.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from dashboards import generate as dashboards
from docs import generate as pages
from docs.tools import commands, executed, links, manifests
from docs.tools.blocks import ROOT, documents
from plimsoll_api import generate as crds


def generated() -> Iterator[str]:
    """Files that are not what the code says."""
    if pages.drift():
        yield "docs: run python -m docs.generate"
    if dashboards.drift():
        yield "dashboards: run python -m dashboards.generate"
    if crds.main(["--check"]):
        yield "crds: run python -m plimsoll_api.generate"


def rules() -> Iterator[str]:
    """What promtool says of the alerts and of their tests."""
    promtool = shutil.which("promtool")
    if promtool is None:
        yield "promtool is missing: apt-get install prometheus"
        return
    tests = ROOT / "tests" / "unit" / "dashboards" / "alerts_test.yaml"
    for arguments in (
        ["check", "rules", str(ROOT / "dashboards" / "alerts.yaml")],
        ["test", "rules", str(tests)],
    ):
        command = [promtool, *arguments]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
        if done.returncode:
            yield f"promtool {' '.join(arguments)}: {done.stdout}{done.stderr}".strip()


def index() -> Iterator[str]:
    """Documents that the index does not name."""
    text = (ROOT / "docs" / "README.md").read_text()
    for path in sorted((ROOT / "docs").glob("*.md")):
        if path.name != "README.md" and f"({path.name})" not in text:
            yield f"docs/README.md: does not name {path.name}"


def each(check: Callable[[Path], Iterator[str]]) -> Iterator[str]:
    for path in documents():
        yield from check(path)


CHECKS: dict[str, Callable[[], Iterable[str]]] = {
    "links": lambda: each(links.broken),
    "index": index,
    "commands": lambda: each(commands.wrong),
    "commands that a test runs": lambda: each(executed.unrun),
    "manifests": lambda: [*each(manifests.wrong), *manifests.examples()],
    "generated files": generated,
    "alert rules": rules,
}


def main() -> int:
    failed = False
    for name, check in CHECKS.items():
        problems = list(check())
        failed = failed or bool(problems)
        print(f"{name}: {'ok' if not problems else f'{len(problems)} wrong'}")
        for problem in problems:
            print(f"  {problem}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
