"""kopf's handlers, one module per kind. Each handler stores an object and queues its owner.

Every replica watches policies without kopf: ``runtime/watches.py``. The reconcilers are in
``controllers``.
"""

from plimsoll_operator.handlers import (
    inference_service,
    leak_incident,
    owned,
    pod,
)

__all__ = ["inference_service", "leak_incident", "owned", "pod"]
