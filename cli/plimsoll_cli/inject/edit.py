"""Changes a document's text where its value changes, and nowhere else; and takes changes back.

A change adds entries and items, or puts a value in another one's place. Each is written down as a
line of a record (:func:`record`), with which :func:`undo` restores the text to the byte.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote, unquote

from plimsoll_cli.yaml_text import dump, dump_flow
from plimsoll_cli.yaml_tree import MERGE, Node

Path = tuple[str, ...]
"""Keys, and for items of lists ``name=NAME`` or, without a name, the place."""


class EditError(ValueError):
    """A change that cannot be made in place; a person has to write the document otherwise."""


@dataclass(frozen=True)
class Change:
    """``text[start:end]`` becomes ``new``. ``was`` is what stood there if something did."""

    start: int
    end: int
    new: str
    path: Path
    was: str | None = None
    indent: int = 0


def changes(text: str, root: Node, wanted: Any, is_json: bool = False) -> list[Change]:
    """Return what makes ``text``, whose value ``root`` is, mean ``wanted``, in the text's order.

    Raises EditError for something that cannot be said in place.
    """
    editor = _Editor(text, is_json)
    editor.compare(root, root.value(), wanted, ())
    editor.unshare(root, root.value(), wanted, ())
    return sorted(editor.made, key=lambda one: (one.start, one.end, -one.indent))


def apply(text: str, made: Sequence[Change]) -> str:
    """Return ``text`` with the changes ``made``."""
    parts, at = [], 0
    for one in made:
        if one.start < at:
            raise EditError("two changes at one place")
        parts += [text[at : one.start], one.new]
        at = one.end
    return "".join([*parts, text[at:]])


def record(made: Sequence[Change]) -> list[str]:
    """Return a line for each change: ``+ PATH`` for an addition, ``= PATH TEXT`` for another."""
    return [
        f"+ {_written(one.path)}"
        if one.was is None
        else f"= {_written(one.path)} {json.dumps(one.was)}"
        for one in made
    ]


def undo(text: str, root: Node | None, lines: Sequence[str]) -> list[Change]:
    """Return what takes the changes of a record back; what is not there any more is left out."""
    spots = []
    for line in lines:
        sign, _, rest = line.partition(" ")
        written, _, was = rest.partition(" ")
        spot = _find(root, _read(written)) if root is not None else None
        if spot is not None and sign in ("+", "="):
            spots.append((spot, None if sign == "+" else str(json.loads(was))))
    added = {id(spot.node) for spot, was in spots if was is None}
    found = [
        Change(*(spot.removal(text, added) if was is None else spot.span(text)), was or "", ())
        for spot, was in spots
    ]
    made: list[Change] = []
    for one in sorted(found, key=lambda one: (one.start, one.end)):
        # Two neighbours in brackets share what separates them.
        start = max(one.start, made[-1].end) if made else one.start
        made.append(replace(one, start=start, end=max(one.end, start)))
    if made and made[-1].end == len(text) and not text.endswith("\n"):
        # What goes was added behind a line that did not end.
        first = len(made) - 1
        while first and made[first - 1].end == made[first].start:
            first -= 1
        before = text[: made[first].start].removesuffix("\n").removesuffix("\r")
        made[first] = replace(made[first], start=len(before))
    return made


def _written(path: Path) -> str:
    return "".join("/" + quote(one, safe="=:") for one in path)


def _read(written: str) -> Path:
    return tuple(map(unquote, written.split("/")[1:]))


def line_end(text: str) -> str:
    """Return what ends the first line of ``text``."""
    return "\r\n" if text.partition("\n")[0].endswith("\r") else "\n"


class _Editor:
    """Collects the changes of one document."""

    def __init__(self, text: str, is_json: bool) -> None:
        self.text, self.is_json = text, is_json
        self.made: list[Change] = []
        self.touched: set[int] = set()
        self.within: list[Node] = []
        self.line_end = line_end(text)

    def compare(self, node: Node, old: Any, new: Any, path: Path) -> None:
        """Change ``node``, whose value is ``old``, to ``new``."""
        if same(old, new):
            return
        kinds = {"mapping": dict, "list": list}
        kind = kinds.get(node.kind)
        if kind is None or not isinstance(new, kind):
            self.replace(node, new, path)
            return
        self.within.append(node)
        if kind is dict:
            self.mapping(node, old, new, path)
        else:
            self.items(node, old, new, path)
        self.within.pop()

    def mapping(self, node: Node, old: Any, new: Any, path: Path) -> None:
        """Change the entries of a mapping."""
        own = {name: found for name in old if (found := node.entry(name)) is not None}
        if any(key not in new for key in old):
            self.within.pop()
            self.replace(node, new, path)
            self.within.append(node)
            return
        added = {}
        for key, value in new.items():
            if key in own:
                self.compare(own[key], old[key], value, (*path, key))
            elif key not in old or not same(old[key], value):
                added[key] = value
        if not added:
            return
        self.touch()
        for at, (key, value) in enumerate(added.items()):
            self.add(node, {key: value}, (*path, key), first=not at)

    def items(self, node: Node, old: list[Any], new: list[Any], path: Path) -> None:
        """Change the items of a list, and add others between and behind them."""
        names, wanted = item_names(old), dict(zip(item_names(new), new, strict=True))
        kept = [name for name in wanted if name in names]
        if kept != names:
            self.within.pop()
            self.replace(node, new, path)
            self.within.append(node)
            return
        for child, before, name in zip(node.children, old, names, strict=True):
            self.compare(child, before, wanted[name], (*path, name))
        added: list[str] = []
        for name in wanted:
            if name not in names:
                added.append(name)
                continue
            for one in added:
                self.touch()
                self.insert(node, names.index(name), wanted[one], (*path, one))
            added = []
        for at, name in enumerate(added):
            self.touch()
            self.add(node, [wanted[name]], (*path, name), first=not at)

    def touch(self) -> None:
        """Remember that the anchors around a change do not mean any more what they did."""
        self.touched |= {id(one) for one in self.within if one.anchored}

    def add(self, node: Node, value: Any, path: Path, first: bool) -> None:
        """Add an entry or item at the end of ``node``."""
        if node.flow or not node.children:
            self.add_in_brackets(node, value, path, first)
            return
        indent = _indent(self.text, node)
        block = dump(value)
        lines = [" " * indent + line if line else line for line in block.splitlines()]
        at, ended = _line_after(self.text, node, indent)
        joined = self.line_end.join(lines)
        new = joined + self.line_end if ended else self.line_end + joined
        self.made.append(Change(at, at, new, path, indent=indent))

    def insert(self, node: Node, place: int, item: Any, path: Path) -> None:
        """Add an item to a list, before the one at ``place``."""
        if node.flow:
            written = dump_flow([item], self.is_json)[1:-1]
            at = node.children[place - 1].end if place else node.children[0].start
            new = f", {written}" if place else f"{written}, "
            self.made.append(Change(at, at, new, path, indent=len(path)))
            return
        indent = _indent(self.text, node)
        lines = [" " * indent + line if line else line for line in dump([item]).splitlines()]
        at = _line_before(self.text, node.children[place], indent)
        new = self.line_end.join([*lines, ""])
        self.made.append(Change(at, at, new, path, indent=indent))

    def add_in_brackets(self, node: Node, value: Any, path: Path, first: bool) -> None:
        """Add an entry or item to a mapping or list in brackets."""
        at = node.children[-1].end if node.children else _inside(self.text, node)
        comma = ", " if node.children or not first else ""
        new = comma + dump_flow(value, self.is_json)[1:-1]
        # Of two at one place, the inner one stands before.
        self.made.append(Change(at, at, new, path, indent=len(path)))

    def replace(self, node: Node, new: Any, path: Path) -> None:
        """Put ``new`` in the place of ``node``."""
        spot = _Spot(self.within[-1] if self.within else None, node)
        if spot.owner is None:
            raise EditError("the whole document would have to change")
        self.touch()
        self.touched |= {id(one) for one in _all(node) if one.anchored}
        start, end = spot.span(self.text)
        shown = dump_flow(new, self.is_json)
        self.made.append(
            Change(start, end, spot.gap(self.text) + shown, path, was=self.text[start:end])
        )

    def unshare(self, node: Node, old: Any, new: Any, path: Path) -> None:
        """Write out aliases whose anchors were changed, where they mean what they did."""
        if not self.touched or any(one.path == path and one.was is not None for one in self.made):
            return
        if node.kind == "alias":
            if id(node.target) in self.touched:
                self.replace(node, new, path)
            return
        self.within.append(node)
        if node.kind == "mapping" and isinstance(new, dict):
            for key, value in node.entries():
                if key.scalar is MERGE:
                    if any(id(one.target) in self.touched for one in value.merged()):
                        raise EditError("<< refers to what changes")
                elif key.name() in new:
                    name = key.name()
                    self.unshare(value, old[name], new[name], (*path, name))
        elif node.kind == "list" and isinstance(new, list):
            wanted = dict(zip(item_names(new), new, strict=True))
            for child, before, name in zip(node.children, old, item_names(old), strict=True):
                if name in wanted:
                    self.unshare(child, before, wanted[name], (*path, name))
        self.within.pop()


def _all(node: Node) -> Iterator[Node]:
    yield node
    for child in node.children:
        yield from _all(child)


def same(old: Any, new: Any) -> bool:
    """Whether two values are the same to JSON, where ``true`` is not 1."""
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() == new.keys() and all(same(old[key], new[key]) for key in old)
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(same, old, new))
    return isinstance(old, bool) is isinstance(new, bool) and bool(old == new)


def item_names(items: Sequence[Any]) -> list[str]:
    """Return what each item of a list is known by: its name, or its place if that is not unique."""
    names = [one.get("name") if isinstance(one, dict) else None for one in items]
    return [
        f"name={name}" if isinstance(name, str) and names.count(name) == 1 else str(at)
        for at, name in enumerate(names)
    ]


@dataclass(frozen=True)
class _Spot:
    """A value, and what it stands in."""

    owner: Node | None
    node: Node

    @property
    def place(self) -> int:
        """Of the value, or of the key before it, among the owner's children."""
        assert self.owner is not None
        at = next(at for at, one in enumerate(self.owner.children) if one is self.node)
        return at - 1 if self.owner.kind == "mapping" else at

    def span(self, text: str) -> tuple[int, int]:
        """Return where the value stands, with the space before it if it has a key."""
        if self.owner is None or self.owner.kind == "list":
            return self.node.start, self.node.end
        key = self.owner.children[self.place]
        colon = text.find(":", key.end, self.node.end + 1)
        if colon < 0 or self.node.end <= colon:
            raise EditError("a key without a colon")
        return colon + 1, self.node.end

    def gap(self, text: str) -> str:
        """Return the space that stands before another value at this spot."""
        start, end = self.span(text)
        if start == end and text[start - 1 : start] == "-":
            return " "
        return " " if self.owner is not None and self.owner.kind == "mapping" else ""

    def removal(self, text: str, added: set[int]) -> tuple[int, int]:
        """Return where the entry or item stands, with what separates it from the others.

        In brackets these are all neighbours that were ``added``, by the ids of their values.
        """
        assert self.owner is not None
        siblings, place = self.owner.children, self.place
        if not self.owner.flow:
            start = text.rfind("\n", 0, siblings[place].start) + 1
            return start, _line_end(text, self.node)
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
        return _inside(text, self.owner), siblings[end - 1].end


