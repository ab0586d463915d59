"""Validates our objects as the API server does, by its own code without a server.

``kubelab definitions`` (``kubelab/definitions.go``) has the resource definitions and answers in a
millisecond; some cases also go to a real server, to check that both agree.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.lab.objects import Refused
from tests.lab.processes import die_with_parent

Document = dict[str, Any]


class Definitions:
    """The resource definitions of some files."""

    def __init__(self, kubelab: Path, files: Sequence[Path]) -> None:
        self._process = subprocess.Popen(
            [str(kubelab), "definitions", *map(str, files)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - the tests' threads hold no lock here
        )

    def create(self, document: Document) -> Document:
        """The object as it is stored, with its defaults; Refused if the server rejects it."""
        return self._ask(object=_placed(document))

    def update(self, old: Document, new: Document, status: bool = False) -> Document:
        """As :meth:`create`, for an update; ``status`` if only the status is written."""
        return self._ask(object=_placed(new), old=_placed(old), status=status)

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=10)

    def _ask(self, **question: Any) -> Document:
        ours, theirs = self._process.stdin, self._process.stdout
        assert ours is not None
        assert theirs is not None
        ours.write(json.dumps(question) + "\n")
        ours.flush()
        answer = json.loads(theirs.readline() or '{"errors": ["kubelab definitions has ended"]}')
        if answer["errors"]:
            raise Refused("\n".join(answer["errors"]))
        made: Document = answer["object"]
        return made


def _placed(document: Document) -> Document:
    """``document`` in a namespace: the server takes that from the request's path."""
    return document | {"metadata": {"namespace": "default"} | document["metadata"]}
