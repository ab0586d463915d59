"""What the flags say of the serving API's answers: vLLM's flags of the same names."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from plimsoll_engine.errors import UsageError

TOOL_CALL_PARSERS = (
    "hermes", "llama3_json", "mistral", "qwen3_coder", "glm45", "deepseek_v3", "pythonic", "openai",
)  # fmt: skip
"""vLLM's names of the families of tool calls."""


class ApiSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``chat_template`` is a file that takes the place of the checkpoint's.

    ``generation_config``: with ``auto``, requests get the sampling defaults of the checkpoint.

    ``return_tokens_as_token_ids`` is for requests that do not say. ``force_include_usage``: every
    chunk of a stream has the usage so far, and the last one has that of the whole.
    ``tokenizer_info``: there is ``/tokenizer_info``. ``tool_call_parser`` is the family whose tool
    calls are read and prescribed; None for that of the chat template. ``strict_requests``: unknown
    fields are refused. ``skip_hosted_tools``: tools that only OpenAI runs are left out. Web pages
    of ``allowed_origins`` may send requests.
    """

    chat_template: Path | None = None
    generation_config: str = "auto"
    return_tokens_as_token_ids: bool = False
    force_include_usage: bool = False
    tokenizer_info: bool = False
    tool_call_parser: str | None = None
    strict_requests: bool = False
    skip_hosted_tools: bool = False
    allowed_origins: tuple[str, ...] = ()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add = parser.add_argument
    add("--chat-template", type=Path, metavar="FILE",
        help="Jinja template of chats; default: the checkpoint's")  # fmt: skip
    add("--generation-config", default="auto", choices=("auto", "vllm"),
        help="sampling defaults: the checkpoint's, or (vllm) temperature 1 alone")  # fmt: skip
    add("--return-tokens-as-token-ids", action="store_true",
        help="write tokens of log probabilities as token_id:NUMBER")  # fmt: skip
    add("--enable-force-include-usage", action="store_true",
        help="have the usage so far in every chunk of a stream, and at its end")  # fmt: skip
    add("--enable-tokenizer-info-endpoint", action="store_true",
        help="serve the tokenizer's settings and chat template at /tokenizer_info")  # fmt: skip
    add("--strict-requests", action="store_true",
        help="refuse requests with unknown fields; default: name them in a header")  # fmt: skip
    add("--skip-hosted-tools", action="store_true",
        help="leave tools that only OpenAI runs out of /v1/responses; default: refuse")  # fmt: skip
    add("--allowed-origins", nargs="+", default=(), metavar="ORIGIN",
        help="web pages that may send requests (CORS); * for all; default: none")  # fmt: skip
    add("--tool-call-parser", choices=TOOL_CALL_PARSERS,
        help="whose tool calls the model writes; default: those of its template")  # fmt: skip


def from_flags(flags: argparse.Namespace) -> ApiSettings:
    """Return the settings of the parsed command line; UsageError for a file that is not there."""
    template: Path | None = flags.chat_template
    if template is not None and not template.is_file():
        raise UsageError(f"--chat-template {template}: no such file, or none that can be read")
    return ApiSettings(
        chat_template=None if template is None else template.resolve(),
        generation_config=flags.generation_config,
        return_tokens_as_token_ids=flags.return_tokens_as_token_ids,
        force_include_usage=flags.enable_force_include_usage,
        tokenizer_info=flags.enable_tokenizer_info_endpoint,
        tool_call_parser=flags.tool_call_parser,
        strict_requests=flags.strict_requests,
        skip_hosted_tools=flags.skip_hosted_tools,
        allowed_origins=tuple(flags.allowed_origins),
    )
