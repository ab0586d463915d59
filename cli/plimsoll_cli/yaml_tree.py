"""The documents of a file as kubectl reads them, with the place of each value in the text.

kubectl's scanner is a port of libyaml. libyaml's own therefore accepts the same texts, tabs and
all; it is used for places only, and :mod:`plimsoll_cli.yaml_text` says what scalars mean. Files are
untrusted: they are bounded in size, in depth, and in the values that aliases stand for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml

from plimsoll_cli.yaml_text import LONG, MAX_KEY, YamlError, json_value, shortest, tagged

MAX_FILE = 16 << 20
"""Bytes of a file: 5,000 documents, each larger than most workloads."""
MAX_DOCUMENT = 3 << 20
"""Bytes of a document: the API server takes no larger request (its limit for writes is 3 MiB)."""
MAX_NESTING = 100
MAX_ALIASED = 100_000
"""Values that the aliases of a document may expand to. kubectl refuses some 400,000."""


@dataclass(slots=True)
class Node:
    """A value, and where it stands: ``text[start:end]``, from its anchor or tag on.

    ``children`` are the items of a list, or the keys and values of a mapping in turns. ``end`` is
    after the last character that belongs to the value; comments do not. ``target`` is what an alias
    refers to. ``size`` counts the values in it and ``height`` its levels, with what aliases stand
    for. ``keeps_line_ends`` says whether empty lines after it belong to it.
    """

    kind: Literal["scalar", "list", "mapping", "alias"]
    start: int
    end: int
    flow: bool = False
    scalar: Any = None
    children: list[Node] = field(default_factory=list)
    target: Node | None = None
    anchored: bool = False
    keeps_line_ends: bool = False
    size: int = 1
    height: int = 1
    open: bool = False

    @property
    def resolved(self) -> Node:
        """The value itself, or what the alias refers to."""
        return self.target if self.target is not None else self

    def entries(self) -> Iterator[tuple[Node, Node]]:
        """Yield the keys and values of a mapping."""
        return zip(self.children[::2], self.children[1::2], strict=True)

    def entry(self, name: str) -> Node | None:
        """Return the value of a mapping's own key; of two, the last one. None if it has none."""
        found = None
        for key, value in self.resolved.entries() if self.resolved.kind == "mapping" else ():
            if key.scalar is not MERGE and key.name() == name:
                found = value
        return found

    def value(self, strict: bool = False) -> Any:
        """Return what kubectl makes of it; with ``strict``, no key may stand twice.

        Raises YamlError where kubectl would refuse it.
        """
        node = self.resolved
        if node.kind == "scalar":
            return "<<" if node.scalar is MERGE else json_value(node.scalar)
        if node.kind == "list":
            return [one.value(strict) for one in node.children]
        made: dict[str, Any] = {}
        own: set[str] = set()
        for key, value in node.entries():
            if key.scalar is MERGE:
                for source in value.merged():
                    made.update(source.value(strict))
                continue
            name = key.name()
            if strict and name in own:
                raise YamlError(f"{name} appears twice: remove one of them")
            own.add(name)
            made[name] = value.value(strict)
        return made

    def merged(self) -> list[Node]:
        """Return the mappings that a merge key brings in; of two, the later one counts."""
        listed = self.kind == "list"
        sources = self.children[::-1] if listed else [self]
        if any(one.resolved.kind != "mapping" for one in sources):
            raise YamlError("<< needs a mapping, or a list of mappings")
        return sources

    def name(self) -> str:
        """Return a key as the text that sigs.k8s.io/yaml makes of it for JSON."""
        value = self.resolved.scalar
        if self.resolved.kind == "scalar" and value is not None:
            if isinstance(value, str):
                return value
            if isinstance(value, bool):
                return str(value).lower()
            if isinstance(value, float):
                return shortest(value)
            if value <= MAX_KEY:
                return str(value)
        raise YamlError("a key must be a text or a number")


class _Merge:
    """The key ``<<``, which is no text."""


MERGE = _Merge()


