"""Settings of ``python -m plimsoll_engine serve``: flags and environment."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

import msgspec

from plimsoll_api.listening import ALL_ADDRESSES
from plimsoll_api.names import ADMIN_PORT, TOKEN_FILE
from plimsoll_api.units import parse_bytes
from plimsoll_engine import injection
from plimsoll_engine.download import source
from plimsoll_engine.errors import SettingsError, UsageError
from plimsoll_engine.http import api_flags
from plimsoll_engine.http import flags as http_settings
from plimsoll_engine.http.api_flags import ApiSettings
from plimsoll_engine.http.flags import HttpSettings
from plimsoll_engine.messages import lora_modules, speculative
from plimsoll_engine.messages.lora_modules import LoraModule
from plimsoll_engine.messages.speculative import Speculative
from plimsoll_engine.messages.zygote_ipc import DEFAULT_MEDIA_CACHE_BYTES, WorkerConfig

INJECT_VARIABLE = "PLIMSOLL_INJECT"
# Names of vLLM. All select the format in api/reasoning.py.
REASONING_PARSERS = "qwen3", "deepseek_r1"
WORKER_SOCKET_NAME = "worker.sock"
WEIGHTS_SOCKET_NAME = "weights.sock"
# File in the run directory with the engine's ports.
PORTS_FILE_NAME = "engine.json"


# Requests with a lower number run first. The default is 0, so clients can only lower the priority.
DEFAULT_PRIORITY_RANGE = 0, (1 << 31) - 1


class StandbyPolicy(StrEnum):
    """When to keep a standby worker, which is prepared to replace the serving worker.

    With ``on-suspicion``, it exists while a client of the admin API holds a lease.
    """

    NEVER = "never"
    ALWAYS = "always"
    ON_SUSPICION = "on-suspicion"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the engine.

    Attributes:
        max_queued: Maximum number of unanswered requests, including running ones.
        priority_range: Lowest and highest priority that a request may have. Priority 0 is always
            valid.
        priority_keys: Line numbers of the API keys in ``api_key_file`` that may set a priority;
            None allows all keys.
        lora_modules: Adapters to load at startup, by name.

    """

    worker: WorkerConfig
    served_model_name: str
    host: str = ALL_ADDRESSES
    port: int = 8000
    admin_port: int = ADMIN_PORT
    max_queued: int = 1024
    priority_range: tuple[int, int] = DEFAULT_PRIORITY_RANGE
    priority_keys: list[int] | None = None
    api_key_file: Path | None = None
    startup_timeout_s: float = 600.0
    shutdown_timeout_s: float = 30.0
    reasoning_parser: str | None = None
    standby_worker: StandbyPolicy = StandbyPolicy.NEVER
    lora_modules: dict[str, LoraModule] = {}
    http: HttpSettings = HttpSettings()
    api: ApiSettings = ApiSettings()

    @property
    def model(self) -> Path:
        """Folder of the checkpoint."""
        return Path(self.worker.model)

    @property
    def run_dir(self) -> Path:
        """Folder of the sockets, and of the files for other processes of the pod."""
        return Path(self.worker.run_dir)

    @property
    def token_file(self) -> Path:
        """File with the admin token. In a pod, the supervisor writes it."""
        return self.run_dir / TOKEN_FILE


def parse_port(text: str) -> int:
    """Parse a TCP port for argparse. 0 means any free port."""
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(
            f"must be a port from 0 (any free port) to 65535, got {text!r}"
        )
    return int(text)


def _parse_positive_int(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def _parse_priority_range(text: str) -> tuple[int, int]:
    try:
        lowest, highest = (int(part) for part in text.split(":"))
    except ValueError:
        lowest, highest = 1, 0
    if not -(1 << 31) <= lowest <= highest < 1 << 31:
        raise argparse.ArgumentTypeError(
            "must be a range MIN:MAX with MIN at most MAX, each within 32 bits, such as "
            f"-10:10, got {text!r}"
        )
    return lowest, highest


def _parse_byte_size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be a size in bytes or with a unit, such as 8Gi, got {text!r}"
        ) from None


