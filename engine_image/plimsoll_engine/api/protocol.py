"""Types of the request bodies of the serving API: fields, defaults, and bounds of single fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from plimsoll_engine.api.errors import make_invalid_error

Temperature = Annotated[float, msgspec.Meta(ge=0, le=2)]
TopP = Annotated[float, msgspec.Meta(gt=0, le=1)]
MinP = Annotated[float, msgspec.Meta(ge=0, le=1)]
TopK = Annotated[int, msgspec.Meta(ge=-1, le=1_000_000)]
MaxTokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
MinTokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
Seed = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
# Bounds are OpenAI's; repetition_penalty is narrower than vLLM's.
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, msgspec.Meta(ge=0.01, le=100)]
Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]
LogitBias = Annotated[dict[str, Bias], msgspec.Meta(max_length=1024)]
ChoiceCount = Annotated[int, msgspec.Meta(ge=1, le=128)]
TopLogprobs = Annotated[int, msgspec.Meta(ge=0, le=20)]
StopText = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
# OpenAI allows 4; clients of other engines send extra.
StopTexts = Annotated[list[StopText], msgspec.Meta(max_length=16)]
TokenId = Annotated[int, msgspec.Meta(ge=0)]
TokenIds = Annotated[list[TokenId], msgspec.Meta(min_length=1, max_length=4096)]
# Each token adds log probabilities, which answer_sizes bounds.
NamedTokens = Annotated[list[TokenId], msgspec.Meta(max_length=128)]
BadWord = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
BadWords = Annotated[list[BadWord], msgspec.Meta(max_length=128)]
TruncationLength = Annotated[int, msgspec.Meta(ge=-1, le=1 << 31)]
Name = Annotated[str, msgspec.Meta(max_length=512)]
Salt = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
AdapterName = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
# Linux paths cannot contain NUL.
NO_NUL_PATTERN = r"^[^\x00]*$"
Priority = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
# Bounds far above what agents with long histories send.
Part = Annotated[dict[str, Any], msgspec.Meta(max_length=64)]
Parts = Annotated[list[Part], msgspec.Meta(max_length=1024)]
ToolCalls = Annotated[list[Part], msgspec.Meta(max_length=128)]
Documents = Annotated[list[Part], msgspec.Meta(max_length=1024)]
TemplateVariables = Annotated[dict[str, Any], msgspec.Meta(max_length=64)]
# OpenAI allows 16 pairs.
Metadata = Annotated[dict[str, str], msgspec.Meta(max_length=64)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's ``stream_options``, and vLLM's ``continuous_usage_stats`` (usage in every chunk)."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """vLLM's ``structured_outputs``. Exactly one field must be set."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Annotated[list[str], msgspec.Meta(min_length=1, max_length=4096)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class _CommonFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    # The second group of fields, priority and cache_salt are vLLM's, deadline_s is Plimsoll's, and
    # metadata has no effect. An empty model selects the served model.
    model: str = ""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: MaxTokens | None = None
    min_tokens: MinTokens | None = None
    n: ChoiceCount | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: LogitBias | None = None
    stop: StopText | StopTexts | None = None
    stop_token_ids: Annotated[list[TokenId], msgspec.Meta(max_length=256)] | None = None
    ignore_eos: bool = False
    response_format: dict[str, Any] | None = None

    structured_outputs: StructuredOutputs | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: BadWords | None = None
    logprob_token_ids: NamedTokens | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: TruncationLength | None = None
    truncation_side: Literal["left", "right"] | None = None
    use_beam_search: bool = False
    length_penalty: float | None = None
    prompt_logprobs: TopLogprobs | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    user: Name | None = None
    priority: Priority = 0
    cache_salt: Salt | None = None
    deadline_s: Seconds | None = None

    metadata: Metadata | None = None


class CompletionRequest(_CommonFields, kw_only=True):
    """Body of ``/v1/completions``."""

    # A text, a list of token IDs, or a list of texts or of lists of token IDs.
    prompt: str | list[str | TokenId | list[TokenId]]
    max_tokens: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)] | None = None
    logprobs: TopLogprobs | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None


