"""A KV connector whose remote prefill never comes; only for the conformance suite.

The decode half of a disaggregated vLLM gives a request its blocks, and waits for another server to
fill them. Where that server is gone, the blocks stay the request's, also after its client has left:
vLLM may not give them to others while somebody might still write to them. Requests ask for it with
``kv_transfer_params={"lost": true}``; all others are computed here.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)


class LostPrefill(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM is elsewhere
    """Never says that a transfer has finished."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)

    # ---- in the scheduler

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if not (request.kv_transfer_params or {}).get("lost"):
            return 0, False
        return len(request.prompt_token_ids) - 1 - num_computed_tokens, True

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    # ---- in the worker

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *_: Any, **__: Any) -> None: ...

    def wait_for_save(self) -> None: ...
