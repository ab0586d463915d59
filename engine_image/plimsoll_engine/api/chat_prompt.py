"""Render conversations in a form that the chat template renders completely.

Messages and tools reach the template as the client sent them, without nulls. If the template
rejects or drops a part of them, an equivalent form is tried.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from plimsoll_engine.api import chat_images
from plimsoll_engine.api.errors import ApiError, make_invalid_error
from plimsoll_engine.api.protocol import Message, Tool, get_reasoning_text
from plimsoll_engine.api.tool_calls import NotACallError, load_lenient_json
from plimsoll_engine.frontend.requests.tokenizer import ChatTooLongError, TemplateError, Tokenizer

# The mark is at the end of the message that the model continues. The prompt ends before it.
CONTINUATION_MARK = "\ue000\uf8ff\ue000"
INSTRUCTION_ROLES = ("system", "developer")
MAX_UNRENDERED_ROLES = 8

TemplateMessage = dict[str, Any]


class ChatPrompt:
    """Renderer of a checkpoint's chat template.

    ``image`` is the placeholder text of images; None if the model does not accept images.
    """

    def __init__(self, tokenizer: Tokenizer, image: str | None) -> None:
        self._tokenizer = tokenizer
        self._image = image
        parts = [{"type": "text", "text": CONTINUATION_MARK}]
        self._accepts_parts = _can_render(tokenizer, parts)
        self._accepts_texts = not self._accepts_parts or _can_render(tokenizer, CONTINUATION_MARK)

    @staticmethod
    def make_template_variables(
        client_variables: dict[str, Any] | None, effort: str | None
    ) -> dict[str, Any]:
        """Return the client's template variables, and vLLM's variables for the reasoning effort."""
        if effort is None:
            return dict(client_variables or {})
        thinking = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        return thinking | (client_variables or {})

    def render(
        self,
        messages: list[Message],
        tools: list[Tool],
        template_variables: dict[str, Any],
        max_characters: int | None,
        *,
        open_turn: bool | None = None,
        continue_last: bool = False,
        warnings: list[str] | None = None,
    ) -> str:
        """Return the prompt, of at most ``max_characters`` characters.

        If ``open_turn`` is True, the prompt ends with the beginning of the assistant's message. If
        ``continue_last`` is True, the model continues the last message. By default, the turn is
        open unless the last message is continued. Raises TemplateError, and ApiError for invalid
        messages.
        """
        warnings = [] if warnings is None else warnings
        plain = [
            self._make_template_message(message, number) for number, message in enumerate(messages)
        ]
        if continue_last:
            _append_mark(plain[-1])
        generation_prompt = not continue_last if open_turn is None else open_turn
        functions = [_make_function(tool) for tool in tools] or None
        ignored = [name for name in template_variables if name in ("messages", "tools")]
        if template_variables.get("add_generation_prompt", generation_prompt) != generation_prompt:
            ignored.append("add_generation_prompt")
        if ignored:
            names = ", ".join(ignored)
            warnings.append(
                f"{names} in chat_template_kwargs is ignored: set it as a field of the body"
            )

        def render_form(form: list[TemplateMessage]) -> str:
            return self._tokenizer.render(
                form, functions, template_variables, max_characters, generation_prompt
            )

        text = self._render_supported(plain, render_form, bool(tools), warnings)
        if functions and not any(one["function"]["name"] in text for one in functions):
            warnings.append("the chat template does not render tools: the model does not see them")
        if not continue_last:
            return text
        before, found, _ = text.rpartition(CONTINUATION_MARK)
        if not found:
            raise TemplateError(
                "the chat template does not render the last message: omit continue_final_message"
            )
        return before

    def _render_supported(
        self,
        template_messages: list[TemplateMessage],
        render_form: Callable[[list[TemplateMessage]], str],
        has_tools: bool,
        warnings: list[str],
    ) -> str:
        developer = any(one["role"] == "developer" for one in template_messages)
        if developer and "developer" not in self._tokenizer.get_template_source(has_tools):
            for one in template_messages:
                if one["role"] == "developer":
                    one["role"] = "system"
        # The first error's message. Storing the error would create a cycle with this frame.
        failure, text, dropped = None, "", list[TemplateMessage]()
        for form in self._list_forms(template_messages):
            try:
                text = render_form(form)
            except ChatTooLongError:
                raise
            except TemplateError as error:
                failure = str(error) if failure is None else failure
                continue
            if _has_unrendered_parts(form, text):
                continue
            failure, template_messages, dropped = None, form, _find_dropped_messages(form, text)
            if not dropped:
                return text
            break
        if developer or _has_instructions(dropped):
            try:
                merged = _merge_instructions(template_messages)
                merged[0]["content"] = self._make_text(merged[0]["content"])
                first = render_form(merged)
                if not _has_instructions(rest := _find_dropped_messages(merged, first)):
                    failure, text, dropped = None, first, rest
                    warnings.append(
                        "the chat template supports only one system message at the front: all"
                        " instructions are merged into it"
                    )
            except ChatTooLongError:
                raise
            except TemplateError:
                pass
        if failure is not None:
            raise TemplateError(failure)
        if dropped:
            roles = ", ".join(sorted({one["role"] for one in dropped}))
            warnings.append(
                f"the chat template does not render all text of messages of role {roles}: the "
                "model does not see it"
            )
        return text

    def _make_template_message(self, message: Message, number: int) -> TemplateMessage:
        plain: TemplateMessage = {"role": message.role}
        try:
            content, reasoning = self._split_reasoning(message)
            if reasoning and "reasoning_content" not in message.extra:
                plain["reasoning_content"] = "\n".join(reasoning)
            if content is None and isinstance(message.extra.get("refusal"), str):
                content = message.extra["refusal"]
            if content is not None:
                plain["content"] = content
            if message.name:
                plain["name"] = message.name
            if message.tool_call_id:
                plain["tool_call_id"] = message.tool_call_id
            if message.tool_calls:
                plain["tool_calls"] = [
                    _make_plain_call(call, f"tool_calls[{place}]")
                    for place, call in enumerate(message.tool_calls)
                ]
        except ApiError as error:
            error.param = f"messages[{number}].{error.param}"
            raise
        return _restore_sent_fields(message.extra, plain)

    def _split_reasoning(
        self, message: Message
    ) -> tuple[str | list[dict[str, Any]] | None, list[str]]:
        # Returns the content in template form, and the reasoning texts.
        content = message.content
        if isinstance(content, str):
            return self._make_text(content), []
        if content is None:
            return None, []
        is_assistant = message.role == "assistant"
        reasoning = [
            text for part in content if is_assistant and (text := get_reasoning_text(part))
        ]
        rest = [part for part in content if not (is_assistant and get_reasoning_text(part))]
        if reasoning and not rest:
            return None, reasoning
        return chat_images.make_template_parts(rest, self._image is not None), reasoning

    def _make_text(self, text: str) -> str | list[dict[str, Any]]:
        return text if self._accepts_texts else [{"type": "text", "text": text}]

    def _list_forms(
        self, template_messages: list[TemplateMessage]
    ) -> Iterator[list[TemplateMessage]]:
        # The form with the fewest changes comes first.
        texts = [one | self._join_parts(one.get("content")) for one in template_messages]
        for form in (
            (template_messages, texts)
            if self._accepts_parts and texts != template_messages
            else (texts,)
        ):
            yield form
            yield self._complete_messages(form)

    def _complete_messages(self, template_messages: list[TemplateMessage]) -> list[TemplateMessage]:
        # Templates expect a content, and call arguments that are objects.
        filled = copy.deepcopy(template_messages)
        for message in filled:
            message.setdefault("content", self._make_text(""))
            for call in message.get("tool_calls", ()):
                arguments = call["function"].get("arguments")
                if not isinstance(arguments, dict):
                    call["function"]["arguments"] = {"arguments": arguments}
        return filled

    def _join_parts(self, content: Any) -> TemplateMessage:
        # An image becomes its placeholder. Returns {} if the content is no list of parts.
        if not isinstance(content, list):
            return {}
        return {"content": "\n".join(one.get("text", self._image) for one in content)}


def join_message_text(message: Message) -> str:
    """Return the text of a message without its images."""
    if isinstance(message.content, list):
        return "\n".join(str(part["text"]) for part in message.content if "text" in part)
    return message.content or ""


def _can_render(tokenizer: Tokenizer, content: object) -> bool:
    # Templates without support for a kind of content print it as JSON.
    try:
        text = tokenizer.render([{"role": "user", "content": content}])
    except TemplateError:
        return False
    return CONTINUATION_MARK in text and not _JSON_MARK_PATTERN.search(text)


_JSON_MARK_PATTERN = re.compile(rf'"text": ?"{CONTINUATION_MARK}')


def _has_unrendered_parts(template_messages: list[TemplateMessage], text: str) -> bool:
    # Templates without support for content parts print them in Python or JSON notation.
    return any(isinstance(one.get("content"), list) for one in template_messages) and any(
        sign in text for sign in ("'type': 'text'", '"type": "text"', '"type":"text"')
    )


def _restore_sent_fields(
    sent_fields: TemplateMessage, known_fields: TemplateMessage
) -> TemplateMessage:
    # Keys keep the order of ``sent_fields``, and values are those of ``known_fields``. Nulls are
    # dropped.
    return {
        name: value for name, value in (sent_fields | known_fields).items() if value is not None
    }


def _make_function(tool: Tool) -> TemplateMessage:
    # ``strict`` is omitted, because it affects only the grammar.
    given = tool.function
    known = {name: getattr(given, name) for name in ("name", "description", "parameters")}
    return _restore_sent_fields(
        tool.extra, {"type": tool.type, "function": _restore_sent_fields(given.extra, known)}
    )


def _append_mark(message: TemplateMessage) -> None:
    content = message.get("content", "")
    if isinstance(content, str):
        message["content"] = content + CONTINUATION_MARK
    elif content and "text" in content[-1]:
        message["content"] = [
            *content[:-1],
            {"type": "text", "text": content[-1]["text"] + CONTINUATION_MARK},
        ]
    else:
        message["content"] = [*content, {"type": "text", "text": CONTINUATION_MARK}]


def _merge_instructions(template_messages: list[TemplateMessage]) -> list[TemplateMessage]:
    contents = [
        "\n".join(_list_texts(one)) for one in template_messages if one["role"] in INSTRUCTION_ROLES
    ]
    rest = [one for one in template_messages if one["role"] not in INSTRUCTION_ROLES]
    return [{"role": "system", "content": "\n\n".join(contents)}, *rest]


def _find_dropped_messages(
    template_messages: list[TemplateMessage], text: str
) -> list[TemplateMessage]:
    # Returns the first such message of each role except the assistant's. Spaces and punctuation do
    # not count, because templates may trim texts, indent them, or write them as JSON.
    dropped: dict[str, TemplateMessage] = {}
    letters, at = "", 0
    for one in template_messages:
        role = one["role"]
        if role == "assistant" or role in dropped:
            continue
        for part in map(str.strip, _list_texts(one)):
            # Most templates keep the order, so one pass over the prompt suffices.
            if (found := text.find(part, at)) >= 0:
                at = found
            elif part not in text:
                letters = letters or _strip_non_word_characters(text)
                if _strip_non_word_characters(part) not in letters:
                    dropped[role] = one
                    break
        if len(dropped) == MAX_UNRENDERED_ROLES:
            break
    return list(dropped.values())


def _has_instructions(messages: list[TemplateMessage]) -> bool:
    return any(one["role"] in INSTRUCTION_ROLES for one in messages)


def _strip_non_word_characters(text: str) -> str:
    plain = re.sub(r"\\u([0-9a-f]{4})", lambda found: chr(int(found[1], 16)), text)
    return re.sub(r"\\[nrt]|[\W_]", "", plain)


def _list_texts(message: TemplateMessage) -> list[str]:
    content = message.get("content", "")
    if isinstance(content, str):
        return [content]
    return [one["text"] for one in content if "text" in one]


def _make_plain_call(call: dict[str, Any], field: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise make_invalid_error(
            "function.name of a tool call is missing: add it", f"{field}.function.name"
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):  # answers of this engine have a string; templates need an object
        try:
            loaded = load_lenient_json(arguments or "{}")
            arguments = loaded if isinstance(loaded, dict) else arguments
        except NotACallError:
            pass  # truncated arguments of an earlier answer stay text
    arguments = {} if arguments is None else arguments
    arguments = _replace_lone_surrogates(arguments, f"{field}.function.arguments")
    return call | {"function": function | {"arguments": arguments}}


def _replace_lone_surrogates(value: Any, field: str) -> Any:
    # Tokenizers reject lone surrogates.
    try:
        written = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise make_invalid_error(
            "the arguments of a tool call are nested too deeply: use fewer levels", field
        ) from None
    try:
        written.encode()
    except UnicodeEncodeError:
        return json.loads(written.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    return value
