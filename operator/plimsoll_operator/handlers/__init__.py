"""kopf's handlers, one file per kind. Each stores an event and queues its service or policy.

Policies are watched without kopf, by every replica: ``runtime/watches.py``.

The reconciles are in ``controllers``.
"""

from plimsoll_operator.handlers import (
    inference_service,
    leak_incident,
    owned,
    pod,
)

__all__ = ["inference_service", "leak_incident", "owned", "pod"]
