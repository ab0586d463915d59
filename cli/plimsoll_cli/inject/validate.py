"""Validate manifests without a cluster: objects of Plimsoll, and workloads for inject."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.names import API_GROUP, POLICY_KIND, SERVICE_KIND
from plimsoll_api.supervision_policy import SupervisionPolicy
from plimsoll_cli.errors import UsageError
from plimsoll_cli.inject.command import Object, add_file_context, format_kind, read_documents
from plimsoll_cli.manifest import parse_document, read_text
from plimsoll_operator.injection.documents import inject_document
from plimsoll_operator.injection.errors import InjectionError
from plimsoll_operator.injection.options import InjectionOptions, OptionNames
from plimsoll_operator.injection.policy import POLICY_OPTION_NAMES
from plimsoll_operator.kinds import InvalidSpecError
from plimsoll_operator.plans.service import make_plan, parse_service
from plimsoll_operator.render.containers import Images

PLACEHOLDER_IMAGES = Images("engine", "supervisor")
INJECT_OPTION_NAMES = OptionNames(
    **{one.name: f"plimsoll inject {one.default}" for one in fields(OptionNames)}
)
"""Names of the options in messages: ``validate`` itself does not have them."""


def name_pod_fields(options: InjectionOptions) -> InjectionOptions:
    """Return ``options`` of a policy, whose messages name fields of the pod for other flags."""
    names = replace(
        options.fields,
        run_as_user=POLICY_OPTION_NAMES.run_as_user,
        group_restarts=POLICY_OPTION_NAMES.group_restarts,
        platform="",
    )
    return replace(options, fields=names)


@dataclass
class CheckResults:
    """Messages about invalid documents, refused workloads and valid documents."""

    invalid: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_supervised: int = 0
    """Number of documents whose pods would get a supervisor."""

    @property
    def exit_status(self) -> int:
        """Exit status: 2 if a document is invalid, else 1 if a workload is refused, else 0."""
        return 2 if self.invalid else 1 if self.refused else 0


def check_files(files: Sequence[Path], options: InjectionOptions) -> CheckResults:
    """Check all objects in ``files``."""
    found = CheckResults()
    for file in files:
        try:
            places = [
                place
                for one in read_documents(read_text(file), file)
                for place in one.objects_in_file
            ]
        except UsageError as error:
            found.invalid.append(str(error))
            continue
        known = add_file_context(options, places)
        for place in places:
            _check_document(f"{file}: {place.position}", place.value, known, found)
    return found


def _check_document(
    position: str, document: Object, options: InjectionOptions, results: CheckResults
) -> None:
    if str(document["apiVersion"]).partition("/")[0] == API_GROUP:
        try:
            check_object(position, document)
        except UsageError as error:
            results.invalid.append(str(error))
        else:
            results.notes.append(f"{position}: {format_kind(document)}: valid")
        return
    try:
        injected = inject_document(document, options)
    except InjectionError as error:
        results.refused.append(f"{position}: {error}")
        return
    results.notes += [f"{position}: {note}" for note in injected.notes]
    results.num_supervised += injected.config_map is not None


def check_object(position: str, document: Object) -> None:
    """Check an object of Plimsoll as the API server and the operator do.

    Raises UsageError, whose lines begin with ``position``.
    """
    kind = document["kind"]
    if kind == POLICY_KIND:
        parse_document(position, document, SupervisionPolicy)
    elif kind == SERVICE_KIND:
        service = parse_document(position, document, InferenceService)
        try:
            parse_service(document)
            make_plan(service, {}, (), [], PLACEHOLDER_IMAGES)
        except InvalidSpecError as error:
            raise UsageError(f"{position}: {error}") from None
    else:
        raise UsageError(f"{position}: kind must be {SERVICE_KIND} or {POLICY_KIND}, not {kind!r}")
