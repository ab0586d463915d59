"""A pytest plugin that has vLLM's own tests of its OpenAI server ask our engine.

It is loaded by vLLM's Python, with vLLM installed, on a checkout of vLLM's tests that stays as it
is: ``tests.utils``, whose ``RemoteOpenAIServer`` starts ``vllm serve``, is this module instead.
Every model is the checkpoint of :mod:`tests.conformance.entrypoints_model` under the name that the
test uses, and so is every tokenizer. A server with a flag that asks for what this engine has not
skips its tests. ``PLIMSOLL_ENTRYPOINTS`` is the JSON of :class:`Setting`.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
import types
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

import openai
import pytest

START_S = 300.0
STOP_S = 60.0
CONTEXT = 8192
"""Tokens: as many as the checkpoint has positions."""
BLOCKS = CONTEXT // 16 + 8
"""Room for one text of that length: SmolLM2's default on the CPU has less."""
MAX_LORAS = "32"
"""vLLM does not bound how many adapters are registered, and its tests unload none."""
WITH_VALUE = {
    "--max-num-seqs", "--max-lora-rank", "--max-num-batched-tokens", "--shutdown-timeout",
    "--served-model-name",
}  # fmt: skip
WITHOUT_VALUE = {
    "--return-tokens-as-token-ids", "--enable-force-include-usage",
    "--enable-tokenizer-info-endpoint",
}  # fmt: skip
"""Flags of both engines."""
REASONING_PARSERS = {"qwen3", "deepseek_r1"}
"""Those of both engines; others are for models that no test has here."""
TOOL_PARSERS = {"hermes", "llama3_json", "mistral", "deepseek_v3", "pythonic", "openai"}
LEAST_S = "0.01"
"""For a time of 0, which our flags do not take."""
IGNORED_WITH_VALUE = {
    "--dtype", "--gpu-memory-utilization", "--max-cpu-loras", "--seed", "--runner", "--tokenizer",
    "--tokenizer-mode", "--config-format", "--show-hidden-metrics-for-version",
    "--attention-backend", "--limit-mm-per-prompt", "--load-format", "--reasoning-parser",
    "--max-model-len", "--structured-outputs-config.backend", "--max-logprobs", "--port",
    "--ignore-patterns",
}  # fmt: skip
"""Flags for what changes nothing for the tests, or where a test that needs it shows it."""
IGNORED = {
    "--enforce-eager", "--enable-auto-tool-choice", "--trust-remote-code", "--no-async-scheduling",
    "--enable-prompt-tokens-details", "--no-enable-prefix-caching", "--enable-prefix-caching",
    "--enable-chunked-prefill",
}  # fmt: skip


class Setting(NamedTuple):
    """Paths: our Python and its modules, vLLM's source, the checkpoint, an adapter for it, and the
    outcomes."""

    python: str
    modules: str
    source: str
    checkpoint: str
    adapter: str
    outcomes: str


SETTING = Setting(**json.loads(os.environ["PLIMSOLL_ENTRYPOINTS"]))


def flags(given: list[str]) -> list[str]:
    """Return our engine's flags for vLLM's; skips the test for one that we have not."""
    found = ["--max-model-len", str(CONTEXT), "--num-blocks", str(BLOCKS)]
    rest = [part for one in given for part in _parts(one)]
    while rest:
        flag = rest.pop(0)
        name = flag.replace("_", "-")
        if name in IGNORED:
            continue
        if name in WITHOUT_VALUE:
            found.append(name)
        elif name == "--enable-lora":
            found += [name, "--max-loras", MAX_LORAS]
        elif name == "--lora-modules":
            found.append(name)
            for module in _values(rest):
                if os.path.isdir(module):
                    continue
                if module.startswith("{"):
                    told = json.loads(module) | {"path": str(SETTING.adapter)}
                    found.append(json.dumps(told))
                else:
                    found.append(f"{module.partition('=')[0]}={SETTING.adapter}")
        elif (name == "--reasoning-parser" and rest[0] in REASONING_PARSERS) or name in WITH_VALUE:
            value = rest.pop(0)
            found += [name, LEAST_S if (name, value) == ("--shutdown-timeout", "0") else value]
        elif name == "--api-key":
            keys = "\n".join(_values(rest))
            found += ["--api-key-file", _file(keys)]
        elif name == "--tool-call-parser":
            if rest[0] not in TOOL_PARSERS:
                pytest.skip(f"this engine has no parser {rest[0]}")
            found += [name, rest.pop(0)]
        elif name == "--chat-template":
            found += [name, _template(rest.pop(0))]
        elif name in IGNORED_WITH_VALUE:
            rest.pop(0)
        else:
            pytest.skip(f"this engine has no flag {flag}")
    return found


def _parts(word: str) -> list[str]:
    """Return a flag and its value, which may be one word."""
    return word.split("=", 1) if word.startswith("--") else [word]


def _values(rest: list[str]) -> list[str]:
    """Take the values of a flag with several."""
    found = []
    while rest and not rest[0].startswith("--"):
        found.append(rest.pop(0))
    return found


def _template(given: str) -> str:
    """Return the file of a chat template; vLLM also takes its text."""
    if os.path.isfile(given):
        return given
    return _file(given)


def _file(text: str) -> str:
    with tempfile.NamedTemporaryFile("w", delete=False) as file:
        file.write(text)
    return file.name


