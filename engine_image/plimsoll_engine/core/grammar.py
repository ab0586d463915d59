"""Structured output: grammars compiled off the worker's loop, and what they allow next.

llguidance does the parsing. Its work is bounded by counts of items and automaton states and not by
time, so the same request is accepted or refused on every machine. One thread compiles, replays the
tokens that a carried request has already made, and keeps the compiled grammars; it holds the
interpreter's lock only between these, so streams go on meanwhile. The longest compilation known
(an adversary's 64 KiB of optional characters) takes nine seconds, a common schema milliseconds.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from plimsoll_engine.caches.lru import LruCache
from plimsoll_engine.checkpoint import eos_ids
from plimsoll_engine.ipc import Grammar
from plimsoll_engine.settings import UsageError

CACHE_BYTES = 64 << 20
BASE_BYTES, BYTES_PER_CHARACTER = 96 << 10, 128
"""A compiled grammar's memory, which llguidance does not tell. Measured with mallinfo2 and a
vocabulary of 150,000 tokens: 43-79 KiB and 52-120 bytes for each character of the text."""
TOKENIZER_BYTES_PER_FILE_BYTE = 20
"""Of the token trie, measured the same way: 97 MB for a tokenizer.json of 4.9 MB."""

STACK_BYTES = 256 << 20
"""The compiler recurses once for each step in a chain of rules or references, and a thread whose
stack overflows ends the process. 64 KiB of text chain 8,000 rules, which overflow 8 MiB and fit
into 32 MiB. Address space only: pages come with use, and go with the thread."""

LIMITS = LLParserLimits(
    max_lexer_states=20_000,  # 1-2 KB each
    verbose_errors=False,  # they would tell one client of the parser's inside, at length
)


class GrammarError(ValueError):
    """The grammar cannot be used; the message says why, ``field`` where the client gave it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class Vocabulary:
    """The token trie of a checkpoint. Making it takes a second for a large vocabulary and holds the
    interpreter's lock, so it is made before the worker serves, once for all workers."""

    def __init__(self, tokenizer: LLTokenizer, size_bytes: int) -> None:
        self.tokenizer = tokenizer
        self.bytes = size_bytes

    @classmethod
    def load(cls, model: Path) -> Vocabulary | None:
        """Of the checkpoint in ``model``; None where llguidance cannot read its tokenizer.json, or
        no token ends a text: then grammars are refused, and everything else works."""
        try:
            ends = eos_ids(model)
            text = (model / "tokenizer.json").read_text(encoding="utf-8")
            tokenizer = LLTokenizer(text, eos_token=ends) if ends else None
        except (OSError, ValueError, RuntimeError, UsageError):
            return None
        size = len(text) * TOKENIZER_BYTES_PER_FILE_BYTE
        return None if tokenizer is None else cls(tokenizer, size)