def parse_positive_seconds(text: str) -> float:
    """Parse a number of seconds for argparse, greater than 0 and at most one day."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 86_400:
        raise argparse.ArgumentTypeError(
            f"must be a number of seconds greater than 0 and at most 86400, got {text!r}"
        )
    return value


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``python -m plimsoll_engine serve`` to ``parser``."""
    add = parser.add_argument
    add(
        "--model",
        required=True,
        metavar="DIR",
        help="checkpoint directory, or hf://ORG/NAME[@REVISION]",
    )
    add(
        "--served-model-name",
        metavar="NAME",
        help="model name in the API; default: the directory's name, or ORG/NAME",
    )
    add(
        "--run-dir",
        required=True,
        type=Path,
        metavar="DIR",
        help="directory for sockets, admin token and stack traces",
    )
    add("--host", default=ALL_ADDRESSES, help="address of the serving API; default: all addresses")
    add(
        "--port",
        default=8000,
        type=parse_port,
        help="port of the serving API; 0 selects a free port",
    )
    add(
        "--admin-port",
        default=ADMIN_PORT,
        type=parse_port,
        help="port of the admin API, on 127.0.0.1 only",
    )
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16"),
        help="dtype of weights and activations; default: the checkpoint's")  # fmt: skip
    add("--kv-cache-dtype", default="auto", choices=("auto", "fp8", "fp8_e4m3"),
        help="dtype of keys and values in the KV pool; default: the model's")  # fmt: skip
    add("--device", default="auto", choices=("auto", "cpu", "cuda"),
        help="device of the model; default: a GPU if one is available")  # fmt: skip
    add(
        "--max-num-seqs",
        type=_parse_positive_int,
        metavar="N",
        help="maximum number of requests in a batch",
    )
    add(
        "--max-model-len",
        type=_parse_positive_int,
        metavar="N",
        help="maximum number of prompt and output tokens together",
    )
    add(
        "--max-num-batched-tokens",
        type=_parse_positive_int,
        metavar="N",
        help="maximum number of tokens in one step",
    )
    add(
        "--block-size", type=_parse_positive_int, metavar="N", help="number of tokens in a KV block"
    )
    add(
        "--num-blocks",
        type=_parse_positive_int,
        metavar="N",
        help="number of blocks in the KV pool",
    )
    add("--kv-offload-bytes", default=0, type=_parse_byte_size, metavar="SIZE",
        help="host memory for evicted KV blocks, such as 8Gi; default: none")  # fmt: skip
    add(
        "--encoder-cache-tokens",
        type=_parse_positive_int,
        metavar="N",
        help="size of the encoder cache in tokens of encoder output; default: chosen at startup",
    )
    add(
        "--media-cache-mib", default=DEFAULT_MEDIA_CACHE_BYTES >> 20, type=_parse_positive_int,
        metavar="MIB",
        help=
            "size of each cache for processed images and audio: one in the frontend, one in the "
            "worker",
    )  # fmt: skip
    add("--tensor-parallel-size", default=1, type=_parse_positive_int, metavar="N",
        help="number of GPUs on this host that share the model")  # fmt: skip
    add("--reasoning-parser", choices=REASONING_PARSERS,
        help="parser that separates reasoning from the answer in chats; default: none")  # fmt: skip
    api_flags.add_flags(parser)
    add(
        "--enable-lora",
        action="store_true",
        help="enable LoRA adapters; their API reads local folders",
    )
    add(
        "--max-loras",
        default=4,
        type=_parse_positive_int,
        metavar="N",
        help="maximum number of loaded adapters",
    )
    add(
        "--max-lora-rank",
        default=64,
        type=_parse_positive_int,
        metavar="R",
        help="maximum rank of an adapter",
    )
    add("--lora-modules", default=[], nargs="+", metavar="NAME=PATH",
        help="adapters to load at startup, as NAME=PATH or vLLM's JSON objects")  # fmt: skip
    add("--standby-worker", default=StandbyPolicy.NEVER.value,
        choices=[one.value for one in StandbyPolicy],
        help="keep a prepared worker for the next restart; on-suspicion: while the supervisor"
        " expects a restart; default: never")  # fmt: skip
    add("--speculative-config", metavar="JSON",
        help="speculative decoding, with the JSON fields of vLLM's flag; default: off")  # fmt: skip
    add(
        "--max-queued",
        default=1024,
        type=_parse_positive_int,
        metavar="N",
        help="maximum number of unanswered requests; further requests get status 429",
    )
    add("--priority-range", default=DEFAULT_PRIORITY_RANGE, type=_parse_priority_range,
        metavar="MIN:MAX",
        help="range MIN:MAX of the priority in requests; lower numbers run first; default: "
             "0:2147483647")  # fmt: skip
    add(
        "--priority-keys",
        nargs="+",
        type=_parse_positive_int,
        metavar="N",
        help="line numbers of the keys in --api-key-file that may set priorities; default: all",
    )
    add(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="file of API keys for /v1, one per line; default: no authentication",
    )
    http_settings.add_flags(parser, _parse_positive_int, _parse_byte_size, parse_positive_seconds)
    add("--startup-timeout", default=600.0, type=parse_positive_seconds, metavar="S",
        help="time in seconds for a worker to start; default: 600")  # fmt: skip
    add("--shutdown-timeout", default=30.0, type=parse_positive_seconds, metavar="S",
        help="time in seconds for running requests to finish at shutdown; default: 30")  # fmt: skip
    add(
        "--allow-inject",
        action="store_true",
        help=f"apply the faults in {INJECT_VARIABLE}; for tests only",
    )


