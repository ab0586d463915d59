"""Compile grammars for structured output with llguidance, outside the worker's loop.

A new grammar is compiled twice: first as a trial in a process with limits of CPU time and memory,
then in a thread of the worker.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from plimsoll_engine.caches.lru import LruCache
from plimsoll_engine.checkpoint import Checkpoint
from plimsoll_engine.core.grammar.matcher import MAX_MASK_CPU_S, MaskThreads, Matcher, shorten_error
from plimsoll_engine.core.grammar.queue import MAX_SMALL_GRAMMAR_CHARACTERS, GrammarQueue
from plimsoll_engine.core.grammar.trial import (
    COMPILER_STACK_BYTES,
    MAX_TRIAL_BYTES,
    TRIAL_NICENESS,
    GrammarRefused,
    Trial,
    TrialFailedError,
    TrialPassed,
    TrialServer,
)
from plimsoll_engine.errors import GrammarServerLostError, UsageError
from plimsoll_engine.messages.worker_ipc import Grammar
from plimsoll_engine.process import host_memory

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Each tenant has at most one.
MAX_COMPILATIONS = 2
GRAMMAR_CACHE_BYTES = 64 << 20
# Minimum size to record for a compiled grammar, because trials may measure too little. Measured
# with mallinfo2 and a vocabulary of 150,000 tokens: 43-79 KiB and 52-120 bytes per character.
MIN_COMPILED_BYTES, MIN_COMPILED_BYTES_PER_CHARACTER = 96 << 10, 128
# Memory of the token trie per byte of tokenizer.json. Measured: 97 MB for 4.9 MB (mallinfo2).
TOKENIZER_BYTES_PER_FILE_BYTE = 20
# An entry without its message was estimated for CPython 3.11 and rounded up.
REFUSAL_CACHE_BYTES, REFUSAL_ENTRY_BYTES = 64 << 10, 400

# Represents a space in tokens of SentencePiece tokenizers.
SENTENCEPIECE_SPACE = "\u2581"

PARSER_LIMITS = LLParserLimits(
    max_lexer_states=20_000,  # 1-2 KB each
    verbose_errors=False,  # verbose errors are long and describe internals of the parser
)

# The whitespace pattern permits indentation, but not endless spaces.
JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": r"[ \t\r\n]{0,20}"}

# Strings, regular expressions, comments, token names and schemas in Lark text. Group 1 is the name
# of a token, group 2 the beginning of a schema, and group 3 the end of an empty schema.
_LARK_TOKEN_PATTERN = re.compile(
    r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/|//[^\n]*|(<[^<>\s\[][^<>\s]*>)|(%json\s*\{)(\s*\})?'
)

# llguidance's errors in Lark grammars: the line number and the error.
_LARK_ERROR_PATTERN = re.compile(
    r"at (\d+)\(\d+\): (?:failed to compile JSON schema: )?(.*?)(?=\n *\d+ \| |\Z)", re.DOTALL
)

GrammarKey = tuple[str, str]
# A lack of processes, files, memory or threads causes these errors, not the grammar.
_RESOURCE_ERRORS = (TrialFailedError, OSError, MemoryError, RuntimeError)


class GrammarError(ValueError):
    """The grammar in the request field ``field`` cannot be used, or not now if ``unavailable``."""

    def __init__(self, field: str, reason: str, is_unavailable: bool = False) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.why = reason
        self.unavailable = is_unavailable


class Vocabulary:
    """Token trie of a checkpoint, for which grammars are compiled.

    Building a large trie takes a second and holds the interpreter's lock, so all workers share one.
    ``added`` maps the text of added tokens to their IDs.
    """

    def __init__(
        self,
        tokenizer: LLTokenizer,
        size_bytes: int,
        added: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.tokenizer = tokenizer
        self.bytes = size_bytes
        self._added = added

    @classmethod
    def load(cls, model: Path) -> Vocabulary | None:
        """Return the vocabulary of the checkpoint in ``model``.

        Return None if llguidance cannot read tokenizer.json, or if there is no end token.
        """
        try:
            checkpoint = Checkpoint.read(model)
            count = checkpoint.num_tokens
            ends = [end for end in checkpoint.stop_token_ids if end < count]
            text, added = _convert_tokenizer(checkpoint.tokenizer)
            tokenizer = LLTokenizer(text, n_vocab=count, eos_token=ends) if ends else None
        except (OSError, ValueError, RuntimeError, UsageError):
            return None
        size = len(text) * TOKENIZER_BYTES_PER_FILE_BYTE
        return None if tokenizer is None else cls(tokenizer, size, added)

    def compile(self, grammar: Grammar) -> LLMatcher:
        """Return a new matcher for ``grammar``. Raises :class:`GrammarError` if it is invalid."""
        source = _convert_grammar(grammar, self._added)
        compiled = LLMatcher(self.tokenizer, source, log_level=0, limits=PARSER_LIMITS)
        if compiled.is_error():
            raise GrammarError(grammar.field, shorten_error(compiled.get_error()))
        return compiled

    def compile_for_trial(self, grammar: Grammar) -> TrialPassed | GrammarRefused:
        """Compile ``grammar`` and compute its first mask. Return the memory size, or a refusal."""
        before = host_memory.read_malloc_bytes()[0] or 0
        try:
            compiled = self.compile(grammar)
            held = max(0, (host_memory.read_malloc_bytes()[0] or 0) - before)
            matcher = Matcher(compiled.deep_copy(), grammar.field, held, "", ("", ""))
        except GrammarError as error:
            return GrammarRefused(error.why, permanent=True)
        return (
            TrialPassed(held)
            if matcher.error is None
            else GrammarRefused(matcher.error, permanent=True)
        )


CompilationOutcome = Matcher | GrammarError | GrammarServerLostError


@dataclass(eq=False, slots=True, weakref_slot=True)
class _CompilationJob:
    # ``future`` is None until the compilation starts.
    number: int
    grammar: Grammar
    output_ids: list[int]
    tenant: str
    trial: Trial = field(default_factory=Trial)
    future: Future[CompilationOutcome] | None = None
    seconds: float = 0.0


class GrammarCompiler:
    """Compiler of grammars for one worker. Only the worker's loop may call it.

    Without ``trials``, the time of a compilation is not limited.
    """

    def __init__(
        self,
        vocabulary: Vocabulary | None,
        cache_bytes: int = GRAMMAR_CACHE_BYTES,
        trials: TrialServer | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._trials = trials
        self._cache: LruCache[GrammarKey, LLMatcher] = LruCache(cache_bytes)
        self._refused: LruCache[bytes, str] = LruCache(REFUSAL_CACHE_BYTES)
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._queue = GrammarQueue(MAX_COMPILATIONS)
        # By request ID.
        self._jobs: dict[str, _CompilationJob] = {}
        self._numbers = itertools.count()
        self._queued: dict[int, _CompilationJob] = {}
        # By number. Some of their requests may have been aborted.
        self._in_progress: dict[int, _CompilationJob] = {}
        self.masks = MaskThreads(COMPILER_STACK_BYTES)

    def __len__(self) -> int:
        """Return the number of requests whose grammar is being compiled."""
        return len(self._jobs)

    def __iter__(self) -> Iterator[str]:
        return iter(self._jobs)

    def start_compilation(
        self, request_id: str, grammar: Grammar, output_ids: Sequence[int], tenant: str = ""
    ) -> None:
        """Queue the compilation of ``grammar`` for a request with the output ``output_ids``."""
        job = _CompilationJob(next(self._numbers), grammar, list(output_ids), tenant)
        self._jobs[request_id] = self._queued[job.number] = job
        self._queue.add(job.number, tenant, len(grammar.text))
        self._start_queued_jobs()

    def cancel(self, request_id: str) -> bool:
        """Cancel the compilation for a request. Return False if there is none."""
        job = self._jobs.pop(request_id, None)
        if job is None:
            return False
        if self._queued.pop(job.number, None) is not None:
            self._queue.discard(job.number)
        else:
            job.trial.cancel()
        self._collect_ended_jobs()
        return True

    def collect_finished(self, wait_s: float = 0.0) -> list[tuple[str, Matcher | GrammarError]]:
        """Return (request ID, matcher or error) for each compilation that has ended.

        If none has ended, wait up to ``wait_s`` seconds for the first. Raises
        :class:`GrammarServerLostError`.
        """
        if not self._jobs:
            return []
        begun = {name: job.future for name, job in self._jobs.items() if job.future is not None}
        wait(begun.values(), wait_s, FIRST_COMPLETED)
        done = [name for name, future in begun.items() if future.done()]
        outcomes = [(name, _get_job_outcome(self._jobs.pop(name))) for name in done]
        self._collect_ended_jobs()
        return outcomes

    def refuse_overdue(self, matcher: Matcher) -> GrammarError:
        """Return the error for a request whose ``matcher`` took too long to compute a mask.

        If the mask has used up its CPU time, the grammar is also refused in later requests.
        """
        if not self.masks.has_used_cpu_time(matcher):
            why = (
                "the machine is too busy to compute the allowed next tokens: send the request again"
            )
            return GrammarError(matcher.field, why, is_unavailable=True)
        why = (
            f"computing the allowed next tokens takes more than {MAX_MASK_CPU_S:g} s: make the"
            " grammar smaller or less ambiguous"
        )
        with self._lock:
            self._cache_refusal(matcher.key, why)
        return GrammarError(matcher.field, why)

    def _cache_refusal(self, key: GrammarKey, reason: str) -> None:
        # Call with the lock held.
        self._refused.put(_digest(key), reason, REFUSAL_ENTRY_BYTES + len(reason))

    def flush(self) -> int:
        """Remove all compiled grammars from the cache, and return the freed memory in bytes."""
        with self._lock:
            held = self._cache.used
            self._cache.evict(held)
        return held

    @property
    def bytes(self) -> int:
        """Host memory of cached grammars, running trials and the vocabulary, in bytes."""
        trials = sum(job.trial.bytes for job in self._in_progress.values())
        return self._cache.used + self._refused.used + trials + self._vocabulary_bytes

    @property
    def bytes_bound(self) -> int:
        """Maximum of :attr:`bytes`."""
        trials = 0 if self._trials is None else MAX_COMPILATIONS * MAX_TRIAL_BYTES
        caches = self._cache.capacity + self._refused.capacity
        return caches + trials + self._vocabulary_bytes

    @property
    def _vocabulary_bytes(self) -> int:
        return 0 if self._vocabulary is None else self._vocabulary.bytes

    def close(self) -> None:
        """Stop all threads and trials, and remove all cached grammars. Idempotent."""
        self._jobs.clear()
        for number in list(self._queued):
            del self._queued[number]
            self._queue.discard(number)
        for job in self._in_progress.values():
            job.trial.cancel()
        self._end_threads()
        self._collect_ended_jobs()
        self.masks.close()
        self.flush()
        if self._trials is not None:
            self._trials.close()
            self._trials = None
        self._vocabulary = None

    # ---- the queue

    def _start_queued_jobs(self) -> None:
        while (number := self._queue.start_next()) is not None:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(MAX_COMPILATIONS, "grammar", _lower_priority)
            job = self._queued.pop(number)
            before = threading.stack_size(COMPILER_STACK_BYTES)
            try:
                job.future = self._threads.submit(partial(self._run_job, job))
            except RuntimeError as error:  # the machine has no thread left
                job.future = Future()
                job.future.set_result(
                    GrammarError(job.grammar.field, str(error), is_unavailable=True)
                )
            finally:
                threading.stack_size(before)
            self._in_progress[number] = job

    def _collect_ended_jobs(self) -> None:
        for number, job in list(self._in_progress.items()):
            if job.future is not None and job.future.done():
                del self._in_progress[number]
                self._queue.finish(number, job.seconds)
        self._start_queued_jobs()
        if not self._jobs and not self._in_progress:
            self._end_threads()  # they are idle, so this does not block

    def _end_threads(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None

    # ---- in a thread

    def _run_job(self, job: _CompilationJob) -> CompilationOutcome:
        # Errors are returned, because the traceback of a raised error would keep ``job`` alive.
        begun = time.monotonic()
        try:
            return self._create_matcher(job)
        except GrammarServerLostError as error:
            return GrammarServerLostError(str(error))
        except Exception as error:  # noqa: BLE001 - any error concerns only this request
            if isinstance(error, GrammarError):
                return _create_schema_error(job.grammar, error.why)
            lacking = isinstance(error, _RESOURCE_ERRORS) and not isinstance(error, RecursionError)
            return GrammarError(
                job.grammar.field, shorten_error(str(error)), is_unavailable=lacking
            )
        finally:
            job.seconds = time.monotonic() - begun
            if len(job.grammar.text) > MAX_SMALL_GRAMMAR_CHARACTERS:
                # Without a trim, malloc would keep the memory that compiling a large text took.
                host_memory.trim_malloc()

    def _create_matcher(self, job: _CompilationJob) -> Matcher:
        grammar = job.grammar
        key = grammar.kind, grammar.text
        compiled, size = self._get_compiled_grammar(key, job)
        matcher = compiled.deep_copy()
        for token_id in job.output_ids:
            if matcher.is_stopped():
                break  # the other tokens are end tokens, which may follow a complete text
            if not matcher.consume_token(token_id):
                raise GrammarError(grammar.field, "the output so far does not match the grammar")
        found = Matcher(matcher, grammar.field, size, job.tenant, key)
        if found.error is not None:  # report a grammar that is too complex now, not in a step
            raise GrammarError(grammar.field, found.error)
        return found

    def _get_compiled_grammar(self, key: GrammarKey, job: _CompilationJob) -> tuple[LLMatcher, int]:
        # Also returns the size in bytes. The caller must copy the grammar.
        grammar = job.grammar
        size = MIN_COMPILED_BYTES + MIN_COMPILED_BYTES_PER_CHARACTER * len(grammar.text)
        with self._lock:
            refused = self._refused.get(_digest(key))
            compiled = self._cache.get(key)
            self._cache.touch(key)
        if refused is not None:
            raise GrammarError(grammar.field, refused)
        if compiled is not None:
            return compiled, size
        size = max(size, self._run_trial(key, job))
        compiled = self.compile(grammar)
        if size <= self._cache.capacity:
            with self._lock:
                self._cache.put(key, compiled, size)
        return compiled, size

    def _run_trial(self, key: GrammarKey, job: _CompilationJob) -> int:
        # Returns the compiled size in bytes; 0 without trials. Raises GrammarError if the trial
        # refuses the grammar.
        if self._trials is None or self._vocabulary is None:
            return 0
        verdict = job.trial.run(self._trials, job.grammar)
        if isinstance(verdict, GrammarRefused):
            if verdict.permanent:
                with self._lock:
                    self._cache_refusal(key, verdict.message)
            raise GrammarError(job.grammar.field, verdict.message)
        return verdict.bytes

    def compile(self, grammar: Grammar) -> LLMatcher:
        """Compile ``grammar`` without the cache, and return a new matcher. Raises GrammarError."""
        if self._vocabulary is None:
            raise GrammarError(
                grammar.field,
                "this model's tokenizer does not support structured output: llguidance cannot"
                " read its tokenizer.json, or it has no end token",
            )
        return self._vocabulary.compile(grammar)


def _create_schema_error(grammar: Grammar, reason: str) -> GrammarError:
    # The engine itself creates the grammar of a forced tool call, so clients do not know it. Its
    # error names the tool's schema instead of a line of the grammar.
    found = _LARK_ERROR_PATTERN.match(reason) if grammar.tool_fields else None
    if found is None:
        return GrammarError(grammar.field, reason)
    rule = re.match(r"tool_(\d+)", grammar.text.split("\n")[int(found[1]) - 1])
    field = grammar.field if rule is None else grammar.tool_fields[int(rule[1])]
    return GrammarError(field, found[2])


def _lower_priority() -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), TRIAL_NICENESS)


def _digest(key: GrammarKey) -> bytes:
    return hashlib.sha256("\0".join(key).encode(errors="surrogatepass")).digest()


def _get_job_outcome(job: _CompilationJob) -> Matcher | GrammarError:
    assert job.future is not None
    outcome = job.future.result()
    if isinstance(outcome, GrammarServerLostError):
        raise outcome
    return outcome


def _split_merge(merge: str | list[str]) -> tuple[str, str, str]:
    # The third string is the token that results from the merge of the first two.
    first, second = merge.split(" ", 1) if isinstance(merge, str) else merge
    return first, second, first + second


def _convert_tokenizer(tokenizer: Tokenizer) -> tuple[str, dict[str, int]]:
    # Output text must not be mistaken for an added token: ``<|im_end|>`` in a JSON string would end
    # the output. Each added token therefore becomes special, with a name that no text contains.
    # Whitespace stays, because a grammar may need its text. So do tokens that are not special, if
    # the vocabulary has no tokens for single bytes. IDs without a token get one, because llguidance
    # derives the vocabulary size from the largest ID.
    content = json.loads(tokenizer.to_str())
    model, added = content["model"], content["added_tokens"]
    numbers = {one["content"]: one["id"] for one in added}
    spells_all = model.get("byte_fallback") or "ByteLevel" in json.dumps(content["decoder"])
    named = {
        one["content"]: _create_unspellable_name(one["id"])
        for one in added
        if one["content"].replace(SENTENCEPIECE_SPACE, " ").strip()
        and (one["special"] or spells_all)
    }
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {named.get(text, text): number for text, number in vocabulary.items()}
    else:
        model["vocab"] = [[named.get(text, text), *rest] for text, *rest in vocabulary]
    if "merges" in model:
        # Gemma has merges whose parts or results are added tokens.
        model["merges"] = [
            merge for merge in model["merges"] if named.keys().isdisjoint(_split_merge(merge))
        ]
    if model.get("unk_token") in named:
        model["unk_token"] = named[model["unk_token"]]
    for one in added:
        if one["content"] in named:
            one["content"], one["special"] = named[one["content"]], True
    known = set(tokenizer.get_vocab(with_added_tokens=True).values())
    for number in sorted(set(range(max(known, default=-1) + 1)) - known):
        name = _create_unspellable_name(number)
        model["vocab"][name] = number
        added.append(
            {"id": number, "content": name, "special": True, "normalized": False}
            | dict.fromkeys(("lstrip", "rstrip", "single_word"), False)
        )
    content["post_processor"] = None  # it may name renamed tokens, and grammars do not need it
    return json.dumps(content), numbers


def _create_unspellable_name(number: int) -> str:
    return f"\uf8ff\ue000{number}\uf8ff"


def _convert_grammar(grammar: Grammar, added: Mapping[str, int]) -> str:
    try:
        match grammar.kind:
            case "json_object":
                return LLMatcher.grammar_from_json_schema('{"type": "object"}', JSON_OPTIONS)
            case "json_schema":
                return LLMatcher.grammar_from_json_schema(grammar.text, JSON_OPTIONS)
            case "regex":
                return LLMatcher.grammar_from_regex(grammar.text)
        return LLMatcher.grammar_from_lark(_convert_lark(grammar.text, added))
    except ValueError as error:
        raise GrammarError(grammar.field, shorten_error(str(error))) from None


def _convert_lark(text: str, added: Mapping[str, int]) -> str:
    # Token names such as ``<|im_end|>`` are replaced by their IDs. Schemas without options get
    # JSON_OPTIONS.
    options = f'"x-guidance": {json.dumps(JSON_OPTIONS)}'

    def replace_match(found: re.Match[str]) -> str:
        name, schema, end = found.groups()
        if schema:
            return f"{schema}{options}{end or ', '}"
        return f"<[{added[name]}]>" if name in added else found[0]

    return _LARK_TOKEN_PATTERN.sub(replace_match, text)
