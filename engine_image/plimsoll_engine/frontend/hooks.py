"""Extension points for fault injection in the frontend."""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll_engine import injection
from plimsoll_engine.frontend.observability.metrics import Metrics
from plimsoll_engine.frontend.requests.request_log import RequestLog
from plimsoll_engine.frontend.requests.tokenizer import Tokenizer


class FrontendHooks:
    """Factories that a fault package overrides. By default, each returns its argument."""

    names: Sequence[str] = ()  # of the injected faults

    def create_tokenizer(self, default: Tokenizer) -> Tokenizer:
        """Return the tokenizer that the engine uses."""
        return default

    def create_request_log(self, default: RequestLog) -> RequestLog:
        """Return the request log that the engine uses."""
        return default

    def create_metrics(self, default: Metrics) -> Metrics:
        """Return the metrics that the engine uses."""
        return default


def create_frontend_hooks(faults: str) -> FrontendHooks:
    """Return the hooks that inject ``faults``, the value of ``PLIMSOLL_INJECT``."""
    hooks: FrontendHooks = (
        injection.load_entry_point("frontend")(faults) if faults else FrontendHooks()
    )
    return hooks
