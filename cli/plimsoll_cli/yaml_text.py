"""YAML that Kubernetes reads as it was meant.

PyYAML writes for YAML 1.1, in which ``215131e209`` and ``0o17`` are texts. For Kubernetes, which
reads YAML 1.2, they are numbers, and it refuses a number as a label or annotation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """Quotes a text that either version of YAML takes for something else."""


# YAML 1.2.2, section 10.3.2, the core schema's floats and octal numbers.
_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$"),
    list("-+.0123456789"),
)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"0o[0-7]+$"), ["0"])


def dump(document: Any, **style: Any) -> str:
    """Return one document; keys keep their order."""
    return dump_all([document], **style)


def dump_all(documents: Iterable[Any], **style: Any) -> str:
    """Return several documents; keys keep their order."""
    text: str = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, **style)
    return text
