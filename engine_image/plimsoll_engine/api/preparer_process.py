"""Process that prepares request bodies: ``python -m plimsoll_engine.api.preparer_process``.

A body that slows or crashes this process does not affect the frontend's streams.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import resource
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from plimsoll_api import logs
from plimsoll_engine.api import forms, prepare
from plimsoll_engine.api.errors import ApiError
from plimsoll_engine.api.prepare import RequestPreparer
from plimsoll_engine.api.prepare_messages import (
    Outcome,
    PreparationDone,
    PreparationJob,
    PreparationRefused,
    receive_message,
    send_message,
)
from plimsoll_engine.frontend.requests.tokenizer import Tokenizer
from plimsoll_engine.process import host_memory
from plimsoll_engine.process.parent_death import die_with_parent

# Address space that a job may use in addition to that of the idle process.
MAX_JOB_BYTES = 1 << 30
# The process exits after more growth since its startup, and the frontend starts another one.
MAX_GROWTH_BYTES = 64 << 20
# Size of a body above which malloc returns free pages to the kernel after the job.
MIN_TRIM_BODY_BYTES = 1 << 20


def main() -> None:
    """Run one job after the other until the frontend closes the socket."""
    parser = argparse.ArgumentParser(
        prog="plimsoll_engine.api.preparer_process", description=__doc__
    )
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--image-token")
    parser.add_argument("--chat-template", type=Path)
    parser.add_argument("--generation-config", required=True)
    flags = parser.parse_args()
    die_with_parent(flags.parent)
    # The parser of forms warns of what a client sent, which the answer says.
    logs.configure_logging(libraries={"python_multipart": "ERROR"})
    tokenizer = Tokenizer(flags.model, flags.chat_template, flags.generation_config)
    preparer = RequestPreparer(tokenizer, flags.image_token)
    gc.collect()
    gc.freeze()
    _limit_memory()
    baseline = host_memory.read_rss_anon_bytes()
    with socket.socket(fileno=flags.fd) as frontend:
        send_message(frontend, b"ready")
        while True:
            try:
                job = msgspec.msgpack.decode(receive_message(frontend), type=PreparationJob)
                raw = receive_message(frontend)
            except (EOFError, OSError):
                return
            size = len(raw)
            outcome = run_job(preparer, job, raw)
            del raw
            send_message(frontend, msgspec.msgpack.encode(outcome))
            del outcome
            if size >= MIN_TRIM_BODY_BYTES:
                host_memory.trim_malloc()
                now = host_memory.read_rss_anon_bytes()
                if baseline is not None and now is not None and now - baseline > MAX_GROWTH_BYTES:
                    return


def run_job(preparer: RequestPreparer, job: PreparationJob, raw: bytearray) -> Outcome:
    """Run a job, and return its outcome: a refusal if it raises ApiError or MemoryError."""
    work: dict[str, Callable[[], Any]] = {
        "completion": lambda: preparer.prepare_completion(raw, job.context),
        "chat": lambda: preparer.prepare_chat(raw, job.context),
        "chats": lambda: preparer.prepare_chats(raw, job.context),
        "responses": lambda: preparer.prepare_responses(raw, job.context),
        "tokenize": lambda: preparer.tokenize(raw, job.context),
        "detokenize": lambda: preparer.detokenize(raw, job.context),
        "form": lambda: asyncio.run(forms.parse_form(raw, job.content_type)),
    }
    try:
        if job.kind != "form":
            prepare.check_json_values(raw, job.context.max_json_values)
        return PreparationDone(msgspec.Raw(msgspec.msgpack.encode(work[job.kind]())))
    except ApiError as error:
        return PreparationRefused(error.status, str(error), error.param, error.code, error.retry)
    except MemoryError:
        return PreparationRefused(
            413,
            "preparing the body takes too much memory: send less in one request",
            None,
            "body_too_complex",
            False,
        )


def _limit_memory() -> None:
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[0])
    bound = pages * resource.getpagesize() + MAX_JOB_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))


if __name__ == "__main__":
    main()
