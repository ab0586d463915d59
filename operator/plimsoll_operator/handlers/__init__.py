"""Handlers that kopf calls, with a module for each kind.

Each handler stores the object of an event and queues its service or policy for a reconciler.
Policies have no handler, because ``runtime/watches.py`` watches them.
"""

from plimsoll_operator.handlers import (
    inference_service,
    leak_incident,
    owned,
    pod,
)

__all__ = ["inference_service", "leak_incident", "owned", "pod"]
