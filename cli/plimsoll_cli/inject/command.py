"""Adds supervisors to the workloads in a file, and takes them out again.

What is added to a document is written into its text; all other text stays as it is. What was
changed is recorded in an annotation of the supervisor's ConfigMap, so that it can be taken back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from plimsoll_cli.errors import UsageError
from plimsoll_cli.inject.edit import EditError, apply, changes, line_end, record, same, undo
from plimsoll_cli.manifest import read_text
from plimsoll_cli.yaml_text import YamlError, dump
from plimsoll_cli.yaml_tree import Document, Node, split
from plimsoll_operator.injection.configuration import Injected
from plimsoll_operator.injection.documents import inject_document
from plimsoll_operator.injection.errors import InjectionError
from plimsoll_operator.injection.options import Options
from plimsoll_operator.injection.pods import KINDS, RUNTIMES
from plimsoll_operator.render.names import supervisor

Object = dict[str, Any]

RECORD = "plimsoll.dev/injected"
"""Annotation of what ``plimsoll inject`` adds to a file: the changed document, and each change."""
TEMPLATE = re.compile(r"\{\{-?\s*[.$a-zA-Z/]")


@dataclass
class Place:
    """An object of a file: a document, or an item of a list of objects. ``at`` is for a person."""

    at: str
    value: Object
    node: Node


@dataclass
class Held:
    """A document that was read: no value if it is empty. ``added`` are objects to put before it.

    ``wanted`` has the injected objects, by the nodes of those that they replace.
    """

    document: Document
    root: Node | None = None
    value: Object | None = None
    places: list[Place] = field(default_factory=list)
    added: list[Object] = field(default_factory=list)
    wanted: dict[int, Object] = field(default_factory=dict)


def run(file: Path, options: Options, selection: Selection) -> tuple[str, list[str]]:
    """Return the text to print and notes for a person.

    UsageError, which names the file, the object and the field, if the file cannot be read, if a
    workload that was asked for by its name cannot be supervised, and if nothing was injected.
    """
    text = _without_injected(read_text(file), file)
    held = documents(text, file)
    everything = [place for one in held for place in one.places]
    options = beside(options, everything)
    demanded = options.unrecognized or bool(selection.names)
    names = _ConfigMaps(everything)
    notes: list[str] = []
    errors: list[str] = []
    count = 0
    made: list[str] = []
    for one in held:
        for place in one.places:
            if not selection.takes(place.value):
                continue
            try:
                injected = inject_document(place.value, options)
                names.check(injected, place.value)
            except InjectionError as error:
                # Of a name that is taken, a person would read only once all else is mended.
                taken = names.taken_for(place.value)
                found = list(dict.fromkeys([str(error), *([taken] if taken else [])]))
                if demanded:
                    raise UsageError(
                        "\n".join(f"{file}: {place.at}: {one}" for one in found)
                    ) from None
                errors += [f"{place.at}: {one}" for one in found]
                continue
            notes += injected.notes
            if injected.config_map is not None:
                one.wanted[id(place.node)] = injected.document
                one.added += [injected.config_map, *injected.others]
        try:
            made.append(_changed(one))
            count += len(one.wanted)
        except EditError as error:
            where = one.places[0].at
            if demanded:
                raise UsageError(f"{file}: {where}: {error}") from None
            errors.append(f"{where}: {error}")
            made.append(one.document.before + one.document.text)
    if errors and not count:
        raise UsageError("\n".join(f"{file}: {error}" for error in errors))
    if not count:
        raise UsageError(f"{file}: nothing to inject:\n{_why(everything, notes, selection)}")
    return "".join(made), [*notes, *(f"{error} (left unchanged)" for error in errors)]


def remove(file: Path) -> str:
    """Return the file without what :func:`run` added to it. UsageError if that is nothing."""
    text = read_text(file)
    made = _without_injected(text, file)
    if made == text:
        raise UsageError(
            f"{file}: holds nothing that inject added: the record is an annotation {RECORD} of the"
            " supervisor's ConfigMap, which must be in the same file"
        )
    return made


def _why(places: list[Place], notes: list[str], selection: Selection) -> str:
    if notes:
        return "\n".join(notes)
    if places and not any(selection.takes(place.value) for place in places):
        return "no document matches --name and --selector"
    kinds = ", ".join(dict.fromkeys(kind_of(place.value) for place in places)) or "nothing"
    return f"the file holds {kinds}, and inject accepts {KINDS}"


def documents(text: str, file: Path) -> list[Held]:
    """Return the documents of a file. UsageError for one that is no manifest."""
    found: list[Held] = []
    count = 0
    try:
        for document in split(text):
            root = document.root()
            value = None if root is None else root.value()
            if root is None or value is None:
                found.append(Held(document))
                continue
            count += 1
            at = f"document {count}"
            found.append(Held(document, root, value, list(_objects(value, root, at, file))))
    except YamlError as error:
        place = ":".join([str(file), *map(str, error.at or ())])
        hint = (
            ": this is a template: render it first, for example with helm template CHART | plimsoll"
            " inject -f -"
            if TEMPLATE.search(text)
            else ""
        )
        raise UsageError(f"{place}: {error}{hint}") from None
    return found


def _objects(value: Any, node: Node, at: str, file: Path) -> Iterator[Place]:
    """Yield the objects in a document, with their places."""
    if not isinstance(value, dict):
        shown = {list: "a list", type(None): "nothing"}.get(type(value), "a text or a number")
        raise UsageError(f"{file}: {at}: holds {shown}, not a manifest")
    for part in ("apiVersion", "kind"):
        if not isinstance(value.get(part), str):
            raise UsageError(
                f"{file}: {at}: {part}: required: this is no manifest. Of a Helm chart, give what"
                " helm template prints, and of a kustomization, what kustomize build prints"
            )
    items = value.get("items")
    if not (value["kind"].endswith("List") and isinstance(items, list)):
        yield Place(at, value, node)
        return
    nodes = node.entry("items")
    assert nodes is not None, "it has this value"
    for number, (item, child) in enumerate(zip(items, nodes.resolved.children, strict=True), 1):
        if isinstance(item, dict):
            yield from _objects(item, child, f"{at}, item {number}", file)


def beside(options: Options, places: list[Place]) -> Options:
    """Return ``options`` with what else the file holds: ConfigMaps and KServe's runtimes."""
    return replace(
        options,
        config_maps=_held(places, "ConfigMap", "data"),
        # A runtime of the namespace comes before one of the cluster.
        runtimes=_held(places, RUNTIMES[1], "spec") | _held(places, RUNTIMES[0], "spec"),
    )


