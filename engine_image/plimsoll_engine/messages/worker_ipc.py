"""The messages between the frontend and its worker.

A Unix stream socket in the run directory, framed as in :mod:`plimsoll_engine.messages.framing`.
The worker connects after it was forked and says :class:`Hello` first. The frontend trusts only the
worker of the epoch it started: it drops the connection of any other.

Nothing here knows torch: the frontend imports it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from plimsoll_api.admin import AuditFinding, DeviceMemory, LedgerEntry, Load, OperationStep
from plimsoll_api.admin import ProcessMemory as ProcessMemory
from plimsoll_engine.messages.framing import framed
from plimsoll_engine.messages.handover import Refusal


class Grammar(msgspec.Struct, array_like=True, frozen=True):
    """What the output must match.

    ``text`` is a JSON schema for ``json_schema``, empty for ``json_object``, a regular expression
    for ``regex``, a Lark grammar in llguidance's dialect for ``lark``. ``field`` is where the
    client gave it, for errors; it says nothing about the match.
    """

    kind: Literal["json_object", "json_schema", "regex", "lark"]
    text: str = ""
    field: str = "grammar"


class Sampling(msgspec.Struct, array_like=True):
    """How the next token is chosen.

    ``temperature`` 0 is greedy. ``seed`` is always set: the random number of token i depends on
    (seed, i) alone, so a carried request draws on as before.

    ``presence_penalty`` and ``frequency_penalty`` look at the output, ``repetition_penalty`` (1 is
    none) at prompt and output. ``logit_bias`` is added by token id. No stop token is taken before
    there are ``min_tokens`` tokens of output. ``logprobs`` asks for that many of the likeliest
    tokens beside the chosen one; None asks for nothing. ``prompt_logprobs`` is the same for the
    tokens of the prompt, which come as :class:`PromptScores`. With ``logprob_token_ids``,
    ``logprobs`` tells these tokens instead of the likeliest ones.

    ``allowed_token_ids`` are the only tokens that may be chosen; None allows all.
    ``bad_words`` are sequences of tokens whose last one may not follow the others in the output.
    """

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    logprobs: int | None = None
    grammar: Grammar | None = None
    prompt_logprobs: int | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[list[int]] = []
    logprob_token_ids: list[int] = []


# ---- frontend to worker


class Media(msgspec.Struct, array_like=True):
    """An image or a sound of a prompt, as the model's encoder takes it.

    ``key`` is a hash of the content and of how it was processed: equal keys, equal tensors. Its
    ``length`` placeholder tokens begin at ``start`` of the prompt; a model that attends to a sound
    from the outside has none. ``tokens`` is what it takes of the encoder cache's budget. ``data``
    holds the tensor of ``shape`` and ``dtype``, little-endian; None means that the worker's
    receiver cache has it. ``keep`` tells the worker to cache it.
    """

    kind: Literal["image", "audio"]
    key: bytes
    start: int
    length: int
    tokens: int
    shape: list[int]
    dtype: str = "float32"
    data: bytes | None = None
    keep: bool = False


class Submit(msgspec.Struct, tag="submit"):
    """A request.

    ``output_ids`` are the tokens that an earlier epoch already made (carry over); they count
    towards ``sampling.max_tokens``.

    ``priority``: lower runs first. ``tenant``: requests of one priority are admitted fairly between
    tenants. ``arrived``: CLOCK_MONOTONIC seconds, one clock for all processes of a host; the
    request is dropped ``deadline_s`` seconds later. ``cache_salt``: only requests with an equal one
    share cached prefixes. ``media`` are in the order of the prompt; the receiver cache first lets
    go of the keys in ``forget``. ``adapter`` is the number of a loaded one, 0 for none. ``attempt``
    numbers the submissions of one request, and every answer to one bears it.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: Sampling
    output_ids: list[int] = []
    priority: int = 0
    tenant: str = ""
    arrived: float = 0.0
    deadline_s: float | None = None
    cache_salt: str = ""
    media: list[Media] = []
    forget: list[bytes] = []
    adapter: int = 0
    attempt: int = 0


class Abort(msgspec.Struct, tag="abort"):
    """End a request for whose answer nobody waits; unknown ids are ignored."""

    request_id: str


class Abandoned(msgspec.Struct, tag="abandoned"):
    """All requests that the worker runs on for nobody, although their abort was sent long ago.

    What they hold is lost. It replaces what was said before.
    """

    request_ids: list[str]


class LoadAdapter(msgspec.Struct, tag="load_adapter"):
    """Load the LoRA adapter in the folder ``path`` under ``number``.

    The number is never used again for another one. Answered by :class:`AdapterLoaded`. Later
    submissions may use it.
    """

    query_id: str
    name: str
    number: int
    path: str


