"""Messages between the frontend and its worker, on a Unix stream socket in the run directory.

The worker connects after its fork, and sends :class:`Hello` first. This module must not import
torch, because the frontend imports it.
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

    Attributes:
        text: JSON schema, regular expression, or Lark grammar in llguidance's dialect, by ``kind``;
            empty for ``json_object``.
        field: Name of the request field, for error messages.
        tool_fields: Request field of each schema N of tools, whose rules begin with ``tool_N``.

    """

    kind: Literal["json_object", "json_schema", "regex", "lark"]
    text: str = ""
    field: str = "grammar"
    tool_fields: tuple[str, ...] = ()


class Sampling(msgspec.Struct, array_like=True):
    """Sampling parameters of a request.

    Attributes:
        temperature: 0 means greedy sampling.
        seed: Seed of the random numbers. The number for token i depends only on (seed, i), so a
            carried-over request continues with the same sequence.
        presence_penalty, frequency_penalty: Penalties for tokens in the output.
        repetition_penalty: Penalty for tokens in prompt and output; 1 disables it.
        logit_bias: Value to add to the logit, by token ID.
        min_tokens: Length of the output up to which stop tokens are suppressed.
        logprobs: Number of top log probabilities per output token; None disables them.
        prompt_logprobs: Number of top log probabilities per prompt token; None disables them.
        allowed_token_ids: The only tokens that may be sampled; None allows all.
        bad_words: Token sequences that the output must not contain.
        logprob_token_ids: Tokens whose log probabilities are returned instead of the top tokens'.

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

    Attributes:
        key: Hash of the content and of the processing settings.
        start: Index of the first placeholder token in the prompt.
        length: Number of placeholder tokens; 0 for models with cross-attention.
        tokens: Number of tokens that the encoder output takes in the encoder cache.
        data: Little-endian tensor of ``shape`` and ``dtype``; None if the worker has cached it.
        keep: Whether the worker must cache the tensor.

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
    """Further choice of the request in a :class:`Submit`, with the fields that differ."""

    request_id: str
    seed: int
    output_ids: list[int]
    arrived: float
    attempt: int


class Submit(msgspec.Struct, tag="submit"):
    """Command: run a request, and further ``choices`` of its prompt.

    Attributes:
        output_ids: Tokens that an earlier worker generated. They count towards
            ``sampling.max_tokens``.
        priority: Requests with a lower number run first.
        arrived: Time of arrival in CLOCK_MONOTONIC seconds.
        deadline_s: Seconds after ``arrived`` at which the request fails.
        cache_salt: Only requests with equal salts share cached prefixes.
        media: Images and audio clips, in the order of the prompt.
        forget: Keys of cached media to remove before ``media`` is cached.
        adapter: Number of a loaded adapter; 0 for none.
        attempt: Number of the request's submission. Each reply repeats it.

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
    """Message: the requests that the frontend has aborted but the worker still runs.

    Each message replaces the previous one.
    """

    request_ids: list[str]


class LoadAdapter(msgspec.Struct, tag="load_adapter"):
    """Command: load the LoRA adapter in the folder ``path``.

    Later submissions name the adapter by its ``number``, which is never reused.
    """

    query_id: str
    name: str
    number: int
    path: str


class UnloadAdapter(msgspec.Struct, tag="unload_adapter"):
    """Command: unload an adapter once no running request uses it."""

    number: int


class Trim(msgspec.Struct, tag="trim"):
    """Command: free cached memory. The reply is :class:`TrimResult`."""

    operation_id: str


class AuditQuery(msgspec.Struct, tag="audit"):
    """Query: check the worker's invariants. The reply is :class:`AuditReport`."""

    query_id: str


class DiagnosticQuery(msgspec.Struct, tag="diagnostic"):
    """Query: collect one diagnostic of the worker."""

    query_id: str
    kind: str


class TakeOver(msgspec.Struct, tag="take_over"):
    """Command: claim the KV pool, send Ready and serve.

    Attributes:
        quick: Whether to skip the warm-up of the largest step.
        handover: The ``handover`` in the predecessor's :class:`StopResult`. It requires ``quick``,
            because the warm-up writes to the pool.

    """

    quick: bool = False
    handover: bytes | None = None


class CarryOverComplete(msgspec.Struct, tag="carried"):
    """Message: all carried-over requests are submitted.

    The worker then frees the blocks of the handover that no request uses.
    """

    query_id: str


