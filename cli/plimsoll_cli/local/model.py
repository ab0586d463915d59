"""Find, download or generate the checkpoint of a local replica."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.names import MAKE_CHECKPOINT_ANNOTATION
from plimsoll_cli.errors import RunError, UsageError

HUB_SCHEME = "hf://"
BUCKET_SCHEME = "s3://"
DEFAULT_REVISION = "main"
COMPLETE_MARKER_FILE = ".plimsoll-complete"
"""File that the download writes into a checkpoint's directory once it is complete."""
GENERATE_TIMEOUT_S = 120.0
"""Timeout for generating a tiny checkpoint, which usually takes 5 s."""


def require_modules(command: str, *modules: str) -> None:
    """Raise UsageError if some of ``modules``, which ``command`` needs, are not installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"{command}: install {', '.join(missing)}, which Plimsoll's own engine needs: run make"
            " setup in a checkout; to supervise another engine, run plimsoll watch URL"
        )


def locate_checkpoint(service: InferenceService, root: Path) -> tuple[Path, bool]:
    """Return the checkpoint's directory, and whether the checkpoint is still missing there.

    Raises :class:`UsageError`, which names the invalid field of the manifest.
    """
    uri = service.spec.model.uri
    if uri.startswith(HUB_SCHEME):
        revision = service.spec.model.revision or DEFAULT_REVISION
        folder = root / "models" / uri.removeprefix(HUB_SCHEME) / revision.replace("/", "--")
        return folder, not (folder / COMPLETE_MARKER_FILE).is_file()
    if uri.startswith(BUCKET_SCHEME):
        # Always run the download: it checks for changes, and is fast if there are none.
        return root / "models" / "s3" / uri.removeprefix(BUCKET_SCHEME), True
    if not uri.startswith("file://"):
        raise UsageError(
            f"spec.model.uri: {uri} can only be used in a cluster: on this machine, use"
            " file:///ABSOLUTE/PATH, hf://ORGANISATION/NAME or s3://BUCKET/PREFIX"
        )
    folder = Path(uri.removeprefix("file://"))
    if folder.is_dir():
        return folder, False
    requested = service.metadata.annotations.get(MAKE_CHECKPOINT_ANNOTATION)
    if requested is None:
        raise UsageError(
            f"spec.model.uri: {folder} is not a directory on this machine: use a checkpoint "
            f"directory, or annotate the manifest with {MAKE_CHECKPOINT_ANNOTATION}: tiny"
        )
    if requested != "tiny":
        raise UsageError(
            f"metadata.annotations[{MAKE_CHECKPOINT_ANNOTATION}]: {requested!r} is not supported:"
            " set the value to tiny"
        )
    made = root / "models" / "tiny"
    return made, not (made / "config.json").is_file()


async def prepare_checkpoint(
    service: InferenceService, folder: Path, print_line: Callable[[str], None]
) -> None:
    """Download or generate the missing checkpoint into ``folder``. Raises :class:`RunError`."""
    if service.spec.model.uri.startswith((HUB_SCHEME, BUCKET_SCHEME)):
        print_line(f"downloading {service.spec.model.uri} into {folder}")
        await download_checkpoint(service, folder, print_line)
    else:
        print_line(f"generating the tiny checkpoint in {folder}")
        await generate_tiny_checkpoint(folder)


async def download_checkpoint(
    service: InferenceService, folder: Path, print_line: Callable[[str], None]
) -> None:
    """Download the checkpoint with the program of the init container. Raises :class:`RunError`.

    Requests have timeouts, but the download has none.
    """
    model = service.spec.model
    source = [f"--s3={model.uri}"]
    if model.uri.startswith(HUB_SCHEME):
        source = [
            f"--repository={model.uri.removeprefix(HUB_SCHEME)}",
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
            print_line(last)
        if await process.wait() != 0:
            raise RunError(f"spec.model.uri: cannot download {model.uri}: {last}")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def generate_tiny_checkpoint(folder: Path) -> None:
    """Generate the tiny checkpoint in ``folder`` atomically. Raises RunError and UsageError."""
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
        async with asyncio.timeout(GENERATE_TIMEOUT_S):
            output, _ = await process.communicate()
        if process.returncode != 0:
            last = output.decode(errors="replace").strip().splitlines()[-1:]
            raise RunError(f"{folder}: cannot generate the tiny checkpoint: {''.join(last)}")
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except TimeoutError:
        raise RunError(
            f"{folder}: generating the tiny checkpoint took longer than {GENERATE_TIMEOUT_S:g} s: "
            "try again on an idle machine"
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        shutil.rmtree(partial, ignore_errors=True)
