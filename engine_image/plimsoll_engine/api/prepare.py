"""From the bytes of a body to what the engine runs: decoded, templated, tokenized. Pure.

All that a client can make large happens here, so that it can happen in a process of its own
(:mod:`plimsoll_engine.api.preparer`): a decoder and a template hold the interpreter's lock, and
with it every stream.
"""

from __future__ import annotations

import json
from typing import Any, Generic, TypeVar

import msgspec

from plimsoll_engine.api import chat_images, output_grammar, reasoning, responses_request
from plimsoll_engine.api.errors import ApiError, invalid
from plimsoll_engine.api.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Message,
    TokenizeRequest,
    decode,
    text_content,
)
from plimsoll_engine.api.responses_request import ResponsesRequest
from plimsoll_engine.frontend.requests.tokenizer import TemplateError, Tokenizer, TooLong
from plimsoll_engine.messages.worker_ipc import Grammar

CHARACTERS_PER_TOKEN = 64
"""No token of a real vocabulary stands for more characters on average; a text beyond this many for
each token of the context is too long without tokenizing it."""

_Body = TypeVar("_Body", CompletionRequest, ChatRequest)


class Context(msgspec.Struct, frozen=True):
    """What the engine says of itself.

    The limit of prompt and output tokens (None before the first worker), how many requests it holds
    at once, how many JSON values it reads.
    """

    max_model_len: int | None
    max_queued: int
    max_values: int


class PreparedBody(msgspec.Struct, Generic[_Body]):
    """``body`` is without what the other fields were made of. ``images`` are files.

    ``echoes`` are the texts of the prompts where the answer is to begin with them. ``told`` is the
    JSON object of the fields that a response repeats.
    """

    body: _Body
    prompts: list[list[int]]
    grammar: Grammar | None = None
    images: list[bytes] = []
    echoes: list[str] = []
    calls: bool = False
    """The text may hold tool calls."""
    reasons: bool = False
    """The text may begin with reasoning."""
    told: bytes = b""


class Text(msgspec.Struct):
    """The answer of /tokenize or /detokenize as JSON; ``model`` is the one that was named."""

    model: str | None
    answer: bytes


