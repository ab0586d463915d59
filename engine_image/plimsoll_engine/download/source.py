"""Find the checkpoint folder of ``--model``, which may be a repository of the hub to download."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

HUB_SCHEME = "hf://"
_HUB_URI_PATTERN = re.compile(
    r"hf://(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w-][\w./-]*))?", re.ASCII
)


class SourceError(Exception):
    """The checkpoint is not available."""


def make_default_model_name(model: str) -> str:
    """Return the name of a checkpoint's folder, or ORGANISATION/NAME of a hub repository."""
    return _parse_hub_uri(model)[0] if model.startswith(HUB_SCHEME) else Path(model).resolve().name


def fetch_folder(model: str) -> Path:
    """Return the checkpoint's folder. Download it first if ``model`` is in the hub.

    Raises SourceError. A separate process downloads it, which frees the memory of the hub's client.
    """
    if not model.startswith(HUB_SCHEME):
        return Path(model)
    repository, revision = _parse_hub_uri(model)
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
        raise SourceError(
            last or f"the download of {model} exited with status {process.returncode}"
        )
    return Path(last)


def _parse_hub_uri(model: str) -> tuple[str, str]:
    found = _HUB_URI_PATTERN.fullmatch(model)
    if found is None:
        raise SourceError(
            f"{model} is not a repository of the Hugging Face Hub: use hf://ORGANISATION/NAME or "
            "hf://ORGANISATION/NAME@REVISION"
        )
    return found["repository"], found["revision"] or "main"