class UnloadAdapter(msgspec.Struct, tag="unload_adapter"):
    """No further submission uses it; its memory goes with the last request that does."""

    number: int


class Trim(msgspec.Struct, tag="trim"):
    """Give cached memory back; answered by :class:`Trimmed`."""

    operation_id: str


class AuditQuery(msgspec.Struct, tag="audit"):
    """Check the worker's own rules; answered by :class:`AuditReport`."""

    query_id: str


class DiagnosticQuery(msgspec.Struct, tag="diagnostic"):
    """Write one diagnostic of the worker; answered by :class:`DiagnosticReport`."""

    query_id: str
    kind: str


class TakeOver(msgspec.Struct, tag="take_over"):
    """The predecessor has given everything back: take the KV pool, say Ready, serve.

    ``quick``: it has served with the same sizes, so no trial of the largest step is needed.
    ``handover`` is what it said with :class:`Stopped`; only with ``quick``, since a trial writes to
    the pool. The requests in it follow Ready, and :class:`Carried` follows them.
    """

    quick: bool = False
    handover: bytes | None = None


class Carried(msgspec.Struct, tag="carried"):
    """All requests that were carried over have been submitted: answered by :class:`Adopted`.

    The blocks of others that the predecessor handed over are free from now on.
    """

    query_id: str


class Stop(msgspec.Struct, tag="stop"):
    """Finish the step under way, answer no more tokens, give everything back, say Stopped.

    The worker exits when the frontend closes the socket. With ``hand_over`` the tokens of that step
    are answered, and a successor may go on with what is in the KV pool. ``sent``: CLOCK_MONOTONIC
    seconds.
    """

    hand_over: bool = False
    sent: float | None = None


ToWorker = (
    Submit
    | Abort
    | Abandoned
    | LoadAdapter
    | UnloadAdapter
    | Trim
    | AuditQuery
    | DiagnosticQuery
    | TakeOver
    | Carried
    | Stop
)


# ---- worker to frontend


class Hello(msgspec.Struct, tag="hello"):
    """The first message of a worker on its connection."""

    epoch: int
    pid: int


class Starting(msgspec.Struct, tag="starting"):
    """The worker begins a stage of its start: a name of ``Ready.stages_s``."""

    stage: str


class Prepared(msgspec.Struct, tag="prepared"):
    """Context, weights and kernels are there; TakeOver is waited for.

    ``stages_s`` is how long each took, in seconds. ``memory`` is the process as it waits, and
    ``others`` those of the other ranks.
    """

    epoch: int
    stages_s: dict[str, float] = {}
    memory: ProcessMemory | None = None
    others: list[ProcessMemory] = []


class Ready(msgspec.Struct, tag="ready"):
    """The engine is warm.

    ``max_model_len`` bounds prompt and output together; ``load_s`` is the time from the fork, the
    wait for TakeOver included; ``stages_s`` how long each stage took. ``refusal`` says why a
    handover was not accepted; null where it was, and where there was none.
    """

    epoch: int
    max_model_len: int
    num_blocks: int
    block_size: int
    load_s: float
    stages_s: dict[str, float] = {}
    refusal: Refusal | None = None


class Logprobs(msgspec.Struct, array_like=True):
    """Natural logarithms of the model's own probabilities.

    They are those before any penalty, bias, grammar or temperature: of the chosen token, and of the
    likeliest ones in falling order.
    """

    chosen: float
    top_ids: list[int]
    top: list[float]


class Started(msgspec.Struct, array_like=True):
    """What is known of a request when its first token is.

    The seconds it waited for the batch, and how many of its prompt's tokens came from the prefix
    cache.
    """

    queued_s: float
    cached_tokens: int


class Token(msgspec.Struct, array_like=True):
    """One new token.

    ``finish_reason`` is ``stop`` or ``length`` on the last one. ``started`` comes with the first
    one that this worker makes. ``attempt`` is the submission's: tokens of an earlier one may still
    be under way when a request was taken back and submitted again.
    """

    request_id: str
    token_id: int
    finish_reason: str | None = None
    logprobs: Logprobs | None = None
    started: Started | None = None
    attempt: int = 0


class Tokens(msgspec.Struct, tag="tokens"):
    """The tokens of one step."""

    step: int
    tokens: list[Token]


