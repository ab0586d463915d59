"""Names in runbooks: the objects, containers, fields and words that a page speaks of must exist.

An installation is a list of objects, as ``config/`` or the chart makes them. A page is right where
its commands work on every installation: names that an installation chooses are found by labels.
Placeholders are in capitals and are not looked at.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from docs.tools.blocks import ROOT, blocks
from docs.tools.commands import lines
from plimsoll_api import generate

Object = dict[str, Any]
SHORT = {
    "deploy": "Deployment",
    "deployment": "Deployment",
    "svc": "Service",
    "service": "Service",
    "crd": "CustomResourceDefinition",
    "clusterrole": "ClusterRole",
    "clusterrolebinding": "ClusterRoleBinding",
    "pod": "Pod",
}
CODE = ("crds/plimsoll_api", "operator", "sidecar", "engine_image", "dashboards")
RENDERED = "plimsoll.dev/service="
"""Labels of what the operator makes, in the namespaces of services."""

_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_REFERENCE = re.compile(r"^([a-z]+)/([a-z0-9][a-z0-9.-]*)$")
_WORD = re.compile(r"^[A-Z][a-z]+([A-Z][a-z]+)*$")
_FIELD = re.compile(r"^[a-z][A-Za-z]*(\.[a-z][A-Za-z]*)+$")
_DASHBOARD = re.compile(r"\b[Tt]he (\w+) dashboard\b")


def wrong(
    path: Path, installations: Mapping[str, Sequence[Object]], containers: set[str]
) -> Iterator[str]:
    """What a page names and does not exist. ``containers`` are those of every pod of ours."""
    text = path.read_text()
    for command in _commands(path, text):
        for problem in _in_command(command, installations, containers):
            yield f"{path.name}: `{command}`: {problem}"
    for span in _spans(text):
        word = span.partition(":")[0].strip()
        if _WORD.match(word) and word not in _code():
            yield f"{path.name}: `{span}`: no part of ours knows this word"
        if _FIELD.match(word) and not _field(word):
            yield f"{path.name}: `{span}`: no resource and no value of the chart has this name"
    for name in _DASHBOARD.findall(" ".join(text.split())):
        if not (ROOT / "dashboards" / f"{name}.json").is_file():
            yield f"{path.name}: there is no {name} dashboard"


def _commands(path: Path, text: str) -> Iterator[str]:
    for block in blocks(path, "sh", "bash"):
        yield from lines(block.text)
    for span in _spans(text):
        if span.startswith(("kubectl ", "helm ")):
            yield span


def _spans(text: str) -> Iterator[str]:
    for span in _SPAN.findall(_FENCED.sub("", text)):
        yield " ".join(span.split())


def _in_command(
    command: str, installations: Mapping[str, Sequence[Object]], containers: set[str]
) -> Iterator[str]:
    words = shlex.split(command)
    kinds = [SHORT[word] for word in words if word in SHORT]
    for where, objects in installations.items():
        namespaces = {one["metadata"].get("namespace") for one in objects}
        for flag, value in zip(words, [*words[1:], ""], strict=True):
            reference = _REFERENCE.match(flag)
            if reference and reference[1] in SHORT:
                wanted = (SHORT[reference[1]], reference[2])
                if wanted not in {(one["kind"], one["metadata"]["name"]) for one in objects}:
                    yield f"{where} has no {flag}"
            if flag in ("-n", "--namespace") and value.islower() and value not in namespaces:
                yield f"{where} is not in namespace {value}"
            if flag in ("-l", "--selector") and not value.startswith(RENDERED):
                wanted_kinds = kinds or ["Pod"]
                if not any(_selects(value, one, wanted_kinds) for one in objects):
                    yield f"{where} has no {wanted_kinds[0]} with {value}"
    for flag, value in zip(words, [*words[1:], ""], strict=True):
        if flag in ("-c", "--container") and value.islower() and value not in containers:
            yield f"no pod of ours has a container {value}"


def _selects(selector: str, item: Object, kinds: Sequence[str]) -> bool:
    """Whether ``item``, or for pods what makes them, is selected."""
    wanted = dict(part.split("=", 1) for part in selector.split(","))
    labels = item["metadata"].get("labels") or {}
    if "Pod" in kinds and item["kind"] == "Deployment":
        labels = item["spec"]["template"]["metadata"]["labels"]
    elif item["kind"] not in kinds:
        return False
    return wanted.items() <= labels.items()


@functools.cache
def _code() -> str:
    files = (path for folder in CODE for path in sorted((ROOT / folder).rglob("*.py")))
    return "\n".join(path.read_text() for path in files)


def _field(name: str) -> bool:
    """``supervision.mode`` is in the spec, whether or not the page says so. Some fields are those
    of a SupervisionPolicy alone, and some names are values of the chart."""
    parts = name.split(".")
    kinds = (generate.make_inference_service_crd, generate.make_supervision_policy_crd)
    return any(_in(kind(), parts) for kind in kinds) or _is_value(parts)


def _is_value(parts: Sequence[str]) -> bool:
    node: Any = yaml.safe_load((ROOT / "charts" / "plimsoll" / "values.yaml").read_text())
    for part in parts:
        if not isinstance(node, dict) or part not in node:
            return False
        node = node[part]
    return True


def _in(definition: Object, parts: Sequence[str]) -> bool:
    node: Object | None = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for part in parts if parts[0] in ("spec", "status") else ("spec", *parts):
        node = ((node or {}).get("properties") or {}).get(part)
    return node is not None
