"""Recognize programs and images of engines, and those that are often used with engines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from plimsoll_api.engines import EngineType
from plimsoll_operator.injection.command_line import get_program_name, split_words


class ProgramClassification(NamedTuple):
    """Classification of a command: it starts an engine's server, another program, or is unknown.

    Attributes:
        kind: The engine whose server the command starts; None if it starts none.
        words: The server's arguments.
        shown: The server's command in messages.
        not_engine_reason: Why the command starts no engine; empty if the program is unknown.
        no_port_reason: Why the server has no HTTP port; empty if it has one.

    """

    kind: EngineType | None = None
    words: Sequence[str] = ()
    shown: str = ""
    not_engine_reason: str = ""
    no_port_reason: str = ""


UNKNOWN_PROGRAM = ProgramClassification()
PYTHON_PATTERN = re.compile(r"(python|pypy)[0-9.]*")
SERVER_MODULES = {
    "vllm.entrypoints.openai.api_server": EngineType.VLLM,
    "vllm.entrypoints.api_server": EngineType.VLLM,
    "sglang.launch_server": EngineType.SGLANG,
    "huggingfaceserver": EngineType.VLLM,
}
"""Python modules that serve HTTP; KServe's huggingfaceserver runs vLLM."""
SERVE_COMMANDS = {
    "vllm": EngineType.VLLM,
    "sglang": EngineType.SGLANG,
    "vllm.entrypoints.cli.main": EngineType.VLLM,
    "sglang.cli.main": EngineType.SGLANG,
}
"""Programs and modules that serve HTTP only with the subcommand ``serve``."""
WORKER_MODULE_PATTERN = re.compile(r"dynamo\.(vllm|sglang|trtllm)(\..*)?")
GRPC_MODULE_PATTERN = re.compile(
    r"vllm\.entrypoints\.grpc_server|sglang\.srt\.entrypoints\.grpc_server"
)
SERVING_FILE_PATTERN = re.compile(r"(.*/)?(vllm/entrypoints/.*api_server|sglang/launch_server)\.py")
OTHER_MODULE_PATTERN = re.compile(
    r"(vllm|sglang|vllm_router|sglang_router|dynamo|pip|http\.server|venv|torch)(\..*)?|.*bench.*"
)
OTHER_FILE_PATTERN = re.compile(
    r".*(bench|client|download|convert|quantize|eval|test|router|proxy|export|upload|warm).*"
)
HELPER_PROGRAMS = split_words(
    "sleep|tail|cat|echo|printf|true|false|:|wait|trap|cd|set|source|.|ulimit|umask|mkdir|"
    "cp|mv|rm|ln|chmod|chown|ls|test|[|[[|pip|pip3|apt|apt-get|apk|dnf|yum|microdnf|git|tar|"
    "unzip|gzip|aws|gsutil|gcloud|az|azcopy|rclone|s5cmd|mc|hf|huggingface-cli|modelscope|"
    "nvidia-smi|rocm-smi|tee|grep|sed|awk|jq|date|env|printenv|hostname|id|whoami|ping|nc|"
    "ncat|nslookup|dig|getent|ssh|sshd|mount|umount|touch|sha256sum|md5sum|df|du|free|top|"
    "watch|kubectl|helm|read|exit|return|shift|ldconfig|find|xargs|head|sort|uniq|wc|cut|tr|"
    "seq|kill|pkill|fi|done|esac|case|for|function|curl|wget|http|hey|ab|wrk|k6|vegeta|"
    "locust|guidellm|genai-perf|aiperf|inference-perf|lm_eval|lm-eval|nginx|envoy|haproxy|"
    "caddy|traefik|redis-server|prometheus|dcgm-exporter|node_exporter|jupyter|jupyter-lab|"
    "gradio|streamlit|open-webui|litellm|vllm-router|sglang-router|epp|vllm_router|"
    "sglang_router|iperf|iperf3|nccl-tests|all_reduce_perf|mpirun|torchrun"
)
"""Programs that prepare a server, send it requests, or proxy them."""
NOT_SERVING_COMMANDS = frozenset(
    {"bench", "chat", "complete", "run-batch", "collect-env", "launch-render"}
)
"""Subcommands of vLLM that serve no requests."""

WORD_SEPARATOR_PATTERN = re.compile(r"[^a-z0-9]+")
OTHER_IMAGE_WORDS = split_words(
    "router|frontend|gateway|epp|picker|console|ui|webui|web|dashboard|exporter|bench|"
    "benchmark|benchmarks|client|clients|proxy|controller|operator|scheduler|autoscaler|"
    "manager|plugin|sim|simulator|mock|test|tests|docs|doc|demo|downloader|download|init|loader|"
    "tool|tools|toolkit|webhook|sidecar|adapter|playground|grafana|prometheus|metrics|"
    "monitor|monitoring|nginx|envoy|cache|tokenizer|tuner|profiler|eval|evaluation|harness|"
    "cli|admin|portal|studio|chat|bot|agent|agents|discovery|syncer|uploader|converter|"
    "store|cleaner|cleanup|puller|prefetch|watcher|reporter|notifier|loadgen|load|gradio|"
    "streamlit|extproc|lint|helm|chart|charts"
)
"""Words in the names of images that are used with an engine but do not contain one."""


