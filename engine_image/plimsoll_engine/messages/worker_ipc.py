"""Messages between the frontend and its worker, on a Unix stream socket in the run directory.

Messages are framed as in :mod:`plimsoll_engine.messages.framing`. After its fork, the worker
connects and sends :class:`Hello` first. The frontend drops connections from workers of other
epochs.

This module must not import torch, because the frontend imports it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from plimsoll_api.admin import AuditFinding, DeviceMemory, LedgerEntry, Load, OperationStep
from plimsoll_api.admin import ProcessMemory as ProcessMemory
from plimsoll_engine.messages.framing import add_length_prefix
from plimsoll_engine.messages.handover import HandoverRefusal


class Grammar(msgspec.Struct, array_like=True, frozen=True):
    """Grammar that the output must match.

    ``text`` is a JSON schema for ``json_schema``, empty for ``json_object``, a regular expression
    for ``regex``, or a Lark grammar in llguidance's dialect for ``lark``. ``field`` names the
    request field in error messages. In the grammar of forced tool calls, ``tool_fields`` names the
    field of each schema: the rules of schema N begin with ``tool_N``.
    """

    kind: Literal["json_object", "json_schema", "regex", "lark"]
    text: str = ""
    field: str = "grammar"
    tool_fields: tuple[str, ...] = ()


class Sampling(msgspec.Struct, array_like=True):
    """Sampling parameters of a request.

    ``temperature`` 0 means greedy sampling. ``seed`` is always set: the random number of token i
    depends only on (seed, i), so a carried-over request continues with the same sequence.

    ``presence_penalty`` and ``frequency_penalty`` apply to the output, ``repetition_penalty`` to
    prompt and output; 1 disables it. ``logit_bias`` maps token IDs to a value that is added to the
    logit. Stop tokens are suppressed until the output has ``min_tokens`` tokens.

    ``logprobs`` is the number of top log probabilities to return for each output token; None
    disables log probabilities. ``prompt_logprobs`` does the same for the prompt, whose log
    probabilities are sent as :class:`PromptScores`. If ``logprob_token_ids`` is not empty, the log
    probabilities of these tokens are returned instead of those of the top tokens.

    Only ``allowed_token_ids`` may be sampled; None allows all. Each item of ``bad_words`` is a
    token sequence that the output must not contain.
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


# ---- from the frontend to the worker


class Media(msgspec.Struct, array_like=True):
    """Image or audio clip of a prompt, as a tensor for the model's encoder.

    ``key`` is a hash of the content and of its processing, so equal keys have equal tensors. The
    ``length`` placeholder tokens begin at index ``start`` of the prompt; models with
    cross-attention have no placeholders. ``tokens`` is the number of tokens that the encoder output
    takes in the encoder cache. ``data`` is the little-endian tensor of ``shape`` and ``dtype``;
    None means that the worker's receiver cache has the tensor. If ``keep`` is True, the worker
    caches the tensor.
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


class Choice(msgspec.Struct, array_like=True):
    """Another choice of the request in a :class:`Submit`, with the fields that differ."""

    request_id: str
    seed: int
    output_ids: list[int]
    arrived: float
    attempt: int


class Submit(msgspec.Struct, tag="submit"):
    """Command: run a request, and further ``choices`` of its prompt.

    ``output_ids`` are the tokens that an earlier epoch generated before a carry-over. These tokens
    count towards ``sampling.max_tokens``.

    A lower ``priority`` runs first. Requests of equal priority are admitted fairly between tenants.
    ``arrived`` is the time of arrival in CLOCK_MONOTONIC seconds, and the request fails
    ``deadline_s`` seconds later. Only requests with equal ``cache_salt`` share cached prefixes.
    ``media`` are in the order of the prompt. The receiver cache evicts the keys in ``forget``
    before it stores ``media``. ``adapter`` is the number of a loaded adapter; 0 means none.
    ``attempt`` counts the submissions of a request, and each reply repeats it.
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
    choices: list[Choice] = []


class Abort(msgspec.Struct, tag="abort"):
    """Command: cancel a request. Unknown IDs are ignored."""

    request_id: str


class AbandonedRequests(msgspec.Struct, tag="abandoned"):
    """Message: all requests that the frontend has aborted but the worker still runs.

    The worker counts their memory as lost. Each message replaces the previous one.
    """

    request_ids: list[str]


class LoadAdapter(msgspec.Struct, tag="load_adapter"):
    """Command: load the LoRA adapter in the folder ``path``.

    The reply is :class:`AdapterLoadResult`. ``number`` identifies the adapter in later submissions
    and is never reused.
    """

    query_id: str
    name: str
    number: int
    path: str