def create_settings(
    flags: argparse.Namespace, environ: Mapping[str, str] | None = None
) -> Settings:
    """Return the settings that ``flags`` and ``environ`` define. Raises UsageError."""
    environ = os.environ if environ is None else environ
    inject = environ.get(INJECT_VARIABLE, "")
    if inject and not flags.allow_inject:
        raise UsageError(
            f"{INJECT_VARIABLE} is set, which injects faults: unset it, or add --allow-inject "
            "for a test"
        )
    try:
        injection.check_faults(inject)
    except SettingsError as error:
        raise UsageError(str(error)) from None
    try:
        flags.run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot create --run-dir {flags.run_dir}: {error.strerror}; use a writable directory"
        ) from None
    if os.statvfs(flags.run_dir).f_flag & os.ST_RDONLY:
        raise UsageError(f"--run-dir {flags.run_dir} is on a read-only volume: mount it writable")
    if not os.access(flags.run_dir, os.W_OK | os.X_OK):
        raise UsageError(
            f"--run-dir {flags.run_dir} is not writable by uid {os.getuid()}: change its owner "
            "or mode"
        )
    run_dir = flags.run_dir.resolve()
    # sun_path holds 108 bytes with its terminator (unix(7)).
    if len(os.fsencode(run_dir / WEIGHTS_SOCKET_NAME)) > 107:
        raise UsageError(
            f"--run-dir {run_dir} is too long for the path of a Unix socket (107 bytes): use "
            "a shorter path"
        )
    try:
        model = source.fetch_folder(flags.model).resolve()
        name = flags.served_model_name or source.make_default_model_name(flags.model)
    except source.SourceError as error:
        raise UsageError(f"--model {flags.model}: {error}") from None
    _check_checkpoint(model)
    modules = _parse_lora_modules(flags, name)
    worker = WorkerConfig(
        model=str(model),
        run_dir=str(run_dir),
        socket=str(run_dir / WORKER_SOCKET_NAME),
        weights=str(run_dir / WEIGHTS_SOCKET_NAME),
        dtype=flags.dtype,
        kv_cache_dtype=flags.kv_cache_dtype,
        device=flags.device,
        max_num_seqs=flags.max_num_seqs,
        max_model_len=flags.max_model_len,
        max_num_batched_tokens=flags.max_num_batched_tokens,
        block_size=flags.block_size,
        num_blocks=flags.num_blocks,
        kv_offload_bytes=flags.kv_offload_bytes,
        inject=inject,
        encoder_cache_tokens=flags.encoder_cache_tokens,
        media_cache_bytes=flags.media_cache_mib << 20,
        tensor_parallel_size=flags.tensor_parallel_size,
        max_loras=flags.max_loras if flags.enable_lora else 0,
        max_lora_rank=flags.max_lora_rank,
        speculative=_parse_speculative(flags, model),
    )
    return Settings(
        worker=worker,
        served_model_name=name,
        host=flags.host,
        port=flags.port,
        admin_port=flags.admin_port,
        max_queued=flags.max_queued,
        priority_range=flags.priority_range,
        priority_keys=_parse_priority_keys(flags),
        api_key_file=flags.api_key_file,
        startup_timeout_s=flags.startup_timeout,
        shutdown_timeout_s=flags.shutdown_timeout,
        reasoning_parser=flags.reasoning_parser,
        lora_modules=modules,
        standby_worker=StandbyPolicy(flags.standby_worker),
        http=http_settings.create_settings(flags),
        api=api_flags.create_settings(flags),
    )


