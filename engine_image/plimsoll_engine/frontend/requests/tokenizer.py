"""Tokenize text and render chats, with the files of a checkpoint and without torch."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2

from plimsoll_engine.checkpoint import (
    DEFAULT_TEMPLATE_NAME,
    TOKENIZER_FILE,
    TOOLS_TEMPLATE_NAME,
    Checkpoint,
)
from plimsoll_engine.errors import UsageError
from plimsoll_engine.frontend.requests.detokenize import (
    Detokenizer,
    find_prompt_context,
    find_special_ids,
)

# Name of a token that represents one byte in SentencePiece vocabularies.
_BYTE_TOKEN_PATTERN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PRINTABLE_BYTES = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_UNPRINTABLE_BYTES = [byte for byte in range(256) if byte not in _PRINTABLE_BYTES]
# Bytes of a byte-level vocabulary's letters, as in GPT-2. Printable characters represent
# themselves, letters from U+0100 on the other bytes.
BYTE_BY_VOCABULARY_LETTER = {chr(byte): byte for byte in _PRINTABLE_BYTES} | {
    chr(256 + number): byte for number, byte in enumerate(_UNPRINTABLE_BYTES)
}


class TemplateError(Exception):
    """The chat template rejected the chat."""


class ChatTooLongError(TemplateError):
    """The rendered chat exceeds the maximum length."""


class Tokenizer:
    """Tokenizer and chat templates of the checkpoint in ``model``.

    The parameters are those of :meth:`Checkpoint.read`.
    """

    def __init__(
        self, model: Path, chat_template: Path | None = None, generation_config: str = "auto"
    ) -> None:
        self.checkpoint = checkpoint = Checkpoint.read(model, chat_template, generation_config)
        self._tokenizer = checkpoint.tokenizer
        # The library does not report the parsed size; the file's size is of the same order.
        self.file_bytes = (model / TOKENIZER_FILE).stat().st_size
        added = checkpoint.tokenizer.get_added_tokens_decoder()
        self._added = {token.content: number for number, token in added.items()}
        decoder = checkpoint.tokenizer.decoder
        self._byte_level = decoder is not None and b"ByteLevel" in decoder.__getstate__()
        self._special = find_special_ids(checkpoint.tokenizer)
        self.vocab_size = checkpoint.num_tokens
        self.eos_ids = checkpoint.stop_token_ids
        self._middle = find_prompt_context(self._tokenizer, self.encode_rendered("a"))
        self._middle_text = self.decode(self._middle)
        self.chat_template = checkpoint.chat_templates.get(DEFAULT_TEMPLATE_NAME)
        where = chat_template or "the checkpoint"
        self._templates = {
            name: _compile_template(source, f"{where}: the chat template {name!r}")
            for name, source in checkpoint.chat_templates.items()
            if name in (DEFAULT_TEMPLATE_NAME, TOOLS_TEMPLATE_NAME)
        }

    def encode(self, text: str) -> list[int]:
        """Return the token IDs of a plain prompt, including special tokens such as BOS."""
        return self._encode(text, True)

    def encode_rendered(self, text: str) -> list[int]:
        """Return the token IDs of a rendered chat, which contains its special tokens."""
        return self._encode(text, False)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # The library's encode() of a single text also computes offsets, which takes four times
        # as long.
        (encoding,) = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids``, including special tokens."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    def create_detokenizer_factory(
        self,
        prompt_ids: Sequence[int],
        skip_special_tokens: bool = True,
        shown_tokens: Collection[str] = (),
    ) -> Callable[[], Detokenizer]:
        """Return a function that creates a detokenizer for each choice of a prompt.

        Special tokens in ``shown_tokens`` are never skipped.
        """
        skipped = frozenset[int]()
        if skip_special_tokens:
            skipped = self._special - {
                self._added[text] for text in shown_tokens if text in self._added
            }
        context = find_prompt_context(self._tokenizer, prompt_ids, skipped)
        return lambda: Detokenizer(self._tokenizer, context, skipped)

    def decode_token(self, token_id: int) -> str:
        """Return the text of a token within a longer text. Special tokens have text too."""
        text = self.decode([*self._middle, token_id])
        if text.startswith(self._middle_text):
            return text[len(self._middle_text) :]
        return self.decode([token_id])

    def decode_token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, which may be only a part of a character."""
        name = self._tokenizer.id_to_token(token_id)
        if name is not None and name not in self._added:
            if self._byte_level and all(letter in BYTE_BY_VOCABULARY_LETTER for letter in name):
                return bytes(BYTE_BY_VOCABULARY_LETTER[letter] for letter in name)
            if match := _BYTE_TOKEN_PATTERN.fullmatch(name):
                return bytes([int(match[1], 16)])
        return self.decode_token(token_id).encode()

    def get_token_id(self, text: str) -> int | None:
        """Return the ID of the token ``text``; None if ``text`` is not a single token."""
        token_id: int | None = self._tokenizer.token_to_id(text)
        return token_id

    def find_added_token(self, text: str) -> int | None:
        """Return the ID of the added token ``text``; None if the tokenizer has no such token."""
        return self._added.get(text)

    def get_token_names(self, token_ids: Sequence[int]) -> list[str | None]:
        """Return the name of each token in the vocabulary; None for an unknown ID."""
        return [self._tokenizer.id_to_token(token) for token in token_ids]

    def get_template_source(self, has_tools: bool) -> str:
        """Return the source of the chat template for chats with or without tools."""
        return self.checkpoint.chat_templates.get(self._choose_template(has_tools), "")

    def _choose_template(self, has_tools: bool) -> str:
        return (
            TOOLS_TEMPLATE_NAME
            if has_tools and TOOLS_TEMPLATE_NAME in self._templates
            else DEFAULT_TEMPLATE_NAME
        )

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
        max_characters: int | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the rendered prompt of a chat.

        ``variables`` are passed to the template. Raises TemplateError, or ChatTooLongError if the
        prompt has more than ``max_characters``.
        """
        template = self._templates.get(self._choose_template(bool(tools)))
        if template is None:
            raise TemplateError(
                "this model has no chat template (chat_template.jinja or tokenizer_config.json): "
                "use /v1/completions"
            )
        from transformers.utils.chat_template_utils import _alias_reasoning_fields

        try:
            pieces = template.generate(
                {"documents": None, **self.checkpoint.special_tokens, **variables},
                messages=_alias_reasoning_fields(messages),
                tools=tools,
                add_generation_prompt=add_generation_prompt,
            )
            return _join_pieces(pieces, max_characters)
        except ChatTooLongError:
            raise
        except Exception as error:  # noqa: BLE001 - a template may raise anything
            why = str(error) or type(error).__name__
            if not isinstance(error, jinja2.TemplateError):
                why = f"{type(error).__name__}: {why}"
            where = _format_error_line(error)
            # jinja2 creates a frame that references the error. This cycle would keep all frames of
            # the request in memory.
            error.__traceback__ = None
            raise TemplateError(f"the chat template rejects these messages{where}: {why}") from None


def _join_pieces(pieces: Iterable[str], max_characters: int | None) -> str:
    taken: list[str] = []
    size = 0
    for piece in pieces:
        taken.append(piece)
        size += len(piece)
        if max_characters is not None and size > max_characters:
            raise ChatTooLongError(f"the chat's prompt has more than {max_characters} characters")
    return "".join(taken)


def _compile_template(source: str, source_name: str) -> jinja2.Template:
    # A model without a template does not need this import, which takes half a second.
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        template: jinja2.Template = _compile_jinja_template(source)
    except jinja2.TemplateSyntaxError as error:
        raise UsageError(f"{source_name} is malformed in line {error.lineno}: {error}") from None
    except jinja2.TemplateError as error:
        raise UsageError(f"{source_name} is malformed: {error}") from None
    return template


def _format_error_line(error: Exception) -> str:
    # Returns the line of the template that raised the error; empty if unknown.
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename in ("<template>", "<unknown>")]
    return f" in line {lines[-1]}" if lines else ""
