"""What the outcome of a test of vLLM's says about our engine."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple

SUITES = {
    "entrypoints": (
        "openai/chat_completion", "openai/completion", "openai/models", "openai/responses",
        "openai/test_chunked_prompt.py", "openai/test_return_token_ids.py",
        "openai/test_return_tokens_as_ids.py", "serve/tokenize/test_tokenization.py",
        "serve/lora/test_lora_adapters.py", "serve/instrumentator", "serve/middleware",
        "serve/sagemaker", "serve/dev", "launchers/test_shutdown.py",
        "launchers/api_server/test_multi_api_servers.py", "anthropic/test_messages.py",
        "tool_parsers", "generate/structured_decisions", "generate/generative_scoring",
    ),
    "tool_use": ("",),
}  # fmt: skip
"""Files and folders of vLLM's tests that ask a server, by the folder below ``tests``."""


LEFT_OUT = {
    "openai/chat_completion/test_completion_with_function_calling.py": "it waits for the tool calls"
    " of a trained model",
    "openai/chat_completion/test_serving_chat.py": "for gpt-oss models",
    "openai/responses/test_harmony.py": "for gpt-oss models",
    "openai/responses/test_harmony_utils.py": "it asks no server",
    "openai/responses/test_mcp_tools.py": "for gpt-oss models",
    "tool_parsers/test_openai_tool_parser.py": "for gpt-oss models",
    "reasoning": "it asks no server",
    "cohere": "`/v2` is Cohere's",
    "multimodal": "it downloads models that see or hear, and media for them",
    "openai/correctness": "it measures the accuracy of a trained model",
    "openai/test_openai_schema.py": "it walks through vLLM's own OpenAPI document",
    "pooling": "models that pool are not served",
    "rl": "for training, with vLLM's own endpoints",
    "scale_out": "for vLLM's own endpoints between its parts",
    "speech_to_text": "it downloads models that hear, and media for them",
}
"""Files and folders that are not run because they say nothing about this engine, and why."""
NOT_BUILT = {
    "serve/lora/test_lora_adapters.py::test_beam_search_with_lora_adapters": (
        "beam search is not built"
    ),
    "serve/lora/test_lora_adapters.py::test_loading_invalid_adapters_does_not_break_others": (
        "it expects a 500 for an adapter that cannot be loaded; this engine answers 400, and the"
        " test then never ends"
    ),
}
"""Tests that are not run, but count as failed, and why."""


class Row(NamedTuple):
    """``verdict`` is passed, not applicable, failed or unexplained."""

    test: str
    verdict: str
    why: str


