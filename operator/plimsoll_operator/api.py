"""The API server as the operator needs it: list, get, server-side apply, delete.

Objects are plain dictionaries on their way in and out. Nothing is read, changed and written back.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio import client, config

from plimsoll_operator.kinds import Kind, Object
from plimsoll_operator.render.names import MANAGER

PAGE = 500


class ApiError(Exception):
    """The API server refused. ``message`` is its own sentence, which names the field."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status, self.reason, self.message = status, reason, message

    @property
    def lasting(self) -> bool:
        """Whether the same request gets the same answer until somebody changes something.

        A field that a type does not have is answered with 500 by server-side apply.
        """
        malformed = self.message.startswith("failed to create typed patch object")
        return malformed or self.status in (400, 403, 404, 422)


class Api:
    """One connection pool. Every call raises :class:`ApiError`, or OSError or TimeoutError where
    the server does not answer within ``timeout_s``. ``writes`` counts by verb and kind."""

    def __init__(self, connection: Any, timeout_s: float) -> None:
        self._client, self._timeout_s = connection, timeout_s
        self.writes: Counter[tuple[str, str]] = Counter()

    @classmethod
    async def connect(cls, kubeconfig: str | None, timeout_s: float) -> Api:
        """Through ``kubeconfig``, else the pod's own account, else the user's default file.

        OSError where the file is missing or names no cluster.
        """
        settings = client.Configuration()
        try:
            if kubeconfig:
                raise config.ConfigException("a file was named")
            config.load_incluster_config(client_configuration=settings)
        except config.ConfigException:
            try:
                await config.load_kube_config(
                    config_file=kubeconfig, client_configuration=settings, persist_config=False
                )
            except config.ConfigException as error:
                raise OSError(f"kubeconfig {kubeconfig or '(default)'}: {error}") from None
        return cls(client.ApiClient(settings), timeout_s)

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.close()

    async def list(self, kind: Kind, namespace: str | None) -> list[Object]:
        """All objects that the operator is concerned with."""
        items: list[Object] = []
        query = {"limit": str(PAGE)} | ({"labelSelector": kind.selector} if kind.selector else {})
        while True:
            page = await self._call("GET", kind.path(namespace), query)
            # Items of a list lack these two.
            about = {"apiVersion": page["apiVersion"], "kind": kind.kind}
            items += [about | item for item in page["items"]]
            token = page["metadata"].get("continue")
            if not token:
                return items
            query["continue"] = token

    async def serves(self, kind: Kind) -> bool:
        """Whether the cluster has this API now."""
        try:
            found = await self._call("GET", kind.group_path)
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return any(one["name"] == kind.plural for one in found["resources"])

    async def probe(self, kind: Kind, namespace: str | None) -> None:
        """Reads at most one object, to know whether reading works."""
        await self._call("GET", kind.path(namespace), {"limit": "1"})

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """The object, None where there is none."""
        try:
            return await self._call("GET", kind.path(namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def apply(self, kind: Kind, item: Object, subresource: str = "") -> Object:
        """Server-side apply: what we name is ours from now on, the rest stays as it is."""
        meta = item["metadata"]
        self.writes["apply", kind.kind] += 1
        return await self._call(
            "PATCH",
            kind.path(meta["namespace"], meta["name"], subresource),
            {"fieldManager": MANAGER, "force": "true", "fieldValidation": "Strict"},
            item,
            "application/apply-patch+yaml",
        )

    async def delete(self, kind: Kind, item: Object) -> None:
        """Deletes exactly what was seen: a Lease taken since then stays."""
        meta = item["metadata"]
        seen = {key: meta[key] for key in ("uid", "resourceVersion")}
        self.writes["delete", kind.kind] += 1
        try:
            await self._call(
                "DELETE",
                kind.path(meta["namespace"], meta["name"]),
                body={"preconditions": seen, "propagationPolicy": "Background"},
            )
        except ApiError as error:
            if error.status not in (404, 409):
                raise

    async def _call(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
    ) -> Object:
        headers = {"Accept": "application/json", "Content-Type": content_type}
        method, url, headers, body, _ = await self._client.param_serialize(
            method, path, header_params=headers, body=body, auth_settings=["BearerToken"]
        )
        url += "?" + urlencode(query) if query else ""
        try:
            answer = await self._client.call_api(
                method, url, headers, body, _request_timeout=self._timeout_s
            )
            data = await answer.read()
        except aiohttp.ClientError as error:
            raise OSError(f"{method} {path}: {error or repr(error)}") from error
        if answer.status >= 400:
            raise _error(answer.status, data)
        found: Object = json.loads(data)
        found.get("metadata", {}).pop("managedFields", None)
        return found


def _error(status: int, data: bytes) -> ApiError:
    try:
        body = json.loads(data)
        return ApiError(status, body.get("reason") or "Unknown", body.get("message") or "")
    except (ValueError, AttributeError):
        return ApiError(status, "Unknown", data[:200].decode(errors="replace"))