def _held(places: list[Place], kind: str, field: str) -> dict[str, Object]:
    """Return a field of all objects of a kind, by their names."""
    return {
        str(metadata.get("name")): held
        for place in places
        if place.value["kind"] == kind
        and isinstance(metadata := place.value.get("metadata"), dict)
        and isinstance(held := place.value.get(field), dict)
    }


def kind_of(document: Object) -> str:
    """Name the kind of an object as kubectl does, with its group."""
    group, _, _ = str(document.get("apiVersion")).rpartition("/")
    return f"{document.get('kind')}.{group}" if group else str(document.get("kind"))


def _changed(held: Held) -> str:
    """Return a document's text with what was injected. Raises EditError."""
    document = held.document
    if held.root is None or held.value is None or not held.wanted:
        return document.before + document.text
    wanted = _with(held.value, held.root, held.wanted)
    made = changes(document.text, held.root, wanted, document.is_json)
    text = apply(document.text, made)
    try:
        again = Document("", text, is_json=document.is_json).root()
        if again is None or not same(again.value(), wanted):
            raise EditError("its YAML is written in a form that inject cannot extend")
    except YamlError as error:
        raise EditError(
            f"its YAML is written in a form that inject cannot extend: {error}"
        ) from None
    lines = [f"of {_identity(held.value)}", *record(made)]
    for at, added in enumerate(held.added):
        annotations = {RECORD: "\n".join(lines if not at else lines[:1]) + "\n"}
        added["metadata"] = {**added["metadata"], "annotations": annotations}
    if document.stream:
        shown = [json.dumps(added, indent=2) + "\n" for added in held.added]
        return document.before + "".join(shown) + text
    end = line_end(document.text)
    blocks = [dump(added).replace("\n", end) for added in held.added]
    separator = f"---{end}"
    if document.is_json:
        # What follows the first document is YAML to kubectl, and this one is not.
        return document.before + text + "".join(separator + block for block in blocks)
    return document.before + "".join(block + separator for block in blocks) + text


def _with(value: Any, node: Node, wanted: dict[int, Object]) -> Any:
    """Return the document's value with the injected objects in it."""
    if id(node) in wanted:
        return wanted[id(node)]
    items = node.entry("items")
    if items is None or not isinstance(value["items"], list):
        return value
    listed = zip(value["items"], items.resolved.children, strict=True)
    return value | {"items": [_with(item, child, wanted) for item, child in listed]}


def _without_injected(text: str, file: Path) -> str:
    """Return ``text`` without what an earlier injection recorded; unchanged if there is none."""
    if RECORD not in text:
        return text
    held = documents(text, file)
    records = [_record_of(one) for one in held]
    texts = [one.document.text for one in held]
    befores = [one.document.before for one in held]
    for at, lines in enumerate(records):
        if lines is None:
            continue
        others = [*range(at + 1, len(held)), *range(at)]
        changed = [
            n
            for n in others
            if records[n] is None and lines[:1] == [f"of {_identity(held[n].value)}"]
        ]
        for n in changed[: len(lines) > 1]:
            try:
                texts[n] = apply(texts[n], undo(texts[n], held[n].root, lines[1:]))
            except ValueError as error:
                raise UsageError(f"{file}: {held[n].places[0].at}: {RECORD}: {error}") from None
        texts[at] = ""
        befores[at + 1 if at + 1 < len(held) else at] = ""
    return "".join(before + one for before, one in zip(befores, texts, strict=True))


