"""Parse manifests as kubectl does, and record the position of each value in the text.

kubectl's scanner is a port of libyaml, which is therefore used here. Files are untrusted, so their
size, depth and number of expanded aliases are limited.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml

from plimsoll_cli.yaml_text import (
    MAX_INTEGER_KEY,
    TAG_PREFIX,
    YamlError,
    format_float_key,
    parse_scalar,
    to_json_value,
)

MAX_FILE_BYTES = 16 << 20
"""Maximum size of a file, enough for 5,000 large workloads."""
MAX_DOCUMENT_BYTES = 3 << 20
"""Maximum size of a document, as the API server's limit for requests."""
MAX_NESTING_LEVELS = 100
MAX_EXPANDED_VALUES = 100_000
"""Maximum number of values in a document with aliases expanded; kubectl's limit is about
400,000."""


@dataclass(slots=True)
class Node:
    """Value at ``text[start:end]``. The range includes an anchor or tag, but no comments.

    Attributes:
        children: The items of a list, or the alternating keys and values of a mapping.
        target: The node that an alias refers to.
        size: The number of values in the node, with aliases expanded.
        height: The number of levels in the node, with aliases expanded.
        keeps_line_ends: Whether empty lines after the value belong to it.
        open: Whether the end of the collection has not been read yet.

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
        """The node itself, or the target if it is an alias."""
        return self.target if self.target is not None else self

    def iterate_entries(self) -> Iterator[tuple[Node, Node]]:
        """Yield the pairs of key and value of a mapping."""
        return zip(self.children[::2], self.children[1::2], strict=True)

    def find_entry(self, name: str) -> Node | None:
        """Return the last value with the key ``name``, or None; ignore merged mappings."""
        found = None
        for key, value in (
            self.resolved.iterate_entries() if self.resolved.kind == "mapping" else ()
        ):
            if key.scalar is not MERGE_KEY and key.make_json_key() == name:
                found = value
        return found

    def read_value(self, strict: bool = False) -> Any:
        """Return the value as kubectl reads it.

        Raises YamlError if kubectl rejects the value, or if ``strict``, for a duplicate key.
        """
        node = self.resolved
        if node.kind == "scalar":
            return "<<" if node.scalar is MERGE_KEY else to_json_value(node.scalar)
        if node.kind == "list":
            return [one.read_value(strict) for one in node.children]
        made: dict[str, Any] = {}
        own: set[str] = set()
        for key, value in node.iterate_entries():
            if key.scalar is MERGE_KEY:
                for source in value.list_merged_mappings():
                    made.update(source.read_value(strict))
                continue
            name = key.make_json_key()
            if strict and name in own:
                raise YamlError(f"the mapping contains the key {name} twice: remove one of them")
            own.add(name)
            made[name] = value.read_value(strict)
        return made

    def list_merged_mappings(self) -> list[Node]:
        """Return the mappings that the value of a merge key ``<<`` names, lowest priority first.

        Raises YamlError if the value contains anything else.
        """
        listed = self.kind == "list"
        sources = self.children[::-1] if listed else [self]
        if any(one.resolved.kind != "mapping" for one in sources):
            raise YamlError("the merge key << needs a mapping, or a list of mappings")
        return sources

    def make_json_key(self) -> str:
        """Return the key as sigs.k8s.io/yaml converts it to JSON. Raises YamlError."""
        value = self.resolved.scalar
        if self.resolved.kind == "scalar" and value is not None:
            if isinstance(value, str):
                return value
            if isinstance(value, bool):
                return str(value).lower()
            if isinstance(value, float):
                return format_float_key(value)
            if value <= MAX_INTEGER_KEY:
                return str(value)
        raise YamlError("a key must be a string or a number")


class _MergeKey:
    pass


MERGE_KEY = _MergeKey()


# PyYAML's own composer loses the positions of aliases.
class _Composer:
    def __init__(self, text: str, is_json: bool) -> None:
        self.text, self.is_json = text, is_json
        self.anchors: dict[str, Node] = {}
        self.aliased = 0
        # Mask characters that the scanner rejects. It only provides positions; JSON reads the
        # strings.
        shown = _mask_rejected_characters(text) if is_json else text
        self.events: Iterator[Any] = yaml.parse(shown, Loader=yaml.CSafeLoader)

    def compose_document(self) -> Node | None:
        try:
            for event in self.events:
                if isinstance(event, yaml.DocumentStartEvent):
                    root = self.compose_node(next(self.events), 1)
                    next(self.events)  # the end of the document; kubectl, too, ignores the rest
                    return root
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            at = (mark.line + 1, mark.column + 1) if mark else None
            raise YamlError(
                f"the document is not valid YAML: {error.problem or error.context}", at
            ) from None
        except yaml.YAMLError as error:
            raise YamlError(
                f"the document is not valid YAML: {str(error).splitlines()[0]}"
            ) from None
        return None

    def compose_node(self, event: Any, depth: int) -> Node:
        start, end = event.start_mark.index, event.end_mark.index
        if isinstance(event, yaml.AliasEvent):
            return self.compose_alias(event, depth)
        if isinstance(event, yaml.ScalarEvent):
            made = self.compose_scalar(event, start, end)
        else:
            listed = isinstance(event, yaml.SequenceStartEvent)
            flow = bool(event.flow_style)
            made = Node("list" if listed else "mapping", start, end, flow, open=True)
        if event.anchor is not None:
            made.anchored = True
            self.anchors[event.anchor] = made
        if made.open:
            self.fill_collection(made, depth)
        _check_depth(depth, made, event)
        return made

    def fill_collection(self, node: Node, depth: int) -> None:
        for event in self.events:
            if isinstance(event, yaml.CollectionEndEvent):
                break
            _check_depth(depth, node, event)
            child = self.compose_node(event, depth + 1)
            node.children.append(child)
            node.size += child.size
            node.height = max(node.height, child.height + 1)
        node.open = False
        if node.flow:
            node.end = event.end_mark.index
        elif node.children:
            node.end = node.children[-1].end
            node.keeps_line_ends = node.children[-1].keeps_line_ends

    def compose_scalar(self, event: Any, start: int, end: int) -> Node:
        made = Node("scalar", start, end)
        tag = event.tag
        unquoted = event.implicit[0]
        try:
            if self.is_json:
                made.scalar = _parse_json(self.text[start:end])
            elif event.value == "<<" and (
                (unquoted and tag is None) or tag == f"{TAG_PREFIX}merge"
            ):
                made.scalar = MERGE_KEY
            else:
                made.scalar = parse_scalar(tag, event.value, unquoted)
        except YamlError as error:
            raise YamlError(str(error), _get_position(event)) from None
        quoted = self.text[start:end] if event.style == '"' and not self.is_json else ""
        if r"\/" in quoted and r"\/" in ESCAPE_PATTERN.findall(quoted):
            raise YamlError(
                "kubectl cannot parse the escape \\/, which is valid only in JSON: write / instead",
                _get_position(event),
            )
        if event.style in ("|", ">"):
            body = self.text[start:end]
            made.keeps_line_ends = "+" in body.partition("\n")[0].partition("#")[0]
            if not made.keeps_line_ends:
                made.end = start + len(body.rstrip(" \t\r\n"))
        return made

    # Raises YamlError if aliases expand to too many values.
    def compose_alias(self, event: Any, depth: int) -> Node:
        target = self.anchors.get(event.anchor)
        if target is None:
            raise YamlError(
                f"an alias refers to the anchor {event.anchor[:40]!r}, which is not defined",
                _get_position(event),
            )
        if target.open:
            raise YamlError(
                f"the alias {event.anchor[:40]!r} refers to the value that contains it",
                _get_position(event),
            )
        self.aliased += target.size
        if self.aliased > MAX_EXPANDED_VALUES:
            raise YamlError(
                f"aliases expand to more than {MAX_EXPANDED_VALUES} values", _get_position(event)
            )
        start, end = event.start_mark.index, event.end_mark.index
        made = Node("alias", start, end, target=target, size=target.size, height=target.height)
        _check_depth(depth, made, event)
        return made


def _check_depth(depth: int, node: Node, event: Any) -> None:
    if depth + node.height > MAX_NESTING_LEVELS:
        raise YamlError(
            f"the value is nested in more than {MAX_NESTING_LEVELS} levels", _get_position(event)
        )


def _get_position(event: Any) -> tuple[int, int]:
    return event.start_mark.line + 1, event.start_mark.column + 1


SURROGATE_PAIR_PATTERN = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
"""Pattern for a pair of JSON escapes for one character, such as an emoji; YAML has no such
pairs."""
CONTROL_PATTERN = re.compile("[\x7f-\x84\x86-\x9f\ufeff\ufffe\uffff]")
"""Pattern for characters that are valid in JSON strings, but not in YAML."""
ESCAPE_PATTERN = re.compile(r"\\.", re.DOTALL)


def _mask_rejected_characters(text: str) -> str:
    return CONTROL_PATTERN.sub("x", SURROGATE_PAIR_PATTERN.sub(r"\\u0041\\u0041", text))


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a valid number in JSON")


_JSON_DECODER = json.JSONDecoder(parse_constant=_reject_constant)


def _parse_json(text: str) -> Any:
    try:
        return _JSON_DECODER.decode(text)
    except ValueError as error:
        raise YamlError(
            f"the document is JSON, but this value is not valid JSON: {error}"
        ) from None


@dataclass(frozen=True)
class Document:
    """Document of a file: its ``text``, and the ``separator`` before it.

    Attributes:
        separator: A line that begins with ``---``, a byte order mark, or white space.
        line: The number of the first line of ``text`` in the file.
        is_json: Whether ``text`` is JSON, and not only YAML.
        is_json_stream: Whether the file consists of JSON objects without separators.

    """

    separator: str
    text: str
    line: int = 1
    is_json: bool = False
    is_json_stream: bool = False

    def parse_root(self) -> Node | None:
        """Return the document's value as a node; None if the document is empty.

        Raises YamlError, with the position in the file, if kubectl rejects the document.
        """
        if len(self.text) > MAX_DOCUMENT_BYTES:
            raise YamlError(
                f"the document is larger than {MAX_DOCUMENT_BYTES >> 20} MiB: split it",
                (self.line, 1),
            )
        if self.text.strip() == "...":
            return None
        try:
            # kubectl reads line by line, and adds a missing line end.
            ended = self.text if self.text.endswith("\n") or self.is_json else f"{self.text}\n"
            return _Composer(ended, self.is_json).compose_document()
        except YamlError as error:
            line, column = error.position or (1, 1)
            raise YamlError(str(error), (self.line + line - 1, column)) from None


def split_documents(text: str) -> list[Document]:
    """Split a file into documents as kubectl does. Raises YamlError.

    Joined in order, the separators and texts of all documents are ``text``.
    """
    if len(text) > MAX_FILE_BYTES:
        raise YamlError(f"the file is larger than {MAX_FILE_BYTES >> 20} MiB: split it")
    separator = "\ufeff" if text.startswith("\ufeff") else ""
    text = text.removeprefix(separator)
    if (stream := _split_json_stream(separator, text)) is not None:
        return stream
    made: list[Document] = []
    held: list[str] = []
    first = 1
    for number, line in enumerate(_LINE_PATTERN.findall(text), 1):
        if not line.startswith("---"):
            held.append(line)
            continue
        behind = line[3:].strip()
        if behind and not behind.startswith("#"):
            raise YamlError(
                "kubectl cannot parse this line: move the text after --- to its own line",
                (number, 4),
            )
        made.append(_make_document(separator, "".join(held), first, is_first=not made))
        separator, held, first = line, [], number + 1
    return [*made, _make_document(separator, "".join(held), first, is_first=not made)]


_LINE_PATTERN = re.compile(r"[^\n]*\n|[^\n]+")


# Only the first document of a file may be JSON; kubectl reads the others as YAML.
def _make_document(separator: str, text: str, line: int, is_first: bool) -> Document:
    if not is_first or not text.lstrip().startswith("{"):
        return Document(separator, text, line)
    try:
        _JSON_DECODER.decode(text)
    except (ValueError, RecursionError):
        return Document(separator, text, line)
    return Document(separator, text, line, is_json=True)


# None if the file is not a series of JSON objects without separators.
def _split_json_stream(separator: str, text: str) -> list[Document] | None:
    if not text.lstrip().startswith("{"):
        return None
    made: list[Document] = []
    at = 0
    while (begin := _skip_space(text, at)) < len(text):
        try:
            _, end = _JSON_DECODER.raw_decode(text, begin)
        except (ValueError, RecursionError) as error:
            if len(made) > 1:
                line = text.count("\n", 0, begin) + 1
                raise YamlError(
                    f"the text after the last object is not JSON: {error}", (line, 1)
                ) from None
            return None
        line = text.count("\n", 0, begin) + 1
        made.append(Document(separator + text[at:begin], text[begin:end], line, True, True))
        separator, at = "", end
    return [*made, Document(separator + text[at:], "", is_json_stream=True)]


def _skip_space(text: str, start: int) -> int:
    found = re.compile(r"\s*").match(text, start)
    return found.end() if found is not None else start