def _parse_speculative(flags: argparse.Namespace, model: Path) -> Speculative | None:
    if flags.speculative_config is None:
        return None
    try:
        found = speculative.parse_speculative(flags.speculative_config)
    except ValueError as error:
        raise UsageError(f"--speculative-config: {error}") from None
    if found.model is None:
        return found
    where = f"the draft model {found.model} of --speculative-config"
    if flags.tensor_parallel_size > 1:
        raise UsageError(
            f"{where} supports only one GPU: use prompt lookup, or remove "
            f"--tensor-parallel-size {flags.tensor_parallel_size}"
        )
    try:
        draft = source.fetch_folder(found.model).resolve()
        _check_checkpoint(draft)
    except (source.SourceError, UsageError) as error:
        raise UsageError(f"{where}: {error}") from None
    try:
        same = _read_tokens(draft) == _read_tokens(model)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    if not same:
        raise UsageError(
            f"{where} has another tokenizer.json than --model: use a draft model with the "
            "same tokens"
        )
    return msgspec.structs.replace(found, model=str(draft))


def _read_tokens(checkpoint: Path) -> tuple[object, object]:
    # Vocabulary and added tokens.
    file = checkpoint / "tokenizer.json"
    try:
        content = json.loads(file.read_bytes())
        return content.get("model"), content.get("added_tokens")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise UsageError(f"cannot read {file}: {error}") from None


def _parse_priority_keys(flags: argparse.Namespace) -> list[int] | None:
    keys: list[int] | None = flags.priority_keys
    if keys is not None and flags.api_key_file is None:
        raise UsageError(
            "--priority-keys selects lines of --api-key-file, which is missing: add --api-key-file"
        )
    return keys


def _parse_lora_modules(flags: argparse.Namespace, served_model_name: str) -> dict[str, LoraModule]:
    if flags.enable_lora and flags.tensor_parallel_size > 1:
        raise UsageError(
            "--enable-lora supports only one GPU: remove --enable-lora or "
            f"--tensor-parallel-size {flags.tensor_parallel_size}"
        )
    if flags.lora_modules and not flags.enable_lora:
        raise UsageError("--lora-modules requires --enable-lora: add --enable-lora")
    found: dict[str, LoraModule] = {}
    for text in flags.lora_modules:
        try:
            module = lora_modules.parse_lora_module(text)
        except ValueError as error:
            raise UsageError(f"--lora-modules {text}: {error}") from None
        name = module.name
        if name in found or name == served_model_name:
            raise UsageError(
                f"--lora-modules {text}: the name {name} is already used: choose another name"
            )
        if not os.path.isdir(module.path):
            raise UsageError(
                f"--lora-modules {text}: the folder {module.path} does not exist or cannot be read;"
                " use the folder of an adapter"
            )
        found[name] = msgspec.structs.replace(module, path=str(Path(module.path).resolve()))
    if len(found) > flags.max_loras:
        raise UsageError(
            f"--lora-modules has {len(found)} adapters, but --max-loras is "
            f"{flags.max_loras}: raise --max-loras or remove adapters"
        )
    return found


def _check_checkpoint(model: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        if not (model / name).is_file():
            raise UsageError(f"--model {model} has no {name}: use a checkpoint directory")
    try:
        json.loads((model / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read config.json of --model {model}: {error}") from None