class RemoteOpenAIServer:
    """Our engine in the place of ``vllm serve``, with the attributes that tests use."""

    DUMMY_API_KEY = "token-abc123"
    show_hidden_metrics = False

    def __init__(
        self,
        model: str,
        vllm_serve_args: list[str],
        *,
        env_dict: dict[str, str] | None = None,
        **others: Any,
    ) -> None:
        chosen = flags(vllm_serve_args)
        self._folder = tempfile.TemporaryDirectory(prefix="entrypoints-")
        folder = Path(self._folder.name)
        (folder / "admin-token").write_text("token-of-a-test")
        self._log = (folder / "log").open("w+")
        self.proc = subprocess.Popen(
            [
                SETTING.python, "-m", "plimsoll_engine", "serve", "--model", SETTING.checkpoint,
                "--served-model-name", model, "--host", "127.0.0.1", "--port", "0",
                "--admin-port", "0", "--run-dir", str(folder), "--device", "cpu",
                "--dtype", "float32", *chosen,
            ],
            stdout=self._log, stderr=self._log, env=_environment(),
        )  # fmt: skip
        self.host = "127.0.0.1"
        try:
            self.port = self._ready(folder)
        except BaseException:
            self.__exit__()
            raise

    def _ready(self, folder: Path) -> int:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.proc.poll() is not None:
                break
            try:
                port = int(json.loads((folder / "engine.json").read_bytes())["port"])
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
                    return port
            except (OSError, ValueError):
                time.sleep(0.1)
        self._log.seek(0)
        raise RuntimeError(f"the engine does not come up: {self._log.read()[-2000:]}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.proc.terminate()
        try:
            self.proc.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.proc.kill()
            self.proc.wait(STOP_S)
        self._log.close()
        self._folder.cleanup()

    @property
    def url_root(self) -> str:
        """The server's address."""
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        """Return the address of a path."""
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def get_client(self, **options: Any) -> openai.OpenAI:
        """Return a client of OpenAI's library."""
        return openai.OpenAI(**self._options(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        """Return an asynchronous client of OpenAI's library."""
        return openai.AsyncOpenAI(**self._options(options))

    def get_async_client_anthropic(self, **options: Any) -> Any:
        """Return an asynchronous client of Anthropic's library."""
        import anthropic

        ours = {"base_url": self.url_root, "api_key": self.DUMMY_API_KEY, "max_retries": 0}
        return anthropic.AsyncAnthropic(**ours, **options)

    def _get_process_termination_timeout(self) -> float:
        return STOP_S

    def _options(self, given: dict[str, Any]) -> dict[str, Any]:
        ours = {"base_url": self.url_for("v1"), "api_key": self.DUMMY_API_KEY, "max_retries": 0}
        return {"timeout": 120.0, **ours, **given}


def _environment() -> dict[str, str]:
    """Return what our engine starts with: nothing of vLLM's Python."""
    dropped = ("PYTHONHOME", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return kept | {"PYTHONPATH": SETTING.modules}


class _Hub:
    """In the place of the hub's client: what a test would download is the tiny adapter."""

    def snapshot_download(self, *args: object, **options: object) -> str:
        return SETTING.adapter

    def __getattr__(self, name: str) -> NoReturn:
        pytest.skip("the test downloads from the hub")


def _replace() -> None:
    """Put this module, the tiny tokenizer and no hub where the tests look for theirs."""
    # Before the checkout is on the path: its folder vllm has no compiled parts.
    import vllm.tokenizers
    import vllm.transformers_utils.repo_utils as repo
    from transformers import AutoTokenizer

    utils = types.ModuleType("tests.utils")
    utils.__dict__.update(
        RemoteOpenAIServer=RemoteOpenAIServer,
        VLLM_PATH=Path(SETTING.source),  # with its examples
        ROCM_EXTRA_ARGS=[],
        ROCM_ENV_OVERRIDES={},
        multi_gpu_only=lambda *, num_gpus: pytest.mark.skip(f"needs {num_gpus} GPUs"),
        requires_fp8=pytest.mark.skip("needs FP8"),
    )
    sys.modules["tests.utils"] = utils
    repo.hf_api = _Hub
    tokenizer = AutoTokenizer.from_pretrained(SETTING.checkpoint)
    AutoTokenizer.from_pretrained = lambda *args, **options: tokenizer
    get = vllm.tokenizers.get_tokenizer
    vllm.tokenizers.get_tokenizer = lambda *args, **options: get(SETTING.checkpoint)


_replace()
_outcomes: dict[str, dict[str, str]] = {}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of vLLM's own functions: they ask no server."""
    asking = [item for item in items if _asks(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in asking])
    items[:] = asking


def _asks(item: pytest.Item) -> bool:
    names = getattr(item, "fixturenames", ())
    if any("server" in name or "client" in name for name in names):
        return True
    return isinstance(item, pytest.Function) and "RemoteOpenAI" in inspect.getsource(item.function)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note a file that cannot be imported."""
    if report.failed:
        _outcomes[report.nodeid] = {"outcome": "error", "why": _why(report)}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note the outcome of a test: that of its setup where it was not called."""
    if report.when == "call" or (report.when == "setup" and not report.passed):
        _outcomes[report.nodeid] = {"outcome": report.outcome, "why": _why(report)}
        Path(SETTING.outcomes).write_text(json.dumps(_outcomes))


def _why(report: pytest.CollectReport | pytest.TestReport) -> str:
    if report.passed:
        return ""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    lines = [line[1:].strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
    return lines[0] if lines else report.longreprtext[-200:]
