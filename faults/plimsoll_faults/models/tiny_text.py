"""The tokenizer of the tiny checkpoints: byte-level BPE trained on a text, and a chat template."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY_SIZE = 512
BOS, CHAT_START, EOS = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [BOS, CHAT_START, EOS]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRAINING_TEXT = """
A ship that is loaded too deep does not float for long. The mark on the hull shows how deep she may
lie in salt water, in fresh water, in summer and in winter. When the mark goes under, the cargo has
to come out again, and the master writes down what was taken off and why. Sailors, owners and
insurers all look at the same line, and so nobody has to trust anybody's word for it.
Memory is the cargo of a server. Some of it is meant to be there: the weights, the cache of keys
and values, the buffers that move data from one place to another. Some of it was left behind by
requests that ended long ago, and nobody remembers it. The first kind has an owner who can say how
much it is and how much it may become. The second kind only grows. Watch the water line, not the
cargo: measure what is held, ask each owner what is theirs, and what is left has to be explained.
user assistant system question answer hello please write tell me about the weather in the harbour
one two three four five six seven eight nine ten red green blue north south east west morning night
"""


def train_tokenizer() -> Tokenizer:
    """Train the tokenizer. The result is the same on every call."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT.strip().splitlines(), trainer)
    return tokenizer


def list_plain_text_tokens(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that consist of ASCII letters and spaces, so that any sequence is text."""
    pieces = {i: tokenizer.decode([i], skip_special_tokens=False) for i in range(VOCABULARY_SIZE)}
    return [
        i for i, text in pieces.items()
        if len(text) > 1 and text not in SPECIAL_TOKENS
        and text.isascii() and text.strip().isalpha()
    ]  # fmt: skip


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``generation_config.json``."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": BOS,
        "add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
    }
    generation = {
        "bos_token_id": tokenizer.token_to_id(BOS),
        "eos_token_id": [tokenizer.token_to_id(EOS), tokenizer.token_to_id(BOS)],
        "pad_token_id": tokenizer.token_to_id(BOS),
        "do_sample": False,
    }
    for name, body in (
        ("tokenizer_config.json", config),
        ("generation_config.json", generation),
    ):
        (folder / name).write_text(json.dumps(body, indent=2) + "\n")


def add_tokens(folder: Path, texts: Sequence[str], special: Collection[str] = ()) -> dict[str, int]:
    """Replace the last tokens of the vocabulary by the added ``texts``. Return their IDs."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    model = content["model"]
    numbers = {}
    for text in texts:
        old = max(model["vocab"], key=model["vocab"].__getitem__)
        numbers[text] = model["vocab"].pop(old)
        model["merges"] = [merge for merge in model["merges"] if "".join(merge) != old]
    for text in sorted(numbers, key=numbers.__getitem__):
        content["added_tokens"].append(
            {"id": numbers[text], "content": text, "special": text in special}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        )
    file.write_text(json.dumps(content))
    return numbers
