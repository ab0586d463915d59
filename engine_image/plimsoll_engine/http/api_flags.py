"""Flags and settings of the serving API, named as in vLLM."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from plimsoll_engine.errors import UsageError

TOOL_CALL_PARSERS = (
    "hermes", "llama3_json", "mistral", "qwen3_coder", "glm45", "deepseek_v3", "pythonic", "openai",
)  # fmt: skip


class ApiSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the serving API.

    Attributes:
        chat_template: File that replaces the checkpoint's chat templates.
        generation_config: ``auto`` to use the checkpoint's sampling defaults, or ``vllm``.
        tool_call_parser: Name of the parser; None selects it by the chat template.
        strict_requests: Whether unknown fields are refused.
        skip_hosted_tools: Whether tools that only OpenAI runs are ignored.

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
    """Add the flags of :class:`ApiSettings` to ``parser``."""
    add = parser.add_argument
    add("--chat-template", type=Path, metavar="FILE",
        help="file with a Jinja chat template; default: that of the checkpoint")  # fmt: skip
    add("--generation-config", default="auto", choices=("auto", "vllm"),
        help="source of sampling defaults: the checkpoint (auto) or vLLM (vllm)")  # fmt: skip
    add("--return-tokens-as-token-ids", action="store_true",
        help="write tokens in log probabilities as token_id:NUMBER")  # fmt: skip
    add("--enable-force-include-usage", action="store_true",
        help="include usage statistics in every chunk of a stream")  # fmt: skip
    add("--enable-tokenizer-info-endpoint", action="store_true",
        help="serve the tokenizer's configuration at /tokenizer_info")  # fmt: skip
    add("--strict-requests", action="store_true",
        help="refuse requests with unknown fields; default: warn in a header")  # fmt: skip
    add("--skip-hosted-tools", action="store_true",
        help="ignore tools in /v1/responses that only OpenAI runs; default: refuse")  # fmt: skip
    add("--allowed-origins", nargs="+", default=(), metavar="ORIGIN",
        help="origins that CORS allows; * for all; default: none")  # fmt: skip
    add("--tool-call-parser", choices=TOOL_CALL_PARSERS,
        help="parser of the model's tool calls; default: by its chat template")  # fmt: skip


def create_settings(flags: argparse.Namespace) -> ApiSettings:
    """Return the API settings of the parsed command line. Raises UsageError for a missing file."""
    template: Path | None = flags.chat_template
    if template is not None and not template.is_file():
        raise UsageError(
            f"the file {template} (--chat-template) does not exist or cannot be read: use a "
            "file with a Jinja template"
        )
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