def classify_command(words: Sequence[str]) -> ProgramClassification:
    """Classify a simple command; ``words`` are its program and arguments."""
    name = get_program_name(words[0])
    if PYTHON_PATTERN.fullmatch(name):
        return _classify_python(words)
    if name in SERVE_COMMANDS:
        return _classify_subcommand(name, words[1:])
    if name in HELPER_PROGRAMS:
        return ProgramClassification(not_engine_reason=f"runs {name}")
    return UNKNOWN_PROGRAM


def _classify_subcommand(name: str, arguments: Sequence[str]) -> ProgramClassification:
    kind = SERVE_COMMANDS[name]
    verb = next((one for one in arguments if not one.startswith("-")), "")
    if verb != "serve":
        return ProgramClassification(
            not_engine_reason=f"runs {name.partition('.')[0]} {verb}".rstrip()
            + ", which serves no requests"
        )
    words = arguments[list(arguments).index("serve") :]
    return ProgramClassification(
        kind, words, f"{kind} serve", no_port_reason=_explain_missing_port(words)
    )


def _classify_python(words: Sequence[str]) -> ProgramClassification:
    at = 1
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-m", "-c"):
        at += 2 if words[at] in ("-X", "-W") else 1
    if at >= len(words) or (words[at] == "-m" and at + 1 >= len(words)):
        return UNKNOWN_PROGRAM
    if words[at] == "-c":
        return ProgramClassification(not_engine_reason="runs Python code from the command line")
    if words[at] != "-m":
        file = words[at]
        if SERVING_FILE_PATTERN.fullmatch(file):
            kind = EngineType.SGLANG if "sglang" in file else EngineType.VLLM
            return ProgramClassification(
                kind,
                words[at + 1 :],
                get_program_name(file),
                no_port_reason=_explain_missing_port(words[at + 1 :]),
            )
        other = OTHER_FILE_PATTERN.fullmatch(get_program_name(file).lower())
        return (
            ProgramClassification(not_engine_reason=f"runs {get_program_name(file)}")
            if other
            else UNKNOWN_PROGRAM
        )
    module, rest = words[at + 1], words[at + 2 :]
    if module in SERVER_MODULES:
        server = ProgramClassification(
            SERVER_MODULES[module], rest, module, no_port_reason=_explain_missing_port(rest)
        )
        return _classify_huggingface(server) if module == "huggingfaceserver" else server
    if module in SERVE_COMMANDS:
        return _classify_subcommand(module, rest)
    if (worker := WORKER_MODULE_PATTERN.fullmatch(module)) is not None:
        kind = EngineType.SGLANG if worker[1] == "sglang" else EngineType.VLLM
        why = "a worker of NVIDIA Dynamo has no OpenAI server: only its frontend has one"
        return ProgramClassification(kind, rest, module, no_port_reason=why)
    if GRPC_MODULE_PATTERN.fullmatch(module):
        kind = EngineType.SGLANG if module.startswith("sglang") else EngineType.VLLM
        return ProgramClassification(
            kind,
            rest,
            module,
            no_port_reason="the engine serves gRPC, but the supervisor queries HTTP",
        )
    if OTHER_MODULE_PATTERN.fullmatch(module):
        return ProgramClassification(not_engine_reason=f"runs {module}")
    return UNKNOWN_PROGRAM


def _classify_huggingface(server: ProgramClassification) -> ProgramClassification:
    backend = find_option_value(server.words, "--backend")
    if backend in ("huggingface", "sglang"):
        kind = EngineType.SGLANG if backend == "sglang" else None
        return server._replace(
            kind=kind, not_engine_reason="" if kind else "runs the backend of Hugging Face"
        )
    return server


def _explain_missing_port(words: Sequence[str]) -> str:
    if "--headless" in words:
        return "with --headless, this process of a multi-node engine does not listen on a port"
    if "--grpc-mode" in words or "--grpc" in words:
        return "the engine serves gRPC, but the supervisor queries HTTP"
    rank = find_option_value(words, "--node-rank")
    if rank is not None and rank.isdigit() and int(rank[:9]) > 0:
        return (
            f"with --node-rank {rank[:9]}, this process of a multi-node engine does not listen on a"
            " port"
        )
    if (path := find_option_value(words, "--uds")) is not None:
        return (
            f"with --uds {path}, the engine listens on a Unix socket: serve on a TCP port instead,"
            " which the supervisor can query"
        )
    return ""


def classify_image(image: str) -> tuple[EngineType | None, str]:
    """Return the engine that an image's name suggests, or None, and the name."""
    name = image.partition("@")[0].rpartition("/")[2].partition(":")[0].lower()
    words = set(WORD_SEPARATOR_PATTERN.split(name))
    if words & OTHER_IMAGE_WORDS:
        return None, name
    for word in words:
        if word.startswith("sglang"):
            return EngineType.SGLANG, name
        if word.startswith("vllm") or word == "huggingfaceserver":
            return EngineType.VLLM, name
    return None, name


def find_option_value(words: Sequence[str], name: str) -> str | None:
    """Return the last value of an option; None if the option is absent.

    As in vLLM and SGLang, the option may have underscores instead of dashes.
    """
    last = None
    for at, word in enumerate(words):
        if not word.startswith("--"):
            continue
        option, equals, value = word.partition("=")
        if option.replace("_", "-") != name:
            continue
        if equals:
            last = value
        elif at + 1 < len(words):
            last = words[at + 1]
    return last


def has_option(words: Sequence[str], name: str) -> bool:
    """Report whether an option is present, with or without a value."""
    return any(word.partition("=")[0].replace("_", "-") == name for word in words)
