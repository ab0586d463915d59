"""Text to tokens and chats to text, from the files of a checkpoint; no torch.

Chat templates are compiled by transformers: its filters, tags, globals and sandbox. What is added
is a bound on the output, and errors that name the template's line.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2

from plimsoll_engine.checkpoint import (
    DEFAULT_TEMPLATE,
    TOKENIZER,
    TOOLS_TEMPLATE,
    Checkpoint,
)
from plimsoll_engine.errors import UsageError
from plimsoll_engine.frontend.requests.detokenize import Detokenizer, context_of, special_ids

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""What stands for a byte in vocabularies of SentencePiece."""
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTES_OF_LETTERS = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + number): byte for number, byte in enumerate(_OTHERS)
}
"""The letters that stand for bytes in byte-level vocabularies: printable ones for themselves, the
others from U+0100 on, as GPT-2 began it."""


class TemplateError(Exception):
    """The chat cannot be written as a prompt; the message is the template's own."""


class TooLong(TemplateError):
    """The chat's prompt is longer than any that fits."""


class Tokenizer:
    """The tokenizer of the checkpoint in ``model``; UsageError names the file that is wrong.

    The others are as in :meth:`Checkpoint.read`.
    """

    def __init__(
        self, model: Path, chat_template: Path | None = None, generation_config: str = "auto"
    ) -> None:
        self.checkpoint = checkpoint = Checkpoint.read(model, chat_template, generation_config)
        self._tokenizer = checkpoint.tokenizer
        # What the parsed tokenizer takes is not told; its file's size is of the same order.
        self.file_bytes = (model / TOKENIZER).stat().st_size
        added = checkpoint.tokenizer.get_added_tokens_decoder()
        self._added = {token.content: number for number, token in added.items()}
        decoder = checkpoint.tokenizer.decoder
        self._byte_level = decoder is not None and b"ByteLevel" in decoder.__getstate__()
        self._special = special_ids(checkpoint.tokenizer)
        self.vocab_size = checkpoint.num_tokens
        self.eos_ids = checkpoint.ends
        self._middle = context_of(self._tokenizer, self.encode_rendered("a"))
        self._middle_text = self.decode(self._middle)
        self.chat_template = checkpoint.chat_templates.get(DEFAULT_TEMPLATE)
        where = chat_template or "the checkpoint"
        self._templates = {
            name: _compile(source, f"{where}: the chat template {name!r}")
            for name, source in checkpoint.chat_templates.items()
            if name in (DEFAULT_TEMPLATE, TOOLS_TEMPLATE)
        }

    def encode(self, text: str) -> list[int]:
        """Tokens of a plain prompt, with what the tokenizer adds itself (a BOS, if any)."""
        return self._encode(text, True)

    def encode_rendered(self, text: str) -> list[int]:
        """Tokens of a chat: its template already wrote every special token."""
        return self._encode(text, False)

    def _encode(self, text: str, special: bool) -> list[int]:
        # The library's encode() of a single text computes offsets, too, and takes four times as
        # long.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, special tokens included."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def continuations(
        self,
        prompt_ids: Sequence[int],
        skip_special_tokens: bool = True,
        shown: Collection[str] = (),
    ) -> Callable[[], Detokenizer]:
        """Return what makes the decoder of a text after ``prompt_ids``, one for each choice.

        Special tokens that are ``shown`` are never skipped.
        """
        skipped = frozenset[int]()
        if skip_special_tokens:
            skipped = self._special - {self._added[text] for text in shown if text in self._added}
        context = context_of(self._tokenizer, prompt_ids, skipped)
        return lambda: Detokenizer(self._tokenizer, context, skipped)

    def token_text(self, token_id: int) -> str:
        """Return what one token stands for in the middle of a text, special ones included."""
        text = self.decode([*self._middle, token_id])
        if text.startswith(self._middle_text):
            return text[len(self._middle_text) :]
        return self.decode([token_id])

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token stands for, which may be part of a character."""
        name = self._tokenizer.id_to_token(token_id)
        if name is not None and name not in self._added:
            if self._byte_level and all(letter in BYTES_OF_LETTERS for letter in name):
                return bytes(BYTES_OF_LETTERS[letter] for letter in name)
            if found := _BYTE_TOKEN.fullmatch(name):
                return bytes([int(found[1], 16)])
        return self.token_text(token_id).encode()

    def token_id(self, text: str) -> int | None:
        """Return the token that is ``text``; None where no single one is."""
        found: int | None = self._tokenizer.token_to_id(text)
        return found

    def added_token(self, text: str) -> int | None:
        """Return the added token whose text this is, which no other tokens spell."""
        return self._added.get(text)

    def token_names(self, ids: Sequence[int]) -> list[str | None]:
        """Return each token as the vocabulary writes it; None for one that it lacks.

        A byte that is part of a character has a name of its own there, and no text.
        """
        return [self._tokenizer.id_to_token(token) for token in ids]

    def template_source(self, tools: bool) -> str:
        """Return the source of the chat template for messages with or without ``tools``."""
        return self.checkpoint.chat_templates.get(self._name(tools), "")

    def _name(self, tools: bool) -> str:
        return TOOLS_TEMPLATE if tools and TOOLS_TEMPLATE in self._templates else DEFAULT_TEMPLATE

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
        max_characters: int | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the prompt of a chat, ready for the assistant's turn where that is to be added.

        It is given up once it is longer than ``max_characters``. ``variables`` are the template's
        own (``enable_thinking``).
        """
        template = self._templates.get(self._name(bool(tools)))
        if template is None:
            raise TemplateError(
                "this model has no chat template (chat_template.jinja or tokenizer_config.json): "
                "use /v1/completions"
            )
        from transformers.utils.chat_template_utils import _alias_reasoning_fields

        try:
            pieces = template.generate(
                {"documents": None, **self.checkpoint.special, **variables},
                messages=_alias_reasoning_fields(messages),
                tools=tools,
                add_generation_prompt=add_generation_prompt,
            )
            return _joined(pieces, max_characters)
        except TooLong:
            raise
        except Exception as error:  # noqa: BLE001 - a template may do anything
            why = str(error) or type(error).__name__
            if not isinstance(error, jinja2.TemplateError):
                why = f"{type(error).__name__}: {why}"
            raise TemplateError(
                f"the chat template refuses these messages{_line_of(error)}: {why}"
            ) from None


def _joined(pieces: Iterable[str], most: int | None) -> str:
    """Join the pieces of a template; raise :class:`TemplateError` beyond ``most`` characters."""
    taken: list[str] = []
    size = 0
    for piece in pieces:
        taken.append(piece)
        size += len(piece)
        if most is not None and size > most:
            raise TooLong(f"the chat makes a prompt of more than {most} characters")
    return "".join(taken)


def _compile(source: str, where: str) -> jinja2.Template:
    # Half a second of imports, which a model without a template does not need.
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        template: jinja2.Template = _compile_jinja_template(source)
    except jinja2.TemplateSyntaxError as error:
        raise UsageError(f"{where} is malformed in line {error.lineno}: {error}") from None
    except jinja2.TemplateError as error:
        raise UsageError(f"{where} is malformed: {error}") from None
    return template


def _line_of(error: Exception) -> str:
    """Return where in the template ``error`` was raised, for a message; empty where none knows."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename in ("<template>", "<unknown>")]
    return f" in line {lines[-1]}" if lines else ""