class _Composer:
    """Makes nodes of libyaml's events: PyYAML's own composer forgets where aliases stand."""

    def __init__(self, text: str, json_text: bool) -> None:
        self.text, self.json_text = text, json_text
        self.anchors: dict[str, Node] = {}
        self.aliased = 0
        # What the scanner does not know is masked: it is asked for places, JSON reads the texts.
        shown = _masked(text) if json_text else text
        self.events: Iterator[Any] = yaml.parse(shown, Loader=yaml.CSafeLoader)

    def document(self) -> Node | None:
        """Return the root of the first document; None if there is none."""
        try:
            for event in self.events:
                if isinstance(event, yaml.DocumentStartEvent):
                    root = self.node(next(self.events), 1)
                    next(self.events)  # Its end: the rest is not read, as kubectl does not.
                    return root
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            at = (mark.line + 1, mark.column + 1) if mark else None
            raise YamlError(f"not YAML: {error.problem or error.context}", at) from None
        except yaml.YAMLError as error:
            raise YamlError(f"not YAML: {str(error).splitlines()[0]}") from None
        return None

    def node(self, event: Any, depth: int) -> Node:
        """Return the value that begins with ``event``, ``depth`` levels down."""
        start, end = event.start_mark.index, event.end_mark.index
        if isinstance(event, yaml.AliasEvent):
            return self.alias(event, depth)
        if isinstance(event, yaml.ScalarEvent):
            made = self.scalar(event, start, end)
        else:
            listed = isinstance(event, yaml.SequenceStartEvent)
            flow = bool(event.flow_style)
            made = Node("list" if listed else "mapping", start, end, flow, open=True)
        if event.anchor is not None:
            made.anchored = True
            self.anchors[event.anchor] = made
        if made.open:
            self.fill(made, depth)
        _check_depth(depth, made, event)
        return made

    def fill(self, made: Node, depth: int) -> None:
        """Read what is in a list or mapping."""
        for event in self.events:
            if isinstance(event, yaml.CollectionEndEvent):
                break
            _check_depth(depth, made, event)
            child = self.node(event, depth + 1)
            made.children.append(child)
            made.size += child.size
            made.height = max(made.height, child.height + 1)
        made.open = False
        if made.flow:
            made.end = event.end_mark.index
        elif made.children:
            made.end = made.children[-1].end
            made.keeps_line_ends = made.children[-1].keeps_line_ends

    def scalar(self, event: Any, start: int, end: int) -> Node:
        """Return a scalar with its value."""
        made = Node("scalar", start, end)
        tag = event.tag
        unquoted = event.implicit[0]
        try:
            if self.json_text:
                made.scalar = _from_json(self.text[start:end])
            elif event.value == "<<" and ((unquoted and tag is None) or tag == f"{LONG}merge"):
                made.scalar = MERGE
            else:
                made.scalar = tagged(tag, event.value, unquoted)
        except YamlError as error:
            raise YamlError(str(error), _at(event)) from None
        quoted = self.text[start:end] if event.style == '"' and not self.json_text else ""
        if r"\/" in quoted and r"\/" in ESCAPES.findall(quoted):
            raise YamlError(r"not YAML for kubectl: \/ is an escape of JSON only", _at(event))
        if event.style in ("|", ">"):
            body = self.text[start:end]
            made.keeps_line_ends = "+" in body.partition("\n")[0].partition("#")[0]
            if not made.keeps_line_ends:
                made.end = start + len(body.rstrip(" \t\r\n"))
        return made

    def alias(self, event: Any, depth: int) -> Node:
        """Return a reference. Raises YamlError where too many values stand for references."""
        target = self.anchors.get(event.anchor)
        if target is None:
            raise YamlError(f"unknown anchor {event.anchor[:40]!r}", _at(event))
        if target.open:
            raise YamlError(f"the alias {event.anchor[:40]!r} stands in itself", _at(event))
        self.aliased += target.size
        if self.aliased > MAX_ALIASED:
            raise YamlError(f"aliases stand for more than {MAX_ALIASED} values", _at(event))
        start, end = event.start_mark.index, event.end_mark.index
        made = Node("alias", start, end, target=target, size=target.size, height=target.height)
        _check_depth(depth, made, event)
        return made


def _check_depth(depth: int, made: Node, event: Any) -> None:
    if depth + made.height > MAX_NESTING:
        raise YamlError("nested too deeply to be a manifest", _at(event))


def _at(event: Any) -> tuple[int, int]:
    return event.start_mark.line + 1, event.start_mark.column + 1


