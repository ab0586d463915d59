"""Checkpoint folder that ``--model`` names: a local folder, or a repository of the hub."""

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
    """The model is not available. The message says what to do."""


def default_name(model: str) -> str:
    """Return the default served name: the folder's name, or ORGANISATION/NAME of the hub."""
    return _parse(model)[0] if model.startswith(SCHEME) else Path(model).resolve().name


def folder(model: str) -> Path:
    """Return the checkpoint's folder, after downloading it if ``model`` names the hub.

    ``hf://ORGANISATION/NAME[@REVISION]`` goes to the hub's cache. Raises :class:`SourceError`.

    A separate process downloads, so that this one does not keep the memory of the hub's client. The
    client's timeouts (HF_HUB_DOWNLOAD_TIMEOUT) limit its waits.
    """
    if not model.startswith(SCHEME):
        return Path(model)
    repository, revision = _parse(model)
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


def _parse(model: str) -> tuple[str, str]:
    found = _HUB.fullmatch(model)
    if found is None:
        raise SourceError("write hf://ORGANISATION/NAME or hf://ORGANISATION/NAME@REVISION")
    return found["repository"], found["revision"] or "main"
