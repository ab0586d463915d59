"""Where a package of faults may change the frontend. Without one nothing changes."""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll_engine import injection
from plimsoll_engine.frontend.observability.metrics import Metrics
from plimsoll_engine.frontend.requests.request_log import RequestLog
from plimsoll_engine.frontend.requests.tokenizer import Tokenizer


class FrontendHooks:
    """Called once, while the frontend is put together. ``names`` are those of the faults."""

    names: Sequence[str] = ()

    def tokenizer(self, sound: Tokenizer) -> Tokenizer:
        """Return the tokenizer to use."""
        return sound

    def request_log(self, sound: RequestLog) -> RequestLog:
        """Return the request log to use."""
        return sound

    def metrics(self, sound: Metrics) -> Metrics:
        """Return the metrics to use."""
        return sound


def frontend_hooks(text: str) -> FrontendHooks:
    """Return the hooks of the faults in ``text``, the value of ``PLIMSOLL_INJECT``."""
    hooks: FrontendHooks = injection.load("frontend")(text) if text else FrontendHooks()
    return hooks