SURROGATES = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
"""Two escapes for one character, as JSON writes an emoji. YAML has no such pair."""
CONTROLS = re.compile("[\x7f-\x84\x86-\x9f\ufeff\ufffe\uffff]")
"""Characters that JSON permits in a text and YAML does not."""
ESCAPES = re.compile(r"\\.", re.DOTALL)


def _masked(text: str) -> str:
    return CONTROLS.sub("x", SURROGATES.sub(r"\\u0041\\u0041", text))


def _not_json(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_JSON = json.JSONDecoder(parse_constant=_not_json)


def _from_json(text: str) -> Any:
    try:
        return _JSON.decode(text)
    except ValueError as error:
        raise YamlError(f"not JSON: {error}") from None


@dataclass(frozen=True)
class Document:
    """A document of a file: ``text`` is what kubectl reads of it, ``before`` what separates it.

    ``line`` is the one that ``text`` begins at. ``is_json`` says how its values are written,
    ``stream`` that no separators stand between the documents, only JSON objects.
    """

    before: str
    text: str
    line: int = 1
    is_json: bool = False
    stream: bool = False

    def root(self) -> Node | None:
        """Return the document's value with all places; None if it is empty.

        Raises YamlError, with the place in the file, where kubectl would refuse it.
        """
        if len(self.text) > MAX_DOCUMENT:
            raise YamlError(
                f"larger than {MAX_DOCUMENT >> 20} MiB: this is not a manifest", (self.line, 1)
            )
        if self.text.strip() == "...":
            return None
        try:
            # kubectl reads lines, and ends the last one.
            ended = self.text if self.text.endswith("\n") or self.is_json else f"{self.text}\n"
            return _Composer(ended, self.is_json).document()
        except YamlError as error:
            line, column = error.at or (1, 1)
            raise YamlError(str(error), (self.line + line - 1, column)) from None


def split(text: str) -> list[Document]:
    """Return the documents of a file, as kubectl tells them apart.

    ``before`` and ``text`` of all of them, one after the other, are the file. Raises YamlError.
    """
    if len(text) > MAX_FILE:
        raise YamlError(f"larger than {MAX_FILE >> 20} MiB: these are not manifests")
    before = "\ufeff" if text.startswith("\ufeff") else ""
    text = text.removeprefix(before)
    if (stream := _json_stream(before, text)) is not None:
        return stream
    made: list[Document] = []
    held: list[str] = []
    first = 1
    for number, line in enumerate(_LINE.findall(text), 1):
        if not line.startswith("---"):
            held.append(line)
            continue
        behind = line[3:].strip()
        if behind and not behind.startswith("#"):
            raise YamlError(
                "not YAML for kubectl: put what is behind --- on a line of its own", (number, 4)
            )
        made.append(_document(before, "".join(held), first, is_first=not made))
        before, held, first = line, [], number + 1
    return [*made, _document(before, "".join(held), first, is_first=not made)]


_LINE = re.compile(r"[^\n]*\n|[^\n]+")


def _document(before: str, text: str, line: int, is_first: bool) -> Document:
    """Return a document between separators. Only the first one may be JSON that is not YAML."""
    if not is_first or not text.lstrip().startswith("{"):
        return Document(before, text, line)
    try:
        _JSON.decode(text)
    except (ValueError, RecursionError):
        return Document(before, text, line)
    return Document(before, text, line, is_json=True)


def _json_stream(before: str, text: str) -> list[Document] | None:
    """Return the documents of a file that holds only JSON objects; None for any other file."""
    if not text.lstrip().startswith("{"):
        return None
    made: list[Document] = []
    at = 0
    while (begin := _past_space(text, at)) < len(text):
        try:
            _, end = _JSON.raw_decode(text, begin)
        except (ValueError, RecursionError) as error:
            if len(made) > 1:
                line = text.count("\n", 0, begin) + 1
                raise YamlError(f"not JSON: {error}", (line, 1)) from None
            return None
        line = text.count("\n", 0, begin) + 1
        made.append(Document(before + text[at:begin], text[begin:end], line, True, True))
        before, at = "", end
    return [*made, Document(before + text[at:], "", stream=True)]


def _past_space(text: str, at: int) -> int:
    found = re.compile(r"\s*").match(text, at)
    return found.end() if found is not None else at