def _make_extra_field() -> Any:
    # A name that no client sends; decoding fills the field.
    return msgspec.field(default_factory=dict, name="\ue000extra")


Role = Annotated[str, msgspec.Meta(pattern=r"\A[a-zA-Z0-9_.-]{1,64}\Z")]


class Message(msgspec.Struct, kw_only=True):
    """Message of a conversation.

    ``extra`` keeps all fields that the client sent, in their order.
    """

    role: Role
    content: str | Parts | None = None
    name: str | None = None
    tool_calls: ToolCalls | None = None
    tool_call_id: str | None = None
    extra: Any = _make_extra_field()


Messages = Annotated[list[Message], msgspec.Meta(min_length=1, max_length=4096)]


class Function(msgspec.Struct, kw_only=True):
    """Function that the model may call. ``parameters`` is the JSON schema of its arguments."""

    name: Annotated[str, msgspec.Meta(pattern=r"\A[a-zA-Z0-9_.-]{1,64}\Z")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    extra: Any = _make_extra_field()


class Tool(msgspec.Struct, kw_only=True):
    """OpenAI's wrapper of a function."""

    type: Literal["function"]
    function: Function
    extra: Any = _make_extra_field()


Tools = Annotated[list[Tool], msgspec.Meta(max_length=128)]


class FunctionName(msgspec.Struct, kw_only=True):
    """Name of the function in ``tool_choice``."""

    name: str


class NamedTool(msgspec.Struct, kw_only=True, tag_field="type", tag="function"):
    """Value of ``tool_choice`` that forces one function."""

    function: FunctionName


class AllowedTools(msgspec.Struct, kw_only=True):
    """Subset of the tools. If ``mode`` is ``required``, the model must call one of them."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], msgspec.Meta(max_length=128)]


class AllowedToolsChoice(msgspec.Struct, kw_only=True, tag_field="type", tag="allowed_tools"):
    """Value of ``tool_choice`` that restricts the tools of one request."""

    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatBody(_CommonFields, kw_only=True):
    """Fields of a chat except its messages. The fields of the last group are vLLM's."""

    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    store: bool | None = None
    service_tier: str | None = None

    chat_template_kwargs: TemplateVariables | None = None
    documents: Documents | None = None
    include_reasoning: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    echo: bool = False


class ChatRequest(ChatBody, kw_only=True):
    """Body of ``/v1/chat/completions``."""

    messages: Messages


Conversations = Annotated[list[Messages], msgspec.Meta(min_length=1, max_length=1024)]


class BatchChatRequest(ChatBody, kw_only=True):
    """Body of vLLM's ``/v1/chat/completions/batch``: one choice per conversation."""

    messages: Conversations


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of vLLM's ``/tokenize``, with either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: TemplateVariables | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of vLLM's ``/detokenize``."""

    model: str | None = None
    tokens: list[TokenId]


class LoadAdapterRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of vLLM's ``/v1/load_lora_adapter``. ``lora_path`` is a folder on the server."""

    lora_name: AdapterName
    lora_path: Annotated[str, msgspec.Meta(min_length=1, max_length=4096, pattern=NO_NUL_PATTERN)]


class UnloadAdapterRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of vLLM's ``/v1/unload_lora_adapter``."""

    lora_name: AdapterName


# Types of content parts that contain text, in chats and in /v1/responses.
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def get_reasoning_text(part: dict[str, Any]) -> str:
    """Return the reasoning in a content part; empty if the part has no reasoning."""
    kind = part.get("type")
    text = part.get(kind) if kind in ("thinking", "reasoning") else None
    if isinstance(text, list):
        text = "".join(str(one.get("text", "")) for one in text if isinstance(one, dict))
    return text if isinstance(text, str) else ""


def get_part_text(part: dict[str, Any]) -> str:
    """Return the text of a content part. Raises ApiError if the part is not text."""
    kind = part.get("type")
    text = part.get("refusal" if kind == "refusal" else "text")
    if kind not in TEXT_PARTS:
        raise make_invalid_error(
            f"content of type {kind!r} is not supported: this model accepts only text",
            "content",
            "unsupported_value",
        )
    if not isinstance(text, str):
        raise make_invalid_error(f"a part of type {kind} has no text: add a string", "content")
    return text
