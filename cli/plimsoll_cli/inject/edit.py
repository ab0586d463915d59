"""Minimal edits of a YAML or JSON text, and their reversal.

:func:`format_record` describes each edit in a line, from which :func:`find_reversals` finds the
edits that restore the original text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote, unquote

from plimsoll_cli.yaml_text import dump, dump_flow
from plimsoll_cli.yaml_tree import MERGE_KEY, Node

Path = tuple[str, ...]
"""Keys that lead to a value; for a list item, the key is ``name=NAME``, or its index."""


class EditError(ValueError):
    """Raised if this form of YAML cannot be edited."""


@dataclass(frozen=True)
class TextEdit:
    """Replacement of ``text[start:end]`` by ``new_text``.

    ``old_text`` is the original text of a replaced value; None if ``new_text`` is an addition.
    """

    start: int
    end: int
    new_text: str
    path: Path
    old_text: str | None = None
    indent: int = 0


def find_changes(text: str, root: Node, new_value: Any, is_json: bool = False) -> list[TextEdit]:
    """Return the edits that change the value ``root`` to ``new_value``, in the order of the text.

    Raises EditError if this form of YAML cannot be edited.
    """
    editor = _Editor(text, is_json)
    editor.add_edits(root, root.read_value(), new_value, ())
    editor.expand_aliases(root, root.read_value(), new_value, ())
    return sorted(editor.made, key=lambda one: (one.start, one.end, -one.indent))


def apply_changes(text: str, changes: Sequence[TextEdit]) -> str:
    """Return ``text`` with the edits applied."""
    parts, at = [], 0
    for one in changes:
        if one.start < at:
            raise EditError("cannot apply two edits that overlap")
        parts += [text[at : one.start], one.new_text]
        at = one.end
    return "".join([*parts, text[at:]])


def format_record(changes: Sequence[TextEdit]) -> list[str]:
    """Return a line for each edit: ``+ PATH`` for an addition, or ``= PATH OLD_TEXT``."""
    return [
        f"+ {_format_path(one.path)}"
        if one.old_text is None
        else f"= {_format_path(one.path)} {json.dumps(one.old_text)}"
        for one in changes
    ]


def find_reversals(text: str, root: Node | None, lines: Sequence[str]) -> list[TextEdit]:
    """Return the edits that undo the edits in ``lines``, the output of :func:`format_record`.

    Edits whose value no longer exists are skipped.
    """
    spots = []
    for line in lines:
        sign, _, rest = line.partition(" ")
        written, _, was = rest.partition(" ")
        spot = _find_location(root, _parse_path(written)) if root is not None else None
        if spot is not None and sign in ("+", "="):
            spots.append((spot, None if sign == "+" else str(json.loads(was))))
    added = {id(spot.node) for spot, was in spots if was is None}
    found = [
        TextEdit(
            *(spot.get_removal_range(text, added) if was is None else spot.get_range(text)),
            was or "",
            (),
        )
        for spot, was in spots
    ]
    made: list[TextEdit] = []
    for one in sorted(found, key=lambda one: (one.start, one.end)):
        # Neighbours in a flow collection share their separator.
        start = max(one.start, made[-1].end) if made else one.start
        made.append(replace(one, start=start, end=max(one.end, start)))
    if made and made[-1].end == len(text) and not text.endswith("\n"):
        # Before the addition, the last line had no line end.
        first = len(made) - 1
        while first and made[first - 1].end == made[first].start:
            first -= 1
        before = text[: made[first].start].removesuffix("\n").removesuffix("\r")
        made[first] = replace(made[first], start=len(before))
    return made


def _format_path(path: Path) -> str:
    return "".join("/" + quote(one, safe="=:") for one in path)


def _parse_path(written: str) -> Path:
    return tuple(map(unquote, written.split("/")[1:]))


def get_line_end(text: str) -> str:
    """Return the line ending of the first line in ``text``."""
    return "\r\n" if text.partition("\n")[0].endswith("\r") else "\n"


class _Editor:
    def __init__(self, text: str, is_json: bool) -> None:
        self.text, self.is_json = text, is_json
        self.made: list[TextEdit] = []
        self.touched: set[int] = set()
        self.within: list[Node] = []
        self.line_end = get_line_end(text)

    def add_edits(self, node: Node, old: Any, new: Any, path: Path) -> None:
        if is_json_equal(old, new):
            return
        kinds = {"mapping": dict, "list": list}
        kind = kinds.get(node.kind)
        if kind is None or not isinstance(new, kind):
            self.replace(node, new, path)
            return
        self.within.append(node)
        if kind is dict:
            self.add_entry_edits(node, old, new, path)
        else:
            self.add_item_edits(node, old, new, path)
        self.within.pop()

    def add_entry_edits(self, node: Node, old: Any, new: Any, path: Path) -> None:
        own = {name: found for name in old if (found := node.find_entry(name)) is not None}
        if any(key not in new for key in old):
            self.within.pop()
            self.replace(node, new, path)
            self.within.append(node)
            return
        added = {}
        for key, value in new.items():
            if key in own:
                self.add_edits(own[key], old[key], value, (*path, key))
            elif key not in old or not is_json_equal(old[key], value):
                added[key] = value
        if not added:
            return
        self.mark_anchors_changed()
        for at, (key, value) in enumerate(added.items()):
            self.append(node, {key: value}, (*path, key), is_first=not at)

    def add_item_edits(self, node: Node, old: list[Any], new: list[Any], path: Path) -> None:
        names, wanted = make_item_keys(old), dict(zip(make_item_keys(new), new, strict=True))
        kept = [name for name in wanted if name in names]
        if kept != names:
            self.within.pop()
            self.replace(node, new, path)
            self.within.append(node)
            return
        for child, before, name in zip(node.children, old, names, strict=True):
            self.add_edits(child, before, wanted[name], (*path, name))
        added: list[str] = []
        for name in wanted:
            if name not in names:
                added.append(name)
                continue
            for one in added:
                self.mark_anchors_changed()
                self.insert(node, names.index(name), wanted[one], (*path, one))
            added = []
        for at, name in enumerate(added):
            self.mark_anchors_changed()
            self.append(node, [wanted[name]], (*path, name), is_first=not at)

    # expand_aliases() then replaces the aliases of these values.
    def mark_anchors_changed(self) -> None:
        self.touched |= {id(one) for one in self.within if one.anchored}

    # ``is_first`` is whether it is the first addition to this node.
    def append(self, node: Node, value: Any, path: Path, is_first: bool) -> None:
        if node.flow or not node.children:
            self.append_in_brackets(node, value, path, is_first)
            return
        indent = _find_indent(self.text, node)
        block = dump(value)
        lines = [" " * indent + line if line else line for line in block.splitlines()]
        at, ended = _find_insertion_point(self.text, node, indent)
        joined = self.line_end.join(lines)
        new = joined + self.line_end if ended else self.line_end + joined
        self.made.append(TextEdit(at, at, new, path, indent=indent))

    def insert(self, node: Node, place: int, item: Any, path: Path) -> None:
        if node.flow:
            written = dump_flow([item], self.is_json)[1:-1]
            at = node.children[place - 1].end if place else node.children[0].start
            new = f", {written}" if place else f"{written}, "
            self.made.append(TextEdit(at, at, new, path, indent=len(path)))
            return
        indent = _find_indent(self.text, node)
        lines = [" " * indent + line if line else line for line in dump([item]).splitlines()]
        at = _find_start_with_comments(self.text, node.children[place], indent)
        new = self.line_end.join([*lines, ""])
        self.made.append(TextEdit(at, at, new, path, indent=indent))

    def append_in_brackets(self, node: Node, value: Any, path: Path, is_first: bool) -> None:
        at = node.children[-1].end if node.children else _find_inner_start(self.text, node)
        comma = ", " if node.children or not is_first else ""
        new = comma + dump_flow(value, self.is_json)[1:-1]
        # At equal positions, the inner edit comes first.
        self.made.append(TextEdit(at, at, new, path, indent=len(path)))

    def replace(self, node: Node, new: Any, path: Path) -> None:
        spot = _Location(self.within[-1] if self.within else None, node)
        if spot.owner is None:
            raise EditError("cannot replace the whole document")
        self.mark_anchors_changed()
        self.touched |= {id(one) for one in _iterate_descendants(node) if one.anchored}
        start, end = spot.get_range(self.text)
        shown = dump_flow(new, self.is_json)
        self.made.append(
            TextEdit(
                start,
                end,
                spot.get_required_space(self.text) + shown,
                path,
                old_text=self.text[start:end],
            )
        )

    # Aliases of changed values become copies of the original values.
    def expand_aliases(self, node: Node, old: Any, new: Any, path: Path) -> None:
        if not self.touched or any(
            one.path == path and one.old_text is not None for one in self.made
        ):
            return
        if node.kind == "alias":
            if id(node.target) in self.touched:
                self.replace(node, new, path)
            return
        self.within.append(node)
        if node.kind == "mapping" and isinstance(new, dict):
            for key, value in node.iterate_entries():
                if key.scalar is MERGE_KEY:
                    if any(id(one.target) in self.touched for one in value.list_merged_mappings()):
                        raise EditError(
                            "cannot edit a mapping that another mapping includes with the key"
                            " '<<'; write its keys in both mappings"
                        )
                elif key.make_json_key() in new:
                    name = key.make_json_key()
                    self.expand_aliases(value, old[name], new[name], (*path, name))
        elif node.kind == "list" and isinstance(new, list):
            wanted = dict(zip(make_item_keys(new), new, strict=True))
            for child, before, name in zip(node.children, old, make_item_keys(old), strict=True):
                if name in wanted:
                    self.expand_aliases(child, before, wanted[name], (*path, name))
        self.within.pop()


def _iterate_descendants(node: Node) -> Iterator[Node]:
    yield node
    for child in node.children:
        yield from _iterate_descendants(child)


def is_json_equal(old: Any, new: Any) -> bool:
    """Report whether two values are equal in JSON, where ``true`` differs from 1."""
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() == new.keys() and all(is_json_equal(old[key], new[key]) for key in old)
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(is_json_equal, old, new))
    return isinstance(old, bool) is isinstance(new, bool) and bool(old == new)


def make_item_keys(items: Sequence[Any]) -> list[str]:
    """Return a key for each item: ``name=NAME``, or the index if there is no unique name."""
    names = [one.get("name") if isinstance(one, dict) else None for one in items]
    return [
        f"name={name}" if isinstance(name, str) and names.count(name) == 1 else str(at)
        for at, name in enumerate(names)
    ]


@dataclass(frozen=True)
class _Location:
    """Value ``node`` in a document, and the collection ``owner`` that contains it."""

    owner: Node | None
    node: Node

    @property
    def child_index(self) -> int:
        """Index of the value in ``owner.children``; in a mapping, the index of the key."""
        assert self.owner is not None
        at = next(at for at, one in enumerate(self.owner.children) if one is self.node)
        return at - 1 if self.owner.kind == "mapping" else at

    # In a mapping, the range starts directly after the key's colon.
    def get_range(self, text: str) -> tuple[int, int]:
        if self.owner is None or self.owner.kind == "list":
            return self.node.start, self.node.end
        key = self.owner.children[self.child_index]
        colon = text.find(":", key.end, self.node.end + 1)
        if colon < 0 or self.node.end <= colon:
            raise EditError("cannot edit a key without a colon: write KEY: VALUE")
        return colon + 1, self.node.end

    # The white space that must precede a new value.
    def get_required_space(self, text: str) -> str:
        start, end = self.get_range(text)
        if start == end and text[start - 1 : start] == "-":
            return " "
        return " " if self.owner is not None and self.owner.kind == "mapping" else ""

    # Includes separators and, in a flow collection, adjacent values whose ``id`` is in ``added``.
    def get_removal_range(self, text: str, added: set[int]) -> tuple[int, int]:
        assert self.owner is not None
        siblings, place = self.owner.children, self.child_index
        if not self.owner.flow:
            start = text.rfind("\n", 0, siblings[place].start) + 1
            return start, _find_line_end(text, self.node)
        step = 2 if self.owner.kind == "mapping" else 1
        first, end = place, place + step
        while first and id(siblings[first - 1]) in added:
            first -= step
        while end < len(siblings) and id(siblings[end + step - 1]) in added:
            end += step
        if first:
            return siblings[first - 1].end, siblings[end - 1].end
        if end < len(siblings):
            return siblings[0].start, siblings[end].start
        return _find_inner_start(text, self.owner), siblings[end - 1].end


def _find_location(root: Node, path: Path) -> _Location | None:
    owner: Node | None = None
    found: Node | None = root
    for part in path:
        owner = found
        if owner is None:
            return None
        if owner.kind == "list":
            names = make_item_keys(owner.read_value())
            found = owner.children[names.index(part)] if part in names else None
        else:
            found = owner.find_entry(part) if owner.kind == "mapping" else None
    return _Location(owner, found) if found is not None else None


def _find_inner_start(text: str, node: Node) -> int:
    bracket = "{" if node.kind == "mapping" else "["
    return text.index(bracket, node.start) + 1


# The column at which the entries or items of a block begin. Raises EditError.
def _find_indent(text: str, node: Node) -> int:
    begin = node.children[0].start if node.kind == "mapping" else node.start
    line = text.rfind("\n", 0, begin) + 1
    if node.kind == "mapping" and text[line:begin].strip(" -"):
        raise EditError(
            "cannot edit a mapping whose first key follows ?, an anchor or a tag: write plain keys"
        )
    if node.kind == "list" and text[begin] != "-":
        found = re.compile(r"[^\n]*\n(?:[ ]*(?:#[^\n]*)?\r?\n)*([ ]*)-").match(text, begin)
        if found is None:
            raise EditError(
                "cannot edit a list whose first dash is not at the beginning of a line: write each "
                "item on a line of its own"
            )
        return len(found[1])
    return begin - line


def _find_line_end(text: str, node: Node) -> int:
    if node.keeps_line_ends:
        # The parser adds a missing line end.
        return min(node.end, len(text))
    end = text.find("\n", node.end)
    return len(text) if end < 0 else end + 1


# Comments above the item's dash belong to the item.
def _find_start_with_comments(text: str, item: Node, indent: int) -> int:
    lead = " " * indent
    at = text.rfind("\n", 0, item.start) + 1
    while not text.startswith(f"{lead}-", at):
        if at == 0:
            raise EditError(
                "cannot edit a list item whose dash is not at the beginning of a line: write each "
                "item on a line of its own"
            )
        at = text.rfind("\n", 0, at - 1) + 1
    while at and text.startswith(f"{lead}#", above := text.rfind("\n", 0, at - 1) + 1):
        at = above
    return at


COMMENT_PATTERN = re.compile(r"(?:[ \t]*\r?\n)*([ ]*)#[^\n]*(?:\n|$)")


def _find_insertion_point(text: str, node: Node, indent: int) -> tuple[int, bool]:
    """Return the position for a new last entry of a block, and whether a line end precedes it."""
    at = _find_line_end(text, node)
    while (found := COMMENT_PATTERN.match(text, at)) is not None and len(found[1]) >= indent > 0:
        at = found.end()
    return at, at == 0 or text[at - 1] == "\n"
