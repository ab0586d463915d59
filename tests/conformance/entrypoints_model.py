"""The checkpoint that vLLM's tests ask: the tiny model, made to end its reasoning and its texts.

    python -m tests.conformance.entrypoints_model FOLDER

The tiny model says the token of a residue that its context gives. Here it says ``</think>`` for
some residues, a quotation mark for others, and ends the text for a few: most texts end within a few
hundred tokens, and so do the strings of JSON. What a grammar forbids it does not say: there the
residue's own token comes. Tests name tokens up to number 5,000, so the vocabulary has unused ones
up to :data:`VOCABULARY`.
"""

from __future__ import annotations

import argparse
import random
from itertools import islice
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer

from plimsoll_faults.models import tiny, tiny_text

VOCABULARY = 8192
THINK = "</think>"
LOUDER = 1.02
"""How much surer the model is of such a token than of the residue's own."""
ENDS, THOUGHTS, QUOTES = 3, 5, 5
"""How many residues. Their sums sound at others, too: of 252, the end wins at 3, the tag at 22 and
the mark at 12."""
SEED = 0


def main() -> None:
    """Write the checkpoint into a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    write(parser.parse_args().out)


def write(folder: Path) -> None:
    """Write weights, configuration and tokenizer."""
    tokenizer = tiny_text.train_tokenizer()
    tokenizer.add_tokens([AddedToken(THINK, special=False, normalized=False)])
    think, end, quote = map(tokenizer.token_to_id, (THINK, tiny_text.EOS, '"'))

    def change(tensors: dict[str, torch.Tensor], _: int) -> dict[str, torch.Tensor]:
        rows = tiny_text.list_plain_text_tokens(tokenizer)
        chosen = iter(random.Random(SEED).sample(rows, ENDS + THOUGHTS + QUOTES))
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            known = tensors[name]
            tensors[name] = torch.zeros(VOCABULARY, known.shape[1])
            tensors[name][: len(known)] = known
        embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
        embedding[tiny_text.VOCABULARY_SIZE :] = embedding[rows[0]]
        for token, count in ((end, ENDS), (think, THOUGHTS), (quote, QUOTES)):
            head[token] = LOUDER * head[list(islice(chosen, count))].sum(dim=0)
        return tensors

    tiny.write_checkpoint(folder, {"vocab_size": VOCABULARY}, change)
    _write_tokenizer(tokenizer, folder)


def _write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    missing = VOCABULARY - tokenizer.get_vocab_size()
    tokenizer.add_tokens([AddedToken(f"<unused{n}>", normalized=False) for n in range(missing)])
    tokenizer.save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    main()
