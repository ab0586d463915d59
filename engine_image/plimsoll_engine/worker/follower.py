"""Entry point of the ranks above 0."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from typing import NoReturn

import msgspec
import torch

from plimsoll_engine.distributed.group import Shard
from plimsoll_engine.distributed.link import LeaderConnection, LeaderLostError
from plimsoll_engine.messages import rank_ipc
from plimsoll_engine.messages.weight_ipc import MappingLostError
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_engine.process.stacks import write_stacks_on_sigusr1
from plimsoll_engine.process.threads import count_cores_per_process
from plimsoll_engine.worker.lifecycle import CoreLifecycle
from plimsoll_engine.worker.main import PERMANENT_ERRORS
from plimsoll_engine.worker.rank_loop import CommandFailedError, Follower

log = logging.getLogger(__name__)

# If this rank exited at once, its exit would look like the cause. Rank 0 reports the cause first.
FAILURE_REPORT_WAIT_S = 5.0
# Rank 0 exits within this time after its final message.
LEADER_EXIT_TIMEOUT_S = 60.0


def run(config: WorkerConfig, epoch: int, rank: int) -> int:
    """Run a rank in a newly forked process, and return its exit status."""
    write_stacks_on_sigusr1(config.run_dir, "worker")
    size = config.tensor_parallel_size
    torch.set_num_threads(count_cores_per_process(size))
    try:
        link = LeaderConnection(config.run_dir, epoch, Shard(rank, size))
        lifecycle = CoreLifecycle(config, ranks=link)
        try:
            lifecycle.prepare()
            link.send(rank_ipc.RankReady())
            Follower(lifecycle, link).serve()
        except LeaderLostError:
            raise
        except CommandFailedError as error:
            return _report_failure(
                link, rank, str(error), FAILURE_REPORT_WAIT_S if error.expects_reply else 0.0
            )
        except PERMANENT_ERRORS as error:
            return _report_failure(link, rank, str(error), FAILURE_REPORT_WAIT_S, is_permanent=True)
        except MappingLostError as error:
            return _report_failure(link, rank, str(error), FAILURE_REPORT_WAIT_S)
        except Exception as error:
            log.exception("the worker failed", extra={"rank": rank})
            return _report_failure(
                link, rank, f"{type(error).__name__}: {error}", FAILURE_REPORT_WAIT_S
            )
        link.wait_until_closed(LEADER_EXIT_TIMEOUT_S)
    except LeaderLostError as error:
        # Release nothing: only the exit of this process ends a kernel that waits for rank 0.
        log.error("%s", error, extra={"rank": rank})
        return 1
    return 0


def _report_failure(
    link: LeaderConnection, rank: int, message: str, wait_s: float, is_permanent: bool = False
) -> int:
    log.error("%s", message, extra={"rank": rank})
    with contextlib.suppress(LeaderLostError):
        link.send(rank_ipc.RankError(message, is_permanent))
        link.wait_until_closed(wait_s)
    return 1


def main() -> NoReturn:
    """Run a rank above 0 until rank 0 has exited."""
    parser = argparse.ArgumentParser(prog="plimsoll_engine.worker.follower")
    parser.add_argument("--config", required=True, help="WorkerConfig of rank 0 as JSON")
    parser.add_argument("--rank", required=True, type=int)
    parser.add_argument("--epoch", default=1, type=int)
    flags = parser.parse_args()
    config = msgspec.json.decode(flags.config, type=WorkerConfig)
    status = run(config, flags.epoch, flags.rank)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # skips library clean-up that might wait for a lost rank


if __name__ == "__main__":
    main()
