"""Add supervisors to the workloads in a file, or remove them.

Only the changed parts of the text are rewritten. An annotation of the supervisor's ConfigMap
records the changes, so that :func:`remove_from_file` can undo them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from plimsoll_cli.errors import UsageError
from plimsoll_cli.inject.edit import (
    EditError,
    apply_changes,
    find_changes,
    find_reversals,
    format_record,
    get_line_end,
    is_json_equal,
)
from plimsoll_cli.manifest import read_text
from plimsoll_cli.yaml_text import YamlError, dump
from plimsoll_cli.yaml_tree import Document, Node, split_documents
from plimsoll_operator.injection.configuration import InjectedDocument
from plimsoll_operator.injection.documents import inject_document
from plimsoll_operator.injection.errors import InjectionError
from plimsoll_operator.injection.options import InjectionOptions
from plimsoll_operator.injection.pods import RUNTIME_KINDS, SUPPORTED_KINDS
from plimsoll_operator.render.names import make_supervisor_name

Object = dict[str, Any]

RECORD_ANNOTATION = "plimsoll.dev/injected"
"""Annotation of an injected ConfigMap, which names the changed document and lists the changes."""
REWRITE_MESSAGE = (
    "plimsoll inject cannot edit this document without changing its meaning; rewrite it in block"
    " style"
)
HELM_TEMPLATE_PATTERN = re.compile(r"\{\{-?\s*[.$a-zA-Z/]")


@dataclass
class ManifestObject:
    """Object in a file: a document, or an item of a List.

    ``position`` describes its place in the file, for messages.
    """

    position: str
    value: Object
    node: Node


@dataclass
class ParsedDocument:
    """Document of a file, and its changes; ``value`` is None if it is empty.

    ``added`` are the objects to insert before the document. ``replacements`` are the changed
    objects by the ``id`` of the node that they replace.
    """

    document: Document
    root: Node | None = None
    value: Object | None = None
    objects_in_file: list[ManifestObject] = field(default_factory=list)
    added: list[Object] = field(default_factory=list)
    replacements: dict[int, Object] = field(default_factory=dict)


def inject_into_file(
    file: Path, options: InjectionOptions, selection: Selection
) -> tuple[str, list[str]]:
    """Return the text of ``file`` with supervisors, and notes for a person.

    Raises UsageError if the file cannot be read, if a workload that ``selection`` names cannot be
    supervised, or if no supervisor was added.
    """
    text = _remove_injected(read_text(file), file)
    parsed = read_documents(text, file)
    all_objects = [place for one in parsed for place in one.objects_in_file]
    options = add_file_context(options, all_objects)
    demanded = options.unrecognized or bool(selection.names)
    names = _ConfigMapNames(all_objects)
    notes: list[str] = []
    errors: list[str] = []
    count = 0
    edited: list[str] = []
    for one in parsed:
        for place in one.objects_in_file:
            if not selection.matches(place.value):
                continue
            try:
                injected = inject_document(place.value, options)
                names.reserve_name(injected, place.value)
            except InjectionError as error:
                # Check for name conflicts here, to report them together with the other problems.
                taken = names.find_name_conflict(place.value)
                found = list(dict.fromkeys([str(error), *([taken] if taken else [])]))
                if demanded:
                    raise UsageError(
                        "\n".join(f"{file}: {place.position}: {one}" for one in found)
                    ) from None
                errors += [f"{place.position}: {one}" for one in found]
                continue
            notes += injected.notes
            if injected.config_map is not None:
                one.replacements[id(place.node)] = injected.document
                one.added += [injected.config_map, *injected.others]
        try:
            edited.append(_render_document(one))
            count += len(one.replacements)
        except EditError as error:
            where = one.objects_in_file[0].position
            if demanded:
                raise UsageError(f"{file}: {where}: {error}") from None
            errors.append(f"{where}: {error}")
            edited.append(one.document.separator + one.document.text)
    if errors and not count:
        raise UsageError("\n".join(f"{file}: {error}" for error in errors))
    if not count:
        raise UsageError(
            f"{file}: nothing to inject:\n{_explain_no_injection(all_objects, notes, selection)}"
        )
    return "".join(edited), [*notes, *(f"{error} (left unchanged)" for error in errors)]


def remove_from_file(file: Path) -> str:
    """Return the text of ``file`` without the changes of :func:`inject_into_file`.

    Raises UsageError if the file records no such changes.
    """
    text = read_text(file)
    edited = _remove_injected(text, file)
    if edited == text:
        raise UsageError(
            f"{file}: the file contains no record of changes by plimsoll inject: add the"
            f" supervisor's ConfigMap with the annotation {RECORD_ANNOTATION}"
        )
    return edited


def _explain_no_injection(
    objects_in_file: list[ManifestObject], notes: list[str], selection: Selection
) -> str:
    if notes:
        return "\n".join(notes)
    if objects_in_file and not any(selection.matches(place.value) for place in objects_in_file):
        return "no object in the file matches --name and --selector"
    kinds = (
        ", ".join(dict.fromkeys(format_kind(place.value) for place in objects_in_file)) or "nothing"
    )
    return f"the file contains {kinds}, but plimsoll inject supports only {SUPPORTED_KINDS}"


def read_documents(text: str, file: Path) -> list[ParsedDocument]:
    """Return the documents of a file. Raises UsageError if it is not a manifest."""
    found: list[ParsedDocument] = []
    count = 0
    try:
        for document in split_documents(text):
            root = document.parse_root()
            value = None if root is None else root.read_value()
            if root is None or value is None:
                found.append(ParsedDocument(document))
                continue
            count += 1
            at = f"document {count}"
            found.append(
                ParsedDocument(document, root, value, list(_iterate_objects(value, root, at, file)))
            )
    except YamlError as error:
        place = ":".join([str(file), *map(str, error.position or ())])
        hint = (
            (
                ": the file is a template: render it first, for example with 'helm template CHART |"
                " plimsoll inject -f -'"
            )
            if HELM_TEMPLATE_PATTERN.search(text)
            else ""
        )
        raise UsageError(f"{place}: {error}{hint}") from None
    return found


def _iterate_objects(value: Any, node: Node, position: str, file: Path) -> Iterator[ManifestObject]:
    if not isinstance(value, dict):
        shown = {list: "a list", type(None): "nothing"}.get(type(value), "a string or a number")
        raise UsageError(
            f"{file}: {position}: must be a Kubernetes object, not {shown}: use a manifest"
        )
    for part in ("apiVersion", "kind"):
        if not isinstance(value.get(part), str):
            raise UsageError(
                f"{file}: {position}: {part} is missing: use a manifest; for a Helm chart, use the"
                " output of 'helm template', and for a kustomization, the output of 'kustomize"
                " build'"
            )
    items = value.get("items")
    if not (value["kind"].endswith("List") and isinstance(items, list)):
        yield ManifestObject(position, value, node)
        return
    nodes = node.find_entry("items")
    assert nodes is not None, "the items of a List are a field of its node"
    for number, (item, child) in enumerate(zip(items, nodes.resolved.children, strict=True), 1):
        yield from _iterate_objects(item, child, f"{position}, item {number}", file)


def add_file_context(
    options: InjectionOptions, objects_in_file: list[ManifestObject]
) -> InjectionOptions:
    """Return a copy of ``options`` with the ConfigMaps and KServe runtimes in the file."""
    return replace(
        options,
        config_maps=_collect_fields_by_name(objects_in_file, "ConfigMap", "data"),
        # A namespaced runtime overrides a cluster-scoped one.
        runtimes=_collect_fields_by_name(objects_in_file, RUNTIME_KINDS[1], "spec")
        | _collect_fields_by_name(objects_in_file, RUNTIME_KINDS[0], "spec"),
    )


def _collect_fields_by_name(
    objects_in_file: list[ManifestObject], kind: str, field: str
) -> dict[str, Object]:
    return {
        str(metadata.get("name")): parsed
        for place in objects_in_file
        if place.value["kind"] == kind
        and isinstance(metadata := place.value.get("metadata"), dict)
        and isinstance(parsed := place.value.get(field), dict)
    }


def format_kind(document: Object) -> str:
    """Return the kind with its API group, as kubectl prints it."""
    group, _, _ = str(document.get("apiVersion")).rpartition("/")
    return f"{document.get('kind')}.{group}" if group else str(document.get("kind"))


def _render_document(parsed: ParsedDocument) -> str:
    document = parsed.document
    if parsed.root is None or parsed.value is None or not parsed.replacements:
        return document.separator + document.text
    wanted = _replace_objects(parsed.value, parsed.root, parsed.replacements)
    edited = find_changes(document.text, parsed.root, wanted, document.is_json)
    text = apply_changes(document.text, edited)
    try:
        again = Document("", text, is_json=document.is_json).parse_root()
        if again is None or not is_json_equal(again.read_value(), wanted):
            raise EditError(REWRITE_MESSAGE)
    except YamlError as error:
        raise EditError(f"{REWRITE_MESSAGE}: {error}") from None
    lines = [f"of {_format_identity(parsed.value)}", *format_record(edited)]
    for at, added in enumerate(parsed.added):
        annotations = {RECORD_ANNOTATION: "\n".join(lines if not at else lines[:1]) + "\n"}
        added["metadata"] = {**added["metadata"], "annotations": annotations}
    if document.is_json_stream:
        shown = [json.dumps(added, indent=2) + "\n" for added in parsed.added]
        return document.separator + "".join(shown) + text
    end = get_line_end(document.text)
    blocks = [dump(added).replace("\n", end) for added in parsed.added]
    separator = f"---{end}"
    if document.is_json:
        # kubectl reads further documents as YAML, but this one is JSON.
        return document.separator + text + "".join(separator + block for block in blocks)
    return document.separator + "".join(block + separator for block in blocks) + text


# ``replacements`` are keyed by the ``id`` of a node.
def _replace_objects(value: Any, node: Node, replacements: dict[int, Object]) -> Any:
    if id(node) in replacements:
        return replacements[id(node)]
    items = node.find_entry("items")
    if items is None or not isinstance(value["items"], list):
        return value
    listed = zip(value["items"], items.resolved.children, strict=True)
    return value | {
        "items": [_replace_objects(item, child, replacements) for item, child in listed]
    }


def _remove_injected(text: str, file: Path) -> str:
    if RECORD_ANNOTATION not in text:
        return text
    parsed = read_documents(text, file)
    records = [_find_injection_record(one) for one in parsed]
    texts = [one.document.text for one in parsed]
    separators = [one.document.separator for one in parsed]
    for at, lines in enumerate(records):
        if lines is None:
            continue
        others = [*range(at + 1, len(parsed)), *range(at)]
        changed = [
            n
            for n in others
            if records[n] is None and lines[:1] == [f"of {_format_identity(parsed[n].value)}"]
        ]
        for n in changed[: len(lines) > 1]:
            try:
                texts[n] = apply_changes(
                    texts[n], find_reversals(texts[n], parsed[n].root, lines[1:])
                )
            except ValueError as error:
                raise UsageError(
                    f"{file}: {parsed[n].objects_in_file[0].position}: {RECORD_ANNOTATION}: {error}"
                ) from None
        texts[at] = ""
        separators[at + 1 if at + 1 < len(parsed) else at] = ""
    return "".join(map("".join, zip(separators, texts, strict=True)))


def _find_injection_record(parsed: ParsedDocument) -> list[str] | None:
    metadata = (parsed.value or {}).get("metadata")
    annotations = metadata.get("annotations") if isinstance(metadata, dict) else None
    found = annotations.get(RECORD_ANNOTATION) if isinstance(annotations, dict) else None
    return found.splitlines() if isinstance(found, str) else None


def _format_identity(document: Object | None) -> str:
    if document is None:
        return ""
    metadata = document.get("metadata")
    meta = metadata if isinstance(metadata, dict) else {}
    names = [str(meta[key]) for key in ("namespace", "name", "generateName") if key in meta]
    return " ".join("/".join([format_kind(document), *names]).split())


class _ConfigMapNames:
    """Names of the ConfigMaps in a file, to find conflicts with those of the supervisors."""

    def __init__(self, objects_in_file: list[ManifestObject]) -> None:
        self.taken = {
            self.make_key(place.value): f"{place.position} of the file"
            for place in objects_in_file
            if place.value["kind"] == "ConfigMap" and place.value["apiVersion"] == "v1"
        }

    @staticmethod
    def make_key(config_map: Object) -> tuple[str, str]:
        metadata = config_map.get("metadata")
        meta = metadata if isinstance(metadata, dict) else {}
        return str(meta.get("namespace") or ""), str(meta.get("name"))

    def find_name_conflict(self, document: Object, config_map: Object | None = None) -> str | None:
        """Return an error message if the supervisor's ConfigMap has the name of another one.

        ``config_map`` is None if it could not be created for another reason.
        """
        namespace, name = self.make_key(document)
        key = (
            (namespace, make_supervisor_name(name))
            if config_map is None
            else self.make_key(config_map)
        )
        if key not in self.taken:
            return None
        return (
            f"{_format_identity(document)}: the supervisor's ConfigMap needs the name {key[1]},"
            f" but {self.taken[key]} has this name: rename that ConfigMap or the workload"
        )

    def reserve_name(self, injected: InjectedDocument, document: Object) -> None:
        if injected.config_map is None:
            return
        if (taken := self.find_name_conflict(document, injected.config_map)) is not None:
            raise InjectionError(taken)
        self.taken[self.make_key(injected.config_map)] = (
            f"the supervisor's ConfigMap of {_format_identity(document)}"
        )


Labels = Mapping[str, str]
Requirement = Callable[[Labels], bool]

_LABEL_KEY = r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
_LABEL_VALUE = r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?"
_EQUALITY_PATTERN = re.compile(
    rf"(?P<key>{_LABEL_KEY})\s*(?P<sign>==|=|!=)\s*(?P<value>{_LABEL_VALUE})"
)
_SET_PATTERN = re.compile(rf"(?P<key>{_LABEL_KEY})\s+(?P<sign>in|notin)\s*\((?P<values>[^()]*)\)")
_EXISTS_PATTERN = re.compile(rf"(?P<sign>!?)\s*(?P<key>{_LABEL_KEY})")
_COMMA_PATTERN = re.compile(r",(?![^(]*\))")
"""Comma between two requirements, but not in the parentheses of a set."""


@dataclass(frozen=True)
class Selection:
    """Selection of objects by name and labels; if ``names`` is empty, all names match."""

    names: frozenset[str] = frozenset()
    requirements: tuple[Requirement, ...] = ()

    def matches(self, document: Mapping[str, Any]) -> bool:
        """Report whether the document is selected."""
        metadata = document.get("metadata")
        if not isinstance(metadata, Mapping):
            metadata = {}
        labels = metadata.get("labels")
        parsed = {str(k): str(v) for k, v in labels.items()} if isinstance(labels, Mapping) else {}
        named = not self.names or metadata.get("name") in self.names
        return named and all(meets(parsed) for meets in self.requirements)


def parse_selector(selector: str) -> tuple[Requirement, ...]:
    """Return the requirements of a label selector such as ``app=vllm,tier in (a,b),!canary``.

    The syntax is that of the Kubernetes API. Raises UsageError.
    """
    return tuple(_parse_requirement(part.strip()) for part in _COMMA_PATTERN.split(selector))


def _parse_requirement(text: str) -> Requirement:
    if (found := _EQUALITY_PATTERN.fullmatch(text)) is not None:
        return _make_set_requirement(found["key"], {found["value"]}, negated=found["sign"] == "!=")
    if (found := _SET_PATTERN.fullmatch(text)) is not None:
        values = {value.strip() for value in found["values"].split(",")}
        return _make_set_requirement(found["key"], values, negated=found["sign"] == "notin")
    if (found := _EXISTS_PATTERN.fullmatch(text)) is not None:
        key, absent = found["key"], found["sign"] == "!"
        return lambda labels: (key in labels) is not absent
    raise UsageError(
        f"--selector: {text!r} is not a label requirement; use a requirement such as app=vllm"
    )


# An object without the label meets a negated requirement, as in the Kubernetes API.
def _make_set_requirement(key: str, values: set[str], negated: bool) -> Requirement:
    return lambda labels: ((key in labels) and labels[key] in values) is not negated
