"""What speculative decoding gains, on a text that repeats and on one that does not.

    python -m bench.speculation --shape 14m --device cpu --name speculation-cpu
    python -m bench.speculation --shape 8b --name speculation-h200

Random weights, so a bias on a few tokens makes the text: one token again and again (``loop``), two
in random turn (``mixed``), or all tokens at temperature 1 (``none``), where nothing ever repeats.
Each text is made without drafts, with prompt lookup (``ngram``) and with a draft model of two small
layers (``draft``), which knows the bias and otherwise nothing of the large model. The texts must be
the same. A set is: all requests submitted at once until the last has finished; figures are medians.
``gain`` is the rate with drafts over the rate without.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from typing import Any

import torch
from transformers import Qwen3Config

from bench.result import arguments_of, publish
from bench.shapes import SHAPES, random_decoder
from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.execute.forward import Forward
from plimsoll_engine.core.execute.runner import Runner
from plimsoll_engine.core.schedule.scheduler import Scheduler
from plimsoll_engine.core.speculation import drafting
from plimsoll_engine.core.speculation.draft_model import DraftModel
from plimsoll_engine.core.warmup import warm_up
from plimsoll_engine.kvcache.block_pool import BlockPool
from plimsoll_engine.messages.speculative import Speculative
from plimsoll_engine.messages.worker_ipc import Sampling, Submit
from plimsoll_engine.models.decoder import Decoder

BLOCK, LENGTH, BUDGET = 16, 2048, 1024
VOCABULARY = 10_000
PROMPT = 64
STRONG = 1000.0
"""Added to a logit: nothing else is drawn any more."""
TEXTS: dict[str, dict[str, Any]] = {
    "loop": {"logit_bias": {17: STRONG}},
    "mixed": {"logit_bias": {17: STRONG, 18: STRONG - 1.0}},
    "none": {},
}
METHODS = ("plain", "ngram", "draft")
CONFIG = Speculative("ngram", 4, prompt_lookup_max=4, prompt_lookup_min=2)


def small() -> Any:
    """14 million weights, for a CPU."""
    return Qwen3Config(
        hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=3, head_dim=64, vocab_size=VOCABULARY, max_position_embeddings=8192,
        rms_norm_eps=1e-6, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    )  # fmt: skip


def made(model: Decoder, seqs: int, method: str) -> EngineCore:
    """A warm engine with a pool for ``seqs`` requests."""
    blocks = seqs * LENGTH // BLOCK
    pool = BlockPool(blocks, BLOCK)
    draft = None
    if method == "draft":
        small = SHAPES["tiny"]()
        small.vocab_size = model.spec.vocabulary
        guesser = random_decoder(small, model.dtype, model.device, 1)
        forward = Forward(guesser, blocks, BLOCK)
        draft = DraftModel(forward, pool, BUDGET, small.vocab_size, small.vocab_size)
    runner = Runner(model, blocks, BLOCK)
    guesses = drafting.create_speculation(CONFIG, seqs, draft) if method != "plain" else None
    engine = EngineCore(runner, Scheduler(pool, seqs, BUDGET, LENGTH), speculation=guesses)
    warm_up(engine)
    runner.capture_graphs(engine.max_decode_rows, LENGTH // BLOCK)
    if draft is not None:
        draft.forward.capture_graphs(engine.max_decode_rows, LENGTH // BLOCK)
    while engine.capture_next_graph():
        pass
    return engine


def run(engine: EngineCore, submits: list[Submit]) -> tuple[float, dict[str, list[int]]]:
    """Seconds of a set, and its texts."""
    engine.pool.reset_prefix_cache()
    texts: dict[str, list[int]] = {submit.request_id: [] for submit in submits}
    if engine.runner.device.type == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    for submit in submits:
        if (refused := engine.submit(submit)) is not None:
            raise SystemExit(f"request refused: {refused}")
    while engine.has_work:
        for token in engine.step().tokens:
            texts[token.request_id].append(token.token_id)
    return time.perf_counter() - begun, texts


def requests(count: int, tokens: int, text: str, seed: int) -> list[Submit]:
    """Random prompts; the sampling makes the text."""
    rng = random.Random(seed)
    return [
        Submit(
            str(number),
            [rng.randrange(VOCABULARY) for _ in range(PROMPT)],
            Sampling(tokens, temperature=1.0, seed=number, ignore_eos=True, **TEXTS[text]),
        )
        for number in range(count)
    ]


def main() -> None:
    """Measure, print and publish."""
    parser = arguments_of(__doc__, "speculation-cpu")
    parser.add_argument("--shape", default="14m", choices=["14m", *SHAPES])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1, help="of a CPU")
    parser.add_argument("--sets", type=int, default=5)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.set_num_threads(arguments.threads)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = small() if arguments.shape == "14m" else SHAPES[arguments.shape]()
    model = random_decoder(config, dtype, device, 0)
    figures: dict[str, float | int | None] = {}
    samples: dict[str, Any] = {}
    for count in arguments.requests:
        engines = {method: made(model, count, method) for method in METHODS}
        for text in TEXTS:
            submits = requests(count, arguments.tokens, text, 1)
            rates: dict[str, list[float]] = {method: [] for method in METHODS}
            for engine in engines.values():
                if engine.speculation is not None:
                    engine.speculation.counters = drafting.DraftCounts()
            for number in range(arguments.sets + 1):  # the first one is not counted
                outputs = []
                for method, engine in engines.items():
                    seconds, texts = run(engine, submits)
                    outputs.append(texts)
                    if number:
                        rates[method].append(count * arguments.tokens / seconds)
                if any(other != outputs[0] for other in outputs) and device.type == "cpu":
                    raise SystemExit(f"{text}: the text with drafts is another one: no figure")
            name = f"{text}{count}_{arguments.shape}"
            samples[name] = {f"{method}_tok_s": found for method, found in rates.items()}
            plain = statistics.median(rates["plain"])
            figures[f"{name}_plain_tok_s"] = plain
            for method, engine in engines.items():
                if engine.speculation is None:
                    continue
                rate, counters = statistics.median(rates[method]), engine.speculation.counters
                accepted = counters.accepted_tokens / max(1, counters.draft_tokens)
                figures[f"{name}_{method}_tok_s"] = rate
                figures[f"{name}_{method}_gain_ratio"] = rate / plain
                figures[f"{name}_{method}_accepted_ratio"] = accepted
                line = {"text": name, "by": method, "gain": rate / plain, "accepted": accepted}
                print(json.dumps(line), flush=True)
        for engine in engines.values():
            engine.close()
    publish(arguments.name, figures, samples, folder=arguments.out)


if __name__ == "__main__":
    main()
