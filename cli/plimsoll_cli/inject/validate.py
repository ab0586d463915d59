"""Checks manifests without a cluster: ours by their definitions, others by what inject would do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.names import API_GROUP, POLICY_KIND, SERVICE_KIND
from plimsoll_api.supervision_policy import SupervisionPolicy
from plimsoll_cli.errors import UsageError
from plimsoll_cli.inject.command import Object, beside, documents, kind_of
from plimsoll_cli.manifest import model_of, read_text
from plimsoll_operator.injection.documents import inject_document
from plimsoll_operator.injection.errors import InjectionError
from plimsoll_operator.injection.options import Options
from plimsoll_operator.kinds import InvalidSpec
from plimsoll_operator.plans.service import parse, reconcile
from plimsoll_operator.render.containers import Images

IMAGES = Images("engine", "supervisor")


@dataclass
class Findings:
    """The result: ``invalid`` documents, ``refused`` workloads, and notes about the others."""

    invalid: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def status(self) -> int:
        """The exit status: 2 for something invalid, 1 for a workload without a supervisor."""
        return 2 if self.invalid else 1 if self.refused else 0


def run(files: Sequence[Path], options: Options) -> Findings:
    """Check all documents of ``files``."""
    found = Findings()
    for file in files:
        try:
            places = [place for one in documents(read_text(file), file) for place in one.places]
        except UsageError as error:
            found.invalid.append(str(error))
            continue
        known = beside(options, places)
        for place in places:
            _check(f"{file}: {place.at}", place.value, known, found)
    return found


def _check(at: str, document: Object, options: Options, found: Findings) -> None:
    if str(document["apiVersion"]).partition("/")[0] == API_GROUP:
        try:
            check(at, document)
        except UsageError as error:
            found.invalid.append(str(error))
        else:
            found.notes.append(f"{at}: {kind_of(document)}: valid")
        return
    try:
        injected = inject_document(document, options)
    except InjectionError as error:
        found.refused.append(f"{at}: {error}")
        return
    found.notes += [f"{at}: {note}" for note in injected.notes]


def check(at: str, document: Object) -> None:
    """Check an object of ours as the API server and the operator would.

    Raises UsageError, each line of which begins with ``at``.
    """
    kind = document["kind"]
    if kind == POLICY_KIND:
        model_of(at, document, SupervisionPolicy)
    elif kind == SERVICE_KIND:
        service = model_of(at, document, InferenceService)
        try:
            parse(document)
            reconcile(service, {}, (), [], IMAGES)
        except InvalidSpec as error:
            raise UsageError(f"{at}: {error}") from None
    else:
        raise UsageError(f"{at}: kind: {kind!r}: write {SERVICE_KIND} or {POLICY_KIND}")
