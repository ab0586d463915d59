"""Published clients of OpenAI's API, below PLIMSOLL_ENGINES: each with packages of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.conformance.peers import FOLDER

HERE = Path(__file__).parent
CASES = ("chat", "stream", "tools", "parse", "responses", "cancel")
MINUTES_S = 900


@dataclass(frozen=True)
class Library:
    """``requirements`` begin with the library itself; it ``lacks`` some of the cases. One of
    ``node`` is npm's, and ``provider`` is its package that speaks the protocol."""

    name: str
    requirements: tuple[str, ...]
    lacks: tuple[str, ...] = ()
    provider: str = ""

    @property
    def node(self) -> bool:
        return bool(self.provider)

    @property
    def version(self) -> str:
        """Of the library itself."""
        return self.requirements[0].rpartition("@" if self.node else "==")[2]

    @property
    def home(self) -> Path:
        """Its folder: another version's is another one."""
        return FOLDER / "clients" / f"{self.name}-{self.version}"

    @property
    def ready(self) -> bool:
        return (self.home / ".ready").exists()

    def command(self, url: str, model: str, case: str) -> list[str]:
        """Return the program that runs a case."""
        if self.node:
            return ["node", str(HERE / "clients.mjs"), self.provider, url, model, case]
        python = self.home / "bin" / "python"
        return [str(python), str(HERE / "clients.py"), self.name, url, model, case]


_SDK = ("ai@7.0.173", "@ai-sdk/openai@4.0.118", "@ai-sdk/openai-compatible@3.0.92", "zod@4.6.7")
LIBRARIES = (
    Library("openai", ("openai==3.51.0",)),
    Library("openai-agents", ("openai-agents==0.24.0",)),
    Library("langchain-openai", ("langchain-openai==1.7.4",)),
    Library("llama-index", ("llama-index-llms-openai-like==0.8.1",)),
    Library("litellm", ("litellm==1.110.2",)),
    Library("pydantic-ai", ("pydantic-ai-slim==2.68.0", "pydantic-ai-slim[openai]")),
    Library("instructor", ("instructor==1.17.0",), lacks=("chat", "tools", "cancel")),
    Library("ai-sdk-openai", _SDK, provider="openai"),
    Library("ai-sdk-compatible", _SDK, provider="compatible", lacks=("responses",)),
)


def make() -> None:
    """Install what is missing; npm's only where there is Node."""
    for library in LIBRARIES:
        if not library.ready and (not library.node or shutil.which("npm")):
            _install(library)


def _install(library: Library) -> None:
    shutil.rmtree(library.home, ignore_errors=True)
    library.home.mkdir(parents=True)
    if library.node:
        options = ["--no-audit", "--no-fund", "--ignore-scripts", "--save-exact"]
        _run("npm", "install", "--prefix", str(library.home), *options, *library.requirements)
    else:
        uv = str(Path(sys.executable).parent / "uv")
        _run(uv, "venv", "--allow-existing", "--python", sys.executable, str(library.home))
        into = ["--python", str(library.home / "bin" / "python")]
        _run(uv, "pip", "install", *into, *library.requirements)
    (library.home / ".ready").touch()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=MINUTES_S)