class UnloadAdapter(msgspec.Struct, tag="unload_adapter"):
    """Command: unload an adapter once no running request uses it.

    The frontend does not name the adapter in later submissions.
    """

    number: int


class Trim(msgspec.Struct, tag="trim"):
    """Command: free cached memory. The reply is :class:`TrimResult`."""

    operation_id: str


class AuditQuery(msgspec.Struct, tag="audit"):
    """Query: check the worker's invariants. The reply is :class:`AuditReport`."""

    query_id: str


class DiagnosticQuery(msgspec.Struct, tag="diagnostic"):
    """Query: collect one diagnostic of the worker. The reply is :class:`DiagnosticReport`."""

    query_id: str
    kind: str


class TakeOver(msgspec.Struct, tag="take_over"):
    """Command: claim the KV pool, send Ready and serve. The predecessor has released its memory.

    ``quick`` skips the warm-up of the largest step, because the predecessor served with the same
    sizes. ``handover`` is the field of the predecessor's :class:`StopResult`. A handover requires
    ``quick``, because the warm-up writes to the pool. The predecessor's requests are submitted
    after Ready, followed by :class:`CarryOverComplete`.
    """

    quick: bool = False
    handover: bytes | None = None


class CarryOverComplete(msgspec.Struct, tag="carried"):
    """Message: all carried-over requests are submitted. The reply is :class:`AdoptionResult`.

    The worker frees all blocks of the handover that no request claimed.
    """

    query_id: str


class Stop(msgspec.Struct, tag="stop"):
    """Command: finish the current step, discard its tokens, and release all memory.

    The reply is :class:`StopResult`. With ``hand_over``, the tokens are sent, and the reply has the
    handover of the KV pool. ``sent`` is the time of sending in CLOCK_MONOTONIC seconds. The worker
    exits when the frontend closes the socket.
    """

    hand_over: bool = False
    sent: float | None = None


ToWorker = (
    Submit
    | Abort
    | AbandonedRequests
    | LoadAdapter
    | UnloadAdapter
    | Trim
    | AuditQuery
    | DiagnosticQuery
    | TakeOver
    | CarryOverComplete
    | Stop
)


# ---- from the worker to the frontend


class Hello(msgspec.Struct, tag="hello"):
    """First message of a worker on its connection."""

    epoch: int
    pid: int


class StartupStage(msgspec.Struct, tag="starting"):
    """Message: the worker begins ``stage``, one of the names in ``Ready.stages_s``."""

    stage: str


class Prepared(msgspec.Struct, tag="prepared"):
    """Message: the worker has loaded weights and kernels, and waits for TakeOver.

    ``stages_s`` has the duration of each stage in seconds. ``memory`` is the memory of rank 0, and
    ``others`` has the memory of each other rank.
    """

    epoch: int
    stages_s: dict[str, float] = {}
    memory: ProcessMemory | None = None
    others: list[ProcessMemory] = []


class Ready(msgspec.Struct, tag="ready"):
    """Message: the worker serves.

    ``max_model_len`` limits prompt and output tokens together. ``load_s`` is the time in seconds
    from the fork until now, including the wait for TakeOver. ``stages_s`` has the duration of each
    stage in seconds. ``refusal`` says why the handover was refused; null if it was accepted or
    none was sent.
    """

    epoch: int
    max_model_len: int
    num_blocks: int
    block_size: int
    load_s: float
    stages_s: dict[str, float] = {}
    refusal: HandoverRefusal | None = None


class Logprobs(msgspec.Struct, array_like=True):
    """Log probabilities of the sampled token and of the top tokens, with natural logarithms.

    The values are computed before penalties, bias, grammar and temperature apply. ``top_ids`` and
    ``top`` are in descending order of probability.
    """

    chosen: float
    top_ids: list[int]
    top: list[float]


class FirstTokenStatistics(msgspec.Struct, array_like=True):
    """Statistics of a request at its first token.

    ``queued_s`` is the time in the waiting queue in seconds. ``cached_tokens`` counts the prompt
    tokens that the prefix cache provided.
    """

    queued_s: float
    cached_tokens: int


class Token(msgspec.Struct, array_like=True):
    """One generated token.

    ``finish_reason`` is ``stop`` or ``length`` on the last token, otherwise null. ``started`` is
    set on the first token from this worker. ``attempt`` is the attempt of the submission, because
    tokens of an earlier attempt may still arrive after a resubmission.
    """

    request_id: str
    token_id: int
    finish_reason: str | None = None
    logprobs: Logprobs | None = None
    started: FirstTokenStatistics | None = None
    attempt: int = 0


class Tokens(msgspec.Struct, tag="tokens"):
    """Message: the tokens of one step."""

    step: int
    tokens: list[Token]