class Matcher:
    """How far one request's output has come in its grammar."""

    __slots__ = ("_matcher", "bytes", "field")

    def __init__(self, matcher: LLMatcher, field: str, size_bytes: int) -> None:
        self._matcher = matcher
        self.field = field
        self.bytes = size_bytes

    def take(self, token_id: int) -> None:
        """The next token of the output."""
        self._matcher.consume_token(token_id)

    def allowed(self) -> bytes:
        """One bit for each token, little-endian. Raises :class:`GrammarError`."""
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise GrammarError(self.field, f"{self.field}: {self._matcher.get_error()}")
        return mask

    @property
    def complete(self) -> bool:
        """Whether the output matches and nothing may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()


class Grammars:
    """The compiler of one worker."""

    def __init__(self, vocabulary: Vocabulary | None, cache_bytes: int = CACHE_BYTES) -> None:
        self._vocabulary = vocabulary
        self._cache: LruCache[tuple[str, str], LLMatcher] = LruCache(cache_bytes)
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._jobs: dict[str, Future[Matcher]] = {}
        self._unfinished: set[Future[Matcher]] = set()  # also of requests that were aborted

    def __len__(self) -> int:
        """Requests whose grammar is being compiled."""
        return len(self._jobs)

    def __iter__(self) -> Iterator[str]:
        return iter(self._jobs)

    def begin(self, request_id: str, grammar: Grammar, output_ids: Sequence[int]) -> None:
        """Compile ``grammar``, for a request that has ``output_ids`` already."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "grammar")
        before = threading.stack_size(STACK_BYTES)
        try:
            job = self._thread.submit(self._match, grammar, list(output_ids))
        finally:
            threading.stack_size(before)
        self._jobs[request_id] = job
        self._unfinished.add(job)
        job.add_done_callback(self._unfinished.discard)

    def drop(self, request_id: str) -> bool:
        """The request ended; False where nothing is compiled for it."""
        job = self._jobs.pop(request_id, None)
        if job is not None:
            job.cancel()
        return job is not None

    def finished(self, wait_s: float = 0.0) -> list[tuple[str, Matcher | GrammarError]]:
        """The requests whose grammar is ready or wrong; waits so long for the first of them."""
        if not self._jobs:
            return []
        wait(self._jobs.values(), wait_s, FIRST_COMPLETED)
        done = [request_id for request_id, job in self._jobs.items() if job.done()]
        outcomes = [(request_id, _outcome(self._jobs.pop(request_id))) for request_id in done]
        if not self._jobs and not self._unfinished:
            self._end_thread()  # it has nothing to do, so this does not wait
        return outcomes

    def flush(self) -> int:
        """Forget every compiled grammar; the bytes given back."""
        with self._lock:
            held = self._cache.used
            self._cache.evict(held)
        return held

    @property
    def bytes(self) -> int:
        return self._cache.used + (0 if self._vocabulary is None else self._vocabulary.bytes)

    @property
    def bytes_bound(self) -> int:
        return self._cache.capacity + (0 if self._vocabulary is None else self._vocabulary.bytes)

    def close(self) -> None:
        """End the thread and forget everything. Again does nothing more."""
        self._jobs.clear()
        self._end_thread()
        self.flush()
        self._vocabulary = None

    def _end_thread(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
            self._thread = None

    def _match(self, grammar: Grammar, output_ids: list[int]) -> Matcher:
        size = BASE_BYTES + BYTES_PER_CHARACTER * len(grammar.text)
        matcher = self._compiled(grammar, size).deep_copy()
        if not matcher.consume_tokens(output_ids):
            raise GrammarError(grammar.field, "the output so far does not match the grammar")
        found = Matcher(matcher, grammar.field, size)
        found.allowed()  # what is too complex shows here, and not in a step
        return found

    def _compiled(self, grammar: Grammar, size: int) -> LLMatcher:
        """Untouched: each request goes on with a copy."""
        key = grammar.kind, grammar.text
        with self._lock:
            compiled = self._cache.get(key)
            self._cache.touch(key)
        if compiled is not None:
            return compiled
        compiled = self.compile(grammar)
        if size <= self._cache.capacity:
            with self._lock:
                self._cache.put(key, compiled, size)
        return compiled

    def compile(self, grammar: Grammar) -> LLMatcher:
        """A new matcher, past the cache. Raises :class:`GrammarError`."""
        if self._vocabulary is None:
            raise GrammarError(
                grammar.field,
                "this model's tokenizer cannot be used for structured output: it is not a"
                " tokenizer.json that llguidance reads, or no token ends a text",
            )
        compiled = LLMatcher(
            self._vocabulary.tokenizer, _source(grammar), log_level=0, limits=LIMITS
        )
        if compiled.is_error():
            raise GrammarError(grammar.field, f"{grammar.field}: {compiled.get_error()}")
        return compiled


def _outcome(job: Future[Matcher]) -> Matcher | GrammarError:
    error = job.exception()
    if error is None:
        return job.result()
    # A new one: the traceback of the old holds the job's frame.
    field = error.field if isinstance(error, GrammarError) else "grammar"
    return GrammarError(field, str(error))


def _source(grammar: Grammar) -> str:
    """In llguidance's own form. Raises GrammarError."""
    try:
        match grammar.kind:
            case "json_object":
                return LLMatcher.grammar_from_json_schema('{"type": "object"}')
            case "json_schema":
                return LLMatcher.grammar_from_json_schema(grammar.text)
            case "regex":
                return LLMatcher.grammar_from_regex(grammar.text)
        return LLMatcher.grammar_from_lark(grammar.text)
    except ValueError as error:
        raise GrammarError(grammar.field, f"{grammar.field}: {error}") from None