def _record_of(held: Held) -> list[str] | None:
    """Return the lines of the record that an added object holds, None for any other object."""
    metadata = (held.value or {}).get("metadata")
    annotations = metadata.get("annotations") if isinstance(metadata, dict) else None
    found = annotations.get(RECORD) if isinstance(annotations, dict) else None
    return found.splitlines() if isinstance(found, str) else None


def _identity(document: Object | None) -> str:
    """Which object a document is for, on one line."""
    if document is None:
        return ""
    metadata = document.get("metadata")
    meta = metadata if isinstance(metadata, dict) else {}
    names = [str(meta[key]) for key in ("namespace", "name", "generateName") if key in meta]
    return " ".join("/".join([kind_of(document), *names]).split())


class _ConfigMaps:
    """The ConfigMaps of a file: a supervisor's may have the name of no other one."""

    def __init__(self, places: list[Place]) -> None:
        self.taken = {
            self.key(place.value): f"the file's own {place.at}"
            for place in places
            if place.value["kind"] == "ConfigMap" and place.value["apiVersion"] == "v1"
        }

    @staticmethod
    def key(config_map: Object) -> tuple[str, str]:
        """Return namespace and name."""
        metadata = config_map.get("metadata")
        meta = metadata if isinstance(metadata, dict) else {}
        return str(meta.get("namespace") or ""), str(meta.get("name"))

    def taken_for(self, document: Object, made: Object | None = None) -> str | None:
        """Say what has the name of the supervisor's ConfigMap of a workload; None for nothing.

        ``made`` is that ConfigMap, None where there is none because of another problem.
        """
        namespace, name = self.key(document)
        key = (namespace, supervisor(name)) if made is None else self.key(made)
        if key not in self.taken:
            return None
        return (
            f"{_identity(document)}: the supervisor's ConfigMap would be {key[1]}, and that is"
            f" {self.taken[key]}: give the ConfigMap or the workload another name"
        )

    def check(self, injected: Injected, document: Object) -> None:
        """Raise InjectionError if the supervisor's ConfigMap has a name that is taken."""
        if injected.config_map is None:
            return
        if (taken := self.taken_for(document, injected.config_map)) is not None:
            raise InjectionError(taken)
        self.taken[self.key(injected.config_map)] = f"the one of {_identity(document)}"


Labels = Mapping[str, str]
Requirement = Callable[[Labels], bool]

_KEY = r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
_VALUE = r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?"
_EQUALITY = re.compile(rf"(?P<key>{_KEY})\s*(?P<sign>==|=|!=)\s*(?P<value>{_VALUE})")
_SET = re.compile(rf"(?P<key>{_KEY})\s+(?P<sign>in|notin)\s*\((?P<values>[^()]*)\)")
_EXISTS = re.compile(rf"(?P<sign>!?)\s*(?P<key>{_KEY})")
_COMMA = re.compile(r",(?![^(]*\))")
"""A comma that separates requirements, and not the values of a set."""


@dataclass(frozen=True)
class Selection:
    """Documents that have one of ``names``, if any are given, and meet all ``requirements``."""

    names: frozenset[str] = frozenset()
    requirements: tuple[Requirement, ...] = ()

    def takes(self, document: Mapping[str, Any]) -> bool:
        """Return whether ``document`` is chosen, by its own name and labels."""
        metadata = document.get("metadata")
        if not isinstance(metadata, Mapping):
            metadata = {}
        labels = metadata.get("labels")
        held = {str(k): str(v) for k, v in labels.items()} if isinstance(labels, Mapping) else {}
        named = not self.names or metadata.get("name") in self.names
        return named and all(meets(held) for meets in self.requirements)


def parse_selector(selector: str) -> tuple[Requirement, ...]:
    """Return the requirements of a label selector such as ``app=vllm,tier in (a,b),!canary``.

    The syntax is that of the Kubernetes API. UsageError names a requirement that has another form.
    """
    return tuple(_requirement(part.strip()) for part in _COMMA.split(selector))


def _requirement(text: str) -> Requirement:
    if (found := _EQUALITY.fullmatch(text)) is not None:
        return _one_of(found["key"], {found["value"]}, negated=found["sign"] == "!=")
    if (found := _SET.fullmatch(text)) is not None:
        values = {value.strip() for value in found["values"].split(",")}
        return _one_of(found["key"], values, negated=found["sign"] == "notin")
    if (found := _EXISTS.fullmatch(text)) is not None:
        key, absent = found["key"], found["sign"] == "!"
        return lambda labels: (key in labels) is not absent
    raise UsageError(f"--selector: {text!r} is not a label requirement; write for example app=vllm")


def _one_of(key: str, values: set[str], negated: bool) -> Requirement:
    """Require that a label has one of ``values``, or with ``negated`` none of them.

    As in the Kubernetes API, a negated requirement also takes objects without the label.
    """
    return lambda labels: ((key in labels) and labels[key] in values) is not negated
