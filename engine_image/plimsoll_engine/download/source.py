"""The folder of the checkpoint that ``--model`` names: one of this machine, or one of the hub."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

SCHEME = "hf://"
_HUB = re.compile(
    r"hf://(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w-][\w./-]*))?", re.ASCII
)


class SourceError(Exception):
    """The model is not to be had; the message says what to do."""


def default_name(model: str) -> str:
    """Return what a model is served as: a folder's name, or ORGANISATION/NAME of the hub."""
    return _parsed(model)[0] if model.startswith(SCHEME) else Path(model).resolve().name


def folder(model: str) -> Path:
    """Return the checkpoint's folder, after its download where ``model`` names the hub.

    ``hf://ORGANISATION/NAME[@REVISION]`` goes to the hub's cache. Raises :class:`SourceError`.

    A process of its own downloads: what the hub's client keeps is not this one's to carry. Its
    waits are bounded by the client's timeouts (HF_HUB_DOWNLOAD_TIMEOUT), not by the size of a
    model.
    """
    if not model.startswith(SCHEME):
        return Path(model)
    repository, revision = _parsed(model)
    command = [sys.executable, "-m", "plimsoll_engine.download"]
    arguments = [f"--repository={repository}", f"--revision={revision}", f"--parent={os.getpid()}"]
    last = ""
    with subprocess.Popen(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            last = line.strip() or last
            print(last, file=sys.stderr, flush=True)
    if process.returncode != 0:
        raise SourceError(last or f"the download ended with status {process.returncode}")
    return Path(last)


def _parsed(model: str) -> tuple[str, str]:
    found = _HUB.fullmatch(model)
    if found is None:
        raise SourceError("write hf://ORGANISATION/NAME or hf://ORGANISATION/NAME@REVISION")
    return found["repository"], found["revision"] or "main"
