"""The status of a service or a policy, applied on its subresource."""

from __future__ import annotations

from plimsoll_operator.kinds import Kind, Object
from plimsoll_operator.runtime.cache import Store
from plimsoll_operator.runtime.client import Api, ApiError


async def write_status(api: Api, store: Store, kind: Kind, item: Object, wanted: Object) -> bool:
    """Give ``item`` the status ``wanted``; return False if it was deleted meanwhile.

    ApiError where the API server refuses.
    """
    meta = item["metadata"]
    body = {
        "apiVersion": item["apiVersion"],
        "kind": item["kind"],
        "metadata": {"name": meta["name"], "namespace": meta["namespace"]},
        "status": wanted,
    }
    try:
        store.put(await api.apply(kind, body, "status"))
    except ApiError as error:
        if error.status != 404:
            raise
        return False
    return True
