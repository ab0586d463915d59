"""The checkpoint of a local replica: in a directory here, downloaded, or made on demand.

Downloads come from the Hugging Face Hub or a bucket; what is made is the tiny checkpoint.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.names import MAKE_CHECKPOINT
from plimsoll_cli.errors import RunError, UsageError

HUB = "hf://"
BUCKET = "s3://"
DEFAULT_REVISION = "main"
DOWNLOADED = ".plimsoll-complete"
"""What the engine's download leaves in a directory that is complete."""
MAKE_TIMEOUT_S = 120.0
"""It takes five seconds, most of them to import torch."""


def need(command: str, *modules: str) -> None:
    """Raise UsageError unless ``modules`` are installed, which the command line does without."""
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    if absent:
        raise UsageError(
            f"{command}: not installed: {', '.join(absent)}: it runs Plimsoll's own engine. In a"
            " checkout, make setup installs everything; to watch an engine of yours, run: plimsoll"
            " watch URL"
        )


def resolve(service: InferenceService, root: Path) -> tuple[Path, bool]:
    """Return the checkpoint's directory, and whether it must be made or downloaded first.

    Raises :class:`UsageError`, which names the field.
    """
    uri = service.spec.model.uri
    if uri.startswith(HUB):
        revision = service.spec.model.revision or DEFAULT_REVISION
        folder = root / "models" / uri.removeprefix(HUB) / revision.replace("/", "--")
        return folder, not (folder / DOWNLOADED).is_file()
    if uri.startswith(BUCKET):
        # Whether it is the bucket's newest the download finds out; it does little where it is.
        return root / "models" / "s3" / uri.removeprefix(BUCKET), True
    if not uri.startswith("file://"):
        raise UsageError(
            f"spec.model.uri: {uri} needs a cluster: use file:///ABSOLUTE/PATH, "
            "hf://ORGANISATION/NAME or s3://BUCKET/PREFIX on this machine"
        )
    folder = Path(uri.removeprefix("file://"))
    if folder.is_dir():
        return folder, False
    wish = service.metadata.annotations.get(MAKE_CHECKPOINT)
    if wish is None:
        raise UsageError(
            f"spec.model.uri: {folder} is not a directory on this machine: use a checkpoint "
            f"directory, or annotate the manifest with {MAKE_CHECKPOINT}: tiny"
        )
    if wish != "tiny":
        raise UsageError(
            f"metadata.annotations[{MAKE_CHECKPOINT}]: {wish!r} is not supported: write tiny"
        )
    made = root / "models" / "tiny"
    return made, not (made / "config.json").is_file()


async def make(service: InferenceService, folder: Path, say: Callable[[str], None]) -> None:
    """Download or make what :func:`resolve` found absent. Raises :class:`RunError`."""
    if service.spec.model.uri.startswith((HUB, BUCKET)):
        say(f"downloading {service.spec.model.uri} into {folder}")
        await download(service, folder, say)
    else:
        say(f"making the tiny checkpoint in {folder}")
        await make_tiny(folder)


async def download(service: InferenceService, folder: Path, say: Callable[[str], None]) -> None:
    """Download the checkpoint, as the init container does in a cluster. Raises :class:`RunError`.

    A private repository needs HF_TOKEN here, a private bucket AWS_ACCESS_KEY_ID and
    AWS_SECRET_ACCESS_KEY. The clients bound their waits; how long a model takes is not bounded.
    """
    model = service.spec.model
    source = [f"--s3={model.uri}"]
    if model.uri.startswith(HUB):
        source = [
            f"--repository={model.uri.removeprefix(HUB)}",
            f"--revision={model.revision or DEFAULT_REVISION}",
        ]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "plimsoll_engine.download", f"--parent={os.getpid()}",
        f"--to={folder}", *source,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout is not None
    last = ""
    try:
        async for line in process.stdout:
            last = line.decode(errors="replace").strip() or last
            say(last)
        if await process.wait() != 0:
            raise RunError(f"spec.model.uri: {model.uri}: {last}")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def make_tiny(folder: Path) -> None:
    """Make the tiny checkpoint, whole or not at all. Raises :class:`RunError`."""
    partial = folder.with_name(f"{folder.name}.{os.getpid()}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{folder.parent}: cannot create the directory: {error.strerror}"
        ) from None
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "plimsoll_faults.models.tiny", str(partial),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        async with asyncio.timeout(MAKE_TIMEOUT_S):
            output, _ = await process.communicate()
        if process.returncode != 0:
            last = output.decode(errors="replace").strip().splitlines()[-1:]
            raise RunError(f"the tiny checkpoint cannot be made in {folder}: {''.join(last)}")
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except TimeoutError:
        raise RunError(
            f"the tiny checkpoint was not made in {folder} within {MAKE_TIMEOUT_S:g} s"
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        shutil.rmtree(partial, ignore_errors=True)