class Stop(msgspec.Struct, tag="stop"):
    """Command: finish the current step and release all memory.

    If ``hand_over``, the reply has the handover of the KV pool; otherwise, the step's tokens are
    discarded. ``sent`` is in CLOCK_MONOTONIC seconds.
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
    """Message: the worker begins ``stage``, which is a key of ``Ready.stages_s``."""

    stage: str


class Prepared(msgspec.Struct, tag="prepared"):
    """Message: the worker has loaded weights and kernels, and waits for TakeOver.

    ``memory`` is the memory of rank 0, and ``others`` that of the other ranks.
    """

    epoch: int
    stages_s: dict[str, float] = {}
    memory: ProcessMemory | None = None
    others: list[ProcessMemory] = []


class Ready(msgspec.Struct, tag="ready"):
    """Message: the worker serves.

    Attributes:
        max_model_len: Maximum number of prompt and output tokens together.
        load_s: Seconds since the fork, including the wait for TakeOver.
        stages_s: Duration of each startup stage in seconds.
        refusal: Reason why the handover was refused; None if it was accepted or none was sent.

    """

    epoch: int
    max_model_len: int
    num_blocks: int
    block_size: int
    load_s: float
    stages_s: dict[str, float] = {}
    refusal: HandoverRefusal | None = None


class Logprobs(msgspec.Struct, array_like=True):
    """Natural log probabilities of the sampled token and of the top tokens.

    They are computed before penalties, bias, grammar and temperature apply. The top tokens are in
    descending order.
    """

    chosen: float
    top_ids: list[int]
    top: list[float]


class FirstTokenStatistics(msgspec.Struct, array_like=True):
    """Seconds in the waiting queue, and prompt tokens from the prefix cache, of a request."""

    queued_s: float
    cached_tokens: int


class Token(msgspec.Struct, array_like=True):
    """One generated token.

    Attributes:
        finish_reason: ``stop`` or ``length`` on the last token, otherwise None.
        started: Set on the first token from this worker.
        attempt: That of the :class:`Submit`. Tokens of an earlier attempt may arrive late.

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
    """Message: log probabilities of prompt tokens from index ``first`` (at least 1) on.

    The messages of a request are sent in order, before its first token. Arrays are little-endian.

    Attributes:
        chosen: Log probability of each prompt token, as float32.
        ranks: Rank of each prompt token, as int32; 1 is the likeliest.
        top_ids: IDs of the top tokens for each prompt token, as int32.
        top: Log probabilities of ``top_ids``, as float32.

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

    ``reason`` is ``invalid``, ``unavailable``, ``deadline`` or ``error``. ``param`` names the
    invalid field of the request, if known.
    """

    request_id: str
    attempt: int
    reason: str
    message: str = ""
    param: str | None = None


class MissingMedia(msgspec.Struct, tag="media_missing"):
    """Message: the worker lacks media of a submission. Submit it again with all tensors."""

    request_id: str
    attempt: int
    keys: list[bytes]


class Report(msgspec.Struct, tag="report"):
    """Message: load and memory of the worker, at least once a second.

    A block or token is lost if it is in use but no request or cache holds it.

    Attributes:
        memory: Memory of rank 0.
        others: Memory of the other ranks.
        host_blocks_total, host_blocks_lost: None without KV offload.
        encoder_tokens_total, encoder_tokens_lost: None without an encoder.
        running: IDs of the requests that hold KV blocks.
        capturing: Whether CUDA graphs for decode steps are still missing.

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
    """Reply: the adapter was loaded, or ``error`` says why not."""

    query_id: str
    number: int
    error: str | None = None


class TrimResult(msgspec.Struct, tag="trimmed"):
    """Reply: the steps of a trim, with the bytes that each step freed."""

    operation_id: str
    steps: list[OperationStep]


class AuditReport(msgspec.Struct, tag="audited"):
    """Reply: the findings of an audit.

    Attributes:
        idle: Whether the worker was idle, so that the rules of an idle engine were checked too.
        rules: Names of all checked rules.
        receiver_keys: Keys of the media that the worker has cached.

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
    """Reply: the successor continues with the keys and values of ``request_ids``.

    ``refused`` maps the ID of each other request in the handover to the reason.
    """

    query_id: str
    request_ids: list[str]
    refused: dict[str, str]


class StopResult(msgspec.Struct, tag="stopped"):
    """Reply: all memory is released.

    Attributes:
        device_allocated: Bytes that torch still has allocated on all devices; None on a CPU.
        device_baseline: Bytes that torch had allocated before it loaded the model.
        handover: Handover message (:mod:`plimsoll_engine.messages.handover`), if requested.
        refusal: Reason why the handover is missing.
        stages_s: Duration of each shutdown stage in seconds, since Stop was sent.
        sent: Time of sending in CLOCK_MONOTONIC seconds.

    """

    device_allocated: int | None = None
    device_baseline: int | None = None
    handover: bytes | None = None
    refusal: HandoverRefusal | None = None
    stages_s: dict[str, float] = {}
    sent: float = 0.0


class WorkerFailure(msgspec.Struct, tag="failed"):
    """Message: the worker cannot continue, and exits.

    If ``permanent`` is True, another worker would fail as well.
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
    """Return ``message`` as an encoded frame."""
    return add_length_prefix(_encoder.encode(message))