def _find(root: Node, path: Path) -> _Spot | None:
    """Return the value at ``path``, None if it is not there."""
    owner: Node | None = None
    found: Node | None = root
    for part in path:
        owner = found
        if owner is None:
            return None
        if owner.kind == "list":
            names = item_names(owner.value())
            found = owner.children[names.index(part)] if part in names else None
        else:
            found = owner.entry(part) if owner.kind == "mapping" else None
    return _Spot(owner, found) if found is not None else None


def _inside(text: str, node: Node) -> int:
    """Return the place after the bracket that opens ``node``."""
    bracket = "{" if node.kind == "mapping" else "["
    return text.index(bracket, node.start) + 1


def _indent(text: str, node: Node) -> int:
    """Return the column at which the entries or items of a block begin."""
    begin = node.children[0].start if node.kind == "mapping" else node.start
    line = text.rfind("\n", 0, begin) + 1
    if node.kind == "mapping" and text[line:begin].strip(" -"):
        raise EditError("a key that begins with ?, an anchor or a tag")
    if node.kind == "list" and text[begin] != "-":
        found = re.compile(r"[^\n]*\n(?:[ ]*(?:#[^\n]*)?\r?\n)*([ ]*)-").match(text, begin)
        if found is None:
            raise EditError("a list whose first dash is not at the beginning of a line")
        return len(found[1])
    return begin - line