class PromptScores(msgspec.Struct, tag="prompt_scores"):
    """Log probabilities of tokens of a prompt, from the one at place ``first`` (1 or more) on.

    Little-endian numbers of 4 bytes, token by token: float ``chosen`` and int ``ranks`` (1 is the
    likeliest) of the token itself, int ``top_ids`` and float ``top`` of as many of the likeliest
    ones as were asked for. They come in order, and all of them before the request's first token.
    ``attempt`` is the submission's, as of a :class:`Token`.
    """

    request_id: str
    attempt: int
    first: int
    chosen: bytes
    ranks: bytes
    top_ids: bytes
    top: bytes


class Dropped(msgspec.Struct, tag="dropped"):
    """A request that ended without a token: an error of its own, never of its neighbours.

    ``attempt`` is the submission's, as of a :class:`Token`. ``reason``: ``invalid`` (``param``
    names the field, where one is at fault), ``unavailable``, ``deadline`` or ``error``.
    """

    request_id: str
    attempt: int
    reason: str
    message: str = ""
    param: str | None = None


class MediaMissing(msgspec.Struct, tag="media_missing"):
    """The receiver cache lacks what a submission counts on: it was not begun; send all of it.

    ``attempt`` is the submission's, as of a :class:`Token`.
    """

    request_id: str
    attempt: int
    keys: list[bytes]


class Report(msgspec.Struct, tag="report"):
    """The worker's account of itself, at least once a second, also while idle.

    ``running`` names the requests that hold blocks. What is ``lost`` is held by nobody. Host blocks
    are null without an offload, encoder tokens for a model without an encoder. Where the worker is
    several ranks, ``memory`` is rank 0's, ``others`` that of the rest, and all else is of all.
    """

    load: Load
    memory: ProcessMemory
    devices: list[DeviceMemory]
    ledger: list[LedgerEntry]
    prefix_hit_tokens_total: int = 0
    prefix_query_tokens_total: int = 0
    drafts_total: int = 0
    draft_tokens_total: int = 0
    accepted_tokens_total: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    kv_blocks_lost: int = 0
    host_blocks_total: int | None = None
    host_blocks_lost: int | None = None
    encoder_tokens_total: int | None = None
    encoder_tokens_lost: int | None = None
    running: list[str] = []
    injections: list[str] = []
    others: list[ProcessMemory] = []


class AdapterLoaded(msgspec.Struct, tag="adapter_loaded"):
    """``error`` says why it was not; null where it was."""

    query_id: str
    number: int
    error: str | None = None


class Trimmed(msgspec.Struct, tag="trimmed"):
    """The steps of a trim with the bytes that each gave back."""

    operation_id: str
    steps: list[OperationStep]


class AuditReport(msgspec.Struct, tag="audited"):
    """What the audit found; empty ``findings`` are good news only for the ``rules`` it names."""

    query_id: str
    idle: bool
    rules: list[str]
    findings: list[AuditFinding]
    receiver_keys: list[bytes] = []


class DiagnosticReport(msgspec.Struct, tag="diagnosed"):
    """The text of one diagnostic."""

    query_id: str
    text: str


class Adopted(msgspec.Struct, tag="adopted"):
    """These requests go on with the keys and values of the predecessor.

    ``refused`` says why another one that was handed over does not.
    """

    query_id: str
    request_ids: list[str]
    refused: dict[str, str]


class Stopped(msgspec.Struct, tag="stopped"):
    """Everything was given back. Device bytes are torch's own count, exact; null on a CPU.

    ``handover`` is of :mod:`plimsoll_engine.messages.handover`, where it was asked for; ``refusal``
    says why there is none. ``stages_s`` is how long each stage of its end took, from the moment at
    which Stop was sent, and ``sent`` the moment at which this is, in CLOCK_MONOTONIC seconds.
    """

    device_allocated: int | None = None
    device_baseline: int | None = None
    handover: bytes | None = None
    refusal: Refusal | None = None
    stages_s: dict[str, float] = {}
    sent: float = 0.0


class Failed(msgspec.Struct, tag="failed"):
    """The worker cannot go on; it exits after this.

    ``message`` says what to do. ``permanent``: the settings or the checkpoint are wrong, so another
    worker fails as well.
    """

    message: str
    permanent: bool = False


FromWorker = (
    Hello
    | Starting
    | Prepared
    | Ready
    | Tokens
    | PromptScores
    | Dropped
    | MediaMissing
    | Report
    | AdapterLoaded
    | Trimmed
    | AuditReport
    | DiagnosticReport
    | Adopted
    | Stopped
    | Failed
)

_encoder = msgspec.msgpack.Encoder()
to_worker = msgspec.msgpack.Decoder(ToWorker)
from_worker = msgspec.msgpack.Decoder(FromWorker)


def frame(message: ToWorker | FromWorker) -> bytes:
    """Return the bytes that carry ``message``, length first."""
    return framed(_encoder.encode(message))
