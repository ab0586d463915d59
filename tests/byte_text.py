"""Tokenizers whose tokens are bytes and characters, as the engine's own library runs them."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from plimsoll_engine.frontend.requests.detokenize import Detokenizer

FIRST_BYTE = 3
"""The number of ``<0x00>`` in :func:`llama_2`, as in Llama 2's own vocabulary."""


def byte_level() -> Tokenizer:
    """Return a byte-level tokenizer (GPT-2, Llama 3, Qwen): token b is byte b."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    vocabulary = {chr(b if b in printable else next(others)): b for b in range(256)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def llama_2(words: Iterable[str] = (), *, strip: bool = True) -> Tokenizer:
    """Return a tokenizer with the decoder of Llama 2: a character without a word is its bytes.

    ``words`` are more tokens than the letters; ``▁`` stands for a space. Without ``strip`` the
    decoder is what transformers makes of Mistral's sentencepiece model.
    """
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁"]
    texts += [chr(c) for c in range(0x21, 0x7F)] + list(words)
    vocabulary = {text: number for number, text in enumerate(texts)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(chain + [decoders.Strip(" ", 1, 0)] * strip)
    made.add_special_tokens([AddedToken(text, special=True) for text in texts[:3]])
    return made


def bytes_text() -> Detokenizer:
    """Return the decoder of a text of :func:`byte_level` tokens."""
    return Detokenizer(byte_level())
