"""Every parser that meets foreign bytes, by name.

The modules that know the parsers are imported by :func:`load` alone, so that the fuzzer can
instrument what they import.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

from tests.fuzz.watched import Target

CORPUS = Path(__file__).with_name("corpus")
FAMILIES = {
    "bodies": (
        "chat", "chat-images", "chat-batch", "completions", "responses", "tokenize", "detokenize",
        "transcriptions", "lora-adapters", "admin",
    ),
    "pages": (
        "operator-page", "engine-page", "exporter-page", "status", "learned",
        "device-health",
    ),
    "files": ("trace", "journal", "journal-rows"),
    "messages": ("to-worker", "from-worker", "zygote", "ranks"),
    "media": ("images", "sounds"),
}  # fmt: skip
KINDS = (
    (
        "chat",
        "chat-batch",
        "completions",
        "responses",
        "tokenize",
        "detokenize",
        "lora-adapters",
    ),
    ("operator-page", "engine-page", "exporter-page"),
    ("trace",),
    ("journal", "journal-rows"),
    ("admin", "status", "learned", "device-health"),
    ("to-worker", "from-worker", "zygote", "ranks"),
    ("images", "chat-images"),
    ("sounds", "transcriptions"),
)
"""What arrives: HTTP bodies, metrics pages, traces, journals, what supervisors are told, messages
between the engine's processes, images, sounds. The time of a fuzz run is shared within a kind."""
NAMES = {name: family for family, names in FAMILIES.items() for name in names}


def load(name: str, folder: Path) -> Target:
    """The target. ``folder`` takes the checkpoints and files that it needs."""
    module = importlib.import_module(f"tests.fuzz.{NAMES[name]}")
    target: Target = module.make(name, folder)
    return target


def make_models(folder: Path) -> None:
    """The tiny checkpoints, where they are not there yet, by a process that has torch."""
    for module, arguments, made in (
        ("tiny", [folder / "tiny"], "tiny"),
        ("tiny_media", ["all", folder], "whisper"),
    ):
        if not (folder / made / "config.json").exists():
            command = [sys.executable, "-m", f"plimsoll_faults.models.{module}", *arguments]
            subprocess.run(command, check=True, timeout=600)
