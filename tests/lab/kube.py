"""kubectl for tests: one namespace, bounded waits, and everything worth reading when one fails."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tests.lab.objects import objects

Document = dict[str, Any]
T = TypeVar("T")
RUN_S = 240
"""More than any --timeout that kubectl is given: it says what it waited for, its end does not."""


@dataclass
class Kube:
    """kubectl with the administrator's rights, in ``namespace``."""

    kubectl: Sequence[str]
    kubeconfig: Path
    namespace: str = "default"

    def run(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        prefix = [*self.kubectl, f"--kubeconfig={self.kubeconfig}", f"-n={self.namespace}"]
        return subprocess.run(
            [*prefix, *arguments], input=stdin, capture_output=True, text=True, timeout=RUN_S
        )

    def __call__(self, *arguments: str, stdin: str | None = None) -> str:
        done = self.run(*arguments, stdin=stdin)
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr.strip()}"
        return done.stdout

    def create(self, document: Document, dry_run: bool = False) -> None:
        """Refused, with the API server's message, where it does not take the object."""
        objects(self.kubeconfig).create(document, self.namespace, dry_run)

    def apply(self, *documents: Document, force: bool = False) -> None:
        """Server-side; ``force`` takes fields from their other managers."""
        for document in documents:
            objects(self.kubeconfig).apply(document, self.namespace, force)

    def patch(self, kind: str, name: str, patch: Document, subresource: str = "") -> None:
        """A merge patch."""
        objects(self.kubeconfig).patch(kind, name, patch, self.namespace, subresource)

    def delete(self, kind: str, name: str = "", selector: str = "") -> None:
        """One object, or those that a selector finds. Returns before they are gone."""
        assert name or selector, "this would delete all objects of the kind"
        objects(self.kubeconfig).delete(kind, name, self.namespace, selector)

    def established(self, *definitions: str, timeout_s: float = 30.0) -> None:
        """Wait until these CustomResourceDefinitions are served. `kubectl wait` gives up at once on
        one so new that it has no conditions yet."""

        def served() -> bool:
            found = [self.get("crd", name) or {} for name in definitions]
            return all(
                any(c["type"] == "Established" and c["status"] == "True" for c in conditions(one))
                for one in found
            )

        eventually(served, f"served: {', '.join(definitions)}", timeout_s)

    def get(self, kind: str, name: str) -> Document | None:
        """One object, None where there is none."""
        return objects(self.kubeconfig).get(kind, name, self.namespace)

    def list(self, kind: str, selector: str = "") -> list[Document]:
        """The objects of a kind, or of several that commas part."""
        return objects(self.kubeconfig).list(kind, selector, self.namespace)

    def dump(self) -> str:
        """Pods, events and the ends of the logs of the namespace, for a failed test."""
        parts = [self.run("get", "all,leases,pvc", "-o", "wide").stdout]
        parts.append(self.run("get", "events", "--sort-by=.lastTimestamp").stdout[-6000:])
        for pod in self.run("get", "pods", "-o", "name").stdout.split():
            logs = self.run("logs", pod, "--all-containers", "--prefix", "--tail=60").stdout
            parts.append(f"--- {pod}\n{logs[-8000:]}")
        return "\n".join(parts)


def conditions(item: Document) -> list[Document]:
    """The status conditions of one object, none where it has no status yet."""
    found: list[Document] = item.get("status", {}).get("conditions") or []
    return found


def eventually(check: Callable[[], T], what: str, timeout_s: float = 30.0) -> T:
    """The first true value of ``check``; AssertionError with the last one after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not (value := check()):
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}; last: {value!r}"
        time.sleep(0.1)
    return value
