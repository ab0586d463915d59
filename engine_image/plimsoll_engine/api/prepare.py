"""Prepare request bodies: decoding, chat template and tokenization.

Large bodies are prepared in a separate process (:mod:`plimsoll_engine.api.preparer`), because
decoders and templates hold the interpreter's lock.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from plimsoll_engine.api import (
    chat_images,
    output_grammar,
    reasoning,
    responses_request,
    tool_families,
    truncation,
)
from plimsoll_engine.api.chat_prompt import ChatPrompt, join_message_text
from plimsoll_engine.api.errors import ApiError, make_invalid_error
from plimsoll_engine.api.protocol import (
    BatchChatRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Message,
    TokenizeRequest,
    Tool,
)
from plimsoll_engine.api.responses_request import ResponsesRequest
from plimsoll_engine.api.tool_arguments import find_string_arguments
from plimsoll_engine.api.validation import check_turn_fields, decode_body
from plimsoll_engine.frontend.requests.tokenizer import ChatTooLongError, TemplateError, Tokenizer
from plimsoll_engine.messages.worker_ipc import Grammar

# A text that needs a higher average to fit into the context is refused before tokenization.
MAX_CHARACTERS_PER_TOKEN = 64

_Body = TypeVar("_Body", CompletionRequest, ChatRequest)


class EngineLimits(msgspec.Struct, frozen=True):
    """Limits and settings of the engine that affect preparation.

    Attributes:
        max_model_len: Maximum number of prompt and output tokens; None until a worker reports it.
        max_queued: Maximum number of choices of a request.
        max_json_values: Maximum number of JSON values in a body.
        tool_call_parser: Name of the tool call parser; None selects it by the chat template.

    """

    max_model_len: int | None
    max_queued: int
    max_json_values: int
    tool_call_parser: str | None = None
    # Whether unknown fields are refused.
    strict: bool = False
    # Whether tools that only OpenAI runs are dropped.
    skip_hosted_tools: bool = False


class PreparedBody(msgspec.Struct, Generic[_Body]):
    """Request that is ready to run.

    Attributes:
        prompts: Token IDs of each prompt.
        images: Image files.
        echoes: Text of each prompt; empty if the responses do not repeat their prompts.
        reasoning_prompts: Indices of the prompts whose output may begin with reasoning.
        bad_words: Token sequences that the output must not contain.
        response_fields: JSON object with the request fields that a response repeats.

    """

    body: _Body
    prompts: list[list[int]]
    grammar: Grammar | None = None
    images: list[bytes] = []
    echoes: list[str] = []
    # Tool call family of the output; empty if the output has no tool calls.
    family: str = ""
    # By tool (plimsoll_engine.api.tool_arguments.StringArguments).
    string_arguments: dict[str, dict[str, bool]] = {}
    # The model must call one of these tools, unless the list is empty.
    forced_tools: list[str] = []
    reasoning_prompts: list[int] = []
    bad_words: list[list[int]] = []
    response_fields: bytes = b""
    # Sent to the client as response headers.
    warnings: list[str] = []


class TextResult(msgspec.Struct):
    """JSON response of /tokenize or /detokenize.

    ``answer`` is the response body, and ``model`` is the model name in the request.
    """

    model: str | None
    answer: bytes
    warnings: list[str] = []


class RequestPreparer:
    """Preparer of requests for one checkpoint.

    ``image`` is the placeholder text of images; None if the model does not accept images.
    """

    def __init__(self, tokenizer: Tokenizer, image: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._prompt = ChatPrompt(tokenizer, image)
        self._accepts_images = image is not None
        template = tokenizer.get_template_source(has_tools=True)
        self._family = tool_families.detect_family(template)
        self._writes_tools = "tools" in template

    def prepare_completion(
        self, raw: bytes | bytearray, limits: EngineLimits
    ) -> PreparedBody[CompletionRequest]:
        """Prepare the body of a completion. Raises ApiError."""
        warnings: list[str] = []
        body = decode_body(raw, CompletionRequest, limits.strict, warnings)
        prompts = _list_prompts(body.prompt)
        choices = len(prompts) * (body.n or 1)
        if choices > limits.max_queued:
            raise make_too_many_error(choices, limits.max_queued, "prompt")
        special = body.add_special_tokens is not False
        ids, echoes = [], []
        for prompt in prompts:
            if not prompt:
                raise make_invalid_error(
                    "prompt is empty: send text or token IDs", "prompt", "empty_prompt"
                )
            one = (
                self._encode(prompt, limits, "prompt", add_special_tokens=special)
                if isinstance(prompt, str)
                else prompt
            )
            cut = truncation.truncate_prompt(one, body, limits.max_model_len)
            _check_length(cut, limits, "prompt")
            ids.append(cut)
            if body.echo:
                whole = isinstance(prompt, str) and len(cut) == len(one)
                echoes.append(str(prompt) if whole else self._decode(cut, "prompt"))
        rest = msgspec.structs.replace(
            body, prompt="", response_format=None, structured_outputs=None, metadata=None,
            bad_words=None,
        )  # fmt: skip
        return PreparedBody(
            rest,
            ids,
            output_grammar.build_grammar(body, self._tokenizer, ""),
            echoes=echoes,
            bad_words=self._encode_bad_words(body),
            warnings=warnings,
        )

    def prepare_chat(
        self, raw: bytes | bytearray, limits: EngineLimits
    ) -> PreparedBody[ChatRequest]:
        """Prepare the body of a chat. Raises ApiError."""
        warnings: list[str] = []
        body = decode_body(raw, ChatRequest, limits.strict, warnings)
        return self._prepare_chats(body, [body.messages], "messages", limits, warnings)

    def prepare_chats(
        self, raw: bytes | bytearray, limits: EngineLimits
    ) -> PreparedBody[ChatRequest]:
        """Prepare the body of a batch of chats. Raises ApiError."""
        warnings: list[str] = []
        batch = decode_body(raw, BatchChatRequest, limits.strict, warnings)
        if len(batch.messages) > limits.max_queued:
            raise make_too_many_error(len(batch.messages), limits.max_queued, "messages")
        fields = {name: getattr(batch, name) for name in batch.__struct_fields__}
        body = ChatRequest(**fields | {"messages": batch.messages[0]})
        return self._prepare_chats(body, batch.messages, "messages", limits, warnings)

    def prepare_responses(
        self, raw: bytes | bytearray, limits: EngineLimits
    ) -> PreparedBody[ChatRequest]:
        """Prepare the body of a ``/v1/responses`` request. Raises ApiError."""
        warnings: list[str] = []
        body = decode_body(raw, ResponsesRequest, limits.strict, warnings)
        responses_request.drop_hosted_tools(body, limits.skip_hosted_tools, warnings)
        origins: dict[str, str] = {}
        try:
            chat = responses_request.convert_to_chat(body, limits.strict, warnings, origins)
            prepared = self._prepare_chats(chat, [chat.messages], "messages", limits, warnings)
        except ApiError as error:
            responses_request.rename_field(error, origins)
            raise
        prepared.response_fields = msgspec.json.encode(
            responses_request.get_echoed_fields(body, self._tokenizer.checkpoint.sampling_defaults)
        )
        return prepared

    def _prepare_chats(
        self,
        body: ChatRequest,
        conversations: list[list[Message]],
        param: str,
        limits: EngineLimits,
        warnings: list[str],
    ) -> PreparedBody[ChatRequest]:
        if (body.n or 1) > limits.max_queued:
            raise make_too_many_error(body.n or 1, limits.max_queued, "n")
        family = limits.tool_call_parser or self._family or tool_families.DEFAULT_FAMILY
        must_match = output_grammar.build_grammar(body, self._tokenizer, family)
        prompts, echoes, reasons = [], [], []
        variables = self._prompt.make_template_variables(
            body.chat_template_kwargs, body.reasoning_effort
        )
        if body.documents is not None:
            variables["documents"] = body.documents
        tools = output_grammar.list_offered_tools(body)
        if tools and self._writes_tools and not (limits.tool_call_parser or self._family):
            warnings.append(
                "the chat template's tool call format is unknown, so tool calls are parsed as"
                f" {family} (--tool-call-parser)"
            )
        # A grammar constrains the output from its first token, so there is no reasoning.
        thinking = must_match is None and variables.get("enable_thinking") is not False
        for number, conversation in enumerate(conversations):
            text = self._render(body, conversation, tools, variables, limits, warnings)
            ids = self._encode(
                text, limits, param, add_special_tokens=bool(body.add_special_tokens)
            )
            ids = truncation.truncate_prompt(ids, body, limits.max_model_len)
            _check_length(ids, limits, param)
            prompts.append(ids)
            last = join_message_text(conversation[-1])
            if body.echo:
                echoes.append(last)
            continued = body.continue_final_message and reasoning.CLOSE_TAG in last
            if thinking and not reasoning.ends_with_closed_reasoning(text) and not continued:
                reasons.append(number)
        urls = (
            [url for one in conversations for url in chat_images.list_image_urls(one)]
            if self._accepts_images
            else []
        )
        if urls and len(conversations) > 1:
            raise make_invalid_error(
                "images are not supported in a batch: send one chat per request", param
            )
        if urls and body.truncate_prompt_tokens is not None:
            raise make_invalid_error(
                "a prompt with images cannot be truncated: omit the field", "truncate_prompt_tokens"
            )
        rest = msgspec.structs.replace(
            body, messages=[Message(role="user")], tools=None, tool_choice=None,
            chat_template_kwargs=None, response_format=None, structured_outputs=None, metadata=None,
            bad_words=None, documents=None,
        )  # fmt: skip
        return PreparedBody(
            rest, prompts, must_match, chat_images.decode_urls(urls) if urls else [], echoes,
            family=family if tools or family == "openai" else "",
            string_arguments={
                one.function.name: find_string_arguments(one.function.parameters) for one in tools
            },
            forced_tools=[one.function.name for one in output_grammar.list_forced_tools(body)],
            reasoning_prompts=reasons, bad_words=self._encode_bad_words(body), warnings=warnings,
        )  # fmt: skip

    def tokenize(self, raw: bytes | bytearray, limits: EngineLimits) -> TextResult:
        """Tokenize the text of a body. Raises ApiError."""
        warnings: list[str] = []
        body = decode_body(raw, TokenizeRequest, limits.strict, warnings)
        if (body.prompt is None) == (body.messages is None):
            raise make_invalid_error(
                "either prompt or messages must be set, but not both", "prompt"
            )
        if body.messages is not None:
            check_turn_fields(body.add_generation_prompt, body.continue_final_message)
            variables = self._prompt.make_template_variables(body.chat_template_kwargs, None)
            text = self._render(body, body.messages, body.tools or [], variables, limits, warnings)
            ids = self._encode(
                text, limits, "messages", add_special_tokens=bool(body.add_special_tokens)
            )
            _check_length(ids, limits, "messages")
        else:
            special = body.add_special_tokens is not False
            ids = self._encode(body.prompt or "", limits, "prompt", add_special_tokens=special)
        texts = self._tokenizer.get_token_names(ids) if body.return_token_strs else None
        answer = {
            "count": len(ids),
            "max_model_len": limits.max_model_len,
            "tokens": ids,
            "token_strs": texts,
        }
        return TextResult(body.model, msgspec.json.encode(answer), warnings)

    def detokenize(self, raw: bytes | bytearray, limits: EngineLimits) -> TextResult:
        """Detokenize the tokens of a body. Raises ApiError."""
        warnings: list[str] = []
        body = decode_body(raw, DetokenizeRequest, limits.strict, warnings)
        _check_length(body.tokens, limits, "tokens")
        answer = {"prompt": self._decode(body.tokens, "tokens")}
        return TextResult(body.model, msgspec.json.encode(answer), warnings)

    def _render(
        self,
        body: ChatRequest | TokenizeRequest,
        conversation: list[Message],
        tools: list[Tool],
        variables: dict[str, Any],
        limits: EngineLimits,
        warnings: list[str],
    ) -> str:
        max_characters = (
            None
            if limits.max_model_len is None
            else limits.max_model_len * MAX_CHARACTERS_PER_TOKEN
        )
        try:
            return self._prompt.render(
                conversation, tools, variables, max_characters,
                open_turn=body.add_generation_prompt, continue_last=body.continue_final_message,
                warnings=warnings,
            )  # fmt: skip
        except ChatTooLongError as error:
            assert limits.max_model_len is not None
            raise make_too_long_error(str(error), limits.max_model_len, "messages") from None
        except TemplateError as error:
            raise make_invalid_error(str(error), "messages") from None

    def _encode_bad_words(self, body: CompletionRequest | ChatRequest) -> list[list[int]]:
        # Returns two token sequences per bad word: at the start of a text and after a space.
        found = []
        for word in body.bad_words or []:
            bare = word.lstrip()
            if not bare:
                raise make_invalid_error("bad_words has a blank word: remove it", "bad_words")
            for text in (bare, f" {bare}"):
                try:
                    ids = self._tokenizer.encode_rendered(text)
                except (TypeError, UnicodeEncodeError):
                    raise make_invalid_error(
                        "bad_words has invalid Unicode: remove lone surrogates", "bad_words"
                    ) from None
                if ids and ids not in found:
                    found.append(ids)
        return found

    def _encode(
        self, text: str, limits: EngineLimits, param: str, *, add_special_tokens: bool
    ) -> list[int]:
        limit = limits.max_model_len
        if limit is not None and len(text) > limit * MAX_CHARACTERS_PER_TOKEN:
            raise make_too_long_error(f"the prompt has {len(text)} characters", limit, param)
        encoder = self._tokenizer.encode if add_special_tokens else self._tokenizer.encode_rendered
        try:
            return encoder(text)
        except (TypeError, UnicodeEncodeError):
            raise make_invalid_error(
                f"{param} is not valid Unicode: remove lone surrogates", param
            ) from None

    def _decode(self, ids: list[int], param: str) -> str:
        largest = self._tokenizer.vocab_size - 1
        if ids and max(ids) > largest:
            raise make_invalid_error(
                f"token ID {max(ids)} is not in the vocabulary: the maximum is {largest}", param
            )
        return self._tokenizer.decode(ids)


def check_json_values(raw: bytes | bytearray, max_values: int) -> None:
    """Raise ApiError if a body may have more than ``max_values`` JSON values.

    A body of only brackets and commas takes 30 times its size in memory.
    """
    values = sum(raw.count(mark) for mark in (b",", b"[", b"{"))
    if values > max_values:
        raise ApiError(
            413,
            f"the body has {values} commas and brackets, but the maximum is {max_values}: "
            "send less in one request",
            code="body_too_complex",
        )


def _check_length(prompt_ids: list[int], limits: EngineLimits, param: str) -> None:
    # batch.compute_output_limit() also counts the requested output.
    if limits.max_model_len is not None and len(prompt_ids) > limits.max_model_len:
        raise make_too_long_error(
            f"the prompt has {len(prompt_ids)} tokens", limits.max_model_len, param
        )


def _list_prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    ids = [token for token in prompt if isinstance(token, int)]
    if len(ids) == len(prompt):
        return [ids]
    if ids:
        raise make_invalid_error(
            "prompt mixes token IDs with texts or lists: send only one kind", "prompt"
        )
    return [one for one in prompt if not isinstance(one, int)]


def make_too_long_error(
    problem: str, max_tokens: int, param: str, advice: str = "shorten the prompt"
) -> ApiError:
    """Return an error with status 400 because a request exceeds the context.

    ``advice`` says what the client can change.
    """
    return make_invalid_error(
        f"{problem}, but the context has only {max_tokens} tokens for prompt and output: {advice}",
        param,
        "context_length_exceeded",
    )


def make_too_many_error(num_choices: int, max_queued: int, param: str) -> ApiError:
    """Return an error with status 400 because the choices exceed the size of the queue."""
    return make_invalid_error(
        f"the request has {num_choices} choices, but the queue has only {max_queued} places "
        "(--max-queued): request fewer choices",
        param,
    )