class Preparation:
    """Prepares requests for one checkpoint; ``sees`` means that its template takes images."""

    def __init__(self, tokenizer: Tokenizer, sees: bool) -> None:
        self._tokenizer = tokenizer
        self._sees = sees

    def completion(self, raw: bytes | bytearray, of: Context) -> PreparedBody[CompletionRequest]:
        """Return the batch of a completion's body; raise ApiError where the body is wrong."""
        body = decode(raw, CompletionRequest)
        prompts = _prompts(body.prompt)
        choices = len(prompts) * (body.n or 1)
        if choices > of.max_queued:
            raise too_many(choices, of.max_queued, "prompt")
        ids, echoes = [], []
        for prompt in prompts:
            if not prompt:
                raise invalid("prompt is empty: give text or token ids", "prompt", "empty_prompt")
            one = (
                self._encode(prompt, of, "prompt", special=True)
                if isinstance(prompt, str)
                else prompt
            )
            _fits(one, of, "prompt")
            ids.append(one)
            if body.echo:
                echoes.append(prompt if isinstance(prompt, str) else self._text(one, "prompt"))
        must_match = output_grammar.of(body)
        light = msgspec.structs.replace(
            body, prompt="", response_format=None, structured_outputs=None, metadata=None
        )
        return PreparedBody(light, ids, must_match, echoes=echoes)

    def chat(self, raw: bytes | bytearray, of: Context) -> PreparedBody[ChatRequest]:
        """Return the batch of a chat's body; raise ApiError where the body is wrong."""
        return self._prepared(decode(raw, ChatRequest), of)

    def responses(self, raw: bytes | bytearray, of: Context) -> PreparedBody[ChatRequest]:
        """Return the batch of a body of ``/v1/responses``; raise ApiError where it is wrong."""
        body = decode(raw, ResponsesRequest)
        try:
            prepared = self._prepared(responses_request.chat_of(body), of)
        except ApiError as error:
            error.param = responses_request.FIELDS.get(error.param or "", error.param)
            raise
        prepared.told = msgspec.json.encode(responses_request.echoed(body))
        return prepared

    def _prepared(self, body: ChatRequest, of: Context) -> PreparedBody[ChatRequest]:
        if (body.n or 1) > of.max_queued:
            raise too_many(body.n or 1, of.max_queued, "n")
        text = self._rendered(body, of)
        ids = self._chat_ids(text, of)
        files = chat_images.files(chat_images.urls(body.messages)) if self._sees else []
        calls = bool(body.tools) and body.tool_choice != "none"
        must_match = output_grammar.of(body)
        # A grammar holds from the first token on, so it leaves no room for reasoning.
        thinking = (body.chat_template_kwargs or {}).get("enable_thinking") is not False
        reasons = must_match is None and thinking and not reasoning.closed(text)
        light = msgspec.structs.replace(
            body, messages=[Message(role="user")], tools=None, tool_choice=None,
            chat_template_kwargs=None, response_format=None, structured_outputs=None, metadata=None,
        )  # fmt: skip
        return PreparedBody(light, [ids], must_match, files, calls=calls, reasons=reasons)

    def tokenize(self, raw: bytes | bytearray, of: Context) -> Text:
        """Return the tokens that a body asks for; raise ApiError where the body is wrong."""
        body = decode(raw, TokenizeRequest)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("give either a prompt or messages", "prompt")
        if body.prompt is None:
            ids = self._chat_ids(self._rendered(body, of), of)
        else:
            ids = self._encode(body.prompt, of, "prompt", special=body.add_special_tokens)
        texts = self._tokenizer.token_texts(ids) if body.return_token_strs else None
        answer = {
            "count": len(ids),
            "max_model_len": of.max_model_len,
            "tokens": ids,
            "token_strs": texts,
        }
        return Text(body.model, msgspec.json.encode(answer))

    def detokenize(self, raw: bytes | bytearray, of: Context) -> Text:
        """Return the text that a body asks for; raise ApiError where the body is wrong."""
        body = decode(raw, DetokenizeRequest)
        _fits(body.tokens, of, "tokens")
        answer = {"prompt": self._text(body.tokens, "tokens")}
        return Text(body.model, msgspec.json.encode(answer))

    def _chat_ids(self, text: str, of: Context) -> list[int]:
        """Return the tokens of a chat that the template has written."""
        ids = self._encode(text, of, "messages", special=False)
        _fits(ids, of, "messages")
        return ids

    def _rendered(self, body: ChatRequest | TokenizeRequest, of: Context) -> str:
        """Return a chat as the template writes it, ready for the assistant's turn."""
        tools = body.tools or []
        if isinstance(body, ChatRequest) and body.tool_choice == "none":
            tools = []
        most = None if of.max_model_len is None else of.max_model_len * CHARACTERS_PER_TOKEN
        try:
            return self._tokenizer.render(
                [self._plain(message) for message in body.messages or []],
                [msgspec.to_builtins(tool) for tool in tools] or None,
                body.chat_template_kwargs or {},
                most,
            )
        except TooLong as error:
            assert of.max_model_len is not None
            raise too_long(str(error), of.max_model_len, "messages") from None
        except TemplateError as error:
            raise invalid(str(error), "messages") from None

    def _encode(self, text: str, of: Context, param: str, *, special: bool) -> list[int]:
        limit = of.max_model_len
        if limit is not None and len(text) > limit * CHARACTERS_PER_TOKEN:
            raise too_long(f"a prompt of {len(text)} characters", limit, param)
        encoder = self._tokenizer.encode if special else self._tokenizer.encode_rendered
        try:
            return encoder(text)
        except (TypeError, UnicodeEncodeError):
            raise invalid(f"{param} is not valid Unicode text", param) from None

    def _text(self, ids: list[int], param: str) -> str:
        largest = self._tokenizer.vocab_size - 1
        if ids and max(ids) > largest:
            raise invalid(f"token {max(ids)} does not exist; the largest is {largest}", param)
        return self._tokenizer.decode(ids)

    def _plain(self, message: Message) -> dict[str, Any]:
        """Return a message as chat templates read it: those of models that see want parts."""
        content = chat_images.parts(message) if self._sees else text_content(message)
        plain: dict[str, Any] = {"role": message.role, "content": content}
        if message.name:
            plain["name"] = message.name
        if message.tool_call_id:
            plain["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            plain["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
        return plain


def check_values(raw: bytes | bytearray, most: int) -> None:
    """Raise ApiError for a body of too many JSON values.

    A value costs some 60 bytes of memory, whatever it is: a body of nothing but brackets and commas
    takes thirty times its size.
    """
    values = sum(raw.count(mark) for mark in (b",", b"[", b"{"))
    if values > most:
        raise ApiError(
            413,
            f"the body has {values} commas and brackets: this engine reads {most}",
            code="body_too_complex",
        )


def _fits(ids: list[int], of: Context, param: str) -> None:
    """Raise ApiError for a prompt as long as the context: it has no room for output.

    api/batch.py looks at the rest.
    """
    if of.max_model_len is not None and len(ids) > of.max_model_len:
        raise too_long(f"a prompt of {len(ids)} tokens", of.max_model_len, param)


def _prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    ids = [token for token in prompt if isinstance(token, int)]
    if len(ids) == len(prompt):
        return [ids]
    if ids:
        raise invalid("prompt mixes token ids with prompts", "prompt")
    return [one for one in prompt if not isinstance(one, int)]


def _plain_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid("a tool call has no function with a name", "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):  # as our answers have it; templates write objects
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise invalid("the arguments of a tool call are not JSON", "messages") from None
    return call | {"function": function | {"arguments": arguments or {}}}


def too_long(what: str, limit: int, param: str) -> ApiError:
    """Status 400 for ``what``, which has more than ``limit`` tokens."""
    return invalid(
        f"{what} do not fit: this engine's context is {limit} tokens, prompt and output together",
        param,
        "context_length_exceeded",
    )


def too_many(count: int, most: int, param: str) -> ApiError:
    """Status 400 for ``count`` choices, of which at most ``most`` may run."""
    return invalid(
        f"{count} choices in one request are more than this engine holds at once "
        f"({most}, --max-queued): send fewer",
        param,
    )