NOT, FAILED = "not applicable", "failed"
TINY = "its assertion is about the text of a trained model"
CHANCE = "it expects two random answers to differ, and they may be the same"
WORDS = "it expects the words of vLLM's error"
OTHER = "it counts the tokens of another tokenizer"
CALLS = "it waits for the tool calls of a trained model"
FILLS = "the tiny model fills the text of an argument up to `max_tokens`"
FULL = "SmolLM2's JSON goes on up to `max_tokens`"
CUT = "SmolLM2's answer goes on up to the limit of 128 tokens, so it is incomplete"
ENDLESS = "SmolLM2's text, drawn without a seed, sometimes goes on up to the end of the context"
EMPTY = "SmolLM2 ends its text at once after Mistral's chat template"
NO_TAG = "SmolLM2 has no token `</think>`, up to which reasoning is counted"
THINKS = "it expects that the text has an answer behind its reasoning"
LONG = "it waits 120 s, in which the tiny model calls tools up to the end of the context"
EARLY = "it expects another place for the end of the text than the tiny model's"
NO_500 = "an adapter that cannot be loaded gets a 400, not vLLM's 500"
USAGE = "`usage` also has `prompt_tokens_details`"
FIELD = "the field `{}` is refused"
METRICS = "its metrics begin with `vllm:`, this engine's with `plimsoll_engine_` (docs/metrics.md)"
RUNNING = "it waits for `vllm:num_requests_running`, which has this engine's name here"
MESSAGES = "Anthropic's `/v1/messages` is not built{}"
VERDICTS: tuple[tuple[str, str, str], ...] = (
    ("openai/responses/test_parsable_context.py::*", NOT, "for gpt-oss models"),
    ("*_with_prompt_embeds.py*", NOT, "embeddings as prompts are not built"),
    ("*::test_top_logprobs*", FAILED, "`top_logprobs` is 0 to 20, as OpenAI's"),
    ("*::test_single_chat_session*", FAILED, USAGE),
    ("*::test_chat_streaming*", NOT, EARLY),
    ("*::test_kv_transfer_*", FAILED, FIELD.format("kv_transfer_params")),
    ("*test_chat_echo.py::test_prompt_logprobs", FAILED, "`prompt_logprobs` is 0 to 20"),
    ("*::test_more_than_one_prompt_logprobs_chat*", NOT, TINY),
    ("*::test_response_format_json_*", NOT, TINY),
    ("*::test_structured_outputs_choice_chat*", NOT, CHANCE),
    ("*::test_complex_message_content*", NOT, TINY),
    ("*::test_chat_completion_n_parameter_non_streaming*", NOT, TINY),
    ("*::test_long_seed*", NOT, WORDS),
    ("*::test_invocations*", NOT, "`/invocations` is SageMaker's"),
    ("openai/completion/test_completion.py::test_single_completion*", NOT, OTHER),
    ("*::test_parallel_*streaming*", NOT, TINY),
    ("*::test_batch_completions*", FAILED, FIELD.format("use_beam_search")),
    ("openai/completion/test_prompt_validation.py::*", NOT, WORDS),
    ("*test_tensorizer_entrypoint.py*", NOT, "it loads weights with a library of its own"),
    ("*::test_enable_response_messages*", FAILED, FIELD.format("enable_response_messages")),
    ("openai/responses/test_basic.py::test_simple_input", NOT, TINY),
    ("openai/responses/test_basic.py::test_instructions", NOT, TINY),
    ("openai/responses/test_basic.py::test_chat", NOT, TINY),
    ("openai/responses/*::test_function_tool_use[[]required*", NOT, LONG),
    ("openai/responses/*::test_function_tool_use[[]auto*", NOT, CALLS),
    ("openai/responses/*::test_function_calling_with_streaming_expected_*", NOT, CALLS),
    ("openai/responses/*::test_function_calling_with_streaming_forced_*[[]auto*", NOT, CALLS),
    ("openai/responses/test_simple.py::test_streaming_logprobs*", NOT, EARLY),
    ("openai/responses/test_simple.py::test_max_tokens*", NOT, EARLY),
    ("openai/responses/*::test_structured_output", NOT, TINY),
    ("openai/responses/*::test_structured_output_with_parse", NOT, TINY),
    ("*::test_chat_completion_with_tool_use", NOT, CALLS),
    ("*::test_comparison_with_prompt_logprobs_and_logprobs", NOT, EARLY),
    ("*::test_chat_completion_with_emoji_and_token_ids", NOT, EARLY),
    ("*test_namespace_tool_separator.py::*", FAILED, "tools of type `namespace` are refused"),
    ("*test_stateful.py::*", FAILED, "no response is stored"),
    ("*::test_load_lora_adapter_with_same_name_replaces_inplace*", NOT, TINY),
    ("*::test_load_lora_adapter_with_load_inplace_false_errors*", NOT, WORDS),
    ("serve/lora/*::test_dynamic_lora_*", FAILED, NO_500),
    ("serve/instrumentator/test_basic.py::test_show_version", FAILED, "it is another version"),
    ("serve/instrumentator/*::test_request_cancellation*", NOT, "it needs a context of 10,100"),
    ("serve/instrumentator/test_orca_metrics.py::test_single_completion*", FAILED, USAGE),
    ("serve/instrumentator/test_orca_metrics.py::*", FAILED, "no header has the load (ORCA)"),
    ("serve/instrumentator/test_metrics.py::test_metrics_counts[[]*text]", FAILED, METRICS),
    ("serve/instrumentator/test_metrics.py::test_metrics_exist[[]*", FAILED, METRICS),
    ("serve/instrumentator/test_metrics.py::test_abort_metrics_reset[[]*", FAILED, RUNNING),
    ("launchers/test_shutdown.py::test_wait_timeout_completes_requests", FAILED, RUNNING),
    ("serve/middleware/*::test_v2_endpoint_accepts_*", NOT, "`/v2` is Cohere's"),
    ("anthropic/*::test_simple_messages", FAILED, MESSAGES.format("")),
    ("anthropic/*::test_system_message", FAILED, MESSAGES.format("")),
    ("anthropic/*::test_anthropic_streaming", FAILED, MESSAGES.format(", nor its events")),
    (
        "anthropic/*::test_anthropic_streaming_cache_usage",
        FAILED,
        MESSAGES.format(", nor its events"),
    ),
    ("anthropic/*::test_anthropic_tool_call*", FAILED, MESSAGES.format(", nor its tools")),
    (
        "anthropic/*::test_anthropic_structured_output",
        FAILED,
        MESSAGES.format(", nor its `output_config`"),
    ),
    ("generate/generative_scoring/*::test_*", NOT, "`/generative_scoring` is vLLM's own"),
    ("generate/structured_decisions/*::test_*", NOT, "`/v1/systemone` is vLLM's own"),
    ("serve/sagemaker/*::test_framework_default_handlers", NOT, "`/ping` is SageMaker's"),
    ("serve/sagemaker/*::test_middleware_with_ping_endpoint", NOT, "`/ping` is SageMaker's"),
    (
        "serve/sagemaker/*::test_customer_middleware_with_vllm_server",
        NOT,
        "it loads Python code of SageMaker's customers into the server",
    ),
    (
        "serve/sagemaker/*::test_middleware_env_var_override",
        NOT,
        "it loads Python code of SageMaker's customers into the server",
    ),
    (
        "serve/sagemaker/*::test_sagemaker_invocations_with_adapter",
        NOT,
        "`/invocations` is SageMaker's",
    ),
    ("serve/sagemaker/*::test_sagemaker_*load*", NOT, "`/adapters` is SageMaker's"),
    ("serve/sagemaker/*::test_*session*", NOT, "sessions in `/invocations` are SageMaker's"),
    ("*test_simple.py::test_reasoning_item*", NOT, THINKS),
    ("*test_hermes_tool_parser.py::test_*_tool_call*", NOT, CALLS),
    ("*test_mistral_tool_calls.py::test_tool_call_auto_or_required*", NOT, FILLS),
    ("*test_mistral_tool_calls.py::test_tool_call_parallel*", NOT, FILLS),
    ("*test_chat_completions.py::test_response_format_with_tool_choice_required*", NOT, FILLS),
    ("*test_parallel_tool_calls.py::test_parallel_tool_calls[[]*", NOT, CALLS),
    ("*test_parallel_tool_calls.py::test_parallel_tool_calls_false*", NOT, CALLS),
    ("*test_tool_calls.py::test_tool_call_and_choice*", NOT, CALLS),
    ("tool_use/*::test_*_with_results*", NOT, TINY),
)
"""Pattern of tests that do not pass, verdict and reason; the first that fits counts."""
OF_SMOLLM2: tuple[tuple[str, str, str], ...] = (
    ("*::test_structured_outputs_json_chat", NOT, FULL),
    ("*test_include_reasoning.py::test_reasoning_tokens_in_usage", NOT, NO_TAG),
    ("*test_include_reasoning.py::test_include_reasoning_*", NOT, THINKS),
    ("openai/completion/test_completion.py::test_completion_streaming*", NOT, EARLY),
    ("openai/chat_completion/test_chat_echo.py::test_chat_session_with_echo*", NOT, ENDLESS),
    ("openai/responses/test_simple.py::test_basic*", NOT, ENDLESS),
    ("openai/responses/test_basic.py::test_logprobs", NOT, THINKS),
    ("openai/responses/test_basic.py::test_streaming", NOT, THINKS),
    ("openai/responses/test_simple.py::*reasoning_tokens_e2e*", NOT, NO_TAG),
    ("tool_use/*::test_chat_completion_with*_tools[[]mistral-7b]", NOT, EMPTY),
    ("openai/responses/*::test_named_tool_use*", NOT, CUT),
    ("openai/responses/*::test_function_calling_with_streaming_types*", NOT, CUT),
)
"""The same of SmolLM2 alone; these come first."""
REASONS = frozenset(reason for _, _, reason in VERDICTS + OF_SMOLLM2)


def verdict(test: str, outcome: str, why: str, smollm2: bool = False) -> Row:
    """Return what an outcome of pytest says about our engine."""
    if outcome == "passed":
        return Row(test, "passed", "")
    if outcome == "skipped":
        return Row(test, NOT, why)
    for pattern, found, reason in (OF_SMOLLM2 if smollm2 else ()) + VERDICTS:
        if fnmatchcase(test, pattern):
            return Row(test, found, reason)
    return Row(test, "unexplained", why)