class PromptScores(msgspec.Struct, tag="prompt_scores"):
    """Message: log probabilities of prompt tokens from position ``first`` (at least 1) on.

    The arrays contain 4-byte little-endian numbers, token by token. ``chosen`` (float) has the
    prompt token's log probability, and ``ranks`` (int) its rank; 1 is the likeliest. ``top_ids``
    (int) and ``top`` (float) have the top tokens, as many as requested. The messages are sent in
    order, before the request's first token. ``attempt`` is as in :class:`Token`.
    """

    request_id: str
    attempt: int
    first: int
    chosen: bytes
    ranks: bytes
    top_ids: bytes
    top: bytes


class RequestFailure(msgspec.Struct, tag="dropped"):
    """Message: a request ended because of an error that affects no other request.

    ``attempt`` is as in :class:`Token`. ``reason`` is ``invalid``, ``unavailable``, ``deadline`` or
    ``error``. ``param`` names the invalid field of the request, if known.
    """

    request_id: str
    attempt: int
    reason: str
    message: str = ""
    param: str | None = None


class MissingMedia(msgspec.Struct, tag="media_missing"):
    """Message: the receiver cache lacks media of a submission.

    The frontend must submit the request again with all tensors. ``attempt`` is as in
    :class:`Token`.
    """

    request_id: str
    attempt: int
    keys: list[bytes]


class Report(msgspec.Struct, tag="report"):
    """Message: load and memory of the worker, at least once a second, also while idle.

    ``running`` has the IDs of requests that hold KV blocks. A block or token is lost if it is in
    use but no request or cache holds it. Host blocks are null without KV offload, and encoder
    tokens are null without an encoder. ``memory`` is the memory of rank 0, and ``others`` has the
    memory of each other rank. The other fields describe the whole worker. ``capturing`` means that
    decode graphs are still missing.
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
    capturing: bool = False


class AdapterLoadResult(msgspec.Struct, tag="adapter_loaded"):
    """Reply: the adapter was loaded, or ``error`` says why it was not."""

    query_id: str
    number: int
    error: str | None = None


class TrimResult(msgspec.Struct, tag="trimmed"):
    """Reply: the steps of a trim, with the bytes that each step freed."""

    operation_id: str
    steps: list[OperationStep]


class AuditReport(msgspec.Struct, tag="audited"):
    """Reply: the findings of an audit.

    ``idle`` is true if the rules of an idle engine were checked too. ``rules`` has the names of all
    checked rules. ``receiver_keys`` are the media keys in the receiver cache.
    """

    query_id: str
    idle: bool
    rules: list[str]
    findings: list[AuditFinding]
    receiver_keys: list[bytes] = []


class DiagnosticReport(msgspec.Struct, tag="diagnosed"):
    """Reply: the text of one diagnostic."""

    query_id: str
    text: str


class AdoptionResult(msgspec.Struct, tag="adopted"):
    """Reply: the requests in ``request_ids`` continue with the predecessor's keys and values.

    ``refused`` maps the ID of each other request in the handover to the reason.
    """

    query_id: str
    request_ids: list[str]
    refused: dict[str, str]


class StopResult(msgspec.Struct, tag="stopped"):
    """Reply: all memory is released.

    Device bytes are as counted by torch; null on a CPU. ``handover`` is a message of
    :mod:`plimsoll_engine.messages.handover` if requested, and ``refusal`` says why it is missing.
    ``stages_s`` has the duration of each shutdown stage in seconds, beginning when Stop was sent.
    ``sent`` is the time of sending in CLOCK_MONOTONIC seconds.
    """

    device_allocated: int | None = None
    device_baseline: int | None = None
    handover: bytes | None = None
    refusal: HandoverRefusal | None = None
    stages_s: dict[str, float] = {}
    sent: float = 0.0


class WorkerFailure(msgspec.Struct, tag="failed"):
    """Message: the worker cannot continue, and exits.

    ``message`` says what to do. ``permanent`` means that a setting or the checkpoint is invalid, so
    another worker would also fail.
    """

    message: str
    permanent: bool = False


FromWorker = (
    Hello
    | StartupStage
    | Prepared
    | Ready
    | Tokens
    | PromptScores
    | RequestFailure
    | MissingMedia
    | Report
    | AdapterLoadResult
    | TrimResult
    | AuditReport
    | DiagnosticReport
    | AdoptionResult
    | StopResult
    | WorkerFailure
)

_encoder = msgspec.msgpack.Encoder()
to_worker_decoder = msgspec.msgpack.Decoder(ToWorker)
from_worker_decoder = msgspec.msgpack.Decoder(FromWorker)


def encode_frame(message: ToWorker | FromWorker) -> bytes:
    """Return ``message`` encoded and framed."""
    return add_length_prefix(_encoder.encode(message))