def _line_end(text: str, node: Node) -> int:
    """Return the place after the line in which ``node`` ends."""
    if node.keeps_line_ends:
        # The reader ends the last line of a document.
        return min(node.end, len(text))
    end = text.find("\n", node.end)
    return len(text) if end < 0 else end + 1


def _line_before(text: str, item: Node, indent: int) -> int:
    """Return the beginning of the line with the dash of ``item``, or of the comments above it."""
    lead = " " * indent
    at = text.rfind("\n", 0, item.start) + 1
    while not text.startswith(f"{lead}-", at):
        if at == 0:
            raise EditError("a list whose dash is not at the beginning of a line")
        at = text.rfind("\n", 0, at - 1) + 1
    while at and text.startswith(f"{lead}#", above := text.rfind("\n", 0, at - 1) + 1):
        at = above
    return at


COMMENT = re.compile(r"(?:[ \t]*\r?\n)*([ ]*)#[^\n]*(?:\n|$)")


def _line_after(text: str, node: Node, indent: int) -> tuple[int, bool]:
    """Return where another entry of a block is added, and whether the line before it has ended.

    This is after the comments that stand below the last entry and belong to the block.
    """
    at = _line_end(text, node)
    while (found := COMMENT.match(text, at)) is not None and len(found[1]) >= indent > 0:
        at = found.end()
    return at, at == 0 or text[at - 1] == "\n"
