"""Memory owners of an engine core.

If you add a component that holds memory, add it here and nowhere else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from plimsoll_api.admin import MemoryKind
from plimsoll_engine.process.owners import FlushAction, Owner

if TYPE_CHECKING:
    from plimsoll_engine.core.engine_core import EngineCore

HOST = MemoryKind.HOST


def create_owners(engine: EngineCore) -> list[Owner]:
    """Return the memory owners of ``engine`` in opening order, so the last one is closed first."""
    runner, pool, receiver = engine.runner, engine.pool, engine.receiver
    grammars, scheduler = engine.grammars, engine.scheduler
    owners = runner.list_owners()
    tensors = owners[0].kind
    draft_model = None if engine.speculation is None else engine.speculation.draft_model
    if draft_model is not None:
        owners += draft_model.forward.list_owners("draft_kv_pool")
    if tensors is MemoryKind.DEVICE:
        forwards = [runner] if draft_model is None else [runner, draft_model.forward]
        owners.append(
            Owner(
                name="cuda_graphs", kind=tensors,
                nbytes=lambda: sum(forward.graph_bytes for forward in forwards),
            )
        )  # fmt: skip
    owners.append(
        Owner(
            name="prefix_cache",
            kind=HOST,
            nbytes=pool.compute_index_bytes,
            bound=pool.max_index_bytes,
            checks={
                "kv_blocks_add_up": pool.find_problems,
                "prefix_cache_keys_equal": pool.prefix.find_problems,
            },
            flush=FlushAction(
                "cached KV blocks",
                lambda: pool.num_cached * (runner.kv_bytes // pool.num_blocks),
                engine.reset_prefix_cache,
            ),
            close=pool.reset_prefix_cache,
        )
    )
    if (adapters := runner.adapters) is not None:
        owners.append(
            Owner(
                name="lora_adapters",
                kind=tensors,
                nbytes=lambda: adapters.bytes,
                bound=adapters.bytes_bound,
                checks={
                    "adapters_are_held": lambda: adapters.find_problems(
                        [r.adapter for r in engine.requests.values() if r.adapter is not None]
                    )
                },
            )
        )
    if (outputs := runner.outputs) is not None and (cache := scheduler.encoder) is not None:
        owners.append(
            Owner(
                name="receiver_cache",
                kind=HOST,
                nbytes=lambda: receiver.bytes,
                bound=receiver.capacity,
                checks={"receiver_cache_adds_up": receiver.find_problems},
                flush=FlushAction("cached media", lambda: receiver.bytes, receiver.clear),
                close=receiver.clear,
            )
        )
        owners.append(
            Owner(
                name="encoder_cache",
                kind=tensors,
                nbytes=lambda: outputs.nbytes,
                bound=cache.budget * outputs.bytes_per_token,
                checks={
                    "encoder_outputs_are_known": lambda: (
                        cache.find_problems(request.request_id for request in scheduler.running)
                        + outputs.find_problems(cache.list_known_keys())
                    )
                },
            )
        )
    if (offload := scheduler.offload) is not None:
        owners.append(
            Owner(
                name="kv_offload",
                kind=HOST,
                nbytes=lambda: offload.copies.nbytes,
                bound=offload.copies.nbytes,
                checks={
                    "offload_adds_up": offload.find_problems,
                    "transfers_end": offload.find_stuck_transfers,
                },
                close=offload.close,
            )
        )
    owners.append(
        Owner(
            name="grammar_cache",
            kind=HOST,
            nbytes=lambda: grammars.bytes,
            bound=grammars.bytes_bound,
            flush=FlushAction("compiled grammars", lambda: grammars.bytes, grammars.flush),
            close=grammars.close,
        )
    )
    owners.append(Owner(name="requests", kind=HOST, nbytes=engine.count_request_bytes))
    return owners
