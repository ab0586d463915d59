"""From the bytes of a body to what the engine runs: decoded, templated, tokenized. Pure.

All that a client can make large happens here, so that it can happen in a process of its own
(:mod:`plimsoll_engine.api.preparer`): a decoder and a template hold the interpreter's lock, and
with it every stream.
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
from plimsoll_engine.api.chat_prompt import ChatPrompt, text_of
from plimsoll_engine.api.decoding import check_turn, decode
from plimsoll_engine.api.errors import ApiError, invalid
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
from plimsoll_engine.frontend.requests.tokenizer import TemplateError, Tokenizer, TooLong
from plimsoll_engine.messages.worker_ipc import Grammar

CHARACTERS_PER_TOKEN = 64
"""No token of a real vocabulary stands for more characters on average; a text beyond this many for
each token of the context is too long without tokenizing it."""

_Body = TypeVar("_Body", CompletionRequest, ChatRequest)


class Context(msgspec.Struct, frozen=True):
    """What the engine says of itself.

    The limit of prompt and output tokens (None before the first worker), how many requests it holds
    at once, how many JSON values it reads, and the family whose tool calls it parses (None: that of
    the chat template).
    """

    max_model_len: int | None
    max_queued: int
    max_values: int
    tool_call_parser: str | None = None
    strict: bool = False
    """Whether unknown fields are refused."""
    skip_hosted_tools: bool = False
    """Whether tools that only OpenAI runs are left out."""


class PreparedBody(msgspec.Struct, Generic[_Body]):
    """``body`` is without what the other fields were made of. ``images`` are files.

    ``echoes`` are the texts that the answers are to begin with, one for each prompt where that is
    wanted. ``reasons`` are the numbers of the prompts whose answers may begin with reasoning.
    ``bad_words`` are those of the body as tokens. ``told`` is the JSON object of the fields that a
    response repeats.
    """

    body: _Body
    prompts: list[list[int]]
    grammar: Grammar | None = None
    images: list[bytes] = []
    echoes: list[str] = []
    family: str = ""
    """That whose tool calls the text may hold, of tool_families; empty for none."""
    texts: dict[str, list[str]] = {}
    """By tool, those of its arguments that are texts by its schema."""
    forced: list[str] = []
    """The tools of which one must be called."""
    reasons: list[int] = []
    bad_words: list[list[int]] = []
    told: bytes = b""
    warnings: list[str] = []
    """What the client should know of its request, in a header of the answer."""


class Text(msgspec.Struct):
    """The answer of /tokenize or /detokenize as JSON; ``model`` is the one that was named."""

    model: str | None
    answer: bytes
    warnings: list[str] = []


class Preparation:
    """Prepares requests for one checkpoint.

    ``image`` is the token that stands for an image, where the model sees.
    """

    def __init__(self, tokenizer: Tokenizer, image: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._prompt = ChatPrompt(tokenizer, image)
        self._sees = image is not None
        template = tokenizer.template_source(tools=True)
        self._family = tool_families.of_template(template)
        self._writes_tools = "tools" in template

    def completion(self, raw: bytes | bytearray, of: Context) -> PreparedBody[CompletionRequest]:
        """Return the batch of a completion's body; raise ApiError where the body is wrong."""
        warnings: list[str] = []
        body = decode(raw, CompletionRequest, of.strict, warnings)
        prompts = _prompts(body.prompt)
        choices = len(prompts) * (body.n or 1)
        if choices > of.max_queued:
            raise too_many(choices, of.max_queued, "prompt")
        special = body.add_special_tokens is not False
        ids, echoes = [], []
        for prompt in prompts:
            if not prompt:
                raise invalid("prompt is empty: give text or token ids", "prompt", "empty_prompt")
            one = (
                self._encode(prompt, of, "prompt", special=special)
                if isinstance(prompt, str)
                else prompt
            )
            cut = truncation.truncate(one, body, of.max_model_len)
            _fits(cut, of, "prompt")
            ids.append(cut)
            if body.echo:
                whole = isinstance(prompt, str) and len(cut) == len(one)
                echoes.append(str(prompt) if whole else self._text(cut, "prompt"))
        light = msgspec.structs.replace(
            body, prompt="", response_format=None, structured_outputs=None, metadata=None,
            bad_words=None,
        )  # fmt: skip
        return PreparedBody(
            light,
            ids,
            output_grammar.of(body, self._tokenizer, ""),
            echoes=echoes,
            bad_words=self._bad_words(body),
            warnings=warnings,
        )

    def chat(self, raw: bytes | bytearray, of: Context) -> PreparedBody[ChatRequest]:
        """Return the batch of a chat's body; raise ApiError where the body is wrong."""
        warnings: list[str] = []
        body = decode(raw, ChatRequest, of.strict, warnings)
        return self._prepared(body, [body.messages], "messages", of, warnings)

    def chats(self, raw: bytes | bytearray, of: Context) -> PreparedBody[ChatRequest]:
        """Return the batch of a body with several conversations; ApiError where it is wrong."""
        warnings: list[str] = []
        batch = decode(raw, BatchChatRequest, of.strict, warnings)
        if len(batch.messages) > of.max_queued:
            raise too_many(len(batch.messages), of.max_queued, "messages")
        fields = {name: getattr(batch, name) for name in batch.__struct_fields__}
        body = ChatRequest(**fields | {"messages": batch.messages[0]})
        return self._prepared(body, batch.messages, "messages", of, warnings)

    def responses(self, raw: bytes | bytearray, of: Context) -> PreparedBody[ChatRequest]:
        """Return the batch of a body of ``/v1/responses``; raise ApiError where it is wrong."""
        warnings: list[str] = []
        body = decode(raw, ResponsesRequest, of.strict, warnings)
        responses_request.leave_out_hosted(body, of.skip_hosted_tools, warnings)
        try:
            chat = responses_request.chat_of(body)
            prepared = self._prepared(chat, [chat.messages], "messages", of, warnings)
        except ApiError as error:
            param = (error.param or "").partition("[")[0]
            error.param = responses_request.FIELDS.get(param, error.param)
            raise
        prepared.told = msgspec.json.encode(
            responses_request.echoed(body, self._tokenizer.checkpoint.defaults)
        )
        return prepared

    def _prepared(
        self,
        body: ChatRequest,
        conversations: list[list[Message]],
        param: str,
        of: Context,
        warnings: list[str],
    ) -> PreparedBody[ChatRequest]:
        if (body.n or 1) > of.max_queued:
            raise too_many(body.n or 1, of.max_queued, "n")
        family = of.tool_call_parser or self._family or tool_families.DEFAULT
        must_match = output_grammar.of(body, self._tokenizer, family)
        prompts, echoes, reasons = [], [], []
        variables = self._prompt.variables(body.chat_template_kwargs, body.reasoning_effort)
        if body.documents is not None:
            variables["documents"] = body.documents
        tools = [] if body.tool_choice == "none" else body.tools or []
        if tools and self._writes_tools and not (of.tool_call_parser or self._family):
            warnings.append(
                "the chat template's form of tool calls is not known: they are read as those of"
                f" {family}, and others stay text (--tool-call-parser)"
            )
        # A grammar holds from the first token on, so it leaves no room for reasoning.
        thinking = must_match is None and variables.get("enable_thinking") is not False
        for number, conversation in enumerate(conversations):
            text = self._rendered(body, conversation, tools, variables, of, warnings)
            ids = self._encode(text, of, param, special=bool(body.add_special_tokens))
            ids = truncation.truncate(ids, body, of.max_model_len)
            _fits(ids, of, param)
            prompts.append(ids)
            last = text_of(conversation[-1])
            if body.echo:
                echoes.append(last)
            continued = body.continue_final_message and reasoning.CLOSE in last
            if thinking and not reasoning.closed(text) and not continued:
                reasons.append(number)
        urls = [url for one in conversations for url in chat_images.urls(one)] if self._sees else []
        if urls and len(conversations) > 1:
            raise invalid("images are for single chats: send each in a request of its own", param)
        if urls and body.truncate_prompt_tokens is not None:
            raise invalid("a prompt with images cannot be cut", "truncate_prompt_tokens")
        light = msgspec.structs.replace(
            body, messages=[Message(role="user")], tools=None, tool_choice=None,
            chat_template_kwargs=None, response_format=None, structured_outputs=None, metadata=None,
            bad_words=None, documents=None,
        )  # fmt: skip
        return PreparedBody(
            light, prompts, must_match, chat_images.files(urls) if urls else [], echoes,
            family=family if tools or family == "openai" else "", texts=_texts(tools),
            forced=[one.function.name for one in output_grammar.forced(body)],
            reasons=reasons, bad_words=self._bad_words(body), warnings=warnings,
        )  # fmt: skip

    def tokenize(self, raw: bytes | bytearray, of: Context) -> Text:
        """Return the tokens that a body asks for; raise ApiError where the body is wrong."""
        warnings: list[str] = []
        body = decode(raw, TokenizeRequest, of.strict, warnings)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("give either a prompt or messages", "prompt")
        if body.messages is not None:
            check_turn(body.add_generation_prompt, body.continue_final_message)
            variables = self._prompt.variables(body.chat_template_kwargs, None)
            text = self._rendered(body, body.messages, body.tools or [], variables, of, warnings)
            ids = self._encode(text, of, "messages", special=bool(body.add_special_tokens))
            _fits(ids, of, "messages")
        else:
            special = body.add_special_tokens is not False
            ids = self._encode(body.prompt or "", of, "prompt", special=special)
        texts = self._tokenizer.token_names(ids) if body.return_token_strs else None
        answer = {
            "count": len(ids),
            "max_model_len": of.max_model_len,
            "tokens": ids,
            "token_strs": texts,
        }
        return Text(body.model, msgspec.json.encode(answer), warnings)

    def detokenize(self, raw: bytes | bytearray, of: Context) -> Text:
        """Return the text that a body asks for; raise ApiError where the body is wrong."""
        warnings: list[str] = []
        body = decode(raw, DetokenizeRequest, of.strict, warnings)
        _fits(body.tokens, of, "tokens")
        answer = {"prompt": self._text(body.tokens, "tokens")}
        return Text(body.model, msgspec.json.encode(answer), warnings)

    def _rendered(
        self,
        body: ChatRequest | TokenizeRequest,
        conversation: list[Message],
        tools: list[Tool],
        variables: dict[str, Any],
        of: Context,
        warnings: list[str],
    ) -> str:
        """Return a chat as the template writes it, with the assistant's turn as ``body`` wants."""
        most = None if of.max_model_len is None else of.max_model_len * CHARACTERS_PER_TOKEN
        try:
            return self._prompt.render(
                conversation, tools, variables, most,
                begin=body.add_generation_prompt, resume=body.continue_final_message,
                warnings=warnings,
            )  # fmt: skip
        except TooLong as error:
            assert of.max_model_len is not None
            raise too_long(str(error), of.max_model_len, "messages") from None
        except TemplateError as error:
            raise invalid(str(error), "messages") from None

    def _bad_words(self, body: CompletionRequest | ChatRequest) -> list[list[int]]:
        """Return each word's tokens at the beginning of a text, and after a space."""
        found = []
        for word in body.bad_words or []:
            bare = word.lstrip()
            if not bare:
                raise invalid("a bad word is blank", "bad_words")
            for text in (bare, f" {bare}"):
                try:
                    ids = self._tokenizer.encode_rendered(text)
                except (TypeError, UnicodeEncodeError):
                    raise invalid("bad_words are not valid Unicode text", "bad_words") from None
                if ids and ids not in found:
                    found.append(ids)
        return found

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
        """Return what ``ids`` stand for, special tokens included."""
        largest = self._tokenizer.vocab_size - 1
        if ids and max(ids) > largest:
            raise invalid(
                f"token id {max(ids)} is not in the vocabulary; the maximum is {largest}", param
            )
        return self._tokenizer.decode(ids)


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


def _texts(tools: list[Tool]) -> dict[str, list[str]]:
    """By tool, those of its arguments that are texts by its schema."""
    found = {}
    for tool in tools:
        properties = (tool.function.parameters or {}).get("properties")
        listed = properties.items() if isinstance(properties, dict) else ()
        found[tool.function.name] = [
            key for key, schema in listed
            if isinstance(schema, dict) and schema.get("type") == "string"
        ]  # fmt: skip
    return found


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
